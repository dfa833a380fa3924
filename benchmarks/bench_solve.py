"""Work and precision of `solve`, beside SciPy and gradient descent.

(a) The reduced flow from P1 Figure 4's start, to times up to 1e300, on `LogTime`.
(b) The same on `LogNorm` to a norm of 1e6, where it is stiff: implicit solvers, and
    explicit ones as far as they get.
(c) The matrix flow from entries N(0, 1/d) to t = 1e8 on `LogTime`.

Every row has its error against an independent reference (SciPy's DOP853, or Radau where
the flow is stiff, orders of magnitude tighter): the largest error of a log singular
value in (a) and (b), the largest ‖error‖_F/‖layer‖_F in (c). `reference` is how far two
references differ. `min` and `median` are whole calls of `ufm.solve`, checks and
dispatch included; `overhead` is a call that takes one step. `compile` is apart, and
blank where an earlier row's code was used again.

`rhs` of an explicit solver is steps times stages; that of an implicit one was counted
at one tolerance, and scaled by steps. SciPy's are its own counts, and its steps are
the accepted ones. Gradient descent takes steps of 0.05 on the layers up to a budget,
smaller ones where it diverges: its error is against the flow at the time it got to, and
`to the end` is *extrapolated*, the time that all steps to the final time would take.

    python benchmarks/bench_solve.py [--tiny] [--only a|b|c] [--out FILE.json]
"""

from collections.abc import Iterator, Sequence
from functools import partial

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import scipy.integrate
from _harness import options, write
from _peers import (
    as_model,
    descend_model,
    descend_modes,
    integrate,
    matrix_rates,
    pack,
    reduced_rates,
)
from _work_precision import Problem

import deepufm as ufm

RATE = 0.05
EXPLICIT = {
    "Tsit5": diffrax.Tsit5(),
    "Dopri5": diffrax.Dopri5(),
    "Dopri8": diffrax.Dopri8(),
}
IMPLICIT = {
    "Kvaerno3": diffrax.Kvaerno3(),
    "Kvaerno4": diffrax.Kvaerno4(),
    "Kvaerno5": diffrax.Kvaerno5(),
}


def stages(solver) -> int:
    """Returns the right-hand sides of one step of an explicit method."""
    return solver.tableau.num_stages - bool(solver.tableau.fsal)


class _Counted(ufm.HadamardFlow):
    """The reduced flow, counting its evaluations."""

    def __call__(self, state):
        jax.debug.callback(_tick)
        return super().__call__(state)


_ticks: list[None] = []


def _tick() -> None:
    _ticks.append(None)


def rhs_per_step(problem: Problem, solver, rtol: float) -> float:
    """Counts the right-hand sides of one step of an implicit solver, on average.

    A Jacobian counts as one, its linearisation being shared by all columns. A state
    clock's vector field evaluates the flow twice at one point, which XLA merges.
    """
    flow = _Counted(problem.flow.num_classes, problem.flow.depth)
    _ticks.clear()
    path = problem.solve(solver, rtol, flow=flow)
    jax.block_until_ready(path.final)
    jax.effects_barrier()
    return len(_ticks) / 2 / int(path.stats.num_steps)


def figure_4_start(num_classes: int) -> np.ndarray:
    """Returns log a(0) of P1 Figure 4: uniform entries brought to a 1-norm of 1e-3."""
    a = np.random.default_rng(0).uniform(size=num_classes - 1)
    return np.log(a * (1e-3 / a.sum()))


def reduced_problem(
    num_classes: int, depth: int, time: float, tolerances, solvers, descent_steps
) -> Problem:
    """Lines up (a) for one final time."""
    flow = ufm.HadamardFlow(num_classes=num_classes, depth=float(depth))
    log_a = figure_4_start(num_classes)
    problem = Problem(
        f"(a) reduced flow, K = {num_classes}, L = {depth}, to t = {time:.0e}",
        flow, jnp.asarray(log_a), ufm.LogTime(), ufm.FinalTime(time),
        ufm.FinalTime(1e-13),
    )  # fmt: skip
    rates = reduced_rates(num_classes, depth, log_norm=False)

    def exact(time, tolerance):
        method = scipy.integrate.DOP853
        return jnp.asarray(
            integrate(method, rates, log_a, float(np.log1p(time)), tolerance)[0]
        )

    problem.set_reference(exact(time, 1e-13), exact(time, 1e-12))
    for name in solvers:
        for rtol in tolerances:
            solver = EXPLICIT[name]
            problem.add_solver(name, solver, rtol, stages(solver))
    for name in ("SciPy DOP853", "SciPy LSODA"):
        for rtol in tolerances:
            problem.add_scipy(name, rates, rtol, 0.0, float(np.log1p(time)))
    descend = partial(descend_modes, num_classes, depth)
    exact_at = partial(exact, tolerance=1e-13)
    problem.add_descent(descend, descent_steps, RATE, exact_at)
    return problem


def stiff_problem(
    num_classes: int, depth: int, norm: float, tolerances, implicit, explicit
) -> Problem:
    """Lines up (b) for one final norm."""
    log_a = figure_4_start(num_classes)
    problem = Problem(
        f"(b) reduced flow, K = {num_classes}, L = {depth}, to norm {norm:.0e}",
        ufm.HadamardFlow(num_classes=num_classes, depth=float(depth)),
        jnp.asarray(log_a), ufm.LogNorm(), ufm.FinalNorm(norm),
        ufm.FinalNorm(1e-3 * (1 + 1e-10)),
    )  # fmt: skip
    rates = reduced_rates(num_classes, depth, log_norm=True)
    first, end = float(np.log(1e-3)), float(np.log(norm))
    tight = [
        integrate(method, rates, log_a, end, 1e-12, first=first)[0]
        for method in (scipy.integrate.Radau, scipy.integrate.LSODA)
    ]
    problem.set_reference(jnp.asarray(tight[0]), jnp.asarray(tight[1]))
    for name in implicit:
        count = rhs_per_step(problem, IMPLICIT[name], tolerances[0])
        for rtol in tolerances:
            problem.add_solver(name, IMPLICIT[name], rtol, count)
    for name in explicit:
        for rtol in tolerances:
            problem.add_solver(name, EXPLICIT[name], rtol, stages(EXPLICIT[name]))
    for name in ("SciPy LSODA", "SciPy Radau"):
        for rtol in tolerances:
            problem.add_scipy(name, rates, rtol, first, end)
    return problem


def matrix_problem(
    size: dict, depth: int, time: float, tolerances, peers, descent_steps
) -> Problem:
    """Lines up (c) for one depth; `tolerances` by solver."""
    start = ufm.gaussian(jax.random.key(0), depth=depth, **size)
    flow = ufm.GradientFlow(ufm.CrossEntropy(), per_class=size["per_class"])
    problem = Problem(
        f"(c) matrix flow, K = {size['num_classes']}, n = {size['per_class']}, "
        f"d = {size['width']}, L = {depth}, to t = {time:.0e}",
        flow, start, ufm.LogTime(), ufm.FinalTime(time), ufm.FinalTime(1e-13),
    )  # fmt: skip
    rates = matrix_rates(start)

    def exact(time, tolerance):
        method, end = scipy.integrate.DOP853, float(np.log1p(time))
        result = integrate(method, rates, pack(start), end, tolerance, relative=True)
        return as_model(start, result[0])

    problem.set_reference(exact(time, 1e-12), exact(time, 1e-11))
    for name, ladder in tolerances.items():
        for rtol in ladder:
            solver = EXPLICIT[name]
            problem.add_solver(name, solver, rtol, stages(solver))
    for name in peers:
        for rtol in (1e-4, 1e-6, 1e-8):
            end = float(np.log1p(time))
            problem.add_scipy(name, rates, rtol, 0.0, end, relative=True, once=True)
    exact_at = partial(exact, tolerance=1e-12)
    problem.add_descent(partial(descend_model, flow), descent_steps, RATE, exact_at)
    return problem


Line = tuple[Problem, float, str]  # with its time budget, and whose overhead to show


def tiny_problems() -> Iterator[Line]:
    """Yields one small problem of each flow."""
    yield reduced_problem(4, 2, 1e10, (1e-4, 1e-8), ["Tsit5"], 100), 0.02, "Tsit5"
    size = {"num_classes": 4, "per_class": 2, "width": 6}
    tolerances = {"Tsit5": (1e-4, 1e-8)}
    problem = matrix_problem(size, 2, 1e3, tolerances, ["SciPy LSODA"], 100)
    yield problem, 0.02, "Tsit5"


def reduced_problems() -> Iterator[Line]:
    """Yields the problems (a)."""
    for time in (1e3, 1e10, 1e100, 1e300):
        ladder = (1e-4, 1e-6, 1e-8, 1e-10)
        problem = reduced_problem(16, 2, time, ladder, list(EXPLICIT), 200_000)
        yield problem, 12.0, "Tsit5"


def stiff_problems() -> Iterator[Line]:
    """Yields the problems (b)."""
    for norm in (1e2, 1e4, 1e6):
        ladder = (1e-4, 1e-6, 1e-8)
        explicit = ["Tsit5", "Dopri8"] if norm < 1e6 else []
        problem = stiff_problem(16, 2, norm, ladder, list(IMPLICIT), explicit)
        yield problem, 5.0, "Kvaerno5"


def matrix_problems() -> Iterator[Line]:
    """Yields the problems (c)."""
    ladder = (1e-4, 1e-6, 1e-8)
    ladders = {name: ladder for name in EXPLICIT} | {"Dopri8": (*ladder, 1e-10)}
    size = {"num_classes": 10, "per_class": 5, "width": 100}
    # LSODA holds a dense Jacobian, 5 GB at d = 100: a small d for it.
    small = size | {"width": 20}
    peers = ["SciPy DOP853", "SciPy LSODA"]
    yield matrix_problem(small, 3, 1e8, ladders, peers, 200_000), 5.0, "Tsit5"
    yield matrix_problem(size, 3, 1e8, ladders, peers[:1], 1000), 10.0, "Tsit5"
    yield matrix_problem(size, 10, 1e8, ladders, [], 1000), 20.0, "Tsit5"


_PARTS = {"a": reduced_problems, "b": stiff_problems, "c": matrix_problems}


def main(argv: Sequence[str] | None = None) -> dict:
    """Runs the benchmark and returns what it writes."""
    args = options("Times solve beside its peers.", argv, list(_PARTS))
    parts = [tiny_problems] if args.tiny else list(_PARTS.values())
    if args.only is not None:
        parts = [_PARTS[args.only]]
    problems = []
    for problem, budget, name in (line for part in parts for line in part()):
        rtol = next(row["rtol"] for row in problem.rows if row["solver"] == name)
        problem.measure(budget, ((EXPLICIT | IMPLICIT)[name], rtol))
        problems.append(problem.report())
    return write(args.out, "solve", {"problems": problems})


if __name__ == "__main__":
    main()
