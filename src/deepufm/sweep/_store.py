"""Stores: one Zarr group a sweep, which `xarray.open_zarr` reads as one Dataset.

Dimensions are the grid's axes, `seed`, and for orbits `save`; singular values add
`mode`. A chunk is one cell (all seeds of a grid point), the unit of writing; chunks
that were never written cost nothing and read as NaN, and their `outcome` as `missing`.
A cell's outcome is written last, so a cell that says `reached` is whole.
"""

import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path as FilePath

import equinox as eqx
import jax
import numpy as np
import xarray as xr
import zarr

from ..dynamics import Outcome, Path
from ._spec import AXES, Cell, SweepSpec

# Codes of `outcome` in a store; 0 is what a chunk that was never written reads as.
OUTCOMES = (
    "missing", "reached", "step_budget", "non_finite", "step_underflow", "not_met",
)  # fmt: skip

_FORMAT = "deepufm-sweep-1"

# Units and meanings, for axes of plots and for readers without the source.
_LONG_NAMES = {
    "log_time": "natural logarithm of the flow's time",
    "effective_rank": "effective rank of the logits (P1 eq. 60)",
    "mean_effective_rank": "effective rank of the class-mean logits (P1 eq. 60)",
    "kl": "KL divergence from collapse (P1 eq. 52)",
    "log_loss": "natural logarithm of the loss",
    "log_norm": "natural logarithm of the norm",
    "logit_margin": "smallest margin of Z/‖Z‖ (P1 Fig. 3)",
    "nuclear_norm": "sum of the logit singular values",
    "singular_values": "logit singular values",
    "uniform_distance": "M of P2 eq. 12",
    "etf_distance": "M of P1 eq. 61",
}


def outcome_code(outcome: Outcome) -> np.ndarray:
    """Returns the store's code of an outcome, an int8."""
    code = 0
    for index, name in enumerate(OUTCOMES[1:], start=1):
        code = np.where(np.asarray(outcome == getattr(Outcome, name)), index, code)
    return np.asarray(code, np.int8)


class SweepStore:
    """A sweep's results on disk, written cell by cell."""

    def __init__(self, path: FilePath, spec: SweepSpec):
        """Claims an empty folder; `create` makes it."""
        self.path = path
        self._spec = spec
        # Consolidated metadata are a copy for readers, ignorant of what follows.
        self._group = zarr.open_group(
            path, mode="a", zarr_format=3, use_consolidated=False
        )

    @classmethod
    def create(
        cls,
        path: str | os.PathLike,
        spec: SweepSpec,
        *,
        overwrite: bool = False,
        title: str = "",
    ) -> "SweepStore":
        """Makes an empty store; `title` says in a few words what the sweep is of.

        **Raises:** `ValueError` where `path` exists and `overwrite` is not given, where
        it exists and is no store of ours (never deleted), or cannot be written.
        """
        path = FilePath(path)
        check_output(path, overwrite=overwrite)
        if path.exists():
            shutil.rmtree(path)
        store = cls(path, spec)
        store._describe(title)
        return store

    @classmethod
    def resume(cls, path: str | os.PathLike, spec: SweepSpec) -> "SweepStore":
        """Opens the store of a sweep that was interrupted, to go on with it.

        **Raises:** `ValueError` where there is none, or it was made for another grid,
        model, stop, clock, solver or tolerance; the message shows the difference.
        """
        path = FilePath(path)
        if not _is_store(path):
            raise ValueError(
                f"There is no deepufm sweep at {path} to resume. Leave out --resume to "
                "start one."
            )
        attributes = zarr.open_group(path, mode="r").attrs
        was, now = str(attributes.get("spec", "")), describe(spec)
        if was != now:
            changes = [
                f"{old!r} then, {new!r} now"
                for old, new in zip_longest(was.splitlines(), now.splitlines())
                if old != new
            ]
            raise ValueError(
                f"The sweep at {path} is of another specification: "
                + "; ".join(changes)
                + ". Choose another --out, or replace it with --overwrite."
            )
        return cls(path, spec)

    def pending(self) -> list[Cell]:
        """Returns the cells that were not written whole, in the grid's order."""
        outcomes = self._group["outcome"]
        assert isinstance(outcomes, zarr.Array)
        known = np.asarray(outcomes[...]) != OUTCOMES.index("missing")
        return [cell for cell in self._spec.grid.cells() if not known[cell.index].all()]

    def write(self, cell: Cell, values: Mapping[str, np.ndarray]) -> None:
        """Writes one cell, seeds along the leading axis; its outcome last."""
        for name, value in values.items():
            if name != "outcome":
                self._write(name, cell, value)
        self._write("outcome", cell, values["outcome"])

    def close(self) -> None:
        """Gathers the metadata in one place, which spares readers a file an array."""
        _consolidate(self.path)

    def _write(self, name: str, cell: Cell, value: np.ndarray) -> None:
        array = self._array(name, cell, value)
        region = tuple(slice(i, i + 1) for i in cell.index)
        rows = tuple(slice(0, size) for size in value.shape)
        array[region + rows] = value.reshape((1,) * len(AXES) + value.shape)

    def _array(self, name: str, cell: Cell, value: np.ndarray) -> zarr.Array:
        """Returns the array of a quantity, made when its first cell arrives."""
        if name in self._group:
            array = self._group[name]
            assert isinstance(array, zarr.Array)
            return array
        grid = self._spec.grid
        inner = list(value.shape)
        dimensions = [*AXES, "seed", *_inner_dimensions(name, value.ndim - 1)]
        if "mode" in dimensions:
            inner[-1] += max(grid.values("num_classes")) - cell.num_classes
        floating = np.issubdtype(value.dtype, np.floating)
        return self._group.create_array(
            name,
            shape=grid.shape + tuple(inner),
            chunks=(1,) * len(AXES) + tuple(inner),
            dtype=value.dtype,
            fill_value=np.nan if floating else 0,
            dimension_names=dimensions,
            attributes=_attributes(name),
        )

    def _describe(self, title: str) -> None:
        """Writes coordinates, a missing outcome, and where the numbers come from."""
        grid = self._spec.grid
        for axis in (*AXES, "seed"):
            values = np.asarray(getattr(grid, axis))
            self._group.create_array(axis, data=values, dimension_names=[axis])
        first = next(grid.cells())
        self._array("outcome", first, np.zeros(len(grid.values("seed")), np.int8))
        self._group.attrs.update(
            {
                "format": _FORMAT,
                "title": title,
                "spec": describe(self._spec),
                "axes": list(self._spec.family.axes),  # the others mean nothing here
                **_provenance(),
            }
        )


def write_path(
    path: str | os.PathLike, orbit: Path, title: str, *, overwrite: bool = False
) -> None:
    """Writes one orbit, rows over `save`, as a Zarr store for `xarray.open_zarr`.

    **Raises:** `ValueError` as `SweepStore.create`.
    """
    path = FilePath(path)
    check_output(path, overwrite=overwrite)
    if path.exists():
        shutil.rmtree(path)
    variables = {}
    for name, value in quantities(orbit).items():
        attributes = _attributes(name)
        variables[name] = (_inner_dimensions(name, value.ndim), value, attributes)
    attributes = {"format": "deepufm-path-1", "title": title, **_provenance()}
    dataset = xr.Dataset(variables, attrs=attributes)
    dataset.to_zarr(path, zarr_format=3, consolidated=False)
    _consolidate(path)


def quantities(path: Path) -> dict[str, np.ndarray]:
    """Returns what a store keeps of a path: rows over saves, finals, outcome, cost."""
    kept = {"log_time": path.log_time, **path.observables}
    kept |= {f"final_{name}": value for name, value in path.final_observables.items()}
    kept |= {
        "final_log_time": path.final_log_time,
        "num_saved": path.num_saved,
        "num_steps": path.stats.num_steps,
        "num_rejected": path.stats.num_rejected,
        "outcome": outcome_code(path.outcome),
    }
    return {name: np.asarray(value) for name, value in kept.items()}


def check_output(path: str | os.PathLike, *, overwrite: bool = False) -> None:
    """Raises `ValueError` where nothing may be written to `path`, in one line."""
    path = FilePath(path)
    if path.exists():
        if not overwrite:
            raise ValueError(
                f"Output {path} exists already. Choose another with --out, or replace "
                "it with --overwrite."
            )
        picture = path.suffix == ".png" and path.is_file()
        if not picture and not _is_store(path):
            raise ValueError(
                f"Output {path} is something that deepufm did not write, and is not "
                "overwritten. Choose another with --out."
            )
    try:
        # Permission bits do not tell for every user and file system; writing does.
        with tempfile.TemporaryFile(dir=_nearest_folder(path.absolute().parent)):
            pass
    except OSError as error:
        raise ValueError(
            f"Output {path} cannot be written ({error.strerror}). Choose another with "
            "--out."
        ) from None


def _nearest_folder(path: FilePath) -> FilePath:
    """Returns the deepest part of a path that exists: where the rest would be made."""
    while not path.exists():
        path = path.parent
    return path


def open_sweep(path: str | os.PathLike) -> xr.Dataset:
    """Opens a store as an `xarray.Dataset`, lazily.

    **Raises:** `ValueError` where there is no store of ours at `path`.
    """
    path = FilePath(path)
    if not _is_store(path):
        raise ValueError(f"There is no deepufm sweep at {path}.")
    return xr.open_zarr(path, consolidated=False, chunks=None)


def describe(spec: SweepSpec) -> str:
    """Returns a spec as text, with the values of its arrays."""
    parts = {
        "grid": spec.grid,
        "family": spec.family,
        "stop": eqx.tree_pformat(spec.stop, short_arrays=False),
        "clock": eqx.tree_pformat(spec.clock, short_arrays=False),
        "solver": "default" if spec.solver is None else type(spec.solver).__name__,
        "rtol": "default" if spec.rtol is None else spec.rtol,
        "max_steps": spec.max_steps,
        "saves": spec.saves,
    }
    return "\n".join(f"{name}: {value}" for name, value in parts.items())


def _attributes(name: str) -> dict:
    """Meaning of a variable; CF flags for the outcome."""
    base = name.removeprefix("final_")
    attributes: dict = {"long_name": _LONG_NAMES.get(base, base.replace("_", " "))}
    if name == "outcome":
        attributes["flag_values"] = list(range(len(OUTCOMES)))
        attributes["flag_meanings"] = " ".join(OUTCOMES)
    return attributes


def _provenance() -> dict[str, str]:
    versions = {name: version(name) for name in ("deepufm", "jax", "diffrax")}
    return {"versions": json.dumps(versions), "device": str(jax.devices()[0])}


def _is_store(path: FilePath) -> bool:
    try:
        attributes = json.loads((path / "zarr.json").read_text())["attributes"]
    except (OSError, ValueError, KeyError):
        return False
    return str(attributes.get("format", "")).startswith("deepufm-")


def _consolidate(path: FilePath) -> None:
    with warnings.catch_warnings():
        # Zarr warns that version 3's specification does not mention it (yet); without
        # it, xarray warns at every plain `open_zarr`.
        warnings.simplefilter("ignore")
        zarr.consolidate_metadata(path)


def _inner_dimensions(name: str, count: int) -> list[str]:
    """Names the dimensions after `seed`."""
    mode = ["mode"] if name.endswith("singular_values") else []
    save = [] if count == len(mode) else ["save"]
    return save + mode
