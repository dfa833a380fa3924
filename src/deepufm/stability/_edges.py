"""Edge states: the saddle that the boundary between two basins leads to.

Between two starts of one norm that go to different limits lies a point of the basins'
boundary. It is bisected along the segment in log a (rescaled to the norm, which all
share as their clock), each midpoint judged with `limit`'s certificate at errors of
1e-12. Then the boundary is tracked (Skufca, Yorke & Eckhardt 2006): both ends of the
bracket are advanced in log ‖a‖_1 until they have come apart, the segment between them
is bisected anew, and so on. What stays on the boundary tends, as a rule, to a saddle
with one unstable direction.

At a saddle every direction along its face, on which the least margins stay equal, is
unstable, as the sum of a^q is concave there. The boundary of two basins attracts to
saddles with one such direction. One with more is left again, except from starts whose
symmetry forbids it; so the boundary is followed on there, to the last norm.

In log norm a saddle is left slowly, like N^λ with λ of the order of (L-1)/(L+1), so
that one bracket often follows it all the way.

As in `limit` the norm in the exponentials is held from 1e4 on. Boundaries found with it
held from 1e3 or 1e5 on instead were the same to some 1e-12.
"""

import enum
from dataclasses import dataclass

import numpy as np

from ..analysis import ReducedKKT, Verdict
from ..dynamics import HadamardFlow
from ..geometry import angle_between, psi_matrix
from ..limits import (
    HELD_FROM,
    IN_SIGHT,
    INVADING_GROWTH,
    LARGEST_TIE,
    LIVING,
    NEAR,
    RESOLUTION,
    at_norm,
    followed,
    growth_exponents,
)
from ._destinations import Destination, destinations
from ._face import stationary_on_face

# Limits further apart than this (radians) are two.
_DISTINCT = 1e-6
# Norms at which it is asked where the edge heads, and steps of log norm beyond 1e4.
_NORMS = (1e1, 3e1, 1e2, 3e2, 1e3, 3e3, HELD_FROM)
_READINGS_FROM = 3e2
_HELD_STEP, _HELD_STEPS = 2.0, 32
# Gaps to the least margin that may be ties.
_TIES = tuple(3.0 * 10 ** (k / 2) for k in range(8))
# Where on a bracket to look if its middle has no certified limit.
_ASIDE = (0.25, 0.75, 0.125, 0.875)


class EdgeStatus(enum.Enum):
    """Whether the boundary was seen to lead to a saddle."""

    SETTLED = "The edge approached a saddle, in two readings in a row."
    NOT_SETTLED = "At the largest norm followed the edge had approached no saddle."
    LOST = (
        "The ends of a bracket were no longer seen to part: its labels are below the "
        "integration's errors. Give a larger `apart`."
    )


@dataclass(frozen=True)
class Bracket:
    """Two states of one norm on two sides of a boundary.

    - `log_a_first`, `log_a_second`: (K-1,).
    - `first`, `second`: where they go, certified and different.
    """

    log_a_first: np.ndarray
    log_a_second: np.ndarray
    first: Destination
    second: Destination

    @property
    def width(self) -> float:
        """The largest difference of log a, a relative one of a."""
        apart = self.log_a_first - self.log_a_second
        return float(np.max(np.abs(apart[self.log_a_first > -np.inf])))

    @property
    def middle(self) -> np.ndarray:
        """A point of the boundary to half the width: log a, (K-1,)."""
        return self.between(0.5)

    def between(self, part: float) -> np.ndarray:
        """Returns log a at a part of the way from the first to the second."""
        norm = np.exp(np.logaddexp.reduce(self.log_a_first))
        alive = self.log_a_first > -np.inf
        mixed = np.full_like(self.log_a_first, -np.inf)
        mixed[alive] = (1 - part) * self.log_a_first[alive]
        mixed[alive] += part * self.log_a_second[alive]
        return at_norm(mixed, norm)


@dataclass(frozen=True)
class EdgeState:
    """The boundary between two basins, and where it leads.

    - `bracket`: at the starts' norm; `bracket.middle` is the point of the boundary.
    - `saddle`: the `ReducedKKT` it leads to, `None` unless `status` is `SETTLED`.
    - `unstable`: its number of unstable directions; 0 without.
    - `angle`: to it at the end, radians; NaN without.
    - `direction`: of the edge at the end, (K-1,), of sum 1.
    - `log_norm`: log ‖a‖_1 there, counted on where it was held.
    - `bisections`: how often the bracket was narrowed.
    - `status`: an `EdgeStatus`.
    """

    bracket: Bracket
    saddle: ReducedKKT | None
    unstable: int
    angle: float
    direction: np.ndarray
    log_norm: float
    bisections: int
    status: EdgeStatus


def edge_state(
    flow: HadamardFlow,
    log_a_first: np.ndarray,
    log_a_second: np.ndarray,
    *,
    tolerance: float = 1e-11,
    apart: float = 1e-4,
    rtol: float = 1e-12,
) -> EdgeState:
    """Returns a point of the boundary between two starts' basins, and its saddle.

    **Arguments:**

    - `flow`: of finite depth.
    - `log_a_first`, `log_a_second`: (K-1,), of one 1-norm below 1e4 and the same living
        modes, with different certified limits (points, not only orbits).
    - `tolerance`: the bracket's width, relative to a. Below some 1e-12 rounding says
        which side a start is on.
    - `apart`: at what distance the ends of a bracket are bisected anew.
    - `rtol`: error of log a in a step.

    **Returns:** an `EdgeState`. A third basin between the two is no obstacle: the
    boundary found is then that of one of them.

    **Raises:** `ValueError` for starts that do not fit, lead to the same limit, or have
    none that is certified.

    **Reference:** Skufca, Yorke & Eckhardt 2006, Edge of chaos in a parallel shear
    flow.
    """
    bracket = boundary_bracket(
        flow, log_a_first, log_a_second, tolerance=tolerance, rtol=rtol
    )
    return _Tracker(flow, tolerance, apart, rtol).track(bracket)


def boundary_bracket(
    flow: HadamardFlow,
    log_a_first: np.ndarray,
    log_a_second: np.ndarray,
    *,
    tolerance: float = 1e-11,
    rtol: float = 1e-12,
) -> Bracket:
    """Returns two states around a point of the boundary between two starts' basins.

    **Arguments**, **Raises:** as `edge_state`.
    """
    depth = _checked_depth(flow)
    both = [np.asarray(one, float) for one in (log_a_first, log_a_second)]
    modes = flow.num_classes - 1
    if any(one.shape != (modes,) for one in both):
        raise ValueError(
            f"The starts must be two states of shape ({modes},), but have "
            f"{both[0].shape} and {both[1].shape}."
        )
    starts = np.stack(both)
    _check(starts, flow.num_classes, tolerance)
    ends = destinations(flow.num_classes, depth, starts, rtol=rtol)
    if not all(end.certified for end in ends):
        reasons = [end.status.name.lower() for end in ends]
        raise ValueError(
            f"Both starts must have certified limits, but theirs are {reasons}. Take "
            "others, further from the boundary."
        )
    if not _differ(*ends):
        raise ValueError(
            "The starts must lead to different limits, but both go to "
            f"{np.round(ends[0].direction, 6)}."
        )
    bracket = Bracket(starts[0], starts[1], ends[0], ends[1])
    return bisected(flow.num_classes, depth, bracket, tolerance, rtol)


def bisected(
    num_classes: int, depth: float, bracket: Bracket, tolerance: float, rtol: float
) -> Bracket:
    """Returns a narrower bracket, with certified and different limits at its ends.

    It stays wider than the tolerance where nothing inside it has a certified limit: all
    of it is then as good a point of the boundary.
    """
    while bracket.width > tolerance:
        for part in (0.5, *_ASIDE):
            inside = bracket.between(part)
            (end,) = destinations(num_classes, depth, inside[None], rtol=rtol)
            if end.certified:
                break
        else:
            return bracket
        one, other = bracket.log_a_first, bracket.log_a_second
        if not _differ(end, bracket.first):
            narrower = Bracket(inside, other, end, bracket.second)
        else:  # the second's, or a third limit
            narrower = Bracket(one, inside, bracket.first, end)
        if narrower.width >= bracket.width:
            return bracket  # rounding
        bracket = narrower
    return bracket


class _Tracker:
    """Follows the boundary from a bracket on it."""

    def __init__(self, flow: HadamardFlow, tolerance, apart, rtol):
        self.num_classes, self.depth = flow.num_classes, float(flow.depth)
        self.tolerance, self.apart, self.rtol = tolerance, apart, rtol
        self.psi = np.asarray(psi_matrix(flow.num_classes), float)

    def track(self, start: Bracket) -> EdgeState:
        """Returns where the boundary leads."""
        bracket, bisections = start, 1
        reached = float(np.logaddexp.reduce(start.log_a_first))
        last, saddle, status = None, None, EdgeStatus.NOT_SETTLED
        held = np.log(HELD_FROM) + _HELD_STEP * np.arange(1, _HELD_STEPS + 1)
        for target in (*np.log(_NORMS).tolist(), *held.tolist()):
            if target <= reached + 1e-9:
                continue
            before, moved = bracket.middle, self._advanced(bracket, reached, target)
            if moved is None:
                break
            bracket, reached = moved, target
            if bracket.width > self.apart:
                narrowed = self._again(bracket)
                if narrowed is None:
                    saddle, status = None, EdgeStatus.LOST
                    break
                bracket, bisections = narrowed, bisections + 1
            if target < np.log(_READINGS_FROM) - 1e-9:
                continue
            point = self._heads_for(bracket.middle)
            saddle = point if self._approaches(last, point, before, bracket) else None
            last = point
            if saddle is not None and self.num_unstable(saddle) == 1:
                break
        if saddle is not None:
            status = EdgeStatus.SETTLED
        direction = _direction(bracket.middle)
        return EdgeState(
            start,
            saddle,
            0 if saddle is None else self.num_unstable(saddle),
            np.nan if saddle is None else angle_between(direction, saddle.a),
            direction,
            reached,
            bisections,
            status,
        )

    def num_unstable(self, point: ReducedKKT) -> int:
        """Returns the number of directions along a saddle's face."""
        rows = self.psi[np.ix_(point.active, point.support)]
        return point.rank - int(np.linalg.matrix_rank(rows))

    def _advanced(self, bracket: Bracket, reached, target) -> Bracket | None:
        """Returns both ends at a later norm; None where that failed."""
        is_held = bool(target > np.log(HELD_FROM) + 1e-9)
        norm = HELD_FROM if is_held else float(np.exp(target))
        moved = []
        for log_a in (bracket.log_a_first, bracket.log_a_second):
            end = followed(
                at_norm(log_a, HELD_FROM) if is_held else log_a,
                self.depth, target - reached, self.psi, rtol=self.rtol, is_held=is_held,
            )  # fmt: skip
            if end is None:
                return None
            moved.append(at_norm(end, norm))
        return Bracket(moved[0], moved[1], bracket.first, bracket.second)

    def _approaches(self, last, point, before, bracket) -> bool:
        """Returns whether the edge is seen to approach a saddle, as `limit` would."""
        if last is None or point is None or angle_between(last.a, point.a) > _DISTINCT:
            return False
        now = bracket.middle
        angle = angle_between(_direction(now), point.a)
        earlier = angle_between(_direction(before), point.a)
        growth = growth_exponents(now, self.depth, self.psi)
        invaded = np.any(growth[~point.support] > INVADING_GROWTH)
        return angle < min(NEAR, max(earlier, RESOLUTION)) and not invaded

    def _again(self, bracket: Bracket) -> Bracket | None:
        """Returns a bracket bisected anew; None where its ends no longer differ."""
        states = np.stack([bracket.log_a_first, bracket.log_a_second])
        ends = destinations(self.num_classes, self.depth, states, rtol=self.rtol)
        if not all(end.certified for end in ends) or not _differ(*ends):
            return None
        fresh = Bracket(states[0], states[1], ends[0], ends[1])
        return bisected(self.num_classes, self.depth, fresh, self.tolerance, self.rtol)

    def _heads_for(self, log_a: np.ndarray) -> ReducedKKT | None:
        """Returns the nearest saddle among those that a state's splits suggest."""
        now, best, nearest = _direction(log_a), None, IN_SIGHT
        for support, active in self._splits(log_a):
            point = stationary_on_face(now, self.depth, support, active)
            if point is None or point.verdict is not Verdict.SADDLE:
                continue
            angle = angle_between(now, point.a)
            if angle < nearest:
                best, nearest = point, angle
        return best

    def _splits(self, log_a: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns living modes and active margins that the state may end with."""
        margins = self.psi @ np.exp(log_a)
        above = margins - np.min(margins)
        growth = growth_exponents(log_a, self.depth, self.psi)
        found = {}
        for one in LIVING:
            support = growth > one
            for tie in _TIES:
                if tie <= LARGEST_TIE * np.min(margins):
                    active = above <= tie
                    found[support.tobytes(), active.tobytes()] = support, active
        return list(found.values())


def _direction(log_a: np.ndarray) -> np.ndarray:
    a = np.exp(log_a - np.max(log_a))
    return a / np.sum(a)


def _differ(one: Destination, other: Destination) -> bool:
    return angle_between(one.direction, other.direction) > _DISTINCT


def _checked_depth(flow: HadamardFlow) -> float:
    depth = float(flow.depth)
    if not np.isfinite(depth):
        raise ValueError(
            "Basins need a finite depth: at infinite depth limits are not isolated."
        )
    return depth


def _check(starts: np.ndarray, num_classes: int, tolerance: float) -> None:
    modes = num_classes - 1
    if starts.shape != (2, modes):
        raise ValueError(
            f"The starts must be two states of shape ({modes},), but have "
            f"{starts.shape[1:]}."
        )
    dead = starts == -np.inf
    if np.any(np.isnan(starts) | (starts == np.inf)) or np.any(dead[0] != dead[1]):
        raise ValueError(
            "The starts must be log a with finite a, and have the same living modes."
        )
    norms = np.logaddexp.reduce(starts, axis=1)
    if abs(norms[0] - norms[1]) > 1e-9 or norms[0] > np.log(HELD_FROM):
        raise ValueError(
            "The starts must have one 1-norm, at most 1e4, but theirs are "
            f"{np.exp(norms)}. Subtract logsumexp(log_a) and add the log of one norm."
        )
    if not tolerance > 0:
        raise ValueError(f"Argument `tolerance` must be positive, but is {tolerance}.")
