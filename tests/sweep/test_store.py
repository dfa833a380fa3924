"""Stores: written whole or not at all, and never over somebody else's files."""

import dataclasses

import numpy as np
import pytest
import xarray as xr

import deepufm as ufm
from deepufm.sweep import (
    OUTCOMES,
    Grid,
    SweepSpec,
    SweepStore,
    check_output,
    open_sweep,
    outcome_code,
)

SPEC = SweepSpec(grid=Grid(num_classes=(3, 4), depth=(1, 2, 3), seed=(0, 1)), saves=2)


def _values(cell):
    return {
        "kl": np.full((2, 2), float(cell.depth)),
        "singular_values": np.full((2, 2, cell.num_classes), float(cell.depth)),
        "final_kl": np.full(2, float(cell.depth)),
        "outcome": np.full(2, 1, np.int8),
    }


def test_cells_that_were_not_written_read_as_missing(tmp_path):
    store = SweepStore.create(tmp_path / "s.zarr", SPEC)
    cells = list(SPEC.grid.cells())
    store.write(cells[1], _values(cells[1]))
    dataset = open_sweep(tmp_path / "s.zarr").load()
    written = dataset.sel(num_classes=3, depth=2)
    assert (written.outcome == 1).all()
    assert (written.kl == 2).all()
    assert int((dataset.outcome == OUTCOMES.index("missing")).sum()) == 10
    assert int(dataset.final_kl.notnull().sum()) == 2


def test_the_outcome_is_written_last(tmp_path, monkeypatch):
    store = SweepStore.create(tmp_path / "s.zarr", SPEC)
    cell = next(SPEC.grid.cells())
    values = _values(cell)
    values = {"outcome": values.pop("outcome"), **values}
    order = []
    write = store._write
    monkeypatch.setattr(
        store, "_write", lambda name, *rest: (order.append(name), write(name, *rest))
    )
    store.write(cell, values)
    assert order[-1] == "outcome"
    assert len(order) == 4


def test_an_existing_store_is_replaced_only_if_asked(tmp_path):
    path = tmp_path / "s.zarr"
    cell = next(SPEC.grid.cells())
    SweepStore.create(path, SPEC).write(cell, _values(cell))
    with pytest.raises(ValueError, match="exists already.*--overwrite"):
        SweepStore.create(path, SPEC)
    SweepStore.create(path, SPEC, overwrite=True)
    assert (open_sweep(path).outcome == 0).all()


def test_a_folder_of_somebody_else_is_never_overwritten(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("irreplaceable")
    with pytest.raises(ValueError, match="did not write"):
        check_output(tmp_path / "thesis", overwrite=True)
    assert (tmp_path / "thesis" / "chapter.txt").exists()


def test_an_output_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        check_output(tmp_path / "file" / "s.zarr")


def test_opening_what_is_no_sweep_says_so(tmp_path):
    xr.Dataset({"x": 1}).to_zarr(tmp_path / "x.zarr", zarr_format=3, consolidated=False)
    with pytest.raises(ValueError, match="no deepufm sweep"):
        open_sweep(tmp_path / "x.zarr")


@pytest.mark.parametrize("name", OUTCOMES[1:])
def test_every_outcome_has_a_code_of_its_own(name):
    code = outcome_code(getattr(ufm.Outcome, name))
    assert OUTCOMES[int(code)] == name


def test_a_resumed_store_lacks_what_was_not_written(tmp_path):
    path = tmp_path / "s.zarr"
    store = SweepStore.create(path, SPEC)
    cells = list(SPEC.grid.cells())
    for cell in cells[:2]:
        store.write(cell, _values(cell))
    store.close()  # consolidated metadata are there, and out of date from here on
    again = SweepStore.resume(path, SPEC)
    assert again.pending() == cells[2:]
    again.write(cells[3], _values(cells[3]) | {"late": np.zeros(2)})
    again.close()
    dataset = open_sweep(path).load()
    assert int((dataset.outcome == 1).sum()) == 6
    assert int(dataset.late.notnull().sum()) == 2


def test_a_cell_with_one_missing_seed_is_pending(tmp_path):
    store = SweepStore.create(tmp_path / "s.zarr", SPEC)
    cell = next(SPEC.grid.cells())
    store.write(cell, _values(cell) | {"outcome": np.asarray([1, 0], np.int8)})
    assert cell in SweepStore.resume(tmp_path / "s.zarr", SPEC).pending()


def test_only_the_same_specification_is_resumed(tmp_path):
    path = tmp_path / "s.zarr"
    SweepStore.create(path, SPEC)
    with pytest.raises(ValueError, match="'saves: 2' then, 'saves: 3' now"):
        SweepStore.resume(path, dataclasses.replace(SPEC, saves=3))
    with pytest.raises(ValueError, match="no deepufm sweep at .* to resume"):
        SweepStore.resume(tmp_path / "other.zarr", SPEC)
