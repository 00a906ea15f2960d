"""What excludes what: one table of options that contradict each other, or that have no effect with others.

A row that contradicts the rest of the command line is refused, before anything is allocated. One that only lacks
something here, such as the GPU that a recipe was written for, is answered by a line of the plan. The documentation has
the table. What depends on a model's numbers, such as whether --tp divides its heads, is checked where its config has
been read.
"""

from collections.abc import Iterable

import torch

from qtrain.comm.ranks import launched_world
from qtrain.core.errors import UserError
from qtrain.optim.state_layout import HOST_NAMES
from qtrain.quant.schemes.auto import Auto
from qtrain.quant.schemes.frozen_base import keeps_codes
from qtrain.quant.weight_codes import has_two_layouts
from qtrain.tensors.stored_weight import rows_divide
from qtrain.train.settings.exclusion import (
    Exclusion,
    all_bf16,
    allowed_optimizers,
    arithmetics,
    batches_differ,
    both,
    decayless,
    has_adapters,
    has_low_bit_base,
    is_timm,
    is_transformers,
    keeps_8bit,
    note,
    offloads_states,
    one_micro_batch,
    qat_parts,
    quantizes_by_name,
    stores_weights,
    streams,
    without,
)
from qtrain.train.settings.machine import run_world
from qtrain.train.settings.options import Options
from qtrain.train.settings.recompute import recompute_kinds

KEPT, OTHER_BASE = "--lora on the codes of --model", '; give --lora "base":"dense", or nf4, int8 or fp8'
LEAVE, SHARD = "; leave it out", "; shard the run with --dp_shard or --dp_replicate instead"

# fmt: off
PLAN_EXCLUSIONS = (
    *(Exclusion(f"--{name}", "no --dry_run", lambda o, name=name: o.get(name) is not None and not o.settings.dry_run,
          "it plans for other machines than this run's", "; add --dry_run, or leave it out")
      for name in ("gpu", "world_size")),
    Exclusion("--gpu", "--device cpu", lambda o: o.settings.gpu is not None and o.settings.device == "cpu",
        "it names the GPU to plan for, and --device cpu none", "; leave one of them out"),
    *(Exclusion(f"--{name}", "no --world_size", lambda o, name=name: o.settings.world_size is None and o.has(name),
          "it needs --world_size, the number of GPUs to plan for", "; or leave it out")
      for name in ("gpus_per_node", "wire", "sol")),
    Exclusion("--world_size", "torchrun, --gpus",
        lambda o: o.settings.world_size is not None and (launched_world() > 1 or o.settings.gpu_count > 1),
        "one process plans for any world", "; start it without torchrun and --gpus"),
)
# fmt: on
"""Those of plans, checked first: the device of a plan is not that of a run."""

# fmt: off
RUN_EXCLUSIONS = (
    # ---- plans ----
    Exclusion("--gpu", "--quantize auto", lambda o: o.settings.gpu is not None and isinstance(o.scheme.root, Auto),
        "--quantize auto times the GPU that is here", "; name a scheme instead"),
    Exclusion("--world_size", "--reshard_after_forward always (timm)",
        lambda o: is_timm(o) and o.settings.world_size is not None and o.settings.reshard_after_forward == "always",
        "fully sharded vision models are not planned", "; leave out --reshard_after_forward always"),
    # ---- memory ----
    Exclusion("--memory_limit", "a CPU", lambda o: o.has("memory_limit") and o.device.type == "cpu",
        "it limits a GPU's memory, and this run is on the CPU", "; leave it out, or plan for a GPU with --gpu"),
    Exclusion("--fit", "--quantize auto", lambda o: o.get("fit") == "auto" and isinstance(o.scheme.root, Auto),
        "--quantize auto times micro-batches of a size that --fit auto is still to choose", "; name a scheme"),
    Exclusion("--fit", "--model_impl hf", lambda o: o.get("fit") == "auto" and is_transformers(o),
        "the plan does not know the memory of transformers' own models", "; use --model_impl native"),
    Exclusion("--optim_kwargs.offload", "--offload",
        lambda o: o.settings.offload is not None and o.key("optim_kwargs", "offload") is not None,
        "--offload says which states are in host memory", "; leave one of them out"),
    Exclusion("--offload", "--optim that keeps its states on the GPU",
        lambda o: offloads_states(o) and not o.optimizer.host_names,
        "m, v and master are of elementwise optimizers, and --optim {optim} keeps its states on the GPU",
        allowed_optimizers(lambda spec: bool(spec.host_names))),
    Exclusion("--offload", "models of timm, --model_impl hf",
        lambda o: bool({"residuals", "weights", "gradients"} & o.offload) and (is_timm(o) or is_transformers(o)),
        "residuals, weights and gradients are those of qtrain's own decoder", "; take them out of the list"),
    Exclusion("--offload", "gradients with --lora", lambda o: "gradients" in o.offload and has_adapters(o),
        "gradients of adapters are small and stay on the GPU", "; take gradients out of the list"),
    Exclusion("--offload", "weights of several processes",
        lambda o: "weights" in o.offload and run_world(o.settings) > 1,
        "weights of several processes are sharded among them",
        "; take weights out of the list, and give --reshard_after_forward always"),
    Exclusion("--offload", "gradients of several processes without --reshard_after_forward always",
        lambda o: "gradients" in o.offload and run_world(o.settings) > 1
        and o.settings.reshard_after_forward != "always",
        "gradients of several processes are in host memory where layers are sharded",
        "; give --reshard_after_forward always"),
    Exclusion("--offload", "weights without gradients",
        lambda o: "weights" in o.offload and not has_adapters(o) and "gradients" not in o.offload,
        "weights that train are updated from gradients that are in host memory too", "; add gradients to the list"),
    Exclusion("--offload", "gradients of one process without weights",
        lambda o: "gradients" in o.offload and "weights" not in o.offload and run_world(o.settings) == 1,
        "gradients are added up in host memory for weights that are there too", "; add weights to the list"),
    Exclusion("--offload", "gradients of one process with --optim that keeps its states on the GPU",
        lambda o: streams(o) and not o.optimizer.streams_weights,
        "--optim {optim} updates weights on the GPU only", allowed_optimizers(lambda spec: spec.streams_weights)),
    Exclusion("--offload", "gradients of one process with weights stored in low bits",
        lambda o: streams(o) and stores_weights(o),
        "--quantize {quantize} stores weights in low bits, which stay on the GPU",
        "; take weights and gradients out of the list"),
    Exclusion("--optimizer_in_backward", "--offload gradients",
        lambda o: "gradients" in o.offload and o.has("optimizer_in_backward"),
        "it leaves no gradients that could be in host memory",
        "; leave it out, or take weights and gradients out of --offload"),
    Exclusion("--deterministic", "--offload gradients of one process", lambda o: streams(o) and o.has("deterministic"),
        "it adds gradients in fp32 on the GPU", "; leave it out, or take weights and gradients out of --offload"),
    note("--offload", "--optim without what it names",
        lambda o: bool(o.optimizer.host_names) and offloads_states(o)
        and not set(o.settings.offload or ()) & set(HOST_NAMES) <= set(o.optimizer.host_names),
        "what --optim {optim} does not keep has no effect"),
    *(note(option, "a CPU", lambda o, given=given: bool(given(o)) and o.device.type == "cpu",
          "has no effect on a CPU, whose memory is the host's")
      for option, given in (("--offload", lambda o: o.settings.offload),
                            ("--optim_kwargs.offload", lambda o: o.key("optim_kwargs", "offload")))),
    note("--weight_codes", "--quantize without a second layout that follows from the first",
        lambda o: o.has("weight_codes") and not isinstance(o.scheme.root, Auto) and not has_two_layouts(o.scheme),
        "has no effect: no transposed codes of weights that follow from the others"),
    # ---- recomputation ----
    Exclusion("--recompute", "--activation_checkpointing",
        lambda o: o.has("recompute") and o.has("activation_checkpointing"),
        "--activation_checkpointing {activation_checkpointing} names another set of kinds", "; leave one out"),
    Exclusion("--recompute", "--model_impl hf", lambda o: o.has("recompute") and is_transformers(o),
        "layers of transformers' own models recompute the sets of --activation_checkpointing only",
        "; use that, or --model_impl native"),
    Exclusion("--mlp_chunks", "--model_impl hf", lambda o: bool(o.get("mlp_chunks")) and is_transformers(o),
        "only layers of qtrain's own decoder run in chunks", "; use --model_impl native, or leave it out"),
    Exclusion("--mlp_chunks", "no --recompute block",
        lambda o: bool(o.get("mlp_chunks")) and "block" not in recompute_kinds(o.settings),
        "{mlp_chunks}, but only layers that are recomputed as a whole run in chunks",
        "; add --recompute '[\"block\"]', or leave it out"),
    Exclusion("--mlp_chunks", "--tp", lambda o: bool(o.get("mlp_chunks")) and o.settings.tp > 1,
        "{mlp_chunks}, but the ranks of --tp {tp} exchange the tokens of whole layers", "; leave one of them out"),
    Exclusion("--keep_8bit", "--model_impl hf", lambda o: o.has("keep_8bit") and is_transformers(o),
        "it keeps tensors of qtrain's own decoder", "; use --model_impl native, or leave it out"),
    Exclusion("--keep_8bit", "--recompute ffn or block", keeps_8bit("ffn", "block"),
        "ffn, and block or --activation_checkpointing full, compute the output of gate_up again and keep nothing of it",
        "; leave one of them out"),
    Exclusion("--keep_8bit", "--recompute norm without --compile",
        lambda o: keeps_8bit("norm")(o) and not o.settings.compile,
        "without a compiler norm would compute gate_up's product again too",
        "; add --compile, or leave norm (--activation_checkpointing selective) out"),
    Exclusion("--keep_8bit", "--lora with --recompute norm or swiglu",
        lambda o: has_adapters(o) and keeps_8bit("norm", "swiglu")(o),
        "with adapters norm and swiglu would compute gate_up's product again", "; leave one of them out"),
    # ---- distillation ----
    Exclusion("--distill", "--model_impl hf", lambda o: o.has("distill") and is_transformers(o),
        "only qtrain's own decoder runs its head with a teacher's, in chunks of tokens",
        "; use --model_impl native, or leave it out"),
    Exclusion("--distill", "--tp", lambda o: o.has("distill") and o.settings.tp > 1,
        "the ranks of --tp {tp} have a part of the vocabulary each, and a teacher's distribution is over all of it",
        SHARD),
    Exclusion("--distill", "--ep", lambda o: o.has("distill") and o.settings.ep > 1,
        "every rank has the teacher in full, which --ep {ep} does not shard", "; leave one of them out"),
    Exclusion("--distill", "--cp", lambda o: o.has("distill") and o.settings.cp > 1,
        "every rank of --cp {cp} would run the teacher over whole sequences", "; leave one of them out"),
    # ---- adapters ----
    *(Exclusion(f"--{name}", "--lora dropout", lambda o, name=name: o.lora and o.lora.dropout and o.has(name),
          "recomputed layers would drop other values", "; set dropout to 0")
      for name in ("activation_checkpointing", "recompute")),
    Exclusion("--lora.dropout", "--lora dora", lambda o: o.lora and o.lora.dora and o.lora.dropout,
        "{lora.dropout} does not go with DoRA, which scales the whole sum", "; set 0"),
    Exclusion("--lora.targets", "--model_impl hf", lambda o: o.lora and o.lora.expert_targets and is_transformers(o),
        "'{lora.expert_targets}' needs qtrain's own decoder", "; use --model_impl native, or take it out"),
    Exclusion("--lora.targets", "--lora dora", lambda o: o.lora and o.lora.expert_targets and o.lora.dora,
        "'{lora.expert_targets}' does not go with DoRA, which experts do not have", "; take it out, or set dora false"),
    Exclusion("--quantize", "--lora dora", lambda o: o.lora and o.lora.dora and o.settings.quantize != "bf16",
        "'{quantize}' does not go with DoRA, which needs the norms of the multiplied weights",
        '; leave it out, or give --lora a "base"'),
    Exclusion("--quantize_overrides", "--lora dora", lambda o: o.lora and o.lora.dora and quantizes_by_name(o),
        "low-bit schemes do not go with DoRA, which needs the norms of the multiplied weights",
        "; take all but \"bf16\" and stored weights out"),
    Exclusion("--quantize", "--quantize_schedule",
        lambda o: o.settings.quantize_schedule is not None and o.has("quantize"),
        "'{quantize}' and --quantize_schedule both say which scheme linears run in", "; leave one of them out"),
    Exclusion("--quantize_kwargs", "--quantize_schedule",
        lambda o: o.settings.quantize_schedule is not None and o.has("quantize_kwargs"),
        "they are options of --quantize, and the entries of --quantize_schedule have their own",
        '; write them there, beside "scheme"'),
    Exclusion("--quantize_schedule", "--lora base",
        lambda o: o.has("quantize_schedule") and has_low_bit_base(o),
        "the products of a base in low bits do not change", '; give --lora "base":"dense"'),
    Exclusion("--quantize_schedule", KEPT, lambda o: o.has("quantize_schedule") and keeps_codes(o.scheme),
        "the frozen base keeps the codes of --model, whose products do not change", f"{OTHER_BASE}, or leave it out"),
    Exclusion("--quantize_kwargs", "--lora base",
        lambda o: has_low_bit_base(o) and o.settings.quantize_kwargs,
        "the products of a base in low bits have no options", LEAVE),
    *(Exclusion(f"--{name}", KEPT, lambda o, name=name: keeps_codes(o.scheme) and getattr(o.settings, name) > 1,
          "the frozen base keeps the codes of --model, which it does not shard", OTHER_BASE)
      for name in ("tp", "ep")),
    Exclusion("--quantize_kwargs", KEPT, lambda o: keeps_codes(o.scheme) and o.settings.quantize_kwargs,
        "the products of a base in the codes of --model have no options", f"{OTHER_BASE}, or leave it out"),
    Exclusion("--reshard_after_forward", KEPT,
        lambda o: keeps_codes(o.scheme) and not rows_divide(getattr(o.scheme.root, "stored_format", ""))
        and o.settings.reshard_after_forward == "always" and run_world(o.settings) > 1,
        "the frozen base keeps FP8 codes with a scale per 128x128, which are not split by rows",
        f"{OTHER_BASE}, or leave it out"),
    *(Exclusion("--lora.merge_format", f"--lora {name}",
          lambda o, key=key: o.lora and o.lora.merge_format and getattr(o.lora, key),
          f"'{{lora.merge_format}}' does not go with {what}", f"; leave {name} out")
      for key, name, what in (("dora", "dora", "DoRA, which scales the sum"),
                              ("dropout", "dropout", "dropout, which a merged weight does not have"),
                              ("expert_targets", "expert targets", "adapters of routed experts"))),
    Exclusion("--lora.merge_format", "--quantize_overrides",
        lambda o: o.lora and o.lora.merge_format and quantizes_by_name(o),
        "'{lora.merge_format}' and --quantize_overrides both say which rounded weights are multiplied",
        "; leave one of them out"),
    Exclusion("--lora.merge_format", "--lora merge original",
        lambda o: o.lora and o.lora.merge_format and o.lora.merge == "original",
        "'{lora.merge_format}' rounds the trained weights, not those of --model", "; leave merge out"),
    Exclusion("--lora.merge_format", "--quantize",
        lambda o: o.lora and o.lora.merge_format and o.settings.quantize != "bf16",
        "'{lora.merge_format}' and --quantize {quantize} both say which rounded weights are multiplied",
        "; leave one of them out"),
    Exclusion("--lora", "--quantize qat", lambda o: has_adapters(o) and qat_parts(o),
        "it freezes the weights that qat rounds and trains",
        '; leave qat out and give --lora a "merge_format", whose rounding adapters train through'),
    Exclusion("--lora.merge_format", "--model_impl hf",
        lambda o: o.lora and o.lora.merge_format and is_transformers(o),
        "'{lora.merge_format}' needs qtrain's own decoder, as its export does", "; use --model_impl native"),
    *(Exclusion("--lora.merge_format", f"--{name}",
          lambda o, name=name: o.lora and o.lora.merge_format and getattr(o.settings, name) > 1,
          f"'{{lora.merge_format}}' rounds whole weights, which --{name} splits", "; leave one of them out")
      for name in ("tp", "ep")),
    Exclusion("--lora.merge_format", "--reshard_after_forward always",
        lambda o: o.lora and o.lora.merge_format and o.settings.reshard_after_forward == "always",
        "'{lora.merge_format}' rounds whole weights, which full sharding splits", "; leave one of them out"),
    note("--lora.merge_format", "--export_format without it",
        lambda o: o.lora and o.lora.merge_format and o.lora.merge_format not in o.get("export_format"),
        "trains for an export in {lora.merge_format}, which --export_format does not name"),
    Exclusion("--lora.merge", "--no_pretrained",
        lambda o: o.lora and o.lora.merge == "original" and not o.settings.pretrained,
        "'original' adds adapters to the weights of --model", "; leave out --no_pretrained"),
    note("--freeze_embedding_layer", "--lora", lambda o: o.has("freeze_embedding_layer") and has_adapters(o),
        "has no effect with --lora, which freezes all weights"),
    Exclusion("--router_bias_rate", "--lora", lambda o: o.has("router_bias_rate") and has_adapters(o),
        "routers are frozen with --lora; train all weights"),
    *(Exclusion(f"--{name}", "--model_impl hf", lambda o, name=name: bool(o.get(name)) and is_transformers(o),
          "it has no effect on transformers' own models", "; use --model_impl native")
      for name in ("router_balance_loss", "router_z_loss", "router_bias_rate")),
    # ---- processes ----
    Exclusion("--gradient_wire, --deterministic", "each other",
        lambda o: o.has("gradient_wire") and o.settings.deterministic,
        "the one rounds what the other promises to add exactly", "; leave one out"),
    note("--gradient_wire", "one process", lambda o: o.has("gradient_wire") and run_world(o.settings) == 1,
        "has no effect on one process"),
    note("--reshard_after_forward", "one process",
        lambda o: o.settings.reshard_after_forward == "always" and run_world(o.settings) == 1,
        "has no effect on one process"),
    note("--sequence_parallel", "no --tp", lambda o: o.has("sequence_parallel") and o.settings.tp == 1,
        "has no effect without --tp"),
    note("--gradient_accumulation", "--deterministic",
        lambda o: o.settings.deterministic and o.has("gradient_accumulation") and not o.has("micro_batch_size"),
        "with it the micro-batch, and so the last bits of a --deterministic loss, depends on the number of "
        "processes; give --micro_batch_size instead"),
    # ---- checkpoints ----
    Exclusion("--max_hours", "--keep_ckpts 0", lambda o: o.has("max_hours") and not o.settings.keep_ckpts,
        "it saves where it stops, and --keep_ckpts 0 saves nothing", "; leave one of them out"),
    Exclusion("--keep_best", "--keep_ckpts 0", lambda o: o.has("keep_best") and not o.settings.keep_ckpts,
        "it saves checkpoints, and --keep_ckpts 0 saves none", "; leave one of them out"),
    *(Exclusion("--on_spike", f"{other} 0",
          lambda o, name=name: o.get("on_spike") == "rewind" and not getattr(o.settings, name),
          f"rewind returns to checkpoints, and {other} 0 saves none before the end", "; give another, or skip or stop")
      for name, other in (("keep_ckpts", "--keep_ckpts"), ("ckpt_interval", "--ckpt_interval"))),
    Exclusion("--on_spike", "--optimizer_in_backward",
        lambda o: o.get("on_spike") == "skip" and o.settings.optimizer_in_backward,
        "skip drops gradients before the update, and --optimizer_in_backward has updated the weights by then",
        "; give rewind or stop"),
    note("--spike_threshold", "no --on_spike", lambda o: o.has("spike_threshold") and o.settings.on_spike == "off",
        "has no effect without --on_spike"),
    # ---- evaluation, samples, data ----
    *(Exclusion(f"--{name}", "no --eval_ds", without(name, "eval_ds"), "it compares losses on --eval_ds; give that")
      for name in ("keep_best", "early_stopping")),
    Exclusion("--hellaswag_file", "no --hellaswag", without("hellaswag_file", "hellaswag"), "needs --hellaswag"),
    Exclusion("--hellaswag_limit", "no --hellaswag", without("hellaswag_limit", "hellaswag"), "needs --hellaswag"),
    Exclusion("--eval_images", "no --eval_ds", without("eval_images", "eval_ds"), "needs --eval_ds"),
    note("--eval_sequences", "no --eval_ds", without("eval_sequences", "eval_ds"), "has no effect without --eval_ds"),
    Exclusion("--final_eval all", "no --eval_ds",
        lambda o: o.get("final_eval") == "all" and o.settings.eval_ds is None,
        "there is nothing to evaluate on", "; give --eval_ds, or leave it out"),
    note("--sample_tokens", "no --sample_prompts", without("sample_tokens", "sample_prompts"),
        "has no effect without prompts"),
    note("--answer_tokens", "no --accuracy", without("answer_tokens", "accuracy"),
        "has no effect without --accuracy"),
    Exclusion("--lm_eval", "--no_export", lambda o: o.get("lm_eval") is not None and not o.settings.export,
        "it evaluates the exported model", "; leave out --no_export, or --lm_eval"),
    Exclusion("--lm_eval", "--export_format without hf",
        lambda o: o.get("lm_eval") is not None and "hf" not in o.get("export_format"),
        "it evaluates the dense export", "; add hf to --export_format, or leave --lm_eval out"),
    Exclusion("--push_to_hub", "--no_export", lambda o: o.get("push_to_hub") is not None and not o.settings.export,
        "it uploads the export", "; leave out --no_export, or --push_to_hub"),
    note("--export_format", "--no_export", lambda o: o.has("export_format") and not o.settings.export,
        "has no effect with --no_export"),
    Exclusion("--export_format", "--model_impl hf", lambda o: bool(o.low_bit_exports) and is_transformers(o),
        "'{low_bit_export}' needs qtrain's own decoder", "; use --model_impl native, or hf alone"),
    Exclusion("--export_format", "--lora merge original",
        lambda o: bool(o.low_bit_exports) and o.lora and o.lora.merge == "original",
        "'{low_bit_export}' holds codes of the trained weights, not of those of --model", "; use hf alone"),
    *(Exclusion("--export_format", f"--{name}",
          lambda o, name=name: bool(o.low_bit_exports) and getattr(o.settings, name) > 1,
          f"'{{low_bit_export}}' needs linears that one process holds in full, and --{name} shards them",
          "; use hf alone, and then python -m qtrain export RUN --format {low_bit_export}")
      for name in ("tp", "ep")),
    Exclusion("--augment.mixup_prob", "neither mixup nor cutmix",
        lambda o: o.key("augment", "mixup_prob") is not None
        and not (o.key("augment", "mixup") or o.key("augment", "cutmix")),
        'needs "mixup" or "cutmix"'),
    # ---- schedule, quantization, optimizer ----
    *(Exclusion(f"--lr_schedule_kwargs.{key}", '"decay":0', decayless(key), 'needs a "decay" above 0')
      for key in ("decay_type", "final")),
    Exclusion("--quantize", "bf16 for all GEMMs", all_bf16,
        "all three GEMMs are in bf16, so nothing is quantized; use --quantize bf16"),
    note("--quantize_kwargs.fast_accum", "a CPU",
        lambda o: o.device.type == "cpu" and o.key("quantize_kwargs", "fast_accum") not in (None, False, []),
        "has no effect on a CPU, which accumulates in fp32"),
    Exclusion("--optim", "--quantize that stores weights",
        lambda o: "." in o.settings.optim and stores_weights(o) and not has_adapters(o),
        "other libraries' optimizers cannot update weights that --quantize stores in low bits; use qtrain's, as adamw"),
    note("--quantize_lm_head", "--quantize bf16",
        lambda o: o.settings.quantize_lm_head and o.settings.quantize == "bf16" and not has_low_bit_base(o),
        "has no effect with --quantize bf16"),
    note("--optim_kwargs.master", "fp32 weights",
        lambda o: o.key("optim_kwargs", "master") == "fp32" and o.dtype == torch.float32,
        "has no effect on fp32 weights"),
    note("--optim_kwargs.sr", "fp32 weights",
        lambda o: o.key("optim_kwargs", "sr") is True and o.dtype == torch.float32,
        "has no effect on fp32 weights; it rounds bf16 ones and bf16 states"),
    note("--lr_schedule_kwargs.decay", "--optim adamw_schedule_free",
        lambda o: o.settings.optim == "adamw_schedule_free" and o.schedule.decay > 0,
        'adamw_schedule_free averages instead of decaying; {"decay":0} is usual'),
    # ---- health ----
    Exclusion("--health_fallback", "--health 0", lambda o: o.has("health_fallback") and o.settings.health == 0,
        "{health_fallback} samples in a row decide, and --health 0 takes none", "; give --health a number of steps"),
    # ---- the optimizer in the backward pass ----
    Exclusion("--optimizer_in_backward", "--deterministic",
        both("optimizer_in_backward", lambda o: o.settings.deterministic),
        "with --deterministic weights change only after all gradients are summed", "; leave it out"),
    Exclusion("--optimizer_in_backward", "--gradient_accumulation",
        both("optimizer_in_backward", lambda o: o.geometry.gradient_accumulation > 1),
        "a micro-batch's gradients are freed before the next one's could be added", one_micro_batch),
    Exclusion("--optimizer_in_backward", "--clip_grad_norm",
        both("optimizer_in_backward", lambda o: o.settings.clip_grad_norm),
        "weights change before the norm of all gradients is known, so it cannot be clipped to {clip_grad_norm}",
        "; give --clip_grad_norm 0"),
    Exclusion("--optimizer_in_backward", "--optim that updates all parameters at once",
        both("optimizer_in_backward", lambda o: o.optimizer.refuses_partitions()),
        "it updates a part of the model at a time",
        lambda o: f"; {str(o.optimizer.refuses_partitions()).removesuffix('.')}"),
    # ---- tensor parallelism ----
    Exclusion("--tp", "models of timm", both("tp", is_timm),
        "{tp}, but models of timm have no tensor parallelism", SHARD),
    Exclusion("--tp", "--model_impl hf", both("tp", is_transformers),
        "{tp}, but only qtrain's own decoder has tensor parallelism",
        f"; use --model_impl native, or {SHARD.removeprefix('; ')}"),
    Exclusion("--tp", "--lora", both("tp", has_adapters),
        "{tp}, but adapters (--lora) have no tensor parallelism", SHARD),
    Exclusion("--tp", "--quantize auto --quantize_lm_head",
        both("tp", lambda o: o.settings.quantize == "auto" and o.settings.quantize_lm_head),
        "{tp}, but --quantize auto times one rank's part of the head (--quantize_lm_head), and others may have fewer "
        "rows", "; name the scheme, or leave out --quantize_lm_head"),
    Exclusion("--tp", "--quantize qat with a scale per row or tensor",
        both("tp", lambda o: any(not qat.has_groups for qat in qat_parts(o))),
        "{tp}, but each rank would scale its columns of a row by themselves, and an export has one scale for all",
        f'; give qat the "weight" int4_g32 or int4_g128, or {SHARD.removeprefix("; ")}'),
    Exclusion("--tp", "--optimizer_in_backward", both("tp", lambda o: o.settings.optimizer_in_backward),
        "{tp}, but --optimizer_in_backward updates a layer before the gradients of its norms are summed over its "
        "ranks", "; leave one of them out"),
    Exclusion("--tp", "--optim of whole matrices", both("tp", lambda o: o.optimizer.needs_whole(hidden=True)),
        "{tp}, but --optim {optim} works on whole matrices, and each rank has a part",
        allowed_optimizers(lambda spec: not spec.needs_whole(hidden=True))),
    # ---- context parallelism ----
    Exclusion("--cp", "models of timm", both("cp", is_timm), "{cp}, but images are no sequences to share", LEAVE),
    Exclusion("--cp", "--model_impl hf", both("cp", is_transformers),
        "{cp}, but only qtrain's own decoder has context parallelism", "; use --model_impl native, or leave it out"),
    *(Exclusion("--cp", f"--{name}", both("cp", lambda o, name=name: getattr(o.settings, name) > 1),
          f"{{cp}}, but ranks of --{name} {{{name}}} {what}", "; leave one of them out")
      for name, what in (("tp", "split the tokens between the layers' parts already"),
                         ("ep", "compute experts for whole sequences of their own"))),
    Exclusion("--cp", "--seq_len_multiple that it does not divide",
        both("cp", lambda o: (o.get("seq_len_multiple") or 0) % o.settings.cp),
        "{cp} does not divide the lengths of sequences, multiples of --seq_len_multiple {seq_len_multiple}",
        "; give a multiple of it, or 0, which packs examples"),
    # ---- expert parallelism ----
    Exclusion("--ep", "models of timm", both("ep", is_timm), "{ep}, but models of timm have no experts", LEAVE),
    Exclusion("--ep", "--model_impl hf", both("ep", is_transformers),
        "{ep}, but only qtrain's own decoder has expert parallelism", "; use --model_impl native, or leave it out"),
    Exclusion("--ep", "--deterministic --lora of experts",
        both("ep", lambda o: o.settings.deterministic and o.lora and o.lora.expert_targets),
        "{ep}, but ranks add the gradients of experts' adapters (--lora.targets) for the tokens of all at once, in no "
        "order of micro-batches", "; leave --deterministic or --ep out"),
    Exclusion("--ep", "--lora that merges elsewhere",
        both("ep", lambda o: o.lora and (o.lora.merge != "trained" or o.lora.merge_format)),
        "{ep}, but then adapters are merged with the weights that they train on",
        '; leave "merge" and "merge_format" out'),
    Exclusion("--ep", "--seq_len_multiple", both("ep", batches_differ),
        "{ep}, but ranks that compute experts together need micro-batches of one shape, and with --seq_len_multiple "
        "{seq_len_multiple} they differ in length", "; give 0, which packs examples, or --seq_len"),
    Exclusion("--ep", "--optimizer_in_backward", both("ep", lambda o: o.settings.optimizer_in_backward),
        "{ep}, but --optimizer_in_backward does not know experts that only some ranks hold", "; leave one of them out"),
    Exclusion("--ep", "--deterministic --quantize nvfp4",
        both("ep", lambda o: o.settings.deterministic and "nvfp4" in arithmetics(o)),
        "{ep}, but with --deterministic nvfp4 needs a scale of the tokens of all experts, which no rank has",
        "; leave one of them out"),
    Exclusion("--ep", "--quantize qat in nvfp4",
        both("ep", lambda o: any(qat.weight == "nvfp4" for qat in qat_parts(o))),
        "{ep}, but each rank would scale its experts by themselves, and an export has one scale for all",
        '; give qat another "weight", or leave --ep out'),
    Exclusion("--ep", "--optim of whole matrices", both("ep", lambda o: not o.optimizer.takes_parts(hidden=True)),
        "{ep}, but --optim {optim} works on the matrices of all experts at once, and each rank has a part",
        allowed_optimizers(lambda spec: spec.takes_parts(hidden=True))),
)
# fmt: on

EXCLUSIONS = PLAN_EXCLUSIONS + RUN_EXCLUSIONS


def check_exclusions(
    options: Options, rows: Iterable[Exclusion] = RUN_EXCLUSIONS, option: str | None = None
) -> tuple[str, ...]:
    """Lines for the plan: given options that have no effect. UserError for one that contradicts the others.

    option: only the rows of this flag."""
    found = [row for row in rows if option in (None, row.option) and row.applies(options)]
    for row in found:
        if row.refused:
            raise UserError(f"{row.message(options)}.")
    return tuple(f"note    {row.message(options)}" for row in found)
