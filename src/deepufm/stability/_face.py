"""Stationary points of the reduced problem that are no vertices: saddles on faces."""

import numpy as np
import scipy.linalg
import scipy.optimize

from ..analysis import ReducedKKT, Verdict, reduced_kkt
from ..geometry import psi_matrix


def stationary_on_face(
    direction: np.ndarray, depth: float, support: np.ndarray, active: np.ndarray
) -> ReducedKKT | None:
    """Returns the stationary point with these modes and least margins, None if none.

    On {a_S > 0, (Psi a)_T = 1} the sum of a^q, concave for L > 1, is greatest there:
    its slope has no part along the face.

    **Arguments:** `direction`, (K-1,), near it; `support`, `active`, (K-1,), Boolean.
    """
    psi = np.asarray(psi_matrix(len(direction) + 1), float)
    rows = psi[np.ix_(active, support)]
    if not np.all(np.any(psi[:, support] > 0, axis=1)):
        return None  # a class would be misclassified
    point = direction[support] / np.min(psi @ direction)
    point = point + np.linalg.lstsq(rows, 1 - rows @ point)[0]
    if np.any(point <= 0):
        return None
    free, power = scipy.linalg.null_space(rows), 2 / (depth + 1)
    if free.size:
        if power == 1:
            return None  # flat: no one point
        found = scipy.optimize.root(
            lambda y: free.T @ np.maximum(point + free @ y, 1e-12) ** (power - 1),
            np.zeros(free.shape[1]),
            tol=1e-13,
        )
        point = point + free @ found.x
        if np.any(point <= 0):
            return None
    a = np.zeros_like(direction)
    a[support] = point
    found = reduced_kkt(a, depth)
    stationary = found.verdict in (Verdict.SADDLE, Verdict.MINIMUM)
    return found if stationary else None
