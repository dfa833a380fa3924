"""A flow on a clock, as the solver sees it.

The integrated state is (y, x). On state clocks x is the elapsed time in the flow's own
unit, x = t·v with v its activity (`AbstractFlow.log_activity`), so that

    dx/ds = v·dt/ds + x · d log v/ds.

t itself overflows, and log t is stiff without need. x is of order one throughout: v is
the relative growth of a small state, of any size, and the growth of the margins of a
large one, where x comes to rest while t reaches 10^(10^6). (In units of dt/ds x falls
like 1/norm late, and implicit methods lose their order on it: 13,000 steps where 200
do; in units of (dt/ds)/norm it vanishes with a small state on `ArcLength`.)

Where y is a logarithm, entries of -inf are finite inside the solver, which could not
interpolate them: at `dead_level`, which flows of logarithms take for the same.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .._types import BoolScalar, RealScalar, State
from ._clock import AbstractClock, AbstractStateClock, AbstractTimeClock
from ._flow import AbstractFlow, dead_level, is_dead, scaled


class Problem(eqx.Module):
    """A flow on a clock: the vector field of (y, x), and how to look at it."""

    flow: AbstractFlow
    clock: AbstractClock

    def vector_field(self, reading: Any, inner: tuple, args: None) -> tuple:
        """Returns (dy/ds, dx/ds)."""
        del args
        state, elapsed = inner
        if isinstance(self.clock, AbstractTimeClock):
            return self.flow.velocity(state, self.clock.log_rate(reading)), None

        motion = self.flow.motion(state)
        log_pace = self.clock.log_pace(reading, motion)
        velocity = scaled(motion.direction, log_pace)
        _, drift = jax.jvp(self.log_unit, (state,), (velocity,))
        return velocity, jnp.exp(motion.log_activity + log_pace) + elapsed * drift

    def log_unit(self, state: State) -> RealScalar:
        """Returns log v, the flow's activity in its own time: x = t·v."""
        motion = self.flow.motion(state)
        return motion.log_speed + motion.log_activity

    def state(self, inner: tuple) -> State:
        """Returns the flow's state."""
        if not self.flow.log_state:
            return inner[0]
        return jnp.where(is_dead(inner[0]), -jnp.inf, inner[0])

    def log_time(self, reading: RealScalar, inner: tuple | None) -> RealScalar:
        """Returns log t; a time clock needs no state for that."""
        if isinstance(self.clock, AbstractTimeClock):
            return self.clock.log_time(reading)
        assert inner is not None
        started = inner[1] > 0
        log_elapsed = jnp.log(jnp.where(started, inner[1], 1))
        log_time = log_elapsed - self.log_unit(self.state(inner))
        return jnp.where(started, log_time, -jnp.inf)

    def crosses_kink(self, before: tuple, after: tuple) -> BoolScalar:
        """Returns whether the velocity jumps between two states."""
        return self.flow.crosses_kink(self.state(before), self.state(after))

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


def embed(flow, clock, state, log_time=None) -> tuple[Problem, tuple]:
    """Returns the problem and what its vector field is integrated from.

    **Arguments:** `log_time`, log t at `state`; the start, t = 0, if `None`.
    """
    dtype = jnp.result_type(*jax.tree.leaves(state))
    inner = jnp.maximum(state, dead_level(dtype)) if flow.log_state else state
    problem = Problem(flow, clock)
    if not isinstance(clock, AbstractStateClock):
        return problem, (inner, None)
    elapsed = jnp.zeros((), dtype)
    if log_time is not None:
        elapsed = jnp.exp(log_time + problem.log_unit(state))
    return problem, (inner, elapsed)
