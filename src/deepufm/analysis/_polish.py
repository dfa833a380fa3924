"""From logits near a limit of the full flow to that limit, to machine precision.

Descends the scale-free cost f(Z)/g^q, g the least gap, on the matrices of one rank, to
the nearest local minimum of `matrix_kkt`'s problem: sequential quadratic programs,
each step short enough to stay in its basin and taken only if the cost falls, then
Newton's iteration on the gaps that turned out to be least. A singular value on its way
to zero is dropped, and the descent goes on at the lower rank.

Each program min g.x + x.Hx/2 subject to gap + G x >= 1 is solved, after H is made
positive, as a problem of least distance by non-negative least squares, which does not
mind more active gaps than a vertex needs (Lawson & Hanson 1974, ch. 23).
"""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from .._types import SquareMatrix
from ..geometry import angle_between
from ._fixed_rank import FixedRank, gap_matrices, gaps_of, least_gap, pooled
from ._matrix_kkt import (
    MatrixKKT,
    checked,
    fitted_duals,
    matrix_kkt,
    nonnegative_fit,
)
from ._reduced_kkt import Verdict
from ._second_order import way_down

_STEPS = 300
# The longest step, as a part of the one that would double the logits.
_LONGEST = 0.2
# A singular value below this part of the largest, and falling, is dropped.
_DYING = 1e-3
_DEAD = 1e-6
# Newton's iteration is tried when steps are this short, and again when ten times less.
_CLOSE = 1e-2
_NEWTON = 12
# Gaps beyond this are left out of the programs.
_FAR = 3.0
# Curvatures are at least this, where 1 is that of the norm across singular values.
_LEAST_CURVATURE = 0.05
_STIFFEST = 1e6
_SHORTEST = 1e-13
_TINY = 1e-300
# A residual that rounding explains.
_EXACT = 1e-12


@dataclass(frozen=True)
class Polished:
    """Where `polish` ended.

    - `point`: a `MatrixKKT`; its verdict says whether it is a minimum.
    - `angle`: between the given and the final class means, centred, in radians.
    - `steps`: how many steps of descent were taken.
    - `saddles`: stationary points met on the way and left again.
    """

    point: MatrixKKT
    angle: float
    steps: int
    saddles: tuple[MatrixKKT, ...]


def polish(
    logits: SquareMatrix | Float[np.ndarray, "classes classes"],
    depth: float | int,
    rank: int | None = None,
) -> Polished:
    """Descends from class-mean logits to a local minimum nearby.

    **Arguments:**

    - `logits`: class means, (K, K), of any scale, say those of a flow at a late time.
    - `depth`: L >= 1, any finite real number.
    - `rank`: that of the limit, or more; the smaller singular values are dropped at
      once. By default all above 1e-6 of the largest are kept.

    **Returns:** a `Polished`. Nothing is raised where no minimum is found, or where
    the start, cut to its rank, misclassifies: the verdict says so.

    **Raises:** `ValueError` for a depth below 1 or not finite, logits that are not
    square, not finite, or all zero, or a rank outside 1..K.
    """
    given, power = checked(logits, depth)
    if rank is not None and not 1 <= rank <= len(given):
        raise ValueError(
            f"Argument `rank` must be from 1 to {len(given)}, but is {rank}."
        )
    # A constant added to a column changes no gap, and only costs.
    centred = given - np.mean(given, axis=0)
    values = np.linalg.svd(centred, compute_uv=False)
    alive = max(int(np.sum(values > 1e-6 * values[0])), 1)
    point = FixedRank.nearest(centred, min(rank or alive, alive), power)
    if not least_gap(point.logits) > 0:
        return Polished(matrix_kkt(point.logits, depth), 0.0, 0, ())
    found, steps, saddles = _descend(point.scaled(), depth)
    return Polished(found, angle_between(centred, found.logits), steps, saddles)


def _descend(point, depth):
    """Returns the last point's judgement, the steps taken, and saddles left behind."""
    start, saddles, taken = point.logits, [], 0
    while True:
        point, found, steps = _to_stationary(point, depth, _STEPS - taken)
        taken += steps
        if found.verdict is not Verdict.SADDLE or taken >= _STEPS:
            break
        lower = _off_saddle(point, found, start)
        if lower is None:
            break
        saddles.append(found)
        point = lower
    return found, taken, tuple(saddles)


def _to_stationary(point, depth, budget):
    """Returns a stationary point downhill, its judgement, and the steps taken."""
    duals, close, damping = _first_duals(point), _CLOSE, 0.0
    taken = 0
    for taken in range(1, budget + 1):
        step, duals, bent = _program(point, duals, damping)
        size = np.linalg.norm(step) / _doubling(point)
        if size < close:
            newton = _newton(point, duals, depth)
            if newton is not None and _is_ahead(*newton, point, size):
                return *newton, taken
            close = size / 10
        lower, damping = _lower(point, step, bent, damping)
        if lower is None:
            if damping > _STIFFEST or size < _SHORTEST:
                break
            continue
        point, before = _without_dying(lower, point), point
        if point.rank < before.rank:
            duals = _first_duals(point)
    return point, matrix_kkt(point.logits, depth), taken


def _first_duals(point) -> np.ndarray:
    return fitted_duals(point, _gaps_below(point, 1 + _CLOSE))[0]


def _gaps_below(point, bound) -> np.ndarray:
    """Returns which gaps are, (K, K)."""
    gaps = gaps_of(point.logits)
    return (gaps < bound) & ~np.eye(len(gaps), dtype=bool)


def _doubling(point) -> float:
    """Returns the length of the step that doubles the logits."""
    return math.sqrt(point.power * point.objective)


def _is_ahead(end, found, point, size) -> bool:
    """Returns whether Newton's iteration went on downhill, and not off to elsewhere.

    To a minimum along a soft direction it may be far in steps of the descent.
    """
    reach = 3 * size + 1e-7
    if found.curvature > 0:
        reach = max(reach, _CLOSE)
    near = angle_between(end.logits, point.logits) < reach
    return bool(near and end.objective < (1 + 1e-9) * point.objective)


def _program(point, duals, damping):
    """Returns the step that a quadratic program advises, and its multipliers (K, K).

    Also a function that returns the step bent so as to keep the gaps to second order.
    Directions down which the priced gaps do not close are made to cost by their square,
    which does not move the solution; what still curves downwards is turned upwards.
    """
    near = _gaps_below(point, _FAR)
    others, classes = np.nonzero(near)
    rows = point.pulled_back(gap_matrices(others, classes, len(near)))
    missing = 1 - gaps_of(point.logits)[near]
    priced = duals[near] > 1e-6 * np.max(duals)
    stiffness = 3 * point.power * point.objective
    hessian = point.hessian(pooled(duals))
    hessian += stiffness * rows[priced].T @ rows[priced]
    slopes = point.slopes() - stiffness * missing[priced] @ rows[priced]
    values, vectors = np.linalg.eigh(hessian)
    root = vectors / np.sqrt(np.maximum(np.abs(values), _LEAST_CURVATURE) + damping)
    step, prices = _least_distance(root, slopes, rows, missing)
    new = np.zeros_like(duals)
    new[near] = prices

    def bent():
        # Straight steps along curved gaps would have to be short (Maratos' effect).
        if not point.core_change(step) < 1:
            return step
        beyond = rows @ step - gaps_of(point.moved(step).logits)[near]
        return _least_distance(root, slopes, rows, 1 + beyond)[0]

    return step, new, bent


def _least_distance(root, slopes, rows, missing):
    """Minimises slopes.x + |root^-1 x|^2/2 over rows x >= missing.

    Returns x and the multipliers. In y = root^-1 x + root.T slopes it is the least y
    with edges y >= bounds.
    """
    offset, edges = root.T @ slopes, rows @ root
    bounds = missing + edges @ offset
    system = np.vstack([edges.T, bounds])
    target = np.zeros(len(system))
    target[-1] = 1
    prices = nonnegative_fit(system, target)
    prices = prices / max(1 - bounds @ prices, _TINY)
    return root @ (edges.T @ prices - offset), prices


def _lower(point, step, bent, damping):
    """Returns a point along the step that costs less, if any, and the next damping."""
    slope = min(point.slopes() @ step, 0.0)
    reach = _reach(point, step)
    for tries in range(12):
        if tries == 1:
            # Only a step that was not cut short already is bent.
            if reach < 1:
                continue
            way = bent()
            part = _reach(point, way)
        else:
            way, part = step, reach / 2 ** max(tries - 1, 0)
        moved = point.moved(part * way)
        if least_gap(moved.logits) > 0:
            moved = moved.scaled()
            if moved.objective < point.objective + 1e-4 * part * slope:
                return moved, damping / 4 if tries < 2 else 4 * damping + 0.1
    return None, max(10 * damping, 1.0)


def _reach(point, step) -> float:
    """Returns how much of a step is short enough; a singular value at most halves."""
    size = float(np.linalg.norm(step)) / _doubling(point)
    limits = _LONGEST / max(size, _TINY), 0.5 / max(point.core_change(step), _TINY)
    return min(1.0, *limits)


def _without_dying(point, before):
    """Returns the point without its least singular value where that tends to zero."""
    parts = [p.values[-1] / p.values[0] for p in (point, before)]
    if point.rank == 1 or parts[0] > _DYING or parts[0] > parts[1]:
        return point
    left = FixedRank(point.left, point.values[:-1], point.right, point.power)
    if not least_gap(left.logits) > 0:
        return point
    left = left.scaled()
    # One that hardly counts any more goes even where the point gains by it.
    bound = 1 if parts[0] > _DEAD else 1 + 1e-4
    return left if left.objective < bound * point.objective else point


def _newton(point, duals, depth):
    """Returns the stationary point that Newton's iteration reaches, and its judgement.

    None where it reaches none. The gaps kept at 1 are those with a price, or else all
    that are about 1: the former may be too few where several sets of prices fit, the
    latter too many.
    """
    best = None
    for kept in (duals > 1e-6 * np.max(duals), _gaps_below(point, 1 + _CLOSE)):
        # None is priced where no multipliers were found.
        end = _on_gaps(point, duals, kept) if np.any(kept) else None
        if end is None:
            continue
        found = matrix_kkt(end.logits, depth)
        if found.verdict in (Verdict.NOT_STATIONARY, Verdict.INFEASIBLE):
            continue
        if best is None or found.residual < best[1].residual:
            best = end, found
        if found.residual < _EXACT:
            break
    return best


def _on_gaps(point, duals, kept):
    """Returns where Newton's iteration on kept gaps ends; None where it diverges."""
    others, classes = np.nonzero(kept)
    matrices = gap_matrices(others, classes, len(kept))
    prices, last = duals[kept], np.inf
    for _ in range(_NEWTON):
        rows = point.pulled_back(matrices)
        hessian = point.hessian(np.tensordot(prices, matrices, 1))
        system = np.block([[hessian, -rows.T], [rows, np.zeros((len(rows),) * 2)]])
        missing = 1 - gaps_of(point.logits)[kept]
        target = np.concatenate([-point.slopes(), missing])
        solution = np.linalg.lstsq(system, target, rcond=1e-10)[0]
        step, prices = np.split(solution, [len(hessian)])
        size = np.linalg.norm(step) / _doubling(point)
        if not size < 0.5 or (size > last and size > 1e-8):
            return None
        if size > last or size < 1e-15:
            break
        point, last = point.moved(step), size
    return point if least_gap(point.logits) > 0 else None


def _off_saddle(point, found, start):
    """Returns a lower point beside a saddle, on the side of the start; None if none."""
    way = way_down(point, found.duals, found.active)[1]
    if way is None:
        return None
    ahead = point.moved(1e-3 * way).logits - point.logits
    side = 1 if np.sum(ahead * (start - point.logits)) >= 0 else -1
    for part in (0.1, 0.03, 0.01, 0.003):
        for sign in (side, -side):
            step = sign * part * _doubling(point) * way
            lower = _mended(point, step, found.active)
            if lower is not None and lower.objective < point.objective:
                return lower
    return None


def _mended(point, step, active):
    """Returns the point a step away, with active gaps brought back to 1, or above.

    The way off a saddle keeps them to first order alone. What it costs to mend them, or
    brings where they have opened, is of second order, like what is gained.
    """
    others, classes = np.nonzero(active)
    rows = point.pulled_back(gap_matrices(others, classes, len(active)))
    missing = 1 - gaps_of(point.moved(step).logits)[active]
    most = max(np.max(np.abs(missing)), _TINY)
    # As good as linear: of the cheapest ways the shortest.
    root = np.eye(len(step)) * 10
    mending = _least_distance(root, point.slopes(), rows, missing / most)[0]
    step = step + most * mending
    if not point.core_change(step) < 1:
        return None
    point = point.moved(step)
    return point.scaled() if least_gap(point.logits) > 0 else None
