"""Models of timm: found by name, counted without memory, run in blocks, and exported so that timm loads them."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from qtrain.core.errors import UserError
from qtrain.models import (
    build_vision_model,
    check_vision_model,
    constructor_kwargs,
    empty_vision_model,
    export_timm,
    image_config,
    recompute_blocks,
    repeated_blocks,
    vision_layers,
)
from qtrain.models.cost.vision import vision_cost
from qtrain.models.vision_layers import EncoderBlock, SelfAttention, SwiGLUMLP, use_kernels
from qtrain.quant import SCHEMES, quantize_linears, swiglu_mlp
from qtrain.quant.any_model import output_head

timm = pytest.importorskip("timm")

NAME = "vit_tiny_patch16_224"
SMALL = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}
CPU = torch.device("cpu")


def build(dtype=torch.float32, **changes) -> nn.Module:
    torch.manual_seed(0)
    kwargs = {**SMALL, **changes}
    model = build_vision_model(NAME, kwargs, 5, pretrained=False, device=CPU, dtype=dtype)
    nn.init.normal_(model.head.weight)
    return model


def test_names_are_those_of_timm_with_and_without_a_prefix_and_a_tag():
    for given in ("vit_giant_patch14_dinov2.lvd142m", "timm/vit_giant_patch14_dinov2.lvd142m"):
        assert check_vision_model(given, {}, True) == "vit_giant_patch14_dinov2.lvd142m"
    with pytest.raises(UserError, match="Did you mean 'vit_tiny_patch16_224'"):
        check_vision_model("vit_tiny_patch16_244", {}, False)
    with pytest.raises(UserError, match="its tags are lvd142m"):
        check_vision_model("timm/vit_giant_patch14_dinov2.lvd142", {}, True)


def test_the_cost_is_that_of_the_formulas():
    """C = 32, 17 tokens, 2 layers: qkv 3C², proj C², mlp 8C² a layer; attention 2·S·C for q·kᵀ, and for p·v."""
    model = empty_vision_model(NAME, SMALL, 5)
    cost = vision_cost(model, output_head(model), (3, 16, 16))
    patches = 4 * 16 * 32 * 3 * 4 * 4  # their convolution; an image has no gradient
    assert cost.blocks == 6 * 17 * 2 * 12 * 32**2 + patches and cost.head == 6 * 32 * 5 and cost.rows == 17
    assert cost.attention == 3 * 2 * 2 * (2 * 17 * 17 * 32)
    assert cost.other == 0 and cost.linear_rows["patch_embed.proj"] == 16
    assert cost.conv_inputs == {"patch_embed.proj": (3 * 16 * 16, False)}
    linears = {name: rows for name, rows in cost.linear_rows.items() if name not in cost.conv_inputs}
    inputs = {name: rows * model.get_submodule(name).in_features for name, rows in linears.items()}
    assert inputs.pop("head") == 32 and sum(inputs.values()) == 2 * 17 * (32 + 32 + 32 + 128) and not cost.bypassed
    a_layer = 17 * 4 * (32 * 2 + 96 + 32 * 2 + 128 * 2)  # norms' inputs and outputs, qkv, attention, mlp
    assert 2 * a_layer < cost.kept < 3 * a_layer


@pytest.mark.parametrize("name", ["resnet10t", "test_byobnet"])
def test_the_cost_of_convolutions_is_that_of_a_counted_step(name):
    """Without a gradient of the image, which would make the speed of light of a small network too slow."""
    model = empty_vision_model(name, {}, 5)
    cost = vision_cost(model, output_head(model), (3, 64, 64))
    with FlopCounterMode(display=False) as counted:
        model(torch.empty(1, 3, 64, 64, device="meta")).sum().backward()
    assert sum(cost.flops.values()) == counted.get_total_flops()


def test_the_size_of_images_is_no_argument_of_models_that_take_any():
    given = {"img_size": 16, "in_chans": 1}
    assert constructor_kwargs("resnet18", given) == {"in_chans": 1} and constructor_kwargs(NAME, given) == given
    assert image_config(empty_vision_model("resnet18", {"in_chans": 1}, 5), given)["input_size"] == (1, 16, 16)
    wrong = {"img_size": 16, "in_chan": 1}
    with pytest.raises(UserError, match="unexpected keyword argument 'in_chan'"):
        empty_vision_model(NAME, constructor_kwargs(NAME, wrong), 5)


def test_a_map_of_one_pixel_has_a_cost():
    """On one image BatchNorm has one value a channel, on which it does not train."""
    model = empty_vision_model("resnet18", {}, 5)
    small, large = (vision_cost(model, output_head(model), (3, size, size)) for size in (32, 64))
    assert model.training and large.blocks == 4 * small.blocks and 3.5 < large.kept / small.kept < 4
    # The image, and what the pooling computes; the rest are outputs of ReLU, which keeps them.
    assert [n for n, x in small.conv_inputs.items() if not x.others_keep] == ["conv1", "layer1.0.conv1"]


def test_linears_that_a_model_does_not_call_are_told():
    model = empty_vision_model("eva02_tiny_patch14_224", {"img_size": 28, "depth": 1}, 5)
    cost = vision_cost(model, output_head(model), (3, 28, 28))
    assert cost.blocks and all(isinstance(model.get_submodule(name), nn.Linear) for name in cost.bypassed)


@pytest.mark.parametrize("name", ["resnet18", "convnext_atto", "swin_tiny_patch4_window7_224"])
def test_models_of_other_kinds(name):
    model = empty_vision_model(name, {}, 5)
    config = image_config(model, {})
    cost = vision_cost(model, output_head(model), config["input_size"])
    assert config["input_size"] == (3, 224, 224) or name == "convnext_atto"
    assert sum(cost.flops.values()) > 1e9 and output_head(model).out_features == 5
    assert bool(repeated_blocks(model)) == (name != "resnet18")


def test_grey_images():
    model = empty_vision_model(NAME, {**SMALL, "in_chans": 1}, 5)
    config = image_config(model, {**SMALL, "in_chans": 1})
    assert config["input_size"] == (1, 16, 16) and len(config["mean"]) == len(config["std"]) == 1


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("scheme", ["bf16", "int8"])
def test_what_backward_computes_again_changes_no_gradient(mode, scheme):
    images, gradients = torch.randn(2, 3, 16, 16), []
    for chosen in ("none", mode):
        model = build()
        quantize_linears(model, SCHEMES.make(scheme, {}, "--quantize"), seed=0, head=output_head(model))
        recompute_blocks(model, chosen)
        model(images).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    with pytest.raises(UserError, match="no repeated blocks"):
        recompute_blocks(nn.Linear(2, 2), mode)


@pytest.mark.parametrize("scheme", ["bf16", "int8", "int8_weight"])
def test_timm_loads_the_export_by_file_and_by_folder(scheme, tmp_path):
    model = build()
    quantize_linears(model, SCHEMES.make(scheme, {}, "--quantize"), seed=0, head=output_head(model))
    image = image_config(model, SMALL)
    classes = ("a", "b", "c", "d", "e")
    export_timm(model, tmp_path, name=NAME, kwargs=SMALL, classes=classes, image=image)
    by_file = timm.create_model(NAME, num_classes=5, **SMALL, checkpoint_path=tmp_path / "model.safetensors")
    by_folder = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    images = torch.randn(2, 3, 16, 16)
    expected, found = model.eval()(images), by_file.eval()(images)
    assert torch.equal(found, by_folder.eval()(images))
    if scheme == "bf16":
        assert torch.equal(found, expected)
    assert float(((found - expected).norm() / expected.norm()).detach()) < 0.05
    assert by_folder.pretrained_cfg["input_size"] == (3, 16, 16) and by_folder.pretrained_cfg["num_classes"] == 5


def test_the_missing_package_is_named_be_it_timm_or_what_it_imports(monkeypatch):
    """torchvision, which timm imports, may be the one that is missing."""
    import sys

    from qtrain.models.vision import import_timm

    for module in [name for name in sys.modules if name.partition(".")[0] == "timm"]:
        monkeypatch.delitem(sys.modules, module)
    for missing in ("torchvision", "timm"):
        monkeypatch.setitem(sys.modules, missing, None)
        with monkeypatch.context() as patch:
            if missing == "torchvision":
                for module in [n for n in sys.modules if n.startswith("torchvision.")]:
                    patch.delitem(sys.modules, module)
            with pytest.raises(UserError, match=f"pip install {missing}"):
                import_timm()


# ---- layers through kernels ------------------------------------------------------------------------------------------

GIANT = "vit_giant_patch14_dinov2"
SMALL_GIANT = {"img_size": 28, "embed_dim": 96, "depth": 2, "num_heads": 3}


def step_of(model, images):
    """Logits, and the gradients by name."""
    logits = model(images)
    logits.square().sum().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters()}


def timm_and_ours(device, dtype, **changes):
    """timm's model, and the one with other layers and the same weights."""
    torch.manual_seed(0)
    kwargs = {**SMALL_GIANT, **changes}
    ours = build_vision_model(GIANT, kwargs, 5, pretrained=False, device=device, dtype=dtype)
    nn.init.normal_(ours.head.weight)
    theirs = timm.create_model(GIANT, num_classes=5, **kwargs).to(device, dtype)
    theirs.load_state_dict(ours.state_dict())  # of the same names
    return theirs, ours


def test_layers_compute_what_those_of_timm_do():
    theirs, ours = timm_and_ours(CPU, torch.float32)
    kinds = [(type(block), type(block.mlp), type(block.attn)) for block in ours.blocks]
    assert kinds == 2 * [(EncoderBlock, SwiGLUMLP, SelfAttention)]
    images = torch.randn(2, 3, 28, 28)
    (expected, grads), (found, found_grads) = step_of(theirs, images), step_of(ours, images)
    assert torch.equal(found, expected) and all(torch.equal(found_grads[name], grads[name]) for name in grads)


@pytest.mark.parametrize("scheme,kwargs", [("int8", {}), ("fp8_tensorwise", {"scaling": "delayed"}), ("mxfp8", {})])
def test_a_quantized_swiglu_mlp_is_one_function(scheme, kwargs, monkeypatch):
    """Which trains biases too; codes are those of the two linears with timm's activation between them."""
    calls = []
    monkeypatch.setattr(vision_layers, "runs_kernels", lambda x: True)
    monkeypatch.setattr(vision_layers, "swiglu_mlp", lambda *a: calls.append(a) or swiglu_mlp(*a))
    results = []
    for model in timm_and_ours(CPU, torch.float32):
        quantize_linears(model, SCHEMES.make(scheme, kwargs, "--quantize_kwargs"), seed=3)
        torch.manual_seed(1)
        results.append(step_of(model, torch.randn(2, 3, 28, 28)))
    (expected, grads), (found, found_grads) = results
    assert len(calls) == 2 and grads.keys() == found_grads.keys()
    assert torch.allclose(found, expected, rtol=1e-3, atol=1e-3)
    for name, grad in grads.items():
        assert (found_grads[name] - grad).norm() <= 1e-3 * grad.norm(), name


def test_the_activation_is_not_kept_beside_its_input():
    """Of a plan: per token and layer I numbers less than timm's layers keep on their own."""
    ours = empty_vision_model(GIANT, SMALL_GIANT, 5)
    with torch.device("meta"):
        theirs = timm.create_model(GIANT, num_classes=5, **SMALL_GIANT)
    kept = [vision_cost(model, output_head(model), (3, 28, 28)).kept for model in (theirs, ours)]
    tokens, inner = 2 * 2 + 1, ours.blocks[0].mlp.fc2.in_features
    assert kept[0] - kept[1] == 2 * tokens * inner * 4


@pytest.mark.parametrize("kernels", [False, True])
def test_layers_in_high_precision_are_those_of_timm(kernels, monkeypatch):
    """With the activation and the norms of the kernels, too."""
    monkeypatch.setattr(vision_layers, "runs_kernels", lambda x: kernels)
    check_beside_timm(1e-5)


def check_beside_timm(relative):
    """A step in fp32: logits and gradients, each relative to its size."""
    theirs, ours = timm_and_ours(CPU, torch.float32)
    images = torch.randn(2, 3, 28, 28)
    (expected, grads), (found, found_grads) = step_of(theirs, images), step_of(ours, images)
    assert torch.allclose(found, expected, rtol=relative, atol=1e-5)
    for name, grad in grads.items():
        assert (found_grads[name] - grad).norm() <= relative * grad.norm() + 1e-6, name


def test_attention_by_the_operator_is_the_same(monkeypatch):
    monkeypatch.setattr(vision_layers, "takes_packed_attention", lambda qkv: True)
    check_beside_timm(1e-4)


def test_blocks_compile_whole(monkeypatch):
    """With all kernels' operators, and the bits of blocks that are not compiled."""
    monkeypatch.setattr(vision_layers, "runs_kernels", lambda x: True)
    monkeypatch.setattr(vision_layers, "takes_packed_attention", lambda qkv: True)
    results = []
    for compiled in (False, True):
        _, model = timm_and_ours(CPU, torch.float32)
        quantize_linears(model, SCHEMES.make("fp8_tensorwise", {"scaling": "delayed"}, "--quantize_kwargs"), seed=3)
        for block in repeated_blocks(model) if compiled else ():
            block.compile(fullgraph=True, backend="aot_eager")
        torch.manual_seed(1)
        results.append(step_of(model, torch.randn(2, 3, 28, 28)))
    (expected, grads), (found, found_grads) = results
    assert torch.equal(found, expected) and all(torch.equal(found_grads[name], grads[name]) for name in grads)


def test_other_layers_are_left():
    from timm.layers import Attention, GluMlp, SwiGLUPacked

    others = [GluMlp(8, 16), SwiGLUPacked(8, 16, drop=0.1), SwiGLUPacked(8, 16, norm_layer=nn.LayerNorm)]
    others += [SwiGLUPacked(8, 16, use_conv=True), Attention(8, 2, qk_norm=True, norm_layer=nn.LayerNorm)]
    others += [Attention(8, 2, attn_drop=0.1), Attention(8, 2, proj_drop=0.1)]
    model = nn.Sequential(*others, SwiGLUPacked(8, 16, bias=False), Attention(8, 2, qkv_bias=True))
    kinds = [type(m) for m in model]
    use_kernels(model)
    assert [type(m) for m in model] == [*kinds[:-2], SwiGLUMLP, SelfAttention]
    x, mask = torch.randn(2, 5, 8), torch.ones(5, 5).tril().bool()
    attention = model[-1]
    assert torch.allclose(attention(x, mask), attention(x, is_causal=True), atol=1e-6)


@pytest.mark.gpu
def test_layers_on_gpu():
    """A step beside timm's layers with the same scheme; heads of 64, which the attention kernels take."""
    for scheme, kwargs in (("int8", {}), ("fp8_tensorwise", {"scaling": "delayed"})):
        results = []
        for model in timm_and_ours(torch.device("cuda"), torch.bfloat16, embed_dim=192):
            quantize_linears(model, SCHEMES.make(scheme, kwargs, "--quantize_kwargs"), seed=3)
            torch.manual_seed(1)
            results.append(step_of(model, torch.randn(16, 3, 28, 28, device="cuda", dtype=torch.bfloat16)))
        (expected, grads), (found, found_grads) = results
        assert (found - expected).norm() <= 0.02 * expected.norm()
        for name, grad in grads.items():
            assert (found_grads[name] - grad).float().norm() <= 0.05 * grad.float().norm(), (scheme, name)
