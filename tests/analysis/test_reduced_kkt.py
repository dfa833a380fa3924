"""Stationary points of the reduced problem, against an independent enumeration."""

import numpy as np
import pytest
from oracles import kkt_points

import deepufm as ufm
from deepufm import Structure, Verdict

points = pytest.mark.parametrize(
    "point",
    kkt_points(),
    ids=lambda p: f"K{len(p['a']) + 1}-L{p['L']}-{p['objective']:.4f}",
)


@points
def test_all_known_points_are_recognised(point):
    a = np.asarray(point["a"])
    got = ufm.reduced_kkt(3.7 * a, point["L"])
    assert got.residual < 1e-13
    np.testing.assert_allclose(got.a, a, rtol=1e-14)
    assert got.objective == pytest.approx(point["objective"], rel=1e-14)
    np.testing.assert_array_equal(np.flatnonzero(got.active) + 1, point["active"])
    assert got.rank == np.sum(a > 0)
    assert (got.verdict is Verdict.MINIMUM) == point["minimum"]
    assert got.verdict in (Verdict.MINIMUM, Verdict.SADDLE)
    # What the multipliers say, in the problem's own words.
    power = 2 / (point["L"] + 1)
    alive = a > 0
    psi = np.asarray(ufm.psi_matrix(len(a) + 1))
    slopes = power * a[alive] ** (power - 1)
    np.testing.assert_allclose((psi @ got.duals)[alive], slopes, rtol=1e-12)
    assert np.all(got.duals >= 0)
    assert np.all(got.duals[~got.active] == 0)


@points
def test_a_step_away_is_not_stationary(point):
    a = np.asarray(point["a"])
    rng = np.random.default_rng(0)
    moved = np.where(a > 0, a * np.exp(0.03 * rng.normal(size=a.shape)), 0)
    got = ufm.reduced_kkt(moved, point["L"])
    assert got.verdict is Verdict.NOT_STATIONARY
    assert got.residual > 1e-4


def test_minima_are_minima_and_saddles_are_not():
    """Every feasible point near a minimum costs more; near a saddle one costs less."""
    rng = np.random.default_rng(1)
    for point in kkt_points():
        if len(point["a"]) != 3 or point["L"] == 1:
            continue
        a = np.asarray(point["a"])
        psi = np.asarray(ufm.psi_matrix(4))
        near = np.abs(a + 1e-3 * rng.normal(size=(20_000, 3)))
        near /= np.min(near @ psi, axis=1, keepdims=True)
        excess = np.sum(near ** (2 / (point["L"] + 1)), axis=1) - point["objective"]
        assert (np.min(excess) > 0) == point["minimum"]


def test_collapse_is_the_simplex():
    for depth in (1, 2, 5):
        got = ufm.reduced_kkt(np.ones(15), depth)
        assert got.verdict is Verdict.MINIMUM
        want = ufm.structure_objective(Structure.SIMPLEX_ETF, 16, depth)
        factor = (depth + 1) * 16 ** (2 / (depth + 1))
        assert got.objective * factor == pytest.approx(want, rel=1e-13)


def test_modes_that_do_not_span_misclassify():
    got = ufm.reduced_kkt(np.asarray([1.0, 1, 1, 0, 0, 0, 0]), 2)
    assert got.verdict is Verdict.INFEASIBLE
    assert np.isnan(got.residual)
    assert np.isnan(got.objective)


@pytest.mark.parametrize(
    ("a", "depth", "message"),
    [
        ([1.0, -1.0, 1.0], 2, "none negative"),
        ([0.0, 0.0, 0.0], 2, "one positive"),
        ([1.0, np.nan, 1.0], 2, "finite modes"),
        ([1.0, 1.0, 1.0], 0.5, "at least 1"),
        ([1.0, 1.0, 1.0], np.inf, "must be finite"),
    ],
)
def test_what_is_no_point_is_refused(a, depth, message):
    with pytest.raises(ValueError, match=message):
        ufm.reduced_kkt(np.asarray(a), depth)
