"""Vertices of Psi a >= 1 and the group that relabels them, by brute force."""

import itertools

import numpy as np
import pytest

from deepufm.analysis._reduced_vertices import canonical, edges, group, psi, vertices


@pytest.mark.parametrize(
    ("num_classes", "order"), [(2, 1), (4, 6), (8, 168), (16, 20160)]
)
def test_the_group_relabels_modes_and_margins_alike(num_classes, order):
    matrices, turned = group(num_classes)
    assert len(np.unique(matrices, axis=0)) == len(matrices) == order
    rng = np.random.default_rng(0)
    a = rng.uniform(size=num_classes - 1)
    margins = psi(num_classes) @ a
    for i in rng.integers(order, size=20):
        moved = psi(num_classes) @ a[matrices[i]]
        np.testing.assert_allclose(moved[turned[i]], margins, rtol=1e-13)


def test_an_orbit_has_one_canonical_point():
    rng = np.random.default_rng(0)
    matrices, _ = group(8)
    for a in (rng.uniform(size=7), np.arange(7) % 2.0, np.ones(7)):
        images = a[matrices]
        first, orbit = canonical(a)
        assert orbit == len(np.unique(images, axis=0))
        np.testing.assert_array_equal(first, max(images.tolist()))
        noise = 1 + 1e-13 * rng.normal(size=7)
        for image in images[::10]:
            again, size = canonical(image * noise)
            assert size == orbit
            np.testing.assert_allclose(again, first, rtol=1e-11)


@pytest.mark.parametrize("num_classes", [4, 8])
def test_all_vertices_by_bases(num_classes):
    """Every choice of K-1 constraints that meet in one feasible point."""
    size = num_classes - 1
    rows = np.vstack([psi(num_classes), np.eye(size)])
    bounds = np.repeat([1.0, 0.0], size)
    choices = np.array(list(itertools.combinations(range(2 * size), size)))
    regular = choices[np.abs(np.linalg.det(rows[choices])) > 1e-9]
    points = np.linalg.solve(rows[regular], bounds[regular][..., None])[..., 0]
    feasible = points[np.all(points @ rows.T > bounds - 1e-9, axis=1)]
    brute = np.unique(np.round(feasible, 9) + 0.0, axis=0)
    found = vertices(num_classes)
    assert sum(orbit for _, orbit in found) == len(brute)
    matrices, _ = group(num_classes)
    images = [np.unique(point[matrices], axis=0) for point, _ in found]
    np.testing.assert_allclose(
        np.unique(np.round(np.concatenate(images), 9), axis=0), brute, atol=1e-9
    )


def test_the_vertices_of_sixteen_classes():
    """As by the same walk with rays from the null space of every choice of rows."""
    found = vertices(16)
    assert (len(found), sum(orbit for _, orbit in found)) == (15, 9384)
    rows = np.vstack([psi(16), np.eye(15)])
    degenerate = {}
    for point, _ in found:
        slack = rows @ point - np.repeat([1.0, 0.0], 15)
        assert np.min(slack) > -1e-13
        tight = rows[slack < 1e-9]
        assert np.linalg.matrix_rank(tight) == 15
        # Small fractions, all of them.
        np.testing.assert_allclose(48 * point, np.round(48 * point), atol=1e-12)
        if len(tight) > 15:
            degenerate[tuple(np.round(48 * point[point > 0]))] = len(edges(tight))
    assert degenerate == {
        (6,) * 8: 927,
        (12,) * 5: 400,
        (12, 6, 6, 6, 6, 6, 6, 6): 69,
        (24, 12, 12, 12, 12): 69,
    }


def test_the_edges_of_a_cone_over_a_product():
    """Pentagon times octahedron: diagonals share four facets, and yet no edge."""
    square = [[1, 0, 1], [-1, 0, 1], [0, 1, 1], [0, -1, 1]]
    cut = [-1e-3, -1e-3, 1.5e-3]  # small, so that it comes last
    flat = np.array([[x, y, 0, 0, 0, one] for x, y, one in [*square, cut]])
    faces = itertools.product([1, -1], repeat=3)
    rows = np.vstack([flat, [[0, 0, *signs, 1] for signs in faces]])
    pentagon = [(-1, -1), (-1, 1), (1, -1), (0.5, 1), (1, 0.5)]
    poles = [*np.eye(3), *-np.eye(3)]
    want = [[*corner, *pole, 1] for corner in pentagon for pole in poles]
    got = edges(rows)
    assert len(got) == 30
    np.testing.assert_allclose(
        sorted(np.round(got, 9).tolist()), sorted(want), atol=1e-12
    )
