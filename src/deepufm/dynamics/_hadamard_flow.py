"""The reduced flow of the K-1 logit singular values (P1 eq. 6, P2 eq. 9).

With margins m = Psi a, b = Psi exp(-m) and D = 1 + sum exp(-m),

    d log a_i/dt = (b_i/D) a_i^p,   p = (L-1)/(L+1),   state log a,

in the papers' absorbed units: for n examples a class, a and t of the matrix flow are
brought to these by `scale_map`. The smallest margin m_0 is factored out,

    b = exp(-m_0)·Psi e,   e = exp(m_0 - m),   D = 1 + exp(-m_0)·sum e,

and Psi v is a sum of non-negative terms, so every rate keeps full relative accuracy.
Three exponentials a mode (a, e and a^p), one more for D, and no logarithm.

The rates are written for one state, (K-1,), and for many, (K-1, lanes), alike: reduced
over the first axis, which stays. `vmap` would put the lanes first wherever a scalar
meets a vector, and back: 150 ns a lane and call at K = 16 against 119.
"""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._types import LaneRow, Lanes, ModeLanes, Modes, RealLike, RealScalar, Tracer
from ..geometry import (
    log_frobenius_norm,
    psi_and_sum,
    psi_lanes,
    psi_matrix,
    psi_matvec,
)
from ..models import check_modes, log_softplus
from ._flow import AbstractFlow, bounded_exp, dead_level, is_dead


class HadamardFlow(AbstractFlow):
    """The reduced flow of a deep UFM under Hadamard initialisation (P1 eq. 6).

    The state is `log_a`, (K-1,), natural logarithms; an entry of -inf is a mode that
    is and stays zero. The norm is the 1-norm of a; the path is measured in a with the
    2-norm (P2 E.5); the loss is log D, that of one example.

    **Arguments:**

    - `num_classes`: K, a power of two.
    - `depth`: L, any real number >= 1 or inf; may be traced.

    **Raises:** `ValueError` for K not a power of two or a depth below 1.

    !!! example
        flow = ufm.HadamardFlow(num_classes=16, depth=2)
        direction, log_speed = flow(jnp.log(a))
    """

    num_classes: int = eqx.field(static=True)
    depth: RealScalar
    norm_diverges: ClassVar[bool] = True
    is_smooth: ClassVar[bool] = True
    growth_is_exact: ClassVar[bool] = True
    log_state: ClassVar[bool] = True
    takes_lanes: ClassVar[bool] = True

    def __init__(self, num_classes: int, depth: RealLike):
        check_num_classes(num_classes)
        self.num_classes = num_classes
        self.depth = checked_depth(depth)

    def __call__(self, state: ModeLanes) -> tuple[ModeLanes, Lanes]:
        """Returns (d log a/dt / exp(log_speed), log_speed), lanes last if any."""
        # Finite, since p·(-inf) at p = 0 is NaN; a NaN stays one.
        log_a = jnp.maximum(state, dead_level(state.dtype))
        largest = jnp.max(log_a, axis=0, keepdims=True)
        power = self.power(state.dtype)[None]
        log_speed, b, partition = scaled_rates(jnp.exp(log_a))
        # At p = 0 a dead mode would grow.
        direction = b / partition * jnp.exp(power * (log_a - largest))
        direction = jnp.where(is_dead(log_a), 0, direction)
        log_speed = log_speed + power * largest
        return direction, jnp.where(is_dead(largest), -jnp.inf, log_speed)[0]

    def velocity(self, state: ModeLanes, log_rate: Lanes) -> ModeLanes:
        """Returns exp(log_rate)·d log a/dt; no maximum and no second scale."""
        log_a = jnp.maximum(state, dead_level(state.dtype))
        log_scale, b, partition = scaled_rates(jnp.exp(log_a))
        log_factor = self.power(state.dtype)[None] * log_a + (log_scale + log_rate)
        velocity = b * (1 / partition) * bounded_exp(log_factor)
        return jnp.where(is_dead(log_a), 0, velocity)

    def power(self, dtype=None) -> Lanes:
        """Returns p = (L-1)/(L+1), 1 at infinite depth."""
        return depth_power(self.depth if dtype is None else self.depth.astype(dtype))

    def log_rates(self, state: Modes) -> Modes:
        """Returns log(d log a_i/dt) for every mode, with no underflow between modes.

        Costs K² exponentials: a mode whose rate is e^{-1000} of the fastest has
        direction 0 in `__call__`, and its true logarithm here. -inf for a dead mode.
        """
        alive = ~is_dead(state)
        log_b, log_partition = _log_b(jnp.where(alive, jnp.exp(state), 0))
        power = self.power(state.dtype)
        rates = log_b - log_partition + power * jnp.where(alive, state, 0)
        return jnp.where(alive, rates, -jnp.inf)

    def log_norm(self, state: Modes) -> RealScalar:
        """Returns log of the sum of a."""
        return jax.nn.logsumexp(state)

    def log_growth(self, state: Modes, direction: Modes) -> RealScalar:
        """Returns log of sum_i a-hat_i direction_i, that is d log(sum a)/dt."""
        return log_or_zero(jnp.sum(jax.nn.softmax(state) * direction))

    def log_length(self, state: Modes, direction: Modes) -> RealScalar:
        """Returns log of the 2-norm of da/dt."""
        largest = jnp.max(state)
        reference = jnp.where(is_dead(largest), 0, largest)
        return reference + log_frobenius_norm(jnp.exp(state - reference) * direction)

    def log_activity(self, state: Modes, direction: Modes) -> RealScalar:
        """Returns log of (1 + sum of a)·d log(sum of a)/dt."""
        weight = jax.nn.softplus(self.log_norm(state))
        return self.log_growth(state, direction) + weight

    def log_loss(self, state: Modes) -> RealScalar:
        """Returns log log D: the loss of one example, which the flow descends."""
        return log_loss_of(jnp.exp(state))

    def relative_error(self, error: Modes, before: Modes, after: Modes) -> RealScalar:
        """Returns the largest error of a log singular value, its own relative error."""
        del before, after
        return jnp.max(jnp.abs(error))

    def check(self, state: Modes) -> None:
        """Checks the number of modes and that a(0) is no NaN, infinite or negative."""
        check_count(state, self.num_classes)
        if isinstance(state, Tracer):
            return
        values = np.asarray(state)
        wrong = np.flatnonzero(np.isnan(values) | (values == np.inf))
        if wrong.size:
            raise ValueError(
                "The state of `HadamardFlow` is log a with every a_i finite and at "
                f"least 0, but log a_{int(wrong[0])} is {values[wrong[0]]}. NaN is the "
                "logarithm of a negative a_i: pass log of non-negative values."
            )
        if np.all(values == -np.inf):
            raise ValueError(
                "At least one a_i must be positive: a = 0 is an equilibrium, from "
                "which no mode grows."
            )


def depth_power(depth: Lanes) -> Lanes:
    """Returns p = (L-1)/(L+1), 1 at infinite depth."""
    finite = jnp.isfinite(depth)
    safe = jnp.where(finite, depth, 1)
    return jnp.where(finite, (safe - 1) / (safe + 1), 1)


def scaled_rates(a: ModeLanes) -> tuple[LaneRow, ModeLanes, LaneRow]:
    """Returns (log scale, rates, partition), b/D = exp(first)·second/third.

    The scale is exp(-m_0) for positive margins, and 1 where m_0 < 0 (a of the logit
    flow may have any sign) and D grows like exp(-m_0) as well.
    """
    margins = psi_lanes(a)
    smallest = jnp.min(margins, axis=0, keepdims=True)
    rates, total = psi_and_sum(jnp.exp(smallest - margins))
    positive = smallest > 0
    odds = jnp.exp(jnp.where(positive, -smallest, smallest))
    partition = jnp.where(positive, 1 + odds * total, odds + total)
    return jnp.where(positive, -smallest, 0), rates, partition


def _log_b(a: Modes) -> tuple[Modes, RealScalar]:
    """Returns log b row by row, and log D."""
    margins = psi_matvec(a)
    psi = jnp.asarray(psi_matrix(a.shape[0] + 1), a.dtype)
    log_b = jax.nn.logsumexp(
        jnp.broadcast_to(-margins[None, :], psi.shape), axis=1, b=psi
    )
    return log_b, jax.nn.softplus(jax.nn.logsumexp(-margins))


def log_loss_of(a: Modes) -> RealScalar:
    return log_softplus(jax.nn.logsumexp(-psi_matvec(a)))


def log_or_zero(x: RealScalar) -> RealScalar:
    """Log with -inf, and no infinite derivative, at zero; NaN below."""
    return jnp.where(x == 0, -jnp.inf, jnp.log(jnp.where(x == 0, 1, x)))


def check_num_classes(num_classes: int) -> None:
    if num_classes < 2 or num_classes & (num_classes - 1):
        raise ValueError(
            "Argument `num_classes` must be a power of two, at least 2, for the "
            f"reduced flow, but is {num_classes}. Use GradientFlow for general K."
        )


def checked_depth(depth) -> RealScalar:
    array = jnp.asarray(depth, float)
    if isinstance(array, Tracer):
        return eqx.error_if(array, ~(array >= 1), "`depth` must be at least 1.")
    if not float(array) >= 1:
        raise ValueError(
            f"Argument `depth` must be at least 1 (it may be inf), but is {depth}. "
            "Depth 0, the flow of the logits themselves, is `LogitFlow`."
        )
    return array


def check_count(state, num_classes: int) -> None:
    if getattr(state, "shape", None) != (num_classes - 1,):
        raise ValueError(
            f"The reduced flow of K = {num_classes} classes has K-1 modes: the state "
            f"must have shape ({num_classes - 1},), but has "
            f"{getattr(state, 'shape', type(state).__name__)}."
        )


def log_modes(a: Float[Array, " modes"]) -> Modes:
    """Returns log a, the state of `HadamardFlow`, after checking a (-inf for zeros).

    **Raises:** `ValueError` naming the first entry that is negative or not finite.
    """
    check_modes("a", a)
    positive = a > 0
    return jnp.where(positive, jnp.log(jnp.where(positive, a, 1)), -jnp.inf)
