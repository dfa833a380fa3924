"""How many modes the logits use, and how far those modes are from equal.

Two kinds of argument, both along the last axis, with any leading batch axes:

- `values`: singular values, non-negative, in any order;
- `log_a`: u = log a, the state of the reduced flow, where a dead mode is −inf.

With N modes (N = K−1 in the reduced flow) and â = a/sum(a), everything here depends on
the direction of a only. The distances to the uniform direction â = 1/N, which is deep
neural collapse, go through

    δ_i = log(a_i / mean(a)),    ε_i = N·â_i − 1 = expm1(δ_i),

because â_i itself has lost the digits that matter once the modes are nearly equal:

- KL(uniform‖â) = mean(ε − log1p(ε)) = mean(e^δ − 1 − δ)        (P1 eq. 52)
- KL(â‖uniform) = mean((1+ε)·log1p(ε) − ε) = mean(δe^δ − e^δ + 1)  (P2 B.3.1)
- M = ½·sum((â_i − 1/N)²) = sum(ε²)/(2N²)                        (P2 eq. 12)

All three keep full relative accuracy down to M ~ 1e-30. Conventions: a vector of zeros
has no direction, and its normalised form is taken to be zero, so no result is NaN
unless its input is; gradients with respect to dead modes are finite.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._types import RealScalar

# 1/2!, 1/3!, ...: the series of (e^x − 1 − x)/x², below rounding error for |x| <= 1.
_EXCESS_SERIES = [1 / math.factorial(k) for k in range(2, 20)]


def rescaled(
    x: Float[Array, "..."], axis: tuple[int, ...]
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Splits `x` into (x/s, s) with s the largest |x| over `axis`, 1 if that is 0.

    Sums of squares of the first part neither overflow nor vanish. s carries no
    gradient: whatever is homogeneous in x does not depend on s, and differentiating
    through s would square it (1e-300 squared is 0).
    """
    largest = jax.lax.stop_gradient(jnp.max(jnp.abs(x), axis=axis, keepdims=True))
    scale = jnp.where(largest == 0, 1.0, largest)
    return x / scale, scale


def unit(x: Float[Array, "... rows cols"]) -> Float[Array, "... rows cols"]:
    """Returns X/‖X‖_F at any scale, zero for a matrix of zeros."""
    x, _ = rescaled(x, (-2, -1))
    sum_squares = jnp.sum(x * x, axis=(-2, -1), keepdims=True)
    return x / jnp.sqrt(jnp.where(sum_squares == 0, 1.0, sum_squares))


def singular_values(
    matrix: Float[Array, "*batch rows cols"],
) -> Float[Array, "*batch modes"]:
    """Returns the min(rows, cols) singular values, largest first."""
    scaled, scale = rescaled(matrix, (-2, -1))
    return jnp.linalg.svd(scaled, compute_uv=False) * jnp.squeeze(scale, -1)


def nuclear_norm(matrix: Float[Array, "*batch rows cols"]) -> Float[Array, "*batch"]:
    """Returns ‖X‖_*, the sum of the singular values."""
    return jnp.sum(singular_values(matrix), axis=-1)


def effective_rank(values: Float[Array, "*batch modes"]) -> Float[Array, "*batch"]:
    """Returns exp(−Σ p_i log p_i) with p = σ/Σσ, the effective rank.

    **Arguments:** `values`, singular values σ at any scale.

    **Returns:** a number from 1 to the number of non-zero values; 0 if all are 0. Zeros
    add nothing, and their derivative, one-sided and infinite, is given as 0.

    **Reference:** P1 eq. 60.
    """
    scaled, _ = rescaled(values, (-1,))
    zero = scaled == 0
    log_scaled = jnp.where(zero, -jnp.inf, jnp.log(jnp.where(zero, 1.0, scaled)))
    return effective_rank_from_log(log_scaled)


def effective_rank_from_log(
    log_a: Float[Array, "*batch modes"],
) -> Float[Array, "*batch"]:
    """Returns `effective_rank` of a from u = log a; entries −inf are dead modes."""
    w = _below_largest(log_a)
    dead = w == -jnp.inf
    w = jnp.where(dead, 0.0, w)
    weights = jnp.where(dead, 0.0, jnp.exp(w))
    total = jnp.sum(weights, axis=-1)
    empty = total == 0
    total = jnp.where(empty, 1.0, total)
    # log p = w − log(total) and w <= 0, so that both terms of the entropy add.
    entropy = jnp.log(total) - jnp.sum(weights * w, axis=-1) / total
    return jnp.where(empty, 0.0, jnp.exp(entropy))


def numerical_rank(
    values: Float[Array, "*batch modes"], rtol: float | RealScalar
) -> Int[Array, "*batch"]:
    """Returns how many singular values exceed `rtol` times the largest.

    A vector of zeros has rank 0. So has one with a NaN: check elsewhere.
    """
    scaled, _ = rescaled(values, (-1,))
    return jnp.sum(scaled > rtol, axis=-1)


def normalised_modes(
    log_a: Float[Array, "*batch modes"],
) -> Float[Array, "*batch modes"]:
    """Returns â = a/sum(a), the softmax of u = log a (zeros if every mode is dead)."""
    weights = jnp.exp(_below_largest(log_a))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total == 0, 1.0, total)


def kl_from_uniform(log_a: Float[Array, "*batch modes"]) -> Float[Array, "*batch"]:
    """Returns KL(1/(K−1) ‖ â) = −log(K−1) − mean(log â), in nats.

    **Arguments:** `log_a`, u = log a.

    **Returns:** a number >= 0; +inf as soon as one mode is dead.

    **Reference:** P1 eq. 52; the Lyapunov function of P2 Theorem 3 at L = 1.
    """
    return jnp.mean(_exp_excess(log_relative_modes(log_a)), axis=-1)


def reverse_kl_from_uniform(
    log_a: Float[Array, "*batch modes"],
) -> Float[Array, "*batch"]:
    """Returns KL(â ‖ 1/(K−1)) = log(K−1) + Σ â_i log â_i, in nats.

    **Arguments:** `log_a`, u = log a.

    **Returns:** a number from 0 to log(K−1); dead modes add nothing to Σ. If all are
    dead it is 1, the divergence KL(p‖q) = Σ p log(p/q) − p + q at p = 0.

    **Reference:** P2 B.3.1.
    """
    delta = log_relative_modes(log_a)
    small = jnp.abs(delta) <= 1
    near = jnp.where(small, delta, 0.0)
    # Below −1000, e^δ is 0 in every precision; the clip avoids −inf·0.
    far = jnp.maximum(jnp.where(small, 1.0, delta), -1000.0)
    # δe^δ − e^δ + 1 = e^δ·(e^{−δ} − 1 + δ)
    terms = jnp.where(
        small, jnp.exp(near) * _exp_excess(-near), far * jnp.exp(far) - jnp.expm1(far)
    )
    return jnp.mean(terms, axis=-1)


def uniform_distance(log_a: Float[Array, "*batch modes"]) -> Float[Array, "*batch"]:
    """Returns M = ½·Σ(â_i − 1/(K−1))² from u = log a.

    This is half the square of `alignment` of the logits they belong to.

    **Reference:** P2 eq. 12.
    """
    epsilon = jnp.expm1(log_relative_modes(log_a))
    return jnp.sum(epsilon**2, axis=-1) / (2 * log_a.shape[-1] ** 2)


def log_ratio(log_a: Float[Array, "*batch modes"]) -> Float[Array, "*batch"]:
    """Returns max(log a) − min(log a), +inf if a mode is dead.

    **Reference:** P2 B.3.3.
    """
    lowest = jnp.min(log_a, axis=-1)
    dead = lowest == -jnp.inf
    spread = jnp.max(log_a, axis=-1) - jnp.where(dead, 0.0, lowest)
    return jnp.where(dead, jnp.inf, spread)


def log_relative_modes(
    log_a: Float[Array, "*batch modes"],
) -> Float[Array, "*batch modes"]:
    """Returns δ = log(a/mean(a)) from u = log a, to rounding error of its own size."""
    w = _below_largest(log_a)
    # Near-equal modes need log1p of a small mean, spread ones a sum without the −1.
    mean_shift = jnp.mean(jnp.expm1(w), axis=-1, keepdims=True)
    mean = jnp.mean(jnp.exp(w), axis=-1, keepdims=True)
    near = mean_shift > -0.5
    log_mean = jnp.where(
        near,
        jnp.log1p(jnp.where(near, mean_shift, 0.0)),
        jnp.log(jnp.where(near | (mean == 0), 1.0, mean)),
    )
    return w - log_mean


def _below_largest(log_a):
    """Returns u − max(u), exact when the entries are close; −inf stays −inf."""
    largest = jax.lax.stop_gradient(jnp.max(log_a, axis=-1, keepdims=True))
    return log_a - jnp.where(largest == -jnp.inf, 0.0, largest)


def _exp_excess(x):
    """Returns e^x − 1 − x without the cancellation at small x; +inf at −inf."""
    small = jnp.abs(x) <= 1
    near = jnp.where(small, x, 0.0)
    far = jnp.where(small, 1.0, x)
    series = jnp.zeros_like(near)
    for coefficient in reversed(_EXCESS_SERIES):
        series = series * near + coefficient
    return jnp.where(small, near**2 * series, jnp.expm1(far) - far)
