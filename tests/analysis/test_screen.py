"""Rough minima found many at a time, against exact ones and NumPy."""

import numpy as np
import pytest

from deepufm import Structure, structure_objective
from deepufm.analysis._screen import rough_cost, screen
from deepufm.analysis._search import _unlike, search

ROUGH = screen(6, 3.0, 3, 24, seed=0)


def exact_cost(logits, depth, rank):
    """Sum of (sigma/g)^q written out."""
    gaps = [logits[c, c] - logits[k, c] for c in range(6) for k in range(6) if k != c]
    values = np.sqrt(np.maximum(np.linalg.eigvalsh(logits.T @ logits), 0))[::-1]
    return sum((value / min(gaps)) ** (2 / (depth + 1)) for value in values[:rank])


def test_rough_minima_classify_and_come_cheapest_first():
    assert ROUGH.shape[1:] == (6, 6)
    assert len(ROUGH) > 20
    costs = [exact_cost(logits, 3, 3) for logits in ROUGH]
    assert np.all(np.diff(costs) >= 0)
    np.testing.assert_allclose(
        [rough_cost(logits, 3, 3) for logits in ROUGH], costs, rtol=1e-10
    )
    ranks = np.linalg.matrix_rank(ROUGH, tol=1e-10 * np.linalg.norm(ROUGH[0]))
    assert np.all(ranks == 3)


def test_the_best_is_near_the_optimum_of_the_rank():
    """Three orthogonal pairs: the cross-polytope (P1 eq. 15)."""
    want = structure_objective(Structure.CROSS_POLYTOPE, 6, 3) / 4
    assert want < rough_cost(ROUGH[0], 3, 3) < want * 1.01


def test_misclassified_classes_cost_infinity():
    assert rough_cost(np.ones((3, 3)), 2, 2) == np.inf
    assert rough_cost(np.full((3, 3), np.nan), 2, 2) == np.inf


def test_those_alike_are_kept_once():
    cheap, dear = np.eye(3), np.diag([1.0, 1.0, 1.5])
    assert rough_cost(cheap, 2, 3) < rough_cost(dear, 2, 3)
    kept = _unlike(np.stack([cheap, cheap * 7, dear, dear]), 2, 3)
    assert [float(logits[2, 2]) for logits in kept] == [1.0, 1.5]


def test_a_screened_search_polishes_what_it_found():
    got = search(6, 3, 3, starts=2, screened=24)
    plain = search(6, 3, 3, starts=0)
    assert got.starts > plain.starts
    want = structure_objective(Structure.CROSS_POLYTOPE, 6, 3) / 4
    assert got.best.objective == pytest.approx(want, rel=1e-12)


def test_fewer_screened_than_polished_are_refused():
    with pytest.raises(ValueError, match="0 or at least `starts`, 8, but is 4"):
        search(6, 3, 3, starts=8, screened=4)
