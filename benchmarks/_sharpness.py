"""Sharpness: the largest eigenvalue of the Hessian of the summed loss, by Lanczos."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from bench_rhs import usual_gradient
from jax import Array, lax
from jax.flatten_util import ravel_pytree

import deepufm as ufm

AGREEMENT = 1e-9


def hessian_product(per_class: int, model: ufm.DeepUFM) -> tuple[Callable, int]:
    """Returns v -> Hv of the summed loss at `model`, and the number of parameters."""
    point, unravel = ravel_pytree(model)
    velocity = usual_gradient(per_class, True)

    def gradient(vector):
        return -ravel_pytree(velocity(unravel(vector)))[0]

    return lambda v: jax.jvp(gradient, (point,), (v,))[1], point.size


@partial(jax.jit, static_argnums=0)
def sharpness(per_class: int, model: ufm.DeepUFM) -> tuple[Array, Array]:
    """Returns the largest eigenvalue of the Hessian, by Lanczos, and a bound of error.

    Power iteration would find the eigenvalue of largest magnitude, which near a saddle
    may be a negative one.
    """
    product, size = hessian_product(per_class, model)
    count = min(40, size)
    start = jax.random.normal(jax.random.key(1), (size,))
    basis = jnp.zeros((count + 1, size)).at[0].set(start / jnp.linalg.norm(start))

    def extend(k, carry):
        basis, diagonal, beside = carry
        image = product(basis[k])
        diagonal = diagonal.at[k].set(jnp.vdot(basis[k], image))
        rest = image
        for _ in range(2):  # once more for the rounding of the first
            rest = rest - basis.T @ (basis @ rest)
        norm = jnp.linalg.norm(rest)
        # An invariant subspace is exhausted; what follows are zeros, and do not matter:
        # the Hessian's trace is positive, and so its largest eigenvalue.
        over = norm <= 1e-13 * jnp.linalg.norm(image)
        norm = jnp.where(over, 0, norm)
        rest = jnp.where(over, 0, rest / jnp.where(over, 1, norm))
        return basis.at[k + 1].set(rest), diagonal, beside.at[k].set(norm)

    zeros = jnp.zeros(count)
    _, diagonal, beside = lax.fori_loop(0, count, extend, (basis, zeros, zeros))
    small = jnp.diag(diagonal) + jnp.diag(beside[:-1], 1) + jnp.diag(beside[:-1], -1)
    values, vectors = jnp.linalg.eigh(small)
    bound = beside[-1] * jnp.abs(vectors[-1, -1])
    return values[-1], jnp.maximum(bound, jnp.finfo(values.dtype).eps * values[-1])


def check_sharpness(per_class: int, model: ufm.DeepUFM, found: float) -> float:
    """Returns how far `found` is from the full Hessian's; raises beyond `AGREEMENT`."""
    product, size = hessian_product(per_class, model)
    hessian = jax.jit(jax.vmap(product))(jnp.eye(size))
    largest = float(jnp.linalg.eigvalsh(hessian)[-1])
    difference = abs(found - largest) / largest
    if not difference <= AGREEMENT:
        raise RuntimeError(f"Lanczos differs from eigvalsh by {difference:.1e}.")
    return difference
