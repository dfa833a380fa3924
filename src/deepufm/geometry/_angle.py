"""The angle between two directions."""

import numpy as np


def angle_between(first: np.ndarray, second: np.ndarray) -> float:
    """Returns the angle between two arrays as vectors, in radians, 0 to pi.

    Accurate at any angle: the arc cosine of a product would lose those below 1e-8.
    NaN where one of them is zero.
    """
    return float(row_angles(np.ravel(first), np.ravel(second)))


def row_angles(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns the angles between vectors along the last axis; the others broadcast.

    As `angle_between`.
    """
    x, y = (v / np.linalg.norm(v, axis=-1, keepdims=True) for v in (first, second))
    apart, together = (np.linalg.norm(v, axis=-1) for v in (x - y, x + y))
    return np.asarray(2 * np.arctan2(apart, together))
