"""Effective rank against a grid axis with error bars (P1 Figs 2, 5 right, 9)."""

from os import PathLike

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from ..sweep import AXES, OUTCOMES
from ._style import COLOURS, MARKERS, canvas, save

AXIS_LABELS = {
    "depth": "depth $L$",
    "width": "width $d$",
    "num_classes": "number of classes $K$",
    "per_class": "examples per class $n$",
    "scale": "initialisation scale",
}
_SYMBOLS = {
    "depth": "$L$",
    "width": "$d$",
    "num_classes": "$K$",
    "per_class": "$n$",
    "scale": "scale",
}
_MAX_LINES = len(COLOURS)


def sweep_figure(
    dataset: xr.Dataset, path: str | PathLike | None = None, *, title: str = ""
) -> Figure:
    """Plots mean effective rank and logit margin, ± one sample standard deviation.

    Modes without singular vectors have no margin; their log-loss stands in its place.

    The horizontal axis is depth where it varies, else the first axis that does; each
    combination of the others is a line (the first seven, as the title then says).
    Members that did not reach their stop are left out.

    **Arguments:** `dataset` from `open_sweep`; `path` a file to write, if any;
    `title` what was run, before the grid's fixed values.

    **Returns:** the figure, which a notebook shows.
    """
    varying = [axis for axis in AXES if dataset.sizes[axis] > 1]
    across = "depth" if "depth" in varying or not varying else varying[0]
    others = [axis for axis in AXES if axis != across]
    reached = dataset.outcome == OUTCOMES.index("reached")
    panels = {"effective rank": dataset.final_effective_rank.where(reached)}
    if "final_logit_margin" in dataset:
        margin = dataset.final_logit_margin.where(reached)
        panels[r"smallest margin of $Z/\|Z\|_F$"] = margin
    else:
        panels["log-loss"] = dataset.final_log_loss.where(reached)
    with canvas(1, 2, (9.0, 3.6)) as (figure, axes):
        for panel, (label, values) in zip(axes[0], panels.items(), strict=True):
            lines = values.stack(line=others).transpose("line", across, "seed")
            shown = lines[:_MAX_LINES]
            for index, line in enumerate(shown):
                _error_bars(panel, line, across, others, varying, index)
            panel.set_xlabel(AXIS_LABELS[across])
            panel.set_ylabel(label)
            if across in ("scale", "width"):
                panel.set_xscale("log")
            elif dataset.sizes[across] <= 16:
                points = dataset[across].values
                names = [f"{point:g}".replace("inf", "∞") for point in points]
                panel.set_xticks(_places(points), names)
        if len(varying) > 1:
            axes[0, 0].legend(fontsize=8)
        text = _title(dataset, varying, len(lines))
        figure.suptitle(f"{title}; {text}" if title else text, fontsize=9.5)
        save(figure, path)
    return figure


def _error_bars(panel, line, across, others, varying, index) -> None:
    values = line.values
    count = np.sum(np.isfinite(values), axis=-1)
    any_left = count > 0
    safe = np.where(np.isfinite(values), values, 0)
    mean = np.where(any_left, safe.sum(-1) / np.maximum(count, 1), np.nan)
    squares = np.where(np.isfinite(values), (values - mean[:, None]) ** 2, 0).sum(-1)
    spread = np.sqrt(squares / np.maximum(count - 1, 1))
    point = dict(zip(others, line.line.item(), strict=True))
    names = [axis for axis in others if axis in varying]
    label = ", ".join(f"{_SYMBOLS[axis]} = {point[axis]:g}" for axis in names)
    panel.errorbar(
        _places(line[across].values),
        mean,
        yerr=spread,
        color=COLOURS[index],
        marker=MARKERS[index],
        markersize=5,
        capsize=3,
        label=label or None,
    )


def _places(values: np.ndarray) -> np.ndarray:
    """Returns where values stand; infinite depth one beyond the largest other."""
    finite = np.isfinite(values)
    return np.where(finite, values, np.max(values[finite], initial=0) + 1)


def _title(dataset: xr.Dataset, varying: list[str], num_lines: int) -> str:
    """Says what is the same for all members, and what is not shown."""
    used = dataset.attrs.get("axes", AXES)
    fixed = [
        f"{_SYMBOLS[axis]} = {dataset[axis].item():g}"
        for axis in AXES
        if axis in used and axis not in varying
    ]
    text = f"mean ± sd over {dataset.sizes['seed']} seeds; " + ", ".join(fixed)
    if num_lines > _MAX_LINES:
        text += f"  (first {_MAX_LINES} of {num_lines} lines)"
    return text
