"""Modes that grow independently, each along a sigmoid of its own.

    d a_i/dt = c a_i^{2L/(L+1)} (s_i - a_i),   state log a,

in two roles: the squared error from balanced layers (P2 section 2; Saxe et al. 2014),
with c = L+1 and s the singular values of Y, in the matrix flow's units; and the
linearised regime of cross-entropy, ‖a‖_1 << 1 (P1 Thm 4.4, P2 Thm 5), with c = s = 1 in
the reduced flow's units. The exact solution is at hand, in closed form for the time to
a value, and by its inversion (closed at L = 1) for the value at a time.
"""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from .._types import Modes, RealLike, RealScalar, Tracer
from ..geometry import log_frobenius_norm
from ..models import ClassSizes
from ._flow import AbstractFlow, is_dead
from ._hadamard_flow import checked_depth, depth_power, log_or_zero
from ._layerwise_flow import mse_targets
from ._sigmoid import log_sigmoid_time, log_sigmoid_value


class SigmoidalFlow(AbstractFlow):
    """d a_i/dt = c a_i^{2L/(L+1)} (s_i - a_i).

    The state is `log_a`, (modes,); -inf is a mode that stays zero. The norm is the
    1-norm of a; the loss is Σ(s_i - a_i)²/2, of all modes together.

    **Arguments:**

    - `depth`: L, any real number >= 1 or inf; may be traced.
    - `target`: s > 0, one number or one a mode.
    - `rate`: c > 0.

    **Raises:** `ValueError` for a depth below 1, or a target or rate that is not
    positive.

    !!! example
        flow = ufm.SigmoidalFlow.mse(num_classes=10, per_class=5, depth=2)
        path = ufm.solve(flow, jnp.full(10, -20.0), stop=ufm.FinalTime(1e5))
    """

    depth: RealScalar
    target: RealScalar | Modes
    rate: RealScalar
    norm_diverges: ClassVar[bool] = False
    is_smooth: ClassVar[bool] = True
    growth_is_exact: ClassVar[bool] = True
    log_state: ClassVar[bool] = True

    def __init__(
        self, depth: RealLike, target: RealLike | Modes = 1.0, rate: RealLike = 1.0
    ):
        self.depth = checked_depth(depth)
        self.target = _positive("target", target)
        self.rate = _positive("rate", rate)

    @classmethod
    def mse(
        cls, num_classes: int, per_class: ClassSizes, depth: RealLike
    ) -> "SigmoidalFlow":
        """Returns the K modes of `MSE` from balanced layers, in the matrix units."""
        depth = checked_depth(depth)
        if not isinstance(depth, Tracer) and not bool(jnp.isfinite(depth)):
            raise ValueError(
                "Argument `depth` must be finite for the squared error, whose modes "
                f"grow at a rate of L+1, but is {depth}."
            )
        return cls(depth, mse_targets(num_classes, per_class), depth + 1)

    @classmethod
    def linearised(cls, depth: RealLike) -> "SigmoidalFlow":
        """Returns cross-entropy near the origin (P1 Thm 4.4), in reduced units.

        Relative to `HadamardFlow` the rates are wrong by O(‖a‖_1²).
        """
        return cls(depth)

    def solution(self, start: Modes, log_time: RealLike) -> Modes:
        """Returns log a at log t, exactly, from log a(0) = `start`.

        **Arguments:** `start` (modes,), below the targets; a dead mode (-inf) stays so;
        `log_time` natural log of t, -inf for the start itself.

        **Returns:** log a, (modes,), NaN for a mode that starts at or above its target.
        An escape is as sharp as (a(0)/s)^p of its time: where that is below 1e-16, no
        log t is fine enough to tell the values on the way up apart.
        """
        power, log_target, log_unit = self._constants(start)
        log_tau = jnp.asarray(log_time, start.dtype) - log_unit
        log_tau = jnp.broadcast_to(log_tau, start.shape)
        dead = jnp.isneginf(start)
        log_y0 = jnp.where(dead, -1, start - log_target)
        log_y = jax.vmap(log_sigmoid_value, in_axes=(0, 0, None))(
            log_tau, log_y0, power
        )
        return jnp.where(dead, -jnp.inf, log_target + log_y)

    def log_time_to(self, start: Modes, end: Modes) -> Modes:
        """Returns log of the time that each mode takes from `start` to `end`.

        **Arguments:** log a, (modes,), with start <= end below the targets.

        **Returns:** natural logarithms, -inf where start = end, NaN out of that order.
        """
        power, log_target, log_unit = self._constants(start)
        log_tau = jax.vmap(log_sigmoid_time, in_axes=(0, 0, None))(
            end - log_target, start - log_target, power
        )
        return log_tau + log_unit

    def log_escape_time(self, start: Modes, fraction: RealLike = 0.5) -> Modes:
        """Returns log of the time that each mode takes to `fraction` of its target.

        To leading order in a(0) it is log(f/(1-f)·s/a(0))/(c s) at L = 1, so that all
        small modes escape at about one time, and a(0)^{-p}/(p c s), p = (L-1)/(L+1),
        deeper, which sets them apart by a power of their size: the rich get richer
        (P1 section 4.3).

        **Arguments:** `start` log a(0), (modes,); `fraction` in (0, 1).

        **Raises:** `ValueError` for another fraction.
        """
        if not isinstance(fraction, Tracer) and not 0 < fraction < 1:
            raise ValueError(
                f"Argument `fraction` must lie between 0 and 1, but is {fraction}."
            )
        end = jnp.log(self.target) + jnp.log(jnp.asarray(fraction, float))
        end = jnp.broadcast_to(end.astype(start.dtype), start.shape)
        return self.log_time_to(start, end)

    def _constants(self, like: Modes) -> tuple[RealScalar, Modes, Modes]:
        """Returns p, log s and the log of the unit of time, 1/(c s^{1+p})."""
        power = depth_power(self.depth.astype(like.dtype))
        log_target = jnp.log(self.target.astype(like.dtype))
        log_target = jnp.broadcast_to(log_target, like.shape)
        log_rate = jnp.log(self.rate.astype(like.dtype))
        return power, log_target, -log_rate - (1 + power) * log_target

    def __call__(self, state: Modes) -> tuple[Modes, RealScalar]:
        """Returns (d log a/dt / exp(log_speed), log_speed)."""
        alive = ~is_dead(state)
        largest = jnp.max(state)
        any_alive = ~is_dead(largest)
        reference = jnp.where(any_alive, largest, 0)
        log_a = jnp.where(alive, state, reference)
        power = depth_power(self.depth.astype(state.dtype))
        error = self.target.astype(state.dtype) - jnp.exp(log_a)
        direction = jnp.where(alive, error * jnp.exp(power * (log_a - reference)), 0)
        log_speed = jnp.log(self.rate.astype(state.dtype)) + power * reference
        return direction, jnp.where(jnp.any(direction != 0), log_speed, -jnp.inf)

    def log_norm(self, state: Modes) -> RealScalar:
        """Returns log of the sum of a."""
        return jax.nn.logsumexp(state)

    def log_growth(self, state: Modes, direction: Modes) -> RealScalar:
        """Returns log of d log(sum a)/dt; NaN while it falls."""
        return log_or_zero(jnp.sum(jax.nn.softmax(state) * direction))

    def log_length(self, state: Modes, direction: Modes) -> RealScalar:
        """Returns log of the 2-norm of da/dt."""
        largest = jnp.max(state)
        reference = jnp.where(is_dead(largest), 0, largest)
        return reference + log_frobenius_norm(jnp.exp(state - reference) * direction)

    def log_activity(self, state: Modes, direction: Modes) -> RealScalar:
        """Returns log of (1 + sum of a)·(path length of log a): a stays finite."""
        return jax.nn.softplus(self.log_norm(state)) + log_frobenius_norm(direction)

    def log_loss(self, state: Modes) -> RealScalar:
        """Returns log of Σ(s_i - a_i)²/2."""
        error = self.target.astype(state.dtype) - jnp.exp(state)
        return 2 * log_frobenius_norm(error) - math.log(2)

    def relative_error(self, error: Modes, before: Modes, after: Modes) -> RealScalar:
        """Returns the largest error of a log singular value, its own relative error."""
        del before, after
        return jnp.max(jnp.abs(error))

    def check(self, state: Modes) -> None:
        """Checks the number of modes and that a(0) is no NaN or infinite."""
        if getattr(state, "ndim", None) != 1:
            raise ValueError(
                "The state of `SigmoidalFlow` is log a, one entry a mode, but has "
                f"shape {getattr(state, 'shape', type(state).__name__)}."
            )
        if self.target.ndim and self.target.shape != state.shape:
            raise ValueError(
                f"The flow has {self.target.shape[0]} targets, but the state "
                f"{state.shape[0]} modes."
            )
        if isinstance(state, Tracer):
            return
        values = np.asarray(state)
        if np.any(np.isnan(values) | (values == np.inf)) or np.all(values == -np.inf):
            raise ValueError(
                "The state of `SigmoidalFlow` is log a, with every a_i finite and at "
                f"least one positive, but is {values}."
            )


def _positive(name: str, value):
    array = jnp.asarray(value, float)
    if isinstance(array, Tracer):
        return array
    if not bool(jnp.all((array > 0) & jnp.isfinite(array))):
        raise ValueError(
            f"Argument `{name}` must be positive and finite, but is {value}."
        )
    return array
