"""Least norms at infinity by many starts, against what is known of them."""

import numpy as np
import pytest
import scipy.linalg

from deepufm import Structure, Verdict, structure_objective, structure_rank
from deepufm.analysis._matrix_kkt import matrix_kkt
from deepufm.analysis._search import best_structure, pairs_and_singles, search


@pytest.mark.parametrize(("num_classes", "depth"), [(4, 2), (5, 3)])
def test_the_search_is_never_worse_than_the_named(num_classes, depth):
    for rank in range(2, num_classes):
        got = search(num_classes, depth, rank, starts=1)
        assert got.best.rank <= rank
        for structure in Structure:
            if structure_rank(structure, num_classes) <= rank:
                named = structure_objective(structure, num_classes, depth)
                assert (depth + 1) * got.best.objective <= named * (1 + 1e-12)


def test_at_depth_one_the_simplex_alone_is_a_minimum():
    """The problem is convex; starts that lose rank on their way end at saddles."""
    got = best_structure(4, 1, starts=3)
    assert got.best.objective == pytest.approx(3, rel=1e-12)
    assert got.best.verdict is Verdict.MINIMUM
    assert got.hits > 1
    assert all(point.verdict is Verdict.SADDLE for point in got.minima[1:])


@pytest.mark.parametrize("num_classes", [3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("depth", [20, 100, 1000])
def test_at_great_depth_the_polygon_is_best(num_classes, depth):
    """P1 Thm 3.2, for even and odd K: of all ranks, and alone of its own."""
    got = best_structure(num_classes, depth, starts=2)
    want = structure_objective(Structure.POLYGON, num_classes, depth)
    assert (depth + 1) * got.best.objective == pytest.approx(want, rel=1e-11)
    assert got.best.rank == 2
    assert got.best.verdict is Verdict.MINIMUM
    others = [point for point in got.minima[1:] if point.rank > 2]
    # At infinite depth the objective is the rank.
    assert all(point.objective > 1.1 * got.best.objective for point in others)


def test_where_the_polygon_is_not_yet_best_it_is_still_best_of_rank_two():
    """At finite depth, P1 Thm 3.2's optimum is that of its rank."""
    for num_classes, depth in ((7, 3), (8, 2), (8, 6)):
        got = search(num_classes, depth, 2, starts=12)
        want = structure_objective(Structure.POLYGON, num_classes, depth)
        assert (depth + 1) * got.best.objective == pytest.approx(want, rel=1e-11)


def test_the_best_eight_in_three_dimensions_are_not_the_cube():
    got = search(8, 2, 3, starts=2)
    signs = scipy.linalg.hadamard(8)[:, [1, 2, 4]] / 2
    cube = matrix_kkt(signs @ signs.T, 2)
    assert got.best.verdict is Verdict.MINIMUM
    assert got.best.objective < 0.95 * cube.objective
    # The square antiprism with all edges' gaps at 1: cos of the angle about the axis,
    # plus 2^-3/2 times the signs of the two faces.
    want = 2 * 4 ** (2 / 3) + 8 ** (1 / 3)
    assert got.best.objective == pytest.approx(want, rel=1e-12)
    # The cube itself is left as well.
    more = search(8, 2, 3, starts=0, also=[signs @ signs.T])
    assert more.best.objective == pytest.approx(got.best.objective, rel=1e-10)


def test_minima_are_counted_and_told_apart():
    got = search(6, 4, 5, starts=5, seed=1)
    # Two and three pairs are tried as well.
    assert sum(got.counts) == got.starts == 5 + len(Structure) + 2
    values = np.asarray([point.objective for point in got.minima])
    assert np.all(np.diff(values) > 0)
    assert got.hits == got.counts[0]
    assert got.best is got.minima[0]
    for point in got.minima:
        assert point.verdict is Verdict.MINIMUM
        assert point.residual < 1e-12
    simplex = got.of_rank(5)
    assert simplex is not None
    assert simplex.objective == pytest.approx(5, rel=1e-12)
    assert got.of_rank(6) is None
    again = search(6, 4, 5, starts=5, seed=1)
    np.testing.assert_array_equal(again.best.logits, got.best.logits)


@pytest.mark.parametrize(("num_classes", "pairs"), [(5, 2), (8, 2), (8, 3), (9, 4)])
def test_pairs_and_singles_are_minima(num_classes, pairs):
    """One of each rank from K/2 to K-2: better than P1's cross-polytope for odd K."""
    singles = num_classes - 2 * pairs
    for depth in (1.5, 3, 10):
        q = 2 / (depth + 1)
        got = matrix_kkt(pairs_and_singles(num_classes, pairs), depth)
        want = pairs * 2**q + singles - 1 + (1 - singles / num_classes) ** (q / 2)
        assert got.objective == pytest.approx(want, rel=1e-12)
        assert got.verdict is Verdict.MINIMUM
        assert got.rank == num_classes - pairs
        if singles == 1:
            named = structure_objective(Structure.CROSS_POLYTOPE, num_classes, depth)
            assert (depth + 1) * want < named
    # With one pair alone the singles would rather pull.
    lone = matrix_kkt(pairs_and_singles(num_classes, 1), 3)
    assert lone.verdict is Verdict.NOT_STATIONARY
    with pytest.raises(ValueError, match="from 0 to K/2"):
        pairs_and_singles(num_classes, num_classes)


@pytest.mark.parametrize(("num_classes", "rank"), [(2, 1), (5, 1), (5, 5)])
def test_ranks_without_a_search_are_refused(num_classes, rank):
    with pytest.raises(ValueError, match="from 2 to K-1"):
        search(num_classes, 2, rank)
