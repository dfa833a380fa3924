"""`solve`: one flow on one clock to one stop. The only caller of `diffeqsolve`.

The integrated state is (y, x). On state clocks x is the elapsed time in units that keep
it of order one, x = t·norm/(dt/ds), with

    dx/ds = norm + x · d log(norm/(dt/ds))/ds.

t itself overflows, and log t is stiff without need: late, x rests at the ratio of the
norm to the smallest margin while t reaches 10^(10^6). (Without the factor `norm`, x
falls like 1/norm, and implicit methods lose their order on it: 13,000 steps where 100
do.) Where y is a logarithm, entries of -inf are held at 0 inside the solver, which
could not interpolate them, and put back wherever the flow or the user looks.
"""

from collections.abc import Callable
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Bool, Float, PyTree

from .._types import RealScalar, State, Tracer
from ._clock import (
    AbstractClock,
    AbstractStateClock,
    AbstractTimeClock,
    LogNorm,
    LogTime,
)
from ._controller import RelativeController
from ._crossing import FallingCrossing
from ._flow import AbstractFlow
from ._gradient_flow import GradientFlow
from ._path import Outcome, Path, SolveStats
from ._stop import AbstractStop

Observe = Callable[[AbstractFlow, RealScalar, Any], dict[str, Array]]

# An implicit step factors a dense Jacobian: 4000² doubles are 128 MB.
_MAX_IMPLICIT_UNKNOWNS = 4000


class SaveEvery(eqx.Module):
    """Save at every `step` of the clock, up to `capacity` points, start included.

    For stops that no clock reading is known for in advance. Rows that were not reached
    hold NaN; `path.num_saved` counts the others.
    """

    step: float
    capacity: int = eqx.field(static=True)

    def __check_init__(self):
        if not isinstance(self.step, Tracer) and not self.step > 0:
            raise ValueError(f"`SaveEvery` needs a positive step, but has {self.step}.")
        if self.capacity < 1:
            raise ValueError(
                f"`SaveEvery` needs room for at least the start, but has capacity "
                f"{self.capacity}."
            )


class _Problem(eqx.Module):
    """A flow on a clock: the vector field of (y, x), and how to look at it."""

    flow: AbstractFlow
    clock: AbstractClock
    held: Bool[Array, " modes"] | None  # entries of log a that are -inf

    def vector_field(self, reading: Any, inner: tuple, args: None) -> tuple:
        """Returns (dy/ds, dx/ds)."""
        del args
        state, elapsed = self.state(inner), inner[1]
        motion = self.flow.motion(state)
        log_pace = self.clock.log_pace(reading, motion)
        factor = jnp.exp(log_pace)
        velocity = jax.tree.map(lambda v: factor * v, motion.direction)
        if elapsed is None:
            return velocity, None

        def log_unit(state):
            log_norm = self.flow.log_norm(state)
            log_rate = self.clock.log_rate(reading, self.flow.motion(state))
            return log_norm - log_rate, log_norm

        _, drift, log_norm = jax.jvp(log_unit, (state,), (velocity,), has_aux=True)
        return velocity, jnp.exp(log_norm) + elapsed * drift

    def state(self, inner: tuple) -> State:
        """Returns the flow's state."""
        if self.held is None:
            return inner[0]
        return jnp.where(self.held, -jnp.inf, inner[0])

    def log_time(self, reading: RealScalar, inner: tuple | None) -> RealScalar:
        """Returns log t; a time clock needs no state for that."""
        if isinstance(self.clock, AbstractTimeClock):
            return self.clock.log_time(reading)
        assert inner is not None
        started = inner[1] > 0
        log_elapsed = jnp.log(jnp.where(started, inner[1], 1))
        state = self.state(inner)
        log_rate = self.clock.log_rate(reading, self.flow.motion(state))
        log_time = log_elapsed + log_rate - self.flow.log_norm(state)
        return jnp.where(started, log_time, -jnp.inf)

    def relative_error(self, error: tuple, before: tuple, after: tuple) -> RealScalar:
        """Returns the larger of the flow's relative error and that of x."""
        worst = self.flow.relative_error(error[0], before[0], after[0])
        if error[1] is None:
            return worst
        size = jnp.maximum(jnp.abs(before[1]), jnp.abs(after[1]))
        safe = jnp.where(size == 0, 1, size)
        # At the very start x = 0 has no size to be relative to.
        ratio = jnp.where(size == 0, 0, jnp.abs(error[1]) / safe)
        return jnp.maximum(worst, ratio)


def solve(
    flow: AbstractFlow,
    y0: State,
    *,
    stop: AbstractStop,
    clock: AbstractClock | None = None,
    saves: int | SaveEvery = 200,
    observe: Observe | None = None,
    keep_states: bool | None = None,
    solver: diffrax.AbstractSolver | None = None,
    rtol: float | None = None,
    max_steps: int = 100_000,
    adjoint: diffrax.AbstractAdjoint | None = None,
) -> Path:
    """Integrates `flow` from `y0` at time 0 until `stop`.

    **Arguments:**

    - `y0`: the start: log a, (K-1,), for `HadamardFlow`; a for `LogitFlow`; a `DeepUFM`
        for `GradientFlow`.
    - `stop`: `FinalTime`, `FinalNorm` or `LogLossBelow`.
    - `clock`: what the integration steps in; `LogTime()` if `None`. The orbit is the
        same under every clock.
    - `saves`: the number of saved points, equal steps of the clock, where the stop
        fixes the clock's end (`FinalTime` on `PhysicalTime` and `LogTime`, `FinalNorm`
        of a reduced flow on `LogNorm`); otherwise a `SaveEvery`. The first is the
        start.
    - `observe`: `observe(flow, log_time, state) -> dict` of arrays, called at every
        saved point; `ufm.metrics` is the standard one.
    - `keep_states`: whether to keep the states at the saved points; by default for the
        reduced flows only (a state of d = 100, L = 10 takes 0.8 MB).
    - `solver`: a diffrax solver; `default_solver(flow, clock)` if `None`.
    - `rtol`: the largest relative error of a step, as the flow measures it: of any a_i
        in the reduced flow, of any layer's Frobenius norm in the full one. If `None`,
        1e-8 for the reduced flows and 1e-7 for the full one, 1e-5 in float32.
    - `max_steps`: step budget, rejected steps included.
    - `adjoint`: how to differentiate. `None` is diffrax's `RecursiveCheckpointAdjoint`:
        reverse mode (`grad`, `vjp`). `diffrax.ForwardMode()` gives forward mode (`jvp`,
        `jacfwd`), `diffrax.DirectAdjoint()` both, at a higher cost.

    **Returns:** a `Path`. How it ended is `path.outcome`; nothing is raised on failure,
    and the state reached is always there.

    **Raises:** `ValueError`, before anything is compiled, for a start that does not fit
    the flow, a stop that is already behind it, or options that do not fit each other.

    !!! example
        flow = ufm.HadamardFlow(num_classes=16, depth=2)
        path = ufm.solve(flow, jnp.log(a0), stop=ufm.FinalTime(1e10))
    """
    check_solve(
        flow, y0, stop=stop, clock=clock, saves=saves, solver=solver, rtol=rtol,
        max_steps=max_steps,
    )  # fmt: skip
    clock = LogTime() if clock is None else clock
    solver = default_solver(flow, clock) if solver is None else solver
    dtype = jnp.result_type(*jax.tree.leaves(y0))
    rtol = _checked_rtol(rtol, flow, dtype)
    solver = _with_stage_solver(solver, rtol)
    keep_states = flow.log_state if keep_states is None else keep_states
    adjoint = diffrax.RecursiveCheckpointAdjoint() if adjoint is None else adjoint
    return _solve(
        flow, y0, stop, clock, saves, observe, keep_states, solver,
        jnp.asarray(rtol, dtype), max_steps, adjoint,
    )  # fmt: skip


def check_solve(
    flow: AbstractFlow,
    y0: State,
    *,
    stop: AbstractStop,
    clock: AbstractClock | None = None,
    saves: int | SaveEvery = 200,
    solver: diffrax.AbstractSolver | None = None,
    rtol: float | None = None,
    max_steps: int = 100_000,
) -> None:
    """Raises the `ValueError` that `solve` would for these arguments.

    Computes no more than the norm and the loss of the start; traced values are not
    looked at.
    """
    clock = LogTime() if clock is None else clock
    flow.check(y0)
    solver = default_solver(flow, clock) if solver is None else solver
    _check_options(flow, y0, stop, clock, saves, solver, max_steps)
    _checked_rtol(rtol, flow, jnp.result_type(*jax.tree.leaves(y0)))


def default_solver(flow: AbstractFlow, clock: AbstractClock) -> diffrax.AbstractSolver:
    """Returns the solver that `benchmarks/bench_solve.py` found best for this pair.

    - A reduced flow on `LogNorm`: Kvaerno5, implicit, since rates grow like the norm.
        (Below a norm of about 1e3 explicit ones are several times faster.)
    - A reduced flow elsewhere: Dopri8, level with Tsit5 at an error of 1e-4 and ahead
        from 1e-6 on.
    - The full flow: Tsit5. A step's cost there is moving stages of 0.8 MB through
        memory, of which Dopri8 has twice as many: at d = 100 and an error of 1e-6 it
        takes 1.5 (L = 3) to 2 times (L = 10) as long.
    """
    if isinstance(flow, GradientFlow):
        return diffrax.Tsit5()
    if isinstance(clock, LogNorm):
        return diffrax.Kvaerno5()
    return diffrax.Dopri8()


@eqx.filter_jit
def _solve(
    flow, y0, stop, clock, saves, observe, keep_states, solver, rtol, max_steps, adjoint
) -> Path:
    problem, inner = _embed(flow, clock, y0)
    dtype = jnp.result_type(*jax.tree.leaves(y0))
    start = jnp.zeros((), dtype)
    end = stop.final_reading(flow, clock, y0)
    event = None
    if end is None:
        event = _event(problem, stop)
        behind = stop.excess(flow, jnp.asarray(-jnp.inf, dtype), y0) >= 0
        end = jnp.where(behind, 0, clock.horizon)
    end = jnp.maximum(end.astype(dtype), start)
    times = _save_times(saves, end)

    # Time clocks know log t from the reading; nothing else may be wanted of a state.
    needed = keep_states or observe is not None or isinstance(clock, AbstractStateClock)
    saved = diffrax.SubSaveAt(ts=times, fn=_state if needed else _nothing)
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(problem.vector_field),
        solver,
        t0=start,
        t1=end,
        dt0=None,
        y0=inner,
        saveat=diffrax.SaveAt(subs=[saved, diffrax.SubSaveAt(t1=True)]),
        stepsize_controller=RelativeController(
            problem.relative_error, rtol, times, **_pid_coefficients(solver)
        ),
        adjoint=adjoint,
        event=event,
        max_steps=max_steps,
        throw=False,
    )
    outcome = _outcome(solution.result, event is not None, end)
    return _assemble(problem, observe, keep_states, solution, outcome)


def _embed(flow, clock, y0) -> tuple[_Problem, tuple]:
    """Returns the problem and the state its vector field is integrated from."""
    dtype = jnp.result_type(*jax.tree.leaves(y0))
    held, inner = None, y0
    if flow.log_state:
        held = jnp.isneginf(y0)
        inner = jnp.where(held, 0, y0)
    elapsed = jnp.zeros((), dtype) if isinstance(clock, AbstractStateClock) else None
    return _Problem(flow, clock, held), (inner, elapsed)


def _event(problem: _Problem, stop: AbstractStop) -> diffrax.Event:
    def shortfall(t, y, args, **kwargs):
        del args, kwargs
        excess = stop.excess(problem.flow, problem.log_time(t, y), problem.state(y))
        # diffrax wants events in the default type, also of a float32 state.
        return -excess.astype(float)

    return diffrax.Event(shortfall, FallingCrossing(), direction=False)


def _save_times(saves: int | SaveEvery, end: RealScalar) -> Float[Array, " saves"]:
    if isinstance(saves, SaveEvery):
        step = jnp.asarray(saves.step, end.dtype)
        # Points past the end, where there is one, collapse onto it; `_assemble` keeps
        # the first of them.
        return jnp.minimum(step * jnp.arange(saves.capacity, dtype=end.dtype), end)
    # The last point must be the end to the last bit, or it would not be saved.
    fractions = jnp.linspace(0, 1, saves, dtype=end.dtype)
    return jnp.where(fractions < 1, end * fractions, end)


def _state(t, y, args) -> PyTree:
    del t, args
    return y


def _nothing(t, y, args) -> None:
    del t, y, args


def _assemble(problem, observe, keep_states, solution, outcome: Outcome) -> Path:
    """Builds the `Path`; rows that were not reached become NaN.

    `observe` is mapped over the saved states and the last one after the solve, not
    called inside it: it is compiled once, and a batch of solves does not run it for
    all members whenever one of them saves.
    """
    (readings, last_readings), (inners, last_inners) = solution.ts, solution.ys
    saved = jnp.isfinite(readings)
    saved = saved.at[1:].set(saved[1:] & (readings[1:] > readings[:-1]))

    def rows(leaf, last):
        # The last state stands in for rows that were not reached, until masked.
        kept = jnp.where(_as_rows(saved, leaf), leaf, last)
        return jnp.concatenate([kept, last])

    def look(point):
        reading, inner = point
        log_time = problem.log_time(reading, inner)
        if observe is None or inner is None:
            return log_time, {}
        return log_time, observe(problem.flow, log_time, problem.state(inner))

    def mask(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf[:-1]
        return jnp.where(_as_rows(saved, leaf), leaf[:-1], jnp.nan)

    points = None if inners is None else jax.tree.map(rows, inners, last_inners)
    all_readings = rows(readings, last_readings)
    log_times, observed = jax.lax.map(look, (all_readings, points))
    states = jax.vmap(problem.state)(points) if keep_states else None
    return Path(
        reading=mask(all_readings),
        log_time=mask(log_times),
        state=jax.tree.map(mask, states),
        observables=jax.tree.map(mask, observed),
        num_saved=jnp.sum(saved),
        final=problem.state(jax.tree.map(lambda leaf: leaf[-1], last_inners)),
        final_log_time=log_times[-1],
        final_reading=last_readings[-1],
        final_observables=jax.tree.map(lambda leaf: leaf[-1], observed),
        outcome=outcome,
        stats=SolveStats(
            num_steps=solution.stats["num_steps"],
            num_accepted=solution.stats["num_accepted_steps"],
            num_rejected=solution.stats["num_rejected_steps"],
        ),
    )


def _as_rows(saved: Bool[Array, " saves"], leaf: Array) -> Array:
    """Returns `saved` with the leaf's number of dimensions."""
    return saved.reshape(saved.shape + (1,) * (leaf.ndim - 1))


def _outcome(result: diffrax.RESULTS, awaited: bool, end: RealScalar) -> Outcome:
    """Translates diffrax's result; `awaited`: the stop was an event."""
    results = diffrax.RESULTS
    done = Outcome.reached
    if awaited:
        # Success without the event means the horizon, unless the goal held at once.
        done = Outcome.where(end > 0, Outcome.not_met, Outcome.reached)
    outcome = Outcome.where(result == results.successful, done, Outcome.non_finite)
    outcome = Outcome.where(result == results.event_occurred, Outcome.reached, outcome)
    outcome = Outcome.where(
        result == results.max_steps_reached, Outcome.step_budget, outcome
    )
    return Outcome.where(
        result == results.dt_min_reached, Outcome.step_underflow, outcome
    )


def _with_stage_solver(solver: diffrax.AbstractSolver, rtol: float):
    """Gives an implicit solver a root finder that converges at rates of 10^6.

    diffrax's default linearises once a step, and its test of convergence stalls on
    rounding noise where the scale of the unknowns is far above the tolerance. Here the
    stages (of order one: log a and x) are linearised one by one and solved to a
    hundredth of the tolerance, absolute below one and relative above. On K = 16 to
    ‖a‖ = 1e6 this rejects 25 steps of 1,491; the default gave up. A root finder of the
    user's own is left alone.
    """
    implicit = isinstance(solver, diffrax.AbstractImplicitSolver)
    if not implicit or not isinstance(solver.root_finder, diffrax.VeryChord):
        return solver
    # An array, so that another tolerance needs no other program.
    kappa: Any = jnp.asarray(0.01 * rtol)
    finder = optx.Chord(rtol=1.0, atol=1.0, kappa=kappa)
    return eqx.tree_at(lambda s: s.root_finder, solver, finder)


def _pid_coefficients(solver: diffrax.AbstractSolver) -> dict[str, float]:
    """PI control for explicit methods, which run at their stability limit late on."""
    if isinstance(solver, diffrax.AbstractImplicitSolver):
        return {}
    return {"pcoeff": 0.2, "icoeff": 0.4}


def _checked_rtol(rtol: float | None, flow: AbstractFlow, dtype) -> float:
    floor = 10 * float(jnp.finfo(dtype).eps)
    if rtol is None:
        if dtype != jnp.float64:
            return 1e-5
        return 1e-7 if isinstance(flow, GradientFlow) else 1e-8
    if not floor <= rtol < 1:
        raise ValueError(
            f"Argument `rtol` must lie between {floor:.0e} (ten roundings of {dtype}) "
            f"and 1, but is {rtol}. Smaller errors need float64."
        )
    return rtol


def _check_options(flow, y0, stop, clock, saves, solver, max_steps) -> None:
    """Raises `ValueError` for options that do not fit each other."""
    if isinstance(clock, LogNorm) and not flow.norm_diverges:
        raise ValueError(
            "`LogNorm` needs a norm that grows for ever, but this flow has a finite "
            "limit (MSE or weight decay). Use `LogTime`."
        )
    if max_steps < 1:
        raise ValueError(
            f"Argument `max_steps` must be at least 1, but is {max_steps}."
        )
    leaves = jax.tree.leaves(y0)
    unknowns = sum(leaf.size for leaf in leaves)
    implicit = isinstance(solver, diffrax.AbstractImplicitSolver)
    if implicit and unknowns > _MAX_IMPLICIT_UNKNOWNS:
        raise ValueError(
            f"An implicit solver factors a dense Jacobian, at most "
            f"{_MAX_IMPLICIT_UNKNOWNS}², but this flow has {unknowns} unknowns "
            f"({8e-9 * unknowns**2:.0f} GB). Use an explicit solver such as "
            "diffrax.Dopri8(), or a narrower balanced model of the same rank."
        )
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        fixed = stop.final_reading(flow, clock, y0) is not None
    else:
        fixed = _check_ahead(flow, y0, stop, clock)
    if isinstance(saves, int):
        if saves < 2:
            raise ValueError(
                "Argument `saves` counts the start and the end: it must be at least 2, "
                f"but is {saves}."
            )
        if not fixed:
            raise ValueError(
                f"{type(stop).__name__} on {type(clock).__name__} ends at a clock "
                "reading that is not known in advance. Give "
                "`saves=SaveEvery(step, capacity)`, a step of the clock."
            )


def _check_ahead(flow, y0, stop, clock) -> bool:
    """Refuses a stop behind the start; says whether the clock's end is known."""
    end = stop.final_reading(flow, clock, y0)
    if end is not None and not isinstance(end, Tracer) and not end > 0:
        raise ValueError(_BEHIND.format(stop=type(stop).__name__))
    excess = stop.excess(flow, jnp.asarray(-jnp.inf, jax.tree.leaves(y0)[0].dtype), y0)
    if not isinstance(excess, Tracer) and excess >= 0:
        raise ValueError(_BEHIND.format(stop=type(stop).__name__))
    return end is not None


_BEHIND = (
    "The stop lies before the start: {stop} already holds at the initial state. Choose "
    "a later one, or a smaller start."
)
