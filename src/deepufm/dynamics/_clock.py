"""Clocks: changes of time s -> t(s), apart from the flows they pace.

A flow dy/dt = exp(log_speed)·direction runs on a clock as

    dy/ds = exp(log_pace)·direction,    log_pace = log_speed + log(dt/ds).

The clock asks the flow's `Motion` for what it counts and answers with log_pace. A clock
that counts what the flow does needs no log_speed for that: it cancels, and is never
computed as the difference of two logarithms of a million.

*Time clocks* read the flow's time itself, t = t(s). *State clocks* count what the flow
does (path length, growth of the norm); there the elapsed time is integrated along, as
x = t/(dt/ds) in units of 1/norm, which obeys a linear equation (see `_solve`). x is of
ordinary size while t reaches 10^(10^6).
"""

import abc
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp

from .._types import Lanes, RealLike, RealScalar, Tracer
from ._flow import Motion


class AbstractClock(eqx.Module):
    """A change of time s -> t(s), starting at s = t = 0."""

    # A reading no flow gets to: where a solve that waits for an event gives up.
    horizon: eqx.AbstractClassVar[float]

    @abc.abstractmethod
    def log_pace(self, reading: RealScalar, motion: Motion) -> RealScalar:
        """Returns log_speed + log(dt/ds) at reading s and the flow's motion there."""


class AbstractTimeClock(AbstractClock):
    """A clock whose reading is a function of the flow's time alone."""

    @abc.abstractmethod
    def log_rate(self, reading: Lanes) -> Lanes:
        """Returns log(dt/ds) at s."""

    def log_pace(self, reading: RealScalar, motion: Motion) -> RealScalar:
        """Returns log_speed + log(dt/ds)."""
        return motion.log_speed + self.log_rate(reading)

    @abc.abstractmethod
    def reading(self, log_time: RealScalar) -> RealScalar:
        """Returns s from log t."""

    @abc.abstractmethod
    def log_time(self, reading: RealScalar) -> RealScalar:
        """Returns log t from s, -inf at 0."""


class AbstractStateClock(AbstractClock):
    """A clock that counts what the flow does; elapsed time is part of the state."""


class PhysicalTime(AbstractTimeClock):
    """t = s, the papers' own time."""

    horizon: ClassVar[float] = 1e30

    def log_rate(self, reading: Lanes) -> Lanes:
        """Returns 0."""
        return jnp.zeros_like(reading)

    def reading(self, log_time: RealScalar) -> RealScalar:
        """Returns s = t."""
        return jnp.exp(log_time)

    def log_time(self, reading: RealScalar) -> RealScalar:
        """Returns log s."""
        started = reading > 0
        return jnp.where(started, jnp.log(jnp.where(started, reading, 1)), -jnp.inf)


class LogTime(AbstractTimeClock):
    """t = t0·expm1(s), the default: linear in t below `t0`, logarithmic beyond.

    An event at time t is resolved down to about 1e-16·t·log(t/t0). A start so small
    that its escape is sharper (a(0)^p below about 1e-16, such as 1e-30 at L = 4) ends
    in `step_underflow`; `LogNorm` and `ArcLength` follow it.

    **Arguments:** `t0`, the time unit, positive (1 if not given).
    """

    log_t0: RealScalar
    horizon: ClassVar[float] = 1e9

    def __init__(self, t0: RealLike = 1.0):
        if not (isinstance(t0, Tracer) or 0 < t0 < float("inf")):
            raise ValueError(
                f"Argument `t0` of `LogTime` must be positive and finite, but is {t0}."
            )
        self.log_t0 = jnp.log(jnp.asarray(t0, float))

    def log_rate(self, reading: Lanes) -> Lanes:
        """Returns log t0 + s."""
        return self.log_t0.astype(reading.dtype) + reading

    def reading(self, log_time: RealScalar) -> RealScalar:
        """Returns s = log(1 + t/t0)."""
        return jax.nn.softplus(log_time - self.log_t0.astype(log_time.dtype))

    def log_time(self, reading: RealScalar) -> RealScalar:
        """Returns log t0 + log(e^s - 1)."""
        started = reading > 0
        s = jnp.where(started, reading, 1)
        log_time = self.log_t0.astype(reading.dtype) + s + jnp.log(-jnp.expm1(-s))
        return jnp.where(started, log_time, -jnp.inf)


class ArcLength(AbstractStateClock):
    """ds = length of the path: ‖da‖_2 of the reduced flow (P2 E.5), ‖dθ‖_F of the full.

    The flow on this clock is P2's normalised gradient flow.
    """

    horizon: ClassVar[float] = 1e30

    def log_pace(self, reading: RealScalar, motion: Motion) -> RealScalar:
        """Returns minus the log length of the direction."""
        del reading
        return _inverse(motion.log_length)


class LogNorm(AbstractStateClock):
    """ds = d log‖a‖_1 (reduced) or ‖dθ‖_F/‖θ‖_F (full): the approach to the limit.

    D and e^{-margin} cancel, so the limit direction is approached at times like
    10^(10^5). Late, rates grow like the norm: use an implicit solver there.
    """

    horizon: ClassVar[float] = 1e4

    def log_pace(self, reading: RealScalar, motion: Motion) -> RealScalar:
        """Returns minus the log growth that the direction brings."""
        del reading
        return _inverse(motion.log_growth)


def _inverse(log_pace: RealScalar) -> RealScalar:
    """Returns -log_pace; at rest -inf, so that the clock runs and nothing moves."""
    return jnp.where(jnp.isneginf(log_pace), -jnp.inf, -log_pace)
