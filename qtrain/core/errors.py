"""The error types that are messages: a user's mistake, and a run that cannot go on; and the wording they share."""

import contextlib
import difflib
from collections.abc import Callable, Iterable, Iterator


class UserError(Exception):
    """Something the user gave cannot be used. Scripts print it on stderr and exit with `exit_code`."""

    exit_code = 2


class NotHere(UserError):
    """What the user named is not on this machine, nor can it be fetched. A plan of data does without them."""


class TrainingStopped(Exception):
    """A run cannot go on, through no mistake in what was given. Scripts print it and exit with `exit_code`."""

    exit_code = 1


class Restart(TrainingStopped):
    """A run cannot go on as it was started, but can with `flags` added to its command line, which it is started with
    again: this process becomes that one, or the launcher of --gpus N starts all ranks anew."""

    def __init__(self, message: str, flags: tuple[str, ...]):
        super().__init__(message)
        self.flags = flags


class LostRank(TrainingStopped):
    """Another process of the run has ended: that one's message, or the launcher's, says why."""


Explanation = Callable[[Exception], TrainingStopped | None]
_explanations: list[Explanation] = []


def explains(explanation: Explanation) -> Explanation:
    """Decorator: what a library's error means that may come from anywhere in a run. `explanation` returns the message,
    or None for an error that it does not know. `run_script` asks it; so it needs no import of what knows the library.
    """
    _explanations.append(explanation)
    return explanation


def explained(error: Exception) -> TrainingStopped | None:
    """The message that an error stands for, from what has been imported; None without one."""
    return next((message for explanation in _explanations if (message := explanation(error))), None)


def first_line(error: BaseException | str) -> str:
    """What an error says, in one line; its type where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@contextlib.contextmanager
def os_errors(what: str, end: str = ".") -> Iterator[None]:
    """Inside, an OSError becomes a UserError that says `what` failed, "--json: cannot write FILE", and why."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: {error.strerror or error}{end}") from None


def nearest(given: str, allowed: Iterable[str]) -> str | None:
    """The allowed name closest in spelling to `given`, or None when nothing is close."""
    # Case and hyphens are no difference. Much longer inputs are not misspellings.
    by_folded = {name.lower().replace("-", "_"): name for name in allowed if len(given) <= 2 * max(len(name), 2)}
    found = difflib.get_close_matches(given.lower().replace("-", "_"), by_folded, n=1, cutoff=0.5)
    return by_folded[found[0]] if found else None


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """The end of a message that names the nearest allowed name; "" when nothing is close."""
    close = nearest(given, allowed)
    return f" Did you mean {close!r}?" if close else ""


def unknown_name(flag: str, kind: str, given: str, allowed: Iterable[str], fix: str = "") -> UserError:
    """An error for a name that is in no registry: what was given, what is allowed, the nearest match, the fix."""
    allowed = sorted(allowed)
    shown = ", ".join(allowed[:12]) + (f", ... ({len(allowed)} in all)" if len(allowed) > 12 else "") or "none"
    hint = did_you_mean(given, allowed)
    return UserError(f"{flag}: unknown {kind} {given!r}.{hint} Allowed: {shown}.{' ' + fix if fix else ''}")


def missing_package(package: str, what_for: str, install: str | None = None) -> UserError:
    """An error for an optional dependency that is not installed; names the command that installs it."""
    return UserError(f"{what_for} needs the package {package!r}. Install it with: pip install {install or package}")
