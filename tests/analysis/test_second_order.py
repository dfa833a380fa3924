"""Curvatures where multipliers are not unique, against ones found by hand."""

import numpy as np
import pytest

from deepufm import Structure
from deepufm.analysis._fixed_rank import FixedRank
from deepufm.analysis._matrix_kkt import matrix_kkt
from deepufm.analysis._second_order import (
    _least_curvature,
    _open_side,
    free_directions,
    way_down,
)

# Multipliers (1 + z, 1 - z), z from -1 to 1.
PRICES, SPARE = np.ones(2), np.asarray([[1.0], [-1.0]])


def least(first, more, free=None):
    first, more = np.diag(first), [np.diag(m) for m in more]
    free = np.eye(len(first)) if free is None else free
    return _least_curvature(free, first, more, PRICES, SPARE[:, : len(more)])


def test_the_best_multipliers_speak():
    """Curvatures -1 + 2z and 2 - z, greatest least at z = 1; by themselves -1 and 2."""
    curvature, ways = least([-1.0, 2.0], [[2.0, -1.0]])
    assert curvature == pytest.approx(1)
    assert ways == []


def test_a_way_down_goes_down_for_all_multipliers():
    curvature, ways = least([-1.0, 2.0], [[0.5, 0.0]])
    assert curvature == pytest.approx(-0.5)
    assert len(ways) >= 1
    for way in ways:
        np.testing.assert_allclose(np.abs(way), [1, 0], atol=1e-12)


def test_no_way_is_sure_where_multipliers_only_trade():
    """Curvatures -0.1 + z and -0.1 - z: of each way some multiplier makes a way up."""
    curvature, ways = least([-0.1, -0.1], [[1.0, -1.0]])
    assert curvature == pytest.approx(-0.1)
    assert ways == []


def test_with_one_multiplier_all_is_plain():
    curvature, ways = least([-1.0, 2.0, -3.0], [])
    assert curvature == pytest.approx(-3)
    np.testing.assert_allclose(np.abs(ways), [[0, 0, 1]], atol=1e-12)
    # Directions that are not free do not count.
    curvature, ways = least([-1.0, 2.0, -3.0], [], np.eye(3)[:, :2])
    assert curvature == pytest.approx(-1)


def test_a_vertex_has_no_way_to_curve():
    curvature, ways = least([-1.0, -1.0], [], np.zeros((2, 0)))
    assert curvature == np.inf
    assert ways == []


def test_unpriced_gaps_may_open_only():
    assert _open_side(np.asarray([])) == 1
    assert _open_side(np.asarray([0.0, 0.3])) == 1
    assert _open_side(np.asarray([-0.2, 0.0])) == -1
    assert _open_side(np.asarray([-0.2, 0.3])) == 0


def test_directions_that_free_gaps_open_are_looked_at():
    """At the centred cross-polytope of 5 the last class may move; its gaps are free."""
    logits = np.asarray(Structure.CROSS_POLYTOPE.logits(5))
    got = matrix_kkt(logits - np.mean(logits, axis=0), 1)
    point = FixedRank.nearest(got.logits, 3, 1.0)
    curvature, way = way_down(point, got.duals, got.active)
    assert way is None
    assert curvature == pytest.approx(0.5, rel=1e-10)
    # If all least gaps had a price, these directions would be left out.
    all_priced = np.where(got.active, np.maximum(got.duals, 1e-3), 0)
    assert way_down(point, all_priced, got.active)[0] > 0.9


def test_free_directions_are_where_rows_vanish():
    rows = np.asarray([[1.0, 1.0, 0.0], [2.0, 2.0, 1e-12]])
    free = free_directions(rows)
    assert free.shape == (3, 2)
    np.testing.assert_allclose(rows @ free, 0, atol=1e-11)
    np.testing.assert_allclose(free.T @ free, np.eye(2), atol=1e-14)
    np.testing.assert_array_equal(free_directions(np.zeros((0, 2))), np.eye(2))
