"""The settings that every training script shares; each script's own dataclass adds its few.

The docstring under a field is its `--help` line, `Range` its bounds: they are written down here and nowhere else.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from qtrain.checks import Range
from qtrain.config import JsonDict
from qtrain.errors import UserError

Count = Annotated[int, Range(1)]
CountOrNever = Annotated[int, Range(0)]
NotNegative = Annotated[float, Range(0, 1e30)]


@dataclass(frozen=True)
class TrainSettings:
    """Settings of any training run."""

    model: str = "llama2-470m"
    """Hub id, local folder, JSON file, or the name of a file in configs/models."""
    pretrained: bool = False
    """Load the model's weights instead of drawing random ones."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where to train; auto takes the GPU if there is one."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Dtype of weights and activations; auto is bf16 on a GPU, fp32 on a CPU."""

    quantize: str = "bf16"
    """Scheme of the linears' matmuls; --list shows all."""
    quantize_kwargs: JsonDict = None
    """The scheme's options as JSON."""
    quantize_lm_head: bool = False
    """Quantize the output head too."""
    quantize_min_size: CountOrNever = 0
    """Leave linears alone that have fewer in-features or fewer out-features than this; 0: none."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What backward computes again instead of keeping: nothing, cheap operations, or whole layers."""
    compile: bool = False
    """Compile each layer and the loss with torch.compile."""
    cuda_graphs: bool = True
    """With --compile on a GPU: record a step once its shapes are known and replay it, which costs Python no time."""

    train_ds: JsonDict = None
    """Training data as JSON with a "type"; --list shows all types."""
    eval_ds: JsonDict = None
    """Validation data as JSON, in the same form; none: no evaluation."""
    num_workers: CountOrNever = 0
    """0: data are read and tokenized by a thread; N: by a process of its own that tokenizes on N threads."""

    n_steps: Count = 1000
    """Optimizer steps."""
    batch_size: Count = 4
    """Sequences per optimizer step, over all devices."""
    micro_batch_size: CountOrNever = 0
    """Sequences per forward pass on one device; 0: batch_size / gradient_accumulation."""
    gradient_accumulation: CountOrNever = 0
    """Forward passes per optimizer step; 0: batch_size / micro_batch_size."""

    optim: str = "adamw"
    """Optimizer; --list shows all."""
    optim_kwargs: JsonDict = None
    """The optimizer's options as JSON."""
    lr: NotNegative = 3e-4
    """Peak learning rate."""
    weight_decay: NotNegative = 0.1
    """Decoupled weight decay of matrices; norms and biases are not decayed."""
    lr_schedule_kwargs: JsonDict = None
    """JSON: warmup and decay (shares of the run; 0.02 and 0.2), decay_type (linear, cosine, sqrt), final (share)."""
    clip_grad_norm: NotNegative = 1.0
    """Largest norm of all gradients together; 0: no clipping."""
    optimizer_in_backward: bool = False
    """Update each layer within the backward pass and free its gradients; wants --clip_grad_norm 0, no accumulation."""

    eval_interval: CountOrNever = 100
    """Steps between evaluations; 0: only before the first and after the last step."""
    ckpt_interval: CountOrNever = 1000
    """Steps between checkpoints; 0: only at the end and on a signal."""
    keep_ckpts: CountOrNever = 2
    """Complete checkpoints to keep; 0: write none, not even at the end."""
    resume: str | None = None
    """auto: continue the newest run of this name; or a checkpoint folder or a run folder."""
    log_interval: Count = 1
    """Steps between lines of metrics.jsonl."""

    project: str = "qtrain"
    """Project name for the trackers."""
    run_name: str = "run"
    """Name of the run; its folder is <runs_dir>/<script>/<time>_<run_name>."""
    runs_dir: str = "runs"
    """Folder that holds the runs."""
    trackers: tuple[str, ...] = ()
    """Where metrics go besides metrics.jsonl: wandb, tensorboard, trackio."""
    seed: Annotated[int, Range(0, 2**63 - 1)] = 42
    """Seed of initialization, data order and stochastic rounding."""
    profile: bool = False
    """Write a trace of a few steps into the run folder."""
    dry_run: bool = False
    """Print the plan and stop."""


@dataclass(frozen=True)
class LanguageSettings(TrainSettings):
    """Settings of a language model's training run."""

    model_impl: Literal["native", "hf"] = "native"
    """native: this project's decoder; hf: any AutoModelForCausalLM of transformers."""
    seq_len: Annotated[int, Range(2)] = 2048
    """Tokens per sequence."""
    eval_sequences: Count = 128
    """Sequences per evaluation, always the same ones."""
    doc_mask: bool = False
    """Keep attention within documents, and restart positions at each; documents end by the end token."""
    loss_chunks: CountOrNever = 0
    """Pieces that a micro-batch's tokens are cut into for the loss, so that logits never exist whole; 0: by size."""
    z_loss: NotNegative = 0.0
    """Weight of the squared log of the softmax's normalizer in the loss (1e-4 is usual); the logged loss is without."""


@dataclass(frozen=True)
class VisionSettings(TrainSettings):
    """Train a vision model of timm, from published weights or from random ones (--no_pretrained)."""

    model: str = "timm/vit_base_patch14_dinov2.lvd142m"
    """Any model of timm: NAME or timm/NAME, with a tag that names its weights or without."""
    model_kwargs: JsonDict = None
    """Arguments of the model as JSON, such as img_size, depth or drop_path_rate."""
    pretrained: bool = True
    """Load the model's published weights instead of drawing random ones; the head is new."""
    quantize_lm_head: bool = False
    """Quantize the classifier's linear too."""
    compile: bool = False
    """Compile each block of the model with torch.compile, or all of it where it has no blocks."""
    train_ds: JsonDict = None
    """Training images as JSON with a "type"; --list shows all types; none: RESISC45 from the hub."""
    eval_ds: JsonDict = None
    """Held-out images as JSON, in the same form; none: no evaluation (of RESISC45 its validation split)."""
    augment: JsonDict = None
    """How images are varied, as JSON: auto_augment, scale, hflip, re_prob, mixup, cutmix, label_smoothing, ..."""
    num_workers: CountOrNever = 0
    """0: threads decode images and this process augments them; N: N processes do both."""
    n_epochs: CountOrNever = 0
    """Times that all images are gone through; 0: as the number of steps says, and once if that is 0 too."""
    n_steps: CountOrNever = 0
    """Optimizer steps; 0: as the number of epochs says."""
    batch_size: Count = 64
    """Images per optimizer step, over all devices."""
    micro_batch_size: CountOrNever = 0
    """Images per forward pass on one device; 0: batch_size / gradient_accumulation."""
    lr: NotNegative = 1e-5
    """Peak learning rate; random weights want about a hundred times as much as published ones."""
    weight_decay: NotNegative = 0.05
    """Decoupled weight decay of matrices; norms and biases are not decayed."""
    ema_decay: Annotated[float, Range(0, 1)] = 0.0
    """Evaluate and export a running average of the weights, of this decay a step (0.9999 is usual); 0: the weights."""
    eval_interval: CountOrNever = 0
    """Steps between evaluations; 0: after every epoch."""
    eval_images: CountOrNever = 0
    """Images per evaluation, always the same ones; 0: all."""


@dataclass(frozen=True)
class BatchGeometry:
    """How an optimizer step's sequences are split: batch = micro x accumulation x world."""

    micro_batch_size: int
    gradient_accumulation: int
    world: int


def batch_geometry(settings: TrainSettings, world: int = 1) -> BatchGeometry:
    """Fill in whichever of micro_batch_size and gradient_accumulation is 0, or refuse sizes that do not multiply."""
    batch, micro, accumulation = settings.batch_size, settings.micro_batch_size, settings.gradient_accumulation
    if batch % world:
        raise UserError(f"--batch_size: {batch} sequences cannot be shared equally by {world} devices.")
    per_device = batch // world
    if not micro and not accumulation:
        accumulation = 1
    micro = micro or per_device // max(accumulation, 1)
    accumulation = accumulation or per_device // max(micro, 1)
    if micro * accumulation != per_device or not micro:
        raise UserError(
            f"--batch_size: {batch} is not micro_batch_size x gradient_accumulation x devices "
            f"({settings.micro_batch_size or 'auto'} x {settings.gradient_accumulation or 'auto'} x {world}); "
            "give two of the three, such that the first divides the batch."
        )
    return BatchGeometry(micro, accumulation, world)


def choose_device(name: str) -> torch.device:
    """The device that --device means here."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device: cuda was asked for, but torch sees no GPU. Use --device cpu or auto.")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that --dtype means on this device."""
    if name == "auto":
        name = "bf16" if device.type == "cuda" else "fp32"
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[name]
