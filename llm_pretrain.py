"""Pretrain a language model with low-bit matmuls: plan > model > quantize > optimizer > data > fit > export.

python llm_pretrain.py --config configs/quickstart.json
python llm_pretrain.py --model qwen2.5-0.5b --quantize int8 --train_ds '{"type":"token","dataset_dir":"DIR"}' --compile
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from qtrain.core.process import prepare_process

prepare_process(script=True)  # before imports that take a while

from qtrain.comm.launch import launch
from qtrain.core.config import parse
from qtrain.core.process import command_line, run_script
from qtrain.train.log.start_clock import StartClock
from qtrain.train.settings.listing import listing
from qtrain.train.settings.resumed_recipe import with_recipe_of_run
from qtrain.train.settings.settings import LanguageSettings

SCRIPT = Path(__file__).stem


@dataclass(frozen=True)
class PretrainSettings(LanguageSettings):
    """Pretrain a language model from random weights, or continue from published ones (--pretrained)."""

    ELSEWHERE: ClassVar[dict[str, str]] = {
        "lora": "llm_finetune.py has it, and reads text and token shards too (with --no_pretrained from random weights)"
    }
    """Flags of another script, for the message to who gives them here."""


def main(argv: list[str]) -> None:
    train(parse(PretrainSettings, with_recipe_of_run(argv, SCRIPT), f"{SCRIPT}.py", listing))


def train(settings: PretrainSettings) -> None:
    start = StartClock()
    start.mark("flags")
    if not settings.dry_run:
        launch(settings.gpus, settings.device)  # with --gpus N: N processes of this command, for which this one waits
    # Imported here: torch and what needs it take seconds, which a mistyped flag should not have to wait for.
    from qtrain.train.assembly.assemble import (
        assemble,
        build_quantized,
        describe_trained,
        freeze_embedding,
        trained_part,
    )
    from qtrain.train.assembly.exports import check_run_exports, export_run
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
    checked = check_settings(settings, SCRIPT)
    check_lm_eval(settings.lm_eval)
    architecture = LanguageArchitecture.of(settings, checked.mesh)
    trained = trained_part(architecture.rank_config, None, settings.freeze_embedding_layer, checked.dtype)
    checked = fit_memory(checked, architecture, trained)
    start.mark("plan")
    text = open_text(checked, architecture)
    checked, settings = text.checked, text.checked.settings_as(PretrainSettings)
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
        trains = [*freeze_embedding(model), describe_trained(model)] if settings.freeze_embedding_layer else []
        print("\n".join(trains), end="\n" * bool(trains), flush=True)

        # ---- optimizer, resume ---------------------------------------------------------------------------------------
        run = assemble(prepared, model, quantized, files=text.stream.files)
    start.mark("model")

    # ---- data --------------------------------------------------------------------------------------------------------
    loader = text.loader(run.state.data)
    forward = language_forward(model, text.document_end)
    evaluation = LanguageEvaluation(model, forward, evaluated, settings, settings.seed)
    start.mark("data")

    # ---- fit: from here on files are written -------------------------------------------------------------------------
    with loader, run.opened_folder("\n".join([prepared.text, *trains])) as log:
        graphs = step_graphs(run, forward, recordable=settings.model_impl == "native")
        training = Training(run, prepared.plan, prepared.schedule, forward, loader, evaluation, graphs, start)
        exit_code = training.fit()

        # ---- export --------------------------------------------------------------------------------------------------
        log_results(run)
        if exit_code is not None:
            sys.exit(exit_code)
        if settings.final_eval == "all":
            training.record_final(evaluation.over_all)
        if settings.export:
            export_run(prepared, run, text.exported_tokenizer, training.records.add_results)
            other = f"--quantize {'int8' if settings.quantize == 'bf16' else 'bf16'}"
            other += " --quantize_kwargs {}" if settings.quantize_kwargs else ""
            other += " --quantize_overrides {}" if settings.quantize_overrides else ""
            log.info("try next    %s --config %s/config.json %s", command_line(f"{SCRIPT}.py"), run.folder.path, other)


def command() -> None:
    """The console command of an installed package."""
    run_script(main)


if __name__ == "__main__":
    command()
