"""Where invariant rays are stable: thresholds by depth, and one ray over all norms."""

from collections.abc import Sequence
from os import PathLike

import numpy as np
import xarray as xr
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from ..stability import StabilityDiagram
from ._style import COLOURS, MARKERS, canvas, save

# Exponents beyond this have one colour.
_STEEPEST = 2.0


def stability_figure(
    thresholds: xr.Dataset,
    diagram: StabilityDiagram,
    path: str | PathLike | None = None,
    *,
    name: str = "",
    title: str = "",
) -> Figure:
    """Plots stability thresholds against depth, and the exponents of one ray.

    Left, the norm above which each structure is stable for good; structures with none
    at any of the depths are left out. Right, the largest exponent of one of them over
    norm and depth: blue where perturbations die, red where they grow; the line is
    where they do neither, to a crossing of zero.

    **Arguments:** `thresholds` with `threshold` over `structure` and `depth`, and
    `name` by structure; `diagram` from `stability_diagram`, its norms and depths
    rising; `path` a file to write, if any; `name` of the diagram's structure; `title`
    what was computed.

    **Returns:** the figure.
    """
    with canvas(1, 2, (10.0, 4.0)) as (figure, axes):
        left, right = axes[0]
        _thresholds(left, thresholds)
        _exponents(figure, right, diagram)
        right.set_title(name)
        if title:
            figure.suptitle(title, fontsize=10.5)
        save(figure, path)
    return figure


def _thresholds(panel, thresholds: xr.Dataset) -> None:
    depths = thresholds.depth.values
    shown = [
        (str(name), values)
        for name, values in zip(
            thresholds.name.values,
            thresholds.threshold.transpose("structure", "depth").values,
        )
        if np.any(np.isfinite(values))
    ]
    dashes = ("-", "--", ":")
    for number, (name, values) in enumerate(shown):
        panel.plot(
            depths,
            np.where(np.isfinite(values), values, np.nan),
            color=COLOURS[number % len(COLOURS)],
            linestyle=dashes[number // len(COLOURS) % len(dashes)],
            marker=MARKERS[number % len(MARKERS)],
            markersize=3.5 if len(depths) <= 20 else 0,
            label=name,
        )
    panel.set_xlabel("depth $L$")
    panel.set_ylabel(r"stable above $\|a\|_1$")
    # Room for the names.
    panel.set_ylim(
        0, 1.5 * max([_last(values) for _, values in shown], default=1) + 0.1
    )
    if len(shown) > 1 or not shown:
        order = np.argsort([-_last(values) for _, values in shown])
        handles, labels = panel.get_legend_handles_labels()
        panel.legend(
            [handles[i] for i in order], [labels[i] for i in order], fontsize=7.5
        )
    elif shown:
        panel.set_title(shown[0][0])


def _last(values: Sequence[float]) -> float:
    """Returns the last finite value, the height at which a curve ends."""
    finite = np.asarray(values)[np.isfinite(values)]
    return float(finite[-1])


def _exponents(figure, panel, diagram: StabilityDiagram) -> None:
    leading = np.clip(diagram.leading, -_STEEPEST, _STEEPEST)
    picture = panel.pcolormesh(
        diagram.norms,
        diagram.depths,
        leading,
        cmap="RdBu_r",
        norm=TwoSlopeNorm(0, -_STEEPEST, _STEEPEST),
        shading="nearest",
        rasterized=True,
    )
    figure.colorbar(
        picture,
        label=r"largest exponent, per $\log\|a\|_1$",
        extend="both",
        ticks=np.linspace(-_STEEPEST, _STEEPEST, 5),
    )
    if np.min(leading) < 0 < np.max(leading):
        panel.contour(
            diagram.norms, diagram.depths, leading, [0.0], colors="black", linewidths=1
        )
    panel.set_xlabel(r"norm $\|a\|_1$")
    panel.set_ylabel("depth $L$")
    if diagram.norms[0] > 0 and diagram.norms[-1] > 50 * diagram.norms[0]:
        panel.set_xscale("log")
    panel.grid(False)
