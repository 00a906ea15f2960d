"""A health sample: forward and backward of a piece of a micro-batch, twice, beside training.

One pass runs the linears as they are and measures them; the other runs them in high precision, for the true gradient of
the same loss. Both run eagerly, outside of what is compiled or recorded. A run with samples is that without, bit for
bit: gradients are returned and not accumulated, no random number is drawn from the run's generators, delayed scales
record nothing, and buffers that a forward pass writes (the load of experts, batch norms) are put back.

With several ranks whose layers are split or gathered, all of them run the passes (`ranks.py`). Where ranks have codes
in place of weights, no pass runs in high precision.

What costs time: launches of an eager step, and about 20 for every measured tensor. So a sample takes few tokens, and
compares other schemes and gradients of some linears only, in turns: gradients of all would take the memory of a step.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qtrain.data.batch import Batch, TensorBatch
from qtrain.kernels.autotune import without_tuning
from qtrain.models.native.router import Router, Routing
from qtrain.quant import LinearChoice, LowBitLinear, QuantizedModel
from qtrain.quant.health.findings import ALTERNATIVES
from qtrain.quant.health.measures import LARGE, NAMES, direction, direction_sums, measures, product_error, spread
from qtrain.quant.health.probe import LinearProbe, high_precision, probing
from qtrain.quant.scheme_map import spec_text
from qtrain.quant.tensor_roles import GEMMS, READERS
from qtrain.quant.weight_codes import WeightCodes
from qtrain.train.health.ranks import LinearSums, SampleRanks
from qtrain.train.step.forward import Forward

TOKENS = 1024
"""Of as many sequences as have no more together, but of one at least: its first ones."""
IMAGES = 4
TURN = 4
"""Linears of a sample that are compared with other schemes, and whose gradient is."""
TURN_ELEMENTS = 2**27
"""Fewer where the weights of TURN of the largest linears have more elements."""

Row = dict[str, Any]
"""A line of health.jsonl, without its step; `what_if` has of other schemes what the row has of its own."""


class Sampler:
    """Takes samples of a model on `ranks`."""

    def __init__(self, model: nn.Module, quantized: QuantizedModel, forward: Forward, ranks: SampleRanks):
        self._model, self._quantized, self._forward, self._ranks = model, quantized, forward, ranks
        self._device = next(model.parameters()).device
        self.routers = {name: module for name, module in model.named_modules() if isinstance(module, Router)}

    @property
    def has_work(self) -> bool:
        return bool(self.routers) or any(choice.scheme and not choice.kernel for choice in self._quantized.choices)

    def sample(self, batch: TensorBatch, trained: float, number: int, suspects: Collection[str]) -> list[Row]:
        """The rows of all linears in low bits and of the routers, without a step. trained: what the step's loss is
        divided by, which delayed scales of gradients expect. number: of the sample; it says whose turn it is.
        suspects: linears to compare with other schemes in any case. Raises SampleFailed."""
        piece, swapped = piece_of(batch, self._ranks.sequence_parts), self._quantized.by_name()
        self._ranks.check_memory(piece.size / batch.size)
        # Probes read matrices: convolutions are not measured.
        found = [choice for choice in self._quantized.choices if choice.name in swapped and not choice.kernel]
        choices = {choice.name: choice for choice in found}
        # Sizes of layers that are split may differ from rank to rank.
        turn, small, suspects = self._ranks.agree(
            lambda: (_turn(list(choices.values()), number), _small(self._model), sorted(suspects))
        )
        compared = {*turn, *suspects} & choices.keys()
        probes = {name: self._ranks.probe(choice, swapped[name], name in compared) for name, choice in choices.items()}
        # Without the weights themselves there is no pass in high precision, which other ranks' rows would be part of.
        exact = not any(linear.codes_only for linear in swapped.values())
        wanted = {n: _trained(self._model, swapped[n]) for n in turn if exact and not swapped[n].scheme.latent}
        with self._untouched(), self._ranks.passes():
            with probing(list(probes.values())), self._routing() as low_bit:
                gradients = self._backward(piece, trained, wanted, small)
            self._ranks.check(list(probes.values()))
            directions, true = {}, {}
            if exact:
                with high_precision(list(swapped.values())), self._routing() as true:
                    for name, own in self._backward(piece, trained, wanted, ()).items():
                        directions[name] = direction_sums(gradients[name], own)
            rows = _linear_rows(probes, self._ranks.add(probes, directions))
            return rows + _router_rows(self.routers, low_bit, true, self._ranks)

    # ---- the passes --------------------------------------------------------------------------------------------------

    def _backward(
        self, piece: TensorBatch, trained: float, wanted: dict[str, list[Tensor]], through: Collection[str]
    ) -> dict[str, Tensor]:
        """The gradients that are wanted, each flat, of large ones some rows. through: parameters that the backward pass
        runs up to besides."""
        inputs = [p for parameters in wanted.values() for p in parameters]
        held = {id(p) for p in inputs}
        inputs += [p for name, p in self._model.named_parameters() if name in through and id(p) not in held]
        devices = [self._device] if self._device.type == "cuda" else []
        # In a fork of the generators: both passes draw the same dropout.
        with torch.random.fork_rng(devices), torch.enable_grad():
            loss = self._forward(piece).loss / trained
            if not inputs or not loss.requires_grad:
                return {}
            # `grad`, not `backward`: nothing is added to .grad. allow_unused: the piece may not reach every weight.
            found = iter(torch.autograd.grad(loss, inputs, allow_unused=True))
        gradients = {}
        for name, parameters in wanted.items():
            parts = [next(found) for _ in parameters]
            if parts and all(part is not None for part in parts):
                gradients[name] = torch.cat([_sampled(part).flatten() for part in parts])
        return gradients

    @contextlib.contextmanager
    def _untouched(self) -> Iterator[None]:
        """Eager passes inside leave the model as it was."""
        buffers = [
            buffer
            for module in self._model.modules()
            if not isinstance(module, LowBitLinear | WeightCodes)  # probed ones write nothing
            for buffer in module.buffers(recurse=False)
        ]
        # The version tells which buffers were written: only these are copied back.
        before = [(buffer, buffer._version, buffer.clone()) for buffer in buffers]
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(without_tuning())
            for module in list[Any](self._model.modules()):
                # The layers' own loop over chunks of tokens: a sample is one chunk.
                if getattr(module, "mlp_chunks", 0):
                    stack.callback(setattr, module, "mlp_chunks", module.mlp_chunks)
                    module.mlp_chunks = 0
            try:
                yield
            finally:
                with torch.no_grad():
                    for buffer, version, value in before:
                        if buffer._version != version:
                            buffer.copy_(value)

    @contextlib.contextmanager
    def _routing(self) -> Iterator[dict[str, Tensor]]:
        """Fills with the experts int64 [T, k] of each router's tokens, by its name."""
        found: dict[str, Tensor] = {}

        def hook(name: str) -> Callable[..., None]:
            def keep(module: nn.Module, inputs: tuple, routing: Routing) -> None:
                found.setdefault(name, routing.experts)  # a recomputed layer routes again

            return keep

        handles = [router.register_forward_hook(hook(name)) for name, router in self.routers.items()]
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()


def piece_of(batch: TensorBatch, parts: int = 1) -> TensorBatch:
    """The part of a micro-batch that is sampled: of text the sequences with the most trained tokens at their start.
    parts: of each sequence, of which ranks compute one each."""
    if not isinstance(batch, Batch):
        return batch.each(lambda t: t[:IMAGES])
    trained = (batch.labels[:, :TOKENS] >= 0).sum(dim=1)  # [sequences]; labels below 0 are not trained on
    # Whole sequences up to TOKENS; one longer sequence is cut instead.
    count = min(len(trained), max(1, TOKENS // batch.labels.shape[1]))
    rows = trained.argsort(descending=True, stable=True)[:count]
    return batch.each(lambda t: t[rows, : TOKENS // parts * parts])


def _turn(choices: Sequence[LinearChoice], number: int) -> list[str]:
    """The linears whose turn it is in sample `number`."""
    if not choices:
        return []
    count = min(TURN, len(choices), max(1, TURN_ELEMENTS // max(choice.weights for choice in choices)))
    # Round robin over samples: every linear has its turn.
    return [choices[(number * count + i) % len(choices)].name for i in range(count)]


def _small(model: nn.Module) -> set[str]:
    """The trained parameters that a backward pass through all layers is asked for: autograd runs what leads to one, and
    norms, biases and adapters, which every layer has, are small."""
    return {name for name, p in model.named_parameters() if p.requires_grad and p.numel() <= 2**18}


def _sampled(gradient: Tensor) -> Tensor:
    rows = gradient.flatten(1) if gradient.ndim > 1 else gradient[None]  # [rows, columns]
    return rows[spread(rows.shape[0], max(1, LARGE // rows.shape[1]), rows.device)]


def _trained(model: nn.Module, linear: LowBitLinear) -> list[Tensor]:
    """The parameters whose gradient is that of a linear's weight: the weight, or its adapters."""
    if linear.weight.requires_grad:
        return [linear.weight]
    # A module with adapters holds the frozen linear as `base`.
    owners = [module for module in model.modules() if getattr(module, "base", None) is linear]
    return [p for owner in owners for p in owner.parameters() if p.requires_grad]


# ---- rows ------------------------------------------------------------------------------------------------------------


def _linear_rows(probes: Mapping[str, LinearProbe], found: Mapping[str, LinearSums]) -> list[Row]:
    rows: list[Row] = []
    for name, sums in found.items():
        row: Row = {"linear": name, "scheme": spec_text(probes[name].choice.spec)}
        tensors, products = measures(sums.tensors).tolist(), product_error(sums.products[..., 1:]).tolist()
        for scheme in range(len(tensors)):
            of: dict[str, Any] = {}
            for i, tensor in enumerate(READERS):
                if sums.tensors[scheme, i, 0]:  # it was seen, and has elements
                    of[tensor] = dict(zip(NAMES, map(_short, tensors[scheme][i]), strict=True))
            errors = {gemm: _short(products[scheme][i]) for i, gemm in enumerate(GEMMS) if sums.products[scheme, i, 0]}
            of |= {"products": errors} if errors else {}
            if scheme == 0:
                row |= of
            elif of:
                row.setdefault("what_if", {})[ALTERNATIVES[scheme - 1]] = of
        if sums.direction.any():
            row["gradient"] = dict(
                zip(("cosine", "norm_ratio"), map(_short, direction(sums.direction).tolist()), strict=True)
            )
        rows.append(row)
    return rows


def _short(value: float) -> float | None:
    """With five digits; None for what is not finite, which JSON does not have."""
    return float(f"{value:.5g}") if abs(value) < float("inf") else None


def _router_rows(
    routers: dict[str, Router], low_bit: dict[str, Tensor], true: dict[str, Tensor], ranks: SampleRanks
) -> list[Row]:
    counts = []
    for name, experts in low_bit.items():
        load = torch.bincount(experts.flatten(), minlength=routers[name].moe.experts)
        same = load.new_zeros(())
        if name in true:
            # [T]: whether a token has the same set of experts; their order is that of the scores, and may differ.
            same = (experts.sort(dim=1).values == true[name].sort(dim=1).values).all(dim=1).sum()
        counts.append(torch.cat([load, same.view(1), load.new_full((1,), len(experts))]).double())
    if not counts:
        return []
    rows: list[Row] = []
    summed = ranks.sum(torch.cat(counts)).cpu().split([len(own) for own in counts])
    for name, own in zip(low_bit, summed, strict=True):
        load, (same, tokens) = own[:-2], own[-2:].tolist()
        row: Row = {"load": [_short(share) for share in (load / load.sum()).tolist()]}
        if name in true:
            row["drift"] = _short(1 - same / tokens)
        rows.append({"linear": name, "scheme": None, "experts": row})
    return rows
