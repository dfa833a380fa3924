"""The mean logits of the structures that the papers compare, as K x K matrices.

Column c of a mean logit matrix Zbar holds the logits of an example of class c; with n
examples a class the logits are Z = Zbar (x) 1_n^T (P1 eq. 5). Its gaps are

    Zbar_cc - Zbar_c'c  over c' != c   (own class minus other class, down a column),

and all are positive here: each matrix classifies every example. Nothing is normalised;
the docstrings give the singular values and the smallest gap. All matrices are symmetric
and positive semidefinite.

With the smallest gap g scaled to 1, balanced layers of depth L reach the logits with
squared norm (L+1) sum_i (sigma_i/g)^(2/(L+1)) at n = 1, the objective of P1 eq. 3.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._types import RealScalar, SquareMatrix


def simplex_etf(num_classes: int) -> SquareMatrix:
    """Returns the simplex ETF I - 1 1^T/K, the mean logits of neural collapse (DNC).

    Singular values: 1, K-1 times, and 0. All gaps are 1.

    **Arguments:**

    - `num_classes`: K, 2 or more.

    **Returns:** a (K, K) matrix in the default float type.

    **Raises:** `ValueError` where K < 2.

    Reference: P1 D.1, where S denotes this matrix.
    """
    _check_num_classes(num_classes, at_least=2, structure="a simplex ETF")
    return jnp.asarray(np.eye(num_classes) - 1 / num_classes, dtype=float)


def cross_polytope(num_classes: int) -> SquareMatrix:
    """Returns the mean logits of the cross-polytope, where classes form opposite pairs.

    Even K: the block-diagonal matrix C of K/2 blocks [[1, -1], [-1, 1]]; classes 2k and
    2k+1, counted from 0, are a pair. Odd K: diag(C, 1), the last class on an axis of
    its own.

    Singular values: 2, floor(K/2) times; for odd K a single 1; the others 0. The gap is
    2 within a pair, else 1; so the smallest gap is 1, but 2 at K = 2.

    **Arguments:**

    - `num_classes`: K, 2 or more.

    **Returns:** a (K, K) matrix in the default float type.

    **Raises:** `ValueError` where K < 2.

    Reference: P1 eq. 14; for odd K the matrix C-bar that follows eq. 15.
    """
    _check_num_classes(num_classes, at_least=2, structure="a cross-polytope")
    logits = np.eye(num_classes)
    first = np.arange(0, num_classes - 1, 2)
    logits[first, first + 1] = logits[first + 1, first] = -1
    return jnp.asarray(logits, dtype=float)


def regular_polygon(num_classes: int) -> SquareMatrix:
    """Returns X^T X for K unit vectors evenly spaced on the circle: cos(2 pi (i-j)/K).

    The optimum of rank 2, and of all structures in the limit of large depth. The
    triangle is 3/2 times the simplex ETF, the square is a cross-polytope.

    Singular values: K/2 twice, the others 0. The smallest gap is 1 - cos(2 pi/K),
    between neighbours.

    **Arguments:**

    - `num_classes`: K, 3 or more.

    **Returns:** a (K, K) matrix in the default float type.

    **Raises:** `ValueError` where K < 3.

    Reference: P1 eq. 5 and Thm 3.2.
    """
    _check_num_classes(num_classes, at_least=3, structure="a regular polygon")
    index = np.arange(num_classes)
    # From indices, not as X^T X: symmetric and circulant to the last bit.
    differences = index[:, None] - index[None, :]
    return jnp.asarray(_cos_of_turns(differences, num_classes), dtype=float)


def polygon_vectors(
    num_classes: int, phase: float | RealScalar = 0.0
) -> Float[Array, "2 classes"]:
    """Returns X, the K unit vectors (cos, sin)(2 pi k/K + phase) as columns.

    X X^T = (K/2) I, so both singular values are sqrt(K/2), and X^T X is
    `regular_polygon(K)` for every phase.

    **Arguments:**

    - `num_classes`: K, 3 or more.
    - `phase`: the angle of the first vector, in radians; may be traced.

    **Returns:** a (2, K) matrix in the default float type.

    **Raises:** `ValueError` where K < 3.

    Reference: P1 eq. 5.
    """
    _check_num_classes(num_classes, at_least=3, structure="a regular polygon")
    index = np.arange(num_classes)
    # sin(2 pi k/K) = cos(2 pi (4k-K)/(4K))
    sines = _cos_of_turns(4 * index - num_classes, 4 * num_classes)
    x = jnp.asarray(_cos_of_turns(index, num_classes), dtype=float)
    y = jnp.asarray(sines, dtype=float)
    # A rotation of the accurate vectors, as adding the phase to the angles would lose
    # the exactness of their reduction.
    phase = jnp.asarray(phase, dtype=float)
    cos, sin = jnp.cos(phase), jnp.sin(phase)
    return jnp.stack([cos * x - sin * y, sin * x + cos * y])


def _cos_of_turns(count: np.ndarray, parts: int) -> np.ndarray:
    """Returns cos(2 pi count/parts) to the last bit or so, zeros and ones exactly.

    The angle x is brought to [0, pi] in integers, before any rounding, and the cosine
    taken as sin(pi/2 - x), which keeps its relative accuracy where it is small.
    """
    # In units of 1/parts of a quarter turn.
    angle = 4 * (count % parts)
    angle = np.minimum(angle, 4 * parts - angle)
    return np.sin(np.pi / 2 * ((parts - angle) / parts))


def _check_num_classes(num_classes: int, at_least: int, structure: str) -> None:
    if num_classes < at_least:
        raise ValueError(
            f"Argument `num_classes` must be {at_least} or more for {structure}, but "
            f"is {num_classes}. Give at least {at_least} classes."
        )
