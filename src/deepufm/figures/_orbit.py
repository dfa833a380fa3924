"""One orbit: singular values, norm and KL against log t (P1 Figs 4, 10 and 11).

Orbits on `LogNorm` that go beyond t = 10^1000 are drawn against the norm instead: all
they do would lie on the axis of a plot against time.
"""

from os import PathLike

import numpy as np
from matplotlib.figure import Figure

from ..dynamics import Path
from ._style import COLOURS, canvas, label_time, log10_time, save, shades

_FAR = 1000  # log10 t
_NORM = r"sum of singular values $\|a\|_1$"


def orbit_figure(
    path: Path,
    file: str | PathLike | None = None,
    *,
    squared_error: bool = False,
    title: str = "",
) -> Figure:
    """Plots normalised singular values, their sum, and KL from collapse.

    **Arguments:** `path` a solve with `observe=metrics`; `file` one to write, if any;
    `squared_error` for orbits of `MSE`, which end with K equal singular values, not
    K-1; `title` what was run.

    **Returns:** the figure, which a notebook shows.
    """
    kept = int(path.num_saved)
    observed = {name: np.asarray(v)[:kept] for name, v in path.observables.items()}
    time = log10_time(np.asarray(path.log_time)[:kept])
    values = observed["singular_values"]
    total = observed["nuclear_norm"]
    far = time[-1] > _FAR
    along = total if far else time
    with canvas(1, 3, (12.0, 3.4)) as (figure, axes):
        spectrum, norm, divergence = axes[0]
        order = np.argsort(-values[-1])
        for index, colour in zip(order, shades(len(order)), strict=True):
            spectrum.plot(along, values[:, index] / total, color=colour, linewidth=1.2)
        # The matrix flows have K singular values, the last of which collapse makes 0.
        of_matrix = "mean_effective_rank" in observed
        modes = values.shape[1] - (of_matrix and not squared_error)
        uniform = 1 / modes
        spectrum.axhline(uniform, color="black", linestyle=":", linewidth=1)
        spectrum.annotate(
            "Z = Y" if squared_error else "collapse",
            (1.01, uniform),
            xycoords=("axes fraction", "data"),
            fontsize=8,
            va="center",
            annotation_clip=False,
        )
        spectrum.set_ylabel(r"normalised singular values $\hat a_i$")
        height = np.where(time > 0, time, np.nan) if far else total
        norm.plot(along, height, color=COLOURS[0])
        norm.set_yscale("log")
        norm.set_ylabel(r"$\log_{10} t$" if far else _NORM)
        divergence.plot(along, observed["kl"], color=COLOURS[1])
        divergence.set_ylabel(r"$D_{\mathrm{KL}}(\mathrm{uniform}\,\|\,\hat a)$")
        for panel in axes[0]:
            if far:
                panel.set_xscale("log")
                panel.set_xlabel(_NORM)
            else:
                label_time(panel)
        if title:
            figure.suptitle(title, fontsize=9.5)
        save(figure, file)
    return figure
