"""What one leg of an orbit integrates, how, and how far.

Shared by the two that integrate: `_leg`, through `diffeqsolve`, and `_stepper`, step by
step.
"""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._types import BoolScalar, RealScalar, State
from ._clock import AbstractClock, AbstractTimeClock
from ._controller import RelativeController
from ._flow import AbstractFlow
from ._path import Outcome
from ._problem import Problem, embed
from ._saves import Saves
from ._stop import AbstractStop


class Point(eqx.Module):
    """Where an orbit is, and when: on the clock and in the flow's own time."""

    state: State
    log_time: RealScalar
    reading: RealScalar


def at_start(y0: State) -> Point:
    """Returns `y0` at t = 0."""
    dtype = jnp.result_type(*jax.tree.leaves(y0))
    return Point(y0, jnp.asarray(-jnp.inf, dtype), jnp.zeros((), dtype))


class Method(eqx.Module):
    """How an orbit is integrated, and whether saved states are wanted."""

    stop: AbstractStop
    clock: AbstractClock
    saves: Saves | None
    solver: diffrax.AbstractSolver
    rtol: RealScalar
    max_steps: int = eqx.field(static=True)
    adjoint: diffrax.AbstractAdjoint
    wants_states: bool = eqx.field(static=True)


class Segment(eqx.Module):
    """What one leg integrates, and how far."""

    problem: Problem
    start: RealScalar  # clock readings
    end: RealScalar  # at the latest: the horizon, where the stop is an event
    final: RealScalar | None  # at the stop, where it is known
    stop: AbstractStop | None  # the stop, where it is not
    log_switch: RealScalar | None  # log t of a switch that no reading is known for

    @property
    def awaits_event(self) -> bool:
        """Whether the leg may end in between, where `excess` rises through zero."""
        return self.stop is not None or self.log_switch is not None

    @property
    def moves(self) -> BoolScalar:
        """Whether there is anything to integrate."""
        return self.end > self.start

    def excess(self, reading: RealScalar, inner: tuple) -> RealScalar:
        """Returns what rises through zero at the stop or the switch."""
        log_time = self.problem.log_time(reading, inner)
        to_switch = None if self.log_switch is None else log_time - self.log_switch
        if self.stop is None:
            assert to_switch is not None
            return to_switch
        state = self.problem.state(inner)
        to_stop = self.stop.excess(self.problem.flow, log_time, state)
        return to_stop if to_switch is None else jnp.maximum(to_stop, to_switch)

    def done(self, stop: AbstractStop, result, last: Point) -> BoolScalar:
        """Returns whether a leg that went well met the stop, not just a switch."""
        if self.final is not None:
            return last.reading >= self.final
        met = (result == diffrax.RESULTS.event_occurred) | ~self.moves
        if self.log_switch is None:
            return met
        ahead = stop.excess(self.problem.flow, last.log_time, last.state)
        return met & (ahead >= last.log_time - self.log_switch)

    def outcome(self, result: diffrax.RESULTS) -> Outcome:
        """Translates diffrax's result."""
        results = diffrax.RESULTS
        # A traced goal may be NaN or lie before the start; nothing was integrated then.
        okay = jnp.isfinite(self.end)
        done = Outcome.where(okay, Outcome.reached, Outcome.non_finite)
        if self.awaits_event:
            # Success without the event means the horizon, unless the goal held at once.
            beyond = self.end >= self.problem.clock.horizon
            done = Outcome.where(beyond, Outcome.not_met, Outcome.reached)
        outcome = Outcome.where(result == results.successful, done, Outcome.non_finite)
        for ours, theirs in (
            (Outcome.reached, results.event_occurred),
            (Outcome.step_budget, results.max_steps_reached),
            (Outcome.step_underflow, results.dt_min_reached),
        ):
            outcome = Outcome.where(result == theirs, ours, outcome)
        return outcome


def plan(
    flow: AbstractFlow,
    start: Point,
    method: Method,
    final: RealScalar | None,
    log_switch: RealScalar | None = None,
    over: BoolScalar | None = None,
) -> tuple[Segment, tuple]:
    """Returns the leg from `start` to the stop, or to a switch, and its first state.

    **Arguments:** `final` the clock's reading at the stop, where it is known;
    `log_switch` log t of the switch; `over` nothing is left to do.
    """
    clock, reading = method.clock, start.reading
    log_time = None if log_switch is None else start.log_time
    problem, inner = embed(flow, clock, start.state, log_time)
    end = jnp.asarray(clock.horizon, reading.dtype) if final is None else final
    if log_switch is not None and isinstance(clock, AbstractTimeClock):
        end = jnp.minimum(end, clock.reading(log_switch))
        log_switch = None  # the reading says it all
    stop = method.stop if final is None else None
    segment = Segment(problem, reading, end, final, stop, log_switch)
    if segment.awaits_event:
        end = jnp.where(segment.excess(reading, inner) >= 0, reading, end)
    if over is not None:
        end = jnp.where(over, reading, end)
    end = jnp.maximum(end, reading)
    return Segment(problem, reading, end, final, stop, log_switch), inner


def final_reading(flow: AbstractFlow, y0: State, method: Method) -> RealScalar | None:
    """Returns the clock's reading at the stop, `None` where it is not known."""
    final = method.stop.final_reading(flow, method.clock, y0)
    if final is None:
        return None
    return jnp.maximum(final.astype(jnp.result_type(*jax.tree.leaves(y0))), 0)


def controller(
    segment: Segment, method: Method, landings: Float[Array, " landings"]
) -> RelativeController:
    """Returns what chooses the steps of a leg, which end on `landings`."""
    problem = segment.problem
    return RelativeController(
        problem.relative_error,
        method.rtol,
        landings,
        excess=segment.excess if segment.awaits_event else None,
        crosses=None if problem.flow.is_smooth else problem.crosses_kink,
    )
