"""Rank and world size, with or without a process group, and actions that all ranks take or fail together."""

import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from qtrain.comm.heartbeat import Heartbeat
from qtrain.core.errors import LostRank, UserError, explains, first_line
from qtrain.core.process import maps_by_pages

T = TypeVar("T")

_COLLECTIVE_FAILED = re.compile(r"gloo|Connection (closed|reset)|Broken pipe|NCCL", re.IGNORECASE)
"""What the messages of a failed collective contain; gloo's errors have no class of their own."""

MEETING_TIMEOUT = timedelta(seconds=120)
"""How long processes wait at their start for one that is missing."""
RANK_TIMEOUT = 600
"""Default of --rank_timeout, seconds."""
MARGIN = timedelta(seconds=60)
"""How much longer a collective waits than --rank_timeout, after which a heartbeat names the rank that is missing."""

_heartbeat: Heartbeat | None = None


def launched_world() -> int:
    """The number of processes that torchrun, or `launch`, started; 1 without them. UserError for a broken setting."""
    given = os.environ.get("WORLD_SIZE", "1")
    if not given.isdecimal() or not int(given):
        raise UserError(f"WORLD_SIZE: {given!r} is not a number of processes; start the script with torchrun.")
    return int(given)


def launched_on_machine() -> int | None:
    """How many of these processes the launcher started on this machine; None where that is all, or it does not say."""
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(given) if given.isdecimal() and 0 < int(given) < launched_world() else None


def check_launcher() -> None:
    """UserError for settings of a launcher that no process can have: others would wait for its rank in vain."""
    fix = "start the script with torchrun, which sets RANK, LOCAL_RANK and WORLD_SIZE, or without any of them."
    for name in ("RANK", "LOCAL_RANK"):
        given = os.environ.get(name)
        if given is None and name == "RANK" and launched_world() > 1:
            raise UserError(f"RANK: it is not set, but WORLD_SIZE is {launched_world()}; {fix}")
        if given is not None and not given.isdecimal():
            raise UserError(f"{name}: {given!r} is not the number of a process; {fix}")
        if given is not None and int(given) >= launched_world() and "WORLD_SIZE" in os.environ:
            raise UserError(f"{name}: {given} is not below WORLD_SIZE, {launched_world()}; {fix}")


def local_rank() -> int:
    """This process's number on its machine, which is also the index of its GPU."""
    return int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))


def join_world(device: torch.device, rank_timeout: int = RANK_TIMEOUT) -> None:
    """Join the processes that the launcher started, if there are several. Raises UserError where they do not meet.

    rank_timeout: seconds that ranks wait for one that does not go on."""
    global _heartbeat
    if launched_world() == 1 or dist.is_initialized():
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if maps_by_pages():
            _register_no_buffers()
    _check_master()
    try:
        store, own, world = next(dist.rendezvous("env://", timeout=MEETING_TIMEOUT))
        # Before the process group exists: its own time-out is minutes, and names nobody.
        store = _meet(store, own, world)
        timeout = timedelta(seconds=rank_timeout) + MARGIN
        store.set_timeout(timeout)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=own,
            world_size=world,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
    except (RuntimeError, ValueError, dist.DistError) as error:
        raise UserError(
            f"WORLD_SIZE: the {launched_world()} processes did not meet ({first_line(error)}); start them with "
            "torchrun, which sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."
        ) from None
    # pyrefly: ignore[missing-attribute]  # torch's stubs have no Store.clone
    _heartbeat = Heartbeat(dist.PrefixStore("heartbeat", store.clone()), own, world, rank_timeout)


def _register_no_buffers() -> None:
    """Keep NCCL from registering the buffers of collectives in CUDA graphs, as it does by itself: it takes a segment of
    the allocator for one allocation, and ranks read and write other pages than those meant (pytorch/pytorch#158029;
    on two H100s a replay gave NaN, or never ended). UserError where the environment asks for it."""
    if (given := os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")) != "0":
        raise UserError(
            f"NCCL_GRAPH_REGISTER: {given} breaks what ranks send within CUDA graphs while the allocator has "
            "expandable_segments; leave it out, or set PYTORCH_ALLOC_CONF=expandable_segments:False."
        )


def _check_master() -> None:
    """UserError for a MASTER_ADDR that this machine's resolver does not know: the store would try for minutes."""
    name = os.environ.get("MASTER_ADDR", "")
    try:
        if name:
            socket.getaddrinfo(name, None)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or first_line(error)
        raise UserError(f"MASTER_ADDR: the host {name!r} is not known here ({why}); start with torchrun.") from None


def _meet(store: dist.Store, own: int, world: int) -> dist.Store:
    """Wait for all ranks at the launcher's store. Returns the part of it that is theirs alone. RuntimeError where one
    does not come.

    torchrun keeps its store, with the addresses of processes that have ended, when it starts them again. So each rank
    gives a name that is used once, and rank 0 answers to it with the name of this meeting."""
    name = uuid.uuid4().hex
    store.set(f"rank {own}", name)
    if own != 0:
        store.wait([f"meeting of {name}"], MEETING_TIMEOUT)  # rank 0's answer to this very start
        meeting = dist.PrefixStore(store.get(f"meeting of {name}").decode(), store)
        meeting.set(str(own), "")
        meeting.wait(["complete"], MEETING_TIMEOUT)
        return meeting
    meeting, missing = dist.PrefixStore(name, store), set(range(1, world))
    end = time.monotonic() + MEETING_TIMEOUT.total_seconds()
    while missing:
        # Answered again in every round: a rank that was started anew has given another name.
        for rank in [rank for rank in sorted(missing) if store.check([f"rank {rank}"])]:
            store.set(f"meeting of {store.get(f'rank {rank}').decode()}", name)
        missing = {rank for rank in missing if not meeting.check([str(rank)])}
        if missing and time.monotonic() > end:
            raise RuntimeError(f"rank {min(missing)} is missing")
        time.sleep(0.02)
    meeting.set("complete", "")
    return meeting


def note_step(step: int) -> None:
    """What this rank says of its progress: `step` is finished. The first call, before a step, ends the set-up."""
    if _heartbeat is not None:
        _heartbeat.step = step


def leave_world() -> None:
    """Leave the process group, if there is one."""
    global _heartbeat
    if _heartbeat is not None:
        _heartbeat.stop()
    if dist.is_initialized():
        dist.destroy_process_group()
    _heartbeat = None


@explains
def lost_rank(error: Exception) -> LostRank | None:
    """What the error of a collective, or of the store, means that another rank no longer takes part in; None for other
    errors. Such an error can come from anywhere between `join_world` and `leave_world`."""
    if not (dist.is_initialized() and isinstance(error, RuntimeError)):
        return None
    reason = first_line(error)
    if not (isinstance(error, dist.DistError) or _COLLECTIVE_FAILED.search(reason)):  # gloo raises a bare RuntimeError
        return None
    step = _heartbeat.step if _heartbeat is not None else None
    when, resume = ("set-up", "") if step is None else (f"after step {step}", " with --resume auto")
    return LostRank(f"{when}: another process has ended or does not answer ({reason}); start the run again{resume}.")


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def host_group() -> dist.ProcessGroup | None:
    """A new group of all ranks over the host's network, for the collectives of another thread; None without others."""
    # pyrefly: ignore[bad-return]  # a number only on ranks that are no members
    return dist.new_group(backend="gloo") if dist.is_initialized() else None


def all_gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """`value` of every rank, on every rank. group: of all ranks; None: the one of the steps."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * world()
    dist.all_gather_object(values, value, group)  # pickled, over gloo: for small things outside of steps
    return values


def first_difference(own: Mapping[str, Any]) -> tuple[int, str, Any, Any] | None:
    """The first rank that has another value than rank 0, of which key, its value and rank 0's; None where all agree."""
    first, *others = all_gather(dict(own))
    for number, other in enumerate(others, start=1):
        for key in [*first, *(key for key in other if key not in first)]:
            if first.get(key) != other.get(key):
                return number, key, other.get(key), first.get(key)
    return None


def from_rank_0(action: Callable[[], T]) -> T:
    """Run `action` on rank 0. Returns its result on every rank; an error is raised on all of them."""

    def on_rank_0() -> Any:
        return action() if rank() == 0 else None

    return on_all_ranks(on_rank_0, return_rank_0=True)


def on_all_ranks(action: Callable[[], T], return_rank_0: bool = False, group: dist.ProcessGroup | None = None) -> T:
    """Run `action` on every rank. An error of any rank is raised on all, so that none waits for a rank that failed.

    return_rank_0: return rank 0's result instead of this rank's own. group: as in `all_gather`."""
    own: list[Any] = [None, None]  # the result and the error
    try:
        own[0] = action()
    except (UserError, OSError) as raised:
        own[1] = raised
    # Errors are gathered like results: a rank that raised alone would leave the others in a collective.
    outcomes = all_gather(own if return_rank_0 else own[1:], group)
    for failed_rank, (*_, raised) in enumerate(outcomes):
        if raised is not None:
            raised.failed_rank = failed_rank
            raise raised
    return outcomes[0][0] if return_rank_0 else own[0]
