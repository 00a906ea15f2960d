"""Pretrain a language model with low-bit matmuls: plan > model > quantize > optimizer > data > fit > export.

python llm_pretrain.py --config configs/quickstart.json
python llm_pretrain.py --model qwen2.5-0.5b --quantize int8 --train_ds '{"type":"token","dataset_dir":"DIR"}' --compile
"""

from dataclasses import dataclass
from pathlib import Path

from qtrain.config import parse, run_script
from qtrain.data import Loader, StreamContext, dataset_tokenizer, eval_batches, open_stream
from qtrain.errors import UserError
from qtrain.hardware import describe_hardware
from qtrain.models import (
    apply_activation_checkpointing,
    build_model,
    compile_layers,
    empty_model,
    export_hf,
    read_model_source,
)
from qtrain.optim import OPTIMIZERS, make_schedule, parameter_groups
from qtrain.quant import SCHEMES, describe_choices, quantize_linears
from qtrain.train.cuda_graphs import step_graphs
from qtrain.train.eval.hellaswag import load_questions
from qtrain.train.eval.language import LanguageEvaluation
from qtrain.train.in_backward import check_in_backward
from qtrain.train.language import language_forward
from qtrain.train.listing import listing
from qtrain.train.log.report import write_report
from qtrain.train.log.status import FILE_ONLY, setup_log
from qtrain.train.log.trackers import check_trackers
from qtrain.train.loop import Training, explain_out_of_memory
from qtrain.train.plan.auto_scheme import resolve_auto_scheme
from qtrain.train.plan.plan import make_plan
from qtrain.train.settings import CountOrNever, LanguageSettings, batch_geometry, choose_device, choose_dtype
from qtrain.train.state.run import Run, find_run_folder
from qtrain.train.state.state_dict import seed_rng
from qtrain.train.state.train_state import TrainState
from qtrain.train.step import eval_weights

SCRIPT = Path(__file__).stem


@dataclass(frozen=True)
class PretrainSettings(LanguageSettings):
    """Pretrain a language model from random weights, or go on from published ones (--pretrained)."""

    sample_prompts: tuple[str, ...] = ()
    """Prompts that text is sampled from at every evaluation."""
    sample_tokens: CountOrNever = 64
    """Tokens sampled from each prompt."""
    hellaswag: bool = False
    """Measure HellaSwag accuracy at every evaluation."""
    hellaswag_file: str | None = None
    """A .jsonl of HellaSwag questions; none: the hub's."""
    hellaswag_limit: CountOrNever = 0
    """Questions asked; 0: all."""
    export: bool = True
    """Write the trained model in Hugging Face format when the run ends."""


def main(argv: list[str]) -> None:
    if "--list" in argv:
        print(listing())
        return
    settings = parse(PretrainSettings, argv, f"{SCRIPT}.py")

    # ---- plan: whatever can be refused is refused here, before anything is allocated or written ----------------------
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    geometry = batch_geometry(settings)
    scheme = SCHEMES.make(settings.quantize, settings.quantize_kwargs or {}, "--quantize")
    optimizer_spec = OPTIMIZERS.make(settings.optim, settings.optim_kwargs or {}, "--optim")
    schedule = make_schedule(settings.lr_schedule_kwargs)
    check_in_backward(settings, geometry, optimizer_spec)
    check_trackers(settings.trackers)
    folder = find_run_folder(settings, SCRIPT)
    source = read_model_source(settings.model)
    model_config = source.model_config() if settings.model_impl == "native" else None

    if settings.train_ds is None:
        raise UserError('--train_ds: no training data is given; for example \'{"type":"token","dataset_dir":"DIR"}\'.')
    tokenizer = dataset_tokenizer(settings.train_ds, "--train_ds")
    if tokenizer is None and (settings.sample_prompts or settings.hellaswag or settings.doc_mask):
        raise UserError(
            "--train_ds: it does not say its tokenizer, which --sample_prompts, --hellaswag and --doc_mask need; add "
            '"tokenizer":"NAME" to it.'
        )
    if settings.doc_mask and tokenizer.eos_id is None:
        raise UserError(f"--doc_mask: the tokenizer {tokenizer.name!r} has no end token to tell documents apart.")
    vocab_size = source.config.get("vocab_size") if model_config is None else model_config.vocab_size
    context = StreamContext(
        settings.seq_len,
        settings.seed,
        tokenizer=tokenizer,
        vocab_size=vocab_size if isinstance(vocab_size, int) else None,
    )
    open_stream(settings.train_ds, context, "--train_ds").next_sample()
    eval_windows = []
    if settings.eval_ds is not None:
        eval_windows = eval_batches(
            settings.eval_ds, context, geometry.micro_batch_size, settings.eval_sequences, "--eval_ds"
        ).batches
    questions = []
    if settings.hellaswag_file and not settings.hellaswag:
        raise UserError("--hellaswag_file: it is read with --hellaswag only; add that, or leave it out.")
    if settings.hellaswag:
        flag = "--hellaswag_file" if settings.hellaswag_file else "--hellaswag"
        questions = load_questions(settings.hellaswag_file or "hub", settings.hellaswag_limit or None, flag)
    settings, scheme, choice = resolve_auto_scheme(
        settings,
        scheme,
        lambda: empty_model(source, settings.model_impl),
        tokens=geometry.micro_batch_size * settings.seq_len,
        geometry=geometry,
        dtype=dtype,
        device=device,
        resumed_from=folder.resumed_from,
    )
    plan = make_plan(
        settings,
        model_config,
        scheme,
        optimizer_spec,
        geometry,
        describe_hardware(device),
        dtype,
        data=(str(settings.train_ds), *([str(settings.eval_ds)] if settings.eval_ds else [])),
    )
    planned = "\n".join([*plan.lines(), *choice])
    print(planned, flush=True)
    if settings.dry_run:
        return

    with explain_out_of_memory(plan, settings, device):
        # ---- model ---------------------------------------------------------------------------------------------------
        seed_rng(settings.seed)
        model = build_model(
            source,
            impl=settings.model_impl,
            device=device,
            dtype=dtype,
            pretrained=settings.pretrained,
            seed=settings.seed,
        )
        model.loss_chunks, model.z_loss = settings.loss_chunks, settings.z_loss

        # ---- quantize ------------------------------------------------------------------------------------------------
        quantized = quantize_linears(
            model,
            scheme,
            seed=settings.seed,
            head=model.lm_head,
            quantize_head=settings.quantize_lm_head,
            min_size=settings.quantize_min_size,
        )
        swapped = "\n".join(["linears", *describe_choices(quantized.choices)])
        print(swapped, flush=True)
        apply_activation_checkpointing(model, settings.activation_checkpointing)
        if settings.compile:
            compile_layers(model)

        # ---- optimizer -----------------------------------------------------------------------------------------------
        optimizer = optimizer_spec.build(
            parameter_groups(model, settings.weight_decay), settings.lr, seed=settings.seed
        )
        quantized.watch(optimizer)
        run = Run(settings, SCRIPT, folder, device, model, quantized, optimizer, TrainState())
        run.restore()

    # ---- data --------------------------------------------------------------------------------------------------------
    loader = Loader(
        settings.train_ds,
        context,
        geometry.micro_batch_size,
        "--train_ds",
        num_workers=settings.num_workers,
        position=run.state.data,
    )

    # ---- fit: from here on files are written -------------------------------------------------------------------------
    forward = language_forward(model, tokenizer.eos_id if settings.doc_mask else None)
    evaluation = LanguageEvaluation(
        model,
        forward,
        eval_windows,
        tokenizer,
        questions,
        settings.sample_prompts,
        settings.sample_tokens,
        settings.seq_len,
        settings.seed,
    )
    with loader:
        run.open_folder()
        log = setup_log(folder.path)
        log.info("%s\n%s", planned, swapped, extra=FILE_ONLY)
        log.info("run folder  %s", folder.path)
        graphs = step_graphs(settings, model, forward, quantized, recordable=settings.model_impl == "native")
        finished = Training(run, plan, schedule, forward, loader, evaluation, graphs).fit()

    # ---- export ------------------------------------------------------------------------------------------------------
    report = write_report(folder.path)
    log.info("report      %s", report)
    if settings.keep_ckpts:
        log.info("checkpoint  %s", run.checkpoints.latest())
    if finished and settings.export:
        with eval_weights(optimizer, quantized):
            export_hf(model, source, folder.path / "hf", tokenizer)
        log.info("exported    %s (AutoModelForCausalLM.from_pretrained loads it)", folder.path / "hf")
        plainly = "--quantize bf16 --quantize_kwargs {}" if settings.quantize_kwargs else "--quantize bf16"
        log.info("try next    python llm_pretrain.py --config %s/config.json %s", folder.path, plainly)


if __name__ == "__main__":
    run_script(main)
