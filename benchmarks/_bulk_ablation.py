"""What single decisions in `ensemble` are worth: each undone alone, at equal error."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import jax.numpy as jnp
import numpy as np
from _bulk import Contender, Done, Problem, draw, reference
from _bulk_hosts import Processes
from _bulk_peers import SOLVERS, bulk, cores
from _harness import number, show, time_of

_compiling = importlib.import_module("deepufm.ensemble._compiling")
_controller = importlib.import_module("deepufm.dynamics._controller")
_ensemble = importlib.import_module("deepufm.ensemble._ensemble")

TIME = 1e10


def pi_control(ratio, keep, step, last, error_order, *, smooth):
    """Chooses steps by PI control, p = 0.2 and i = 0.4, as diffrax's does."""
    del smooth
    regular = (ratio > 0) & jnp.isfinite(ratio)
    log_ratio = jnp.log(jnp.where(regular, ratio, 1))
    factor = 0.9 * jnp.exp((0.2 * last.log_ratio - 0.6 * log_ratio) / error_order)
    factor = jnp.where(regular, factor, jnp.where(keep, 10, 0.2))
    factor = jnp.clip(factor, jnp.where(keep, 1, 0.2), jnp.where(keep, 10, 0.9))
    kept = jnp.where(keep, log_ratio, last.log_ratio)
    return step * factor, type(last)(step, kept, ~keep)


@contextmanager
def undone(decision: str) -> Iterator[None]:
    """Takes a decision back."""
    for_lanes = _ensemble.for_lanes
    patches = {
        "as it is": [],
        "PI control": [(_controller, "_next_step", pi_control)],
        "a loop over stages": [
            (_ensemble, "for_lanes", lambda method, _: for_lanes(method, False))
        ],
        "XLA's own options": [(_compiling, "_on_cpu", _compiling._elsewhere)],
    }
    patches["all three"] = [patch for several in patches.values() for patch in several]
    patchers = [mock.patch.object(*patch) for patch in patches[decision]]
    for patcher in patchers:
        patcher.start()
    try:
        yield
    finally:
        for patcher in patchers:
            patcher.stop()


DECISIONS = (
    "as it is", "PI control", "a loop over stages", "XLA's own options", "all three",
)  # fmt: skip


def contender(solver: str, place: int, most: int) -> Contender:
    """Returns `ensemble` without a decision."""
    decision = DECISIONS[place]

    def run(members, time, tolerance):
        with undone(decision):
            # The step budget only keeps apart what is compiled.
            path = bulk(
                members, time, tolerance, solver=SOLVERS[solver],
                max_steps=100_000 + place,
            )  # fmt: skip
        return Done(path.final, np.mean(path.stats.num_steps))

    return Contender(decision, "ours", run, most)


def ablation(count: int = 20_000) -> list[dict]:
    """Runs (ablation)."""
    known = 200
    processes = Processes(cores())
    members = draw(count, 16)
    exact = reference(members.first(known), TIME, processes)
    processes.close()
    problem = Problem(members, TIME, exact)
    every = []
    for solver, target in (("Dopri5", 1e-4), ("Dopri8", 1e-4), ("Dopri8", 1e-6)):
        field = [contender(solver, place, count) for place in range(len(DECISIONS))]
        runs = []
        for one in field:
            # Errors are kept by name, and names are those of other solvers, too.
            own = Problem(members, TIME, exact)
            tolerance = own.loosest(one, target, count)
            assert tolerance is not None
            runs.append((one, tolerance))
        rows = problem.race(runs, count, 20.0, 3)
        for row in rows:
            row |= {"solver": solver, "target": target}
            row["step_cpu_s"] = row["cpu_s"] / row["steps"]
            row["ratio"] = row["cpu_s"] / rows[0]["cpu_s"]
        show(
            f"(ablation) {solver}, error {target:.0e}, {count:,} members to "
            f"t = {TIME:.0e}",
            _COLUMNS, rows,
        )  # fmt: skip
        every += rows
    return every


_COLUMNS = {
    "without": lambda row: row["contender"],
    "tolerance": number("tolerance", ".1e"),
    "error": number("error", ".1e"),
    "steps": number("steps", ".1f"),
    "min, member": time_of("min_s"),
    "cpu, member": time_of("cpu_s"),
    "cpu, step": time_of("step_cpu_s"),
    "cpu ratio": number("ratio", ".2f"),
}
