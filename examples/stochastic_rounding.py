"""Why bf16 weights need stochastic rounding, with a plot: `python -m examples.stochastic_rounding [FILE.html]`.

A bf16 number has 8 significant bits: near 1 the next one is 2^-7 away. A thousand updates of 2^-10 are each rounded
away to nearest; rounded stochastically, up with a probability of one eighth, they add up in the mean.
"""

import sys

import torch

import qtrain

STEPS, UPDATE = 1024, 2.0**-10


def trajectory(stochastic: bool) -> list[float]:
    """The mean of 4,096 bf16 weights that start at 1, under SGD with a gradient of 1."""
    weight = torch.nn.Parameter(torch.ones(4096, 1, dtype=torch.bfloat16))
    optimizer = qtrain.optim.SGD([weight], lr=UPDATE, momentum=0.0, sr=stochastic, seed=0)
    means = [1.0]
    for _ in range(STEPS):
        weight.grad = torch.full_like(weight, -1.0)
        optimizer.step()
        means.append(weight.float().mean().item())
    return means


def plot(path: str, curves: dict[str, list[float]]) -> None:
    from bokeh.plotting import figure, output_file, save
    from bokeh.resources import INLINE

    page = figure(width=800, height=400, x_axis_label="updates of 2^-10", y_axis_label="mean of the weights")
    for (name, values), color in zip(curves.items(), ("#888888", "#c0392b", "#2471a3"), strict=True):
        page.line(list(range(len(values))), values, legend_label=name, color=color, line_width=2)
    page.legend.location = "top_left"
    output_file(path, title="Stochastic rounding", mode="inline")
    save(page, resources=INLINE)


def main(path: str | None = None) -> dict[str, list[float]]:
    """Returns the curves."""
    curves = {
        "exact": [1 + step * UPDATE for step in range(STEPS + 1)],
        "bf16, to nearest": trajectory(stochastic=False),
        "bf16, stochastic": trajectory(stochastic=True),
    }
    for name, values in curves.items():
        print(f"{name:18s} {values[0]:.3f} > {values[-1]:.3f}")
    if path is not None:
        plot(path, curves)
    return curves


if __name__ == "__main__":
    main(*sys.argv[1:2])
