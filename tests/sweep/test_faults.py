"""Stores that are damaged, disks that are full, and two writers at once."""

import contextlib
import errno
import json
import os
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr

from deepufm import cli
from deepufm.cli._progress import Progress
from deepufm.sweep import (
    OUTCOMES,
    Grid,
    StoreError,
    SweepSpec,
    SweepStore,
    inspect_sweep,
    open_sweep,
)

SPEC = SweepSpec(grid=Grid(num_classes=(3, 4), depth=(1, 2, 3), seed=(0, 1)), saves=2)
CELLS = list(SPEC.grid.cells())
CELL = CELLS[1]  # K = 3, whose singular values fill a part of their chunk; depth 2
CHUNK = "c.0.0.0.1.0"
TINY = (
    "sweep --flow reduced --num-classes 4 --depth 1 2 --scale 0.01 --seeds 2 "
    "--final-time 1e3 --saves 3 --workers 1 --out s.zarr"
)


def _run(line: str) -> int:
    return cli.main(line.split())


def _values(cell):
    one = float(cell.depth)
    return {
        "kl": np.full((2, 2), one),
        "singular_values": np.full((2, 2, cell.num_classes), one),
        "final_effective_rank": np.full(2, one),
        "final_log_loss": np.full(2, -one),
        # A member that diverged: a chunk of nothing but the fill value.
        "final_kl": np.full(2, np.nan),
        "num_steps": np.zeros(2, int),
        "outcome": np.full(2, 1, np.int8),
    }


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A store whose cells are all done."""
    monkeypatch.chdir(tmp_path)
    with SweepStore.create("s.zarr", SPEC) as store:
        for cell in CELLS:
            store.write(cell, _values(cell))
    return tmp_path / "s.zarr"


def _chunk(path: Path, array: str) -> Path:
    (file,) = (path / array).glob(CHUNK + ".*" if array != "outcome" else CHUNK + ".0")
    return file


def _flip(content: bytes) -> bytes:
    return bytes([content[0] ^ 1]) + content[1:]


def _resume(path: Path):
    """Resumes, computes what is pending, and returns which cells those were."""
    with SweepStore.resume(path, SPEC) as store:
        pending = store.pending()
        for cell in pending:
            store.write(cell, _values(cell))
    return pending


DAMAGE = {
    "truncated": lambda content: content[:-1],
    "halved": lambda content: content[: len(content) // 2],
    "empty": lambda _: b"",
    "altered": _flip,
    "zeroed": lambda content: bytes(len(content)),
    "no more than a checksum": lambda _: bytes(4),
}


@pytest.mark.parametrize("array", ["kl", "singular_values", "outcome"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_chunk_is_found_and_its_cell_computed_again(path, array, damage):
    whole = open_sweep(path).load()
    file = _chunk(path, array)
    file.write_bytes(DAMAGE[damage](file.read_bytes()))
    with pytest.raises(
        StoreError, match=rf"num_classes=3, depth=2: array {array} is d"
    ):
        open_sweep(path)
    assert _resume(path) == [CELL]
    assert open_sweep(path).load().equals(whole)


@pytest.mark.parametrize("array", ["kl", "final_kl", "num_steps"])
def test_a_missing_chunk_is_found_and_no_nan(path, array):
    _chunk(path, array).unlink()
    with pytest.raises(StoreError, match=rf"depth=2: array {array} is missing"):
        open_sweep(path)
    # Also by the object that wrote the cell.
    assert _resume(path) == [CELL]
    assert _resume(path) == []


def test_a_lost_outcome_is_a_missing_cell_and_no_fault(path):
    _chunk(path, "outcome").unlink()
    assert int((open_sweep(path).outcome == OUTCOMES.index("missing")).sum()) == 2
    assert _resume(path) == [CELL]


def test_damage_is_noticed_by_the_store_that_is_open(path):
    with SweepStore.resume(path, SPEC) as store:
        store.write(CELL, _values(CELL))
        _chunk(path, "kl").unlink()
        assert store.pending() == [CELL]
        assert [fault.array for fault in store.faults.values()] == ["kl"]


@pytest.mark.parametrize("what", ["folder", "metadata"])
@pytest.mark.parametrize("array", ["kl", "outcome"])
def test_an_array_that_is_lost_is_made_again(path, array, what):
    whole = open_sweep(path).load()
    if what == "folder":
        shutil.rmtree(path / array)
    else:
        (path / array / "zarr.json").write_text("{")
    with pytest.raises(StoreError, match=f"array {array} is unreadable"):
        open_sweep(path)
    with SweepStore.resume(path, SPEC) as store:  # killed before it does anything
        assert store.pending() == CELLS
    assert _resume(path) == CELLS
    assert open_sweep(path).load().equals(whole)


@pytest.mark.parametrize("array", ["depth", "seed"])
def test_a_coordinate_is_repaired_from_the_specification(path, array):
    whole = open_sweep(path).load()
    (path / array / "c.0").write_bytes(b"")
    with pytest.raises(StoreError, match=f"array {array} is unreadable.*--resume"):
        open_sweep(path)
    assert _resume(path) == []
    assert open_sweep(path).load().equals(whole)


def test_zarr_itself_refuses_an_altered_chunk(path):
    file = _chunk(path, "kl")
    file.write_bytes(_flip(file.read_bytes()))
    with pytest.raises(ValueError, match="checksum"):
        xr.open_zarr(path, chunks=None).load()
    assert open_sweep(path, verify=False).final_kl.shape == (2, 1, 1, 3, 1, 2)


def test_what_a_killed_writer_left_is_cleared_away(path):
    leftovers = [path / "zarr.2f.partial", path / "kl" / "c.0.0.0.0.0.0.0.partial"]
    for leftover in leftovers:
        leftover.write_bytes(b"half")
    assert _resume(path) == []
    assert not any(leftover.exists() for leftover in leftovers)


def test_commands_name_the_damage_in_one_line(path, capsys):
    _chunk(path, "kl").unlink()
    assert _run("show s.zarr") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "s.zarr is damaged: num_classes=3, depth=2: array kl is missing" in line
    assert "with --resume, computes that again" in line
    assert _run("status s.zarr") == 1
    printed = capsys.readouterr()
    assert "10 of 12 members done\n       2 missing\n      10 reached" in printed.out
    assert printed.err.splitlines() == [
        "damaged  num_classes=3, depth=2: array kl is missing",
        "         --resume computes them again",
    ]


@pytest.mark.usefixtures("path")
def test_a_picture_that_cannot_be_written_is_one_line(capsys, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("deepufm.figures.sweep_figure", refuse)
    assert _run("show s.zarr") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "s.png cannot be written (No space left on device)" in line


def test_a_sweep_resumed_after_damage_says_so_and_is_whole(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert _run(TINY) == 0
    whole = open_sweep("s.zarr").load()
    (tmp_path / "s.zarr" / "kl" / "c.0.0.0.1.0.0.0").unlink()
    attributes = zarr.open_group("s.zarr", mode="r+").attrs
    versions = json.loads(str(attributes["versions"]))
    attributes["versions"] = json.dumps(versions | {"jax": "0.0.1"})
    capsys.readouterr()
    assert _run(TINY + " --resume") == 0
    printed = capsys.readouterr()
    assert "warning: The sweep at s.zarr was begun with jax 0.0.1, now" in printed.err
    assert "damaged  depth=2: array kl is missing" in printed.err
    assert "2 members in" in printed.out  # those of depth 1 are kept
    assert open_sweep("s.zarr").load().equals(whole)


@contextlib.contextmanager
def _small_files(size: int):
    """No file can grow beyond `size` bytes: a real error of writing, for any user."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("again", [False, True])
def test_a_disk_that_takes_no_more_keeps_what_is_there(path, again):
    """Also where the cell is written over: old and new data are never mixed."""
    whole = open_sweep(path).load()
    if not again:
        _chunk(path, "outcome").unlink()
    store = SweepStore.resume(path, SPEC)
    # Chunks of `kl` have 36 bytes, those of singular values 132.
    with _small_files(100), pytest.raises(StoreError) as caught:
        store.write(CELL, _values(CELL) | {"kl": np.full((2, 2), 9.0)})
    with _small_files(100):
        store.close()  # does not fail as well, nor keep the lock
    for words in (f"{path} cannot be written: File too large", "are kept", "--resume"):
        assert words in str(caught.value)
    left = open_sweep(path).load()
    assert (left.kl.sel(num_classes=3, depth=2) == 9).all()  # half is new
    assert (left.outcome.sel(num_classes=3, depth=2) == 0).all()
    assert int((left.outcome == 1).sum()) == 10
    assert not list(path.rglob("*.partial"))
    assert _resume(path) == [CELL]
    assert open_sweep(path).load().equals(whole)


@pytest.fixture
def full_disk(monkeypatch):
    """The disk takes so many more chunks, and nothing after."""

    def limit(chunks: int) -> None:
        def write(file: str, values: np.ndarray) -> None:
            nonlocal chunks
            chunks -= 1
            if chunks < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file)
            write_chunk(file, values)

        def consolidate(path: Path) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        from deepufm.sweep._store import write_chunk

        monkeypatch.setattr("deepufm.sweep._store.write_chunk", write)
        monkeypatch.setattr("deepufm.sweep._store.consolidate", consolidate)

    return limit


@pytest.mark.parametrize("chunks", range(len(_values(CELL))))
def test_wherever_a_write_fails_the_cell_is_missing(path, full_disk, chunks):
    """Whichever chunk is the first that fails, on top of a cell that was done."""
    store = SweepStore.resume(path, SPEC)
    full_disk(chunks)
    with pytest.raises(StoreError, match="No space left on device"):
        store.write(CELL, _values(CELL))
    store.close()
    assert store.pending() == [CELL]
    assert inspect_sweep(path).faults == ()


def test_a_sweep_on_a_full_disk_ends_in_one_line_and_goes_on(
    tmp_path, capsys, monkeypatch, full_disk
):
    monkeypatch.chdir(tmp_path)
    # Full in the midst of the second of the two cells.
    monkeypatch.setattr(Progress, "update", lambda *_: full_disk(5))
    assert _run(TINY) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert "s.zarr cannot be written: No space left on device" in error
    assert "--resume" in error
    assert _run("status s.zarr") == 1
    assert "2 of 4 members done" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert _run(TINY + " --resume") == 0


def test_an_array_that_the_store_does_not_know_of_holds_nothing(path, tmp_path):
    """The disk is full between the arrays and the line that names them."""
    whole = open_sweep(path).load()
    sizes = {file.parent.name: file.stat().st_size for file in path.rglob("zarr.json")}
    group = sizes.pop("s.zarr")
    store = SweepStore.create(tmp_path / "t.zarr", SPEC)
    assert group > max(sizes.values()) + 500  # not even without consolidated metadata
    with _small_files(max(sizes.values())), pytest.raises(StoreError):
        store.write(CELLS[0], _values(CELLS[0]))
    for cell in CELLS[:2]:  # there is room again
        store.write(cell, _values(cell))
    store.close()
    assert _resume(tmp_path / "t.zarr") == CELLS[2:]
    assert open_sweep(tmp_path / "t.zarr").load().equals(whole)


def test_a_store_that_could_not_be_begun_is_not_in_the_way(tmp_path):
    with _small_files(100), pytest.raises(StoreError, match="File too large"):
        SweepStore.create(tmp_path / "s.zarr", SPEC)
    assert not (tmp_path / "s.zarr").exists()
    SweepStore.create(tmp_path / "s.zarr", SPEC).close()


def test_an_output_that_cannot_be_made_is_a_store_error(path, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("shutil.rmtree", refuse)
    with pytest.raises(StoreError, match=r"Permission denied\. Choose another --out"):
        SweepStore.create(path, SPEC, overwrite=True)
    monkeypatch.undo()
    assert _resume(path) == []  # the lock was given back


def test_a_second_writer_is_refused_before_anything_is_deleted(path):
    (path.parent / "other").symlink_to(path)
    with SweepStore.resume(path, SPEC) as store:
        for second in (
            lambda: SweepStore.create(path, SPEC, overwrite=True),
            lambda: SweepStore.resume("s.zarr", SPEC),
            lambda: SweepStore.resume(path.parent / "other", SPEC),
        ):
            with pytest.raises(StoreError, match="Another sweep is writing to "):
                second()
        assert (open_sweep(path).outcome == 1).all()  # readers are let in
        store.write(CELL, _values(CELL))
    assert _resume(path) == []


def test_a_store_that_fails_to_open_is_not_locked(path):
    other = SweepSpec(grid=Grid(num_classes=4), saves=2)
    with pytest.raises(ValueError, match="another specification"):
        SweepStore.resume(path, other)
    assert _resume(path) == []


def test_a_store_is_closed_twice_and_locked_again_by_writing(path):
    store = SweepStore.resume(path, SPEC)
    store.close()
    store.close()
    with SweepStore.resume(path, SPEC) as second:
        store.close()  # must not give back what is another's
        with pytest.raises(StoreError, match="Another sweep"):
            store.write(CELL, _values(CELL))
        assert second.pending() == []
    store.write(CELL, _values(CELL))
    with pytest.raises(StoreError, match="Another sweep"):
        SweepStore.resume(path, SPEC)
    store.close()
    assert _resume(path) == []
