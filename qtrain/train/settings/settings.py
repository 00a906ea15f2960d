"""The settings that every training script shares; each script's own dataclass adds its few.

The docstring under a field is its `--help` line, `Range` its bounds: they are written down here and nowhere else.
Nothing here imports torch, which takes seconds: the command line is parsed before.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from qtrain.core.checks import Range
from qtrain.core.config import GivenNames, JsonDict, JsonList, JsonNames
from qtrain.core.errors import UserError
from qtrain.train.settings.evaluation import EvaluationSettings

Count = Annotated[int, Range(1)]
CountOrZero = Annotated[int, Range(0)]
BatchSize = Annotated[int, Range(1, 10**7)]
MicroBatchSize = Annotated[int, Range(0, 10**7)]
Workers = Annotated[int, Range(0, 1024)]
NotNegative = Annotated[float, Range(0, 1e30)]

OFFLOAD_NAMES = ("m", "v", "master", "residuals", "weights", "gradients")
"""What --offload can keep in host memory: states and master weights of the optimizer, activations, layers and their
gradients."""


@dataclass(frozen=True)
class TrainSettings:
    """Settings of any training run."""

    HELP_GROUPS: ClassVar[dict[str, str]] = {
        "model": "model model_impl model_kwargs pretrained lora freeze_embedding_layer doc_mask distill z_loss "
        "router_balance_loss router_z_loss router_bias_rate ema_decay",
        "data": "train_ds seq_len seq_len_multiple augment batch_size micro_batch_size gradient_accumulation "
        "num_workers",
        "quantization": "quantize quantize_kwargs quantize_overrides quantize_schedule quantize_lm_head "
        "quantize_min_size",
        "optimizer": "optim optim_kwargs lr weight_decay clip_grad_norm on_spike spike_threshold optimizer_in_backward",
        "schedule": "n_epochs n_steps max_hours early_stopping lr_schedule_kwargs",
        "evaluation": "eval_ds eval_interval eval_sequences eval_images final_eval sample_prompts "
        "sample_tokens hellaswag hellaswag_file hellaswag_limit accuracy answer_tokens lm_eval",
        "checkpoint and run folder": "ckpt_interval keep_ckpts keep_best async_checkpoint resume export "
        "export_format push_to_hub run_name runs_dir",
        "memory": "fit memory_limit activation_checkpointing recompute keep_8bit loss_chunks mlp_chunks weight_codes "
        "offload",
        "hardware and process": "device dtype compile cuda_graphs seed",
        "many processes": "gpus dp_replicate dp_shard reshard_after_forward tp sequence_parallel ep cp gradient_wire "
        "rank_timeout deterministic",
        "plan": "dry_run gpu world_size gpus_per_node wire sol",
        "logging": "log_interval trackers project profile health health_fallback",
    }
    """The flags of the training scripts as `--help` groups them."""

    model: str = "llama2-470m"
    """Model to train: a name that --list shows, a Hugging Face hub id, a local folder, or a config.json."""
    pretrained: bool = False
    """Start from the published weights of --model instead of random ones."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to train on; auto: the GPU if there is one, else the CPU."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Dtype of weights, gradients and activations; auto: bf16 on a GPU, fp32 on a CPU."""

    gpus: Annotated[int, Range(0, 1024)] | Literal["all"] = 0
    """GPUs of this machine to train on, one rank each (with --device cpu: processes), or all; 0: as many ranks as
    torchrun has started, or one."""
    dp_replicate: Annotated[int, Range(0, 10**5)] = 0
    """Replicas of optimizer states and master weights, each sharded over --dp_shard ranks (HSDP); 0: automatic."""
    dp_shard: Annotated[int, Range(0, 10**5)] = 0
    """Ranks that shard optimizer states and master weights (ZeRO-2); 0: all that --dp_replicate leaves."""
    reshard_after_forward: Literal["auto", "always", "never"] = "auto"
    """Shard the weights of layers, embedding and head too, and all-gather them when they run (FSDP, ZeRO-3): less
    memory, more communication. auto: if the plan does not fit into the GPUs' memory otherwise."""
    rank_timeout: Annotated[int, Range(1, 10**6)] = 600
    """Collective timeout in seconds, compile time included. A rank without heartbeat is reported after 25 s."""
    tp: Annotated[int, Range(1, 1024)] = 1
    """Tensor-parallel degree (Megatron): ranks that hold a part of every layer and read the same sequences."""
    sequence_parallel: bool = True
    """With --tp, also shard the tokens between attention and MLP over its ranks: less memory, the same bytes sent."""
    ep: Annotated[int, Range(1, 1024)] = 1
    """Expert-parallel degree: data-parallel ranks that shard the experts of a mixture (MoE) and compute them for each
    other's sequences; all else is sharded as without it. With --tp each is a tensor-parallel group, whose ranks share
    the experts too."""
    cp: Annotated[int, Range(1, 1024)] = 1
    """Context-parallel degree (Ulysses): ranks that hold 1/N of the tokens of every sequence, for sequences whose
    activations one GPU cannot hold; attention runs over whole sequences, a part of the heads on each rank. With
    --deterministic each computes all tokens and shares the memory of layers' inputs."""
    deterministic: bool = False
    """Give the same losses and weights, bit for bit, on any number of ranks that divides the step's micro-batches, with
    one --micro_batch_size, and in every run; costs an exchange of gradients per micro-batch, and on a GPU takes
    attention kernels half as fast and GEMM kernels that are not timed."""

    gradient_wire: Literal["exact", "int8", "fp8", "int4"] = "exact"
    """Dtype of gradients in the reduce-scatter; exact: their own; the others are rounded stochastically, with one scale
    per 256 elements (int4: 64). Sums are in fp32 with all of them."""

    quantize: str = "bf16"
    """Scheme that the matrix products of linear layers run in; --list shows all, bf16 quantizes nothing."""
    quantize_kwargs: JsonDict = None
    """Options of --quantize as a JSON object, such as {"grad_weight":"bf16"}; --list shows them."""
    quantize_overrides: JsonDict = None
    """Other schemes for some linear layers as a JSON object of globs over their names, as the plan lists them, the last
    that matches wins: {"*.down_proj":"fp8_rowwise","layers.0.*":"bf16","lm_head":{"scheme":"int8","output":"bf16"}}."""
    quantize_schedule: JsonList = None
    """Schemes over time in place of --quantize, a JSON list of [when, scheme], when a share of the steps below 1 or a
    number of steps, the scheme as in --quantize_overrides: [[0,"bf16"],[0.2,"bitnet"]]."""
    quantize_lm_head: bool = False
    """Quantize the output head too, not only the linear layers below it."""
    quantize_min_size: CountOrZero = 0
    """Leave a linear layer in --dtype if it has fewer in-features or out-features than this number; 0: leave none."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Save memory by recomputing in the backward pass: nothing; norms and activation functions; or whole layers."""
    weight_codes: Literal["both", "one"] = "both"
    """Layouts in which low-bit linears keep 8-bit codes of their weights; one: that of the forward pass, from which
    backward makes the other for each product: a byte less per weight, a pass over the weights per micro-batch."""
    memory_limit: Annotated[float, Range(1, 10**4)] | None = None
    """GiB of a GPU's memory that the run may take, as if it had no more; None: all."""
    offload: GivenNames = None
    """What to keep in pinned host memory, a JSON list: m, v (the optimizer's moments; a momentum is m) and master (its
    fp32 weights) pass through the GPU during the optimizer's step; residuals (layers' inputs, kept for backward) and
    weights (of layers, embedding and head; with --lora the frozen ones) come a layer ahead; gradients, which go with
    weights that train, are added up there. None: what --optim_kwargs says."""
    compile: bool = False
    """Compile each layer with torch.compile: faster steps after a minute or so of compiling."""
    cuda_graphs: bool = True
    """On a GPU with --compile, record the step as CUDA graphs and replay them: no launch overhead in Python. With --ep
    they need memory for any routing of tokens to experts."""

    train_ds: JsonDict = None
    """Training data as a JSON object, {"type":"TYPE", ...}; --list shows the types and their options."""
    eval_ds: JsonDict = None
    """Validation data, a JSON object like --train_ds; or several by name, {"wiki":{...},"code":{...}}, each with its
    own eval_NAME_loss, and as eval_loss, which --keep_best and --early_stopping compare, the mean over the tokens of
    all; null: no validation loss."""
    num_workers: Workers = 0
    """0: a thread reads and tokenizes the data; N: a separate process does, tokenizing on N threads."""

    n_epochs: CountOrZero = 0
    """Passes over the training data, whose size must be known; 0: train a number of steps."""
    n_steps: Count | None = None
    """Optimizer steps to train; None: as many as --n_epochs has, without it 1000."""
    max_hours: Annotated[float, Range(0.001, 10**5)] | None = None
    """Hours after the start of the process at which the run saves a checkpoint, prints how to resume, and ends with
    exit code 0 without exporting; None: no limit."""
    batch_size: BatchSize = 4
    """Sequences per optimizer step."""
    micro_batch_size: MicroBatchSize = 0
    """Sequences per forward pass; 0: batch_size / gradient_accumulation, with --deterministic an eighth of batch_size
    (a quarter, half or all of it where 8 does not divide it)."""
    gradient_accumulation: MicroBatchSize = 0
    """Forward and backward passes per optimizer step; 0: batch_size / micro_batch_size."""

    optim: str = "adamw"
    """Optimizer; --list shows all, torch.NAME takes one of PyTorch's."""
    optim_kwargs: JsonDict = None
    """Options of --optim as a JSON object, such as {"betas":[0.9,0.95]}; --list shows them."""
    lr: NotNegative = 3e-4
    """Peak learning rate."""
    weight_decay: NotNegative = 0.1
    """Decoupled weight decay of weight matrices and embeddings; norms and biases have none."""
    lr_schedule_kwargs: JsonDict = None
    """Learning-rate schedule (WSD) as a JSON object: warmup and decay (0.02 and 0.2), each a fraction of the steps up
    to 1, which is all of them, or above 1 a number of steps; decay_type (linear, cosine or sqrt; linear); final, the
    last rate as a fraction of --lr (0); stable, the rate between the two (constant or inverse_sqrt; constant)."""
    clip_grad_norm: NotNegative = 1.0
    """Clip the gradient to this L2 norm, over all parameters; 0: no clipping."""
    on_spike: Literal["off", "skip", "rewind", "stop"] = "off"
    """What to do before the update of a step whose loss or gradient norm is far above the last 128 steps', or not
    finite: skip its batch; return to the last checkpoint and go on with the data after the batch (rewind); or save and
    stop. off: nothing; a value that is not finite stops the run."""
    spike_threshold: Annotated[float, Range(1, 10**6)] = 10.0
    """How far that is with --on_spike: robust standard deviations above the median, 1.48 median absolute deviations
    each."""
    optimizer_in_backward: bool = False
    """Save memory by updating each layer during the backward pass, as soon as it has its gradients; needs
    --clip_grad_norm 0 and no gradient accumulation."""

    eval_interval: CountOrZero = 100
    """Steps between evaluations; 0: evaluate before the first and after the last step only."""
    early_stopping: CountOrZero = 0
    """End the run after N evaluations in a row without a lower loss than the lowest before them; 0: never."""
    ckpt_interval: CountOrZero = 1000
    """Steps between checkpoints; 0: save at the end, and when a signal stops the run, only."""
    keep_ckpts: CountOrZero = 2
    """Newest checkpoints to keep, older ones are deleted; 0: save none at all."""
    keep_best: bool = False
    """Save a checkpoint at each evaluation with the lowest loss so far, and keep the last of these beside the newest
    --keep_ckpts."""
    async_checkpoint: bool = False
    """Write checkpoints while training goes on: a step waits only for a copy of the state, which takes as much host
    memory as the checkpoint has bytes."""
    resume: str | None = None
    """Continue a run: its folder or one of its checkpoints, with its settings where no flag says else (unless --config,
    --model or --train_ds is given), or auto for the newest run called --run_name; None: start a new run."""
    log_interval: Count = 1
    """Steps between lines of metrics.jsonl."""

    export: bool = True
    """When the run ends, write the trained model with adapters merged in: a Hugging Face folder, RUN/hf, of timm's
    models a folder for timm, RUN/timm."""

    project: str = "qtrain"
    """Project name that trackers show."""
    run_name: str = "run"
    """Name of the run; its folder is RUNS_DIR/SCRIPT/TIME_NAME."""
    runs_dir: str = "runs"
    """Folder that holds the folders of all runs."""
    trackers: tuple[str, ...] = ()
    """Also send metrics to wandb, tensorboard, mlflow or trackio; metrics.jsonl is always written."""
    seed: Annotated[int, Range(0, 2**63 - 1)] = 42
    """Seed of random weights, data order, dropout and stochastic rounding."""
    health: CountOrZero | None = None
    """Steps between health samples, which measure what low bits do to each linear's tensors, products and gradient:
    RUN/health.jsonl, and a warning where it is too much; 0: none; None: 200, or as many more as keep the samples below
    1% of the time."""
    health_fallback: CountOrZero = 0
    """Move a linear that is over its bound in this many health samples in a row, or far over it in one, to a scheme
    that mends it; 0: only warn. Samples are then 200 steps apart, or --health, from the first step on: who runs in
    which scheme does not depend on the time."""
    profile: bool = False
    """Record three steps with PyTorch's profiler: the trace, and a table of kernels by kind beside the shortest time
    that the plan allows, into the run folder."""
    dry_run: bool = False
    """Print the plan (sizes, memory, shortest time, what is quantized) and stop without training or writing."""
    gpu: str | None = None
    """Plan for this GPU (h100, h200, b200, a100, l40s, 4090, ...) instead of the one here; needs --dry_run."""
    world_size: Annotated[int, Range(1, 10**5)] | None = None
    """Plan for this many GPUs: memory, communication volume, step time, and a table for 1 to 4,096 GPUs; needs
    --dry_run. None: for the ranks that run."""
    gpus_per_node: Annotated[int, Range(1, 1024)] = 8
    """GPUs of a machine, with --world_size; they are linked as GPUs of this kind are sold (NVLink or PCIe)."""
    wire: str = "ib400"
    """Link between machines, per GPU, with --world_size: ib400, ib200, ethernet100, ..."""
    sol: Annotated[float, Range(0.01, 1)] | None = None
    """Fraction of the speed of light at which one GPU computes, with --world_size; None: as measured on an H200."""

    @property
    def steps(self) -> int:
        """`n_steps`, once those of --n_epochs are counted."""
        assert self.n_steps is not None
        return self.n_steps

    @property
    def sequence_parts(self) -> int:
        """In which the ranks of --cp compute a sequence; with --deterministic each computes all of it."""
        return 1 if self.deterministic else self.cp

    @property
    def gpu_count(self) -> int:
        """`gpus`, once "all" is counted."""
        assert isinstance(self.gpus, int)
        return self.gpus


@dataclass(frozen=True)
class LanguageSettings(EvaluationSettings, TrainSettings):
    """Settings of a language model's training run."""

    model_impl: Literal["native", "hf"] = "native"
    """Implementation of the model; native: qtrain's decoder; hf: transformers' AutoModelForCausalLM."""
    recompute: JsonNames = ()
    """Save memory by recomputing these in the backward pass, a JSON list of norm, swiglu, qkv, attention, ffn and
    block, such as ["norm","qkv"]; []: those that --activation_checkpointing names."""
    keep_8bit: JsonNames = ()
    """Save memory by keeping these for the backward pass in 8 bits, which rounds gradients: a JSON list of gate_up (the
    input of the MLP's activation function), so ["gate_up"]; []: nothing."""
    freeze_embedding_layer: bool = False
    """Do not train the embedding, nor the output head if both are the same matrix."""
    seq_len: Annotated[int, Range(2, 10**7)] = 2048
    """Tokens per sequence."""
    eval_sequences: Count = 128
    """Sequences of --eval_ds (of each of its datasets) per evaluation, the same ones each time."""
    final_eval: Literal["sample", "all"] = "sample"
    """After the last step; all: also the loss over the whole of --eval_ds, each sequence once, as final_eval_loss."""
    export_format: tuple[str, ...] = ("hf",)
    """Formats of the export, each in a folder of its name, RUN/FORMAT; --list shows them. hf: dense weights; others
    hold codes and scales, where the scheme of the run allows those that it multiplied with."""
    push_to_hub: str | None = None
    """Upload the export to this repository of the Hugging Face hub, OWNER/NAME, made private if it is new; several
    formats each to OWNER/NAME-FORMAT. Needs a login: hf auth login."""
    lm_eval: str | None = None
    """Run these tasks of lm-evaluation-harness, separated by commas, on the exported model at the end; base: the eight
    of a base model (ARC, BoolQ, COPA, HellaSwag, OpenBookQA, PIQA, WinoGrande)."""
    fit: Literal["off", "auto"] = "off"
    """auto: choose what only moves memory, so that a step is the fastest that fits: --micro_batch_size,
    --loss_chunks, --mlp_chunks, --weight_codes, --recompute and --offload, as far as they are not given."""
    doc_mask: bool = False
    """Let a token attend only to tokens of its own document, and start each document at position 0; documents end with
    the tokenizer's end token."""
    loss_chunks: CountOrZero = 0
    """Compute the loss in this many chunks of a micro-batch's tokens, so that the logits of all never exist at once;
    0: of about 8,192 tokens each on a GPU, of 1,024 elsewhere."""
    mlp_chunks: Annotated[int, Range(0, 256)] = 0
    """Compute each layer's MLP in this many chunks of a micro-batch's tokens, multiples of 128, so that its activations
    exist for one chunk at a time; with --recompute '["block"]'; 0: of all tokens at once."""
    distill: JsonDict = None
    """Learn from a frozen teacher in high precision too, a JSON object: teacher (a hub id or a folder with weights, of
    the same vocabulary), weight (of the divergence KL(teacher || student) in the loss, of which cross-entropy has the
    rest; 0.5), temperature (divides the logits of both; 1). The logged loss is cross-entropy alone; kl is beside it."""
    z_loss: NotNegative = 0.0
    """Weight of the z-loss, the squared log of the softmax's normalizer, 1e-4 is usual; not in the logged loss."""
    router_balance_loss: NotNegative | None = None
    """Weight of the load-balancing loss of a mixture of experts, 0.001 to 0.01 is usual; not in the logged loss; None:
    router_aux_loss_coef of the model's config."""
    router_z_loss: NotNegative = 0.0
    """Weight of the z-loss of a mixture's routers, 1e-3 is usual; not in the logged loss."""
    router_bias_rate: NotNegative = 0.0
    """After each step, raise the selection bias of experts with less than the mean load by this much, and lower that of
    the others (DeepSeek-V3, where 0.001 is usual); 0: leave the biases as they are."""


@dataclass(frozen=True)
class VisionSettings(TrainSettings):
    """Train a vision model of timm, from published weights or from random ones (--no_pretrained)."""

    model: str = "timm/vit_base_patch14_dinov2.lvd142m"
    """Model of timm, NAME or timm/NAME; NAME.TAG chooses among its published weights."""
    model_kwargs: JsonDict = None
    """Arguments of the model as a JSON object, such as {"img_size":224}."""
    pretrained: bool = True
    """Start from the model's published weights instead of random ones; the classifier is random either way."""
    quantize_lm_head: bool = False
    """Quantize the classifier's linear layer too, not only the linear layers below it."""
    compile: bool = False
    """Compile each block with torch.compile (or the whole model, if it repeats no block): faster steps after a minute
    or so of compiling."""
    train_ds: JsonDict = None
    """Training images as a JSON object, {"type":"TYPE", ...}; --list shows the types; null: RESISC45 from the hub."""
    eval_ds: JsonDict = None
    """Validation images, a JSON object like --train_ds; null: no evaluation, but with RESISC45 its validation split."""
    augment: JsonDict = None
    """Data augmentation as a JSON object: auto_augment, scale, ratio, hflip, color_jitter, re_prob, mixup, cutmix,
    label_smoothing, ...; null: random crops, flips and changes of color."""
    num_workers: Workers = 0
    """0: threads decode images and the main process augments them; N: N processes decode and augment."""
    n_epochs: CountOrZero = 0
    """Passes over the training images; 0: as many as --n_steps makes, one if that is 0 too."""
    n_steps: CountOrZero = 0
    """Optimizer steps to train; 0: as many as the epochs have."""
    batch_size: BatchSize = 64
    """Images per optimizer step."""
    micro_batch_size: MicroBatchSize = 0
    """Images per forward pass; 0: batch_size / gradient_accumulation."""
    lr: NotNegative = 1e-5
    """Peak learning rate; random weights need about a hundred times the default, which suits published ones."""
    weight_decay: NotNegative = 0.05
    """Decoupled weight decay of weight matrices and embeddings; norms and biases have none."""
    ema_decay: Annotated[float, Range(0, 1)] = 0.0
    """Evaluate and export an exponential moving average of the weights with this decay per step, 0.9999 is usual; 0:
    the weights themselves."""
    eval_interval: CountOrZero = 0
    """Steps between evaluations; 0: evaluate after every epoch."""
    eval_images: CountOrZero = 0
    """Images of --eval_ds per evaluation, the same ones each time; 0: all."""


@dataclass(frozen=True)
class BatchGeometry:
    """How an optimizer step's batch is made up: batch = micro_batch_size x gradient_accumulation x world."""

    micro_batch_size: int
    """Sequences (images) per forward pass of a rank."""
    gradient_accumulation: int
    """Micro-batches per optimizer step of a rank."""
    world: int
    """Ranks that read data of their own: the ranks of a tensor-parallel or context-parallel group count once."""
    tp: int = 1
    """Ranks that read the same sequences and compute a part of every layer."""
    cp: int = 1
    """Ranks that read the same sequences and compute a part of each."""

    @property
    def group(self) -> int:
        """Ranks that read the same sequences."""
        return self.tp * self.cp

    @property
    def devices(self) -> int:
        return self.world * self.group


DETERMINISTIC_DEVICES = 8
"""With --deterministic, as many devices as this can share a batch in its default micro-batches."""


def batch_geometry(settings: TrainSettings, processes: int = 1) -> BatchGeometry:
    """The geometry of `processes`, with whichever of micro_batch_size and gradient_accumulation is 0 filled in.
    UserError for sizes that do not multiply to the batch."""
    world = processes // settings.tp // settings.cp
    batch, micro, accumulation = settings.batch_size, settings.micro_batch_size, settings.gradient_accumulation
    if batch % world:
        raise UserError(f"--batch_size: {batch} sequences cannot be shared equally by {world} devices.")
    per_device = batch // world
    if not micro and not accumulation and settings.deterministic:
        # The sum over a micro-batch depends on its size, so the default must not depend on the number of devices.
        micro = batch // math.gcd(batch, DETERMINISTIC_DEVICES)
        if per_device % micro:
            raise UserError(
                f"--deterministic: micro-batches are of {micro} by default on any number of devices, which does not "
                f"divide the {per_device} of each of {world} devices; give one --micro_batch_size to all runs."
            )
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
    return BatchGeometry(micro, accumulation, world, settings.tp, settings.cp)
