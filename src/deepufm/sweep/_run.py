"""Running a sweep: cells through an executor, each written as soon as it is done."""

import functools
import os
import pickle
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from ..analysis import metrics
from ..dynamics import FinalTime, Path, check_solve, solve
from ._family import Shape
from ._spec import Cell, SweepSpec
from ._store import SweepStore, open_sweep, quantities

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

    **Arguments:**

    - `executor`: any `concurrent.futures.Executor`; one thread a core if `None`.
    - `progress`: called with each finished cell and its number of members.

    **Returns:** the cells that raised; the others are in the store. A member that ends
    badly (step budget, NaN) is no failure: its outcome is stored beside its last state.

    **Raises:** `ValueError`, before anything is compiled, for a spec whose members do
    not fit their flow.
    """
    check_spec(spec)
    failures: list[Failure] = []
    own = None
    if executor is None:
        executor = own = ThreadPoolExecutor(os.cpu_count() or 1)
    cells = {}
    try:
        pending = _longest_first(store.pending())
        cells = {executor.submit(run_cell, spec, cell): cell for cell in pending}
        for future in as_completed(cells):
            cell = cells[future]
            error = future.exception()
            if error is not None:
                failures.append(Failure(cell, error))
                continue
            store.write(cell, future.result())
            if progress is not None:
                progress(cell, len(spec.grid.values("seed")))
    except BaseException:
        # Interrupted: start no other cell, whoever owns the executor.
        for future in cells:
            future.cancel()
        raise
    finally:
        store.close()
        if own is not None:
            # On an interruption, let running cells go and start no other.
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


def run_cell(spec: SweepSpec, cell: Cell) -> dict[str, np.ndarray]:
    """Returns every quantity of a cell's members, seeds along the leading axis."""
    program = _program(spec, spec.shape_of(cell))
    members = [
        quantities(program(*_arguments(cell, seed)))
        for seed in spec.grid.values("seed")
    ]
    return {name: np.stack([m[name] for m in members]) for name in members[0]}


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
        arguments = _arguments(cell, spec.grid.values("seed")[0])
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


def _arguments(cell: Cell, seed: int) -> tuple[jax.Array, ...]:
    values = (float(cell.depth), float(cell.width), float(cell.scale))
    return jnp.asarray(seed), *(jnp.asarray(value) for value in values)


def _longest_first(cells: list[Cell]) -> list[Cell]:
    """Deepest and widest first, so that no long cell is left to the end."""

    def cost(cell):
        return -cell.depth * cell.width**2, -cell.num_classes

    return sorted(cells, key=cost)


_programs: dict[tuple, Callable[..., Path]] = {}
_compiling = threading.Lock()


def _program(spec: SweepSpec, shape: Shape) -> Callable[..., Path]:
    """Returns the compiled solve of one member of this shape, compiled once a process.

    Programs are kept by the value of what they were built from: a spec that arrives
    pickled at a worker is a new object with every cell.
    """
    parts = (
        spec.family, spec.stop, spec.clock, spec.solver, spec.rtol, spec.max_steps,
        spec.saves,
    )  # fmt: skip
    key = (shape, pickle.dumps(parts), str(jnp.zeros(()).dtype))
    with _compiling:
        if key not in _programs:
            _programs[key] = _compile(spec, shape)
        return _programs[key]


def _compile(spec: SweepSpec, shape: Shape) -> Callable[..., Path]:
    def program(seed, depth, width, scale):
        key = jax.random.key(seed)
        flow, start = spec.family.member(shape, key, depth, width, scale)
        return solve(
            flow,
            start,
            stop=spec.stop,
            clock=spec.clock,
            saves=spec.saves,
            observe=metrics,
            keep_states=False,
            solver=spec.solver,
            rtol=spec.rtol,
            max_steps=spec.max_steps,
        )

    first = next(iter(spec.grid.cells()))
    arguments = _arguments(first, spec.grid.values("seed")[0])
    return eqx.filter_jit(program).lower(*arguments).compile()
