"""The relative growth of every mode, such that differences of it are exact.

With p = (L-1)/(L+1), which is -1 at depth 0 (`LogitFlow`), every reduced flow reads

    f_i = d log a_i/dt = (b_i/D) a_i^p,    b = Psi e^{-m},    m = Psi a.

What makes a Lyapunov function rise or fall are differences f_i - f_j. Near collapse,
and for small norms at L = 1, all f_i are nearly equal, and differences of rounded f_i
are noise. With μ = mean(a), a_i = μ e^{δ_i} = μ (1 + ε_i), and since every row of Psi
sums to K,

    m = μ (K + Psi ε),    b_i = e^{-μK} (K + (Psi η)_i),    η = expm1(-μ Psi ε),

so that f_i is a common factor times 1 + φ_i, where φ is known to rounding errors of its
own size. That form is used where no |μ Psi ε| exceeds 1, the direct one elsewhere.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._types import Modes, RealScalar, Tracer
from ..analysis import log_relative_modes
from ..dynamics import HadamardFlow, LogitFlow
from ..geometry import psi_matvec


class Fitness(eqx.Module):
    """f_i in units of exp(log_speed), its differences, and how far both are rounded.

    `deviation` and `weight` are for differences only: what all their entries have in
    common is left out where it would hide them. A mode that is zero has share 0.
    """

    log_ratios: Modes  # log a less `log_reference`
    log_reference: RealScalar
    margins: Modes  # Psi a
    share: Modes  # a-hat
    f: Modes  # b·factor, not negative, at most of order K
    b: Modes
    factor: Modes  # a^p over its largest
    deviation: Modes  # f_i - f_j = deviation_i - deviation_j
    weight: Modes  # b_i - b_j = Σ_u (Psi_iu - Psi_ju) weight_u
    power: RealScalar  # p
    log_speed: RealScalar
    log_sum: RealScalar  # log(D-1)
    log_speed_over_sum: RealScalar  # log_speed - log_sum, also where both are -1e5
    deviation_error: Modes  # bounds on the absolute rounding errors
    weight_error: Modes

    @property
    def growth(self) -> RealScalar:
        """D log(sum a)/dt in units of exp(log_speed)."""
        return jnp.sum(self.share * self.f)


def fitness(flow: HadamardFlow | LogitFlow, state: Modes) -> Fitness:
    """Returns the `Fitness` at a state: log a for `HadamardFlow`, a for `LogitFlow`."""
    log_ratios, log_reference = logs(flow, state)
    depth_zero = isinstance(flow, LogitFlow)
    power = -jnp.ones((), state.dtype) if depth_zero else flow.power(state.dtype)
    return _fitness(log_ratios, log_reference, power)


def logs(flow: HadamardFlow | LogitFlow, state: Modes) -> tuple[Modes, RealScalar]:
    """Returns log a less a reference, and the reference.

    The state itself and 0 for `HadamardFlow`. For `LogitFlow` log(a/max a), in which
    nearly equal modes keep the differences that log a would round away.

    **Raises:** `ValueError` for another flow, or modes of the logits that are negative
    or zero, from which they grow at once (NaN where they are traced).
    """
    if isinstance(flow, HadamardFlow):
        return state, jnp.zeros((), state.dtype)
    if not isinstance(flow, LogitFlow):
        raise ValueError(
            "Lyapunov functions are of the reduced flows: argument `flow` must be a "
            f"`HadamardFlow` or a `LogitFlow`, but is a {type(flow).__name__}."
        )
    if not isinstance(state, Tracer) and np.any(np.asarray(state) <= 0):
        raise ValueError(
            "Lyapunov functions are of positive modes, but the state of `LogitFlow` "
            f"is {np.asarray(state)}."
        )
    largest = jnp.max(state)
    close = state > largest / 2
    near = jnp.where(close, (state - largest) / largest, 0)
    far = jnp.where(close | (state <= 0), 1, state / largest)
    ratios = jnp.where(close, jnp.log1p(near), jnp.log(far))
    return jnp.where(state <= 0, jnp.nan, ratios), jnp.log(largest)


def _fitness(log_a: Modes, log_reference: RealScalar, power: RealScalar) -> Fitness:
    """Returns the `Fitness` at p = `power`, of log a in two terms."""
    alive = log_a > -jnp.inf
    size = log_a.shape[0]
    largest = jnp.max(log_a)
    spread = jnp.where(alive, log_a - largest, 0)
    delta = jnp.where(alive, log_relative_modes(log_a), 0)
    a = jnp.exp(log_a) * jnp.exp(log_reference)
    # Sums of up to K terms, each relative to the largest |log(a_i/max a)|.
    delta_error = (size + 8) * _eps(a) * jnp.max(jnp.abs(spread))
    epsilon = jnp.where(alive, jnp.expm1(delta), -1)
    scaled = power * delta
    top = jnp.max(jnp.where(alive, scaled, -jnp.inf))
    factor = jnp.where(alive, jnp.exp(scaled - top), 0)
    factor_error = factor * (jnp.abs(power) * delta_error + 4 * _eps(a))
    margins = psi_matvec(a)

    mean = jnp.mean(a)
    bends = mean * psi_matvec(epsilon)
    is_near = jnp.max(jnp.abs(bends)) <= 1
    # The form that is not used must not give infinite derivatives either.
    near = _near(
        mean, epsilon, jnp.where(is_near, bends, 0), scaled, top, factor, factor_error,
        delta_error,
    )  # fmt: skip
    far = _far(margins, factor, factor_error)
    b, weight, deviation, weight_error, deviation_error, log_scale, log_total = (
        jnp.where(is_near, x, y) for x, y in zip(near, far)
    )
    log_mean = log_reference + jax.nn.logsumexp(log_a) - math.log(size)
    log_sum = log_scale + log_total
    log_rest = top + power * log_mean - jax.nn.softplus(log_sum)
    return Fitness(
        log_ratios=log_a,
        log_reference=log_reference,
        margins=margins,
        share=(1 + epsilon) / size,
        f=b * factor,
        b=b,
        factor=factor,
        deviation=jnp.where(alive, deviation, 0),
        weight=weight,
        power=power,
        log_speed=log_scale + log_rest,
        log_sum=log_sum,
        log_speed_over_sum=log_rest - log_total,
        deviation_error=deviation_error,
        weight_error=weight_error,
    )


def _near(mean, epsilon, bends, scaled, top, factor, factor_error, delta_error):
    """B in units of K e^{-μK}: 1 + Psi η/K."""
    size, eps = epsilon.shape[0], _eps(epsilon)
    num_classes = size + 1
    weight = jnp.expm1(-bends) / num_classes
    bent = psi_matvec(weight)
    b = 1 + bent
    shrunk = jnp.exp(-top)
    # e^{pδ-top} - e^{-top}; the second form where e^{pδ} might overflow.
    small = scaled < 1
    lifted = jnp.where(
        small,
        jnp.expm1(jnp.where(small, scaled, 0)) * shrunk,
        factor - shrunk,
    )
    deviation = bent * factor + lifted

    roundings = 2 * num_classes * eps
    epsilon_error = jnp.exp(1.0) * delta_error * (1 + epsilon) + 2 * eps * jnp.abs(
        epsilon
    )
    bends_error = mean * psi_matvec(epsilon_error + roundings * jnp.abs(epsilon))
    weight_error = jnp.exp(1.0) * bends_error / num_classes + 2 * eps * jnp.abs(weight)
    bent_error = psi_matvec(weight_error + roundings * jnp.abs(weight))
    lifted_error = factor_error - 4 * eps * factor + 4 * eps * jnp.abs(lifted)
    deviation_error = (
        bent_error * factor
        + jnp.abs(bent) * factor_error
        + lifted_error
        + 4 * eps * (jnp.abs(bent) * factor + jnp.abs(lifted))
    )
    log_scale = jnp.log(jnp.asarray(num_classes, mean.dtype)) - num_classes * mean
    log_total = jnp.log(size / num_classes + jnp.sum(weight))
    return b, weight, deviation, weight_error, deviation_error, log_scale, log_total


def _far(margins, factor, factor_error):
    """B in units of e^{-m_0}, m_0 the least margin."""
    eps = _eps(margins)
    roundings = (margins.shape[0] + 9) * eps
    least = jnp.min(margins)
    weight = jnp.exp(least - margins)
    b = psi_matvec(weight)
    weight_error = weight * roundings * (1 + least + margins)
    b_error = psi_matvec(weight_error + roundings * weight)
    deviation_error = b_error * factor + b * factor_error + 4 * eps * b * factor
    log_total = jnp.log(jnp.sum(weight))
    return b, weight, b * factor, weight_error, deviation_error, -least, log_total


def _eps(like) -> float:
    return float(jnp.finfo(like.dtype).eps)
