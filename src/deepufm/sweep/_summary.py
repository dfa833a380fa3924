"""A sweep in a table: one row a grid point, statistics over its seeds."""

import numpy as np
import pandas as pd
import xarray as xr

from ._layout import OUTCOMES
from ._spec import AXES


def summarise(dataset: xr.Dataset) -> pd.DataFrame:
    """Returns a row for each grid point: its axes, means over seeds, and outcomes.

    Means are over the members that reached the stop; the effective rank comes with its
    sample standard deviation. `outcomes` counts all members by how they ended.
    """
    axes = [axis for axis in AXES if dataset.sizes[axis] > 1] or ["depth"]
    reached = dataset.outcome == OUTCOMES.index("reached")
    rank = dataset.final_effective_rank.where(reached)
    # One seed has a mean and no spread: ddof=1 of one value is NaN, and shown as such.
    columns = {"effective rank": rank.mean("seed"), "sd": _spread(rank)}
    if "final_logit_margin" in dataset:  # modes without singular vectors have none
        margin = dataset.final_logit_margin.where(reached)
        columns["logit margin"] = margin.mean("seed")
    columns["log-loss"] = dataset.final_log_loss.where(reached).mean("seed")
    columns["outcomes"] = xr.apply_ufunc(
        _count,
        dataset.outcome,
        input_core_dims=[["seed"]],
        vectorize=True,
        output_dtypes=[object],
    )
    table = xr.Dataset(columns)
    frame = table.to_dataframe(dim_order=list(AXES)).reset_index()
    return frame.loc[:, [*axes, *table.data_vars]]


def _spread(values: xr.DataArray) -> xr.DataArray:
    """Sample standard deviation over seeds; NaN, silently, below two values."""
    count = values.notnull().sum("seed")
    deviations = values - values.mean("seed")
    variance = (deviations**2).sum("seed") / (count - 1).where(count > 1)
    return variance**0.5


def _count(codes: np.ndarray) -> str:
    found, counts = np.unique(codes, return_counts=True)
    pairs = zip(found, counts, strict=True)
    return ", ".join(f"{count} {OUTCOMES[code]}" for code, count in pairs)
