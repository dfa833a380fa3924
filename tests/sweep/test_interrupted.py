"""A sweep that is killed outright goes on, and ends as if nothing had happened."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from compiling import QUICK_FLAGS

from deepufm.sweep import StoreError, SweepStore, inspect_sweep, open_sweep

NUM_CELLS = 12
LINE = (
    f"sweep --flow reduced --num-classes 4 --depth 1:{NUM_CELLS} --scale 0.01 "
    "--seeds 2 --final-time 1e3 --saves 3 --workers 1 --out s.zarr"
)
# The command, with a pause after each cell, so that it is caught half way.
SLOWLY = """
import sys, time
from deepufm.cli import _progress, main
update = _progress.Progress.update
_progress.Progress.update = lambda *a: (update(*a), time.sleep(0.1))
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory):
    """A folder with the compiled programs, which three processes would compile else."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("programs")
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder))
        patch.setenv("XLA_FLAGS", QUICK_FLAGS)
        yield


def _start(folder: Path, *program: str) -> subprocess.Popen:
    folder.mkdir(exist_ok=True)
    resume = ["--resume"] if (folder / "s.zarr").exists() else []
    with open(folder / "log", "w") as log:
        return subprocess.Popen(
            [sys.executable, *program, *LINE.split(), *resume],
            cwd=folder,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "MPLBACKEND": "agg"},
            stdout=log,
            stderr=log,
        )


def _finish(folder: Path) -> str:
    process = _start(folder, "-m", "deepufm.cli")
    assert process.wait(timeout=120) == 0, (folder / "log").read_text()
    return (folder / "log").read_text()


def _wait_for(store: Path, cells: int, process: subprocess.Popen) -> None:
    def done() -> int:
        return len(list((store / "outcome").glob("c.*.0")))

    deadline = time.monotonic() + 120
    while done() < cells and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    assert process.poll() is None, "it ended before it could be killed"
    assert done() >= cells


def _files(store: Path) -> dict[str, tuple[int, bytes]]:
    chunks = store.glob("*/c.*")
    return {
        str(file.relative_to(store)): (file.stat().st_mtime_ns, file.read_bytes())
        for file in chunks
        if file.suffix != ".partial"
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    _finish(folder)
    return folder / "s.zarr"


def test_a_killed_sweep_goes_on_where_it_was(tmp_path, whole):
    spec_of = open_sweep(whole).attrs["spec"]
    store = tmp_path / "s.zarr"
    process = _start(tmp_path, "-c", SLOWLY)
    try:
        _wait_for(store, NUM_CELLS // 2, process)
        _refuses_a_second_writer(tmp_path)
    finally:
        process.kill()
        process.wait()
    found = inspect_sweep(store)
    assert found.faults == ()
    assert NUM_CELLS // 2 <= len(found.done) < NUM_CELLS
    before = _files(store)

    log = _finish(tmp_path)
    assert f"{2 * len(found.done)} members were done before" in log
    after = _files(store)
    finished = [
        name
        for name in before
        if tuple(map(int, name.split("/c.")[1].split(".")[:5])) in found.done
    ]
    assert len(finished) > 20 * NUM_CELLS // 2  # every array, every finished cell
    assert all(after[name] == before[name] for name in finished)
    expected = _files(whole)
    assert after.keys() == expected.keys()
    assert all(after[name][1] == expected[name][1] for name in expected)
    assert open_sweep(store).attrs["spec"] == spec_of
    assert not list(store.rglob("*.partial"))


def _refuses_a_second_writer(folder: Path) -> None:
    """From another process, and lets go of the lock by itself when killed."""
    from deepufm.sweep import SweepSpec

    with pytest.raises(StoreError, match="Another sweep is writing"):
        SweepStore.create(folder / "s.zarr", SweepSpec(), overwrite=True)
