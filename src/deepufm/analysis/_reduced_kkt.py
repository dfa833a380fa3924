"""Stationary points of the reduced flow's problem at infinity.

The direction of a tends to a Karush-Kuhn-Tucker point of

    min sum_i a_i^q  subject to  Psi a >= 1,  a >= 0,    q = 2/(L+1),       (P1 eq. 3)

for Hadamard logits: with multipliers lambda >= 0 of the margins Psi a that are least,

    q a_i^{q-1} = sum_j Psi_ji lambda_j   where a_i > 0,

in the parameters, where a mode at zero is stationary whatever its price. For L > 1 that
is all: the slope of a_i^q at zero is infinite. For L = 1 a mode at zero may still be
worth growing, and the point is then a saddle of the flow.

The sum is concave on a support (linear for L = 1), so that a point is a strict local
minimum exactly if no direction that keeps the margins leaves it at equal cost to first
order; what else is stationary is a saddle (flat for L = 1).

NumPy and SciPy on the host, for a few thousand points at most.
"""

import enum
from dataclasses import dataclass

import numpy as np
import scipy.optimize
from jaxtyping import Float

from .._types import Modes
from ..geometry import psi_matrix

# Slopes and margins below this, where all are of order one, are zero to the linear
# programs, whose own tolerance is 1e-7.
_SLACK = 1e-6


class Verdict(enum.Enum):
    """What a point of the problem at infinity is."""

    MINIMUM = "a strict local minimum"
    FLAT = "stationary, with directions that second order does not decide"
    SADDLE = "stationary, but no local minimum"
    NOT_STATIONARY = "not stationary"
    INFEASIBLE = "misclassifies a class"


@dataclass(frozen=True)
class ReducedKKT:
    """A point of the reduced problem, and how far it is from being stationary.

    - `a`, (K-1,): scaled to a smallest margin of 1.
    - `margins`, (K-1,): Psi a.
    - `duals`, (K-1,): lambda, zero where the margin is not least.
    - `objective`: sum of a^q; (L+1)·K^q times this is `schatten_objective` at n = 1.
    - `support`, `active`: which modes are alive, which margins least.
    - `residual`: the largest of |1 - (Psi lambda)_i/(q a_i^{q-1})| over living modes
        and |margin_j - 1| over active margins.
    - `verdict`: a `Verdict`.
    """

    a: np.ndarray
    margins: np.ndarray
    duals: np.ndarray
    objective: float
    support: np.ndarray
    active: np.ndarray
    residual: float
    verdict: Verdict

    @property
    def rank(self) -> int:
        """The rank of the logits: the number of living modes."""
        return int(np.sum(self.support))


def reduced_kkt(
    a: Modes | Float[np.ndarray, " modes"],
    depth: float | int,
    *,
    zero: float = 1e-9,
    tie: float = 1e-9,
    tolerance: float = 1e-8,
) -> ReducedKKT:
    """Says whether a direction of the reduced flow can be a limit, and of what kind.

    **Arguments:**

    - `a`: modes, (K-1,), of any scale; K a power of two.
    - `depth`: L >= 1, any finite real number.
    - `zero`: modes below this part of the largest are dead.
    - `tie`: margins above the least by no more than this part of it are active.
    - `tolerance`: the largest residual of a stationary point.

    **Returns:** a `ReducedKKT`; where a class is misclassified (the living modes do not
    span F_2^m, P1 Prop. C.1) its numbers are NaN.

    **Raises:** `ValueError` for a depth below 1 or not finite, or modes that are
    negative, not finite, or all zero.
    """
    modes = np.asarray(a, float)
    if not (np.all(np.isfinite(modes)) and np.all(modes >= 0) and np.any(modes > 0)):
        raise ValueError(
            "Argument `a` must hold finite modes, none negative and one positive, but "
            f"is {modes}."
        )
    if not 1 <= depth < np.inf:
        raise ValueError(
            f"Argument `depth` must be finite and at least 1, but is {depth}."
        )
    psi = np.asarray(psi_matrix(modes.shape[0] + 1))
    power = 2 / (depth + 1)
    support = modes > zero * np.max(modes)
    living = np.where(support, modes, 0)
    margins = psi @ living
    least = np.min(margins)
    if least <= 0:
        nothing = np.full_like(modes, np.nan)
        return ReducedKKT(
            nothing, nothing, nothing, np.nan, support, margins <= 0, np.nan,
            Verdict.INFEASIBLE,
        )  # fmt: skip
    point, margins = living / least, margins / least
    active = margins <= 1 + tie
    duals, stationarity = _duals(psi, point, power, support, active)
    residual = max(stationarity, float(np.max(np.abs(margins[active] - 1))))
    if residual > tolerance:
        verdict = Verdict.NOT_STATIONARY
    elif _is_strict(psi, point, power, support, active):
        verdict = Verdict.MINIMUM
    else:
        verdict = Verdict.SADDLE
    objective = float(np.sum(point[support] ** power))
    return ReducedKKT(
        point, margins, duals, objective, support, active, residual, verdict
    )


def _duals(psi, a, power, support, active) -> tuple[np.ndarray, float]:
    """Returns the multipliers that fit best, and the largest relative misfit."""
    prices = power * a[support] ** (power - 1)
    scaled = psi[np.ix_(support, active)] / prices[:, None]
    best, _ = scipy.optimize.nnls(scaled, np.ones(len(prices)))
    duals = np.zeros_like(a)
    duals[active] = best
    return duals, float(np.max(np.abs(scaled @ best - 1)))


def _is_strict(psi, a, power, support, active) -> bool:
    """Returns whether no direction leaves the point at equal cost to first order.

    Directions v keep the active margins, (Psi v)_j >= 0, and cost no more, g·v <= 0;
    at L = 1 dead modes may grow. There is one other than 0 where such a v has some
    (Psi v)_j or growing mode above 0, or where Psi v = 0 for some v on the support.
    """
    rows = psi[active]
    if np.linalg.matrix_rank(rows[:, support]) < np.sum(support):
        return False
    free = support if power < 1 else np.ones_like(support)
    # In units of each mode, for directions of order one.
    units = np.where(support, a, 1.0)
    rows = (rows * units)[:, free]
    living = np.where(support, a, 1.0) ** (power - 1)
    slopes = (np.where(support, power * living, 1.0) * units)[free]
    bounds = [(-1, 1) if alive else (0, 1) for alive in support[free]]
    gains = np.sum(rows, axis=0) + ~support[free]
    found = scipy.optimize.linprog(
        -gains,
        A_ub=np.vstack([-rows, slopes]),
        b_ub=np.zeros(len(rows) + 1),
        bounds=bounds,
    )
    assert found.success  # v = 0 is feasible, and all is bounded
    return -found.fun < _SLACK
