"""The Gram factor of mean logits: the vectors that the classes are.

Limits of the full flow are symmetric and positive semidefinite as a rule, Zbar = X^T X
with a column of X for each class (P1 eq. 5): class means, or rows of the head, up to a
rotation. For rank 2 they lie in a plane, and the gaps between neighbours round the
circle tell a regular polygon (P1 Fig. 3, left and middle).
"""

import numpy as np
from jaxtyping import Float

from .._types import SquareMatrix

# Asymmetry and negative eigenvalues up to this part of the norm are rounding.
_ROUNDING = 1e-6


def gram_factor(
    logits: SquareMatrix | Float[np.ndarray, "classes classes"],
    *,
    zero: float = 1e-6,
) -> Float[np.ndarray, "rank classes"]:
    """Returns X with X^T X = Zbar, (rank, K), unique up to a rotation.

    Rows are principal axes, the longest first.

    **Arguments:**

    - `logits`: class means, (K, K); a number added to each column is taken off first.
    - `zero`: eigenvalues below this part of the largest are dropped.

    **Raises:** `ValueError` for class means that are not symmetric and positive
    semidefinite, to 1e-6 of their norm.

    **Reference:** P1 eq. 5 and App. E.1.
    """
    means = np.asarray(logits, float)
    means = means - np.mean(means, axis=0)
    norm = np.linalg.norm(means)
    asymmetry = np.linalg.norm(means - means.T)
    values, vectors = np.linalg.eigh((means + means.T) / 2)
    if not (asymmetry <= _ROUNDING * norm and values[0] >= -_ROUNDING * norm):
        raise ValueError(
            "A Gram factor needs class means that are symmetric and positive "
            f"semidefinite; these have an asymmetry of {asymmetry / norm:.1e} and a "
            f"least eigenvalue of {values[0] / norm:.1e} of their norm. Take them at a "
            "limit (`limit(...).direction`), or at a later time."
        )
    order = np.flatnonzero(values > zero * values[-1])[::-1]
    return np.sqrt(values[order])[:, None] * vectors[:, order].T


def angle_gaps(factor: Float[np.ndarray, "2 classes"]) -> Float[np.ndarray, " classes"]:
    """Returns the angles between neighbours round the circle, (K,), in radians.

    In the order of the circle, from the class of least angle on; they sum to 2π.

    **Raises:** `ValueError` for a Gram factor that is not of rank 2.
    """
    if factor.shape[0] != 2:
        raise ValueError(
            "Angle gaps are those of vectors in the plane, but this Gram factor has "
            f"rank {factor.shape[0]}."
        )
    angles = np.sort(np.arctan2(factor[1], factor[0]))
    return np.append(np.diff(angles), angles[0] + 2 * np.pi - angles[-1])
