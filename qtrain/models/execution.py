"""How a built model runs: what backward recomputes, then what is compiled."""

from collections.abc import Iterable
from typing import Any

from qtrain.kernels.autotune import kernels_checksum
from qtrain.kernels.compiler import add_cache_tag
from qtrain.kernels.gemm.compiled_mm import choose_compiled_products
from qtrain.models.hf.impl import HfModel
from qtrain.models.native.decoder import Decoder
from qtrain.models.native.recompute import as_8bit, as_kinds
from qtrain.quant.compiled_layers import allow_kinds_of


def apply_recompute(model: Decoder | HfModel, kinds: Iterable[str], keep_8bit: Iterable[str] = ()) -> None:
    """Set what each layer's backward recomputes (`recompute.KINDS`): gradients are the same whatever it is. keep_8bit:
    what is kept in 8 bits for it (`recompute.TENSORS_8BIT`), which rounds them; of qtrain's own decoder alone."""
    in_8_bits = as_8bit(keep_8bit)
    options: dict[str, Any] = {"keep_8bit": in_8_bits} if in_8_bits else {}
    model.set_recompute(as_kinds(kinds), **options)


def compile_layers(model: Decoder | HfModel) -> None:
    """Compile each layer in place; parameter names do not change. The loss is a kernel of its own.

    Layers share their code, so one compilation serves all that are alike: a 24-layer model starts in about 15 s,
    compiled as a whole in 65 s, at the same steady speed.
    """
    prepare_compiling()
    allow_kinds_of(model.layers)
    for layer in model.layers:
        layer.compile(fullgraph=model.fullgraph)


def prepare_compiling() -> None:
    """Before torch.compile: have bf16 products choose their algorithm, and keep torch's caches of compiled code apart
    by the state of this project's kernels.

    They key a custom op by its name: code that was compiled for the arguments of an older op would run with this one.
    """
    choose_compiled_products()
    add_cache_tag(f"qtrain {kernels_checksum():08x}")
