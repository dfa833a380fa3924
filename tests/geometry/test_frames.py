"""The named structures against their closed forms, and the papers' objectives."""

from functools import partial

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

from deepufm.geometry import (
    cross_polytope,
    polygon_vectors,
    regular_polygon,
    simplex_etf,
)

ROUNDING = 2.0**-53


def smallest_gap(logits: np.ndarray) -> float:
    """min over classes c and others c' of Z_cc - Z_c'c, columns being classes."""
    gaps = np.diag(logits)[None, :] - logits
    return gaps[~np.eye(len(gaps), dtype=bool)].min()


def assert_structure(logits, singular_values, gap):
    """The (descending) non-zero singular values, the rank and the smallest gap."""
    assert isinstance(logits, jax.Array)
    assert logits.dtype == jnp.float64
    logits = np.asarray(logits)
    np.testing.assert_array_equal(logits, logits.T)
    found = np.linalg.svd(logits, compute_uv=False)
    rest = len(found) - len(singular_values)
    np.testing.assert_allclose(found, singular_values + [0.0] * rest, atol=2e-14)
    assert smallest_gap(logits) == pytest.approx(gap, rel=1e-14)
    # Positive semidefinite: the eigenvalues are the singular values.
    assert np.linalg.eigvalsh(logits).min() > -2e-14


@pytest.mark.parametrize("num_classes", [2, 3, 10, 17])
def test_simplex_etf_has_equal_gaps_and_modes(num_classes):
    assert_structure(simplex_etf(num_classes), [1.0] * (num_classes - 1), 1)
    logits = np.asarray(simplex_etf(num_classes))
    np.testing.assert_allclose(logits.sum(axis=0), 0, atol=num_classes * ROUNDING)
    gaps = np.diag(logits)[None, :] - logits + np.eye(num_classes)
    np.testing.assert_allclose(gaps, 1, rtol=4 * ROUNDING)


@pytest.mark.parametrize("num_classes", [2, 3, 4, 9, 16])
def test_cross_polytope_closed_forms(num_classes):
    pairs, single = divmod(num_classes, 2)
    gap = 2 if num_classes == 2 else 1
    assert_structure(cross_polytope(num_classes), [2.0] * pairs + [1.0] * single, gap)


def test_cross_polytope_pairs_neighbours():
    block = [[1, -1], [-1, 1]]
    np.testing.assert_array_equal(cross_polytope(2), block)
    expected = np.zeros((5, 5))
    expected[:2, :2] = expected[2:4, 2:4] = block
    expected[4, 4] = 1
    np.testing.assert_array_equal(cross_polytope(5), expected)


@pytest.mark.parametrize("num_classes", [3, 4, 7, 10, 16])
def test_polygon_closed_forms(num_classes):
    gap = float(1 - mpmath.cos(2 * mpmath.pi / num_classes))
    assert_structure(regular_polygon(num_classes), [num_classes / 2] * 2, gap)


@pytest.mark.parametrize("num_classes", [3, 4, 12, 37, 300])
def test_polygon_entries_are_accurate_to_the_last_bits(num_classes):
    with mpmath.workdps(40):
        steps = [2 * mpmath.pi * k / num_classes for k in range(num_classes)]
        cos = np.array([float(mpmath.cos(s)) for s in steps])
        sin = np.array([float(mpmath.sin(s)) for s in steps])
    # mpmath leaves 1e-41 where the cosine is 0, where an absolute tolerance is needed.
    close = partial(np.testing.assert_allclose, rtol=3 * ROUNDING, atol=1e-40)
    close(np.asarray(regular_polygon(num_classes))[:, 0], cos)
    close(polygon_vectors(num_classes), np.stack([cos, sin]))


def test_square_is_exact():
    row = np.array([1.0, 0, -1, 0])
    expected = np.stack([np.roll(row, k) for k in range(4)])
    np.testing.assert_array_equal(regular_polygon(4), expected)


def test_triangle_is_the_simplex_etf():
    expected = 1.5 * np.asarray(simplex_etf(3))
    np.testing.assert_allclose(regular_polygon(3), expected, rtol=4 * ROUNDING)


@pytest.mark.parametrize("phase", [0.0, 0.3, -2.0])
def test_polygon_vectors_have_the_polygon_as_gram_matrix(phase):
    vectors = np.asarray(jax.jit(polygon_vectors, static_argnums=0)(7, phase))
    assert vectors.shape == (2, 7)
    np.testing.assert_allclose(
        vectors[:, 0], [np.cos(phase), np.sin(phase)], rtol=2 * ROUNDING
    )
    # Counter-clockwise by a seventh of a turn.
    assert np.linalg.det(vectors[:, :2]) == pytest.approx(np.sin(2 * np.pi / 7))
    np.testing.assert_allclose(vectors @ vectors.T, 3.5 * np.eye(2), atol=1e-15)
    gram = vectors.T @ vectors
    np.testing.assert_allclose(gram, regular_polygon(7), atol=8 * ROUNDING)


# Sums of sigma^(2/(L+1)) at smallest gap 1, that is the objective of P1 eq. 3 over L+1
# at n = 1: mpmath, 40 digits, from P1 eqs. 11, 15 and 16 and Thm 3.2.
OBJECTIVES = [
    # K, L, simplex ETF, cross-polytope, regular polygon
    (3, 2, 2.0, 2.5874010519681994748, 2.0),
    (4, 1, 3.0, 4.0, 4.0),
    (4, 5, 3.0, 2.5198420997897463295, 2.5198420997897463295),
    (5, 3, 4.0, 3.8284271247461900976, 3.8042260651806142885),
    (6, 4, 5.0, 3.9585237323186827781, 4.0953450221584385924),
    (7, 2, 6.0, 5.7622031559045984243, 8.8421428975516350253),
    (9, 5, 8.0, 6.0396841995794926591, 5.3586621729290362014),
    (10, 6, 9.0, 6.0950682710223772046, 5.0835346732299015754),
    (16, 8, 15.0, 9.3322323166089326471, 5.6269349363408500727),
]


@pytest.mark.parametrize(("num_classes", "depth", "dnc", "cross", "circle"), OBJECTIVES)
def test_objectives_are_the_papers(num_classes, depth, dnc, cross, circle):
    for structure, expected in (
        (simplex_etf, dnc),
        (cross_polytope, cross),
        (regular_polygon, circle),
    ):
        logits = np.asarray(structure(num_classes))
        modes = np.linalg.svd(logits / smallest_gap(logits), compute_uv=False)
        # A mode that rounding leaves at 1e-16 would add 3e-4 at depth 8.
        modes = modes[modes > 1e-12]
        objective = (modes ** (2 / (depth + 1))).sum()
        assert objective == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize(
    ("structure", "least", "name"),
    [
        (simplex_etf, 2, "a simplex ETF"),
        (cross_polytope, 2, "a cross-polytope"),
        (regular_polygon, 3, "a regular polygon"),
        (polygon_vectors, 3, "a regular polygon"),
    ],
)
def test_too_few_classes_are_refused_with_advice(structure, least, name):
    message = (
        f"must be {least} or more for {name}, but is {least - 1}. "
        f"Give at least {least} classes."
    )
    with pytest.raises(ValueError, match=message):
        structure(least - 1)
