"""Fine-tune a language model: plan > model > quantize > freeze, adapt > optimizer > data > fit > export.

python llm_finetune.py --model HuggingFaceTB/SmolLM-1.7B --freeze_embedding_layer --batch_size 4 --compile
python llm_finetune.py --config configs/finetune_laptop.json --model runs/llm_pretrain/RUN/hf
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from qtrain.config import JsonDict, parse, run_script
from qtrain.models import (
    Lora,
    add_lora,
    as_lora,
    check_combination,
    export_hf,
    load_adapter,
    merge_lora,
    save_adapter,
)
from qtrain.quant import base_scheme
from qtrain.train.assembly.architecture import LanguageArchitecture
from qtrain.train.assembly.assemble import assemble, build_quantized
from qtrain.train.assembly.prepare import prepare
from qtrain.train.assembly.text import open_text
from qtrain.train.checked_settings import check_settings
from qtrain.train.cuda_graphs import step_graphs
from qtrain.train.eval.exact_match import FinetuneEvaluation, load_written_questions
from qtrain.train.eval.lm_eval import check_lm_eval, run_lm_eval
from qtrain.train.freezing import describe_trained, freeze_embedding, trained_part
from qtrain.train.language import language_forward
from qtrain.train.listing import listing
from qtrain.train.loop import Training, explain_out_of_memory, log_results
from qtrain.train.settings import Count, CountOrNever, LanguageSettings, NotNegative
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
    lora = checked_lora(settings)
    stores_base = lora is not None and lora.base != "none"
    checked = check_settings(settings, SCRIPT, base_scheme(lora.base, settings.quantize) if stores_base else None)
    check_lm_eval(settings.lm_eval)
    architecture = LanguageArchitecture.of(settings)
    text = open_text(checked, architecture, model_tokenizer=True, seq_len_multiple=settings.seq_len_multiple)
    questions = []
    if settings.accuracy:
        questions = load_written_questions(settings.eval_ds, text.context, settings.accuracy, settings.seq_len)
    trained = trained_part(architecture.config, lora, settings.freeze_embedding_layer, checked.dtype)
    prepared = prepare(checked, architecture, text.described, trained)
    print(prepared.text, flush=True)
    if settings.dry_run:
        return

    with explain_out_of_memory(prepared.plan, settings, prepared.device):
        # ---- model, quantize -----------------------------------------------------------------------------------------
        model, quantized = build_quantized(prepared)

        # ---- freeze, adapt -------------------------------------------------------------------------------------------
        notes = freeze_embedding(model) if settings.freeze_embedding_layer else []
        if lora is not None:
            add_lora(model, lora, settings.seed)
            if lora.adapter is not None:
                load_adapter(model, lora.adapter)
        trains = "\n".join([*notes, describe_trained(model)])
        print(trains, flush=True)

        # ---- optimizer, resume ---------------------------------------------------------------------------------------
        run = assemble(prepared, model, quantized)

    # ---- data --------------------------------------------------------------------------------------------------------
    loader = text.loader(run.state.data)
    forward = language_forward(model, text.tokenizer.eos_id if settings.doc_mask else None)
    held_out_loss = (lambda: evaluate(model, forward, text.eval_windows)) if text.eval_windows else None
    evaluation = FinetuneEvaluation(
        model=model,
        held_out_loss=held_out_loss,
        tokenizer=text.tokenizer,
        questions=questions,
        max_new_tokens=settings.answer_tokens,
    )

    # ---- fit: from here on files are written -------------------------------------------------------------------------
    with loader, run.opened_folder(f"{prepared.text}\n{trains}") as log:
        one_shape = settings.seq_len_multiple in (0, settings.seq_len)  # packed, or padded to one length
        recordable = one_shape and settings.model_impl == "native" and not (lora and lora.dropout)
        graphs = step_graphs(run, forward, recordable=recordable)
        finished = Training(run, prepared.plan, prepared.schedule, forward, loader, evaluation, graphs).fit()

        # ---- export --------------------------------------------------------------------------------------------------
        data, folder = run.state.data or {}, run.folder.path
        if counts := [f"{data[key]:,} {key}" for key in ("read", "dropped", "cut", "empty") if key in data]:
            log.info("examples    %s", ", ".join(counts))
        log_results(run)
        if not finished:
            return
        with eval_weights(run.optimizer, quantized):
            if lora is not None:
                save_adapter(model, lora, settings.model, folder / "adapter")
                log.info("adapter     %s (peft.PeftModel.from_pretrained loads it)", folder / "adapter")
                merge_lora(model)
            if settings.export:
                export_hf(model, architecture.source, folder / "hf", text.tokenizer)
                log.info("exported    %s (AutoModelForCausalLM.from_pretrained loads it)", folder / "hf")
        if settings.lm_eval and settings.export:
            for name, value in run_lm_eval(settings.lm_eval, folder / "hf", prepared.device.type).items():
                log.info("lm_eval     %s %.4f", name, value)


def checked_lora(settings: FinetuneSettings) -> Lora | None:
    """The options of --lora, checked alone and against the other settings; None without it."""
    if settings.lora is None:
        return None
    lora = as_lora(settings.lora)
    check_combination(lora, settings.quantize, settings.activation_checkpointing)
    return lora


if __name__ == "__main__":
    run_script(main)
