"""All vertices of the reduced problem's feasible set, up to relabelling.

    Psi a >= 1,  a >= 0                                                     (P1 eq. 3)

Mode i is a vector of F_2^m, the binary digits of i, K = 2^m, and Psi_ji = 2 (i·j). An
invertible matrix g over F_2 takes a to a' with a'_{gi} = a_i and margin j to margin
g^{-T} j: points come in orbits of GL(m, 2), which has 6, 168 and 20160 elements for
K = 4, 8 and 16.

The sum of a^q is concave on the modes that live, and every local minimum of the reduced
problem, for any L > 1, is therefore a vertex. They are found by walking: from collapse,
a = 1/K, along each edge to the vertex at its other end, and on from one vertex of each
orbit. The graph of a polyhedron without lines is connected, so none is missed. K = 4
has 4 vertices in 2 orbits, K = 8 64 in 4, and K = 16 9384 in 15, the last in about a
second.
"""

import functools

import numpy as np
import scipy.linalg

from ..geometry import psi_matrix

# Entries of points and rays are small fractions, of order one: below this is rounding.
_ROUNDING = 1e-9
# Modes of one point that agree to this part of the largest are equal.
_EQUAL = 1e-8


@functools.cache
def psi(num_classes: int) -> np.ndarray:
    """Returns Psi, (K-1, K-1), for NumPy."""
    return np.asarray(psi_matrix(num_classes), float)


@functools.cache
def group(num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns all g of GL(m, 2): g(i) - 1 and (g^T j) - 1 at [g, i-1] and [g, j-1]."""
    digits = num_classes.bit_length() - 1
    numbers = np.arange(1, num_classes)
    bits = numbers[:, None] >> np.arange(digits) & 1
    # A matrix is where it takes the basis.
    columns = np.stack(np.meshgrid(*[numbers] * digits, indexing="ij"), axis=-1)
    columns = columns.reshape(-1, digits)
    images = np.bitwise_xor.reduce(bits[None] * columns[:, None], axis=-1)
    invertible = np.all(images > 0, axis=1)
    columns, images = columns[invertible], images[invertible]
    parities = np.bitwise_count(columns[:, None] & numbers[:, None]) & 1
    turned = np.sum(parities.astype(int) << np.arange(digits), axis=-1)
    return images - 1, turned - 1


def canonical(a: np.ndarray) -> tuple[np.ndarray, int]:
    """Returns the lexicographically largest of an orbit, and the orbit's size.

    **Arguments:** `a`, (K-1,), K <= 16; entries that agree to 1e-8 count as equal.
    """
    order = np.argsort(a)
    levels = np.zeros(len(a), int)
    levels[order[1:]] = np.cumsum(np.diff(a[order]) > _EQUAL * np.max(a))
    matrices, _ = group(len(a) + 1)
    largest = matrices
    for place in range(len(a)):
        here = levels[largest[:, place]]
        largest = largest[here == np.max(here)]
    # Those left all give the same point: as many as fix it.
    return a[largest[0]], len(matrices) // len(largest)


@functools.cache
def vertices(num_classes: int) -> tuple[tuple[np.ndarray, int], ...]:
    """Returns one vertex of each orbit, (K-1,), and the orbit's size; K <= 16."""
    size = num_classes - 1
    rows = np.vstack([psi(num_classes), np.eye(size)])
    bounds = np.repeat([1.0, 0.0], size)
    found: dict[bytes, tuple[np.ndarray, int]] = {}
    waiting = [np.full(size, 1 / num_classes)]
    while waiting:
        point, orbit = canonical(waiting.pop())
        name = np.round(point, 7).tobytes()
        if name in found:
            continue
        found[name] = point, orbit
        slack = rows @ point - bounds
        tight = slack < _ROUNDING
        for ray in edges(rows[tight]):
            rates = rows @ ray
            meets = ~tight & (rates < -_ROUNDING)
            if np.any(meets):
                step = np.min(slack[meets] / -rates[meets])
                waiting.append(_exact(rows, bounds, point + step * ray))
    return tuple(found.values())


def edges(rows: np.ndarray) -> np.ndarray:
    """Returns the extreme rays of the cone rows·d >= 0, one a row, largest entry 1.

    By double description: the cone of n independent rows has n rays; each further row
    keeps those on its side, and cuts every face of two that it parts.

    **Arguments:** `rows`, (constraints, n), of rank n.
    """
    size = rows.shape[1]
    rows = rows[scipy.linalg.qr(rows.T, mode="r", pivoting=True)[-1]]
    rays = _scaled(np.linalg.inv(rows[:size]).T)
    for count in range(size, len(rows)):
        heights = rays @ rows[count]
        tight = np.abs(rays @ rows[:count].T) < _ROUNDING
        above = np.flatnonzero(heights > _ROUNDING)
        below = np.flatnonzero(heights < -_ROUNDING)
        pairs = np.array([(i, j) for i in above for j in below], int).reshape(-1, 2)
        shared = tight[pairs[:, 0]] & tight[pairs[:, 1]]
        dense = np.sum(shared, axis=1) >= size - 2
        pairs, shared = pairs[dense], shared[dense]
        # Two rays span a face exactly if no third is tight where both are.
        loose = shared.astype(float) @ (~tight).T.astype(float)
        pairs = pairs[np.sum(loose == 0, axis=1) == 2]
        high, low = rays[pairs[:, 0]], rays[pairs[:, 1]]
        between = heights[pairs[:, :1]] * low - heights[pairs[:, 1:]] * high
        rays = np.vstack([rays[heights >= -_ROUNDING], _scaled(between)])
    return rays


def _scaled(rays: np.ndarray) -> np.ndarray:
    return rays / np.max(np.abs(rays), axis=1, keepdims=True)


def _exact(rows, bounds, point) -> np.ndarray:
    """Returns a vertex without the rounding of the way to it."""
    tight = rows @ point - bounds < _ROUNDING
    exact = np.linalg.lstsq(rows[tight], bounds[tight])[0]
    return np.where(point < _ROUNDING, 0, exact)
