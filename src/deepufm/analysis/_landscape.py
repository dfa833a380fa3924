"""The landscape at infinity: the least norm that gives every example a margin of 1.

Gradient flow on cross-entropy tends, in direction, to a stationary point of

    min ‖θ‖²  subject to every logit gap >= 1,                            (P1 eq. 3)

and balanced layers reach given logits with the least norm, so that

    min_θ ‖θ‖² = (L+1)·sum_i sigma_i^q,   q = 2/(L+1),                   (P1 Lemma D.7)

over the singular values of logits scaled to a smallest gap of 1: a Schatten quasi-norm,
which favours low ranks the more the deeper the model. `depth` may be any real number
>= 1 here, or inf, where q = 0 and the sum counts singular values.
"""

import math

import jax.numpy as jnp
import numpy as np
import scipy.optimize
from jaxtyping import Array, Float

from .._types import Labels, Logits, RealLike, RealScalar
from ..models import Structure
from ._margin import margins
from ._spectrum import singular_values


def schatten_objective(logits: Logits, labels: Labels, depth: RealLike) -> RealScalar:
    """Returns (L+1)·sum_i (sigma_i/g)^q, g the smallest logit gap: P1's objective.

    The least squared norm of the layers and features whose logits point this way and
    have a smallest gap of 1; inf where an example is misclassified, and at infinite
    depth. Singular values within rounding of zero count as zero: at L = 10 one of 1e-16
    would add 1e-3 to the sum.

    **Arguments:** `logits` (K, examples); `labels` the class of each column; `depth` L.

    **Reference:** P1 eq. 24 and Lemma D.7.
    """
    depth = jnp.asarray(depth, logits.dtype)
    values = singular_values(logits)
    smallest = jnp.min(margins(logits, labels))
    right = ~(smallest <= 0)  # NaN stays one
    floor = max(logits.shape) * jnp.finfo(logits.dtype).eps * values[0]
    counts = values > floor
    ratios = jnp.where(counts, values, 1) / jnp.where(right, smallest, 1)
    total = jnp.sum(jnp.where(counts, ratios ** (2 / (depth + 1)), 0))
    return jnp.where(right, (depth + 1) * total, jnp.inf)


def norm_propagation(
    values: Float[Array, "*batch modes"], depth: RealLike
) -> Float[Array, "*batch"]:
    """Returns ‖Z‖_F over the product of the Frobenius norms of balanced layers.

        ‖Z~‖_F = (sum_i sigma_i²)^{1/2}/(sum_i sigma_i^q)^{(L+1)/2},   q = 2/(L+1):

    how much of the layers' norm the logits keep, r^{-L/2} for r equal singular values:
    the mechanism that makes low ranks cheap. 0 where all are zero.

    **Arguments:** `values` sigma, of any scale, along the last axis; `depth` L >= 1.

    **Reference:** P1 eq. 4 and section 3.2.
    """
    depth = jnp.asarray(depth, values.dtype)
    largest = jnp.max(values, axis=-1, keepdims=True)
    counts = values > 0
    share = jnp.where(counts, values / jnp.where(largest > 0, largest, 1), 1)
    squares = jnp.sum(jnp.where(counts, share**2, 0), axis=-1)
    powers = jnp.sum(jnp.where(counts, share ** (2 / (depth + 1)), 0), axis=-1)
    alive = powers > 0
    kept = jnp.log(jnp.where(alive, squares, 1)) - (depth + 1) * jnp.log(
        jnp.where(alive, powers, 1)
    )
    return jnp.where(alive, jnp.exp(kept / 2), 0)


def structure_objective(
    structure: Structure, num_classes: int, depth: float | int, per_class: int = 1
) -> float:
    """Returns (L+1)·sum_i sigma_i^q of a structure whose smallest gap is 1.

        simplex ETF: K-1;   cross-polytope: floor(K/2)·2^q, and 1 for odd K;
        polygon: 2(βK/2)^q, β = 1/(1 - cos 2π/K),

    times L+1, and times n^{1/(L+1)} for n examples a class. At infinite depth inf; the
    structures rank there by `structure_rank`.

    **Raises:** `ValueError` for a depth below 1, n below 1, or a K that the structure
    does not have.

    **Reference:** P1 eqs. 11, 15, 16 and Thm 3.2.
    """
    if not depth >= 1:
        raise ValueError(f"Argument `depth` must be at least 1, but is {depth}.")
    if per_class < 1:
        raise ValueError(
            f"Argument `per_class` must be at least 1, but is {per_class}."
        )
    values, counts = _spectrum(structure, num_classes)
    power = 2 / (depth + 1)
    examples = per_class ** (power / 2)
    return (depth + 1) * examples * float(np.sum(counts * values**power))


def structure_rank(structure: Structure, num_classes: int) -> int:
    """Returns the rank of a structure's logits.

    **Raises:** `ValueError` for a K that the structure does not have.
    """
    return int(np.sum(_spectrum(structure, num_classes)[1]))


def tie_depth(first: Structure, second: Structure, num_classes: int) -> float:
    """Returns the real depth at which two structures need the same norm.

    The one of lower rank is better beyond. For the simplex ETF and the cross-polytope
    of even K this is 2 log 2/log(2(K-1)/K) - 1: P1 Thm 3.1, for real L.

    **Returns:** L; inf where the two tie in the limit alone; NaN where they are the
    same at every depth (the triangle and the simplex, the square and the
    cross-polytope). Below 1 no model has that depth. (At no K do they not tie.)

    **Raises:** `ValueError` for a K that one of them does not have.
    """
    (a, a_counts), (b, b_counts) = (_spectrum(s, num_classes) for s in (first, second))
    values, counts = np.concatenate([a, b]), np.concatenate([a_counts, -b_counts])
    # Terms of equal value are one; of what is left the signs, sorted by value, change
    # once at most, so that there is one root (Descartes, for exponential sums).
    bases = np.unique(values)
    weights = np.asarray([np.sum(counts[values == base]) for base in bases])
    if not np.any(weights):
        return math.nan

    def excess(power: float) -> float:
        return float(np.sum(weights * bases**power))

    if excess(0.0) == 0:
        return math.inf
    if excess(0.0) * excess(2.0) > 0:
        return math.nan
    found = scipy.optimize.root_scalar(
        excess, method="brentq", bracket=(0.0, 2.0), xtol=1e-300, rtol=1e-15
    )
    return 2 / found.root - 1


def _spectrum(structure: Structure, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distinct singular values at a smallest gap of 1, and their counts."""
    structure.logits(num_classes)  # refuses a K that it does not have
    pairs, single = divmod(num_classes, 2)
    if structure is Structure.SIMPLEX_ETF or num_classes == 2:
        return np.asarray([1.0]), np.asarray([num_classes - 1])
    if structure is Structure.CROSS_POLYTOPE:
        return np.asarray([1.0, 2.0]), np.asarray([single, pairs])
    # 1 - cos x = 2 sin²(x/2), with no cancellation at large K; exact where it is known,
    # so that the triangle and the square are recognised.
    beta = {3: 2 / 3, 4: 1.0}.get(
        num_classes, 0.5 / math.sin(math.pi / num_classes) ** 2
    )
    return np.asarray([beta * num_classes / 2]), np.asarray([2])
