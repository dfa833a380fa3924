"""Slopes and curvatures on matrices of one rank, against finite differences."""

import numpy as np
import pytest

from deepufm.analysis._fixed_rank import (
    FixedRank,
    gap_matrices,
    gaps_of,
    least_gap,
    pooled,
)

# Singular values apart, far apart, and equal.
spectra = pytest.mark.parametrize(
    "values", [[3.0, 1.1, 0.4], [2.0, 1e-3], [1.5, 1.5, 1.5], [2.0, 1.0, 1.0], [1.0]]
)
powers = pytest.mark.parametrize("power", [1.0, 2 / 3, 2 / 11])
K = 5


def schatten(matrix, rank, power):
    return np.sum(np.linalg.svd(matrix, compute_uv=False)[:rank] ** power)


def random_point(values, power, seed=0):
    rng = np.random.default_rng(seed)
    left, right = (np.linalg.qr(rng.normal(size=(K, K)))[0] for _ in range(2))
    return FixedRank(left, np.asarray(values), right, power), rng


def basis(point):
    """Returns dZ by the coordinates, (K*K, coordinates)."""
    return point.pulled_back(np.eye(K * K).reshape(K * K, K, K))


@powers
@spectra
def test_slopes_are_those_of_the_norm_and_of_a_step(values, power):
    point, rng = random_point(values, power)
    count = 2 * K * len(values) - len(values) ** 2
    assert point.slopes().shape == (count,)
    # Steps small beside the least singular value.
    step = 1e-4 * rng.normal(size=count) * min(values) ** (power / 2)
    ahead, behind = point.moved(step), point.moved(-step)
    assert ahead.rank == len(values)
    difference = (ahead.logits - behind.logits) / 2
    scale = float(np.linalg.norm(difference))
    np.testing.assert_allclose(
        difference.ravel(), basis(point) @ step, rtol=0, atol=1e-6 * scale
    )
    rise = (ahead.objective - behind.objective) / 2
    size = float(np.linalg.norm(step))
    assert rise == pytest.approx(point.slopes() @ step, abs=1e-6 * size)


@powers
@spectra
def test_curvatures_are_second_differences(values, power):
    """Along blocks [[S+tP, tD], [tC, t² C (S+tP)^-1 D]], the stated coordinates."""
    point, rng = random_point(values, power, seed=1)
    rank, rest = len(values), K - len(values)
    matrix = rng.normal(size=(K, K))
    for _ in range(3):
        step = rng.normal(size=2 * K * rank - rank**2) * min(values) ** (power / 2)
        moved = (basis(point) @ step).reshape(K, K)
        blocks = point.left.T @ moved @ point.right
        np.testing.assert_allclose(blocks[rank:, rank:], 0, atol=1e-12)

        def lagrangian(t, blocks=blocks):
            core = np.diag(values) + t * blocks[:rank, :rank]
            below, beside = t * blocks[rank:, :rank], t * blocks[:rank, rank:]
            corner = below @ np.linalg.solve(core, beside)
            logits = point.left @ np.block([[core, beside], [below, corner]])
            logits = logits @ point.right.T
            return schatten(logits, rank, power) - np.sum(matrix * logits)

        # Of fourth order in t.
        t = 3e-3
        weights = [(-2, -1 / 12), (-1, 4 / 3), (0, -5 / 2), (1, 4 / 3), (2, -1 / 12)]
        second = sum(w * lagrangian(i * t) for i, w in weights) / t**2
        form = step @ point.hessian(matrix) @ step
        # Each part is of the size of the step squared.
        assert second == pytest.approx(form, abs=1e-5 * step @ step)
    assert rest == K - rank


def test_the_curvature_of_close_values_joins_that_of_equal_ones():
    """Divided differences, without one of close numbers."""
    matrix = np.random.default_rng(2).normal(size=(K, K))
    equal, _ = random_point([1.5, 1.5, 1.5], 0.5)
    close, _ = random_point([1.5 + 1e-9, 1.5, 1.5 - 1e-12], 0.5)
    np.testing.assert_allclose(
        equal.hessian(matrix), close.hessian(matrix), rtol=0, atol=1e-8
    )


def test_gaps_and_their_matrices_agree():
    logits = np.random.default_rng(3).normal(size=(K, K))
    gaps = gaps_of(logits)
    assert gaps[3, 1] == logits[1, 1] - logits[3, 1]
    others, classes = np.nonzero(~np.eye(K, dtype=bool))
    matrices = gap_matrices(others, classes, K)
    np.testing.assert_allclose(
        np.sum(matrices * logits, axis=(1, 2)), gaps[others, classes], rtol=1e-13
    )
    assert least_gap(logits) == np.min(gaps[others, classes])
    duals = np.where(np.eye(K, dtype=bool), 0, np.arange(25.0).reshape(K, K))
    want = np.tensordot(duals[others, classes], matrices, 1)
    np.testing.assert_allclose(pooled(duals), want, rtol=1e-13)
