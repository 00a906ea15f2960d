"""Dataset type `chat`: conversations, rendered as text by the tokenizer's chat template or by a named one.

The assistant's text is found by rendering: each conversation is rendered up to each of the assistant's turns, once with
the opening of the answer (`add_generation_prompt`) and once with the answer; the difference is trained on. That holds
for every template that only appends. One that rewrites earlier turns is refused. Templates run in transformers'
sandbox, which bounds a single range but not nested loops, so their time is limited.
"""

import contextlib
import ctypes
import functools
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qtrain.core.checks import shown
from qtrain.core.errors import UserError, first_line, unknown_name
from qtrain.data.examples.examples import ExampleDataset, Renderer, Segment
from qtrain.data.stream import DATASETS
from qtrain.data.tokenizers.tokenizer import Tokenizer

TICK = 0.25


class TimeIsUp(BaseException):
    """Raised in the thread that runs for too long; no Exception, so that the code cannot handle it."""


class _Watch:
    """A thread that counts ticks for each thread with a limit. Ticks, not the clock: a stopped process counts none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: dict[int, int] = {}
        threading.Thread(target=self._run, name="time limit", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(TICK)
            with self._lock:
                for thread in list(self._left):
                    self._left[thread] -= 1
                    if self._left[thread] < 0:
                        del self._left[thread]
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimeIsUp))

    @contextlib.contextmanager
    def limit(self, seconds: float) -> Iterator[None]:
        # The thread that renders; of a data process it is not the main one, so no signal could end it.
        thread = threading.get_ident()
        with self._lock:
            self._left[thread] = round(seconds / TICK)
        try:
            yield
        finally:
            with self._lock:
                self._left.pop(thread, None)


@functools.cache
def _watch() -> _Watch:
    return _Watch()


def time_limit(seconds: float) -> contextlib.AbstractContextManager[None]:
    """Raises TimeIsUp from the `with` block once its Python code has run for some `seconds`."""
    return _watch().limit(seconds)


CHAT_TEMPLATES = {
    "chatml": (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
}
"""Named templates, for tokenizers that have none."""

RENDER_SECONDS = 10  # how long a template may render one conversation. Milliseconds are usual.

ROLE_ALIASES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names of roles


@DATASETS.register("chat")
@dataclass(frozen=True)
class ChatDataset(ExampleDataset):
    """Conversations, rendered by the tokenizer's chat template or a named one; only assistant turns are trained on"""

    template: str | None = None
    """name of a chat template, such as chatml; null: the tokenizer's own"""
    messages: str = "messages"
    """column of the conversation, a list of {"role", "content"} or {"from", "value"}"""

    def chat_template(self, tokenizer: Tokenizer, flag: str) -> str | None:
        if self.template is not None and self.template not in CHAT_TEMPLATES:
            raise unknown_name(f"{flag}.template", "chat template", self.template, CHAT_TEMPLATES)
        return None if self.template is None else CHAT_TEMPLATES[self.template]

    def renderer(self, tokenizer: Tokenizer, flag: str) -> Renderer:
        template = self.chat_template(tokenizer, flag) or tokenizer.chat_template
        if template is None:
            raise UserError(
                f"{flag}: the tokenizer {tokenizer.name!r} has no chat template; name one with "
                f'"template": {", ".join(CHAT_TEMPLATES)}.'
            )
        return ChatRenderer(template, self.messages, tokenizer, flag)


class ChatRenderer(Renderer):
    """Segments that alternate: what the assistant reads, what it writes."""

    def __init__(self, template: str, column: str, tokenizer: Tokenizer, flag: str):
        self._template, self._column, self._flag = template, column, flag
        self._kind = "chat template" if template in CHAT_TEMPLATES.values() else f"chat template of {tokenizer.name!r}"
        self.columns = (column,)
        ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        self._tokens = {name: "" if i is None else tokenizer.decode([i]) for name, i in ids.items()}

    def segments(self, row: Mapping[str, Any]) -> list[Segment]:
        messages = self._messages(row[self._column])
        # `at`: how much of the rendered text is in segments
        whole, segments, at = self._render(messages, False), [], 0
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            # Templates may render a turn by what precedes it: prefixes of the conversation, not turns alone.
            start = self._render(messages[:turn], True)  # up to the opening of the answer
            end = self._render(messages[: turn + 1], False)  # with the answer and what closes it
            if not (whole.startswith(end) and end.startswith(start) and len(start) >= at):
                raise UserError(
                    f"{self._flag}: this chat template rewrites earlier turns, so the assistant's text cannot be told "
                    'apart. Use another, such as "template":"chatml".'
                )
            answered = bool(message["content"].strip())  # an empty answer would teach to end at once
            segments += [Segment(whole[at : len(start)], False), Segment(end[len(start) :], answered)]
            at = len(end)
        return [*segments, Segment(whole[at:], False)] if at < len(whole) or not segments else segments

    def prompt(self, messages: Any) -> str:
        """The text that the assistant's answer to a conversation follows. UserError for what is none, or ends with an
        answer."""
        checked = self._messages(messages)
        if checked[-1]["role"] == "assistant":
            raise UserError(f"{self._flag}: the last message is the assistant's; end with the one to be answered.")
        return self._render(checked, True)

    def end_of_turn(self) -> str:
        """What the template closes an answer with, such as <|im_end|>, without space around it."""
        marker = "An answer."
        turns = [{"role": "user", "content": "A question."}, {"role": "assistant", "content": marker}]
        return self._render(turns, False).rpartition(marker)[2].strip()

    def needs_end_token(self, segments: Sequence[Segment]) -> bool:
        """A template may render the end token itself."""
        eos = self._tokens["eos_token"]
        return segments[-1].trained and not (eos and eos in segments[-1].text)

    def _messages(self, value: Any) -> list[dict[str, str]]:
        if not isinstance(value, list) or not value or not all(isinstance(m, Mapping) for m in value):
            raise UserError(f"{self._flag}: the column {self._column!r} holds no list of messages: {shown(value)}.")
        found = []
        for message in value:
            role, content = message.get("role") or message.get("from"), message.get("content") or message.get("value")
            if not isinstance(role, str) or not isinstance(content, str | None):
                raise UserError(f"{self._flag}: a message has no role or no text as content: {shown(dict(message))}.")
            found.append({"role": ROLE_ALIASES.get(role, role), "content": content or ""})
        return found

    def _render(self, messages: Sequence[Mapping[str, str]], open_answer: bool) -> str:
        from transformers.utils import chat_template_utils

        render: Any = chat_template_utils.render_jinja_template
        if not messages and not open_answer:
            return ""
        try:
            with time_limit(RENDER_SECONDS):
                rendered, _ = render(
                    [list(messages)], chat_template=self._template, add_generation_prompt=open_answer, **self._tokens
                )
        except TimeIsUp:
            raise UserError(
                f"{self._flag}: the {self._kind} takes more than {RENDER_SECONDS} s for one conversation; its loops "
                'have no end in sight. Use another, such as "template":"chatml".'
            ) from None
        except Exception as error:  # a template is code: it may divide by zero, or recurse without end
            reason = first_line(error)
            raise UserError(f"{self._flag}: the {self._kind} refuses a conversation: {reason}.") from None
        return rendered[0]
