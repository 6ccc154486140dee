"""A run's history as curves. The only file that knows matplotlib, which is optional."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from parti.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TRAIN = "#3b6fb6"
VALID = "#d9822b"
INK = "#33383d"
FAINT = "#9aa3ab"
GRID = "#e7eaed"
_MAX_COLUMNS = 3
_MAX_POINTS = 2000


class Curves(Protocol):
    """What is drawn: the part of a history that this file needs."""

    @property
    def first_step(self) -> int: ...
    @property
    def rows(self) -> Sequence[Mapping[str, float]]: ...
    @property
    def step_losses(self) -> array[float]: ...
    def best(self, name: str) -> tuple[int, float]: ...


def draw(history: Curves, path: str | Path | None) -> Figure:
    """One panel for the loss, one for each metric, one for the learning rate if it moves."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "History.plot needs matplotlib, which is not installed: pip install 'parti[plot]'. "
            "Without it, History.to_csv and History.to_json give the same numbers."
        ) from error
    if not history.rows and not history.step_losses:
        raise ConfigError("the history is empty: there is nothing to plot before the first step.")
    names = ["loss", *_metrics(history.rows)]
    if _moves(history.rows, "lr"):
        names.append("lr")
    num_columns = 2 if len(names) == 4 else min(len(names), _MAX_COLUMNS)
    num_lines = -(-len(names) // num_columns)
    figure = Figure(figsize=(4.6 * num_columns, 3.4 * num_lines), dpi=150, layout="constrained")
    panels = figure.subplots(num_lines, num_columns, squeeze=False).flatten()
    for panel, name in zip(panels, names, strict=False):
        _draw_panel(panel, history, name)
    for panel in panels[len(names) :]:
        panel.remove()
    if path is not None:
        figure.savefig(path)
    return figure


def _metrics(rows: Sequence[Mapping[str, float]]) -> list[str]:
    aside = {"phase", "epoch", "step", "samples", "samples_per_s", "loss", "lr", "grad_norm"}
    plain = (name.removeprefix("val_") for row in rows for name in row)
    return [
        name
        for name in dict.fromkeys(plain)
        if name not in aside and not name.endswith("_s") and not name.startswith("lr_")
    ]


def _moves(rows: Sequence[Mapping[str, float]], name: str) -> bool:
    return len({row[name] for row in rows if name in row}) > 1


def _draw_panel(panel: Axes, history: Curves, name: str) -> None:
    rows = history.rows
    _clean(panel, {"lr": "learning rate"}.get(name, name))
    if name == "loss" and len(history.step_losses) > 1:
        x, y = _steps_as_epochs(history)
        panel.plot(x, y, color=TRAIN, alpha=0.3, linewidth=0.8)
    if name == "lr":
        _draw_curve(panel, rows, name, INK, "")
        return
    # A mean over an epoch lies in its middle; what is measured after it lies at its end.
    _draw_curve(panel, rows, name, TRAIN, "training", shift=-0.5)
    if any(f"val_{name}" in row for row in rows):
        _draw_curve(panel, rows, f"val_{name}", VALID, "validation")
        _mark_best(panel, history, f"val_{name}")
        panel.legend(frameon=False, fontsize=8, labelcolor=INK, handlelength=1.2)
    if name == "loss":
        _choose_scale(panel, history)


def _clean(panel: Axes, title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    panel.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK)
    panel.grid(axis="y", color=GRID, linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.spines["bottom"].set_color(FAINT)
    panel.tick_params(colors=FAINT, labelcolor=INK, labelsize=8, length=0)
    panel.margins(x=0.03)
    panel.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True, steps=[1, 2, 5, 10]))
    panel.set_xlabel("epoch", fontsize=8, color=FAINT, loc="right")


def _draw_curve(
    panel: Axes,
    rows: Sequence[Mapping[str, float]],
    name: str,
    color: str,
    label: str,
    shift: float = 0.0,
) -> None:
    points = [(row["epoch"] + shift, row[name]) for row in rows if name in row]
    few = len(points) <= 30
    panel.plot(
        [x for x, _ in points],
        [y for _, y in points],
        color=color,
        label=label,
        linewidth=1.8,
        marker="o" if few else None,
        markersize=3.5,
        solid_capstyle="round",
    )


def _mark_best(panel: Axes, history: Curves, name: str) -> None:
    if all(math.isnan(row.get(name, math.nan)) for row in history.rows):
        return
    epoch, value = history.best(name)
    panel.plot(
        [epoch], [value], "o", markersize=8, markerfacecolor="none", markeredgecolor=VALID,
        markeredgewidth=1.2,
    )  # fmt: skip
    panel.annotate(
        f"{value:.4g}", (epoch, value), textcoords="offset points", xytext=(0, 8), ha="center",
        fontsize=8, color=VALID,
    )  # fmt: skip


def _choose_scale(panel: Axes, history: Curves) -> None:
    """Logarithmic where the loss falls over more than two orders of magnitude."""
    losses = [loss for loss in history.step_losses if math.isfinite(loss)]
    losses += [row[name] for row in history.rows for name in ("loss", "val_loss") if name in row]
    if losses and min(losses) > 0 and max(losses) > 100 * min(losses):
        panel.set_yscale("log")


def _steps_as_epochs(history: Curves) -> tuple[list[float], list[float]]:
    """The loss of each step, at its place between the epochs' ends; thinned by means of runs."""
    ends = [int(row["step"]) - history.first_step for row in history.rows]
    epochs = [row["epoch"] for row in history.rows]
    count = len(history.step_losses)
    if not ends or ends[-1] < count:  # an epoch that was not finished
        per_epoch = ends[-1] / len(ends) if ends else count
        epochs.append(
            (epochs[-1] if epochs else 0) + (count - (ends[-1] if ends else 0)) / per_epoch
        )
        ends.append(count)
    places: list[float] = []
    begin, before = 0, epochs[0] - 1
    for end, epoch in zip(ends, epochs, strict=True):
        length = end - begin
        places += [before + (epoch - before) * (i + 1) / length for i in range(length)]
        begin, before = end, epoch
    run = -(-count // _MAX_POINTS)
    x = [places[min(i + run, count) - 1] for i in range(0, count, run)]
    y = [
        sum(history.step_losses[i : i + run]) / len(history.step_losses[i : i + run])
        for i in range(0, count, run)
    ]
    return x, y
