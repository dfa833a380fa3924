"""When a solve is over: at a time, at a norm, or below a loss."""

import abc
import math

import equinox as eqx
import jax.numpy as jnp

from .._types import RealLike, RealScalar, State, Tracer
from ._clock import AbstractClock, AbstractTimeClock, LogNorm
from ._flow import AbstractFlow


class AbstractStop(eqx.Module):
    """A goal that is reached when `excess` rises through zero."""

    @abc.abstractmethod
    def excess(
        self, flow: AbstractFlow, log_time: RealScalar, state: State
    ) -> RealScalar:
        """Returns a continuous number, negative before the goal and positive after."""

    @abc.abstractmethod
    def final_reading(
        self, flow: AbstractFlow, clock: AbstractClock, state: State
    ) -> RealScalar | None:
        """Returns the clock's reading at the goal, where the start fixes it."""


class FinalTime(AbstractStop):
    """Stop at the flow's own time t.

    **Arguments:** `t` > 0, or `log`, its natural logarithm, for times no float holds.

    **Raises:** `ValueError` unless just one is given, t > 0 and log t is finite.

    !!! example
        ufm.FinalTime(1e10), ufm.FinalTime(log=2.3e6)
    """

    log_time: RealScalar

    def __init__(
        self,
        t: RealLike | None = None,
        *,
        log: RealLike | None = None,
    ):
        if (t is None) == (log is None):
            raise ValueError("Give `FinalTime` either t or log=, the logarithm of t.")
        if t is not None:
            if not isinstance(t, Tracer) and not t > 0:
                raise ValueError(
                    f"The final time must be after the start, t > 0, but is {t}."
                )
            log = jnp.log(jnp.asarray(t, float))
        self.log_time = jnp.asarray(log, float)
        if isinstance(self.log_time, Tracer):
            return
        if not math.isfinite(float(self.log_time)):
            raise ValueError(
                f"The final time must be finite, but is {t}. For times beyond the "
                "largest float give `FinalTime(log=...)`, the natural logarithm."
            )

    def excess(
        self, flow: AbstractFlow, log_time: RealScalar, state: State
    ) -> RealScalar:
        """Returns log t minus its goal."""
        del flow, state
        return log_time - self.log_time.astype(log_time.dtype)

    def final_reading(
        self, flow: AbstractFlow, clock: AbstractClock, state: State
    ) -> RealScalar | None:
        """Returns s(t) on a time clock."""
        del flow, state
        if isinstance(clock, AbstractTimeClock):
            return clock.reading(self.log_time)
        return None


class FinalNorm(AbstractStop):
    """Stop when the flow's norm (‖a‖_1, or ‖θ‖_F) has risen to `norm`.

    **Raises:** `ValueError` unless `norm` is positive and finite.
    """

    log_norm: RealScalar

    def __init__(self, norm: RealLike):
        if not isinstance(norm, Tracer) and not 0 < norm < math.inf:
            raise ValueError(
                f"The final norm must be positive and finite, but is {norm}."
            )
        self.log_norm = jnp.log(jnp.asarray(norm, float))

    def excess(
        self, flow: AbstractFlow, log_time: RealScalar, state: State
    ) -> RealScalar:
        """Returns log norm minus its goal."""
        del log_time
        log_norm = flow.log_norm(state)
        return log_norm - self.log_norm.astype(log_norm.dtype)

    def final_reading(
        self, flow: AbstractFlow, clock: AbstractClock, state: State
    ) -> RealScalar | None:
        """Returns the difference of log norms on `LogNorm` of a reduced flow."""
        if isinstance(clock, LogNorm) and flow.growth_is_exact:
            log_norm = flow.log_norm(state)
            return self.log_norm.astype(log_norm.dtype) - log_norm
        return None


class LogLossBelow(AbstractStop):
    """Stop when the natural logarithm of the loss has fallen to `log_loss`.

    The loss is the flow's own: the sum over examples for `GradientFlow`, that of one
    example for the reduced flows.
    """

    threshold: RealScalar

    def __init__(self, log_loss: RealLike):
        if not isinstance(log_loss, Tracer) and not math.isfinite(log_loss):
            raise ValueError(
                "The log-loss to stop at must be finite (a natural logarithm, such as "
                f"-30 for a loss of 1e-13), but is {log_loss}."
            )
        self.threshold = jnp.asarray(log_loss, float)

    def excess(
        self, flow: AbstractFlow, log_time: RealScalar, state: State
    ) -> RealScalar:
        """Returns the goal minus the log-loss."""
        del log_time
        log_loss = flow.log_loss(state)
        return self.threshold.astype(log_loss.dtype) - log_loss

    def final_reading(
        self, flow: AbstractFlow, clock: AbstractClock, state: State
    ) -> RealScalar | None:
        """Returns `None`: no clock reads the loss."""
        del flow, clock, state
