"""The report of a run that goes on: this machine only, and the version changes with the run."""

import http.client
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from qtrain.core.errors import UserError
from qtrain.train.log.report.serve import HOST, ReportServer
from tests.train.log.report.pages import Page, records, write_run


@pytest.fixture
def served(tmp_path) -> Iterator[ReportServer]:
    with ReportServer(write_run(tmp_path / "run", records(3), {"n_steps": 9}), 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server: ReportServer, path: str, host: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection(HOST, server.server_port, timeout=20)
    connection.request("GET", path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_the_page_follows_the_run(served):
    status, text = get(served, "/")
    page = Page(text)
    assert status == 200 and "3 of 9" in page.text and "connect-src 'self'" in text
    (version,) = (value for status, value in [get(served, "/version")])
    assert f'data-live="{version}"' in text
    with (Path(served.run_dir) / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 1.0}\n{"step": 5, "lo')
    assert get(served, "/version")[1] != version
    assert "4 of 9" in Page(get(served, "/")[1]).text


def test_nothing_else_is_served(served):
    assert served.server_address[0] == "127.0.0.1"
    for path in ("/config.json", "/../run/config.json", "//etc/passwd", "/report.html", "/?x=1"):
        assert get(served, path)[0] == 404
    assert get(served, "/", host="evil.example:80")[0] == 403 and get(served, "/version", host="[::1]:1")[0] == 403
    assert get(served, "/version", host=f"localhost:{served.server_port}")[0] == 200


def test_a_port_that_is_taken_is_refused(served):
    with pytest.raises(UserError, match=rf"--port: cannot listen on 127.0.0.1:{served.server_port}: Address already"):
        ReportServer(served.run_dir, served.server_port)
