"""Progress of a tokenization: a live line on a terminal, a plain line every few seconds elsewhere."""

import time
from types import TracebackType

PLAIN_INTERVAL_S = 5.0


class TokenizeProgress:
    """Counts documents and tokens. start: documents that an earlier run has finished. Use with `with`."""

    def __init__(self, title: str, total_documents: int | None, start: int):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._title, self._total, self._start = title, total_documents, start
        self._done, self._tokens = start, 0
        self._began = self._last_line = time.monotonic()
        columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%")]
        columns += [TextColumn("{task.fields[speed]}"), TextColumn("ETA"), TimeRemainingColumn()]
        self._console = Console()
        self._live = Progress(*columns, console=self._console) if self._console.is_terminal else None
        if self._live is not None:
            self._task = self._live.add_task(title, total=total_documents, completed=start, speed="")

    def __enter__(self) -> "TokenizeProgress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @property
    def speed(self) -> float:
        """Tokens per second of this run."""
        return self._tokens / max(self.seconds, 1e-9)

    def advance(self, documents: int, tokens: int) -> None:
        self._done += documents
        self._tokens += tokens
        speed = f"{self._done:,} documents  {self._tokens:,} tokens  {self.speed:,.0f} tokens/s"
        if self._live is not None:
            self._live.update(self._task, completed=self._done, speed=speed)
        elif time.monotonic() - self._last_line >= PLAIN_INTERVAL_S:
            self._last_line = time.monotonic()
            print(f"{self._title}: {speed}{self._remaining()}", flush=True)

    def _remaining(self) -> str:
        if not self._total or self._done == self._start:
            return ""
        seconds = self.seconds * (self._total - self._done) / (self._done - self._start)
        return f"  {100 * self._done / self._total:.0f}%  ETA {time.strftime('%H:%M:%S', time.gmtime(max(seconds, 0)))}"
