"""Stationary points of the full flow's problem at infinity.

The direction of the class-mean logits Z (K, K), column c those of class c, tends to
that of a Karush-Kuhn-Tucker point of

    min sum_i sigma_i^q  subject to  Z_cc - Z_kc >= 1 for k != c,   q = 2/(L+1),

(P1 eqs. 3 and 24, Lemma D.7) in the parameters, where a singular value at zero is
stationary whatever its price. So Z = U S V^T is stationary among matrices of its own
rank: with multipliers lambda >= 0 of the gaps that are least and
M = sum lambda_kc (e_c - e_k) e_c^T,

    U^T M = q S^{q-1} V^T,    M V = q U S^{q-1}.

For L > 1 that is all: the slope of sigma^q at zero is infinite. For L = 1, the nuclear
norm, a new singular value may still be worth growing, |U'^T M V'| > 1 on the
complements, and the point is then a saddle of the flow.

Of second order: a strict local minimum is one where f - <M, Z> curves upwards, on the
matrices of its rank, in every direction that keeps the gaps that have a price
(`FixedRank.hessian`). Where the multipliers are not unique, those of least norm speak.

NumPy and SciPy on the host, for K up to a few tens.
"""

from dataclasses import dataclass

import numpy as np
import scipy.optimize
from jaxtyping import Float

from .._types import SquareMatrix
from ._fixed_rank import FixedRank, gaps_of, least_gap, pooled
from ._reduced_kkt import Verdict
from ._second_order import SLACK, way_down

# Picks the multipliers of least norm; its bias, about its square, is then removed.
_RIDGE = 1e-5


@dataclass(frozen=True)
class MatrixKKT:
    """Class-mean logits, and how far they are from a limit of the full flow.

    - `logits`, (K, K): scaled to a least gap of 1; dead singular values are dropped.
    - `gaps`, (K, K): Z_cc - Z_kc at row k of column c, zero on the diagonal.
    - `duals`, (K, K): lambda in the same places, zero where the gap is not least.
    - `objective`: sum of sigma^q; (L+1)·n^{1/(L+1)} times this is `schatten_objective`.
    - `singular_values`, (rank,): falling.
    - `active`, (K, K): which gaps are least.
    - `residual`: the largest entry of |U - M V S^{1-q}/q|, of |V - M^T U S^{1-q}/q|,
      and |gap - 1| over active gaps.
    - `curvature`: the least second derivative over directions that keep the priced
      gaps, in units where the norm itself has curvatures 1 and -(1-q) across and along
      its singular values; inf where there is no such direction, NaN where the point is
      not stationary.
    - `verdict`: a `Verdict`.
    """

    logits: np.ndarray
    gaps: np.ndarray
    duals: np.ndarray
    objective: float
    singular_values: np.ndarray
    active: np.ndarray
    residual: float
    curvature: float
    verdict: Verdict

    @property
    def rank(self) -> int:
        """The rank of the logits."""
        return len(self.singular_values)


def matrix_kkt(
    logits: SquareMatrix | Float[np.ndarray, "classes classes"],
    depth: float | int,
    *,
    zero: float = 1e-9,
    tie: float = 1e-9,
    tolerance: float = 1e-8,
    width: int | None = None,
) -> MatrixKKT:
    """Says whether a direction of the full flow can be a limit, and of what kind.

    A gap that is least but has no price is taken as free to open or close, so that a
    minimum which only such gaps hold is not called one; `SADDLE` is said only where a
    direction was found that leads down.

    **Arguments:**

    - `logits`: class means, (K, K), of any scale; column c is class c.
    - `depth`: L >= 1, any finite real number.
    - `zero`: singular values below this part of the largest are dead.
    - `tie`: gaps above the least by no more than this part of it are active.
    - `tolerance`: the largest residual of a stationary point.
    - `width`: d, where a bottleneck d < K keeps the rank from growing beyond it: at
        L = 1 a point of that rank may be a minimum though another rank would pay.

    **Returns:** a `MatrixKKT`; where a class is misclassified its numbers are NaN.

    **Raises:** `ValueError` for a depth below 1 or not finite, or logits that are not
    square, not finite, or all zero.
    """
    given, power = checked(logits, depth)
    start = FixedRank.nearest(given, len(given), power)
    rank = int(np.sum(start.values > zero * start.values[0]))
    start = FixedRank(start.left, start.values[:rank], start.right, power)
    if not least_gap(start.logits) > 0:
        nothing = np.full_like(given, np.nan)
        wrong = (gaps_of(start.logits) <= 0) & ~np.eye(len(given), dtype=bool)
        return MatrixKKT(
            nothing, nothing, nothing, np.nan, start.values * np.nan, wrong, np.nan,
            np.nan, Verdict.INFEASIBLE,
        )  # fmt: skip
    point = start.scaled()
    gaps = gaps_of(point.logits)
    off = ~np.eye(len(given), dtype=bool)
    # The least is so itself, whatever rounding has made of it.
    active = (gaps <= (1 + tie) * np.min(gaps[off])) & off
    duals, stationarity = fitted_duals(point, active)
    residual = max(stationarity, float(np.max(np.abs(gaps[active] - 1))))
    if residual > tolerance:
        curvature, verdict = np.nan, Verdict.NOT_STATIONARY
    else:
        may_grow = width is None or rank < width
        curvature, verdict = _judge(point, duals, active, may_grow)
    return MatrixKKT(
        point.logits, gaps, duals, point.objective, point.values, active, residual,
        curvature, verdict,
    )  # fmt: skip


def checked(logits, depth) -> tuple[np.ndarray, float]:
    """Returns the logits in double precision, and q; refuses what is no point."""
    given = np.asarray(logits, float)
    square = given.ndim == 2 and given.shape[0] == given.shape[1] >= 2
    if not (square and np.all(np.isfinite(given)) and np.any(given)):
        raise ValueError(
            "Argument `logits` must be a square matrix of finite class means, not all "
            f"zero, for 2 or more classes, but is {given}."
        )
    if not 1 <= depth < np.inf:
        raise ValueError(
            f"Argument `depth` must be finite and at least 1, but is {depth}."
        )
    return given, 2 / (depth + 1)


def fitted_duals(point: FixedRank, active: np.ndarray) -> tuple[np.ndarray, float]:
    """Returns the multipliers that fit best, and the largest relative misfit."""
    others, classes = np.nonzero(active)
    size, rank = len(active), point.rank
    left, right = point.left[:, :rank], point.right[:, :rank]
    pairs = np.arange(len(classes))
    # M V in units of q U S^{q-1}, and M^T U in those of q V S^{q-1}.
    across = np.zeros((len(pairs), size, rank))
    across[pairs, classes] = right[classes] / point.prices
    across[pairs, others] = -right[classes] / point.prices
    along = np.zeros((len(pairs), size, rank))
    along[pairs, classes] = (left[classes] - left[others]) / point.prices
    columns = np.concatenate([across, along], axis=1).reshape(len(pairs), -1).T
    target = np.concatenate([left, right]).ravel()
    unit = np.mean(point.prices)
    best = _least_nonnegative(columns * unit, target) * unit
    duals = np.zeros((size, size))
    duals[others, classes] = best
    return duals, float(np.max(np.abs(columns @ best - target)))


def _least_nonnegative(columns: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Returns x >= 0 that fits best, and of those the one of least norm."""
    count = columns.shape[1]
    ridge = np.vstack([columns, _RIDGE * np.eye(count)])
    padded = np.concatenate([target, np.zeros(count)])
    best = nonnegative_fit(ridge, padded)
    kept = best > SLACK * np.max(best)
    for _ in range(2):
        misfit = target - columns @ best
        change = np.linalg.lstsq(columns[:, kept], misfit, rcond=SLACK)[0]
        better = best.copy()
        better[kept] += change
        better[~kept] = 0
        if np.min(better) < 0:
            break
        best = better
    return best


def nonnegative_fit(columns: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Returns x >= 0 that minimises |columns x - target|; zeros if none was found."""
    try:
        return scipy.optimize.nnls(columns, target, maxiter=10 * sum(columns.shape))[0]
    except RuntimeError:  # it cycled; what is made of the zeros is seen in a residual
        return np.zeros(columns.shape[1])


def _judge(point, duals, active, may_grow=True) -> tuple[float, Verdict]:
    """Returns the least curvature, and what a stationary point is."""
    curvature, way = way_down(point, duals, active)
    rank = point.rank
    if may_grow and point.power == 1 and rank < len(active):
        beyond = point.left[:, rank:].T @ pooled(duals) @ point.right[:, rank:]
        if np.linalg.norm(beyond, 2) > 1 + SLACK:
            return curvature, Verdict.SADDLE
    if way is not None:
        return curvature, Verdict.SADDLE
    return curvature, Verdict.MINIMUM if curvature > SLACK else Verdict.FLAT
