"""Shares of starts by the structure they go to, against scale, depth or width."""

from os import PathLike

import numpy as np
from matplotlib.figure import Figure

from ..stability import BasinFraction, BasinFractions
from ._style import canvas, save, shades

_GREY = "#b5b5b5"
_LABELS = {
    "scale": r"scale of the start",
    "depth": "depth $L$",
    "width": "width $d$",
}


def basins_figure(
    found: BasinFractions, path: str | PathLike | None = None, *, title: str = ""
) -> Figure:
    """Draws stacked shares, a bar a point of the grid, and each with its interval.

    The horizontal axis is the scale where it varies, else depth, else width; there is
    one row of panels for each of the others' values. Left stacked; right each share by
    itself with its confidence interval.

    **Arguments:** `found` from `basin_fractions`; `path` a file to write, if any;
    `title` what was computed.

    **Returns:** the figure.
    """
    points = list(dict.fromkeys((r.scale, r.depth, r.width) for r in found.rows))
    names = ("scale", "depth", "width")
    varying = [i for i in range(3) if len({point[i] for point in points}) > 1] or [0]
    across = varying[0]
    others = list(dict.fromkeys(_without(point, across) for point in points))
    kinds = _kinds(found)
    colours = dict(zip(kinds, shades(len(kinds))))
    size = (10.0, 0.9 + 2.9 * len(others))
    with canvas(len(others), 2, size) as (figure, axes):
        for row, other in enumerate(others):
            bars = [point for point in points if _without(point, across) == other]
            shares = [found.at(depth, scale, width) for scale, depth, width in bars]
            _panels(axes[row], shares, colours)
            ticks = [f"{point[across]:g}" for point in bars]
            fixed = [
                f"{names[i]} {value:g}"
                for i, value in zip([i for i in range(3) if i != across], other)
                if value is not None and i in varying
            ]
            for panel in axes[row]:
                panel.set_xticks(range(len(bars)), ticks)
                panel.set_xlabel(_LABELS[names[across]])
                panel.set_title(", ".join(fixed))
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", fontsize=8)
        if title:
            figure.suptitle(title, fontsize=10.5)
        save(figure, path)
    return figure


def _panels(panels, shares, colours) -> None:
    left, right = panels
    below = np.zeros(len(shares))
    for number, (kind, colour) in enumerate(colours.items()):
        rows = [_matching(point, kind) for point in shares]
        values = np.asarray([row.fraction if row else 0.0 for row in rows])
        left.bar(
            range(len(shares)), values, bottom=below, color=colour, width=0.8,
            label=kind[0] + (f" ({kind[1]:.4g})" if kind[1] else ""),
        )  # fmt: skip
        below += values
        # Side by side, so that intervals can be told apart.
        shift = 0.5 * ((number + 0.5) / len(colours) - 0.5)
        for place, row in enumerate(rows):
            if row is not None:
                right.errorbar(
                    place + shift, row.fraction,
                    [[row.fraction - row.low], [row.high - row.fraction]],
                    color=colour, marker="o", markersize=3, linestyle="", capsize=2,
                )  # fmt: skip
    rest = 1 - below
    if np.any(rest > 1e-12):
        left.bar(
            range(len(shares)), rest, bottom=below, color=_GREY, hatch="//", width=0.8,
            label="not certified",
        )  # fmt: skip
    left.set_ylabel("share of starts")
    left.set_ylim(0, 1)
    right.set_ylabel("share, with its interval")
    right.set_ylim(-0.02, 1)
    for panel in panels:
        panel.set_xlim(-0.6, len(shares) - 0.4)
        panel.grid(axis="x", visible=False)


def _kinds(found: BasinFractions) -> list[tuple[str, float]]:
    """Returns the certified ends: name and rank with objective, by rising objective."""
    kinds = {_kind(row) for row in found.rows if row.certified}
    return sorted(kinds, key=lambda kind: kind[1])


def _kind(row: BasinFraction) -> tuple[str, float]:
    named = row.structure if "rank" in row.structure else ""
    return named or f"{row.structure}, rank {row.rank}", float(f"{row.objective:.6g}")


def _matching(rows, kind) -> BasinFraction | None:
    same = [row for row in rows if row.certified and _kind(row) == kind]
    return same[0] if same else None


def _without(point: tuple, axis: int) -> tuple:
    return tuple(value for i, value in enumerate(point) if i != axis)
