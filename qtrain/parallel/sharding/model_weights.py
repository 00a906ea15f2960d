"""The model's weights on a rank: gathered from the masters that ranks update, or as codes of them.

Where all products of a linear read codes, the rank keeps the codes only: the full weight exists for the moment in which
it is quantized. With full sharding a rank quantizes its rows after the step, and the blocks gather their weights when
they run. On one process they are copied from host memory then.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from qtrain.parallel.mesh import Mesh
from qtrain.parallel.sharding.full_shard import FullShard, ShardedBlock, Unit
from qtrain.parallel.sharding.sharded_codes import ShardedCodes, gather_codes, share_codes, update_codes
from qtrain.parallel.sharding.shards import Sharded, local_tensors
from qtrain.parallel.sharding.weights import GatheredMaster, gather_weights, staging_size
from qtrain.quant import LowBitLinear, QuantizedModel, Scheme, reassign
from qtrain.quant.choices import shared_weights
from qtrain.quant.scheme_map import spec_of
from qtrain.quant.weight_codes import reads_codes_only, wire_format
from qtrain.tensors.lazy import drop_initializer, is_lazy, make_lazy, materialize, plain_tensors
from qtrain.tensors.stored_weight import StoredWeight


class ModelWeights:
    """The weights of `model`, whose trained parameters have their masters in `parameters`, and the frozen matrices of
    `units` in `frozen`.

    keep_full_weights: also of linears that read codes only. units: those whose weights exist in full only while they
    run, in this order; reduce(i): what is done with the gradients of unit i."""

    def __init__(
        self,
        model: nn.Module,
        quantized: QuantizedModel,
        parameters: Sequence[Sharded],
        mesh: Mesh,
        *,
        frozen: Sequence[Sharded] = (),
        keep_full_weights: bool = False,
        units: Sequence[Unit] = (),
        reduce: Callable[[int], None] = lambda index: None,
        reduces_apart: bool = False,
    ):
        self._quantized, self._mesh = quantized, mesh
        self._parameters = [s for s in parameters if s.master is not s.parameter]
        self._trained, self._frozen = list(parameters), list(frozen)
        self._keeps_full, self._units = keep_full_weights, list(units)
        self._reduce, self._reduces_apart = reduce, reduces_apart
        # Frozen weights are quantized whenever their block is gathered: always with the bits of the first time.
        self._weight_keys, self._first_keys = quantized.keys.clone(), quantized.keys.clone()
        self._build(model)
        if mesh.shard > 1 or units:
            self._quantize_outside()

    def _build(self, model: nn.Module) -> None:
        """Decide what is kept of each weight, in the schemes that its linear runs in now."""
        units, mesh = self._units, self._mesh
        self._linear_of = {} if mesh.shard == 1 and not units else _linears_by_weight(self._quantized, model)
        self._codes: list[ShardedCodes] = []
        self._in_blocks: set[int] = set()
        self.full_shard: FullShard | None = None
        """The blocks; None without full sharding."""
        if not self._keeps_full:
            self._drop_full_weights()
        if not units:
            return
        shared = shared_weights(model)
        sharded = [self._sharded_block(unit, shared) for unit in units]
        # Codes before the blocks are freed: the first forward pass gathers them.
        kept = [weight for weight in self._codes if weight.keeps]
        share_codes(kept)
        update_codes(kept)
        device = next(model.parameters()).device
        self.full_shard = FullShard(sharded, device, self._reduce, reduces_apart=self._reduces_apart)

    def reassign(self, model: nn.Module, schemes: Mapping[str, Scheme]) -> None:
        """`quant.reassign` between steps; all ranks call it."""
        quantized = self._quantized
        # Others keep their codes, which a lazy weight does not have.
        changed = [name for name, scheme in schemes.items() if spec_of(scheme) != quantized.schemes.get(name)]
        if not changed:
            return
        before = {name: quantized.linear(name) for name in changed}
        if self.full_shard is not None:
            self.full_shard.free()
            self.full_shard.remove()
        for linear in before.values():
            self._make_lazy(linear)
        reassign(model, quantized, schemes)
        after = {name: quantized.linear(name) for name in changed}
        # A head is a unit of its own.
        holders: dict[nn.Module, nn.Module] = {before[name]: after[name] for name in changed}
        self._units = [replace(unit, holder=holders.get(unit.holder, unit.holder)) for unit in self._units]
        del before, holders, linear  # with the codes of before
        for keys in (self._weight_keys, self._first_keys):
            keys[:, 2] = quantized.keys[:, 2]  # the numbers of linears
        self._build(model)
        self._gather_codes()
        for linear in after.values():
            self._realize(linear)
            if isinstance(linear, LowBitLinear):
                quantized.ask_amax(linear)

    def _make_lazy(self, linear: LowBitLinear | nn.Linear | nn.Conv2d) -> None:
        """Make the weight of a linear or convolution lazy, if it is not in memory: swapped by `quant.reassign`, a model
        is then never whole."""
        weight = linear.weight
        dropped = isinstance(linear, LowBitLinear) and linear.codes_only
        if isinstance(weight.data, StoredWeight) or not (dropped or id(weight) in self._in_blocks):
            return
        if dropped:
            weight.data = weight.new_empty(weight.shape)
        make_lazy(weight, functools.partial(self.whole, weight))
        if isinstance(linear, LowBitLinear):
            linear.codes_only = linear.gathered = False

    def _realize(self, linear: LowBitLinear | nn.Linear | nn.Conv2d) -> None:
        """Give a lazy weight its value where the model keeps it in full; elsewhere it comes when it is gathered."""
        weight = linear.weight
        if not is_lazy(weight):
            return
        if id(weight) in self._in_blocks or (isinstance(linear, LowBitLinear) and linear.codes_only):
            drop_initializer(weight)
            return
        materialize(weight)
        if isinstance(linear, LowBitLinear):
            linear.refresh()

    def _drop_full_weights(self) -> None:
        """Free the weights of linears that read only codes; the parameter stays, to receive the gradient."""
        for sharded in self._parameters + self._frozen:
            linear, is_sharded = self._linear_of.get(id(sharded.parameter)), sharded.mesh.shard > 1
            if linear is not None and reads_codes_only(linear.scheme) and (is_sharded or sharded.on_host):
                linear.keep_codes_only()
                if is_sharded and wire_format(linear.scheme):
                    self._codes.append(ShardedCodes(sharded, linear))

    def _quantize_outside(self) -> None:
        """Compute the codes of linears that are in no block, which the swap has left without memory; with full sharding
        a head with the embedding's weight, experts that no other rank has."""
        self._gather_codes()
        for linear in self._quantized.linears:
            if not linear.gathered:
                linear.refresh()

    def _gather_codes(self) -> None:
        """Those of linears that are in no block and keep codes only."""
        outside = [linear for linear in self._quantized.linears if not linear.gathered]
        for linear in outside:
            linear.weight_codes.allocate()
        as_codes = [weight for weight in self._codes if not weight.keeps]
        update_codes(as_codes)
        known = {id(weight.linear) for weight in as_codes}  # whose codes have come from all ranks
        missing = {id(linear.weight) for linear in outside if linear.codes_only and id(linear) not in known}
        gather_weights(self._gathered(s) for s in self._parameters if id(s.parameter) in missing)

    def _sharded_block(self, unit: Unit, shared: set[int]) -> ShardedBlock:
        """A unit with its matrices. shared: ids of parameters that other modules hold too, which stay in full."""
        unit_parameters = {id(p): p for p in unit.holder.parameters()}
        ids = {number for number, p in unit_parameters.items() if p.ndim > 1} - shared
        own = [s for s in self._parameters + self._frozen if id(s.parameter) in ids]
        codes = {id(weight.sharded.parameter): weight for weight in self._codes if id(weight.sharded.parameter) in ids}
        tensors = []
        for sharded in own:
            linear = self._linear_of.get(id(sharded.parameter))
            if linear is None or not linear.codes_only:
                tensors += plain_tensors(sharded.parameter)
            if linear is not None:
                tensors += linear.weight_codes.buffers()
                linear.gathered = True
                # Gathered in any micro-batch, a weight is rounded with the random bits of its last update. A linear's
                # key is a row of `quantized.keys`, which several may share.
                keys = self._weight_keys if sharded.parameter.requires_grad else self._first_keys
                linear.weight_key = keys[linear.key.storage_offset() // 3]
        for weight in codes.values():
            weight.keeps = True
        masters = [self._gathered(s) for s in own if id(s.parameter) not in codes]
        self._in_blocks |= {id(s.parameter) for s in own}

        def fill(whole: bool, staging: Tensor | None) -> None:
            gather_codes([*codes.values()], whole)
            gather_weights(masters, staging=staging)

        receivers = [s.receiver for s in self._trained if id(s.parameter) in unit_parameters]
        return ShardedBlock(unit, tensors, fill, receivers, staging_size(masters))

    def _gathered(self, sharded: Sharded) -> GatheredMaster:
        linear = self._linear_of.get(id(sharded.parameter))
        whole = linear is None or not linear.codes_only
        return GatheredMaster(sharded, self._receive, in_place=whole)  # to where it is read, without a copy between

    @property
    def kept_codes(self) -> list[Tensor]:
        """This rank's codes that are gathered when blocks run."""
        return [tensor for weight in self._codes if weight.keeps for tensor in weight.own()]

    @torch.no_grad()
    def gather(self) -> None:
        """Copy the masters' values into the model, and quantize those weights that it does not keep in full. What
        belongs to fully sharded blocks is gathered when they run."""
        if not self._parameters:
            return
        if self.full_shard is not None:
            self.full_shard.free()  # what blocks still hold is of before the update
            self._weight_keys.copy_(self._quantized.keys)
        update_codes([weight for weight in self._codes if weight.sharded.parameter.requires_grad])
        as_codes = {id(weight.sharded.parameter) for weight in self._codes}
        changed = [s for s in self._parameters if id(s.parameter) not in as_codes]
        # The version counter tells stale codes. It does not see what is written through `.data`, or gathered later.
        torch.autograd.graph.increment_version([s.parameter for s in changed])
        gather_weights(self._gathered(s) for s in changed if id(s.parameter) not in self._in_blocks)
        for sharded in changed:
            linear = self._linear_of.get(id(sharded.parameter))
            if linear is not None and linear.gathered:
                linear.mark_fresh()

    def _gather_masters(self, parameters: Iterable[Sharded], give: Callable[[Sharded, list[Tensor]], None]) -> None:
        gather_weights([GatheredMaster(sharded, give) for sharded in parameters])

    def _receive(self, sharded: Sharded, tensors: list[Tensor]) -> None:
        linear = self._linear_of.get(id(sharded.parameter))
        if linear is not None and linear.codes_only:
            linear.refresh(tensors[0])  # the full weight exists for this call only
            return
        for own, gathered in zip(plain_tensors(sharded.parameter), tensors, strict=True):
            if own.data_ptr() != gathered.data_ptr():  # else it was gathered in place
                own.copy_(gathered)
        if linear is not None and linear.gathered:
            linear.refresh(sharded.parameter)

    def whole(self, parameter: Tensor) -> Tensor:
        """The value of a parameter that is not in memory, in new memory; all data ranks call it."""
        found: list[Tensor] = []
        sharded = next(s for s in self._parameters + self._frozen if s.parameter is parameter)
        self._gather_masters([sharded], lambda _, tensors: found.extend(tensors))
        return found[0]

    def restore(self) -> None:
        """For an export: the full weights that are not in memory; of fully sharded blocks in the host's, on the first
        data rank of their mesh only. The model does not train any more after this."""
        if self.full_shard is not None:
            self.full_shard.remove()
        dropped = {id(linear.weight) for linear in self._linear_of.values() if linear.codes_only}
        missing = [s for s in self._parameters + self._frozen if id(s.parameter) in dropped | self._in_blocks]
        self._gather_masters((s for s in missing if s.mesh.shard > 1), self._restore)
        for sharded in missing:
            if sharded.mesh.shard == 1:
                self._restore(sharded, local_tensors(sharded.master))

    def _restore(self, sharded: Sharded, tensors: list[Tensor]) -> None:
        parameter, from_block = sharded.parameter, id(sharded.parameter) in self._in_blocks
        if from_block and sharded.mesh.dp_rank:
            return
        linear = self._linear_of.get(id(parameter))
        if isinstance(parameter.data, StoredWeight):
            assert linear is not None
            value = parameter.data.with_tensors([tensor.cpu() for tensor in tensors])
            linear.weight = nn.Parameter(value, requires_grad=parameter.requires_grad)
        else:
            # Blocks in the host's memory: together they may not fit the device's.
            parameter.data = tensors[0].cpu() if from_block else tensors[0]
        if not from_block and linear is not None:
            linear.codes_only = False


def weights_as_codes(model: nn.Module, quantized: QuantizedModel) -> set[int]:
    """ids of the trained weights of which a rank needs no more than codes."""
    linears = _linears_by_weight(quantized, model).items()
    return {number for number, x in linears if x.weight.requires_grad and reads_codes_only(x.scheme)}


def _linears_by_weight(quantized: QuantizedModel, model: nn.Module) -> dict[int, LowBitLinear]:
    """id of a weight -> its linear, where no other module has the weight."""
    shared = shared_weights(model)
    return {id(linear.weight): linear for linear in quantized.linears if id(linear.weight) not in shared}
