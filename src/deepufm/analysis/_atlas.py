"""The atlas of the reduced problem: all it can tend to, one point of each orbit.

Stationary points, as `reduced_kkt` has them, of

    min sum_i a_i^q  subject to  Psi a >= 1,  a >= 0,    q = 2/(L+1).        (P1 eq. 3)

Points come in orbits of GL(m, 2), K = 2^m, which relabels modes and margins at equal
cost (`_reduced_vertices`).

A point has a support S and least margins T. On {a_S > 0, Psi_TS a = 1} the sum is
strictly concave for L > 1 and has at most one critical point. For K = 4 and 8 each
orbit of pairs (S, T) is tried, and every stationary point found. At L = 1 the points of
support S are the inside of the face where a linear program over S is least.

A local minimum for L > 1 is a vertex. For K = 16 each orbit of vertices is tried: every
minimum is found, but no saddle that is no vertex, as most are.

A support has positive margins exactly if it spans F_2^m, which takes m = log2 K modes
(P1 Prop. C.1): no j but 0 is orthogonal to all of a spanning set.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import scipy.linalg
import scipy.optimize
from jaxtyping import Bool, Float

from .._types import Modes
from ._reduced_kkt import ReducedKKT, Verdict, reduced_kkt
from ._reduced_vertices import canonical, group, psi, vertices

# Least parts of the largest mode that are alive.
_DEAD = 1e-9
# Of linear programs, whose own tolerance is 1e-7.
_SLACK = 1e-6
# What a dying mode's price is cut off at, in units of the lowest.
_HIGHEST = 1e6


@dataclass(frozen=True)
class AtlasEntry:
    """An orbit of stationary points of the reduced problem.

    - `a`, (K-1,): of its points the lexicographically largest; least margin 1.
    - `depth`: L.
    - `modes`, `active`: numbers i >= 1 of the living modes and of the least margins.
    - `objective`: sum of a^q.
    - `verdict`: a minimum or a saddle of the flow.
    - `orbit`: the number of points.
    - `isolated`: False where `a` is one point of a continuum, which happens at L = 1.
        Then `orbit` counts the supports.
    """

    a: np.ndarray
    depth: float
    modes: tuple[int, ...]
    active: tuple[int, ...]
    objective: float
    verdict: Verdict
    orbit: int
    isolated: bool

    @property
    def rank(self) -> int:
        """The rank of the logits: the number of living modes."""
        return len(self.modes)

    def matches(
        self,
        a: Modes | Float[np.ndarray, " modes"],
        *,
        tolerance: float = 1e-6,
    ) -> bool:
        """Returns whether a direction is a point of this orbit, to count limits by.

        **Arguments:**

        - `a`: modes, (K-1,), of any scale.
        - `tolerance`: by how much of the largest each mode may differ, once scaled to a
            least margin of 1. Modes below it are dead where a continuum is matched.
        """
        given = np.asarray(a, float)
        if given.shape != self.a.shape:
            return False
        if not np.all((given >= 0) & (given < np.inf)):
            return False
        least = np.min(psi(len(given) + 1) @ given)
        if not least > 0:
            return False
        near = tolerance * np.max(self.a)
        given = given / least
        if self.isolated:
            moved = given[group(len(given) + 1)[0]]
            return bool(np.any(np.max(np.abs(moved - self.a), axis=1) <= near))
        alive = np.where(given > near, given, 0)
        same = canonical(1.0 * (alive > 0))[0] == canonical(1.0 * (self.a > 0))[0]
        excess = np.sum(alive ** (2 / (self.depth + 1))) - self.objective
        return bool(np.all(same) and abs(excess) <= tolerance * self.objective)


def atlas(num_classes: int, depth: float | int) -> tuple[AtlasEntry, ...]:
    """Returns the stationary points of the reduced flow's problem at infinity.

    Up to relabelling: all of them for K <= 8; for K = 16 those that are vertices, and
    all minima with them.

    **Arguments:**

    - `num_classes`: K: 2, 4, 8 or 16.
    - `depth`: L >= 1, any finite real number. Just above 1 (below about 1.15) saddles
        whose least mode is less than 1e-9 of the largest are missed.

    **Returns:** `AtlasEntry`s by rising objective, one for each orbit of GL(m, 2).

    **Raises:** `ValueError` for another K, or a depth below 1 or not finite.

    !!! example
        minima = [e for e in atlas(8, depth=2) if e.verdict is Verdict.MINIMUM]
    """
    if num_classes not in (2, 4, 8, 16):
        raise ValueError(
            f"Argument `num_classes` must be 2, 4, 8 or 16, but is {num_classes}: "
            "the orbits of more are too large to list."
        )
    if not 1 <= depth < np.inf:
        raise ValueError(
            f"Argument `depth` must be finite and at least 1, but is {depth}."
        )
    power = 2 / (depth + 1)
    isolated, continua = [], []
    if num_classes == 16:
        isolated = [point for point, _ in vertices(num_classes)]
    elif depth == 1:
        for support in _supports(num_classes):
            point, alone = _inside_of_face(num_classes, support)
            (isolated if alone else continua).append(point)
    else:
        isolated = [
            _critical(num_classes, support, tight, power)
            for support, tight in _pairs(num_classes)
        ]
    found = _gathered(isolated, depth, True) + _gathered(continua, depth, False)
    return tuple(sorted(found, key=lambda entry: entry.objective))


def descend(a: Modes | Float[np.ndarray, " modes"], depth: float | int) -> ReducedKKT:
    """Goes down from any modes to a vertex that is stationary, by linear programs.

    Each one minimises the sum's tangent, which lies above it; a mode that has died
    stays dead, as its price is infinite (at L = 1 its price is 1, and it may grow).

    **Arguments:** `a`, (K-1,), any scale; `depth` L >= 1, finite.

    **Returns:** the vertex, a `ReducedKKT`; its objective is less than the start's,
    unless that is such a vertex itself.

    **Raises:** `ValueError` as `reduced_kkt`, and where a class is misclassified.
    """
    start = reduced_kkt(a, depth)
    if start.verdict is Verdict.INFEASIBLE:
        raise ValueError(
            "Argument `a` must classify every class: its living modes must span "
            f"F_2^m, but those of {np.asarray(a)} do not."
        )
    matrix, power = psi(len(start.a) + 1), 2 / (depth + 1)
    point, best = start.a, start.objective
    while True:
        alive = (point > 0) | (power == 1)
        prices = np.where(point > 0, point, 1)[alive] ** (power - 1)
        prices = np.minimum(prices / np.min(prices), _HIGHEST)
        vertex = scipy.optimize.linprog(
            prices, A_ub=-matrix[:, alive], b_ub=-np.ones(len(matrix))
        )
        assert vertex.success  # the point is feasible, and no cost negative
        moved = np.zeros_like(point)
        moved[alive] = vertex.x
        moved = _sharpened(matrix, moved)
        cost = np.sum(moved[moved > 0] ** power)
        if cost >= best * (1 - 1e-9):  # there are finitely many vertices
            return reduced_kkt(moved if cost < best * (1 + 1e-9) else point, depth)
        point, best = moved, cost


def span_rank(support: Bool[np.ndarray, " modes"]) -> int:
    """Returns the rank over F_2 of the living modes' numbers, at most m = log2 K.

    **Arguments:** `support`, (K-1,): which modes are alive; the first has number 1.
    """
    basis: list[int] = []
    for number in np.flatnonzero(support) + 1:
        rest = int(number)
        for vector in basis:
            rest = min(rest, rest ^ vector)  # clears the vector's leading digit
        if rest:
            basis = sorted([*basis, rest], reverse=True)
    return len(basis)


def spans(support: Bool[np.ndarray, " modes"]) -> bool:
    """Returns whether modes with this support classify every class (P1 Prop. C.1).

    **Arguments:** `support`, (K-1,), K a power of two.
    """
    return span_rank(support) == len(support).bit_length()


def _subsets(num_classes: int) -> np.ndarray:
    """Returns all subsets of K-1 things, one a row, and row s holds the digits of s."""
    size = num_classes - 1
    return (np.arange(2**size)[:, None] >> np.arange(size) & 1).astype(bool)


def _supports(num_classes: int) -> list[np.ndarray]:
    """Returns supports that span, one of each orbit."""
    subsets = _subsets(num_classes)
    firsts = {tuple(canonical(1.0 * subset)[0]) for subset in subsets if spans(subset)}
    return [np.array(first) > 0 for first in firsts]


def _pairs(num_classes: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields supports that span and sets of margins, one pair of each orbit."""
    forward, turned = group(num_classes)
    subsets = _subsets(num_classes)
    # Gathered by g, modes stand where the margins do that are scattered by g^T.
    modes = np.sum(subsets[:, forward] << np.arange(num_classes - 1), axis=-1)
    margins = subsets @ (1 << turned).T
    spanning = [spans(subset) for subset in subsets]
    keys = modes[spanning, None] * len(subsets) + margins
    for key in np.unique(np.min(keys, axis=-1)):
        support, tight = divmod(int(key), len(subsets))
        yield subsets[support], subsets[tight]


def _critical(num_classes, support, tight, power) -> np.ndarray | None:
    """Returns the feasible point with a_S > 0, Psi_TS a = 1 where the sum is greatest.

    None where there is no such point.
    """
    matrix = psi(num_classes)[:, support]
    rows = matrix[tight]
    if not np.all(np.any(rows > 0, axis=0)):  # a mode that nothing holds
        return None
    point = np.linalg.lstsq(rows, np.ones(len(rows)))[0]
    if np.max(np.abs(rows @ point - 1)) > _SLACK:
        return None
    free = scipy.linalg.null_space(rows)
    if free.size:
        point = _greatest(_centre(rows), free, power)
    if point is None or np.min(point) < _DEAD or np.min(matrix @ point) < 1 - _SLACK:
        return None
    whole = np.zeros(num_classes - 1)
    whole[support] = point
    return whole


def _centre(rows: np.ndarray) -> np.ndarray | None:
    """Returns the point with rows·a = 1 whose least entry is greatest, if positive."""
    size = rows.shape[1]
    found = scipy.optimize.linprog(
        np.append(np.zeros(size), -1),
        A_ub=np.hstack([-np.eye(size), np.ones((size, 1))]),
        b_ub=np.zeros(size),
        A_eq=np.hstack([rows, np.zeros((len(rows), 1))]),
        b_eq=np.ones(len(rows)),
    )
    if not (found.success and found.x[-1] > _SLACK):
        return None
    point = found.x[:size]
    return point + np.linalg.lstsq(rows, 1 - rows @ point)[0]


def _greatest(point, free, power) -> np.ndarray | None:
    """Climbs sum a^q over a + free·y by Newton's method, inside a > 0.

    None where a mode dies, as near L = 1, where the best is almost a corner.
    """
    for _ in range(200):
        if point is None or np.min(point) < 1e-3 * _DEAD:
            return None
        slope = free.T @ point ** (power - 1)
        bend = (free.T * ((1 - power) * point ** (power - 2))) @ free
        step = free @ np.linalg.solve(bend, slope)
        length = min(1, 0.9 / max(np.max(-step / point), 1e-300))
        value = np.sum(point**power)
        while np.sum((point + length * step) ** power) < value * (1 - 1e-14):
            length /= 2
        point = point + length * step
        if np.max(np.abs(step / point)) < 1e-14:
            break
    return point


def _inside_of_face(num_classes, support) -> tuple[np.ndarray | None, bool]:
    """Returns an inner point of the face where sum a_S is least, and if it is alone.

    None where some mode of S is zero on all of it.
    """
    matrix = psi(num_classes)[:, support]
    size = matrix.shape[1]
    limits = {"A_ub": -matrix, "b_ub": -np.ones(len(matrix))}
    least = scipy.optimize.linprog(np.ones(size), **limits).fun
    limits |= {"A_eq": np.ones((1, size)), "b_eq": [least]}
    corners = np.array(
        [scipy.optimize.linprog(-unit, **limits).x for unit in np.eye(size)]
    )
    whole = np.zeros(num_classes - 1)
    whole[support] = np.mean(corners, axis=0)
    if np.min(whole[support]) < _SLACK:
        return None, True
    alone = np.max(np.ptp(corners, axis=0)) < _SLACK
    return _sharpened(psi(num_classes), whole), bool(alone)


def _sharpened(matrix, a) -> np.ndarray:
    """Returns the nearest point with the same support whose least margins are 1."""
    support = a > _SLACK * np.max(a)
    rows = matrix[matrix @ a < 1 + _SLACK][:, support]
    living = a[support]
    sharp = np.zeros_like(a)
    sharp[support] = living + np.linalg.lstsq(rows, 1 - rows @ living)[0]
    return sharp


def _gathered(points, depth, isolated) -> list[AtlasEntry]:
    """Returns the stationary ones of the points, one of each orbit."""
    entries: list[AtlasEntry] = []
    for point in points:
        if point is None or any(
            entry.matches(point, tolerance=_DEAD) for entry in entries
        ):
            continue
        first, orbit = canonical(point)
        if not isolated:
            _, orbit = canonical(1.0 * (point > 0))
        found = reduced_kkt(first, depth)
        if found.verdict in (Verdict.INFEASIBLE, Verdict.NOT_STATIONARY):
            continue
        modes, active = (
            tuple(int(i) + 1 for i in np.flatnonzero(kept))
            for kept in (found.support, found.active)
        )
        entries.append(
            AtlasEntry(
                found.a,
                float(depth),
                modes,
                active,
                found.objective,
                found.verdict,
                orbit,
                isolated,
            )  # fmt: skip
        )
    return entries
