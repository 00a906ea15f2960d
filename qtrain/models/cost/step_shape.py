"""How a training step runs, as far as its memory and its traffic depend on it."""

import dataclasses

from qtrain.models.native.loss import chunk_rows
from qtrain.models.native.mlp_chunks import mlp_chunk_rows
from qtrain.models.native.recompute import Kinds


@dataclasses.dataclass(frozen=True)
class StepShape:
    """How a training step runs on one process."""

    micro_batch_size: int
    seq_len: int
    element: int = 2
    """Bytes of an element of weights, gradients and activations."""
    recompute: Kinds = frozenset()
    compiled: bool = True
    loss_chunks: int = 0
    accumulates: bool = False
    """More than one micro-batch per step."""
    in_backward: bool = False
    """The optimizer runs within the backward pass."""
    recorded: bool = False
    """Micro-batches are CUDA graphs, whose memory nothing else can use."""
    residuals_on_host: bool = False
    """Layers' inputs are in host memory between their passes."""
    weights_on_host: bool = False
    """Weights are in host memory while what reads them does not run."""
    gradients_on_host: bool = False
    """So are the weights that train, and the sums of their gradients."""
    mlp_chunks: int = 0
    """Of the tokens of dense MLPs, with the kind `block`; 0: all at once."""
    documents: bool = False
    """Positions restart within a sequence."""
    sequence_parts: int = 1
    """Processes that compute a part of each sequence, and exchange the heads of attention."""
    residual_parts: int = 1
    """Processes that compute all of each sequence, and keep a part of layers' inputs each."""

    @property
    def residuals_away(self) -> float:
        """Share of layers' inputs that the device does not hold between their passes."""
        return 1.0 if self.residuals_on_host else 1 - 1 / self.residual_parts

    @property
    def tokens(self) -> int:
        """Of this process."""
        return self.micro_batch_size * self.seq_len // self.sequence_parts

    @property
    def mlp_rows(self) -> int:
        """Tokens that a dense MLP reads at once."""
        return min(self.tokens, mlp_chunk_rows(self.tokens, self.mlp_chunks)) if self.mlp_chunks else self.tokens

    @property
    def loss_rows(self) -> int:
        """Tokens whose logits exist at once."""
        return chunk_rows(self.tokens, self.loss_chunks, large=True)

    @property
    def loss_parts(self) -> int:
        """Chunks of tokens whose gradients of the head are added."""
        return -(-self.tokens // self.loss_rows)
