"""Local minima of the full problem, reached from nearby and from afar."""

import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
from oracles import kkt_points

from deepufm import Structure, Verdict
from deepufm.analysis._matrix_kkt import matrix_kkt
from deepufm.analysis._polish import polish


def centred(structure, num_classes):
    logits = np.asarray(structure.logits(num_classes))
    return logits - np.mean(logits, axis=0)


def random_frame(num_classes, rank, seed):
    """X^T X for random unit vectors: it classifies every class."""
    frame = np.random.default_rng(seed).normal(size=(rank, num_classes))
    frame /= np.linalg.norm(frame, axis=0)
    return frame.T @ frame


@pytest.mark.parametrize("depth", [1.5, 2, 6])
@pytest.mark.parametrize("num_classes", [5, 10])
@pytest.mark.parametrize("structure", list(Structure))
def test_structures_are_found_again(structure, num_classes, depth):
    logits = centred(structure, num_classes)
    want = matrix_kkt(logits, depth)
    noise = np.random.default_rng(0).normal(size=logits.shape)
    start = 5 * (logits + 0.07 * noise * np.linalg.norm(logits) / num_classes)
    got = polish(start, depth, want.rank)
    assert got.point.verdict is Verdict.MINIMUM
    assert got.point.residual < 1e-12
    np.testing.assert_allclose(got.point.logits, want.logits, rtol=0, atol=1e-11)
    start -= np.mean(start, axis=0)
    cosine = np.sum(start * want.logits) / np.linalg.norm(start)
    cosine /= np.linalg.norm(want.logits)
    assert got.angle == pytest.approx(np.arccos(cosine), rel=1e-8)


@pytest.mark.parametrize(("num_classes", "rank"), [(5, 3), (7, 3), (8, 5), (10, 4)])
def test_random_frames_end_at_minima(num_classes, rank):
    for depth in (2, 10):
        for seed in range(2):
            got = polish(random_frame(num_classes, rank, seed), depth)
            assert got.point.verdict is Verdict.MINIMUM
            assert got.point.residual < 1e-12
            assert got.point.rank <= rank
            # What the judge says of it by itself is the same.
            assert matrix_kkt(got.point.logits, depth).verdict is Verdict.MINIMUM


def test_another_optimiser_agrees():
    """SciPy's SLSQP in the factors of Z = A B^T, from a third of the way back."""
    size, rank, depth = 7, 3, 3
    power = 2 / (depth + 1)
    start = random_frame(size, rank, 1)
    got = polish(start, depth).point
    first = start / np.min(np.diag(start)[:, None] - start + 9 * np.eye(size))
    first = got.logits + (first - got.logits) / 3
    left, values, right = np.linalg.svd(first)
    factors = np.concatenate(
        [left[:, :rank] * np.sqrt(values[:rank]), right[:rank].T * values[:rank] ** 0.5]
    ).ravel()
    off = ~np.eye(size, dtype=bool)

    def split(x):
        return np.split(x.reshape(2 * size, rank), 2)

    def cost(x):
        a, b = split(x)
        u, s, v = np.linalg.svd(a @ b.T)
        slope = (u[:, :rank] * power * s[:rank] ** (power - 1)) @ v[:rank]
        gradient = np.concatenate([slope @ b, slope.T @ a]).ravel()
        return np.sum(s[:rank] ** power), gradient

    def gaps(x):
        a, b = split(x)
        logits = a @ b.T
        return (np.diag(logits)[None, :] - logits)[off] - 1

    def gap_slopes(x):
        a, b = split(x)
        eye = np.eye(size)
        others, classes = np.nonzero(off)
        by_a = np.einsum("pi,pr->pir", eye[classes] - eye[others], b[classes])
        by_b = np.einsum("pi,pr->pir", eye[classes], a[classes] - a[others])
        return np.concatenate([by_a, by_b], axis=1).reshape(len(others), -1)

    found = scipy.optimize.minimize(
        cost,
        factors,
        jac=True,
        method="SLSQP",
        constraints={"type": "ineq", "fun": gaps, "jac": gap_slopes},
        options={"ftol": 1e-13, "maxiter": 300},
    )
    assert found.fun == pytest.approx(got.objective, rel=1e-8)


def test_a_dying_singular_value_is_dropped():
    logits = centred(Structure.CROSS_POLYTOPE, 6)
    start = logits + 0.05 * random_frame(6, 5, 3)
    got = polish(start, 3)
    assert got.point.verdict is Verdict.MINIMUM
    assert got.point.rank == 3
    assert got.point.objective == pytest.approx(3 * 2**0.5, rel=1e-12)


def test_the_cube_is_left():
    """A minimum of the reduced problem, three modes of 1/2, not of the full one."""
    signs = scipy.linalg.hadamard(8)[:, [1, 2, 4]]
    cube = signs @ signs.T / 2
    assert matrix_kkt(cube, 2).verdict is Verdict.SADDLE
    got = polish(cube, 2)
    assert [s.rank for s in got.saddles] == [3]
    assert got.saddles[0].objective == pytest.approx(3 * 4 ** (2 / 3), rel=1e-12)
    assert got.point.verdict is Verdict.MINIMUM
    assert got.point.rank == 3
    assert got.point.objective < 0.95 * got.saddles[0].objective


@pytest.mark.parametrize(
    "point",
    [p for p in kkt_points() if p["L"] > 1 and not p["minimum"]][::4],
    ids=lambda p: f"K{len(p['a']) + 1}-L{p['L']}-{p['objective']:.4f}",
)
def test_saddles_of_the_reduced_problem_lead_down(point):
    a = np.asarray(point["a"])
    signs = scipy.linalg.hadamard(len(a) + 1)[:, 1:]
    got = polish(signs * a @ signs.T, point["L"])
    costs = [s.objective for s in got.saddles] + [got.point.objective]
    want = (len(a) + 1) ** (2 / (point["L"] + 1)) * point["objective"]
    assert costs[0] == pytest.approx(want, rel=1e-12)
    assert len(costs) > 1
    assert np.all(np.diff(costs) < 0)
    assert got.point.verdict is Verdict.MINIMUM


def test_a_saddle_is_left_on_the_side_of_the_start():
    """That of four classes lies between the simplex and the square."""
    saddle = next(
        np.asarray(p["a"])
        for p in kkt_points()
        if len(p["a"]) == 3 and p["L"] == 2 and not p["minimum"]
    )
    signs = scipy.linalg.hadamard(4)[:, 1:]
    simplex, square = 3.0, 2 * 2 ** (2 / 3)
    for part in (1e-3, 1e-6, 1e-9):
        for side, want in ((1, simplex), (-1, square)):
            a = saddle + side * part * (0.25 - saddle)
            got = polish(signs * a @ signs.T, 2)
            assert got.point.objective == pytest.approx(want, rel=1e-12)


def test_a_start_that_misclassifies_is_said_to():
    logits = centred(Structure.SIMPLEX_ETF, 4)
    assert polish(-logits, 2).point.verdict is Verdict.INFEASIBLE
    # Of rank 1 no more than two classes can be right.
    assert polish(logits, 2, 1).point.verdict is Verdict.INFEASIBLE


def test_a_rank_beyond_the_classes_is_refused():
    with pytest.raises(ValueError, match="from 1 to 4"):
        polish(np.eye(4), 2, 5)
