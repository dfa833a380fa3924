"""One look for all figures: colour-blind safe, readable in print and on a screen."""

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe & Ito's palette, without yellow (too light on white).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

_STYLE: dict[Any, Any] = {
    "axes.prop_cycle": cycler(color=COLOURS),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e5e5e5",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "font.size": 10,
    "axes.titlesize": 10.5,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 160,
}


@contextmanager
def canvas(rows: int, columns: int, size: tuple[float, float]) -> Iterator[tuple]:
    """Yields (figure, axes) in the house style.

    The figure is taken off pyplot's list afterwards, so that nothing piles up; it can
    still be shown and saved.

    **Arguments:** the grid of panels, and the whole figure's size in inches.
    """
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False)
        try:
            yield figure, axes
        finally:
            plt.close(figure)


def save(figure: Figure, path: str | PathLike | None) -> None:
    """Writes a figure, in the format of the file's suffix; nothing for `None`."""
    if path is not None:
        figure.savefig(path)


def log10_time(log_time: np.ndarray) -> np.ndarray:
    """Returns log10 t from natural logarithms, NaN at t = 0 (which has none)."""
    log_time = np.asarray(log_time, float)
    return np.where(np.isfinite(log_time), log_time, np.nan) / np.log(10)


def label_time(axes: Axes) -> None:
    """Labels the horizontal axis as log10 of the flow's time."""
    axes.set_xlabel(r"$\log_{10} t$  (flow time)")


def shades(count: int) -> list[tuple[float, float, float, float]]:
    """Returns `count` colours from dark to light, for curves that have an order."""
    return [plt.get_cmap("viridis")(x) for x in np.linspace(0.0, 0.88, max(count, 1))]
