"""The phase diagram of the global optimum: classes against depth (P1 Thms 3.1, 3.2)."""

from os import PathLike

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke

from ..analysis import Optimum, PhaseDiagram, tie_depth
from ..models import Structure
from ._style import canvas, save

_LETTERS = {
    Structure.SIMPLEX_ETF: "S",
    Structure.CROSS_POLYTOPE: "X",
    Structure.POLYGON: "P",
}
_TIE_LINE = "#D55E00"


def landscape_figure(
    diagram: PhaseDiagram, path: str | PathLike | None = None, *, title: str = ""
) -> Figure:
    """Draws which structure costs least for every K and L.

    A cell's colour is the rank; its letter the structure, or the rank's number where it
    has none of the three names; a question mark follows where no strict minimum is
    certified. The line is the depth at which the simplex and the cross-polytope tie:
    Theorem 3.1 of P1, for real L.

    **Arguments:** `diagram` from `phase_diagram`, its axes in any order; `path` a file
    to write, if any; `title` what was computed.

    **Returns:** the figure, which a notebook shows.
    """
    classes, depths = sorted(set(diagram.num_classes)), sorted(set(diagram.depths))
    cells = {(c.num_classes, c.depth): c for row in diagram.rows for c in row}
    rank = np.asarray([[cells[k, depth].rank for k in classes] for depth in depths])
    ranks = np.unique(rank)
    size = (2.2 + 0.36 * max(len(classes), 10), 1.7 + 0.3 * max(len(depths), 6))
    with canvas(1, 1, size) as (figure, axes):
        panel = axes[0, 0]
        picture = panel.imshow(
            np.searchsorted(ranks, rank),
            cmap=ListedColormap(_colours(len(ranks))),
            norm=BoundaryNorm(np.arange(len(ranks) + 1) - 0.5, len(ranks)),
            origin="lower",
            aspect="auto",
        )
        bar = figure.colorbar(picture, ticks=np.arange(len(ranks)), label="rank")
        bar.ax.set_yticklabels([str(r) for r in ranks])
        bar.ax.tick_params(length=0)
        for column, k in enumerate(classes):
            for row, depth in enumerate(depths):
                _mark(panel, column, row, cells[k, depth])
        _tie_line(panel, classes, depths)
        panel.grid(False)
        for place in np.arange(len(classes) - 1) + 0.5:
            panel.axvline(place, color="white", linewidth=0.5)
        for place in np.arange(len(depths) - 1) + 0.5:
            panel.axhline(place, color="white", linewidth=0.5)
        panel.set_xticks(range(len(classes)), [str(k) for k in classes])
        panel.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
        panel.set_xlabel("number of classes $K$")
        panel.set_ylabel("depth $L$")
        _legend(figure)
        if title:
            panel.set_title(title)
        save(figure, path)
    return figure


def _colours(count: int) -> np.ndarray:
    """Returns colours from light to dark, low ranks further apart than high ones."""
    return colormaps["viridis_r"](0.05 + 0.9 * np.linspace(0, 1, count) ** 0.7)


def _mark(panel, column: int, row: int, cell: Optimum) -> None:
    letter = _LETTERS[cell.structure] if cell.structure else str(cell.rank)
    text = panel.text(
        column,
        row,
        letter if cell.certified else letter + "?",
        ha="center",
        va="center",
        fontsize=9,
        fontweight="normal" if cell.structure else "bold",
        zorder=4,
    )
    # Readable on any colour, and on the line.
    text.set_path_effects([withStroke(linewidth=2, foreground="white")])


def _tie_line(panel, classes, depths) -> None:
    """Draws where simplex and cross-polytope tie, within the depths of the picture."""
    ties = np.asarray(
        [tie_depth(Structure.SIMPLEX_ETF, Structure.CROSS_POLYTOPE, k) for k in classes]
    )
    # Rows are numbered: between two depths their distance is divided evenly.
    rows = np.interp(ties, depths, np.arange(len(depths)), left=np.nan, right=np.nan)
    shown = np.where(np.isfinite(ties), rows, np.nan)
    panel.plot(np.arange(len(classes)), shown, color="white", linewidth=3.6)
    panel.plot(
        np.arange(len(classes)), shown, color=_TIE_LINE, marker="o", markersize=3
    )


def _legend(figure) -> None:
    words = {
        "S": "simplex ETF",
        "X": "cross-polytope",
        "P": "polygon",
        "3": "another structure of that rank",
    }
    handles = [
        Line2D(
            [],
            [],
            linestyle="",
            marker=rf"$\mathrm{{{letter}}}$",
            color="black",
            label=word,
        )
        for letter, word in words.items()
    ]
    handles.append(
        Line2D(
            [],
            [],
            color=_TIE_LINE,
            marker="o",
            markersize=3,
            label="S and X tie (Thm 3.1)",
        )
    )
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8)
