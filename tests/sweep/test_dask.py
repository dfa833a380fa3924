"""A sweep on a Dask cluster that loses a worker is one on threads, to the last bit."""

import os
import signal
import time
from collections import Counter
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import diffrax
import jax
import numpy as np
import pytest
import xarray as xr
from distributed import Client, KilledWorker, LocalCluster
from jax.experimental.compilation_cache import compilation_cache

import deepufm as ufm
from deepufm.sweep import (
    Grid,
    SweepSpec,
    SweepStore,
    UniformModesFamily,
    batches,
    open_sweep,
    run_sweep,
)

# Six batches of 64 members, which share a program.
SPEC = SweepSpec(
    grid=Grid(
        num_classes=(4,),
        per_class=(1,),
        width=(1,),
        depth=(1, 1.5, 2, 2.5, 3, 4),
        scale=(1e-2,),
        seed=tuple(range(64)),
    ),
    family=UniformModesFamily(),
    stop=ufm.FinalTime(1e3),
    # Two stages, which compile faster than the default's thirteen.
    solver=diffrax.Heun(),
    rtol=1e-3,
    saves=2,
)
NUM_BATCHES = 6


class _Around(Executor):
    """Hands batches to another executor, each inside a function that may interfere."""

    def __init__(self, executor: Executor, around, folder: Path):
        self._executor, self._around, self._folder = executor, around, folder
        self._number = 0

    def submit(self, fn, /, *args):
        number, self._number = self._number, self._number + 1
        return self._executor.submit(self._around, self._folder, number, fn, *args)


def _watched(folder: Path, number: int, fn, *args):
    """Notes who begins a batch; but for one, none is done before a worker is killed."""
    with (folder / "begun").open("a") as file:
        file.write(f"{number} {os.getpid()}\n")
    if number > 0:
        _until(lambda: (folder / "killed").exists())
    return fn(*args)


def _deadly(folder: Path, number: int, fn, *args):
    del folder, number, fn, args
    os.kill(os.getpid(), signal.SIGKILL)


def _begun(folder: Path) -> list[tuple[int, int]]:
    """Returns (number of the batch, process) of all that were begun, in order."""
    lines = [line.split() for line in (folder / "begun").read_text().splitlines()]
    return [(int(number), int(process)) for number, process in lines]


def _until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _kill_worker_of(batch: int, folder: Path) -> int:
    """Kills the process that did a batch, in its next one, whose number it returns."""
    process = dict(_begun(folder))[batch]

    def its() -> list[int]:
        return [number for number, worker in _begun(folder) if worker == process]

    _until(lambda: its()[-1] != batch)
    os.kill(process, signal.SIGKILL)
    (folder / "killed").touch()
    return its()[-1]


class _Cancels(ThreadPoolExecutor):
    """Gives up every batch but the first, as a cluster whose scheduler is gone."""

    def submit(self, fn, /, *args, **kwargs):
        if self._work_queue.empty() and not self._threads:
            return super().submit(fn, *args, **kwargs)
        future = Future()
        future.cancel()
        future.set_running_or_notify_cancel()
        return future


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """A folder with the compiled programs, which three processes would compile else."""
    name, folder = "jax_compilation_cache_dir", tmp_path_factory.mktemp("programs")
    before = jax.config.values[name]
    jax.config.update(name, str(folder))
    compilation_cache.reset_cache()
    yield folder
    jax.config.update(name, before)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def client(programs):
    """Two workers, in processes that know nothing of this one's settings of JAX.

    As on any cluster of Dask's, one that is killed is replaced after a while.
    """
    options: dict[str, Any] = {
        "dashboard_address": ":0",  # any port: the usual one may be taken
        "memory_limit": None,
        "env": {
            "JAX_PLATFORMS": "cpu",
            "JAX_ENABLE_X64": "0",
            "JAX_COMPILATION_CACHE_DIR": str(programs),
        },
    }
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, **options) as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def on_threads(tmp_path_factory, programs):
    del programs
    path = tmp_path_factory.mktemp("threads") / "s.zarr"
    assert run_sweep(SPEC, SweepStore.create(path, SPEC)) == []
    return open_sweep(path).load()


@pytest.fixture(scope="module")
def on_dask(tmp_path_factory, on_threads, client):
    """A sweep, a worker of which is killed once its first batch was written."""
    del on_threads  # has compiled
    folder = tmp_path_factory.mktemp("dask")
    number_of = {
        cell: number
        for number, batch in enumerate(batches(SPEC))
        for cell in batch.cells
    }
    written, interrupted = [], []
    store = SweepStore.create(folder / "s.zarr", SPEC)
    write = store.write

    def watch(cell, values):
        write(cell, values)
        written.append(cell)
        if not interrupted:
            interrupted.append(_kill_worker_of(number_of[cell], folder))

    store.write = watch
    executor = _Around(client.get_executor(), _watched, folder)
    failures = run_sweep(SPEC, store, executor=executor)
    dataset = open_sweep(folder / "s.zarr").load()
    return dataset, failures, written, interrupted, _begun(folder)


def test_no_cell_is_lost_and_none_written_twice(on_dask):
    dataset, failures, written, *_ = on_dask
    assert len(batches(SPEC)) == NUM_BATCHES
    assert failures == []
    assert Counter(written) == Counter(SPEC.grid.cells())
    assert (dataset.outcome == 1).all()


def test_only_what_the_killed_worker_was_at_is_computed_again(on_dask):
    *_, interrupted, begun = on_dask
    times = Counter(number for number, _ in begun)
    assert times == Counter([*range(NUM_BATCHES), *interrupted])


def test_workers_compute_the_same_numbers_as_threads(on_dask, on_threads):
    """In double precision, which only this process was told to use."""
    dataset, *_ = on_dask
    xr.testing.assert_equal(dataset, on_threads)
    assert dataset.final_log_norm.dtype == np.float64


def test_a_batch_that_kills_its_workers_is_a_failure(on_dask, client, tmp_path):
    del on_dask
    client.cluster.scheduler.allowed_failures = 0  # of 3
    spec = SweepSpec(
        grid=Grid((4,), (1,), (1,), (1,), (1e-2,), (0,)), family=SPEC.family
    )
    store = SweepStore.create(tmp_path / "s.zarr", spec)
    executor = _Around(client.get_executor(), _deadly, tmp_path)
    (failure,) = run_sweep(spec, store, executor=executor)
    assert isinstance(failure.error, KilledWorker)
    assert store.pending() == [failure.cell]


def test_batches_that_the_executor_gives_up_are_failures(tmp_path, on_threads):
    store = SweepStore.create(tmp_path / "s.zarr", SPEC)
    with _Cancels(1) as executor:
        failures = run_sweep(SPEC, store, executor=executor)
    assert len(failures) == NUM_BATCHES - 1
    assert store.pending() == sorted((f.cell for f in failures), key=lambda c: c.index)
    assert all(isinstance(failure.error, CancelledError) for failure in failures)
    assert str(failures[0]).endswith("cancelled by the executor")
    done = open_sweep(tmp_path / "s.zarr").load().outcome == 1
    assert int(done.sum()) == len(on_threads.seed)
