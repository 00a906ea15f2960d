"""Metrics for Weights & Biases, TensorBoard, MLflow or trackio. All are optional, and none can stop a run."""

import importlib.util
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qtrain.core.errors import first_line, missing_package, unknown_name

log = logging.getLogger("qtrain")


SAMPLE_COLUMNS = ("prompt", "continuation")

NO_CURVES = {"step", "time", "data", "schemes", "start", "samples"}
"""Keys of a record that no tracker draws: step is the axis, trackers have a time of their own, and the others are the
place in the data, the map of schemes, the parts of the start and texts."""


def curves(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a record by name, those of nested objects as "gpu/power". Text, lists and nulls are in
    metrics.jsonl only."""
    found: dict[str, float] = {}
    for key, value in record.items():
        if not prefix and key in NO_CURVES:
            continue
        if isinstance(value, Mapping):
            found |= curves(value, f"{prefix}{key}/")
        # Numbers alone: a bool is an int, but no tracker draws it.
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[f"{prefix}{key}"] = value
    return found


WHOLE_RUN = -1
"""A start_step: what comes is the whole run, not a part that follows on what the tracker has of it."""


class Tracker(ABC):
    """A destination for metrics; the constructor opens it, for a run that starts or resumes at `start_step`."""

    package: str
    """The pip package, which is also the name of the import."""

    @abstractmethod
    def __init__(self, config: Mapping[str, Any], run_dir: Path, project: str, run_name: str, start_step: int): ...

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int, time: float | None = None) -> None:
        """Numbers by name, a "/" between the parts of nested ones. time: Unix seconds at which they were logged, for a
        tracker that can be told; None: now."""

    def log_samples(self, samples: Sequence[tuple[str, str]], step: int) -> None:  # noqa: B027
        """Texts that the model wrote: (prompt, continuation). A tracker without text does nothing."""

    @abstractmethod
    def close(self) -> None: ...


class WandbTracker(Tracker):
    """Weights & Biases; a resumed run continues its page, on which steps that it has already are ignored."""

    package = "wandb"

    def __init__(self, config: Mapping[str, Any], run_dir: Path, project: str, run_name: str, start_step: int):
        import wandb

        run_id = re.sub(r"[^\w.-]", "-", run_dir.name)  # the same after resuming
        self._run = wandb.init(
            project=project, name=run_name, id=run_id, resume="allow", config=dict(config), dir=str(run_dir)
        )

    def log(self, values: Mapping[str, float], step: int, time: float | None = None) -> None:
        self._run.log(dict(values), step=step)

    def log_samples(self, samples: Sequence[tuple[str, str]], step: int) -> None:
        import wandb

        table = wandb.Table(columns=["step", *SAMPLE_COLUMNS], data=[[step, *sample] for sample in samples])
        self._run.log({"samples": table}, step=step)

    def close(self) -> None:
        self._run.finish()


class TensorBoardTracker(Tracker):
    """TensorBoard event files in the run folder."""

    package = "tensorboard"

    def __init__(self, config: Mapping[str, Any], run_dir: Path, project: str, run_name: str, start_step: int):
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides the steps that a killed run logged after its last checkpoint
        purged = start_step + 1 if start_step else None
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purged)
        rows = "\n".join(f"| {key} | {value} |" for key, value in config.items())
        self._writer.add_text("config", f"| setting | value |\n| --- | --- |\n{rows}", global_step=max(start_step, 0))

    def log(self, values: Mapping[str, float], step: int, time: float | None = None) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, global_step=step, walltime=time)

    def log_samples(self, samples: Sequence[tuple[str, str]], step: int) -> None:
        for number, (prompt, continuation) in enumerate(samples):
            # As code, because a text may hold Markdown.
            text = "\n".join("    " + line for line in f"{prompt} [>] {continuation}".splitlines())
            self._writer.add_text(f"sample {number}", text, global_step=step)

    def close(self) -> None:
        self._writer.close()


class TrackioTracker(Tracker):
    """trackio, a local dashboard."""

    package = "trackio"

    def __init__(self, config: Mapping[str, Any], run_dir: Path, project: str, run_name: str, start_step: int):
        import trackio

        # The run folder's name is unique, and the same after resuming.
        self._trackio = trackio
        # A run that is sent as a whole must not be appended to an earlier copy of itself.
        resume = "never" if start_step == WHOLE_RUN else "allow"
        trackio.init(project=project, name=run_dir.name or run_name, config=dict(config), resume=resume)

    def log(self, values: Mapping[str, float], step: int, time: float | None = None) -> None:
        self._trackio.log(dict(values), step=step)

    def log_samples(self, samples: Sequence[tuple[str, str]], step: int) -> None:
        table = self._trackio.Table(columns=[*SAMPLE_COLUMNS], data=[list(sample) for sample in samples])
        self._trackio.log({"samples": table}, step=step)

    def close(self) -> None:
        self._trackio.finish()


class MlflowTracker(Tracker):
    """MLflow, at MLFLOW_TRACKING_URI or in ./mlflow.db; a resumed run continues its page."""

    package = "mlflow"

    def __init__(self, config: Mapping[str, Any], run_dir: Path, project: str, run_name: str, start_step: int):
        import mlflow

        mlflow.set_experiment(project)
        # The run folder's name is unique, and the same after resuming; MLflow chooses the ids of its runs itself.
        folder = run_dir.name or run_name
        before = mlflow.search_runs(filter_string=f"tags.qtrain_run = '{folder}'", output_format="list")
        if before and start_step != WHOLE_RUN:
            mlflow.start_run(run_id=before[0].info.run_id)
        else:
            mlflow.start_run(run_name=run_name, tags={"qtrain_run": folder})
            mlflow.log_params({key: str(value)[:6000] for key, value in config.items()})  # its longest value
        self._mlflow = mlflow

    def log(self, values: Mapping[str, float], step: int, time: float | None = None) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


TRACKERS: dict[str, type[Tracker]] = {
    "mlflow": MlflowTracker,
    "tensorboard": TensorBoardTracker,
    "trackio": TrackioTracker,
    "wandb": WandbTracker,
}


class Trackers:
    """All trackers of a run. One that fails is reported once and dropped."""

    def __init__(self, openers: Mapping[str, Callable[[], Tracker]]):
        self._open: dict[str, Tracker] = {}
        for name, opener in openers.items():
            self._guard(name, lambda name=name, opener=opener: self._open.__setitem__(name, opener()))

    def _guard(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # no error of a tracker may stop the run
            self._open.pop(name, None)
            log.warning("tracker %s failed and is dropped: %s: %s", name, type(error).__name__, first_line(error))

    def log(self, record: Mapping[str, Any], step: int) -> None:
        """Send the numbers and the `samples` of a record."""
        values, samples = curves(record), record.get("samples")
        for name, tracker in list(self._open.items()):
            if values:
                self._guard(name, lambda tracker=tracker: tracker.log(values, step, record.get("time")))
            if samples:
                self._guard(name, lambda tracker=tracker: tracker.log_samples(samples, step))

    def close(self) -> None:
        for name, tracker in list(self._open.items()):
            self._guard(name, tracker.close)
        self._open.clear()


def check_trackers(names: Sequence[str], flag: str = "--trackers") -> None:
    """UserError naming `flag` for an unknown tracker, or one whose package is not installed. Imports nothing."""
    for name in names:
        if name not in TRACKERS:
            raise unknown_name(flag, "tracker", name, TRACKERS)
        if importlib.util.find_spec(TRACKERS[name].package) is None:
            raise missing_package(TRACKERS[name].package, f"{flag} {name}")


def open_trackers(
    names: Sequence[str], config: Mapping[str, Any], run_dir: Path, project: str, run_name: str, start_step: int = 0
) -> Trackers:
    """Open the trackers `names` for the run in `run_dir`, which starts or resumes at `start_step`."""
    check_trackers(names)
    arguments = (config, Path(run_dir), project, run_name, start_step)
    return Trackers({name: lambda name=name: TRACKERS[name](*arguments) for name in names})
