"""Whether a stationary point of the full problem is a minimum: its second order.

With multipliers lambda of the least gaps, logits of the same rank near a stationary
point cost, in a direction v that keeps the gaps that have a price, v.H(lambda)v/2 more
(`FixedRank.hessian`). Symmetric structures have more least gaps than they need, and
then many multipliers. The cost is that of the greatest v.H(lambda)v among them, since
to second order the gaps may be closed again in the cheapest way, by the duality of
linear programs (Bonnans & Shapiro 2000, ch. 3). So

- a minimum is a point where one lambda makes all curvatures positive,
- a saddle one with a direction whose curvature is negative for every lambda.

The lambda whose least curvature is greatest comes from cutting planes: the curvature in
given directions is linear in lambda.
"""

import numpy as np
import scipy.optimize

from ._fixed_rank import FixedRank, gap_matrices, pooled

# Curvatures and multipliers below this, where all are of order one, are zero.
SLACK = 1e-6
_CUTS = 20


def way_down(
    point: FixedRank, duals: np.ndarray, active: np.ndarray
) -> tuple[float, np.ndarray | None]:
    """Returns the least curvature, and a direction that leads down, if one was found.

    The curvature is the least over directions that keep the priced gaps. One that leads
    down must close no other least gap, at least not on one of its sides, which it is
    turned to.
    """
    others, classes = np.nonzero(active)
    matrices = gap_matrices(others, classes, len(active))
    rows = point.pulled_back(matrices)
    prices = duals[active]
    priced = prices > SLACK * np.max(prices)
    spare = free_directions(rows.T)
    plain = point.hessian(np.zeros_like(duals))
    first = point.hessian(pooled(duals))
    more = [point.hessian(np.tensordot(s, matrices, 1)) - plain for s in spare.T]
    curvature = np.inf
    # All directions but those that open or close an unpriced gap; then without these.
    for kept in (priced, np.ones_like(priced)):
        free = free_directions(rows[kept])
        least, ways = _least_curvature(free, first, more, prices, spare)
        curvature = min(curvature, least) if kept is priced else curvature
        if least >= -SLACK:
            return curvature, None
        for way in ways:
            side = _open_side(rows[~kept] @ way)
            if side:
                return curvature, side * way
    return curvature, None


def _open_side(openings: np.ndarray) -> int:
    """Returns the sign that makes gaps open or stay as they are, 0 if neither does."""
    if np.all(openings >= -SLACK):
        return 1
    return -1 if np.all(openings <= SLACK) else 0


def _least_curvature(free, first, more, prices, spare):
    """Returns the least curvature at the best multipliers, and what is sure to go down.

    Over directions in the span of the columns of `free`; multipliers are
    prices + spare z >= 0, and their second derivatives first + sum_j z_j more_j.
    """
    if free.shape[1] == 0:
        return np.inf, []
    mix, best, ways = np.zeros(len(more)), -np.inf, []
    for _ in range(_CUTS if len(more) else 1):
        hessian = first + sum(z * h for z, h in zip(mix, more, strict=True))
        values, vectors = np.linalg.eigh(free.T @ hessian @ free)
        best = max(best, float(values[0]))
        if best > SLACK:
            return best, []
        low = values < min(-SLACK, 0.5 * values[0])
        ways += list((free @ vectors[:, low]).T)
        if not len(more) or not ways:
            break
        bound, mix = _best_mix(ways, first, more, prices, spare)
        if bound < best + SLACK:
            break
    if not len(more):
        return best, ways
    sure = [w for w in ways if _best_mix([w], first, more, prices, spare)[0] < -SLACK]
    return best, sure


def _best_mix(ways, first, more, prices, spare) -> tuple[float, np.ndarray]:
    """Returns the greatest least curvature over some directions, and z there."""
    ways = np.asarray(ways)
    fixed = np.einsum("wi,ij,wj->w", ways, first, ways)
    slopes = np.einsum("wi,zij,wj->wz", ways, np.asarray(more), ways)
    # Greatest t with t <= fixed + slopes z and -spare z <= prices.
    above = np.hstack([-slopes, np.ones((len(ways), 1))])
    positive = np.hstack([-spare, np.zeros((len(spare), 1))])
    unit = np.max(prices)
    goal = np.zeros(len(more) + 1)
    goal[-1] = -1
    found = scipy.optimize.linprog(
        goal,
        A_ub=np.vstack([above, positive / unit]),
        b_ub=np.concatenate([fixed, prices / unit]),
        bounds=(None, None),
    )
    if not found.success:  # nothing is claimed
        return np.inf, np.zeros(len(more))
    return float(found.x[-1]), found.x[:-1]


def free_directions(rows: np.ndarray) -> np.ndarray:
    """Returns an orthonormal basis, as columns, of where `rows` vanish."""
    if len(rows) == 0:
        return np.eye(rows.shape[1])
    _, values, vectors = np.linalg.svd(rows)
    return vectors[np.sum(values > SLACK * values[0]) :].T
