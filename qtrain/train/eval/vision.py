"""How a batch of images goes through a classifier, and what it is measured by."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qtrain.data import ImageBatch, Images, ImageTransform
from qtrain.data.permutation import Permutation
from qtrain.models import LossSums


def vision_forward(model: nn.Module) -> Callable[[ImageBatch], LossSums]:
    """The function batch -> cross-entropy against its targets, summed over the images."""
    parameter = next(model.parameters())
    device, dtype = parameter.device, parameter.dtype

    def forward(batch: ImageBatch) -> LossSums:
        images = batch.images.to(device, non_blocking=True).to(dtype)
        logits = model(images).float()
        loss = F.cross_entropy(logits, batch.targets.to(device, non_blocking=True), reduction="sum")
        return LossSums(loss, loss.detach())

    return forward


@dataclass
class VisionEvaluation:
    """Called by the training loop: loss and accuracy over the images of a held-out set, always the same ones.

    limit: images; 0: all. threads: that read and decode."""

    model: nn.Module
    images: Images | None
    transform: ImageTransform
    batch_size: int
    limit: int
    threads: int

    def __call__(self) -> dict[str, Any]:
        """`eval_loss` (mean cross-entropy), `top1` and `top5` (shares of 1)."""
        if self.images is None:
            return {}
        was_training = self.model.training
        self.model.eval()
        sums = sum(self._measure(images, labels) for images, labels in self._batches())
        self.model.train(was_training)
        loss, top1, top5 = (sums / self._count).tolist()
        return {"eval_loss": loss, "top1": top1, "top5": top5}

    @property
    def _count(self) -> int:
        return min(self.limit, len(self.images)) if self.limit else len(self.images)

    def _batches(self):
        """(images [B, C, H, W], labels [B]), read one batch ahead."""
        order = Permutation(len(self.images), 0).all()[: self._count] if self.limit else range(self._count)
        starts = range(0, self._count, self.batch_size)
        with ThreadPoolExecutor(self.threads, "evaluation") as pool:
            ahead = None
            for start in [*starts, None]:
                coming = None
                if start is not None:
                    numbers = [int(i) for i in order[start : start + self.batch_size]]
                    coming = numbers, [pool.submit(self._read, i) for i in numbers]
                if ahead is not None:
                    numbers, futures = ahead
                    yield torch.stack([f.result() for f in futures]), torch.from_numpy(self.images.labels[numbers])
                ahead = coming

    def _read(self, number: int) -> Tensor:
        return self.transform(self.images.read(number))

    @torch.no_grad()
    def _measure(self, images: Tensor, labels: Tensor) -> Tensor:
        """Sums over a batch: cross-entropy, right answers, right answers among the five likeliest; float64 [3]."""
        parameter = next(self.model.parameters())
        labels = labels.to(parameter.device)
        logits = self.model(images.to(parameter.device).to(parameter.dtype)).float()
        best = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels.unsqueeze(1)
        loss = F.cross_entropy(logits, labels, reduction="sum")
        return torch.stack([loss.double(), best[:, 0].sum().double(), best.sum().double()])
