"""timm_finetune.py from the command line to the exported model: what it writes, resumes, refuses."""

import dataclasses
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch

import timm_finetune
from qtrain.core.config import parse
from qtrain.data.images.augment import ImageTransform
from qtrain.data.images.images import open_images
from qtrain.data.permutation import Permutation
from qtrain.models import check_vision_model, constructor_kwargs, empty_vision_model
from qtrain.optim import OPTIMIZERS
from qtrain.train.log.metrics import read_metrics
from qtrain.train.settings.settings import VisionSettings
from qtrain.train.state.checkpoint_files import newest_complete
from tests.data.images.pictures import png, write_folder, write_table, write_tar
from tests.system import ROOT, call, contents, flags, last_step, losses, only_run, serving, tree

timm = pytest.importorskip("timm")

SHAPE = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
FOLDER = {"type": "image_folder", "path": "images"}
NO_HEADER, CUT_PIXELS = {**FOLDER, "path": "no_header"}, {**FOLDER, "path": "cut_pixels"}
GOOD: dict[str, Any] = {
    "model": "vit_tiny_patch16_224",
    "model_kwargs": SHAPE,
    "pretrained": False,
    "train_ds": FOLDER,
    "eval_ds": FOLDER,
    "n_steps": 4,
    "batch_size": 4,
    "lr": 0.01,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Good and broken images of every kind, and a finished run: the working folder of every mistake."""
    import datasets

    here = tmp_path_factory.mktemp("vision")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", here.parent / "cache")
        patch.chdir(here)
        write_folder(Path("images"))
        write_folder(Path("other"), classes=("cat", "dog", "elk"))
        write_folder(Path("two"), classes=("cat", "dog"))
        write_folder(Path("one"), count=4, classes=("cat",))
        write_folder(Path("broken"), count=3)
        for path in Path("broken").rglob("*.png"):
            path.write_bytes(path.read_bytes()[:60])
        Path("flat").mkdir()
        shutil.copytree("images", "hollow")
        shutil.rmtree("hollow/dog")
        Path("hollow/dog").mkdir()
        Path("hollow/dog/notes.txt").write_text("no image")
        write_table(Path("rows.parquet"))
        Path("text.parquet").write_text("no parquet")
        Path("no_tar.tar").write_text("no tar")
        write_tar(Path("images.tar"), range(12))
        Path("a_class.txt").write_text("cat\ndog\n")
        _write_broken_images()
        assert call(timm_finetune.main, flags(**GOOD, ckpt_interval=2)).code == 0
        yield here


def run_of(runs: Path) -> Path:
    return only_run(runs, "timm_finetune")


# ---- a run -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantize", [pytest.param("bf16", marks=pytest.mark.sweep), "int8"])
def test_digits_from_random_weights_to_a_model_that_timm_loads(quantize, tmp_path, monkeypatch):
    """The recipe of the documentation, shortened; the exported model gives the evaluation's own results."""
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    recipe = str(ROOT / "configs/digits_int8.json")
    argv = flags(config=recipe, quantize=quantize, n_epochs=0, n_steps=60, eval_interval=30, eval_images=200)
    argv += flags(lr=0.02, ema_decay=0.9)
    done = call(timm_finetune.main, argv)
    assert done.code == 0 and done.err == "", done.err
    run = run_of(Path("runs"))
    records = read_metrics(run / "metrics.jsonl")
    assert [r["step"] for r in records if "top1" in r] == [0, 30, 60]
    trained, measured = [r for r in records if "loss" in r], [r for r in records if "top1" in r]
    assert trained[-1]["loss"] < 0.7 * measured[0]["eval_loss"] and measured[-1]["top1"] > 0.5
    assert trained[-1]["images"] == 60 * trained[-1]["data"]["batch_size"]
    assert trained[-1]["img_s"] > 0 and trained[-1]["sol"] > 0 and "tok_s" not in trained[-1]
    assert "img/s" in done.out and "Images per second" in (run / "report.html").read_text()

    recipe = json.loads(Path(recipe).read_text())
    name, kwargs = recipe["model"], recipe["model_kwargs"]
    model = timm.create_model(name, num_classes=10, **kwargs, checkpoint_path=run / "timm/model.safetensors").eval()
    by_folder = timm.create_model(f"local-dir:{run / 'timm'}", pretrained=True).eval()
    held_out = open_images(recipe["eval_ds"], "--eval_ds")
    transform = ImageTransform(timm.data.resolve_data_config({}, model=by_folder), None)
    chosen = Permutation(len(held_out), 0).all()[:200]
    images = torch.stack([transform(held_out.read(int(i))) for i in chosen])
    with torch.no_grad():
        logits = model(images)
        assert torch.equal(by_folder(images), logits)
    top1 = float((logits.argmax(1).numpy() == held_out.labels[chosen]).mean())
    assert abs(top1 - measured[-1]["top1"]) <= (1e-6 if quantize == "bf16" else 0.03)


RESNET = {"model": "test_resnet", "model_kwargs": {"img_size": 32}, "quantize": "int8"}
"""Three stages of blocks with 1x1 and 3x3 kernels, 32 to 96 channels."""


@pytest.mark.sweep
def test_a_network_of_convolutions(folder, tmp_path, monkeypatch):
    """Plan, overrides, health samples, a checkpoint that resumes bit for bit, an export that timm loads."""
    monkeypatch.chdir(folder)
    settings = {**GOOD, **RESNET, "quantize_overrides": {"layer3.*": "bf16"}, "quantize_lm_head": True}
    settings |= {"health": 2, "ckpt_interval": 2}
    done = call(timm_finetune.main, flags(**settings, runs_dir=tmp_path / "whole"))
    assert done.code == 0, done.err
    assert "low bits in 11 of 16 linears and convolutions" in done.out
    assert "convolutions in low bits take about twice as long as in bf16" in done.out
    assert "layer1.conv1 3x3 32 -> 32: quantized" in done.out
    assert "layer3.downsample 1x1 48 -> 192: left, --quantize_overrides leaves it" in done.out
    assert "samples measure linears, not the 10 convolutions in low bits" in done.out
    whole = run_of(tmp_path / "whole")
    shutil.copytree(whole, tmp_path / "again" / "timm_finetune" / whole.name)
    again = run_of(tmp_path / "again")
    shutil.rmtree(again / "checkpoints/00000004")
    done = call(timm_finetune.main, flags(**settings, runs_dir=tmp_path / "again", resume=again))
    assert done.code == 0, done.err
    assert losses(whole) == losses(again)
    one, other = (contents(run / "checkpoints/00000004") for run in (whole, again))
    assert all(torch.equal(one[name], other[name]) for name in one)
    (sample, *_) = [json.loads(line) for line in (whole / "health.jsonl").read_text().splitlines()]
    assert sample["linear"] == "fc" and 0 < sample["gradient"]["cosine"] <= 1
    model = timm.create_model(f"local-dir:{whole / 'timm'}", pretrained=True)
    assert tuple(model.pretrained_cfg["input_size"]) == (3, 32, 32)
    assert torch.equal(model.layer1[0].conv1.weight, one["model.layer1.0.conv1.weight"])


def test_everything_at_once(folder, tmp_path, monkeypatch):
    """Compiled blocks, recomputation, accumulation, mixing, an average, another optimizer, the head quantized too."""
    monkeypatch.chdir(folder)
    augment = {"auto_augment": "rand-m5", "mixup": 0.2, "cutmix": 0.5, "label_smoothing": 0.1, "re_prob": 0.3}
    changes = {"quantize": "int8", "quantize_lm_head": True, "activation_checkpointing": "full", "optim": "muon"}
    changes |= {
        "micro_batch_size": 2,
        "augment": augment,
        "ema_decay": 0.9,
        "n_steps": 0,
        "n_epochs": 1,
        "export": False,
    }
    done = call(timm_finetune.main, flags(**{**GOOD, **changes, "runs_dir": tmp_path}))
    assert done.code == 0, done.err
    config = json.loads((run_of(tmp_path) / "config.json").read_text())
    assert config["n_steps"] == config["eval_interval"] == 6
    assert "1 x head 16 -> 3: quantized" in done.out
    assert not (run_of(tmp_path) / "timm").exists() and "exported" not in done.out
    again = call(timm_finetune.main, flags(config=run_of(tmp_path) / "config.json", dry_run=True))
    assert again.code == 0, again.err


@pytest.mark.sweep
def test_compiled_blocks_give_the_same_losses(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compile_eager(self))
    compiled: list[torch.nn.Module] = []

    def compile_eager(module: torch.nn.Module) -> None:
        compiled.append(module)
        module._compiled_call_impl = torch.compile(module._call_impl, backend="aot_eager", dynamic=False)

    rows = []
    for chosen in (False, True):
        runs = tmp_path / str(chosen)
        settings = {**GOOD, "quantize": "int8", "n_steps": 2, "compile": chosen, "runs_dir": runs}
        assert call(timm_finetune.main, flags(**settings)).code == 0
        rows.append([row[1] for row in losses(run_of(runs)) if row[1] is not None])
    assert len(compiled) == 2 and rows[0] == pytest.approx(rows[1], rel=1e-4)


def test_the_optimizer_in_the_backward_pass_trains_the_same_model(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    rows, saved = [], []
    for chosen in (False, True):
        settings = {**GOOD, "quantize": "int8", "optim": "muon", "clip_grad_norm": 0, "ema_decay": 0.9}
        settings |= {"optimizer_in_backward": chosen, "runs_dir": tmp_path / str(chosen)}
        done = call(timm_finetune.main, flags(**settings))
        assert done.code == 0, done.err
        run = run_of(tmp_path / str(chosen))
        rows.append([row[:2] + row[3:] for row in losses(run)])  # without the norms: summed in another order
        saved.append(contents(run / "checkpoints/00000004"))
    assert rows[0] == rows[1] and saved[0].keys() == saved[1].keys()
    assert all(torch.equal(value, saved[1][key]) for key, value in saved[0].items())


# ---- kill -9 ---------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(folder, tmp_path):
    """Bit for bit: augmentation, mixing, drop path and dropout, stochastic rounding, the average; across an epoch."""
    settings = {**GOOD, "model_kwargs": {**SHAPE, "drop_path_rate": 0.3, "proj_drop_rate": 0.1}, "quantize": "int8"}
    settings |= {"quantize_kwargs": {"stochastic_rounding": True}, "micro_batch_size": 2, "ema_decay": 0.9}
    settings |= {"augment": {"auto_augment": "rand-m9-mstd0.5", "mixup": 0.5, "cutmix": 0.5, "re_prob": 0.5}}
    settings |= {"n_steps": 10, "ckpt_interval": 4, "keep_ckpts": 9}
    with serving(folder, "import timm.data, timm.models") as server:
        whole = server.start("timm_finetune", flags(**settings, runs_dir=tmp_path / "whole"))
        killed = server.start("timm_finetune", flags(**settings, runs_dir=tmp_path / "killed"), hang_at=5)
        killed.until(lambda: last_step(tmp_path / "killed") == 5)
        run = run_of(tmp_path / "killed")
        assert killed.kill(signal.SIGKILL).code == -signal.SIGKILL
        assert newest_complete(run / "checkpoints")[1].step == 4
        argv = flags(**settings, runs_dir=tmp_path / "killed", resume=run)
        assert server.run("timm_finetune", argv).code == 0
        done = whole.wait()
        assert done.code == 0, done.err
    one, other = run_of(tmp_path / "whole"), run
    assert losses(one) == losses(other) and len(losses(one)) == 13
    a, b = (contents(r / "checkpoints" / "00000010") for r in (one, other))
    assert a.keys() == b.keys() and any(name.startswith("ema.") for name in a)
    assert all(torch.equal(a[name], b[name]) for name in a), [n for n in a if not torch.equal(a[n], b[n])]
    assert (one / "timm/model.safetensors").read_bytes() == (other / "timm/model.safetensors").read_bytes()


def _write_broken_images() -> None:
    labels = {"negative": ("cls", b"-3"), "huge_label": ("cls", b"9" * 30), "nested_label": ("json", b"[" * 100_000)}
    for name, (ending, label) in labels.items():
        with tarfile.open(f"{name}.tar", "w") as tar:
            for member, data in (("0.png", png(0)), (f"0.{ending}", label)):
                entry = tarfile.TarInfo(member)
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
    whole = Path("images.tar").read_bytes()
    with tarfile.open("images.tar") as tar:
        Path("cut.tar").write_bytes(whole[: tar.getmembers()[8].offset + 100])
    Path("no_class.txt").write_text("\n")
    Path("same_class.txt").write_text("cat\ndog\ncat\n")
    table = pyarrow.table({"image": [png(0)] * 24, "label": pyarrow.array([2**63] * 24, pyarrow.uint64())})
    pyarrow.parquet.write_table(table, "huge.parquet")
    write_folder(Path("pipe"))
    Path("pipe/cat/000.png").unlink()
    os.mkfifo("pipe/cat/000.png")
    for name, broken in (("no_header", b"GIF"), ("cut_pixels", Path("images/owl/005.png").read_bytes()[:60])):
        shutil.copytree("images", name)
        Path(name, "owl/005.png").write_bytes(broken)


# ---- mistakes --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A command line that would work but for `settings` (None takes one out); what its message must say."""

    says: tuple[str, ...]
    settings: dict[str, Any]

    def argv(self) -> list[str]:
        merged = {**GOOD, **self.settings}
        return flags(**{k: v for k, v in merged.items() if v is not None})


def wrong(*says: str, **settings: Any) -> Mistake:
    return Mistake(says, settings)


def images(**options: Any) -> dict[str, Any]:
    return {"eval_ds": None, "train_ds": options}


MISTAKES = [
    wrong(
        "timm has no model 'vit_tinny_patch16_224'",
        "Did you mean 'vit_tiny_patch16_224'?",
        model="vit_tinny_patch16_224",
    ),
    wrong("timm has no model 'vit_tinny'", "Did you mean 'vit_tiny_patch16_224'?", model="vit_tinny"),
    wrong("no weights with the tag 'in1k'", "augreg", model="timm/vit_tiny_patch16_224.in1k"),
    wrong(
        "--pretrained: timm has no published weights",
        "--no_pretrained",
        pretrained=True,
        model="vit_base_patch16_xp_224",
    ),
    wrong("--model_kwargs", "cannot be built", "imgsize", model_kwargs={"imgsize": 8}),
    wrong("--model_kwargs", "cannot be built", model_kwargs={**SHAPE, "num_heads": 3}),
    wrong("--model_kwargs: the key 'num_classes' is not allowed", "training data", model_kwargs={"num_classes": 9}),
    wrong("--model_kwargs.in_chans: 4 is not allowed", model_kwargs={**SHAPE, "in_chans": 4}),
    wrong("--train_ds: the key 'type' is missing", "image_folder", train_ds={"path": "images"}),
    wrong(
        "--train_ds: unknown image dataset type 'imagefolder'",
        "Did you mean 'image_folder'?",
        **images(type="imagefolder"),
    ),
    wrong("--train_ds: the folder 'no' does not exist", **images(type="image_folder", path="no")),
    wrong("'imags' does not exist", "Did you mean 'images'?", **images(type="image_folder", path="imags")),
    wrong(
        "--train_ds: unknown split of 'images' 'dgo'",
        "Did you mean 'dog'?",
        **images(type="image_folder", path="images", split="dgo"),
    ),
    wrong("flat holds no folders", "one folder per class", **images(type="image_folder", path="flat")),
    wrong("the class 'dog' has no image files", **images(type="image_folder", path="hollow")),
    wrong("there is only one class, 'cat'", **images(type="image_folder", path="one")),
    wrong("000.png cannot be read as an image", **images(type="image_folder", path="broken"), batch_size=2),
    wrong("--train_ds: no_header/owl/005.png cannot be read as an image", **images(**NO_HEADER), dry_run=True),
    wrong("--eval_ds: no_header/owl/005.png cannot be read as an image", eval_ds=NO_HEADER, dry_run=True),
    wrong("--train_ds: cut_pixels/owl/005.png cannot be read as an image", **images(**CUT_PIXELS), batch_size=24),
    wrong("--eval_ds: cut_pixels/owl/005.png cannot be read as an image", eval_ds=CUT_PIXELS),
    wrong("--eval_ds: it has 2 classes, the training data 3", eval_ds={**FOLDER, "path": "two"}),
    wrong("--eval_ds: its class 2 is 'elk'", "'owl'", eval_ds={**FOLDER, "path": "other"}),
    wrong("--train_ds: 'x/*.parquet' matches no file", **images(type="parquet", paths="x/*.parquet")),
    wrong("cannot be read", **images(type="parquet", paths="text.parquet")),
    wrong("has no column 'class'", "label", **images(type="parquet", paths="rows.parquet", label_column="class")),
    wrong("no image bytes in the column 'label'", **images(type="parquet", paths="rows.parquet", image_column="label")),
    wrong("no_tar.tar cannot be read as a tar file", **images(type="wds", paths="no_tar.tar")),
    wrong("the label 2 is out of range", "2 classes", **images(type="wds", paths="images.tar", classes="a_class.txt")),
    wrong("give either paths or dataset", **images(type="wds")),
    wrong("--batch_size: 64 is more than the 24 images", batch_size=64),
    wrong("--n_steps, --n_epochs: 2 epochs are 12 steps, not 4", n_epochs=2),
    wrong(
        "--augment.auto_augment: timm does not know the policy 'randm9'", "rand-m9", augment={"auto_augment": "randm9"}
    ),
    wrong("--augment: unknown key 'mix_up'", "Did you mean 'mixup'?", augment={"mix_up": 1}),
    wrong("--augment.scale: [0.5, 1.5] is out of range", augment={"scale": [0.5, 1.5]}),
    wrong("--augment: mixup and cutmix need even micro-batches, not 1", augment={"mixup": 1}, micro_batch_size=1),
    wrong("--ema_decay: 1.5 is out of range", "from 0 to 1", ema_decay=1.5),
    wrong(
        "--activation_checkpointing: ResNet has no repeated blocks",
        model="resnet10t",
        model_kwargs=None,
        activation_checkpointing="full",
    ),
    wrong("'mX' in 'rand-mX' is not a letter and a number", augment={"auto_augment": "rand-mX"}),
    wrong("'n99999999999' in 'rand-m9-n99999999999' is out of range", augment={"auto_augment": "rand-m9-n99999999999"}),
    wrong("--quantize_overrides", "conv9", **RESNET, quantize_overrides={"conv9": "bf16"}),
    wrong(
        "quantizes none of the 12 linears that it decides on: 12 x the scheme's scales of 1x128 blocks are for linears",
        **RESNET,
        quantize_overrides={"*": "int8", "layer*": "fp8_blockwise"},
    ),
    wrong("quantizes none of the model's", "products are for linears", **{**RESNET, "quantize": "int4"}),
    wrong("--augment.crop_pct: 0.0 is out of range", augment={"crop_pct": 0.0}),
    wrong("--model_kwargs", "cannot be built", model_kwargs={"features_only": True}),
    wrong("--train_ds: the label -3 is out of range", **images(type="wds", paths="negative.tar")),
    wrong("has no label", **images(type="wds", paths="huge_label.tar")),
    wrong("has no label", **images(type="wds", paths="nested_label.tar")),
    wrong("its end is missing: it is truncated", **images(type="wds", paths="cut.tar")),
    wrong("'no_class.txt' is empty", **images(type="wds", paths="images.tar", classes="no_class.txt")),
    wrong("'same_class.txt' names a class twice", **images(type="wds", paths="images.tar", classes="same_class.txt")),
    wrong("the label 9223372036854775808 of", "too large", **images(type="parquet", paths="huge.parquet")),
    wrong("000.png' is a FIFO, not a regular file", **images(type="image_folder", path="pipe")),
    wrong("there is no such user's folder", **images(type="image_folder", path="~nobody-has-this-name")),
    wrong("--seed: cannot resume", "this one has 7", resume="RUN", n_steps=9, seed=7),
    wrong("--batch_size: cannot resume", "Give --batch_size 4", resume="RUN", n_steps=9, batch_size=2),
    wrong("--resume", "ema", resume="RUN", ema_decay=0.9),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.says[0])
def test_a_mistake_is_one_short_line_and_changes_nothing(folder, mistake, monkeypatch):
    monkeypatch.chdir(folder)
    argv = [word.replace("RUN", str(run_of(Path("runs")))) for word in mistake.argv()]
    before = tree(folder)
    outcome = call(timm_finetune.main, argv)
    assert outcome.code == 2, f"not refused: {outcome}"
    message = outcome.err.removesuffix("\n")
    assert message.startswith("error: ") and "\n" not in message and len(message) < 400, outcome.err
    assert all(part in message for part in mistake.says), message
    assert tree(folder) == before


@pytest.mark.sweep
def test_without_network_the_default_data_are_one_message(tmp_path):
    """The command of the documentation, as it stands."""
    command = "--model timm/vit_giant_patch14_dinov2.lvd142m --n_epochs 2 --batch_size 64 --seed 2024 --compile"
    argv = [*command.split(), "--model_kwargs", '{"img_size":224}']
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    program = [sys.executable, str(ROOT / "timm_finetune.py"), *argv]
    done = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "timm/resisc45" in done.stderr and "image_folder" in done.stderr and not (tmp_path / "runs").exists()


def test_the_recipes_parse_and_name_real_models():
    """Those that need the hub are checked as far as their flags and models go."""
    for name in ("digits_int8", "digits_resnet_int8", "vit_giant_resisc45", "vit_tiny_imagenet"):
        settings = parse(VisionSettings, ["--config", str(ROOT / f"configs/{name}.json")], "timm_finetune.py")
        assert OPTIMIZERS.make(settings.optim, {}, "--optim")
        short = check_vision_model(settings.model, settings.model_kwargs or {}, settings.pretrained)
        kwargs = constructor_kwargs(short, settings.model_kwargs or {})
        assert empty_vision_model(short, kwargs, 10).num_classes == 10


def test_the_plan_counts_whole_batches(monkeypatch, folder):
    monkeypatch.chdir(folder)
    images = sum(1 for _ in Path("images").rglob("*.png"))
    batch = images // 2 + 1
    done = call(timm_finetune.main, flags(**GOOD | {"batch_size": batch, "n_steps": 3}, dry_run=True))
    assert f"3 epochs of 1 steps, each without {images - batch} images, which are less than a batch" in done.out
    done = call(timm_finetune.main, flags(**GOOD | {"batch_size": images, "n_steps": 3}, dry_run=True))
    assert "3 epochs of 1 steps\n" in done.out
