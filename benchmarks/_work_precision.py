"""A problem of `bench_solve.py`: its reference, the runs timed on it, its table."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import scipy.integrate
from _harness import (
    compile_apart,
    duration,
    interleave,
    number,
    seconds,
    show,
    time_of,
)
from _peers import as_model, integrate, pack

import deepufm as ufm

TARGETS = (1e-4, 1e-6, 1e-8)

SCIPY = {
    "SciPy DOP853": scipy.integrate.DOP853,
    "SciPy LSODA": scipy.integrate.LSODA,
    "SciPy Radau": scipy.integrate.Radau,
}
# Compiling anew takes longer than this; the noise of a first call is shorter.
_COMPILED = 0.5


class Problem:
    """One flow, start, clock and stop, its reference, and the rows measured on it."""

    def __init__(self, name, flow, start, clock, stop, near):
        self.name, self.flow, self.start = name, flow, start
        self.clock, self.stop, self.near = clock, stop, near
        self.reference = start
        self.reference_error = float("nan")
        self.rows: list[dict] = []
        self.calls: dict[str, Callable[[], object]] = {}

    def set_reference(self, exact, check) -> None:
        """Takes the reference, and one more that says how good it is."""
        self.reference = exact
        self.reference_error = self.error(check)

    def error(self, state, reference=None) -> float:
        """Returns the error of `state` as the flow measures errors."""
        reference = self.reference if reference is None else reference
        difference = jax.tree.map(jnp.subtract, state, reference)
        error = float(self.flow.relative_error(difference, reference, reference))
        finite = all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(state))
        return error if finite else float("inf")

    def solve(self, solver, rtol: float, *, flow=None, stop=None) -> ufm.Path:
        """Runs `ufm.solve`."""
        return ufm.solve(
            self.flow if flow is None else flow,
            self.start,
            stop=self.stop if stop is None else stop,
            clock=self.clock,
            solver=solver,
            rtol=rtol,
            saves=2,
            keep_states=False,
        )

    def add_solver(self, name: str, solver, rtol: float, rhs_per_step: float) -> None:
        """Runs `solve` once, for compilation and the error, and lines up its timing."""
        call = partial(self.solve, solver, rtol)
        first = seconds(call)
        path = call()
        steps = int(path.stats.num_steps)
        row = {
            "solver": name,
            "rtol": rtol,
            "steps": steps,
            "rejected": int(path.stats.num_rejected),
            "rhs": round(steps * rhs_per_step),
            "error": self.error(path.final),
            "reached": bool(path.outcome == ufm.Outcome.reached),
            "first_s": first,
        }
        self._line_up(row, call)

    def add_scipy(self, name, rates, rtol, first, end, *, relative=False, once=False):
        """Runs a SciPy solver once for its error, and lines up its timing."""
        start = pack(self.start) if relative else np.asarray(self.start)
        call = partial(
            integrate, SCIPY[name], rates, start, end, rtol, first=first,
            relative=relative,
        )  # fmt: skip
        taken: list = []
        spent = seconds(lambda: taken.append(call()))
        state, steps, rhs = taken[0]
        final = as_model(self.start, state) if relative else jnp.asarray(state)
        row = {
            "solver": name,
            "rtol": rtol,
            "steps": steps,
            "rhs": rhs,
            "error": self.error(final),
            "reached": True,
        }
        if once:
            self.rows.append(row | {"min_s": spent, "median_s": spent, "repeats": 1})
        else:
            self._line_up(row, call)

    def add_descent(self, descend, steps: int, rate: float, exact) -> None:
        """Runs gradient descent, with half the `rate` for as long as it diverges.

        `descend(rate, steps)` is a function of the start; `exact(time)` is the flow at
        that time, that is at steps·rate.
        """
        while True:
            compiled, compile_s = compile_apart(descend(rate, steps), self.start)
            error = self.error(compiled(self.start), exact(steps * rate))
            if np.isfinite(error):
                break
            rate /= 2
        row = {
            "solver": f"gradient descent, step {rate:.3g}",
            "steps": steps,
            "rhs": steps,
            "error": error,
            "reached": False,
            "time_reached": steps * rate,
            "compile_s": compile_s,
        }
        self._line_up(row, partial(compiled, self.start))

    def _line_up(self, row: dict, call) -> None:
        self.calls[str(len(self.rows))] = call
        self.rows.append(row)

    def measure(self, budget: float, overhead_of=None) -> None:
        """Times what is lined up, all in turn."""
        calls = dict(self.calls)
        if overhead_of is not None:
            solver, rtol = overhead_of
            calls["overhead"] = partial(self.solve, solver, rtol, stop=self.near)
        times = interleave(calls, budget)
        self.overhead_s = times.get("overhead", {}).get("min_s")
        for i, row in enumerate(self.rows):
            row.update(times.get(str(i), {}))
            if "first_s" in row:
                extra = row.pop("first_s") - row["median_s"]
                row["compile_s"] = extra if extra > _COMPILED else None
            if "time_reached" in row:
                log_end = float(self.stop.log_time)
                log_s = np.log(row["min_s"] / row["time_reached"]) + log_end
                row["log10_extrapolated_s"] = float(log_s / np.log(10))
        self.verdict = {f"{x:.0e}": cheapest(self.rows, x) for x in TARGETS}

    def report(self) -> dict:
        """Prints the table and the verdict; returns all of it."""
        show(self.name, _COLUMNS, self.rows)
        lines = []
        for target, best in self.verdict.items():
            if best is None:
                lines.append(f"no solver reaches {target}")
                continue
            others = f"{best['solver']} ({duration(best['seconds'])})"
            if best["ours"] != best["solver"]:
                others += f", of ours {best['ours']} ({duration(best['ours_seconds'])})"
            lines.append(f"{others} at {target}")
        print("cheapest: " + "; ".join(lines))
        print(
            f"reference good to {self.reference_error:.0e}; "
            f"overhead of a call {duration(self.overhead_s)}"
        )
        return {
            "problem": self.name,
            "reference_error": self.reference_error,
            "overhead_s": self.overhead_s,
            "cheapest": self.verdict,
            "rows": self.rows,
        }


def cheapest(rows: list[dict], target: float) -> dict | None:
    """Returns the solver that takes least time to an error of `target`.

    Between tolerances, log time is interpolated over log error; beyond the tightest
    one a solver does not count, below the loosest one it costs what that costs.
    """
    costs = {}
    for name in dict.fromkeys(row["solver"] for row in rows if row["reached"]):
        runs = [r for r in rows if r["solver"] == name and np.isfinite(r["error"])]
        runs.sort(key=lambda row: -row["error"])
        log_error = [-np.log(max(row["error"], 1e-16)) for row in runs]
        log_time = [np.log(row["min_s"]) for row in runs]
        if runs and -np.log(target) <= log_error[-1]:
            costs[name] = float(np.exp(np.interp(-np.log(target), log_error, log_time)))
    if not costs:
        return None
    best = min(costs, key=costs.__getitem__)
    own = {name: cost for name, cost in costs.items() if name not in SCIPY}
    ours = min(own, key=own.__getitem__, default=None)
    return {
        "solver": best,
        "seconds": costs[best],
        "ours": ours,
        "ours_seconds": None if ours is None else own[ours],
        "all": costs,
    }


def _descent_end(row: dict) -> str:
    log10 = row.get("log10_extrapolated_s")
    return "-" if log10 is None else f"~1e{log10:.1f} s"


_COLUMNS = {
    "solver": lambda row: row["solver"],
    "rtol": number("rtol", ".0e"),
    "steps": number("steps", ","),
    "rejected": number("rejected", ","),
    "rhs": number("rhs", ","),
    "error": number("error", ".1e"),
    "min": time_of("min_s"),
    "median": time_of("median_s"),
    "compile": time_of("compile_s"),
    "got to t": number("time_reached", ".3g"),
    "to the end": _descent_end,
}
