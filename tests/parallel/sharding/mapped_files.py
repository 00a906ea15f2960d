"""Memory that processes on a CPU share, in place of GPUs that map each other's."""

from pathlib import Path

import torch

from tests.system import wait_until


class MappedFiles:
    """`PeerMemory` in files of `size` bytes in a folder, one of each rank, that all of them map."""

    def __init__(self, folder: Path, size: int):
        folder.mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        ranks = range(torch.distributed.get_world_size())
        self._ranks = [torch.from_file(str(folder / str(r)), shared=True, size=size, dtype=torch.uint8) for r in ranks]

    def rank_views(self, start: int, stop: int) -> list[torch.Tensor]:
        return [memory[start:stop] for memory in self._ranks]

    def meet(self) -> None:
        torch.distributed.barrier()

    def signal(self, rank: int, place: int) -> None:
        self._signal(rank, place).fill_(1)

    def await_signal(self, rank: int, place: int) -> None:
        signal = self._signal(rank, place)
        wait_until(lambda: signal.item() == 1)
        signal.fill_(0)

    def _signal(self, rank: int, place: int) -> torch.Tensor:
        return self._ranks[rank][place : place + 4].view(torch.int32)
