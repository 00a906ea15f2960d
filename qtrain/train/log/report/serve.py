"""The report of a run that goes on, over HTTP on this machine only. The page asks for the version of the data and
reloads when that has changed."""

import http.server
from pathlib import Path

from qtrain.core.errors import UserError
from qtrain.train.log.report.records import read_run
from qtrain.train.log.report.write import run_page

HOST = "127.0.0.1"
FILES = ("metrics.jsonl", "health.jsonl", "config.json", "train.log")


class ReportServer(http.server.ThreadingHTTPServer):
    """Serves `/`, the page, and `/version`, a text that changes when a file of the run does."""

    allow_reuse_address = False  # a port that another server has is refused

    def __init__(self, run_dir: Path, port: int):
        self.run_dir = run_dir
        self._made: tuple[str, bytes] | None = None
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise UserError(
                f"--port: cannot listen on {HOST}:{port}: {error.strerror}. Give another port; 0 takes a free one."
            ) from None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    def version(self) -> str:
        """Sizes and times of the run's files."""
        found = []
        for name in FILES:
            try:
                # Files appear while the run goes on; an absent one is no error.
                about = (self.run_dir / name).stat()
            except OSError:
                continue
            found.append(f"{about.st_size:x}.{about.st_mtime_ns:x}")
        return "-".join(found)

    def page(self) -> bytes:
        """The page of the newest data."""
        # Before reading: data that arrive meanwhile change the version, and the page reloads once more.
        version = self.version()
        # Rendering reads the whole run: a version that was rendered before is served again.
        if self._made is None or self._made[0] != version:
            text = run_page(read_run(self.run_dir), live=version)
            self._made = version, text.encode("utf-8", "backslashreplace")
        return self._made[1]


class _Handler(http.server.BaseHTTPRequestHandler):
    server: ReportServer
    timeout = 10  # seconds; a client that sends no request would hold a thread for ever

    def do_GET(self) -> None:
        # A page of another site that resolves its name to 127.0.0.1 must not read the run.
        host = self.headers.get("Host", "").rpartition(":")[0]
        if host not in (HOST, "localhost"):
            self._answer(403, b"only for this machine\n", "text/plain")
        elif self.path == "/":
            self._answer(200, self.server.page(), "text/html; charset=utf-8")
        elif self.path == "/version":
            self._answer(200, self.server.version().encode(), "text/plain")
        else:
            self._answer(404, b"not found\n", "text/plain")

    def _answer(self, code: int, body: bytes, kind: str) -> None:
        self.send_response(code)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(body))),
            # A cached page would carry an old version, and reload without end.
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Requests are not logged."""
