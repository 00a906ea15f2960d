"""Heat maps: quantization health by layer and step, and the load of experts. The page chooses what is shown.

A heat map is a few matrices [rows, columns] over the same columns of steps. Long runs have more samples than a page has
pixels: a column then holds the worst of its samples, which is what one looks for.
"""

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from qtrain.train.log.report.records import RunRecords, lookup, number

Badness = Literal["high", "low", "far from 1"]

TENSORS = {"x": "input x", "w": "weight w", "dy": "gradient dy"}
MEASURES: dict[str, tuple[str, Badness]] = {
    "error": ("relative error of the codes", "high"),
    "saturated": ("share saturated", "high"),
    "flushed": ("share flushed to zero", "high"),
    "flushed_sum": ("share of the sum of magnitudes flushed to zero", "high"),
    "crest": ("crest factor", "high"),
    "amax": ("amax", "high"),
}
# key in a record -> (group, measure, which values are bad)
KEYS: dict[str, tuple[str, str, Badness]] = {
    f"{tensor}.{measure}": (title, label, bad)
    for tensor, title in TENSORS.items()
    for measure, (label, bad) in MEASURES.items()
}
HIGH: Badness = "high"
KEYS |= {
    f"products.{gemm}": ("products", f"relative error of {gemm}", HIGH)
    for gemm in ("output", "grad_input", "grad_weight")
}
KEYS |= {
    "gradient.cosine": ("weight gradient", "cosine with high precision", "low"),
    "gradient.norm_ratio": ("weight gradient", "norm over high precision", "far from 1"),
    "experts.drift": ("router", "share of tokens with other experts in high precision", "high"),
}
WORST = "worst of each layer"
MAX_VALUES = 300_000
"""Values of all matrices of a heat map: 1.6 MB in the page."""
MAX_COLUMNS, MIN_COLUMNS = 160, 8


@dataclass(frozen=True)
class HeatMap:
    """What `report.js` draws."""

    key: str
    title: str
    row_title: str
    rows: Mapping[str, Sequence[str]]
    """What the first choice offers -> labels of its rows."""
    edges: Mapping[str, np.ndarray]
    """Mode of the x axis -> borders of the columns, [columns + 1]."""
    measures: Mapping[str, tuple[str, str, Badness]]
    """What the second choice offers -> (its group, its label, which values are bad)."""
    planes: Mapping[tuple[str, str], np.ndarray]
    """(first, second choice) -> [rows, columns] float32, NaN where nothing is known; absent where nothing at all is."""
    first: str = "Linear"
    """What the first choice chooses."""

    def data(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "rowTitle": self.row_title,
            "rows": {name: list(labels) for name, labels in self.rows.items()},
            "edges": {mode: [float(f"{edge:.7g}") for edge in edges] for mode, edges in self.edges.items()},
            "bad": {key: bad for key, (*_, bad) in self.measures.items()},
            "planes": {
                f"{a}|{b}": base64.b64encode(plane.astype("<f4").tobytes()).decode()
                for (a, b), plane in self.planes.items()
            },
        }


def split_name(linear: str) -> tuple[str, str]:
    """("mlp.down_proj", "3") of "layers.3.mlp.down_proj": the kind and the layer. Without a layer the name and ""."""
    # Lazy prefix: the first number is the layer, a later one an expert or a block inside of it.
    found = re.fullmatch(r"(?:.*?\.)?(\d+)\.(.+)", linear)
    return (found[2], found[1]) if found else (linear, "")


def linear_samples(run: RunRecords) -> list[dict[str, Any]]:
    """The samples of linears and routers, without warnings."""
    return [r for r in run.health if isinstance(r.get("linear"), str) and "warning" not in r]


def health_map(run: RunRecords) -> HeatMap | None:
    """Every measure of every linear; None without a sample."""
    samples = linear_samples(run)
    measures = {key: about for key, about in KEYS.items() if any(number(lookup(s, key)) is not None for s in samples)}
    if not measures:
        return None
    kinds: dict[str, dict[str, None]] = {}
    for sample in samples:
        kind, layer = split_name(sample["linear"])
        # Dicts as ordered sets. A linear outside of layers, such as the head, is a row of its own name.
        kinds.setdefault(kind, {})[layer or kind] = None
    in_layers = {layer: None for kind, layers in kinds.items() for layer in layers}
    # With one kind, WORST would repeat it.
    rows = {WORST: sorted(in_layers, key=_row_order)} if len(kinds) > 1 else {}
    rows |= {kind: sorted(layers, key=_row_order) for kind, layers in kinds.items()}

    columns = _columns(samples, sum(map(len, rows.values())) * len(measures))
    names = [split_name(sample["linear"]) for sample in samples]
    at_row = {kind: {label: n for n, label in enumerate(labels)} for kind, labels in rows.items()}
    column = np.array([columns.column_of_step[sample["step"]] for sample in samples])  # [samples]
    planes = {}
    for key, (_, _, bad) in measures.items():
        values = np.array([_known(lookup(sample, key)) for sample in samples])  # [samples], NaN where absent
        for choice, labels in rows.items():
            known = [n for n, (kind, _) in enumerate(names) if choice in (kind, WORST)]
            # An absent plane costs nothing in the page, one of NaN its whole size.
            if np.isnan(values[known]).all():
                continue
            row = np.array([at_row[choice][names[n][1] or names[n][0]] for n in known])
            planes[choice, key] = _worst(row, column[known], values[known], (len(labels), columns.count), bad)
    return HeatMap("health", "Quantization health", "layer", rows, _edges(run, columns), measures, planes)


def expert_map(run: RunRecords) -> HeatMap | None:
    """The load of each expert of each router, over the mean load; None without experts."""
    loads = [(r, _load(r)) for r in run.health if isinstance(r.get("linear"), str)]
    loads = [(record, load) for record, load in loads if load]
    if not loads:
        return None
    experts: dict[str, int] = {}
    for record, load in loads:
        experts[record["linear"]] = max(experts.get(record["linear"], 0), len(load))
    columns = _columns([record for record, _ in loads], sum(experts.values()))
    planes = {}
    for router, size in experts.items():
        cells = [
            # Shares sum to 1, so share * experts is the load over the mean.
            (row, columns.column_of_step[record["step"]], share * len(load))
            for record, load in loads
            if record["linear"] == router
            for row, share in enumerate(load)
        ]
        row, column, value = (np.array(part) for part in zip(*cells, strict=True))
        planes[router, "load"] = _worst(row, column, value, (size, columns.count), "far from 1")
    rows = {router: [str(n) for n in range(size)] for router, size in experts.items()}
    measures: dict[str, tuple[str, str, Badness]] = {"load": ("", "load over the mean", "high")}
    return HeatMap("experts", "Expert load", "expert", rows, _edges(run, columns), measures, planes, "Router")


def _load(record: Mapping[str, Any]) -> list[float]:
    load = lookup(record, "experts.load")
    # The bound is against a damaged file: each value becomes a row.
    values = [number(value) for value in load] if isinstance(load, list) and len(load) <= 4096 else []
    # One damaged share would shift the experts after it, so the whole record is dropped.
    return [value for value in values if value is not None] if None not in values else []


def _row_order(label: str) -> tuple[bool, int, str]:
    """Layers by number, then what lies outside of them."""
    # Nine digits: a longer number in an edited file is not worth converting.
    return not label.isdigit(), int(label[:9]) if label.isdigit() else 0, label


def _known(value: Any) -> float:
    return np.nan if (found := number(value)) is None else found


def _worst(row: np.ndarray, column: np.ndarray, values: np.ndarray, shape: tuple[int, int], bad: Badness) -> np.ndarray:
    """The worst value of each cell, [rows, columns] float32; NaN of a cell without one."""
    plane = np.full(shape, np.nan, np.float32)
    badness = {"high": values, "low": -values, "far from 1": np.abs(values - 1)}[bad]
    order = np.argsort(badness, kind="stable")[: np.isfinite(values).sum()]  # NaN is last
    # Of values for one cell, the last one that is assigned stays.
    plane[row[order], column[order]] = np.clip(values[order], -3e38, 3e38)
    return plane


@dataclass(frozen=True)
class _Columns:
    column_of_step: dict[int, int]
    edges: np.ndarray
    """Steps, [count + 1]."""

    @property
    def count(self) -> int:
        return len(self.edges) - 1


def _columns(samples: Sequence[Mapping[str, Any]], values_per_column: int) -> _Columns:
    """The steps of the samples as columns, several to a column where they are too many."""
    steps = sorted({sample["step"] for sample in samples})
    # Large models get fewer columns, which bounds the page's size whatever the number of linears.
    most = int(np.clip(MAX_VALUES // max(values_per_column, 1), MIN_COLUMNS, MAX_COLUMNS))
    count = min(len(steps), most)
    column_of_step = {step: n * count // len(steps) for n, step in enumerate(steps)}
    # Reversed, so that the first step of each column is assigned last and stays.
    firsts = {column: step for step, column in reversed(column_of_step.items())}
    # A sample stands for the steps up to the next one.
    gap = (steps[-1] - steps[0]) / max(len(steps) - 1, 1) or 1
    return _Columns(column_of_step, np.array([*sorted(firsts.values()), steps[-1] + gap], np.float64))


def _edges(run: RunRecords, columns: _Columns) -> dict[str, np.ndarray]:
    """The borders in every unit that the run's records have."""
    if not run.records:
        return {"steps": columns.edges}
    steps = run.positions["steps"]
    edges = np.minimum(columns.edges, max(steps[-1], columns.edges[-2]))  # the curves end there too
    return {mode: np.interp(edges, steps, x) for mode, x in run.positions.items()} | {"steps": edges}
