"""Code that does not end is ended in its thread, and nothing else is."""

import threading

import pytest

from qtrain.core.errors import UserError
from qtrain.data.examples import chat_dataset
from qtrain.data.examples.chat_dataset import ChatRenderer, TimeIsUp
from qtrain.data.tokenizers.tokenizer import ByteTokenizer

ROW = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


def endless() -> None:
    while True:
        pass


def test_only_the_thread_that_takes_too_long_is_ended():
    ended, released = [], threading.Event()

    def run(seconds: float) -> None:
        try:
            with chat_dataset.time_limit(seconds):
                endless() if seconds < 1 else released.wait(30)
        except TimeIsUp:
            ended.append(seconds)

    threads = [threading.Thread(target=run, args=(seconds,)) for seconds in (0.25, 60)]
    for thread in threads:
        thread.start()
    threads[0].join(20)
    released.set()
    threads[1].join(20)
    assert ended == [0.25]
    with chat_dataset.time_limit(0.25):
        pass
    threading.Event().wait(0.8)  # over in time: nothing is raised later


TEMPLATES = {
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "takes more than 0.5 s for one",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}": "refuses a conversation: maximum recursion depth",
    "{{ 1 / 0 }}": "refuses a conversation: division by zero",
    "{{ '{:999999999999999}'.format(1) }}": "refuses a conversation",
    "{{ range(10 ** 9) }}": "refuses a conversation: Range too big",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_that_do_not_end(template, monkeypatch):
    monkeypatch.setattr(chat_dataset, "RENDER_SECONDS", 0.5)
    with pytest.raises(UserError) as caught:
        ChatRenderer(template, "messages", ByteTokenizer(), "--train_ds").segments(ROW)
    said = f"--train_ds: the chat template of 'byte' {TEMPLATES[template]}"
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)
