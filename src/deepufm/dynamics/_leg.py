"""One orbit as one or several legs, each a call of `diffeqsolve`.

A flow that is the same for ever takes one leg, to the stop. One whose parameters switch
takes a leg a phase, in a scan: all phases share one compiled integration, and no step
straddles a switch. A leg after the stop, or after a failure, is empty.
"""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from .._types import BoolScalar, RealScalar, State
from ._clock import AbstractStateClock
from ._crossing import FallingCrossing
from ._flow import AbstractFlow
from ._path import Outcome, SolveStats
from ._problem import Problem
from ._saves import save_times
from ._schedule import schedule_of, with_value
from ._segment import (
    Method,
    Point,
    Segment,
    at_start,
    controller,
    final_reading,
    plan,
)


class Leg(eqx.Module):
    """Saved points, one a row, and how and where the leg ended."""

    written: Bool[Array, "*phases saves"]  # rows that this leg saved
    readings: Float[Array, "*phases saves"]
    log_times: Float[Array, "*phases saves"]
    states: State | None
    last: Point
    outcome: Outcome
    stats: SolveStats
    done: Bool[Array, "*phases"]  # the stop was met, and not just a switch


def follow(flow: AbstractFlow, y0: State, method: Method) -> Leg:
    """Integrates `flow` from t = 0 until the stop, through all of its phases."""
    dtype = jnp.result_type(*jax.tree.leaves(y0))
    start = at_start(y0)
    final = final_reading(flow, y0, method)
    end = jnp.asarray(method.clock.horizon, dtype) if final is None else final
    times = save_times(method.saves, end)
    schedule = schedule_of(flow)
    if schedule is None:
        return one_leg(flow, start, method, final, times)

    def phase(carry, inputs):
        start, over, outcome = carry
        value, log_switch = inputs
        now = with_value(flow, value)
        leg = one_leg(now, start, method, final, times, log_switch, over)
        outcome = Outcome.where(over, outcome, leg.outcome)
        over = over | leg.done | (leg.outcome != Outcome.reached)
        return (leg.last, over, outcome), leg

    begin = (start, jnp.asarray(False), Outcome.reached)
    inputs = schedule.values, schedule.log_ends.astype(dtype)
    (end, _, outcome), legs = jax.lax.scan(phase, begin, inputs)
    return _joined(legs, end, outcome)


def one_leg(
    flow: AbstractFlow,
    start: Point,
    method: Method,
    final: RealScalar | None,
    times: Float[Array, " saves"],
    log_switch: RealScalar | None = None,
    over: BoolScalar | None = None,
) -> Leg:
    """Integrates a leg, which `plan` explains, and saves it at the readings `times`."""
    segment, inner = plan(flow, start, method, final, log_switch, over)
    problem = segment.problem
    solution = _integrate(segment, inner, method, times)
    assert solution.ts is not None
    assert solution.ys is not None
    (*readings, last_readings), (*inners, last_inners) = solution.ts, solution.ys
    readings, inners = (readings[0], inners[0]) if readings else (times, None)
    last_inner = jax.tree.map(lambda leaf: leaf[-1], last_inners)
    last = Point(
        problem.state(last_inner),
        problem.log_time(last_readings[-1], last_inner),
        last_readings[-1],
    )
    # Readings of points beyond the leg were clipped; unwritten ones are infinite.
    written = readings == times
    states, log_times = _rows(problem, readings, inners, last_inners, written)
    outcome = segment.outcome(solution.result)
    done = segment.done(method.stop, solution.result, last)
    return Leg(
        written=written,
        readings=readings,
        log_times=log_times,
        states=states if method.wants_states else None,
        last=last,
        outcome=outcome,
        stats=_stats(solution),
        done=done & (outcome == Outcome.reached),
    )


def _integrate(
    segment: Segment, inner: tuple, method: Method, times: Float[Array, " saves"]
) -> diffrax.Solution:
    """Calls `diffeqsolve` from one reading of the clock to another."""
    # Time clocks know log t from the reading; nothing else may be wanted of a state.
    needed = method.wants_states or isinstance(method.clock, AbstractStateClock)
    here = jnp.clip(times, segment.start, segment.end)
    saved = []
    if times.shape[0]:
        saved = [diffrax.SubSaveAt(ts=here, fn=_state if needed else _nothing)]
    return diffrax.diffeqsolve(
        diffrax.ODETerm(segment.problem.vector_field),
        method.solver,
        t0=segment.start,
        t1=segment.end,
        dt0=None,
        y0=inner,
        saveat=diffrax.SaveAt(subs=[*saved, diffrax.SubSaveAt(t1=True)]),
        stepsize_controller=controller(segment, method, here),
        adjoint=method.adjoint,
        event=_event(segment.excess) if segment.awaits_event else None,
        max_steps=method.max_steps,
        throw=False,
    )


def _stats(solution: diffrax.Solution) -> SolveStats:
    return SolveStats(
        num_steps=solution.stats["num_steps"],
        num_accepted=solution.stats["num_accepted_steps"],
        num_rejected=solution.stats["num_rejected_steps"],
    )


def _rows(problem: Problem, readings, inners, last_inners, written):
    """Returns states and log t at the saved points; what is unwritten means nothing."""
    if not readings.shape[0]:
        return None, readings
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
