"""The difference of validation losses over training, as SVG: a panel for each variant, a line for each pair, their mean
and its standard error as a band. The range of y is that of the second half of training; lines leave it before."""

import html
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from qtrain.bench.pair_results import Pair, RunResult, by_recipe, by_variant, make_pairs, mean_and_error, title_of
from qtrain.core.errors import UserError
from qtrain.train.log.report import axis_ticks

COLUMNS = 3
WIDTH, HEIGHT = 320, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 46, 24
HEAD = 34
LIMIT = 0.01  # difference in nats at which the field calls a scheme lossless, drawn as two dashed lines

STYLE = """
text { font: 11px system-ui, sans-serif; fill: #444; } .title { font-size: 14px; }
.name { font-weight: 600; fill: #111; }
.grid { stroke: #ddd; } .zero { stroke: #444; } .limit { stroke: #c33; stroke-dasharray: 4 3; } polyline { fill: none; }
.pair { stroke: #2f6fdb; stroke-opacity: .35; } .mean { stroke: #2f6fdb; stroke-width: 2; }
.band { fill: #2f6fdb; fill-opacity: .18; }
"""

Points = list[tuple[float, float]]


def write_plots(runs: Sequence[RunResult], reference: str, path: Path) -> list[Path]:
    """Write a plot for each recipe that has pairs: `path` with the ending .svg, the second one -2.svg, ..."""
    written = []
    for recipe_runs in by_recipe(runs).values():
        pairs = make_pairs(recipe_runs, reference)
        if any(pair.differences for pair in pairs):
            number = f"-{len(written) + 1}" if written else ""
            plot = path.with_name(f"{path.stem}{number}.svg")
            try:
                plot.write_text(drawing(pairs, reference), encoding="utf-8")
            except OSError as error:
                raise UserError(f"--json: cannot write {plot}: {error.strerror}.") from None
            written.append(plot)
    return written


def drawing(pairs: Sequence[Pair], reference: str) -> str:
    """The SVG of pairs of one recipe."""
    variants = {name: found for name, found in by_variant(pairs).items() if any(pair.differences for pair in found)}
    last = max(step for found in variants.values() for pair in found for step in pair.differences)
    # The first steps differ by more than any that matter: they do not set the range.
    late = [d for found in variants.values() for p in found for step, d in p.differences.items() if step >= last / 2]
    high = 1.15 * max([LIMIT, *map(abs, late)])
    columns, rows = min(COLUMNS, len(variants)), -(-len(variants) // COLUMNS)
    panels = "".join(
        f'<g transform="translate({number % COLUMNS * WIDTH} {HEAD + number // COLUMNS * HEIGHT})">'
        f"{_panel(number, name, found, last, high)}</g>"
        for number, (name, found) in enumerate(variants.items())
    )
    width, height = columns * WIDTH, HEAD + rows * HEIGHT
    title = html.escape(f"Validation loss over {reference} in nats, by step: {title_of(pairs[0].run)}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f'<style>{STYLE}</style><rect width="100%" height="100%" fill="#fff"/>'
        f'<text class="title" x="10" y="22">{title}</text>{panels}</svg>\n'
    )


def _panel(number: int, name: str, pairs: Sequence[Pair], last: int, high: float) -> str:
    def x_at(step: float) -> float:
        return LEFT + step / last * (WIDTH - LEFT - RIGHT)

    def y_at(nats: float) -> float:
        return TOP + (high - nats) / (2 * high) * (HEIGHT - TOP - BOTTOM)

    def level(nats: float, kind: str) -> str:
        return f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y_at(nats):.1f}" y2="{y_at(nats):.1f}"/>'

    parts = [level(y, "grid") for y in axis_ticks(-high, high)] + [level(0, "zero")]
    parts += [level(-LIMIT, "limit"), level(LIMIT, "limit")]
    for y in axis_ticks(-high, high):
        parts.append(f'<text x="{LEFT - 6}" y="{y_at(y) + 4:.1f}" text-anchor="end">{y:+.3f}</text>')
    for x in axis_ticks(0, last, 4):
        parts.append(f'<text x="{x_at(x):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{x:,.0f}</text>')

    # Means are over all pairs, so only steps that all pairs have.
    steps = sorted(set.intersection(*(set(pair.differences) for pair in pairs if pair.differences)))
    # Step -> (mean, standard error).
    spread = {step: mean_and_error([pair.differences[step] for pair in pairs if pair.differences]) for step in steps}
    inside = [_line(sorted(p.differences.items()), "pair", x_at, y_at) for p in pairs if len(pairs) > 1]
    if len(pairs) > 1:
        above = [(step, mean + (error or 0.0)) for step, (mean, error) in spread.items()]
        below = [(step, mean - (error or 0.0)) for step, (mean, error) in spread.items()]
        inside.append(f'<polygon class="band" points="{_places([*above, *below[::-1]], x_at, y_at)}"/>')
    inside.append(_line([(step, mean) for step, (mean, _) in spread.items()], "mean", x_at, y_at))
    area = f'x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" height="{HEIGHT - TOP - BOTTOM}"'
    # Lines that leave the range are cut at the panel's border.
    clip = f'<clipPath id="c{number}"><rect {area}/></clipPath><g clip-path="url(#c{number})">{"".join(inside)}</g>'

    mean, error = mean_and_error([pair.end for pair in pairs])
    end = f"{mean:+.4f}" + (f" ± {error:.4f}" if error is not None else "")
    count = f"{len(pairs)} pair{'s' if len(pairs) > 1 else ''}"
    parts += [clip, f'<text class="name" x="{LEFT}" y="18">{html.escape(name)}</text>']
    parts.append(f'<text x="{LEFT}" y="34">{end} at the end, {count}</text>')
    return "".join(parts)


def _line(points: Points, kind: str, x_at: Callable[[float], float], y_at: Callable[[float], float]) -> str:
    return f'<polyline class="{kind}" points="{_places(points, x_at, y_at)}"/>'


def _places(points: Iterable[tuple[float, float]], x_at: Callable, y_at: Callable) -> str:
    return " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in points)
