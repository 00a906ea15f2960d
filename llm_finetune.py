"""Fine-tune a language model: plan > model > quantize, freeze, adapt > optimizer > data > fit > export.

python llm_finetune.py --model HuggingFaceTB/SmolLM-1.7B --freeze_embedding_layer --batch_size 4 --compile
python llm_finetune.py --config configs/finetune_laptop.json --model runs/llm_pretrain/RUN/hf
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from qtrain.config import JsonDict, parse, run_script
from qtrain.data import Loader, StreamContext, eval_batches, open_stream
from qtrain.errors import UserError
from qtrain.hardware import describe_hardware
from qtrain.models import (
    add_lora,
    apply_activation_checkpointing,
    as_lora,
    build_model,
    check_combination,
    compile_layers,
    empty_model,
    export_hf,
    load_adapter,
    merge_lora,
    read_model_source,
    save_adapter,
)
from qtrain.optim import OPTIMIZERS, make_schedule, parameter_groups
from qtrain.quant import SCHEMES, base_scheme, describe_choices, quantize_linears
from qtrain.train.cuda_graphs import step_graphs
from qtrain.train.eval.exact_match import FinetuneEvaluation, load_questions
from qtrain.train.eval.lm_eval import check_lm_eval, run_lm_eval
from qtrain.train.freezing import describe_trained, freeze_embedding, trained_part
from qtrain.train.in_backward import check_in_backward
from qtrain.train.language import language_forward, run_tokenizer
from qtrain.train.listing import listing
from qtrain.train.log.report import write_report
from qtrain.train.log.status import FILE_ONLY, setup_log
from qtrain.train.log.trackers import check_trackers
from qtrain.train.loop import Training, explain_out_of_memory
from qtrain.train.plan.auto_scheme import resolve_auto_scheme
from qtrain.train.plan.plan import make_plan
from qtrain.train.settings import (
    Count,
    CountOrNever,
    LanguageSettings,
    NotNegative,
    batch_geometry,
    choose_device,
    choose_dtype,
)
from qtrain.train.state.run import Run, find_run_folder
from qtrain.train.state.state_dict import seed_rng
from qtrain.train.state.train_state import TrainState
from qtrain.train.step import eval_weights, evaluate

SCRIPT = Path(__file__).stem


@dataclass(frozen=True)
class FinetuneSettings(LanguageSettings):
    """Fine-tune a language model on instructions or chats: in full, or adapters on a frozen base."""

    model: str = "HuggingFaceTB/SmolLM-1.7B"
    """Hub id or local folder of the model to start from; with --no_pretrained also a shape in configs/models."""
    pretrained: bool = True
    """Load the model's weights instead of drawing random ones."""
    train_ds: JsonDict = dataclasses.field(default_factory=lambda: {"type": "instruct"})
    """Training data as JSON with a "type": instruct (MetaMathQA by default), chat, or any that --list shows."""
    lr: NotNegative = 1e-5
    """Peak learning rate; adapters want about ten times as much as all weights do."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay of matrices; norms and biases are not decayed."""
    seq_len_multiple: CountOrNever = 0
    """0: several examples are packed into a sequence; N: one each, padded to a multiple of N tokens, like lengths
    together."""
    freeze_embedding_layer: bool = False
    """Do not train the embedding (nor the output head where it is the same matrix)."""
    lora: JsonDict = None
    """Train low-rank adapters on a frozen model, as JSON: r, alpha, dropout, targets, rslora, dora, base (none, nf4,
    int8, fp8: what the frozen weights are stored in), adapter (a folder to go on from). Give {} for the defaults."""
    accuracy: CountOrNever = 0
    """Questions of --eval_ds that are answered at every evaluation, right if the final answers agree; 0: none."""
    answer_tokens: Count = 256
    """Tokens generated for an answer at most."""
    lm_eval: str | None = None
    """Tasks of lm_eval that the exported model is measured on at the end, separated by commas."""
    export: bool = True
    """Write the trained model, adapters merged, in Hugging Face format when the run ends."""


def main(argv: list[str]) -> None:
    if "--list" in argv:
        print(listing())
        return
    settings = parse(FinetuneSettings, argv, f"{SCRIPT}.py")

    # ---- plan: whatever can be refused is refused here, before anything is allocated or written ----------------------
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    geometry = batch_geometry(settings)
    scheme = SCHEMES.make(settings.quantize, settings.quantize_kwargs or {}, "--quantize")
    lora = None if settings.lora is None else as_lora(settings.lora)
    if lora is not None:
        check_combination(lora, settings.quantize, settings.activation_checkpointing)
        scheme = scheme if lora.base == "none" else base_scheme(lora.base, settings.quantize)
    optimizer_spec = OPTIMIZERS.make(settings.optim, settings.optim_kwargs or {}, "--optim")
    schedule = make_schedule(settings.lr_schedule_kwargs)
    check_in_backward(settings, geometry, optimizer_spec)
    check_trackers(settings.trackers)
    check_lm_eval(settings.lm_eval)
    folder = find_run_folder(settings, SCRIPT)
    source = read_model_source(settings.model)
    model_config = source.model_config() if settings.model_impl == "native" else None
    if settings.train_ds is None:
        raise UserError('--train_ds: no training data is given; for example \'{"type":"instruct"}\'.')
    tokenizer = run_tokenizer(settings.train_ds, source)
    vocab_size = source.config.get("vocab_size") if model_config is None else model_config.vocab_size
    context = StreamContext(
        settings.seq_len,
        settings.seed,
        tokenizer=tokenizer,
        vocab_size=vocab_size if isinstance(vocab_size, int) else None,
        seq_len_multiple=settings.seq_len_multiple,
        micro_batch_size=geometry.micro_batch_size,
    )
    open_stream(settings.train_ds, context, "--train_ds").next_sample()
    windows, questions = [], []
    if settings.eval_ds is not None:
        micro = geometry.micro_batch_size
        windows = eval_batches(settings.eval_ds, context, micro, settings.eval_sequences, "--eval_ds").batches
    if settings.accuracy:
        if settings.eval_ds is None:
            raise UserError("--accuracy: questions come from --eval_ds; give that, or leave --accuracy out.")
        held_out = dataclasses.replace(context, seed=0, shuffle=False)
        questions = load_questions(settings.eval_ds, held_out, settings.accuracy, settings.seq_len, "--eval_ds")
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
    data = (str(settings.train_ds), *([str(settings.eval_ds)] if settings.eval_ds else []))
    hardware = describe_hardware(device)
    trained = trained_part(model_config, lora, settings.freeze_embedding_layer, dtype)
    plan = make_plan(settings, model_config, scheme, optimizer_spec, geometry, hardware, dtype, data, trained)
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

        # ---- quantize, freeze, adapt ---------------------------------------------------------------------------------
        quantized = quantize_linears(
            model,
            scheme,
            seed=settings.seed,
            head=model.lm_head,
            quantize_head=settings.quantize_lm_head,
            min_size=settings.quantize_min_size,
        )
        notes = ["linears", *describe_choices(quantized.choices)]
        if settings.freeze_embedding_layer:
            notes += freeze_embedding(model)
        if lora is not None:
            add_lora(model, lora, settings.seed)
            if lora.adapter is not None:
                load_adapter(model, lora.adapter)
        swapped = "\n".join([*notes, describe_trained(model)])
        print(swapped, flush=True)
        apply_activation_checkpointing(model, settings.activation_checkpointing)
        if settings.compile:
            compile_layers(model)

        # ---- optimizer -----------------------------------------------------------------------------------------------
        groups = parameter_groups(model, settings.weight_decay)
        optimizer = optimizer_spec.build(groups, settings.lr, seed=settings.seed)
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
    loss = (lambda: evaluate(model, forward, windows)) if windows else None
    evaluation = FinetuneEvaluation(model, loss, tokenizer, questions, settings.answer_tokens)
    with loader:
        run.open_folder()
        log = setup_log(folder.path)
        log.info("%s\n%s", planned, swapped, extra=FILE_ONLY)
        log.info("run folder  %s", folder.path)
        constant = settings.seq_len_multiple in (0, settings.seq_len)  # packed, or padded to one length
        recordable = constant and settings.model_impl == "native" and not (lora and lora.dropout)
        graphs = step_graphs(settings, model, forward, quantized, recordable=recordable)
        finished = Training(run, plan, schedule, forward, loader, evaluation, graphs).fit()

    # ---- export ------------------------------------------------------------------------------------------------------
    counted = {key: run.state.data[key] for key in ("read", "dropped", "cut", "empty") if key in (run.state.data or {})}
    if counted:
        log.info("examples    %s", ", ".join(f"{count:,} {what}" for what, count in counted.items()))
    log.info("report      %s", write_report(folder.path))
    if settings.keep_ckpts:
        log.info("checkpoint  %s", run.checkpoints.latest())
    if not finished:
        return
    with eval_weights(optimizer, quantized):
        if lora is not None:
            save_adapter(model, lora, settings.model, folder.path / "adapter")
            log.info("adapter     %s (peft.PeftModel.from_pretrained loads it)", folder.path / "adapter")
            merge_lora(model)
        if settings.export:
            export_hf(model, source, folder.path / "hf", tokenizer)
            log.info("exported    %s (AutoModelForCausalLM.from_pretrained loads it)", folder.path / "hf")
    if settings.lm_eval and settings.export:
        for name, value in run_lm_eval(settings.lm_eval, folder.path / "hf", device.type).items():
            log.info("lm_eval     %s %.4f", name, value)


if __name__ == "__main__":
    run_script(main)
