"""Loss and accuracy of a classifier over validation images."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qtrain.core.maybe_none import MaybeNone
from qtrain.data.images.augment import ImageTransform
from qtrain.data.images.images import Images
from qtrain.data.permutation import Permutation


@dataclass
class VisionEvaluation:
    """Called by the training loop: loss and accuracy over validation images, the same ones each time."""

    model: nn.Module
    images: Images | MaybeNone
    """None: nothing is evaluated."""
    transform: ImageTransform
    batch_size: int
    limit: int
    """Number of images; 0: all."""
    threads: int
    """Threads that read and decode."""

    def __call__(self) -> dict[str, Any]:
        """`eval_loss` (mean cross-entropy), `top1` and `top5` (fractions)."""
        if self.images is None:
            return {}
        was_training = self.model.training
        self.model.eval()
        sums: Any = sum(self._measure(images, labels) for images, labels in self._batches())
        self.model.train(was_training)
        loss, top1, top5 = (sums / self._count).tolist()
        return {"eval_loss": loss, "top1": top1, "top5": top5}

    @property
    def _count(self) -> int:
        return min(self.limit, len(self.images)) if self.limit else len(self.images)

    def _batches(self):
        """(images [B, C, H, W], labels [B]), prefetched by one batch."""
        # A sample of all classes: folders list their images class by class.
        order = Permutation(len(self.images), 0).all()[: self._count] if self.limit else range(self._count)
        starts = range(0, self._count, self.batch_size)
        batches = [[int(i) for i in order[start : start + self.batch_size]] for start in starts]
        with ThreadPoolExecutor(self.threads, "evaluation") as pool:
            futures = [pool.submit(self._read, i) for i in batches[0]]
            for indices, following in zip(batches, [*batches[1:], []], strict=True):
                ahead = [pool.submit(self._read, i) for i in following]
                yield torch.stack([f.result() for f in futures]), torch.from_numpy(self.images.labels[indices])
                futures = ahead

    def _read(self, index: int) -> Tensor:
        return self.transform(self.images.read(index))

    @torch.no_grad()
    def _measure(self, images: Tensor, labels: Tensor) -> Tensor:
        """Sums over a batch: cross-entropy, top-1 hits, top-5 hits; float64 [3]."""
        parameter = next(self.model.parameters())
        labels = labels.to(parameter.device)
        logits = self.model(images.to(parameter.device).to(parameter.dtype)).float()
        hits = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels.unsqueeze(1)
        loss = F.cross_entropy(logits, labels, reduction="sum")
        return torch.stack([loss.double(), hits[:, 0].sum().double(), hits.sum().double()])
