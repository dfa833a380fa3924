"""The exact sigmoid dy/dτ = y^{1+p} (1 - y), 0 < y < 1, for any p in [0, 1].

    τ = ∫ y^{-1-p}/(1-y) dy

in closed form: expanded in y below one half and in 1 - y above, every term of the two
series is positive, and sixty of them leave 2^{-60}. With p = (L-1)/(L+1) it is the mode
of depth L, log-odds linear in τ at p = 0 (Saxe et al. 2014 give L = 1, and L -> inf).
Arguments and results are logarithms, so that y(0) may be e^{-5000}, and τ e^{5000}.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._types import RealScalar

_TERMS = 60
_LOG_HALF = -0.6931471805599453
# Log-odds at which 1 - y is below the smallest double.
_SATURATED = 750.0


def log_sigmoid_time(
    log_y: RealScalar, log_y0: RealScalar, power: RealScalar
) -> RealScalar:
    """Returns log τ from y(0) to y; NaN unless y(0) <= y < 1, -inf at y = y(0)."""
    valid = (log_y0 <= log_y) & (log_y < 0) & (log_y0 > -jnp.inf)
    end = jnp.where(valid, log_y, _LOG_HALF)
    start = jnp.where(valid, log_y0, _LOG_HALF)
    middle = jnp.clip(_LOG_HALF, start, end)
    k = jnp.arange(_TERMS, dtype=end.dtype)
    # Below one half: y^{k-1-p} integrates to y^c/c, c = k - p, negative for k = 0 only.
    c = jnp.where(k == 0, power, k - power)
    log_scale = jnp.where(k == 0, -power * start, c * middle)
    below = log_scale + _log_ramp(c, middle - start)
    # Above: (1-x)^{-1-p} = Σ binomial(p+k, k) x^k in x = 1 - y, of falling x.
    log_x0, log_x = _log_complement(middle), _log_complement(end)
    # log x0 - log x without cancellation where the two are close.
    fall = jnp.log1p(jnp.exp(middle - log_x) * jnp.expm1(end - middle))
    ratios = jnp.log1p(power / jnp.maximum(k, 1))
    log_binomial = jnp.cumsum(jnp.where(k == 0, 0, ratios))
    above = log_binomial + k * log_x0 + _log_ramp(k, fall)
    log_time = jax.nn.logsumexp(jnp.concatenate([below, above]))
    return jnp.where(valid, log_time, jnp.nan)


def log_sigmoid_value(
    log_time: RealScalar, log_y0: RealScalar, power: RealScalar
) -> RealScalar:
    """Returns log y at log τ from y(0); NaN unless 0 < y(0) < 1."""
    valid = (log_y0 < 0) & (log_y0 > -jnp.inf)
    start = jnp.where(valid, log_y0, _LOG_HALF)
    moving = ~jnp.isneginf(log_time)
    log_time = jnp.where(moving, log_time, 0)
    odds0 = start - _log_complement(start)
    linear = odds0 + jnp.exp(log_time)  # exact at p = 0, and an upper bound

    def shorter(odds):
        return log_sigmoid_time(_from_odds(odds), start, power) < log_time

    def halve(_, bracket):
        low, high = bracket
        middle = 0.5 * (low + high)
        ahead = shorter(middle)
        return jnp.where(ahead, middle, low), jnp.where(ahead, high, middle)

    bracket = odds0, jnp.clip(linear, odds0, _SATURATED)
    low, _ = jax.lax.fori_loop(0, 64, halve, jax.lax.stop_gradient(bracket))
    # One Newton step in log τ polishes, and carries the derivatives.
    hold = jax.lax.stop_gradient
    odds = hold(jnp.maximum(low, jnp.nextafter(hold(odds0), jnp.inf)))
    error = log_sigmoid_time(_from_odds(odds), start, power) - log_time
    slope = jnp.exp(power * jax.nn.softplus(-odds) - log_time)
    step = error / hold(slope)
    usable = jnp.isfinite(step) & (odds < 30)
    refined = jnp.where(usable, odds - jnp.where(usable, step, 0), odds)
    # At p = 0 by p alone: the rest of the derivatives is in `linear`.
    exact = hold(linear)
    by_power = log_sigmoid_time(_from_odds(exact), hold(start), power)
    by_power = (by_power - hold(by_power)) * jnp.exp(hold(log_time))
    flat = linear - jnp.where(exact < 30, by_power, 0)
    odds = jnp.where(power == 0, flat, refined)
    log_y = jnp.where(moving, _from_odds(odds), start)
    return jnp.where(valid & ~jnp.isnan(log_time), log_y, jnp.nan)


def _log_ramp(c: Float[Array, " terms"], length: RealScalar) -> Float[Array, " terms"]:
    """Returns log of (1 - e^{-c·length})/c, of log(length) at c = 0; -inf for none."""
    flat, empty = c == 0, length == 0
    length = jnp.where(empty, 1, length)
    at_zero = length * (1 - 0.5 * c * length)  # for its derivative by c
    c = jnp.where(flat, 1, c)
    ramp = jnp.where(flat, at_zero, -jnp.expm1(-c * length) / c)
    return jnp.where(empty, -jnp.inf, jnp.log(ramp))


def _log_complement(log_y: RealScalar) -> RealScalar:
    """Returns log(1 - y)."""
    return jnp.log(-jnp.expm1(log_y))


def _from_odds(odds: RealScalar) -> RealScalar:
    """Returns log y from log(y/(1-y))."""
    return -jax.nn.softplus(-odds)
