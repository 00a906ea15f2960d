"""gate_up's output in 8 bits on several ranks: tensor, expert and data parallel ones, and layers that come and go."""

from typing import Any

import pytest
from torch import Tensor

from qtrain.data.batch import Batch
from qtrain.models import apply_recompute
from qtrain.parallel.mesh import make_mesh
from qtrain.parallel.sharding.data_parallel import DataParallel
from qtrain.parallel.sharding.full_shard import decoder_units
from qtrain.quant import SCHEMES, quantize_linears
from qtrain.train.step.forward import language_forward
from qtrain.train.step.step import compute_gradients
from tests.train.test_tensor_parallel import MIXTURE, ONE_LAYER, model_of, shared_weights_of, tokens
from tests.worlds import run_ranks

# Whether of a mixture, the scheme, ranks of --tp, whether layers are sharded in full.
CASES = (
    (False, "bf16", 2, False), (False, "fp8_tensorwise", 2, False), (False, "fp8_rowwise", 2, False),
    (False, "bf16", 1, True), (False, "fp8_blockwise", 1, True), (True, "int8", 2, False),
)  # fmt: skip


def _step(tp: int, mixture: bool, scheme: str, full_shard: bool, keep_8bit: tuple[str, ...]) -> tuple[float, float]:
    mesh = make_mesh(0, 0, "cpu", tp)
    model = model_of(MIXTURE if mixture else ONE_LAYER, mesh)
    scheme = SCHEMES.make(scheme, {}, "--quantize")
    quantized = quantize_linears(model, scheme, seed=0, head=model.lm_head, **shared_weights_of(model))
    apply_recompute(model, ["swiglu"], keep_8bit)
    units = decoder_units(model) if full_shard else ()
    parallel = DataParallel(model, quantized, mesh, lambda p: False, deterministic=True, units=units)
    numbers = range(mesh.dp_rank, 2, mesh.dp_size)
    batches = [Batch(*map(Tensor.contiguous, (t[:, :-1], t[:, 1:]))) for t in (tokens(2, 13, n) for n in numbers)]
    found = compute_gradients(model, language_forward(model, None), quantized, batches, 0, parallel=parallel)
    return found.loss, found.norm


def _all(world: int) -> list[list[Any]]:
    found = []
    for mixture, scheme, tp, full_shard in CASES:
        tp, full_shard = (tp, full_shard) if world > 1 else (1, False)
        found.append([_step(tp, mixture, scheme, full_shard, keep) for keep in ((), ("gate_up",))])
    return found


def test_ranks_keep_what_one_process_keeps():
    """The loss of a step is that without, the norm of its gradient within 1% of it, and near that of one process."""
    one = _all(1)
    for found in run_ranks(2, _all, 2):
        for case, ((loss, norm), (kept_loss, kept_norm)), (_, (_, expected)) in zip(CASES, found, one, strict=True):
            assert kept_loss == loss and kept_norm != norm, case
            assert kept_norm == pytest.approx(norm, rel=1e-2), case
            assert kept_norm == pytest.approx(expected, rel=2e-2), case
