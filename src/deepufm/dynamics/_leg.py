"""One orbit as one or several legs, each a call of `diffeqsolve`.

A flow that is the same for ever takes one leg, to the stop. One whose parameters switch
takes a leg a phase, in a scan: all phases share one compiled integration, and no step
straddles a switch. A leg after the stop, or after a failure, is empty.
"""

from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from .._types import BoolScalar, RealScalar, State
from ._clock import AbstractClock, AbstractStateClock, AbstractTimeClock
from ._controller import RelativeController
from ._crossing import FallingCrossing
from ._flow import AbstractFlow
from ._path import Outcome, SolveStats
from ._problem import Problem, embed
from ._saves import SaveEvery, save_times
from ._schedule import schedule_of, with_value
from ._stop import AbstractStop


class Point(eqx.Module):
    """Where an orbit is, and when: on the clock and in the flow's own time."""

    state: State
    log_time: RealScalar
    reading: RealScalar


class Method(eqx.Module):
    """How an orbit is integrated, and whether saved states are wanted."""

    stop: AbstractStop
    clock: AbstractClock
    saves: int | SaveEvery
    solver: diffrax.AbstractSolver
    rtol: RealScalar
    max_steps: int = eqx.field(static=True)
    adjoint: diffrax.AbstractAdjoint
    wants_states: bool = eqx.field(static=True)


class Leg(eqx.Module):
    """Saved points, one a row, and how and where the leg ended."""

    written: Bool[Array, "*phases saves"]  # rows that this leg saved
    readings: Float[Array, "*phases saves"]
    log_times: Float[Array, "*phases saves"]
    states: State | None
    last: Point
    outcome: Outcome
    stats: SolveStats
    done: BoolScalar  # the stop was met, and not just a switch


def follow(flow: AbstractFlow, y0: State, method: Method) -> Leg:
    """Integrates `flow` from t = 0 until the stop, through all of its phases."""
    dtype = jnp.result_type(*jax.tree.leaves(y0))
    start = Point(y0, jnp.asarray(-jnp.inf, dtype), jnp.zeros((), dtype))
    final = method.stop.final_reading(flow, method.clock, y0)
    if final is not None:
        final = jnp.maximum(final.astype(dtype), start.reading)
    end = jnp.asarray(method.clock.horizon, dtype) if final is None else final
    times = save_times(method.saves, end)
    schedule = schedule_of(flow)
    if schedule is None:
        return _leg(flow, start, method, final, times)

    def phase(carry, inputs):
        start, over, outcome = carry
        value, log_switch = inputs
        now = with_value(flow, value)
        leg = _leg(now, start, method, final, times, log_switch, over)
        outcome = Outcome.where(over, outcome, leg.outcome)
        over = over | leg.done | (leg.outcome != Outcome.reached)
        return (leg.last, over, outcome), leg

    begin = (start, jnp.asarray(False), Outcome.reached)
    infinity = jnp.full((1,), jnp.inf, schedule.log_switches.dtype)
    switches = jnp.concatenate([schedule.log_switches, infinity])
    inputs = schedule.values, switches.astype(dtype)
    (end, _, outcome), legs = jax.lax.scan(phase, begin, inputs)
    return _joined(legs, end, outcome)


def _leg(
    flow: AbstractFlow,
    start: Point,
    method: Method,
    final: RealScalar | None,
    times: Float[Array, " saves"],
    log_switch: RealScalar | None = None,
    over: BoolScalar | None = None,
) -> Leg:
    """Integrates from `start` to the stop, or to a switch if that comes first.

    **Arguments:** `final` the clock's reading at the stop, where it is known; `times`
    the readings to save at; `log_switch` log t of the switch; `over` nothing is left to
    do.
    """
    clock, reading = method.clock, start.reading
    log_time = None if log_switch is None else start.log_time
    problem, inner = embed(flow, clock, start.state, log_time)
    end = jnp.asarray(clock.horizon, reading.dtype) if final is None else final
    if log_switch is not None and isinstance(clock, AbstractTimeClock):
        end = jnp.minimum(end, clock.reading(log_switch))
        log_switch = None  # the reading says it all
    excess = _excess(problem, method.stop if final is None else None, log_switch)
    if excess is not None:
        end = jnp.where(excess(reading, inner) >= 0, reading, end)
    if over is not None:
        end = jnp.where(over, reading, end)
    end = jnp.maximum(end, reading)

    solution = _integrate(problem, inner, method, reading, end, times, excess)
    assert solution.ts is not None
    assert solution.ys is not None
    (readings, last_readings), (inners, last_inners) = solution.ts, solution.ys
    last_inner = jax.tree.map(lambda leaf: leaf[-1], last_inners)
    last = Point(
        problem.state(last_inner),
        problem.log_time(last_readings[-1], last_inner),
        last_readings[-1],
    )
    # Readings of points beyond the leg were clipped; unwritten ones are infinite.
    written = readings == times
    states, log_times = _rows(problem, readings, inners, last_inners, written)
    outcome = _outcome_of(solution.result, excess is not None, end, clock.horizon)
    moved = end > reading
    met = _met(flow, method, solution.result, last, final, log_switch, moved)
    return Leg(
        written=written,
        readings=readings,
        log_times=log_times,
        states=states if method.wants_states else None,
        last=last,
        outcome=outcome,
        stats=_stats(solution),
        done=met & (outcome == Outcome.reached),
    )


def _integrate(
    problem: Problem,
    inner: tuple,
    method: Method,
    start: RealScalar,
    end: RealScalar,
    times: Float[Array, " saves"],
    excess,
) -> diffrax.Solution:
    """Calls `diffeqsolve` from one reading of the clock to another."""
    # Time clocks know log t from the reading; nothing else may be wanted of a state.
    needed = method.wants_states or isinstance(method.clock, AbstractStateClock)
    here = jnp.clip(times, start, end)
    saved = diffrax.SubSaveAt(ts=here, fn=_state if needed else _nothing)
    return diffrax.diffeqsolve(
        diffrax.ODETerm(problem.vector_field),
        method.solver,
        t0=start,
        t1=end,
        dt0=None,
        y0=inner,
        saveat=diffrax.SaveAt(subs=[saved, diffrax.SubSaveAt(t1=True)]),
        stepsize_controller=RelativeController(
            problem.relative_error,
            method.rtol,
            here,
            excess=excess,
            crosses=None if problem.flow.is_smooth else problem.crosses_kink,
            **_pid_coefficients(method.solver),
        ),
        adjoint=method.adjoint,
        event=None if excess is None else _event(excess),
        max_steps=method.max_steps,
        throw=False,
    )


def _met(flow, method: Method, result, last: Point, final, log_switch, moved):
    """Returns whether a leg that went well ended at the stop, not just at a switch."""
    if final is not None:
        return last.reading >= final
    met = (result == diffrax.RESULTS.event_occurred) | ~moved
    if log_switch is None:
        return met
    ahead = method.stop.excess(flow, last.log_time, last.state)
    return met & (ahead >= last.log_time - log_switch)


def _stats(solution: diffrax.Solution) -> SolveStats:
    return SolveStats(
        num_steps=solution.stats["num_steps"],
        num_accepted=solution.stats["num_accepted_steps"],
        num_rejected=solution.stats["num_rejected_steps"],
    )


def _rows(problem: Problem, readings, inners, last_inners, written):
    """Returns states and log t at the saved points; what is unwritten means nothing."""
    if inners is None:
        return None, jax.vmap(lambda s: problem.log_time(s, None))(readings)

    def row(leaf, last):
        # The last state stands in for rows that were not reached.
        keep = written.reshape(written.shape + (1,) * (leaf.ndim - 1))
        return jnp.where(keep, leaf, last)

    inners = jax.tree.map(row, inners, last_inners)
    log_times = jax.lax.map(lambda p: problem.log_time(*p), (readings, inners))
    return jax.vmap(problem.state)(inners), log_times


def _joined(legs: Leg, end: Point, outcome: Outcome) -> Leg:
    """Returns the legs of all phases as one: every row from the leg that saved it."""
    phase = jnp.argmax(legs.written, axis=0)
    saves = jnp.arange(phase.shape[0])

    def rows(leaves):
        return jax.tree.map(lambda leaf: leaf[phase, saves], leaves)

    stats = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), legs.stats)
    return Leg(
        written=rows(legs.written),
        readings=rows(legs.readings),
        log_times=rows(legs.log_times),
        states=rows(legs.states),
        last=end,
        outcome=outcome,
        stats=stats,
        done=legs.done[-1],
    )


def _excess(problem: Problem, stop: AbstractStop | None, log_switch):
    """Returns what rises through zero at the stop or the switch; `None` for neither."""
    if stop is None and log_switch is None:
        return None

    def excess(t, y):
        log_time = problem.log_time(t, y)
        if stop is None:
            return log_time - log_switch
        to_stop = stop.excess(problem.flow, log_time, problem.state(y))
        if log_switch is None:
            return to_stop
        return jnp.maximum(to_stop, log_time - log_switch)

    return excess


def _event(excess) -> diffrax.Event:
    def shortfall(t, y, args, **kwargs):
        del args, kwargs
        # diffrax wants events in the default type, also of a float32 state.
        return -excess(t, y).astype(float)

    return diffrax.Event(shortfall, FallingCrossing(), direction=False)


def _state(t, y, args) -> PyTree:
    del t, args
    return y


def _nothing(t, y, args) -> None:
    del t, y, args


def _pid_coefficients(solver: diffrax.AbstractSolver) -> dict[str, Any]:
    """PI control for explicit methods, which run at their stability limit late on."""
    if isinstance(solver, diffrax.AbstractImplicitSolver):
        return {}
    return {"pcoeff": 0.2, "icoeff": 0.4}


def _outcome_of(
    result: diffrax.RESULTS, awaited: bool, end: RealScalar, horizon: float
) -> Outcome:
    """Translates diffrax's result; `awaited`: the stop was an event."""
    results = diffrax.RESULTS
    # A traced goal may be NaN or lie before the start; nothing was integrated then.
    done = Outcome.where(jnp.isfinite(end), Outcome.reached, Outcome.non_finite)
    if awaited:
        # Success without the event means the horizon, unless the goal held at once.
        done = Outcome.where(end >= horizon, Outcome.not_met, Outcome.reached)
    outcome = Outcome.where(result == results.successful, done, Outcome.non_finite)
    outcome = Outcome.where(result == results.event_occurred, Outcome.reached, outcome)
    outcome = Outcome.where(
        result == results.max_steps_reached, Outcome.step_budget, outcome
    )
    return Outcome.where(
        result == results.dt_min_reached, Outcome.step_underflow, outcome
    )
