"""What it takes to be certified, on a route that is played from a script."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import deepufm as ufm
from deepufm.limits._approach import AbstractRoute, approach

MINIMUM, SADDLE = ufm.Verdict.MINIMUM, ufm.Verdict.SADDLE


def turned(angle: float) -> np.ndarray:
    return np.asarray([[np.cos(angle), np.sin(angle)]])


def point(angle=0.0, verdict=MINIMUM, residual=1e-14) -> Any:
    return SimpleNamespace(unit=turned(angle)[0], verdict=verdict, residual=residual)


class Script(AbstractRoute):
    """One member in the plane, at scripted angles, with scripted proposals."""

    resolution = 1e-6
    per_class = 1
    shape = (2,)

    def __init__(self, angles, points, **facts):
        self.angles, self.points, self.at = angles, points, 0
        self.targets = tuple(float(k) for k in range(1, len(angles)))
        self.facts = {"late": True, "starts": True, "invaded": False, "fails": ()}
        self.facts |= facts

    def directions(self):
        return turned(self.angles[self.at])

    def log_norms(self):
        return np.asarray([float(self.at)])

    def advance(self, target, busy):
        del busy
        self.at = int(target)
        return np.asarray([target not in self.facts["fails"]])

    def propose(self, member):
        del member
        return self.points[self.at]

    def is_invaded(self, member, point):
        del member, point
        return self.facts["invaded"]

    def is_late(self):
        return np.asarray([self.facts["late"]])

    def can_start(self):
        return np.asarray([self.facts["starts"]])

    def unit(self, point):
        return cast(Any, point).unit

    def direction(self, point):
        raise NotImplementedError(point)

    def logits(self, point):
        raise NotImplementedError(point)

    def objective(self, point, member):
        raise NotImplementedError(point, member)

    def depth_of(self, member):
        raise NotImplementedError(member)


def status(angles, points, **facts) -> str:
    return approach(Script(angles, points, **facts), 1e-10)[0].status.name


SHRINKING = [0.5, 0.09, 0.05, 0.02]


def test_a_point_that_is_approached_twice_is_certified():
    assert status(SHRINKING, [None, point(), point(), point()]) == "CERTIFIED"


@pytest.mark.parametrize(
    ("angles", "points", "facts"),
    [
        # far from it
        ([0.5, 0.4, 0.3, 0.2], [None, point(), point(), point()], {}),
        # leaving it
        ([0.01, 0.02, 0.04, 0.08], [None, point(), point(), point()], {}),
        # at rest beside it
        ([0.5, 0.09, 0.09], [None, point(), point()], {}),
        # another each time
        (SHRINKING, [None, point(0), point(0.01), point(0)], {}),
        # not solved well enough
        (SHRINKING, [None, *[point(residual=1e-9)] * 3], {}),
        # a mode is coming up
        (SHRINKING, [None, point(), point(), point()], {"invaded": True}),
        # nothing at all
        (SHRINKING, [None] * 4, {}),
        # flat
        (SHRINKING, [None, *[point(verdict=ufm.Verdict.FLAT)] * 3], {}),
    ],
)
def test_what_is_not_certified(angles, points, facts):
    assert status(angles, points, **facts) == "UNSETTLED"


def test_other_ends():
    points = [None, point(), point(), point()]
    assert status(SHRINKING, points, late=False) == "EARLY"
    assert status(SHRINKING, points, starts=False) == "NOT_FOLLOWED"
    assert status(SHRINKING, points, fails=(2.0,)) == "NOT_FOLLOWED"
    saddles = [None, *[point(verdict=SADDLE)] * 3]
    assert status(SHRINKING, saddles) == "SADDLE"


def test_a_saddle_that_is_left_is_remembered():
    saddle, minimum = point(verdict=SADDLE), point(1.0)
    angles = [0.2, 0.05, 0.03, 0.4, 0.95, 0.99]
    route = Script(angles, [None, saddle, saddle, minimum, minimum, minimum])
    (found,) = approach(route, 1e-10)
    assert found.status is ufm.LimitStatus.CERTIFIED
    assert found.passed_saddle(route)
    route = Script([0.5, 0.09, 0.05], [None, point(), point()])
    assert not approach(route, 1e-10)[0].passed_saddle(route)


def test_a_start_past_all_targets_is_unchecked():
    route = Script([0.05, 0.04], [point(), point()])
    route.targets = (-1.0,)
    (found,) = approach(route, 1e-10)
    assert found.status is ufm.LimitStatus.UNCHECKED
    np.testing.assert_allclose(found.angle, 0.05)


@pytest.mark.parametrize(
    ("depth", "tiny"), [(1.05, 1e-6), (1.05, 1e-11), (1.02, 1e-20)]
)
def test_modes_too_small_to_see_are_waited_for(depth, tiny):
    # From 1e-20 the third mode takes hundreds of log-norms, but it comes: no start at
    # K = 4 ends at the cross-polytope unless the mode shrinks.
    start = np.log(np.asarray([5.0, 5.0, 5.0 * tiny]))
    found = ufm.limit(ufm.HadamardFlow(4, depth), start)
    assert found.structure != "cross-polytope" or not found.certified
