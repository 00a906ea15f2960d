"""`--lm_eval`: EleutherAI's lm-evaluation-harness on an exported folder."""

import importlib.util
from pathlib import Path

from qtrain.errors import missing_package


def check_lm_eval(tasks: str | None) -> None:
    """UserError with the command that installs lm_eval, if tasks are given and it is not installed."""
    if tasks is not None and importlib.util.find_spec("lm_eval") is None:
        raise missing_package("lm_eval", f"--lm_eval {tasks}")


def run_lm_eval(tasks: str, folder: Path, device: str) -> dict[str, float]:
    """{"task/metric": value} of the comma-separated `tasks`."""
    import lm_eval

    arguments = f"pretrained={folder},dtype=auto"
    found = lm_eval.simple_evaluate(model="hf", model_args=arguments, tasks=tasks.split(","), device=device)
    return {
        f"{task}/{metric}": value
        for task, metrics in found["results"].items()
        for metric, value in metrics.items()
        if isinstance(value, int | float)
    }
