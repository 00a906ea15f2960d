"""Text from token ids as they come: no half characters, and nothing of a stop string."""

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"
"""What bytes are decoded to that are no whole character, yet or at all."""


class TextStream:
    """The text that one row writes after `prompt`. decode: ids -> text.

    `ids`, `text`: what has been written; with a stop string the tokens up to the one that ends it, and the text before
    it.

    New tokens are decoded together with those of the piece before them, at first the prompt: alone, a sentencepiece
    tokenizer would drop their first space. A piece begins and ends with whole characters."""

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int], stops: Sequence[str] = ()):
        self._decode, self._stops = decode, stops
        self._piece, self._new = list(prompt), list[int]()
        self._piece_length = len(decode(self._piece))
        self._held = ""
        self.ids: list[int] = []
        self.text = ""
        self.stopped = False
        """Whether a stop string has been written."""

    def push(self, token: int) -> str:
        """The text that is final with one more token."""
        self.ids.append(token)
        self._new.append(token)
        text = self._decode(self._piece + self._new)
        if text.endswith(UNFINISHED):
            return ""
        text = text[self._piece_length :]
        self._piece, self._new = self._new, []
        self._piece_length = len(self._decode(self._piece))
        return self._release(text)

    def end(self) -> str:
        """The text that was held back, when no token follows."""
        text = self._decode(self._piece + self._new)[self._piece_length :] if self._new else ""
        return "" if self.stopped else self._release(text, last=True)

    def _release(self, new: str, last: bool = False) -> str:
        """Of the held text and `new` what no stop string can begin in."""
        text, self._held = self._held + new, ""
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            text, self.stopped = text[: min(found)], True
        elif not last:
            held = max((_overlap(text, stop) for stop in self._stops), default=0)
            text, self._held = text[: len(text) - held], text[len(text) - held :]
        self.text += text
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
