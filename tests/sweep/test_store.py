"""Stores: written whole or not at all, and never over somebody else's files."""

import dataclasses
import json
from importlib.metadata import version

import jax
import numpy as np
import pytest
import xarray as xr
import zarr

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


def test_a_single_seed_of_zero_is_no_missing_chunk(tmp_path):
    spec = SweepSpec(grid=Grid(num_classes=3, depth=1, seed=0), saves=2)
    SweepStore.create(tmp_path / "s.zarr", spec).close()
    assert open_sweep(tmp_path / "s.zarr").seed.values.tolist() == [0]


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
    with SweepStore.create(path, SPEC) as store:
        store.write(cell, _values(cell))
    with pytest.raises(ValueError, match="exists already.*--overwrite"):
        SweepStore.create(path, SPEC)
    SweepStore.create(path, SPEC, overwrite=True).close()
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
    path = xr.Dataset({"x": 1}, attrs={"format": "deepufm-path-1"})
    path.to_zarr(tmp_path / "p.zarr", zarr_format=3, consolidated=False)
    with pytest.raises(ValueError, match="but the one path of a `deepufm solve`"):
        open_sweep(tmp_path / "p.zarr")


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
    cell = next(SPEC.grid.cells())
    with SweepStore.create(tmp_path / "s.zarr", SPEC) as store:
        store.write(cell, _values(cell) | {"outcome": np.asarray([1, 0], np.int8)})
    with SweepStore.resume(tmp_path / "s.zarr", SPEC) as store:
        assert cell in store.pending()
        assert not store.faults  # unfinished, not damaged


def test_only_the_same_specification_is_resumed(tmp_path):
    path = tmp_path / "s.zarr"
    SweepStore.create(path, SPEC).close()
    with pytest.raises(ValueError, match=r"specification: saves: 2 then, 3 now\. "):
        SweepStore.resume(path, dataclasses.replace(SPEC, saves=3))
    with jax.enable_x64(False), pytest.raises(ValueError, match="float64 then, float3"):
        SweepStore.resume(path, SPEC)
    with pytest.raises(ValueError, match="no deepufm sweep at .* to resume"):
        SweepStore.resume(tmp_path / "other.zarr", SPEC)


def test_a_store_without_checksums_is_read_and_not_resumed(tmp_path):
    path = tmp_path / "s.zarr"
    SweepStore.create(path, SPEC).close()
    zarr.open_group(path, mode="r+").attrs["format"] = "deepufm-sweep-1"
    assert (open_sweep(path).outcome == 0).all()
    with pytest.raises(ValueError, match="kept no checksums"):
        SweepStore.resume(path, SPEC)


def test_other_versions_go_on_with_a_warning_and_are_recorded(tmp_path):
    path = tmp_path / "s.zarr"
    SweepStore.create(path, SPEC).close()
    attributes = zarr.open_group(path, mode="r+").attrs
    begun = json.loads(str(attributes["versions"])) | {"diffrax": "0.0.1"}
    attributes.update(
        {
            "versions": json.dumps(begun),
            "writers": json.dumps([{"versions": json.dumps(begun)}]),
        }
    )
    for _ in range(2):  # who goes on twice is recorded once
        with pytest.warns(UserWarning, match="begun with diffrax 0.0.1, now [0-9]"):
            SweepStore.resume(path, SPEC).close()
    writers = json.loads(open_sweep(path).attrs["writers"])
    diffrax = [json.loads(writer["versions"])["diffrax"] for writer in writers]
    assert diffrax == ["0.0.1", version("diffrax")]


def test_a_quantity_that_only_some_cells_have_is_nan_in_the_others(tmp_path):
    path = tmp_path / "s.zarr"
    cells = list(SPEC.grid.cells())
    with SweepStore.create(path, SPEC) as store:
        for cell in cells:
            late = {"energy": np.ones(2)} if cell.num_classes == 4 else {}
            store.write(cell, _values(cell) | late)
    with SweepStore.resume(path, SPEC) as store:
        assert store.pending() == []
    energy = open_sweep(path).energy
    assert np.isnan(energy.sel(num_classes=3)).all()
    assert (energy.sel(num_classes=4) == 1).all()


def test_a_store_is_opened_by_plain_xarray_and_zarr(tmp_path):
    """What we write as files is what Zarr reads by its codecs, and without warnings."""
    cell = next(SPEC.grid.cells())
    values = {
        "kl": np.arange(4.0).reshape(2, 2),
        "final_kl": np.asarray([np.nan, -np.inf]),
        "num_steps": np.asarray([1, 2**40]),
        "singular_values": np.arange(12.0).reshape(2, 2, 3),
        "small": np.asarray([0.1, 0.2], np.float32),
        "outcome": np.asarray([1, 3], np.int8),
    }
    with SweepStore.create(tmp_path / "s.zarr", SPEC) as store:
        store.write(cell, values)
    member = xr.open_zarr(tmp_path / "s.zarr", chunks=None).isel(num_classes=0, depth=0)
    for name, value in values.items():
        read = member[name].squeeze().values[..., : value.shape[-1]]
        np.testing.assert_array_equal(read, value)
        assert read.dtype == value.dtype
    assert np.isnan(member.singular_values.values[..., 3]).all()
