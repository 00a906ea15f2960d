"""A run of qtrain's own decoder, as its plan counts it: what a rank keeps in memory, and moves between products."""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from functools import cached_property

from qtrain.comm.wire import ALONE_BYTES
from qtrain.models import ModelConfig
from qtrain.models.cost.linear_bytes import LinearBytes, LowBitBytes
from qtrain.models.cost.memory import MemoryEstimate, estimate_memory
from qtrain.models.cost.parameters import (
    ParameterGroup,
    count_parameters,
    flops_per_token,
    layer_index,
    linear_key,
)
from qtrain.models.cost.step_shape import StepShape
from qtrain.models.cost.step_traffic import between_products
from qtrain.models.cost.teacher import with_teacher
from qtrain.models.cost.trained import AdaptedLinear, TrainedPart, all_of
from qtrain.models.cost.weight_memory import ONE_GPU, RankShare
from qtrain.optim import ParameterShape
from qtrain.parallel.layers.exchange import spanning_scales
from qtrain.parallel.mesh import Mesh
from qtrain.quant import LinearChoice, LowBitScheme
from qtrain.quant.adapted_linear import writes_rows_between
from qtrain.quant.execute import rowwise_swiglu, takes_softmax_codes, writes_swiglu_codes
from qtrain.quant.weight_codes import reads_codes_only
from qtrain.train.plan.checked_settings import CheckedSettings
from qtrain.train.plan.scheme_bytes import linear_bytes
from qtrain.train.plan.sharding import fullest_share
from qtrain.train.plan.step_time import MEASURED_SCHEME, MEASURED_SEQUENCE, BetweenProducts
from qtrain.train.settings.machine import records_steps
from qtrain.train.settings.recompute import kept_8bit, recompute_kinds
from qtrain.train.settings.settings import LanguageSettings


@dataclass(frozen=True)
class LanguageRun:
    """A run of qtrain's own decoder, as its plan counts it."""

    checked: CheckedSettings
    config: ModelConfig
    """With --tp and --ep, for the memory of one rank, of its part; that --tp shards the tokens too is not counted."""
    linears: Sequence[LinearChoice]
    trained: TrainedPart | None = None
    """What trains, where not everything does."""
    teacher: ModelConfig | None = None
    """Of --distill."""

    @property
    def settings(self) -> LanguageSettings:
        return self.checked.language

    @property
    def adapters(self) -> Sequence[AdaptedLinear]:
        return self.trained.adapters if self.trained else ()

    @property
    def step_shape(self) -> StepShape:
        settings, checked = self.settings, self.checked
        return StepShape(
            micro_batch_size=checked.geometry.micro_batch_size,
            seq_len=settings.seq_len,
            element=checked.dtype.itemsize,
            recompute=recompute_kinds(settings),
            compiled=settings.compile,
            loss_chunks=settings.loss_chunks,
            accumulates=checked.geometry.gradient_accumulation > 1,
            in_backward=settings.optimizer_in_backward,
            recorded=records_steps(settings),
            residuals_on_host="residuals" in checked.offload,
            weights_on_host="weights" in checked.offload,
            gradients_on_host="gradients" in checked.offload,
            mlp_chunks=settings.mlp_chunks,
            documents=settings.doc_mask or _packs_examples(settings),
            sequence_parts=settings.sequence_parts,
            residual_parts=settings.cp // settings.sequence_parts,
        )

    def between_products(self) -> BetweenProducts:
        """Bytes between products; those of the runs of which speeds were measured, too."""
        step, plain = self.step_shape, replace(self.step_shape, recompute=frozenset())
        run = between_products(self.config, step, self.low_bit, self.adapters)
        if self.teacher is not None:  # a forward pass: a third, as `token_seconds` divides them
            run += between_products(self.teacher, plain, LowBitBytes.plain(step.element)) / 3
        as_measured = replace(self, config=replace(self.config, sub_norm=False), trained=None)
        low_bit = as_measured.low_bit_in([_scheme_as_measured(linear.scheme) for linear in self.linears])
        return BetweenProducts(
            run=run,
            measured=between_products(as_measured.config, plain, low_bit),
            flops=asdict(flops_per_token(self.config, MEASURED_SEQUENCE)),
        )

    @cached_property
    def trained_in_full(self) -> TrainedPart:
        """What trains."""
        return self.trained or all_of(self.config, self.checked.dtype.itemsize)

    @cached_property
    def shapes(self) -> list[ParameterShape]:
        """Of what the optimizer steps."""
        # Optimizer states of weights stored in low bits have no fp32 master.
        stored: Counter[tuple[int, ...]] = Counter(
            linear.shape for linear in self.linears if linear.stored and not linear.is_head and not self.adapters
        )
        moved = "gradients" in self.checked.offload

        def comes_and_goes(found: ParameterGroup) -> bool:
            """A tied embedding does not."""
            return len(found.shape) > 1 and (found.hidden or not self.config.tie_word_embeddings)

        shapes = []
        for found in self.trained_in_full.shapes:
            in_low_bits = min(stored[found.shape], found.count) if found.hidden else 0
            stored[found.shape] -= in_low_bits
            shapes += [
                ParameterShape(*found._replace(count=count), stored=is_stored, on_host=moved and comes_and_goes(found))
                for count, is_stored in ((in_low_bits, True), (found.count - in_low_bits, False))
                if count
            ]
        return shapes

    @cached_property
    def state_bytes(self) -> float:
        """Of the optimizer's states and masters in device memory."""
        return self.checked.optimizer.state_bytes(self.shapes, self.trained_in_full.element)

    def update_bytes(self) -> float:
        """That an optimizer's step reads and writes in device memory: states and weights both ways, gradients for their
        norm and for the update."""
        return 2 * self.state_bytes + 4 * self.trained_in_full.bytes

    def memory(self) -> MemoryEstimate:
        """Bytes by kind at each moment of a step."""
        checked, model_config, adapted = self.checked, self.config, bool(self.adapters)
        trained, shapes = self.trained_in_full, self.shapes
        optimizer, partitioned = checked.optimizer, checked.settings.optimizer_in_backward
        # Codes are all that is read of these weights: where masters are sharded, there is no full one.
        kinds = {(n.shape, id(n.scheme)): n for n in self.linears}.values()  # most linears share a scheme
        codes_only = {n.shape for n in kinds if n.scheme and reads_codes_only(n.scheme) and not adapted}
        estimate = estimate_memory(
            model_config,
            self.step_shape,
            optimizer_bytes=self.state_bytes / count_parameters(model_config).total,
            host_bytes=optimizer.host_bytes(shapes, trained.element),
            step_bytes=optimizer.step_bytes(shapes, trained.element, partitioned=partitioned),
            pretrained=checked.settings.pretrained,
            low_bit=self.low_bit,
            trained=trained,
            share=self._rank_share(shapes, codes_only),
            reshards=checked.reshards,
            whole_matrices=optimizer.needs_whole(hidden=True),
        )
        return estimate if self.teacher is None else with_teacher(estimate, self.teacher, self.step_shape)

    @cached_property
    def low_bit(self) -> LowBitBytes:
        """Bytes of the linears of every layer."""
        one = self.checked.settings.weight_codes == "one"
        return self.low_bit_in([linear.in_one_layout if one else linear.scheme for linear in self.linears])

    def low_bit_in(self, schemes: Sequence[LowBitScheme | None]) -> LowBitBytes:
        """Bytes of the linears of every layer, in these schemes."""
        checked, model_config = self.checked, self.config
        element, head = checked.dtype.itemsize, None
        in_layers: dict[int, dict[str, LowBitScheme | None]] = {}
        for linear, scheme in zip(self.linears, schemes, strict=True):
            if linear.is_head:
                head = scheme
            else:
                in_layers.setdefault(layer_index(linear.name), {})[linear_key(linear.name)] = scheme
        layers = [in_layers[index] for index in sorted(in_layers)]
        # Frozen linears keep no input for grad_weight; adapters keep it for theirs.
        adapted, columns = bool(self.adapters), {a.name: a.columns for a in self.adapters}
        in_linears = self.trained is not None and self.trained.in_linears
        frozen_in_full = adapted and (not checked.reshards or checked.mesh.shard == 1)

        def bytes_of(name: str, scheme: LowBitScheme | None) -> LinearBytes:
            in_full = frozen_in_full or _is_whole(checked.mesh, name)
            # Adapters of experts read the rows themselves (`quant.adapted_experts`).
            reads_codes = in_linears and not name.startswith("experts.")
            return linear_bytes(scheme, element, columns.get(name, 0), adapted, in_full, reads_codes)

        def layer_low_bit(schemes: Mapping[str, LowBitScheme | None]) -> LowBitBytes:
            # As `quant.swiglu_mlp` decides it, which takes no norm between the two linears.
            # Of a mixture the experts decide, which are most of the layer.
            main = "experts." if "experts.gate_up" in schemes else ""
            up, down = schemes[f"{main}gate_up"], schemes[f"{main}down_proj"]
            width = 2 * model_config.intermediate_size
            plain = up and down and not model_config.sub_norm
            adapted_codes = plain and not main and _adapted_mlp_writes_codes(up, down, width, columns, self.trained)
            # Fused kernels know no scale that covers other ranks' tokens.
            spans = (
                plain
                and checked.settings.sequence_parts > 1
                and (spanning_scales(down, "x") or spanning_scales(up, "dy"))
            )
            fused = plain and not adapted and not spans
            rowwise = bool(fused and rowwise_swiglu(down, "x") and rowwise_swiglu(up, "dy"))
            return LowBitBytes(
                layer={name: bytes_of(name, scheme) for name, scheme in schemes.items()},
                head=None if head is None else bytes_of("lm_head", head),
                down_input_recomputed=rowwise,
                swiglu_codes=rowwise or bool(adapted_codes or (fused and writes_swiglu_codes(down, "x"))),
                gate_up_8bit="gate_up" in kept_8bit(checked.settings),
                softmax_codes=head is not None and takes_softmax_codes(head),
            )

        kinds = {key: scheme for layer in layers for key, scheme in layer.items()}
        if all(kinds[key] == scheme for layer in layers for key, scheme in layer.items()):
            return layer_low_bit(kinds)
        return replace(layer_low_bit(kinds), layers=tuple(map(layer_low_bit, layers)))

    @property
    def _sums_in_place(self) -> bool:
        """Whether the sums of gradients that are sent alone are in the memory of the recorded gradients."""
        settings, replicas = self.settings, self.checked.mesh.replicate
        once_a_step = not (settings.deterministic or settings.optimizer_in_backward or self.checked.reshards)
        return once_a_step and replicas == 1 and records_steps(settings)

    def _rank_share(self, shapes: Sequence[ParameterShape], codes_only: Set[tuple[int, ...]]) -> RankShare:
        """What the fullest rank holds; where one process has layers in host memory, nothing of them. codes_only:
        shapes of the weights of which ranks hold codes and a master."""
        checked = self.checked
        mesh, needs_whole = checked.mesh, checked.optimizer.needs_whole
        if checked.reshards and mesh.shard == 1:
            trained = 0.0 if "gradients" in checked.offload else 1.0
            return ONE_GPU._replace(masters=trained, experts=0.0, others=0.0)
        # Parameters of which a rank keeps a master besides what the layers read.
        apart = [s for s in shapes if not s.stored and (not s.hidden or not needs_whole(True) or s.shape in codes_only)]

        def kind_shares(chosen: Sequence[ParameterShape], whole: float) -> tuple[float, float]:
            """Of experts and of all others. whole: the share of what is not sharded."""
            experts, others = ([s for s in chosen if s.experts == kind] for kind in (True, False))
            # Where none of a kind trains, frozen weights are sharded evenly all the same.
            expert_share, other_share = (
                fullest_share(kind, shards, needs_whole) if kind else 1 / shards
                for kind, shards in ((experts, mesh.expert_mesh.shard), (others, mesh.shard))
            )
            return whole if _is_whole(mesh) else expert_share, other_share

        def fullest(chosen: Sequence[ParameterShape], *, whole: float = 1.0) -> float:
            if mesh.expert_mesh is None:
                return fullest_share(chosen, mesh.shard, needs_whole)
            expert_share, other_share = kind_shares(chosen, whole)
            held = sum(s.elements * (expert_share if s.experts else other_share) for s in chosen)
            return held / max(sum(s.elements for s in chosen), 1)

        # Of two kinds with --ep: experts over the expert-parallel ranks, all else over the data-parallel ones.
        # Experts that are not sharded further keep their gradients, as all else does without shards.
        element, in_place = checked.dtype.itemsize, self._sums_in_place
        summed = [s for s in shapes if not (in_place and _is_sent_alone(s, element))]
        gradients = 0.0 if mesh.shard == 1 else fullest(summed, whole=0.0)
        gradients *= sum(s.elements for s in summed) / max(sum(s.elements for s in shapes), 1)
        states = fullest(shapes)
        expert_share, other_share = (states, states) if mesh.expert_mesh is None else kind_shares(shapes, 1.0)
        return RankShare(
            states, fullest(apart, whole=0.0), gradients, None if _is_whole(mesh) else expert_share, other_share
        )


def _scheme_as_measured(scheme: LowBitScheme | None) -> LowBitScheme | None:
    """That of the measured runs: codes of tensors whose scales are known before they are read."""
    low_bit = scheme is not None and set(scheme.gemm_dtypes().values()) - {"bf16"}
    return MEASURED_SCHEME if low_bit else None


def _is_sent_alone(shape: ParameterShape, element: int) -> bool:
    """Whether the gradient of such a parameter is a message of its own (`parallel/sharding/gradient_buckets.py`)."""
    return len(shape.shape) > 1 and element * shape.elements >= ALONE_BYTES * shape.count


def _packs_examples(settings: LanguageSettings) -> bool:
    """Whether instructions or chats share sequences, as documents of their own."""
    kind = (settings.train_ds or {}).get("type")
    return kind in ("instruct", "chat") and getattr(settings, "seq_len_multiple", 0) == 0


def _is_whole(mesh: Mesh, key: str = "experts.") -> bool:
    """Whether a rank's part of the linear `key` is not sharded further, though all else is."""
    return key.startswith("experts.") and mesh.expert_mesh is not None and mesh.expert_mesh.shard == 1


def _adapted_mlp_writes_codes(
    up: LowBitScheme, down: LowBitScheme, width: int, columns: Mapping[str, int], trained: TrainedPart | None
) -> bool:
    """Whether the linears of an MLP run with their adapters as one function (`quant.adapted_linear.adapted_pair`)."""
    if trained is None or trained.dora or not trained.in_linears or not columns.keys() >= {"gate_up", "down_proj"}:
        return False
    return writes_rows_between(up, down, width)
