"""Running a sweep: batches through an executor, written as soon as they are done."""

import collections
import contextlib
import functools
import os
import pickle
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import (
    CancelledError,
    Executor,
    ThreadPoolExecutor,
    as_completed,
)
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from ..analysis import metrics
from ..dynamics import FinalTime, Path, check_solve, default_solver
from ..ensemble import (
    Members,
    Strategy,
    available_cores,
    compiler_options,
    make_share,
    may_run_together,
)
from ._batches import Batch, batches
from ._family import Shape
from ._layout import late_states, quantities
from ._spec import Cell, SweepSpec
from ._store import SweepStore, open_sweep

Progress = Callable[[Cell, int], None]


@dataclass(frozen=True)
class Failure:
    """A cell that raised instead of returning; its members stay `missing`."""

    cell: Cell
    error: BaseException

    def __str__(self) -> str:
        reason = str(self.error).strip() or type(self.error).__name__
        return f"{self.cell}: {reason.splitlines()[0]}"


def run_sweep(
    spec: SweepSpec,
    store: SweepStore,
    *,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> list[Failure]:
    """Computes the cells that `store` lacks and writes each as it finishes.

    The unit of work is a `Batch` of cells that share a program. One of which any cell
    is missing is computed whole, so that a resumed sweep has the same numbers to the
    last bit; cells that are there are left alone.

    **Arguments:**

    - `executor`: any `concurrent.futures.Executor`; one thread a core if `None`.
    - `progress`: called with each finished cell and its number of members.

    **Returns:** the cells that raised; the others are in the store. A member that ends
    badly (step budget, NaN) is no failure: its outcome is stored beside its last state.

    **Raises:** `ValueError`, before anything is compiled, for a spec whose members do
    not fit their flow; `StoreError` where results cannot be written.
    """
    failures: list[Failure] = []
    own = None
    futures = {}
    try:
        check_spec(spec)
        if executor is None:
            executor = own = ThreadPoolExecutor(available_cores())
        pending = set(store.pending())
        x64 = jnp.zeros(()).dtype == jnp.float64
        for batch in batches(spec):
            if pending.intersection(batch.cells):
                sent = pickle.dumps((spec, batch))
                futures[executor.submit(_run_sent, sent, x64)] = batch
        for future in as_completed(futures):
            missing = [cell for cell in futures.pop(future).cells if cell in pending]
            if future.cancelled():  # a cluster that lost its scheduler, say
                error = CancelledError("cancelled by the executor")
            else:
                error = future.exception()
            results = {} if error is not None else future.result()
            # A cluster keeps a result while there is its future, and computes it again
            # where the worker that has it dies.
            del future
            if error is not None:
                failures += [Failure(cell, error) for cell in missing]
                continue
            for cell in missing:
                store.write(cell, results[cell])
                if progress is not None:
                    progress(cell, len(spec.grid.values("seed")))
    except BaseException:
        # Interrupted: start no other batch, whoever owns the executor.
        for future in futures:
            future.cancel()
        raise
    finally:
        store.close()
        if own is not None:
            # On an interruption, let running batches go and start no other.
            own.shutdown(wait=False, cancel_futures=True)
    return failures


def sweep(
    spec: SweepSpec,
    path: str | os.PathLike,
    *,
    overwrite: bool = False,
    resume: bool = False,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> xr.Dataset:
    """Runs a sweep into a store at `path` and opens it.

    **Arguments:** as `run_sweep` and `SweepStore.create`; `resume` goes on with the
    store that an interrupted run of the same spec left, computing only what it lacks.

    **Returns:** the store as a lazy `xarray.Dataset`.

    **Raises:** `ValueError` as those two. Cells that raise are named in a warning, and
    their members stay `missing`.

    !!! example
        spec = SweepSpec(grid=Grid(num_classes=6, width=32, depth=(1, 2, 4, 8)))
        dataset = sweep(spec, "depths.zarr")
    """
    check_spec(spec)
    if resume:
        store = SweepStore.resume(path, spec)
    else:
        store = SweepStore.create(path, spec, overwrite=overwrite)
    failures = run_sweep(spec, store, executor=executor, progress=progress)
    for failure in failures:
        warnings.warn(f"no result for {failure}", stacklevel=2)
    return open_sweep(path)


def _run_sent(sent: bytes, x64: bool) -> dict[Cell, dict[str, np.ndarray]]:
    """Runs a batch in the caller's precision, whatever is the worker's.

    It comes pickled, or a worker would round the specification's arrays to its own.
    """
    with jax.enable_x64(x64):
        return run_batch(*pickle.loads(sent))


def run_batch(spec: SweepSpec, batch: Batch) -> dict[Cell, dict[str, np.ndarray]]:
    """Returns every quantity of each cell's members, seeds along the leading axis."""
    program = _program(spec, batch.shape, batch.size)
    rows = _rows(spec, batch.cells)
    parts = [
        program(rows[start : start + batch.size])
        for start in range(0, len(rows), batch.size)
    ]
    values = {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
    seeds = len(spec.grid.values("seed"))

    def of(index: int) -> dict[str, np.ndarray]:
        mine = slice(index * seeds, (index + 1) * seeds)
        return {name: value[mine] for name, value in values.items()}

    return {cell: of(index) for index, cell in enumerate(batch.cells)}


def check_spec(spec: SweepSpec) -> None:
    """Raises `ValueError` where a member does not fit its flow, clock or stop.

    Sizes and options are checked for every cell without computing anything; a stop that
    depends on the start (`FinalNorm`, `LogLossBelow`) on each cell's first seed.
    """
    concrete = not isinstance(spec.stop, FinalTime)
    shapes = set()
    for cell in spec.grid.cells():
        spec.family.check(cell.num_classes, cell.width, cell.depth)
        shape = spec.shape_of(cell)
        arguments = tuple(x[0] for x in _arguments(_rows(spec, (cell,))))
        if concrete:
            _check_member(spec, shape, *arguments)
        elif shape not in shapes:
            shapes.add(shape)
            eqx.filter_eval_shape(
                functools.partial(_check_member, spec, shape), *arguments
            )


def _check_member(spec, shape, seed, depth, width, scale) -> None:
    flow, start = spec.family.member(shape, jax.random.key(seed), depth, width, scale)
    check_solve(
        flow, start, stop=spec.stop, clock=spec.clock, saves=spec.saves,
        solver=spec.solver, rtol=spec.rtol, max_steps=spec.max_steps,
    )  # fmt: skip


# Seed, depth, width and scale of a member.
Row = tuple[int, float, float, float]


def _rows(spec: SweepSpec, cells: tuple[Cell, ...]) -> list[Row]:
    return [
        (seed, float(cell.depth), float(cell.width), float(cell.scale))
        for cell in cells
        for seed in spec.grid.values("seed")
    ]


def _arguments(rows: list[Row]) -> tuple[jax.Array, ...]:
    seeds, *others = zip(*rows, strict=True)
    return jnp.asarray(seeds), *(jnp.asarray(values) for values in others)


Program = Callable[[list[Row]], dict[str, np.ndarray]]


class _Slot:
    """A program, or room for one: whoever comes first compiles it, others wait."""

    def __init__(self):
        self.compiling = threading.Lock()
        self.program: Program | None = None


# The latest used last; those used longest ago go.
_programs: collections.OrderedDict[tuple, _Slot] = collections.OrderedDict()
_MOST_PROGRAMS = 64
_filing = threading.Lock()
_integrating = threading.Lock()  # held by programs that must run alone


def _program(spec: SweepSpec, shape: Shape, size: int) -> Program:
    """Returns what integrates up to `size` members, compiled once a process.

    Programs are kept by the value of what they were built from: a spec that arrives
    pickled at a worker is a new object with every cell.
    """
    parts = (
        spec.family, spec.stop, spec.clock, spec.solver, spec.rtol, spec.max_steps,
        spec.saves,
    )  # fmt: skip
    key = (shape, size, pickle.dumps(parts), str(jnp.zeros(()).dtype))
    with _filing:
        slot = _programs.setdefault(key, _Slot())
        _programs.move_to_end(key)
        if len(_programs) > _MOST_PROGRAMS:
            _programs.popitem(last=False)
    with slot.compiling:
        if slot.program is None:
            slot.program = _compile(spec, shape, size)
        return slot.program


def _compile(spec: SweepSpec, shape: Shape, size: int) -> Program:
    """Returns the program of a shape.

    Members are made apart from the integration: checks of traced values call back into
    Python, and JAX keeps no program that does in its cache on disk.
    """

    @jax.jit
    @jax.vmap
    def members(seed, depth, width, scale):
        key = jax.random.key(seed)
        return Members(*spec.family.member(shape, key, depth, width, scale))

    def integrate(members: Members, valid: jax.Array) -> Path:
        share = make_share(
            members,
            stop=spec.stop,
            clock=spec.clock,
            saves=spec.saves,
            observe=metrics,
            keep_states=False,
            solver=spec.solver,
            rtol=spec.rtol,
            max_steps=spec.max_steps,
            strategy=Strategy.LANES,
        )
        return share(members, valid)[0]

    def program(rows: list[Row]) -> dict[str, np.ndarray]:
        valid = jnp.asarray(len(rows))
        rows = rows + rows[-1:] * (size - len(rows))
        made = members(*_arguments(rows))
        with alone:
            path = compiled(made, valid)
            values = quantities(path) | late_states(made.flows, path.final)
        return {name: x[: int(valid)] for name, x in values.items()}

    first = _rows(spec, (next(spec.grid.cells()),))[:1] * size
    like = jax.eval_shape(members, *_arguments(first))
    solver = spec.solver or default_solver(like.flows, spec.clock)
    together = may_run_together(solver, jax.default_backend())
    alone = contextlib.nullcontext() if together else _integrating
    options = compiler_options(jax.default_backend())
    compiled = (
        jax.jit(integrate, compiler_options=options)
        .lower(like, jnp.asarray(size))
        .compile()
    )
    return program
