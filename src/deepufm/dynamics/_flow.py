"""Flows: vector fields that return their speed apart, in logarithm.

    flow(y) -> (direction, log_speed),    dy/dt = exp(log_speed)·direction,

with `direction` of ordinary size. Cross-entropy's factor e^{-margin} lives in
`log_speed` alone, so nothing underflows at a loss of 1e-300 or 1e-100000. A clock
(`_clock`) multiplies by dt/ds, also a logarithm, before anything is exponentiated.

At an equilibrium direction = 0 and log_speed = -inf.
"""

import abc
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._types import BoolScalar, Lanes, RealScalar, State


def dead_level(dtype) -> float:
    """Returns the logarithm at and below which a value is zero: about -1e300."""
    return -float(jnp.finfo(dtype).max) * 1e-8


def is_dead(logs: Array) -> Array:
    """Returns which logarithms are those of zero."""
    return logs < 0.5 * dead_level(logs.dtype)  # interpolants of the level round


def scaled(direction: State, log_pace: Lanes) -> State:
    """Returns exp(log_pace)·direction; lanes, if any, are last."""
    factor = bounded_exp(log_pace)

    def by_lanes(leaf):
        ones = (1,) * (leaf.ndim - factor.ndim)
        return factor.reshape(ones + factor.shape) * leaf

    return jax.tree.map(by_lanes, direction)


def bounded_exp(log_pace: Array) -> Array:
    """Returns exp(log_pace), but no infinity.

    What it multiplies may be 0: at rest, where the pace of a clock may be anything, and
    where a mode's own rate has underflowed.
    """
    return jnp.exp(jnp.minimum(log_pace, jnp.log(jnp.finfo(log_pace.dtype).max)))


class Motion(eqx.Module):
    """How a flow moves at one state; what a clock needs to set its pace."""

    direction: State  # dy/dt / exp(log_speed), the structure of the state
    log_speed: RealScalar
    # Logs of what one unit of `direction` brings, `log_speed` left out:
    log_growth: RealScalar  # relative growth of the norm, for `LogNorm`
    log_length: RealScalar  # length of path, for `ArcLength`
    log_activity: RealScalar  # change of the margins, the unit of elapsed time


class AbstractFlow(eqx.Module):
    """An autonomous flow dy/dt = exp(log_speed)·direction.

    A flow defines its direction and log_speed, its norm, the pace at which that norm
    grows and its path gets longer, its loss, and how the size of an error is judged.
    """

    # Whether the norm grows for ever; clocks that count it need this.
    norm_diverges: eqx.AbstractVar[bool]
    # Whether the velocity is continuous. Where it is not, states may slide along a
    # kink, and small steps across it are let through unchecked (`_controller`).
    is_smooth: eqx.AbstractVar[bool]
    # Whether `log_growth` is d log norm/dt itself, so that `LogNorm` reads log norm.
    growth_is_exact: eqx.AbstractClassVar[bool]
    # Whether states are logarithms, so that an entry of -inf, or at `dead_level`, never
    # moves.
    log_state: eqx.AbstractClassVar[bool]
    # Whether `__call__` and `velocity` also take many states at once, lanes last, and
    # then parameters with a lane axis last; `ensemble` maps them otherwise.
    takes_lanes: ClassVar[bool] = False

    @abc.abstractmethod
    def __call__(self, state: State) -> tuple[State, RealScalar]:
        """Returns (direction, log_speed)."""

    def velocity(self, state: State, log_rate: Lanes) -> State:
        """Returns exp(log_rate)·dy/dt, what a clock of time integrates."""
        direction, log_speed = self(state)
        return scaled(direction, log_speed + log_rate)

    @abc.abstractmethod
    def log_norm(self, state: State) -> RealScalar:
        """Returns the natural logarithm of the state's norm."""

    @abc.abstractmethod
    def log_growth(self, state: State, direction: State) -> RealScalar:
        """Returns the log of the relative growth that `direction` brings."""

    @abc.abstractmethod
    def log_length(self, state: State, direction: State) -> RealScalar:
        """Returns the log of the length of path that `direction` brings."""

    @abc.abstractmethod
    def log_activity(self, state: State, direction: State) -> RealScalar:
        """Returns the log of a pace that is never zero while the flow moves.

        State clocks measure elapsed time in it (`_problem`). It should be that of the
        relative growth for small states, so that nothing vanishes with their size, and
        that of the margins for large ones, whose growth sets the time scale.
        """

    @abc.abstractmethod
    def log_loss(self, state: State) -> RealScalar:
        """Returns the natural logarithm of the loss."""

    @abc.abstractmethod
    def relative_error(self, error: State, before: State, after: State) -> RealScalar:
        """Returns the size of `error` relative to the states before and after a step.

        This is what the tolerance of `solve` bounds: the largest error of a log
        singular value in the reduced flow, the largest ratio of Frobenius norms over
        the layers in the matrix flow. Frozen padding counts nowhere.
        """

    def crosses_kink(self, before: State, after: State) -> BoolScalar:
        """Returns whether the velocity jumps between two states.

        Asked only of flows that are not smooth, which must say.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say.")

    @abc.abstractmethod
    def check(self, state: State) -> None:
        """Raises `ValueError` where a concrete `state` does not fit this flow."""

    def motion(self, state: State) -> Motion:
        """Returns direction, log_speed and the two paces at `state`."""
        direction, log_speed = self(state)
        return Motion(
            direction=direction,
            log_speed=log_speed,
            log_growth=self.log_growth(state, direction),
            log_length=self.log_length(state, direction),
            log_activity=self.log_activity(state, direction),
        )
