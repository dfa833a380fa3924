"""Softmax codes against an independent search, closed forms and published codes.

`CODES` is from an independent search: annealed energy, then SciPy's SLSQP at 1e-15, 40
to 200 starts; least largest inner product and, among the codes that reach it, least
Gram norm, by a second SLSQP.
"""

import functools
import math

import numpy as np
import pytest
import scipy.optimize

from deepufm.geometry._code_table import best_known_inner_product
from deepufm.geometry._softmax_code import (
    _described,
    _search,
    hull_distance,
    softmax_code,
)

# K, r, largest inner product, Gram norm.
CODES = [
    (4, 2, 0.0, 2.8284271247461903),
    (4, 3, -0.3333333333333333, 2.3094010767585034),
    (5, 2, 0.3090169943749479, 3.5355339059327378),
    (5, 3, 0.0, 2.9154759474226504),
    (5, 4, -0.25, 2.5),
    (6, 3, 0.0, 3.464101615137755),
    (6, 4, 0.0, 3.0),
    (7, 3, 0.21013831273060332, 4.050376460728051),
    (7, 4, 0.0, 3.5355339059327378),
    (7, 5, 0.0, 3.13581462037113),
    (8, 3, 0.2612038749637417, 4.672556963240768),
    (8, 5, 0.0, 3.6055512754639896),
    (8, 6, 0.0, 3.265986323710904),
    (9, 2, 0.7660444431189785, 6.3639610306789285),
    (9, 3, 0.3333333333333337, 5.212165257035762),
    (9, 4, 0.16201519961163485, 4.517198123799011),
    (9, 5, 0.0, 4.06201920231798),
    (9, 6, 0.0, 3.6742346141747677),
    (9, 7, 0.0, 3.403429642777023),
    (10, 3, 0.40439432521625107, 5.77663228141306),
    (10, 4, 0.16666666666666707, 5.0),
    (10, 6, 0.0, 4.123105625617661),
    (10, 7, 0.0, 3.785938897200183),
    (10, 8, 0.0, 3.5355339059327378),
    (10, 9, -0.11111111111111077, 3.3333333333333335),
]
codes = pytest.mark.parametrize(
    ("num_classes", "rank", "largest", "gram_norm"), CODES, ids=lambda x: f"{x:.4g}"
)


@functools.cache
def cached(num_classes, rank):
    starts = 1 if num_classes > 10 else 12
    return softmax_code(num_classes, rank, starts=starts)


def off_diagonal(vectors):
    gram = vectors.T @ vectors
    return gram[~np.eye(len(gram), dtype=bool)]


@codes
def test_codes_are_those_of_an_independent_search(
    num_classes, rank, largest, gram_norm
):
    code = cached(num_classes, rank)
    assert code.vectors.shape == (rank, num_classes)
    np.testing.assert_allclose(np.linalg.norm(code.vectors, axis=0), 1, rtol=1e-15)
    assert code.max_inner_product == np.max(off_diagonal(code.vectors))
    assert code.max_inner_product == pytest.approx(largest, abs=2e-15)
    assert code.gram_norm == pytest.approx(gram_norm, rel=1e-12)
    assert code.normalised_margin == pytest.approx((1 - largest) / gram_norm, rel=1e-12)
    assert code.certified
    assert code.residual < 1e-14
    assert 3 <= code.hits <= code.starts == 12
    assert np.linalg.matrix_rank(code.vectors, tol=1e-6) == rank


@pytest.mark.parametrize(("num_classes", "rank"), [(5, 3), (6, 5), (8, 5), (9, 7)])
def test_the_search_finds_the_codes_that_are_known(num_classes, rank):
    """It is not used for K <= 2r, where codes of many shapes are equally good."""
    found = _search(num_classes, rank, starts=16, seed=0)
    exact = softmax_code(num_classes, rank)
    assert found.max_inner_product == pytest.approx(exact.max_inner_product, abs=1e-14)
    assert found.gram_norm == pytest.approx(exact.gram_norm, rel=1e-12)
    assert found.hits == 16
    assert found.certified


@pytest.mark.parametrize(("num_classes", "rank"), [(7, 3), (9, 4), (10, 3)])
def test_no_small_movement_makes_a_code_better(num_classes, rank):
    code = cached(num_classes, rank)
    rng = np.random.default_rng(0)
    moves = rng.normal(size=(4000, rank, num_classes))
    moves *= np.geomspace(1e-6, 1e-1, 4000)[:, None, None]
    moved = code.vectors + moves
    moved /= np.linalg.norm(moved, axis=1, keepdims=True)
    gram = np.swapaxes(moved, 1, 2) @ moved - 2 * np.eye(num_classes)
    assert np.min(np.max(gram, axis=(1, 2))) > code.max_inner_product


def test_a_code_that_is_not_stationary_is_not_certified():
    vectors = cached(7, 3).vectors.copy()
    assert _described(vectors, 1, 1).certified
    vectors[:, 0] += 1e-6 * np.asarray([1.0, -2.0, 1.0])
    vectors[:, 0] /= np.linalg.norm(vectors[:, 0])
    moved = _described(vectors, 1, 1)
    assert not moved.certified
    assert moved.residual > 1e-2  # one pair alone touches, and can part


def test_eleven_vectors_are_the_icosahedron_without_one():
    code = cached(11, 3)
    assert code.max_inner_product == pytest.approx(5**-0.5, rel=1e-14)
    # Twelve vertices: X X^T = 4 I; without x it is 4 I - x x^T.
    assert code.gram_norm == pytest.approx((2 * 4**2 + 3**2) ** 0.5, rel=1e-12)


def test_a_loose_vector_lies_where_the_gram_norm_is_least():
    """Nineteen vectors in R^3: one touches two others and could still be moved."""
    vectors = softmax_code(19, 3, starts=4).vectors
    gram = vectors.T @ vectors - 2 * np.eye(19)
    rho = np.max(gram)
    (loose,) = np.flatnonzero(np.sum(gram > rho - 1e-9, axis=1) < 3)
    others = np.delete(vectors, loose, axis=1).T
    fixed = vectors[:, loose]
    bounds = [
        {"type": "ineq", "fun": lambda x: rho - others @ x, "jac": lambda _: -others},
        {"type": "eq", "fun": lambda x: x @ x - 1, "jac": lambda x: 2 * x},
    ]
    found = scipy.optimize.minimize(
        lambda x: np.sum((others @ x) ** 2),
        fixed + np.asarray([0.02, -0.01, 0.03]),
        jac=lambda x: 2 * others.T @ (others @ x),
        constraints=bounds,
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 200},
    )
    assert np.linalg.norm(found.x - fixed) < 1e-7
    assert np.sum((others @ fixed) ** 2) == pytest.approx(found.fun, rel=1e-13)


@pytest.mark.parametrize(
    ("vectors", "distance"),
    [
        # A vertex, the centre of the others and the origin lie on a line.
        (softmax_code(4, 3).vectors, 4 / 3),
        (softmax_code(7, 9).vectors, 7 / 6),
        # To the chord between the two neighbours.
        (softmax_code(7, 2).vectors, 1 - math.cos(2 * math.pi / 7)),
        # To the origin.
        (softmax_code(8, 4).vectors, 1.0),
        # To the plane of the five neighbours.
        (cached(12, 3).vectors, 1 - 5**-0.5),
        # To a vertex: the hull of one point.
        (np.asarray([[0.6, 1.0], [0.8, 0.0]]), 0.8**0.5),
        # Inside.
        (np.asarray([[0.0, 1.0, -1.0, 1.0], [0.0, 1.0, 1.0, -2.0]]), 0.0),
    ],
)
def test_distances_to_the_hull_of_the_others_are_elementary(vectors, distance):
    assert hull_distance(vectors) == pytest.approx(distance, rel=1e-13, abs=1e-15)


def test_the_same_seed_gives_the_same_code():
    first, second = (softmax_code(9, 4, starts=3, seed=5) for _ in range(2))
    np.testing.assert_array_equal(first.vectors, second.vectors)
    other = softmax_code(9, 4, starts=3, seed=6)
    assert other.max_inner_product == pytest.approx(first.max_inner_product, rel=1e-13)


def root(coefficients, near):
    roots = np.roots(coefficients)
    return float(np.real(roots[np.argmin(np.abs(roots - near))]))


# Of the vertices (1, 1/T, T) of the snub cube: T^3 = T^2 + T + 1.
T = root([1, -1, -1, -1], 1.84)


# Known in closed form: by hand, or as zeros of the polynomials in H. Cohn's table of
# spherical codes.
@pytest.mark.parametrize(
    ("num_classes", "rank", "expected"),
    [
        (7, 3, root([3, -9, -3, 1], 0.21)),
        (8, 3, (2 * 2**0.5 - 1) / 7),  # square antiprism
        (9, 3, 1 / 3),
        (11, 3, 5**-0.5),
        (12, 3, 5**-0.5),  # icosahedron
        (24, 3, (1 + T + 1 / T) / (1 + T**2 + T**-2)),  # snub cube (Robinson, 1961)
        (10, 4, 1 / 6),  # Petersen graph
        (24, 4, 1 / 2),  # D4 roots
        (16, 5, 1 / 5),  # Clebsch graph
        (27, 6, 1 / 4),  # Schlaefli graph
        (2, 5, -1.0),
        (31, 40, -1 / 30),
        (31, 16, 0.0),
        (300, 2, math.cos(2 * math.pi / 300)),
    ],
)
def test_the_table_has_the_codes_known_in_closed_form(num_classes, rank, expected):
    got = best_known_inner_product(num_classes, rank)
    assert got == pytest.approx(expected, rel=2e-12)


# Angles between nearest points in R^3, in degrees, as published for Tammes' problem.
TAMMES = {
    10: 66.1468, 13: 57.1367, 14: 55.6706, 15: 53.6579, 16: 52.2444, 17: 51.0903,
    18: 49.5567, 19: 47.6919, 20: 47.4310, 21: 45.6132, 22: 44.7402, 23: 43.7100,
    25: 41.6345, 26: 41.0377, 27: 40.6776, 28: 39.3551, 29: 38.7137, 30: 38.5971,
    31: 37.7098, 32: 37.4752,
}  # fmt: skip


def test_the_table_has_the_published_angles_on_the_sphere():
    for num_classes, angle in TAMMES.items():
        got = math.degrees(math.acos(best_known_inner_product(num_classes, 3)))
        assert got == pytest.approx(angle, abs=1e-4)


def test_the_table_has_the_values_of_the_independent_search():
    for num_classes, rank, largest, _ in CODES:
        got = best_known_inner_product(num_classes, rank)
        assert got == pytest.approx(largest, abs=1e-13)


def test_more_classes_or_fewer_dimensions_are_no_better():
    """A code without a vector is a code, and so is one in a subspace."""
    table = np.asarray(
        [[best_known_inner_product(k, r) for k in range(3, 33)] for r in range(2, 9)]
    )
    assert np.all(np.isfinite(table))
    assert np.all(np.diff(table, axis=1) >= -1e-12)
    assert np.all(np.diff(table, axis=0) <= 1e-12)
    # No code of more than r+1 vectors has all inner products negative.
    assert np.all(table[np.arange(3, 33) > np.arange(3, 10)[:, None]] >= 0)


def test_where_no_search_was_made_nothing_is_known():
    assert math.isnan(best_known_inner_product(33, 8))
    assert math.isnan(best_known_inner_product(20, 9))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 2, 8), "`num_classes` must be 3 or more, but is 2"),
        ((5, 1, 8), "`rank` must be 2 or more, but is 1"),
        ((9, 3, 0), "`starts` must be 1 or more, but is 0"),
    ],
)
def test_what_has_no_code_is_refused(arguments, message):
    num_classes, rank, starts = arguments
    with pytest.raises(ValueError, match=message):
        softmax_code(num_classes, rank, starts=starts)


@pytest.mark.parametrize(("num_classes", "rank"), [(1, 2), (3, 1)])
def test_the_table_refuses_what_has_no_code(num_classes, rank):
    with pytest.raises(ValueError, match="must be 2 or more, but is 1"):
        best_known_inner_product(num_classes, rank)
