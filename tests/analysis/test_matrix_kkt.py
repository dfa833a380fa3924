"""Stationary points of the full problem, against closed forms and the reduced one."""

import numpy as np
import pytest
import scipy.linalg
from oracles import kkt_points

from deepufm import Structure, Verdict, structure_objective
from deepufm.analysis._fixed_rank import FixedRank
from deepufm.analysis._matrix_kkt import _judge, matrix_kkt

DEPTHS = (1, 1.5, 2, 3, 6, 10)


def centred(structure, num_classes):
    logits = np.asarray(structure.logits(num_classes))
    return logits - np.mean(logits, axis=0)


def stationarity(point, power):
    """The misfit of U^T M = q S^{q-1} V^T and of its other half, in their own words."""
    left, values, right = np.linalg.svd(point.logits)
    left, right = left[:, : point.rank], right[: point.rank].T
    matrix = np.diag(np.sum(point.duals, axis=0)) - point.duals
    prices = power * values[: point.rank] ** (power - 1)
    return max(
        np.max(np.abs(left.T @ matrix - prices[:, None] * right.T)),
        np.max(np.abs(matrix @ right - left * prices)),
    )


@pytest.mark.parametrize("num_classes", [4, 5, 6, 8, 11])
@pytest.mark.parametrize(
    "structure", [Structure.SIMPLEX_ETF, Structure.CROSS_POLYTOPE, Structure.POLYGON]
)
def test_structures_are_minima_but_not_at_depth_one(structure, num_classes):
    for depth in DEPTHS:
        got = matrix_kkt(3.7 * centred(structure, num_classes), depth)
        best = structure is Structure.SIMPLEX_ETF or depth > 1
        assert got.verdict is (Verdict.MINIMUM if best else Verdict.SADDLE)
        assert got.residual < 1e-13
        assert stationarity(got, 2 / (depth + 1)) < 1e-12
        assert np.all(got.duals >= 0)
        assert np.all(got.duals[~got.active] == 0)
        if structure is not Structure.CROSS_POLYTOPE or num_classes % 2 == 0:
            want = structure_objective(structure, num_classes, depth)
            assert (depth + 1) * got.objective == pytest.approx(want, rel=1e-13)


def test_the_multipliers_of_collapse():
    """M = q S, so that each is q/K: S M = M S = M and U^T M = q V^T leave no other."""
    got = matrix_kkt(centred(Structure.SIMPLEX_ETF, 6), 3)
    np.testing.assert_allclose(got.duals[~np.eye(6, dtype=bool)], 0.5 / 6, rtol=1e-13)
    assert np.all(got.active == ~np.eye(6, dtype=bool))


def test_an_odd_cross_polytope_is_stationary_only_when_centred():
    raw = np.asarray(Structure.CROSS_POLYTOPE.logits(7))
    assert matrix_kkt(raw, 3).verdict is Verdict.NOT_STATIONARY
    got = matrix_kkt(centred(Structure.CROSS_POLYTOPE, 7), 3)
    assert got.verdict is Verdict.MINIMUM
    # The last class is least apart from the others, but free: it has no price.
    assert np.all(got.active[6, :6])
    np.testing.assert_array_equal(got.duals[6, :6], 0)


@pytest.mark.parametrize(
    "point",
    kkt_points(),
    ids=lambda p: f"K{len(p['a']) + 1}-L{p['L']}-{p['objective']:.4f}",
)
def test_points_of_the_reduced_problem_are_points_of_the_full_one(point):
    """The reduced flow is the full one on a subspace that is invariant."""
    a = np.asarray(point["a"])
    size = len(a) + 1
    signs = scipy.linalg.hadamard(size)
    got = matrix_kkt(signs[:, 1:] * a @ signs[:, 1:].T, point["L"])
    assert got.residual < 1e-12
    assert got.rank == np.sum(a > 0)
    q = 2 / (point["L"] + 1)
    assert got.objective == pytest.approx(size**q * point["objective"], rel=1e-12)
    if not point["minimum"]:
        assert got.verdict is Verdict.SADDLE


def test_near_minima_all_costs_more():
    rng = np.random.default_rng(0)
    for point in kkt_points():
        a = np.asarray(point["a"])
        if len(a) != 3 or point["L"] == 1:
            continue
        signs = scipy.linalg.hadamard(4)[:, 1:]
        got = matrix_kkt(signs * a @ signs.T, point["L"])
        if got.verdict is not Verdict.MINIMUM:
            continue
        alive = a > 0
        factor = signs[:, alive] * np.sqrt(a[alive])
        left, right = (
            factor + 1e-3 * rng.normal(size=(20_000, *factor.shape)) for _ in range(2)
        )
        near = left @ right.transpose(0, 2, 1)
        gaps = np.diagonal(near, axis1=1, axis2=2)[:, None, :] - near
        gaps = np.min(gaps + np.where(np.eye(4), np.inf, 0), axis=(1, 2))
        values = np.linalg.svd(near, compute_uv=False)[:, : got.rank]
        q = 2 / (point["L"] + 1)
        excess = np.sum((values / gaps[:, None]) ** q, axis=1) - got.objective
        assert np.min(excess) > 0


def test_what_second_order_does_not_decide_is_flat():
    """The nuclear norm of full rank is straight along symmetric changes."""
    point = FixedRank.nearest(np.diag([3.0, 2.0, 1.0]), 3, 1.0)
    active = np.zeros((3, 3), dtype=bool)
    active[1, 0] = True
    curvature, verdict = _judge(point, 1.0 * active, active)
    assert curvature == pytest.approx(0, abs=1e-12)
    assert verdict is Verdict.FLAT


def test_a_step_away_is_not_stationary():
    rng = np.random.default_rng(1)
    for structure in Structure:
        logits = centred(structure, 6)
        got = matrix_kkt(logits + 0.01 * rng.normal(size=(6, 6)), 2)
        assert got.verdict is Verdict.NOT_STATIONARY
        assert got.residual > 1e-4
        assert np.isnan(got.curvature)


def test_two_classes_have_one_answer():
    got = matrix_kkt(np.asarray([[1.0, -1.0], [-1.0, 1.0]]), 4)
    assert got.verdict is Verdict.MINIMUM
    assert got.objective == pytest.approx(1)


def test_a_wrong_class_is_infeasible():
    logits = centred(Structure.SIMPLEX_ETF, 4)
    got = matrix_kkt(logits[:, [1, 0, 2, 3]], 2)
    assert got.verdict is Verdict.INFEASIBLE
    assert np.isnan(got.objective)
    assert got.active[1, 0]


@pytest.mark.parametrize(
    ("logits", "depth", "message"),
    [
        (np.zeros((3, 3)), 2, "not all zero"),
        (np.full((3, 3), np.nan), 2, "finite class means"),
        (np.eye(3), 0.5, "at least 1"),
        (np.eye(3), np.inf, "must be finite"),
    ],
)
def test_what_is_no_point_is_refused(logits, depth, message):
    with pytest.raises(ValueError, match=message):
        matrix_kkt(logits, depth)
