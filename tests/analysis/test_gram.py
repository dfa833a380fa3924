import numpy as np
import pytest

import deepufm as ufm


@pytest.mark.parametrize("num_classes", [3, 5, 8])
def test_rank_two_minima_are_regular_polygons(num_classes):
    # P1 Fig. 3, middle, where gaps agree to the eye.
    rng = np.random.default_rng(0)
    start = np.asarray(ufm.regular_polygon(num_classes))
    start = start + 0.05 * rng.normal(size=start.shape)
    found = ufm.polish(start, 10, 2).point
    gaps = ufm.angle_gaps(ufm.gram_factor(found.logits))
    np.testing.assert_allclose(gaps, 2 * np.pi / num_classes, atol=1e-8)


def test_the_factor_gives_the_logits_back():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(3, 6))
    x -= x.mean(axis=1, keepdims=True)
    factor = ufm.gram_factor(x.T @ x + np.arange(6.0))  # a number a column changes none
    assert factor.shape == (3, 6)
    np.testing.assert_allclose(factor.T @ factor, x.T @ x, atol=1e-12)


def test_gaps_are_those_of_the_angles():
    angles = np.asarray([0.3, 2.0, -1.0, 3.1])
    gaps = ufm.angle_gaps(
        np.stack([np.cos(angles), 2 * np.sin(angles)])[:, [2, 0, 3, 1]]
    )
    stretched = np.sort(np.arctan2(2 * np.sin(angles), np.cos(angles)))
    np.testing.assert_allclose(gaps[:3], np.diff(stretched), rtol=1e-12)
    np.testing.assert_allclose(gaps.sum(), 2 * np.pi)


@pytest.mark.usefixtures("unhooked")
def test_what_has_no_factor_is_refused():
    with pytest.raises(ValueError, match="symmetric and positive semidefinite"):
        ufm.gram_factor(np.eye(3) + np.triu(np.ones((3, 3)), 1))
    with pytest.raises(ValueError, match="has rank 3"):
        ufm.angle_gaps(np.ones((3, 4)))
