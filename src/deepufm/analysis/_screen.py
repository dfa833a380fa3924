"""Thousands of rough low-cost logits at once: the smooth stage of a search.

Logits of rank r, Z = X^T Y with X, Y (r, K), descend

    -g_beta(Z)/(sum_i sigma_i^q)^{1/q},     q = 2/(L+1),            (P1 eq. 24)

the normalised margin of balanced layers with the least gap replaced by a soft one,
g_beta = -(1/beta) log sum exp(-beta gap), in units of ‖Z‖_F/sqrt(K), where the
simplex's gaps are about 1; beta rises, Adam steps. All starts go through one vectorised
program on JAX's default device, at some 2 ms a start on one core for K = 16, where
`polish` takes 50. What comes out is within a thousandth of a local minimum and costs as
much more; exact, and certified, it becomes by `polish`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from .._types import PRNGKey, RealScalar

_STEPS = 300
_SHARPNESS = (5.0, 300.0)  # the first and last beta
_RATE = 0.1  # of Adam, falling to a fiftieth

Factor = Float[Array, "rank classes"]
Factors = tuple[Factor, Factor]


def screen(
    num_classes: int, depth: float | int, rank: int, starts: int, seed: int
) -> np.ndarray:
    """Returns rough minima, (starts, K, K), the cheapest first.

    Those that misclassify a class are left out, so that there may be fewer.

    **Arguments:** K; L; r; how many random starts; `seed` of these.
    """
    key = jax.random.key(seed)
    left, right = _descended(key, 2 / (depth + 1), starts, num_classes, rank)
    logits = np.swapaxes(np.asarray(left, float), 1, 2) @ np.asarray(right, float)
    costs = np.asarray([rough_cost(one, depth, rank) for one in logits])
    order = np.argsort(costs)
    return logits[order[np.isfinite(costs[order])]]


def rough_cost(logits: np.ndarray, depth: float | int, rank: int) -> float:
    """Returns sum (sigma_i/g)^q over the r largest, g the least gap; inf for g <= 0."""
    gaps = np.diag(logits)[None, :] - logits
    least = np.min(gaps[~np.eye(len(logits), dtype=bool)])
    if not least > 0:  # NaN is not
        return np.inf
    values = np.linalg.svd(logits, compute_uv=False)[:rank]
    return float(np.sum((values / least) ** (2 / (depth + 1))))


@functools.partial(jax.jit, static_argnames=("starts", "num_classes", "rank"))
def _descended(
    key: PRNGKey, power: RealScalar, starts: int, num_classes: int, rank: int
) -> tuple[Float[Array, "starts rank classes"], Float[Array, "starts rank classes"]]:
    """Returns X and Y of every start after the descent."""

    def one(key):
        first, second = jax.random.split(key)
        left = jax.random.normal(first, (rank, num_classes))
        left = left / jnp.linalg.norm(left, axis=0, keepdims=True)
        away = jax.random.normal(second, left.shape) / rank**0.5
        return _descend((left, left + 0.5 * away), power)

    return jax.vmap(one)(jax.random.split(key, starts))


def _descend(factors: Factors, power: RealScalar) -> Factors:
    rule = optax.adam(optax.cosine_decay_schedule(_RATE, _STEPS, 0.02))

    def step(carry, sharpness):
        factors, memory = carry
        slopes = jax.grad(_cost)(factors, power, sharpness)
        # optax counts steps in int32, whatever the user's rule of promotion.
        with jax.numpy_dtype_promotion("standard"):
            change, memory = rule.update(slopes, memory)
        moved = jax.tree.map(_rescaled, optax.apply_updates(factors, change))
        return (moved, memory), None

    levels = jnp.geomspace(*_SHARPNESS, _STEPS, dtype=factors[0].dtype)
    return jax.lax.scan(step, (factors, rule.init(factors)), levels)[0][0]


def _cost(factors: Factors, power: RealScalar, sharpness: RealScalar) -> RealScalar:
    left, right = factors
    num_classes = left.shape[1]
    logits = left.T @ right
    # Z's squared singular values, by a symmetric (r, r) matrix with the same spectrum.
    root = jnp.linalg.cholesky(right @ right.T)
    values = jnp.linalg.eigvalsh(root.T @ (left @ left.T) @ root)
    total = jnp.sum(values)
    gaps = jnp.diag(logits)[None, :] - logits
    off = ~jnp.eye(num_classes, dtype=bool)
    scaled = -sharpness * gaps * jnp.sqrt(num_classes / total)
    soft = -jax.nn.logsumexp(jnp.where(off, scaled, -jnp.inf)) / sharpness
    # A dying direction's slope has no bound; its share is kept from zero.
    shares = jnp.maximum(values / total, jnp.finfo(left.dtype).tiny ** 0.1)
    price = jax.nn.logsumexp(0.5 * power * jnp.log(shares)) / power
    return -soft * jnp.exp(0.5 * jnp.log(num_classes) - price)


def _rescaled(factor: Factor) -> Factor:
    """Returns the factor at norm sqrt(K): cost has no scale, Adam's steps have."""
    return factor * (factor.shape[1] ** 0.5 / jnp.linalg.norm(factor))
