"""Fine-tune a language model: plan > model > quantize > freeze, adapt > optimizer > data > fit > export.

python llm_finetune.py --model HuggingFaceTB/SmolLM-1.7B --freeze_embedding_layer --batch_size 4 --compile
python llm_finetune.py --config configs/finetune_laptop.json --model runs/llm_pretrain/RUN/hf
"""

import dataclasses
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from qtrain.core.process import prepare_process

prepare_process(script=True)  # before imports that take a while

from qtrain.comm.launch import launch
from qtrain.core.config import JsonDict, parse
from qtrain.core.process import run_script
from qtrain.train.log.start_clock import StartClock
from qtrain.train.settings.listing import listing
from qtrain.train.settings.resumed_recipe import with_recipe_of_run
from qtrain.train.settings.settings import CountOrZero, LanguageSettings, NotNegative

SCRIPT = Path(__file__).stem


@dataclass(frozen=True)
class FinetuneSettings(LanguageSettings):
    """Fine-tune a language model on instructions or chats: all weights, or adapters on frozen ones (--lora)."""

    model: str = "HuggingFaceTB/SmolLM-1.7B"
    """Model to start from: a Hugging Face hub id or a local folder; with --no_pretrained also a name from --list."""
    pretrained: bool = True
    """Start from the model's weights instead of random ones."""
    train_ds: JsonDict = dataclasses.field(default_factory=lambda: {"type": "instruct"})
    """Training data as a JSON object, {"type":"TYPE", ...}: instruct (MetaMathQA by default), chat, or any that --list
    shows."""
    lr: NotNegative = 1e-5
    """Peak learning rate; adapters need about ten times the default, which suits all weights."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay of weight matrices and embeddings; norms and biases have none."""
    seq_len_multiple: CountOrZero = 0
    """0: pack several examples into a sequence; N: one example per sequence, padded to a multiple of N tokens, with
    examples of similar length batched together."""
    lora: JsonDict = None
    """Train low-rank adapters on frozen weights; options as a JSON object: r, alpha, dropout, targets (all-linear,
    names such as q_proj; of routed experts experts.gate_up_proj, experts.down_proj), rslora, dora, base (format of
    the frozen weights: none, as --model has them, in its codes if it is quantized; dense, in the model's dtype; nf4,
    int8, fp8), adapter (folder of one to continue), merge (the weights that the export adds adapters to: trained, as
    frozen in base, or original, those of --model), merge_format (an export format: adapters train through the
    rounding of the merged weights that it will make). {}: the defaults."""


def main(argv: list[str]) -> None:
    train(parse(FinetuneSettings, with_recipe_of_run(argv, SCRIPT), f"{SCRIPT}.py", listing))


def train(settings: FinetuneSettings) -> None:
    start = StartClock()
    start.mark("flags")
    if not settings.dry_run:
        launch(settings.gpus, settings.device)  # with --gpus N: N processes of this command, for which this one waits
    # Imported here: torch and what needs it take seconds, which a mistyped flag should not have to wait for.
    from qtrain.models import AdaptedOriginal, add_lora, as_lora, check_merge_format, load_adapter
    from qtrain.train.assembly.assemble import (
        assemble,
        build_quantized,
        describe_trained,
        freeze_embedding,
        trained_part,
    )
    from qtrain.train.assembly.exports import check_run_exports, export_run, finish_adapters
    from qtrain.train.assembly.frozen_base import frozen_base
    from qtrain.train.assembly.language_architecture import LanguageArchitecture
    from qtrain.train.assembly.prepare import fit_memory, prepare
    from qtrain.train.assembly.text import open_text
    from qtrain.train.eval.language import LanguageEvaluation
    from qtrain.train.eval.lm_eval import check_lm_eval
    from qtrain.train.loop import Training
    from qtrain.train.plan.checked_settings import check_settings
    from qtrain.train.plan.out_of_memory import explain_out_of_memory
    from qtrain.train.records import log_results
    from qtrain.train.step.cuda_graphs import step_graphs
    from qtrain.train.step.forward import language_forward

    start.mark("imports")

    # ---- plan: whatever can be refused is refused here, before anything is allocated or written ----------------------
    lora = None if settings.lora is None else as_lora(settings.lora)
    checked = check_settings(settings, SCRIPT, frozen_base(lora, settings))
    check_lm_eval(settings.lm_eval)
    architecture = LanguageArchitecture.of(settings, checked.mesh)
    if lora is not None:
        check_merge_format(architecture.empty, lora)
    trained = trained_part(architecture.rank_config, lora, settings.freeze_embedding_layer, checked.dtype)
    checked = fit_memory(checked, architecture, trained)
    start.mark("plan")
    text = open_text(checked, architecture, model_tokenizer=True, seq_len_multiple=settings.seq_len_multiple)
    checked, settings = text.checked, text.checked.settings_as(FinetuneSettings)
    evaluated = text.evaluation()
    start.mark("data")
    prepared = prepare(checked, architecture, [*text.described, *evaluated.notes], trained)
    check_run_exports(prepared)
    print(prepared.text, flush=True)
    if settings.dry_run:
        return
    start.mark("plan")

    with explain_out_of_memory(prepared.plan, settings, prepared.device):
        # ---- model, quantize -----------------------------------------------------------------------------------------
        model, quantized = build_quantized(prepared)

        # ---- freeze, adapt -------------------------------------------------------------------------------------------
        notes = freeze_embedding(model) if settings.freeze_embedding_layer else []
        if lora is not None:
            add_lora(model, lora, settings.seed)
            if lora.adapter is not None:
                load_adapter(model, lora.adapter, base=settings.model)
        merges_original = lora is not None and lora.merge == "original"
        original = AdaptedOriginal(model, architecture.source) if merges_original else None
        trains = "\n".join([*notes, describe_trained(model)])
        print(trains, flush=True)

        # ---- optimizer, resume ---------------------------------------------------------------------------------------
        run = assemble(prepared, model, quantized, files=text.stream.files)
    start.mark("model")

    # ---- data --------------------------------------------------------------------------------------------------------
    loader = text.loader(run.state.data)
    forward = language_forward(model, text.document_end)
    evaluation = LanguageEvaluation(model, forward, evaluated, settings, settings.seed)
    start.mark("data")

    # ---- fit: from here on files are written -------------------------------------------------------------------------
    with loader, run.opened_folder(f"{prepared.text}\n{trains}") as log:
        one_shape = settings.seq_len_multiple in (0, settings.seq_len)  # packed, or padded to one length
        recordable = one_shape and settings.model_impl == "native" and not (lora and lora.dropout)
        graphs = step_graphs(run, forward, recordable=recordable)
        training = Training(run, prepared.plan, prepared.schedule, forward, loader, evaluation, graphs, start)
        exit_code = training.fit()

        # ---- export --------------------------------------------------------------------------------------------------
        data = run.state.data or {}
        if counts := [f"{data[key]:,} {key}" for key in ("read", "dropped", "cut", "empty") if key in data]:
            log.info("examples    %s", ", ".join(counts))
        log_results(run)
        if exit_code is not None:
            sys.exit(exit_code)
        if settings.final_eval == "all":
            training.record_final(evaluation.over_all)
        merges = settings.export and original is None
        finish = None if lora is None else partial(finish_adapters, run, lora, merge=merges)
        tokenizer, record = text.exported_tokenizer, training.records.add_results
        export_run(prepared, run, tokenizer, record, original=original, finish=finish)


def command() -> None:
    """The console command of an installed package."""
    run_script(main)


if __name__ == "__main__":
    command()
