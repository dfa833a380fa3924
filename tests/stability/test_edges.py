import numpy as np
import pytest
import scipy.integrate
import scipy.optimize

import deepufm as ufm
from deepufm.stability._edges import (
    EdgeStatus,
    boundary_bracket,
    edge_state,
    stationary_on_face,
)


def symmetric(num_classes, log_ratio, norm):
    """Log a with gamma on the odd modes and delta on the others."""
    odd = np.arange(1, num_classes) % 2 == 1
    log_a = np.where(odd, log_ratio, 0.0)
    return log_a - np.logaddexp.reduce(log_a) + np.log(norm)


def saddle_ratio(num_classes, depth):
    """gamma/delta where gamma + delta = 2/K is held and sum a^q is greatest."""
    half, power = num_classes / 2, 2 / (depth + 1)
    return (half / (half - 1)) ** (1 / (1 - power))


def threshold(num_classes, depth, norm):
    """Log gamma/delta between DNC and the cross-polytope, by SciPy's DOP853.

    Margins of the subspace: K·gamma once, K/2·(gamma + delta) otherwise.
    """
    half, power = num_classes / 2, (depth - 1) / (depth + 1)
    saddle = np.log(saddle_ratio(num_classes, depth))

    def rate(s, x):
        ratio = np.exp(x[0])
        delta = norm * np.exp(s) / (half * ratio + half - 1)
        gamma = ratio * delta
        lone, rest = num_classes * gamma, half * (gamma + delta)
        odd = 2 * np.exp(rest - lone) + num_classes - 2
        fast, slow = odd * ratio**power, num_classes
        growth = half * gamma * fast + (half - 1) * delta * slow
        return [(fast - slow) * norm * np.exp(s) / growth]

    def left(_, x):
        return abs(x[0] - saddle) - 0.7 * saddle

    left.terminal = True

    def side(start):
        found = scipy.integrate.solve_ivp(
            rate, (0, 100), [start], "DOP853", rtol=1e-12, atol=1e-12, events=left
        )
        return np.sign(found.y[0, -1] - saddle)

    low, high = saddle - 0.69 * saddle, saddle + 0.69 * saddle
    return float(np.asarray(scipy.optimize.bisect(side, low, high, xtol=1e-11)))


def test_boundary_on_the_symmetric_subspace_is_that_of_two_equations():
    expected = threshold(4, 3.0, 1.0)
    bracket = boundary_bracket(
        ufm.HadamardFlow(4, 3),
        symmetric(4, expected - 0.2, 1.0),
        symmetric(4, expected + 0.2, 1.0),
    )
    assert (bracket.first.rank, bracket.second.rank) == (3, 2)
    assert bracket.width < 1e-11
    found = bracket.middle[0] - bracket.middle[1]
    assert found == pytest.approx(expected, rel=1e-10)


def test_edge_leads_to_the_saddle_between_collapse_and_cross_polytope():
    edge = edge_state(
        ufm.HadamardFlow(4, 3),
        symmetric(4, 0.5, 2.0),
        symmetric(4, 2.0, 2.0),
        tolerance=1e-9,
    )
    assert edge.status is EdgeStatus.SETTLED
    assert edge.saddle is not None
    assert (edge.saddle.verdict, edge.unstable) == (ufm.Verdict.SADDLE, 1)
    ratio = edge.saddle.a[0] / edge.saddle.a[1]
    assert ratio == pytest.approx(saddle_ratio(4, 3), rel=1e-10)
    assert edge.angle < 1e-3


def test_wide_brackets_are_bisected_again_and_find_the_same_saddle():
    starts = symmetric(4, 0.5, 2.0), symmetric(4, 2.0, 2.0)
    edge = edge_state(ufm.HadamardFlow(4, 3), *starts, tolerance=1e-3, apart=2e-3)
    assert edge.bisections > 1
    assert edge.status is EdgeStatus.SETTLED
    assert edge.angle < 1e-3


def test_general_edge_is_a_saddle_of_the_atlas():
    rng = np.random.default_rng(1)
    flow = ufm.HadamardFlow(8, 3)
    log_a = np.log(rng.uniform(size=(4, 7)))
    log_a -= np.logaddexp.reduce(log_a, axis=1)[:, None]
    limits = ufm.limit(flow, log_a, name=lambda _: "").direction
    other = next(i for i in range(1, 4) if np.max(np.abs(limits[i] - limits[0])) > 1e-3)
    edge = edge_state(flow, log_a[0], log_a[other], tolerance=1e-6, rtol=1e-9)
    assert edge.saddle is not None
    (entry,) = [e for e in ufm.atlas(8, 3) if e.matches(edge.saddle.a)]
    assert entry.verdict is ufm.Verdict.SADDLE
    a, b = edge.bracket.log_a_first, edge.bracket.log_a_second
    assert edge.bracket.width == pytest.approx(np.max(np.abs(a - b)))
    assert edge.bracket.first.certified
    assert edge.bracket.second.certified


def test_point_on_a_face_without_freedom_is_its_vertex():
    alive = np.ones(3, bool)
    point = stationary_on_face(np.asarray([0.3, 0.34, 0.36]), 2.0, alive, alive)
    assert point is not None
    np.testing.assert_allclose(point.a, 0.25, rtol=1e-14)
    assert point.verdict is ufm.Verdict.MINIMUM


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (symmetric(4, 0.1, 2.0), "different limits"),
        (symmetric(4, 2.0, 3.0), "one 1-norm"),
        (symmetric(8, 2.0, 2.0), "two states of shape|inhomogeneous"),
        (np.log([1.0, 1.0, 1.0]) + [0, 0, -np.inf], "same living modes"),
    ],
)
def test_starts_that_have_no_boundary_between_them_are_refused(second, message):
    with pytest.raises(ValueError, match=message):
        edge_state(ufm.HadamardFlow(4, 3), symmetric(4, 0.0, 2.0), second)
