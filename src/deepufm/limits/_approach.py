"""Following members to large norms until each is seen to approach its limit.

At t = 1e300 a direction may be far from its limit: it is approached like 1/log t, while
modes die and margins meet. So each member is followed from norm to norm. At each a
*route* proposes the stationary point that the state seems to head for. When two
readings in a row propose the same one, a strict local minimum, and the angle to it has
shrunk between them, and no mode that the point lacks grows, it is certified; a
direction that merely rests beside a point is not. The condition on modes is not in the
point: for L > 1 dead ones stay dead, but one that is merely tiny may be growing, unseen
by the angle, if the model is hardly deeper than 1. A point that only looks stationary
from afar is given up as the flow leaves it: that is how saddles are told.
"""

import abc
from dataclasses import dataclass

import numpy as np

from ..analysis import MatrixKKT, ReducedKKT, Verdict
from ..geometry import angle_between
from ._conditions import NEAR
from ._result import LimitStatus

# Two proposals this close are one point.
_SAME = 1e-6

KKT = ReducedKKT | MatrixKKT


class AbstractRoute(abc.ABC):
    """How members of one kind of flow are followed, and what they head for."""

    targets: tuple[float, ...]  # readings of `log_norms`, rising
    resolution: float  # angles below this need not shrink
    per_class: int
    shape: tuple[int, ...]

    @abc.abstractmethod
    def directions(self) -> np.ndarray:
        """Returns the members' directions now, (members, numbers), of 2-norm 1."""

    @abc.abstractmethod
    def log_norms(self) -> np.ndarray:
        """Returns log of the 1-norm of a, or of the logits' Frobenius norm, (members,).

        Counted on where the norm is held.
        """

    @abc.abstractmethod
    def advance(self, target: float, busy: np.ndarray) -> np.ndarray:
        """Follows the busy members to a target; returns which of them got there."""

    @abc.abstractmethod
    def propose(self, member: int) -> KKT | None:
        """Returns the stationary point that a member seems to head for, if any."""

    @abc.abstractmethod
    def is_invaded(self, member: int, point: KKT) -> bool:
        """Returns whether a mode that the point lacks grows, nearly so, or maybe so."""

    @abc.abstractmethod
    def is_late(self) -> np.ndarray:
        """Returns which members were late enough for what the route takes for granted.

        To be called before any is followed.
        """

    @abc.abstractmethod
    def can_start(self) -> np.ndarray:
        """Returns which members classify every class, so that they can be followed."""

    @abc.abstractmethod
    def unit(self, point: KKT) -> np.ndarray:
        """Returns a point's direction, as `directions`."""

    @abc.abstractmethod
    def direction(self, point: KKT) -> np.ndarray:
        """Returns a point's direction as users see it, of shape `shape`."""

    @abc.abstractmethod
    def logits(self, point: KKT) -> np.ndarray:
        """Returns a point's class-mean logits, (K, K), of a least gap of 1."""

    @abc.abstractmethod
    def objective(self, point: KKT, member: int) -> float:
        """Returns the sum of sigma_i^q of these logits."""

    @abc.abstractmethod
    def depth_of(self, member: int) -> float:
        """Returns L of a member."""


@dataclass
class Finding:
    """What is known of one member."""

    start: np.ndarray  # directions
    point: KKT | None = None
    status: LimitStatus = LimitStatus.UNCHECKED
    angle: float = np.nan
    log_norm: float = np.nan
    is_done: bool = False
    saddle: np.ndarray | None = None  # the direction of the last one that it was near

    def passed_saddle(self, route: AbstractRoute) -> bool:
        """Returns whether it was near a saddle that is not where it ended."""
        if self.saddle is None or self.point is None:
            return False
        return angle_between(self.saddle, route.unit(self.point)) > _SAME


def approach(route: AbstractRoute, tolerance: float) -> list[Finding]:
    """Follows all members of a route until each is certified or the targets end."""
    before, late, starts = route.directions(), route.is_late(), route.can_start()
    findings = [Finding(start) for start in before]
    for i, (finding, log_norm) in enumerate(zip(findings, route.log_norms())):
        finding.log_norm = float(log_norm)
        if not starts[i]:
            finding.status, finding.is_done = LimitStatus.NOT_FOLLOWED, True
        elif route.log_norms()[i] >= route.targets[0]:
            finding.point = route.propose(i)  # a first reading
    for target in route.targets:
        waiting = np.asarray([not finding.is_done for finding in findings])
        busy = waiting & (route.log_norms() < target)
        if not np.any(busy):
            continue
        arrived = route.advance(target, busy)
        now, log_norms = route.directions(), route.log_norms()
        for i in np.flatnonzero(busy).tolist():
            findings[i].log_norm = float(log_norms[i])
            if arrived[i]:
                _judge(findings[i], route, i, before[i], now[i], tolerance)
            else:
                findings[i].status = LimitStatus.NOT_FOLLOWED
                findings[i].is_done = True
        before = np.where(busy[:, None], now, before)
    for i, finding in enumerate(findings):
        if finding.status is LimitStatus.UNCHECKED and finding.point is not None:
            finding.angle = angle_between(before[i], route.unit(finding.point))
        if finding.status is LimitStatus.CERTIFIED and not late[i]:
            finding.status = LimitStatus.EARLY
    return findings


def _judge(
    finding: Finding,
    route: AbstractRoute,
    member: int,
    before: np.ndarray,
    now: np.ndarray,
    tolerance: float,
) -> None:
    """Compares what a member heads for with what it did at the reading before."""
    last = finding.point
    finding.status = LimitStatus.UNSETTLED
    point = route.propose(member)
    if point is None:
        finding.point, finding.angle = None, np.nan
        return
    unit = route.unit(point)
    finding.point, finding.angle = point, angle_between(now, unit)
    is_near = finding.angle < NEAR and point.residual <= tolerance
    if not is_near:
        return
    if point.verdict is Verdict.SADDLE:
        finding.saddle = unit
    same = last is not None and angle_between(route.unit(last), unit) < _SAME
    shrinks = finding.angle < max(angle_between(before, unit), route.resolution)
    if not (same and shrinks):
        return
    if point.verdict is Verdict.SADDLE:
        # Not done: further on the flow may leave it.
        finding.status = LimitStatus.SADDLE
    elif point.verdict is Verdict.MINIMUM and not route.is_invaded(member, point):
        finding.status, finding.is_done = LimitStatus.CERTIFIED, True
