"""`--lm_eval`: EleutherAI's lm-evaluation-harness on an exported folder."""

import importlib.util
from pathlib import Path

from qtrain.core.checksums import check_checksums
from qtrain.core.errors import TrainingStopped, UserError, first_line, missing_package, unknown_name

TASK_SETS = {"base": "arc_challenge,arc_easy,boolq,copa,hellaswag,openbookqa,piqa,winogrande"}
"""Names for several tasks; base: those that llm.q evaluates its example with."""


def check_lm_eval(tasks: str | None, flag: str = "--lm_eval") -> None:
    """Look up the comma-separated `tasks` and load their data, so that neither fails after training. UserError naming
    `flag`."""
    if tasks is None:
        return
    if not _names(tasks):
        raise UserError(f"{flag}: no task is given; name tasks, separated by commas, or leave the flag out.")
    if importlib.util.find_spec("lm_eval") is None:
        raise missing_package("lm_eval", f"{flag} {tasks}")
    from lm_eval.tasks import TaskManager, get_task_dict

    manager = TaskManager()
    for name in _names(tasks):
        if not manager.match_tasks([name]):
            raise unknown_name(flag, "task", name, manager.all_tasks, "All: lm_eval ls tasks")
    try:
        get_task_dict(manager.match_tasks(_names(tasks)), manager)
    except Exception as error:  # of any library that reads a task's data
        raise UserError(f"{flag}: the data of {tasks} cannot be loaded ({first_line(error)}).") from None


def run_lm_eval(tasks: str, model: Path | str, device: str, flag: str = "--lm_eval") -> dict[str, float]:
    """{"lm_eval/task/metric": value} of the comma-separated `tasks`, asked of an exported folder or a hub id.
    TrainingStopped, naming `flag`, if one fails."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    check_checksums(Path(model), flag)
    arguments, manager = f"pretrained={model},dtype=auto", TaskManager()
    try:
        names = manager.match_tasks(_names(tasks))
        found = lm_eval.simple_evaluate(model="hf", model_args=arguments, tasks=names, device=device)
    except Exception as error:  # of any of the harness's tasks
        raise TrainingStopped(
            f"{flag}: {tasks} failed ({first_line(error)}). The model is whole; try again with: "
            f"lm_eval --model hf --model_args {arguments} --tasks {','.join(_names(tasks))}"
        ) from None
    return {
        f"lm_eval/{task}/{metric.removesuffix(',none')}": value
        for task, metrics in found["results"].items()
        for metric, value in metrics.items()
        if isinstance(value, int | float)
    }


def _names(tasks: str) -> list[str]:
    given = (name.strip() for name in tasks.split(","))
    return [task for name in given if name for task in TASK_SETS.get(name, name).split(",")]
