"""`--lm_eval`: EleutherAI's lm-evaluation-harness on an exported folder."""

import importlib.util
from pathlib import Path

from qtrain.core.checksums import check_checksums
from qtrain.core.errors import TrainingStopped, UserError, first_line, missing_package, unknown_name


def check_lm_eval(tasks: str | None) -> None:
    """Look up the comma-separated `tasks` and load their data, so that neither fails after training. UserError."""
    if tasks is None:
        return
    if not _names(tasks):
        raise UserError("--lm_eval: no task is given; name tasks, separated by commas, or leave the flag out.")
    if importlib.util.find_spec("lm_eval") is None:
        raise missing_package("lm_eval", f"--lm_eval {tasks}")
    from lm_eval.tasks import TaskManager, get_task_dict

    manager = TaskManager()
    for name in _names(tasks):
        if not manager.match_tasks([name]):
            raise unknown_name("--lm_eval", "task", name, manager.all_tasks, "All: lm_eval ls tasks")
    try:
        get_task_dict(manager.match_tasks(_names(tasks)), manager)
    except Exception as error:  # of any library that reads a task's data
        raise UserError(f"--lm_eval: the data of {tasks} cannot be loaded ({first_line(error)}).") from None


def run_lm_eval(tasks: str, folder: Path, device: str) -> dict[str, float]:
    """{"lm_eval/task/metric": value} of the comma-separated `tasks`. TrainingStopped if one fails."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    check_checksums(Path(folder), "--lm_eval")
    arguments, manager = f"pretrained={folder},dtype=auto", TaskManager()
    try:
        names = manager.match_tasks(_names(tasks))
        found = lm_eval.simple_evaluate(model="hf", model_args=arguments, tasks=names, device=device)
    except Exception as error:  # of any of the harness's tasks
        raise TrainingStopped(
            f"--lm_eval: {tasks} failed ({first_line(error)}). The model is trained and exported; try again with: "
            f"lm_eval --model hf --model_args {arguments} --tasks {tasks}"
        ) from None
    return {
        f"lm_eval/{task}/{metric.removesuffix(',none')}": value
        for task, metrics in found["results"].items()
        for metric, value in metrics.items()
        if isinstance(value, int | float)
    }


def _names(tasks: str) -> list[str]:
    return [name.strip() for name in tasks.split(",") if name.strip()]
