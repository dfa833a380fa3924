"""The angle between two directions."""

import numpy as np


def angle_between(first: np.ndarray, second: np.ndarray) -> float:
    """Returns the angle between two arrays as vectors, in radians, 0 to pi.

    Accurate at any angle: the arc cosine of a product would lose those below 1e-8.
    NaN where one of them is zero.
    """
    x, y = (np.ravel(v) / np.linalg.norm(v) for v in (first, second))
    return float(2 * np.arctan2(np.linalg.norm(x - y), np.linalg.norm(x + y)))
