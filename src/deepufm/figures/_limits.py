"""What members tend to: shares of limits of each rank against a grid axis."""

from os import PathLike

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from ..sweep import AXES, STATUSES
from ._style import canvas, save, shades
from ._sweep import AXIS_LABELS

_GREY = "#b5b5b5"


def limits_figure(
    limits: xr.Dataset, path: str | PathLike | None = None, *, title: str = ""
) -> Figure:
    """Plots the shares of certified limits by rank, and their normalised margins.

    The horizontal axis is depth where it varies, else the first axis that does; members
    of all other values are taken together.

    **Arguments:** `limits` from `sweep_limits`; `path` a file to write, if any.

    **Returns:** the figure.
    """
    varying = [axis for axis in AXES if limits.sizes[axis] > 1]
    across = "depth" if "depth" in varying or not varying else varying[0]
    others = [axis for axis in (*AXES, "seed") if axis != across]
    flat = limits[["status", "rank", "logit_margin"]].stack(member=others)
    flat = flat.transpose(across, "member")
    certified = flat.status.values == STATUSES.index("certified")
    ranks = np.where(certified, flat["rank"].values, 0)
    kinds = sorted(set(np.unique(ranks)) - {0})
    colours = dict(zip(kinds, shades(len(kinds))))
    places = np.arange(ranks.shape[0])
    with canvas(1, 2, (9.0, 3.6)) as (figure, axes):
        left, right = axes[0]
        below = np.zeros(len(places))
        for rank in [*kinds, 0]:
            share = np.mean(ranks == rank, axis=1)
            if not np.any(share):
                continue
            look = {"color": _GREY, "hatch": "//", "label": "not certified"}
            if rank:
                look = {"color": colours[rank], "label": f"{rank}"}
            left.bar(places, share, bottom=below, width=0.8, **look)
            below += share
        left.set_ylabel("share of members")
        left.set_ylim(0, 1)
        left.legend(title="rank", fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
        for rank in kinds:
            place, _ = np.nonzero(ranks == rank)
            margins = flat.logit_margin.values[ranks == rank]
            right.plot(place, margins, "o", color=colours[rank], alpha=0.6, ms=5)
        right.set_ylabel(r"smallest gap of $\bar Z/\|\bar Z\|_F$")
        right.set_ylim(bottom=0)
        for panel in (left, right):
            panel.set_xticks(places, [f"{x:g}" for x in limits[across].values])
            panel.set_xlim(-0.6, len(places) - 0.4)
            panel.set_xlabel(AXIS_LABELS[across])
            panel.grid(axis="x", visible=False)
        pooled = [AXIS_LABELS[axis] for axis in varying if axis != across]
        text = f"limits of {ranks.shape[1]} members each"
        if pooled:
            text += f", all values of {' and '.join(pooled)} together"
        figure.suptitle(f"{title}; {text}" if title else text, fontsize=9.5)
        save(figure, path)
    return figure
