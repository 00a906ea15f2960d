"""Memory of training a decoder by kind, from its config alone; nothing is allocated.

The peak is one of these moments (`MemoryEstimate.moments`). What is alive at each, besides weights, optimizer states
and cuBLAS's workspace, and which file counts it:

    moment              gradients (`gradient_memory`)   activations (`saved_activations`)  temporaries
    the model's build   -                               -                                  `weight_memory`
    last layer's        the same as at the loss         the same                           the last layer's forward pass
      forward pass (*)                                                                     (`layer_backward`)
    the loss            sums of micro-batches           kept tensors of every layer        `loss_memory`
    start of backward   the same                        the same                           the last layer's backward
                                                                                           (`layer_backward`) and the
                                                                                           head's gradient; or twice the
                                                                                           head's (`loss_memory`)
    end of backward     those that exist by then        those of one layer; none at the    the first layer's backward;
                                                        embedding                          or the embedding's gradient
    optimizer's step    all, or their sums              within the backward pass, those    the optimizer's; a fused step
                                                        of every layer                     has none

(*) where layers are sharded, and so a head of its own, which is gathered meanwhile

With --distill, a teacher's forward pass is a moment too (`teacher`).

Where layers are sharded too, `full_shard_memory` counts weights, build and gradients. Where layers' inputs are in host
memory (`models/native/residual_offload.py`), all but that of the last layer leave the device, T·C·b·(L - 1) bytes of L
layers, T tokens, width C and b bytes per element; that of the layer before comes back while a layer's backward runs.
Where N ranks keep a part each (`parallel/layers/context_in_order.py`), (N - 1) / N of these bytes leave it.
Where gradients are in host memory (`parallel/sharding/host_gradients.py`), the device has those of two units at most;
of several ranks their sums are there (`parallel/sharding/gradients.py`), which the optimizer's step has on the device.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from qtrain.models.config.model import ModelConfig
from qtrain.models.cost.full_shard_memory import comes_and_goes, full_shard_memory
from qtrain.models.cost.gradient_memory import EndOfBackward, end_of_backward, gradient_bytes, layer_gradients
from qtrain.models.cost.layer_backward import ByHalf, Layer
from qtrain.models.cost.linear_bytes import LowBitBytes, layer_kinds
from qtrain.models.cost.loss_memory import head_backward_bytes, loss_bytes
from qtrain.models.cost.parameters import count_parameters
from qtrain.models.cost.step_shape import StepShape
from qtrain.models.cost.trained import TrainedPart, all_of
from qtrain.models.cost.weight_memory import ONE_GPU, RankShare, build_bytes, master_bytes, model_weight_bytes

CUDA_WORKSPACE = 96 * 2**20
"""cuBLAS has a workspace of 32 MiB for each thread that calls it (forward, backward), and cuBLASLt one of its own."""


HOLES_OF_STREAMED = 0.014
"""Of the tensors' peak, what the allocator keeps in holes beside those of any run, where layers come from host memory
into recorded steps: on an H200 3B, 7B and 14B had 2.1%, 3.1% and 3.3% in all, the last two up to their limits, and
with codes that were then computed beside their own memory."""
RECORDED = ("the last layer's forward pass", "the loss", "the start of backward", "the end of backward")
"""Moments of a micro-batch."""


class Peak(NamedTuple):
    """Bytes by kind at the moment of a step when a device holds most."""

    moment: str
    kinds: Mapping[str, int]
    host: Mapping[str, int] = {}
    """Bytes of pinned host memory, at all times, by the names of --offload."""
    apart: int = 0
    """Bytes that are taken besides because nothing else can use the memory of recorded steps."""

    @property
    def total(self) -> int:
        """Of tensors."""
        return sum(self.kinds.values())

    @property
    def reserved(self) -> int:
        return self.total + self.apart


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Kept for backward at the end of a micro-batch's forward pass."""
    loss: int
    """Final hidden states and their gradient, the head's gradient, a chunk of logits."""
    backward: int
    """The largest temporaries: of the head's gradient, or of one layer's backward beside it."""
    at_end: int
    """The same at the end of the backward pass, of the first layer or of the embedding."""
    workspace: int
    held: int
    """Gradients of earlier micro-batches, which exist during the forward pass."""
    one_layer: int
    """What is left of `activations` at the end of the backward pass."""
    build: Mapping[str, int]
    """While the model is built: the weights that are there, and what the one that gets its value takes besides."""
    at_step: int
    """Gradients from which the optimizer's step updates."""
    step: int
    """Temporaries of the optimizer's step."""
    in_backward: bool
    """The optimizer steps within the backward pass."""
    recorded: bool
    """Micro-batches are CUDA graphs: the optimizer's temporaries are beside the memory of their largest moment."""
    streamed: bool
    """Layers are in host memory between their passes."""
    host: Mapping[str, int]
    """In pinned host memory, by the names of --offload."""
    last_forward: int = 0
    """Temporaries of the last layer's forward pass, while a sharded head is gathered; 0: less than its backward
    pass's."""
    teacher: int = 0
    """Temporaries of a teacher's forward pass, before that of the model (`teacher.py`)."""

    @property
    def moments(self) -> dict[str, Mapping[str, int]]:
        """Bytes by kind at each moment of a step that can be the peak."""
        resident = {"weights": self.weights, "optimizer": self.optimizer, "workspace": self.workspace}
        # (gradients, activations, temporaries), as `kinds` below names them.
        moments = {
            **({"the teacher's forward pass": (self.held, 0, self.teacher)} if self.teacher else {}),
            **({RECORDED[0]: (self.held, self.activations, self.last_forward)} if self.last_forward else {}),
            "the loss": (self.held, self.activations, self.loss),
            "the start of backward": (self.held, self.activations, self.backward),
            "the end of backward": (self.gradients, self.one_layer, self.at_end),
            "the optimizer's step": (self.at_step, self.activations if self.in_backward else 0, self.step),
        }
        kinds = ("gradients", "activations", "temporaries")
        return {
            "the model's build": self.build,
            **{name: {**resident, **dict(zip(kinds, sizes, strict=True))} for name, sizes in moments.items()},
        }

    @property
    def at_peak(self) -> Peak:
        peaks = [Peak(*moment, self.host) for moment in self.moments.items()]
        largest = max(peaks, key=lambda peak: peak.total)
        if not self.recorded:
            return largest
        recorded = max(peak.total for peak in peaks if peak.moment in RECORDED)
        holes = round(HOLES_OF_STREAMED * largest.total * self.streamed)
        return largest._replace(apart=max(0, recorded + self.step - largest.total) + holes)

    @property
    def peak(self) -> int:
        return self.at_peak.total


def estimate_memory(
    config: ModelConfig,
    step: StepShape,
    *,
    optimizer_bytes: float = 4.0,
    host_bytes: Mapping[str, float] | None = None,
    step_bytes: float = 0.0,
    pretrained: bool = False,
    low_bit: LowBitBytes | None = None,
    trained: TrainedPart | None = None,
    share: RankShare = ONE_GPU,
    whole_matrices: bool = False,
    reshards: bool = False,
) -> MemoryEstimate:
    """Memory of training on one GPU, or on one of several that hold a share each of the master weights and states.

    whole_matrices: the optimizer updates each linear's weight on one of them. reshards: layers exist in full only while
    they run.

    optimizer_bytes: of states per parameter. host_bytes: of all states that are in host memory, by their names.
    step_bytes: temporaries of the optimizer's step. pretrained: weights are loaded instead of drawn. low_bit: None for
    a model that is not quantized. trained: None where everything trains.
    """
    element, full = step.element, None
    trained, low_bit = trained or all_of(config, element), low_bit or LowBitBytes.plain(element)
    weights = model_weight_bytes(config, element, low_bit, trained)
    weights += master_bytes(config, element, low_bit, trained, share.masters, whole_matrices)
    built = weights - trained.added_bytes
    build = build_bytes(config, element, low_bit, built, share.masters < 1, pretrained)
    loss = loss_bytes(config, step, low_bit, trained)
    if reshards:
        full = full_shard_memory(
            config, element, low_bit, trained, share, weights, whole_matrices=whole_matrices, pretrained=pretrained
        )
        weights, build, loss = full.weights, full.build, loss + full.at_loss
    gradients = gradient_bytes(config, step, low_bit, trained, share, full)
    layers = [(kind.count, Layer(config, step, trained, kind)) for kind in layer_kinds(config, step.tokens, low_bit)]
    last_forward = 0.0 if full is None else max(layer.forward() for _, layer in layers) + full.at_last_layer
    residual = round(step.residuals_away * step.tokens * config.hidden_size * element)
    residuals = residual * (config.num_hidden_layers - 1)
    # Cosines and sines, fp32 [S, D/2] each, are kept for all steps; those of documents' positions until backward ends.
    position_bytes = 4 * config.rope_dim
    gathered = step.documents * step.tokens * position_bytes
    copies = trained.copies(element, step.recompute)
    kept = [(count, sum(layer.kept(step.recompute).values())) for count, layer in layers]
    one_layer = step.tokens * max(size for _, size in kept) + gathered
    # Of each half the widest layer.
    backward = [layer.backward() for _, layer in layers]
    widest = ByHalf(*(max(sizes) + gradients.arriving for sizes in zip(*backward, strict=True)))
    last_layer = widest.with_gradients(layer_gradients(config, trained, config.num_hidden_layers - 1))
    # The input of the layer before comes back from host memory, if there is one.
    last_layer += min(residual, residuals) + gradients.at_last_layer
    end = EndOfBackward(gradients.at_end, one_layer, max(widest))
    if not (reshards or step.in_backward or step.gradients_on_host):
        end = end_of_backward(config, step, trained, widest, one_layer)
    on_host = {name: round(size * share.states) for name, size in (host_bytes or {}).items()}
    if step.weights_on_host:
        on_host["weights"] = round(comes_and_goes(config, low_bit, element))
    moved = (("gradients", gradients.on_host), ("residuals", residuals * step.residuals_on_host))
    on_host |= {name: size for name, size in moved if size}
    return MemoryEstimate(
        weights=weights,
        gradients=round(end.gradients),
        optimizer=round(count_parameters(config).total * optimizer_bytes * share.states),
        activations=round(step.tokens * sum(count * size for count, size in kept)) - residuals + gathered + copies,
        loss=round(loss),
        backward=round(max(last_layer, head_backward_bytes(config, step, low_bit, trained))),
        at_end=round(end.temporaries),
        workspace=CUDA_WORKSPACE + step.seq_len * position_bytes,
        held=gradients.held,
        one_layer=round(end.activations),
        build=build,
        at_step=gradients.at_step,
        step=round(step_bytes * share.states + gradients.in_masters_dtype),
        in_backward=step.in_backward,
        recorded=step.recorded,
        streamed=step.weights_on_host,
        host=on_host,
        last_forward=round(last_forward),
    )
