"""The route to the limit of the reduced flow.

In the time s = log ‖a‖_1 the exponentially small speed cancels (P1 eq. 6):

    d log a_i/ds = (b_i a_i^p)/sum_j a-hat_j b_j a_j^p,   b = Psi exp(-Psi a),

the *growth exponent* of a mode. At a large norm it is 1 for a mode of the limit and
falls to 0 for a dying one (for L > 1: dead modes stop growing; for L = 1 it tends to a
number below 1). SciPy's LSODA takes some 600 evaluations from the start to a norm of
1e4 (`_log_norm_time`), a few milliseconds, and compiles nothing.

At 1e4 the margins that matter are tied to 1e-4 of them. As the norm goes on growing
ties only become sharper, until active margins change in steps that no solver resolves
(10^5 of them between 1e6 and 1e9, for one member in 200). What still has to happen are
modes dying, over many decades. So from there the norm in the exponentials is *held*
and the rest of the flow goes on, an error of 1e-4 in where it turns.

The margins of the limit that hold with equality are within a few units of the least one
(their Gibbs weights e^{-m_j} are its multipliers), the others leave like the norm; near
a change of either the split is not clear from one state, so several are tried. Strict
minima are vertices: a support and an active set give the point by least squares.
"""

from collections.abc import Iterator

import numpy as np

from ..analysis import ReducedKKT, Verdict, reduced_kkt
from ..geometry import angle_between, psi_matrix, sylvester_hadamard
from ._approach import KKT, AbstractRoute
from ._conditions import (
    IN_SIGHT,
    INVADING_GROWTH,
    LARGEST_TIE,
    LIVING,
    RESOLUTION,
)
from ._log_norm_time import HELD_FROM, at_norm, followed, growth_exponents

_TARGETS = (
    *np.log([3e2, 1e3, HELD_FROM]),
    *(np.log(HELD_FROM) + np.asarray([2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0])),
)
# Errors of log a. The continuation decides which modes die, not the limit's digits.
_RTOL = 1e-5
# Smaller modes (e^-5 of the largest) may be growing beside a saddle.
_INVADING = 5.0
# Margins above the least that may still be active, in units of 1 (Gibbs weight e^{-m}).
_TIES = tuple(3.0 * 10 ** (k / 2) for k in range(12))


class ReducedRoute(AbstractRoute):
    """Members of `HadamardFlow`: log a, (members, K-1), and depths, (members,).

    `rtol` is the error of log a in a step.
    """

    targets = tuple(float(target) for target in _TARGETS)

    # At a held norm the direction settles where its ties are sharp to 1/norm.
    resolution = RESOLUTION

    def __init__(
        self,
        num_classes: int,
        depths: np.ndarray,
        log_a: np.ndarray,
        rtol: float = _RTOL,
    ):
        self.num_classes = num_classes
        self.depths = depths
        self.log_a = log_a.copy()
        self.held = np.zeros(len(log_a))
        self.psi = np.asarray(psi_matrix(num_classes), float)
        self.rtol = rtol
        self._known: dict[tuple, ReducedKKT | None] = {}

    def directions(self) -> np.ndarray:
        """Returns a over its 2-norm, (members, K-1)."""
        a = np.exp(self.log_a - np.max(self.log_a, axis=1, keepdims=True))
        return a / np.linalg.norm(a, axis=1, keepdims=True)

    def log_norms(self) -> np.ndarray:
        """Returns log ‖a‖_1, (members,), counted on where it is held."""
        return np.logaddexp.reduce(self.log_a, axis=1) + self.held

    def advance(self, target: float, busy: np.ndarray) -> np.ndarray:
        """Integrates the busy members, one by one."""
        arrived = np.zeros(len(busy), bool)
        is_held = bool(target > np.log(HELD_FROM) + 1e-9)
        reached = self.log_norms()
        for i in np.flatnonzero(busy).tolist():
            start = at_norm(self.log_a[i], HELD_FROM) if is_held else self.log_a[i]
            end = followed(
                start, float(self.depths[i]), target - reached[i], self.psi,
                rtol=self.rtol, is_held=is_held,
            )  # fmt: skip
            if end is None:
                continue
            arrived[i] = True
            self.log_a[i] = at_norm(end, HELD_FROM) if is_held else end
            if is_held:
                self.held[i] = target - np.log(HELD_FROM)
        return arrived

    def propose(self, member: int) -> KKT | None:
        """Returns the first strict minimum among the vertices that the state suggests.

        If there is none in sight, the first saddle, or else the first minimum further
        away.
        """
        now, others = self.directions()[member], {}
        for support, active in self._splits(member):
            point = self._vertex(member, support, active)
            if point is None:
                continue
            is_near = angle_between(now, self.unit(point)) < IN_SIGHT
            if is_near and point.verdict is Verdict.MINIMUM:
                return point
            others.setdefault((is_near, point.verdict), point)
        return others.get((True, Verdict.SADDLE), others.get((False, Verdict.MINIMUM)))

    def _vertex(self, member: int, support, active) -> ReducedKKT | None:
        """Returns the point with these modes and margins, where it is stationary.

        Few vertices are the limits of many members, and each costs a linear program.
        """
        depth = float(self.depths[member])
        key = depth, support.tobytes(), active.tobytes()
        if key not in self._known:
            self._known[key] = self._solved(depth, support, active)
        return self._known[key]

    def _solved(self, depth: float, support, active) -> ReducedKKT | None:
        x, _, rank, _ = np.linalg.lstsq(
            self.psi[np.ix_(active, support)], np.ones(np.sum(active))
        )
        if rank < np.sum(support) or np.any(x <= 0):
            return None
        a = np.zeros(self.num_classes - 1)
        a[support] = x
        point = reduced_kkt(a, depth)
        stationary = point.verdict in (Verdict.MINIMUM, Verdict.SADDLE)
        return point if stationary else None

    def is_invaded(self, member: int, point: KKT) -> bool:
        """Returns whether a mode off the point's support grows, or nearly so."""
        assert isinstance(point, ReducedKKT)
        log_a = self.log_a[member]
        growth = growth_exponents(log_a, float(self.depths[member]), self.psi)
        # So that a growth that is not known (NaN) counts as one.
        return not np.all(growth[~point.support] <= INVADING_GROWTH)

    def is_late(self) -> np.ndarray:
        """Returns that all are: nothing is taken for granted."""
        return np.ones(len(self.log_a), bool)

    def can_start(self) -> np.ndarray:
        """Returns that all can: early ones are followed, from any norm."""
        return np.ones(len(self.log_a), bool)

    def unit(self, point: KKT) -> np.ndarray:
        """Returns a over its 2-norm."""
        assert isinstance(point, ReducedKKT)
        return point.a / np.linalg.norm(point.a)

    def direction(self, point: KKT) -> np.ndarray:
        """Returns a over its sum."""
        assert isinstance(point, ReducedKKT)
        return point.a / np.sum(point.a)

    def logits(self, point: KKT) -> np.ndarray:
        """Returns Phi diag(0, a) Phi, (K, K), whose gaps are the margins Psi a."""
        assert isinstance(point, ReducedKKT)
        phi = np.asarray(sylvester_hadamard(self.num_classes))
        return (phi[:, 1:] * point.a) @ phi[1:]

    def objective(self, point: KKT, member: int) -> float:
        """Returns the sum of (K a_i)^q."""
        power = 2 / (self.depth_of(member) + 1)
        return self.num_classes**power * point.objective

    def depth_of(self, member: int) -> float:
        """Returns L."""
        return float(self.depths[member])

    per_class = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one direction."""
        return (self.num_classes - 1,)

    def _splits(self, member: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields living modes and active margins, the likeliest first, each once."""
        log_a = self.log_a[member]
        largest = np.max(log_a)
        margins = self.psi @ np.exp(log_a)
        above = margins - np.min(margins)
        growth = growth_exponents(log_a, self.depths[member], self.psi)
        limits = [tie for tie in _TIES if tie <= LARGEST_TIE * np.min(margins)]
        seen = set()
        present = log_a > largest - 700
        large = log_a > largest - _INVADING
        for support in [*(present & (growth > one) for one in LIVING), large]:
            if not np.all(np.any(self.psi[:, support] > 0, axis=1)):
                continue  # a class would be misclassified
            for tie in limits:
                active = above <= tie
                key = support.tobytes(), active.tobytes()
                if np.sum(active) >= np.sum(support) and key not in seen:
                    seen.add(key)
                    yield support, active
