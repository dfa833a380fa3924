"""Which minimum each of many starts of the reduced flow goes to, in two stages.

`limit` follows one member at a time on the host, some 10 ms each. Here a batch is
followed by `ensemble` to the norms of its first two readings, 300 and 1000, and read
off the atlas under the conditions of `limit`'s certificate: both readings are nearest
to one and the same strict local minimum, the second within 0.1 rad, the angle has
shrunk, and no mode that the minimum lacks grows. Only the proposal differs. `limit`
makes the vertex that a state's growing modes and least margins suggest; here the
nearest of all minima is taken, and its support must be the modes whose growth exponent
is above 1/2, its active margins the least ones, within a fifth of the least, so that
`limit` would be led to it by its own first split as well. All other starts are left to
`limit`, which takes them up at the norm of 1000.
"""

import functools
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import scipy.spatial

from ..analysis import AtlasEntry, Verdict, atlas, group, reduced_kkt
from ..dynamics import FinalNorm, HadamardFlow
from ..ensemble import ensemble
from ..geometry import psi_matrix, row_angles
from ..limits import (
    LARGEST_TIE,
    LIVING,
    NEAR,
    RESIDUAL,
    RESOLUTION,
    growth_exponents,
)

# The first two targets of `limit`.
READINGS = (3e2, 1e3)
# Unit directions closer than this are one point.
_SAME = 1e-6


@dataclass(frozen=True)
class Minima:
    """All strict local minima of the reduced problem, every point of every orbit.

    - `entries`: of the atlas; `entry`, (points,), says which each point belongs to.
    - `units`, (points, K-1): a over its 2-norm; `tree`: of these, for nearest ones.
    - `support`, `active`, (points, K-1): living modes, least margins.
    """

    entries: tuple[AtlasEntry, ...]
    entry: np.ndarray
    units: np.ndarray
    tree: scipy.spatial.KDTree
    support: np.ndarray
    active: np.ndarray

    def find(self, directions: np.ndarray) -> np.ndarray:
        """Returns the number of the entry of each direction, -1 where in none.

        **Arguments:** `directions`, (members, K-1), of any scale.
        """
        distance, point = self.tree.query(_unit(directions))
        return np.where(distance < _SAME, self.entry[point], -1)


@functools.cache
def all_minima(num_classes: int, depth: float) -> Minima:
    """Returns the minima for K = 2, 4, 8 or 16.

    **Raises:** `ValueError` as `atlas`.
    """
    entries = tuple(
        e for e in atlas(num_classes, depth) if e.verdict is Verdict.MINIMUM
    )
    images, _ = group(num_classes)
    points = [_distinct(entry.a[images]) for entry in entries]
    a = np.concatenate(points)
    margins = a @ np.asarray(psi_matrix(num_classes), float)
    return Minima(
        entries,
        np.repeat(np.arange(len(entries)), [len(p) for p in points]),
        _unit(a),
        scipy.spatial.KDTree(_unit(a)),
        a > 0,
        margins <= (1 + 1e-9) * np.min(margins, axis=1, keepdims=True),
    )


def follow_together(
    num_classes: int, depth: float, log_a: np.ndarray, batch: int
) -> tuple[np.ndarray, np.ndarray]:
    """Follows starts to the norms of both readings.

    **Arguments:** `log_a`, (starts, K-1), of norms below the first; `batch`, at least
    as many: what the program is compiled for.

    **Returns:** log a at these norms, two arrays of the same shape; NaN where the
    integration failed.
    """
    count = len(log_a)
    padded = log_a[np.minimum(np.arange(batch), count - 1)]
    flow, states = HadamardFlow(num_classes, depth), jnp.asarray(padded)
    found = []
    for norm in READINGS:
        path = ensemble(flow, None, states, stop=FinalNorm(norm))
        states = path.final
        norms = np.exp(np.logaddexp.reduce(np.asarray(states), axis=1))
        there = np.abs(norms / norm - 1) < 1e-6
        found.append(np.where(there[:, None], np.asarray(states), np.nan))
    return found[0][:count], found[1][:count]


def read_off(
    minima: Minima, depth: float, early: np.ndarray, late: np.ndarray
) -> np.ndarray:
    """Returns the number of the entry that each start is seen to approach, else -1.

    **Arguments:** `early`, `late`, (starts, K-1): log a at the two readings.
    """
    failed = np.any(np.isnan(early) | np.isnan(late), axis=1)
    before, now = (
        _unit(np.exp(_centred(np.where(failed[:, None], 0, x)))) for x in (early, late)
    )
    _, last = minima.tree.query(before)
    _, point = minima.tree.query(now)
    units = minima.units[point]
    angle, angle_before = row_angles(now, units), row_angles(before, units)
    support, active = minima.support[point], minima.active[point]
    psi = np.asarray(psi_matrix(late.shape[1] + 1), float)
    margins = np.exp(late) @ psi
    growth = growth_exponents(late, depth, psi)
    above = margins - np.min(margins, axis=1, keepdims=True)
    held = np.max(np.where(active, above, 0), axis=1)
    seen = (
        ~failed
        & (last == point)
        & (angle < NEAR)
        & (angle < np.maximum(angle_before, RESOLUTION))
        & np.all((growth > LIVING[0]) == support, axis=1)
        & (held <= LARGEST_TIE * np.min(margins, axis=1))
        & (held < np.min(np.where(active, np.inf, above), axis=1))
    )
    certain = np.asarray([_is_certain(entry) for entry in minima.entries])
    return np.where(seen & certain[minima.entry[point]], minima.entry[point], -1)


def _is_certain(entry: AtlasEntry) -> bool:
    """Returns whether a minimum's residual is what `limit` asks for."""
    return reduced_kkt(entry.a, entry.depth).residual <= RESIDUAL


def _distinct(points: np.ndarray) -> np.ndarray:
    """Returns the points that differ by more than rounding."""
    _, first = np.unique(np.round(points, 9), axis=0, return_index=True)
    return points[first]


def _centred(log_a: np.ndarray) -> np.ndarray:
    return log_a - np.max(log_a, axis=1, keepdims=True)


def _unit(a: np.ndarray) -> np.ndarray:
    return a / np.linalg.norm(a, axis=1, keepdims=True)
