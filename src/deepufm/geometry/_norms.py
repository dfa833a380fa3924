"""Euclidean norms that neither overflow nor underflow, with finite gradients at zero.

The flows live between parameter norms of 1e-300 and 1e300, where a plain sum of squares
is 0 or inf. Every norm here divides by the largest entry first.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def frobenius_norm(
    x: Float[Array, "..."], axis: int | tuple[int, ...] | None = None
) -> Float[Array, "..."]:
    """Returns the root of the sum of squares over `axis`, safe at any scale.

    **Arguments:** `x` of any shape; `axis` as in `jnp.sum`, all axes if `None`.

    **Returns:** the norm; 0 (with gradient 0) for zeros, NaN where `x` has a NaN.
    """
    scale, root, zero = _scaled_root(x, axis)
    return jnp.squeeze(jnp.where(zero, 0, scale * root), axis=axis)


def log_frobenius_norm(
    x: Float[Array, "..."], axis: int | tuple[int, ...] | None = None
) -> Float[Array, "..."]:
    """Returns the natural logarithm of `frobenius_norm`, −inf for zeros.

    Finite also where the norm itself is beyond the largest float.
    """
    scale, root, zero = _scaled_root(x, axis)
    return jnp.squeeze(jnp.where(zero, -jnp.inf, jnp.log(scale) + jnp.log(root)), axis)


def safe_scale(
    x: Float[Array, "..."], axis: int | tuple[int, ...] | None = None
) -> Float[Array, "..."]:
    """Returns what to divide `x` by, so that it is of ordinary size: 1 for zeros.

    The largest magnitude over `axis`, whose dimensions are kept, as a constant to
    differentiation; but no more than leaves 1/scale a normal number, since division
    may be by a reciprocal that is flushed to zero.
    """
    largest = jax.lax.stop_gradient(
        jnp.max(jnp.abs(x), axis=axis, keepdims=axis is not None)
    )
    most = 0.5 / jnp.finfo(largest.dtype).tiny
    return jnp.where(largest == 0, 1, jnp.minimum(largest, most))


def _scaled_root(x, axis):
    """Returns (s, r, zero) with norm s·r, both positive and of finite logarithm."""
    axis = tuple(range(x.ndim)) if axis is None else axis
    scale = safe_scale(x, axis)
    zero = jnp.all(x == 0, axis=axis, keepdims=True)
    # The inner `where` keeps sqrt away from 0, where its derivative is infinite.
    scaled = jnp.where(zero, 1, x / scale)
    return scale, jnp.sqrt(jnp.sum(scaled * scaled, axis=axis, keepdims=True)), zero
