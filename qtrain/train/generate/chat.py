"""A conversation in the terminal: lines in, answers as they are written.

/reset begins anew, /quit or Ctrl-D ends, Ctrl-C stops an answer.
"""

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from qtrain.core.checks import is_unicode
from qtrain.core.errors import UserError
from qtrain.models import Decoding, Generation, TextStream
from qtrain.train.generate.prompts import Given, Messages, PromptReader
from qtrain.train.generate.writing import Totals, closing_pieces

HELP = "/reset begins anew, /quit or Ctrl-D ends, Ctrl-C stops an answer"


@dataclass
class Chat:
    """reader: makes tokens of the conversation; stops: strings that end an answer."""

    model: nn.Module
    reader: PromptReader
    decoding: Decoding
    stops: Sequence[str]

    def run(self, totals: Totals) -> None:
        """Until the user ends it."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # `input` then edits lines and remembers them
        print(HELP, file=sys.stderr, flush=True)
        messages: Messages = []
        while True:
            try:
                line = input("> ").strip()
            except KeyboardInterrupt:
                print(f"\n{HELP}", file=sys.stderr, flush=True)
                continue
            except EOFError:
                print()
                return
            except UnicodeDecodeError:
                line = "\udcff"
            if not is_unicode(line):
                print("this is not UTF-8 text", file=sys.stderr, flush=True)
                continue
            if line == "/quit":
                return
            if line == "/reset":
                messages = []
                print("a new conversation", file=sys.stderr, flush=True)
            elif line.startswith("/"):
                print(f"{line}: unknown; {HELP}", file=sys.stderr, flush=True)
            elif line:
                messages = self._answered([*messages, {"role": "user", "content": line}], messages, totals)

    def _answered(self, asked: Messages, before: Messages, totals: Totals) -> Messages:
        """The conversation with an answer; `before` where it does not fit the model any more."""
        try:
            prompt = self.reader.read(Given(asked, "the conversation"))
        except UserError as error:
            print(f"{error} /reset begins anew.", file=sys.stderr, flush=True)
            return before
        # Another answer to the same question, later in the conversation, is another text.
        sampling = replace(self.decoding.sampling, seed=self.decoding.sampling.seed + len(asked))
        stream = TextStream(self.reader.tokenizer.decode, prompt.ids, self.stops)
        generation = Generation(self.model, [prompt.ids], replace(self.decoding, sampling=sampling))
        try:
            for piece in closing_pieces(generation, [stream]):
                print(piece.text, end="", flush=True)
        except KeyboardInterrupt:
            print(" [stopped]", end="", file=sys.stderr, flush=True)
        print(flush=True)
        totals.prompts += 1
        totals.add(generation, len(prompt.ids))
        return [*asked, {"role": "assistant", "content": stream.text}]
