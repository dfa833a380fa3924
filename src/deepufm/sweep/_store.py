"""Stores: one Zarr group a sweep, which `xarray.open_zarr` reads as one Dataset.

Dimensions are the grid's axes, `seed`, and for orbits `save`; singular values add
`mode`. A chunk is one cell (all seeds of a grid point), the unit of writing; cells
that were never written cost nothing and read as NaN, and their `outcome` as `missing`.
A cell's outcome is written last, and every file with a checksum; so a cell that says
`reached` is whole, or is seen not to be.
"""

import contextlib
import json
import math
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path as FilePath

import numpy as np
import xarray as xr
import zarr
from filelock import BaseFileLock

from ..dynamics import Path
from ._describe import describe, differences
from ._files import (
    check_is_sweep,
    check_output,
    consolidate,
    is_store,
    provenance,
    read_attributes,
    versions,
)
from ._guard import StoreError, claim, claimed, disk_errors
from ._integrity import (
    CHUNKS,
    FORMAT,
    Fault,
    Index,
    array_rank,
    chunk_file,
    inspect_arrays,
    inspect_sweep,
    is_sound,
    locate,
    write_chunk,
    written_cells,
)
from ._layout import attributes, inner_dimensions, quantities
from ._spec import AXES, Cell, SweepSpec

_ADVICE = (
    "Finished grid points are kept; once that is mended, the same command with "
    "--resume (`resume=True`) goes on with the others."
)


class SweepStore:
    """A sweep's results on disk, written cell by cell, by one process at a time.

    From `create` or `resume` to `close` the store is locked for other writers; a
    context manager closes it.
    """

    def __init__(self, path: FilePath, spec: SweepSpec, lock: BaseFileLock):
        """Opens a folder whose `lock` is held; see `create` and `resume`."""
        self.path = path
        self.faults: dict[Cell, Fault] = {}  # damage that was found, and is repaired
        self._spec = spec
        self._lock = lock
        # Consolidated metadata are a copy for readers, ignorant of what follows.
        self._group = zarr.open_group(
            path, mode="a", zarr_format=3, use_consolidated=False
        )
        self._arrays: dict[str, zarr.Array] = {}
        # Names of the arrays that every written cell has a chunk of.
        self._complete = list(read_attributes(path).get("arrays", ()))
        self._sound: frozenset[Index] = frozenset()  # cells read once, and whole

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
        it exists and is no store of ours (never deleted), or cannot be written;
        `StoreError` where a sweep is just writing to it.
        """
        path = FilePath(path)
        check_output(path, overwrite=overwrite)
        with claimed(path) as lock, disk_errors(path, "Choose another --out."):
            # Again, as another sweep may have ended since.
            check_output(path, overwrite=overwrite)
            if path.exists():
                shutil.rmtree(path)
            try:
                about = _about(spec, title)
                zarr.create_group(path, zarr_format=3, attributes=about)
                store = cls(path, spec, lock)
                store._fill_in()
            except OSError:
                # Nobody's: it was not there before, and would be in the way.
                shutil.rmtree(path, ignore_errors=True)
                raise
        return store

    @classmethod
    def resume(cls, path: str | os.PathLike, spec: SweepSpec) -> "SweepStore":
        """Opens the store of a sweep that was interrupted, to go on with it.

        Another version of deepufm, JAX or diffrax than it was begun with is a warning,
        and recorded in the attribute `writers`.

        **Raises:** `ValueError` where there is none, or it was made for another grid,
        model, stop, clock, solver, tolerance or precision; the message shows the
        difference. `StoreError` where a sweep is just writing to it.
        """
        path = FilePath(path)
        if not is_store(path, "deepufm-sweep"):
            raise ValueError(
                f"There is no deepufm sweep at {path} to resume. Leave out --resume to "
                "start one."
            )
        with claimed(path) as lock:
            _check_resumable(path, spec)
            with disk_errors(path, _ADVICE):
                store = cls(path, spec, lock)
                store._mend()
                store._sign()
        return store

    def pending(self) -> list[Cell]:
        """Returns the cells that are not whole, in the grid's order.

        A cell is whole if the outcomes of all its members are known, and every chunk
        is there as it was written; those that say that they are done and are not come
        into `faults`. Every cell is read once: 10,000 take seconds.
        """
        found = inspect_arrays(self.path, trusted=self._sound)
        self._sound = found.done
        cells = {cell.index: cell for cell in self._spec.grid.cells()}
        self.faults |= {cells[fault.index]: fault for fault in found.faults}
        return [cell for index, cell in cells.items() if index not in found.done]

    def write(self, cell: Cell, values: Mapping[str, np.ndarray]) -> None:
        """Writes one cell, seeds along the leading axis; its outcome last.

        **Raises:** `StoreError` where the disk is full, or takes no writes; the cell is
        then `missing`, and the others are as they were.
        """
        claim(self._lock, self.path)
        with disk_errors(self.path, _ADVICE):
            self._retract(cell)
            self._make_arrays(cell, values)
            for name in self._complete:
                self._write(name, cell.index, values.get(name))
            self._write("outcome", cell.index, values["outcome"])

    def close(self) -> None:
        """Lets other writers in; a store that is written to again is locked again.

        Gathers the metadata in one place, which spares readers a file an array.
        """
        try:
            if self._lock.is_locked:
                # Without, readers are slower, and that is all: no reason to fail where
                # the disk is full and an error on its way.
                with contextlib.suppress(OSError):
                    consolidate(self.path)
        finally:
            self._lock.release()

    def __enter__(self) -> "SweepStore":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _retract(self, cell: Cell) -> None:
        """Makes a cell `missing`, before its data become a mixture of old and new."""
        # Deleting also works where the disk is full.
        outcome = chunk_file(self.path, "outcome", cell.index, len(AXES) + 1)
        FilePath(outcome).unlink(missing_ok=True)
        self._sound -= {cell.index}

    def _write(self, name: str, index: Index, value: np.ndarray | None) -> None:
        """Writes a chunk, its fill value where there is no other."""
        array = self._array(name)
        chunk = np.full(array.chunks[len(AXES) :], array.fill_value, array.dtype)
        if value is not None:
            chunk[tuple(slice(size) for size in value.shape)] = value
        write_chunk(chunk_file(self.path, name, index, array.ndim), chunk)

    def _array(self, name: str) -> zarr.Array:
        if name not in self._arrays:
            array = self._group[name]
            assert isinstance(array, zarr.Array)
            self._arrays[name] = array
        return self._arrays[name]

    def _make_arrays(self, cell: Cell, values: Mapping[str, np.ndarray]) -> None:
        """Makes the arrays of quantities that no cell before had.

        A quantity that only some cells have (those of K a power of two, say) reads as
        NaN in the others. They get a chunk of it, so that no chunk is missing.
        """
        new = [name for name in values if name not in {"outcome", *self._complete}]
        for name in new:
            self._make_array(name, cell, values[name])
            for index in written_cells(self.path):
                self._write(name, index, None)
        if new:
            # In the store first: what is not said there is taken for a leftover.
            complete = [*self._complete, *new]
            self._group.attrs["arrays"] = complete
            self._complete = complete

    def _make_array(self, name: str, cell: Cell, value: np.ndarray) -> None:
        grid = self._spec.grid
        inner = list(value.shape)
        dimensions = [*AXES, "seed", *inner_dimensions(name, value.ndim - 1)]
        larger = max(grid.values("num_classes")) - cell.num_classes
        for axis, dimension in enumerate(dimensions[len(AXES) + 1 :]):
            if dimension in ("mode", "logit", "class"):
                inner[axis + 1] += larger
        floating = np.issubdtype(value.dtype, np.floating)
        self._group.create_array(
            name,
            shape=grid.shape + tuple(inner),
            chunks=(1,) * len(AXES) + tuple(inner),
            dtype=value.dtype,
            fill_value=np.nan if floating else 0,
            dimension_names=dimensions,
            attributes=attributes(name),
            **CHUNKS,
            overwrite=True,  # what a process left that was killed in here
        )

    def _fill_in(self) -> None:
        """Writes the coordinates and the array of outcomes where they are not sound."""
        grid = self._spec.grid
        for axis in (*AXES, "seed"):
            if is_sound(self.path, axis):
                continue
            values = np.asarray(grid.values(axis))
            self._group.create_array(
                axis,
                shape=values.shape,
                chunks=values.shape,
                dtype=values.dtype,
                dimension_names=[axis],
                overwrite=True,
                **CHUNKS,
            )
            # Not by Zarr, which leaves out what equals the fill value: one seed, 0.
            write_chunk(chunk_file(self.path, axis, (), 1), values)
        if not is_sound(self.path, "outcome"):
            missing = np.zeros(len(grid.values("seed")), np.int8)
            self._make_array("outcome", next(grid.cells()), missing)

    def _mend(self) -> None:
        """Takes back cells that are not whole, and what else is damaged.

        From here on, all cells that have an outcome are whole; the others are pending.
        """
        self.pending()
        for cell in self.faults:
            self._retract(cell)
        names = ["outcome", *self._complete]
        for name in [n for n in names if array_rank(self.path, n) is None]:
            shutil.rmtree(self.path / name, ignore_errors=True)
        self._complete = [n for n in self._complete if array_rank(self.path, n)]
        self._group.attrs["arrays"] = self._complete
        for pattern in ("*.partial", "*/*.partial"):  # of a process that was killed
            for leftover in self.path.glob(pattern):
                leftover.unlink()
        self._fill_in()

    def _sign(self) -> None:
        """Records who goes on with the store."""
        writers = json.loads(read_attributes(self.path)["writers"])
        if (writer := provenance()) not in writers:
            self._group.attrs["writers"] = json.dumps([*writers, writer])


def _about(spec: SweepSpec, title: str) -> dict:
    """What the sweep is, and who wrote it: attributes of its store."""
    grid, writer = spec.grid, provenance()
    return {
        "format": FORMAT,
        "title": title,
        "spec": describe(spec),
        "axes": list(spec.family.axes),  # the others mean nothing here
        "members": math.prod(grid.shape) * len(grid.values("seed")),
        "arrays": [],  # that every written cell has a chunk of
        **writer,
        "writers": json.dumps([writer]),
    }


def _check_resumable(path: FilePath, spec: SweepSpec) -> None:
    """Raises `ValueError` where a store holds other results; warns of versions."""
    kept = read_attributes(path)
    if kept["format"] != FORMAT:
        raise ValueError(
            f"The sweep at {path} was written by an earlier deepufm, which kept no "
            "checksums. It can be shown, and not gone on with: choose another --out, "
            "or replace it with --overwrite."
        )
    if changes := differences(kept["spec"], describe(spec)):
        raise ValueError(
            f"The sweep at {path} is of another specification: {'; '.join(changes)}. "
            "Choose another --out, or replace it with --overwrite."
        )
    then, now = json.loads(kept["versions"]), versions()
    changed = [
        f"{name} {then[name]}, now {now[name]}"
        for name in now
        if then[name] != now[name]
    ]
    if changed:
        warnings.warn(
            f"The sweep at {path} was begun with {', '.join(changed)}. Members that "
            "are added may differ from those that are there by more than rounding.",
            stacklevel=3,
        )


def open_sweep(path: str | os.PathLike, *, verify: bool = True) -> xr.Dataset:
    """Opens a store as an `xarray.Dataset`, lazily.

    **Arguments:** `verify` that the cells that are done are whole, which reads all that
    is there: seconds for 10,000 cells.

    **Raises:** `ValueError` where there is no sweep of ours at `path`; `StoreError`
    where it is damaged, which names the place and what to do.
    """
    path = FilePath(path)
    check_is_sweep(path)
    checksums = read_attributes(path)["format"] == FORMAT
    if verify and checksums and (faults := list(inspect_sweep(path).faults)):
        first = locate(path, faults.pop(0))
        more = f" (and {len(faults)} more)" if faults else ""
        raise StoreError(
            f"The sweep at {path} is damaged: {first}{more}. The command that made it, "
            "with --resume, computes that again."
        )
    return xr.open_zarr(path, consolidated=False, chunks=None)


def write_path(
    path: str | os.PathLike, orbit: Path, title: str, *, overwrite: bool = False
) -> None:
    """Writes one orbit, rows over `save`, as a Zarr store for `xarray.open_zarr`.

    **Raises:** `ValueError` as `SweepStore.create`, and `StoreError` where the disk is
    full, or takes no writes.
    """
    path = FilePath(path)
    check_output(path, overwrite=overwrite)
    variables = {}
    for name, value in quantities(orbit).items():
        variables[name] = (inner_dimensions(name, value.ndim), value, attributes(name))
    about = {"format": "deepufm-path-1", "title": title, **provenance()}
    with disk_errors(path, "Choose another --out."):
        if path.exists():
            shutil.rmtree(path)
        dataset = xr.Dataset(variables, attrs=about)
        dataset.to_zarr(path, zarr_format=3, consolidated=False)
        consolidate(path)
