"""Limits of a finished sweep: what each member tends to, from the states it left.

Stores keep of every member what `limit` needs (`late_states`): log a of the reduced
flow, class means of the logits of the full one. Limits go into the group `limits` of
the store, which `xarray.open_zarr(store, group="limits")` reads.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path as FilePath

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import xarray as xr

from ..analysis import Verdict
from ..dynamics import GradientFlow, HadamardFlow
from ..limits import Limit, LimitStatus, least_gaps, limit, wilson
from ..models import CrossEntropy
from ._files import consolidate
from ._guard import claimed, disk_errors
from ._layout import OUTCOMES
from ._spec import AXES

GROUP = "limits"
# Codes of `status`; 0 is a member that is missing, did not reach its stop, has no
# finite depth, or misclassifies a class.
STATUSES = ("none", *(status.name.lower() for status in LimitStatus))
_NUMBERS = {
    "objective": "sum of sigma^(2/(L+1)) at a least gap of 1 (P1 eq. 24 over L+1)",
    "logit_margin": "least gap of the class means over their Frobenius norm",
    "parameter_margin": "least gap over ‖θ‖^(L+1)",
    "kkt_residual": "relative residual of the KKT conditions of P1 eq. 3",
    "start_angle": "angle between the sweep's state and the limit, radians",
    "angle": "angle between the end of the continuation and the limit, radians",
    "log_norm": "natural logarithm of the norm at the end of the continuation",
}
_VERDICTS = ("none", *(verdict.name.lower() for verdict in Verdict))
_STATES = ("final_log_modes", "final_class_means")
Task = tuple[str, int, float, np.ndarray]


def sweep_limits(
    dataset: xr.Dataset,
    *,
    tolerance: float = 1e-10,
    executor: Executor | None = None,
    progress: Callable[[int], object] | None = None,
) -> xr.Dataset:
    """Returns the limits of all members that reached their stop, over the same axes.

    **Arguments:** `dataset` from `open_sweep`; `tolerance` as in `limit`; `executor`
    any `concurrent.futures.Executor`, of processes to be of use; `progress` is called
    with the number of members of each grid point that is done.

    **Returns:** `status`, `structure` and `verdict` (codes, with their meanings in the
    attribute `flag_names`), `rank`, the numbers of `Limit`, `passed_saddle`, and
    `direction`.

    **Raises:** `ValueError` for a sweep that keeps no states, since its flow has no
    such limits or it was written by an older deepufm; and without float64.
    """
    name = next((name for name in _STATES if name in dataset), None)
    if not np.any(dataset.outcome):
        raise ValueError(
            "No member of this sweep is done yet; `deepufm sweep` with --resume goes "
            "on with it."
        )
    if name is None:
        raise ValueError(
            "This sweep keeps no states to go on from. Only those of the reduced flow "
            "do, and of the linear full flow of cross-entropy with classes of one size "
            "and no weight decay, written by deepufm 0.3 or later."
        )
    if jnp.zeros(()).dtype != jnp.float64:
        raise ValueError("Limits need float64: set `jax_enable_x64`.")
    grid = [dataset.sizes[axis] for axis in AXES]
    cells = [tuple(map(int, index)) for index in np.ndindex(*grid)]
    work = [_task(dataset, name, cell) for cell in cells]
    chosen = [index for index, (task, _) in enumerate(work) if len(task[3])]
    tasks = [(*work[index][0], tolerance) for index in chosen]
    share = map if executor is None else executor.map
    results = share(_limits_of, *zip(*tasks)) if tasks else ()
    columns = _Columns(dataset, name)
    for index, found in zip(chosen, results):
        columns.put(cells[index], work[index][1], found)
        if progress is not None:
            progress(len(found.status))
    return columns.dataset()


def write_limits(path: str | os.PathLike, limits: xr.Dataset) -> None:
    """Writes limits into a store's group `limits`, in place of any that are there.

    **Raises:** `StoreError` where a sweep is just writing to the store, or the disk
    takes no writes.
    """
    path = FilePath(path)
    with claimed(path), disk_errors(path, "The sweep itself is whole."):
        limits.to_zarr(path, group=GROUP, mode="w", zarr_format=3, consolidated=False)
        consolidate(path)


def summarise_limits(limits: xr.Dataset) -> pd.DataFrame:
    """Returns a row for each grid point and kind of limit, the commonest first.

    `fraction` is of the grid point's members, with its 95 % Wilson interval.
    """
    axes = [axis for axis in AXES if limits.sizes[axis] > 1] or ["depth"]
    rows = []
    for index in np.ndindex(*(limits.sizes[axis] for axis in AXES)):
        cell = limits.isel(dict(zip(AXES, index, strict=True)))
        where = {axis: cell[axis].item() for axis in axes}
        for share in _shares(cell):
            rows.append(where | share)
    return pd.DataFrame(rows)


def _task(dataset: xr.Dataset, name: str, cell) -> tuple[Task, np.ndarray]:
    """Returns what a grid point's limits need, and which seeds can have one."""
    here = dataset.isel(dict(zip(AXES, cell, strict=True)))
    num_classes = int(here.num_classes)
    states = np.asarray(here[name])
    reached = np.asarray(here.outcome) == OUTCOMES.index("reached")
    reached &= np.isfinite(float(here.depth))
    if name == "final_log_modes":
        states = states[:, : num_classes - 1]
        per_class = 1
    else:
        states = states[:, :num_classes, :num_classes]
        reached &= least_gaps(states) > 0
        per_class = int(here.per_class)
    seeds = np.flatnonzero(reached)
    return (name, per_class, float(here.depth), states[seeds]), seeds


def _limits_of(
    name: str, per_class: int, depth: float, states: np.ndarray, tolerance: float
) -> Limit:
    """Returns one grid point's limits; also in another process."""
    with jax.enable_x64(True):
        if name == "final_log_modes":
            flow = HadamardFlow(states.shape[1] + 1, depth)
        else:
            flow = GradientFlow(CrossEntropy(), per_class, depth=depth)
        return limit(flow, states, tolerance=tolerance)


class _Columns:
    """Arrays over the grid and seeds, filled grid point by grid point."""

    def __init__(self, dataset: xr.Dataset, name: str):
        self.axes = [*AXES, "seed"]
        shape = tuple(dataset.sizes[axis] for axis in self.axes)
        state = dataset[name]
        self.inner = state.dims[len(self.axes) :]
        inner = tuple(dataset.sizes[dimension] for dimension in self.inner)
        self.coordinates = {axis: dataset[axis].values for axis in self.axes}
        self.attributes = {
            key: dataset.attrs[key] for key in ("title", "axes") if key in dataset.attrs
        }
        self.status = np.zeros(shape, np.int8)
        self.rank = np.zeros(shape, np.int16)
        self.passed_saddle = np.zeros(shape, bool)
        self.structure = np.zeros(shape, np.int16)
        self.structures = [""]
        self.verdict = np.zeros(shape, np.int8)
        self.numbers = {name: np.full(shape, np.nan) for name in _NUMBERS}
        self.direction = np.full(shape + inner, np.nan)

    def put(self, cell: tuple[int, ...], seeds: np.ndarray, found: Limit) -> None:
        """Puts in one grid point."""
        for i, seed in enumerate(seeds):
            at = (*cell, int(seed))
            self.status[at] = STATUSES.index(found.status[i].name.lower())
            self.rank[at] = found.rank[i]
            self.passed_saddle[at] = found.passed_saddle[i]
            structure = str(found.structure[i])
            if structure not in self.structures:
                self.structures.append(structure)
            self.structure[at] = self.structures.index(structure)
            self.verdict[at] = _VERDICTS.index(found.verdict[i].name.lower())
            for name, column in self.numbers.items():
                column[at] = getattr(found, name)[i]
            direction = found.direction[i]
            self.direction[(*at, *map(slice, direction.shape))] = direction

    def dataset(self) -> xr.Dataset:
        """Returns all of it."""
        variables = {
            "status": (self.axes, self.status, _codes(STATUSES)),
            "rank": (self.axes, self.rank, {"long_name": "rank of the logits"}),
            "structure": (self.axes, self.structure, _codes(self.structures)),
            "verdict": (self.axes, self.verdict, _codes(_VERDICTS)),
            "passed_saddle": (self.axes, self.passed_saddle, {}),
            "direction": ([*self.axes, *self.inner], self.direction, {}),
        }
        for name, meaning in _NUMBERS.items():
            variables[name] = self.axes, self.numbers[name], {"long_name": meaning}
        return xr.Dataset(variables, self.coordinates, self.attributes)


def _codes(meanings: Sequence[str]) -> dict:
    """Returns attributes of codes; a list, as structures' names have blanks in them."""
    return {"flag_values": list(range(len(meanings))), "flag_names": list(meanings)}


def _shares(cell: xr.Dataset) -> list[dict]:
    """Returns kinds of limits of one grid point, with counts and intervals."""
    names = cell.structure.attrs["flag_names"]
    columns = (
        cell[name].values for name in ("status", "structure", "rank", "objective")
    )
    kinds = Counter(
        (names[structure], int(rank), float(f"{objective:.8g}"), STATUSES[status])
        if STATUSES[status] == "certified"
        else ("-", 0, np.nan, STATUSES[status])
        for status, structure, rank, objective in zip(*columns, strict=True)
    )
    total, rows = kinds.total(), []
    for kind, count in sorted(kinds.items(), key=lambda x: (x[0][3], -x[1])):
        structure, rank, objective, status = kind
        low, high = wilson(count, total)
        rows.append(
            {
                "structure": structure,
                "rank": rank,
                "objective": objective,
                "status": status,
                "members": count,
                "fraction": count / total,
                "low": low,
                "high": high,
            }
        )
    return rows
