"""Gauge directions against ranks and differences found without the package."""

import jax.numpy as jnp
import numpy as np
import plain_networks as plain
import pytest
import scipy.linalg
from jax.flatten_util import ravel_pytree

from deepufm import DeepUFM
from deepufm.stability._gauge import gauge_directions


def balanced(rank, width, depth, seed=0):
    """A balanced model of K = 4 whose layers share unequal singular values."""
    rng = np.random.default_rng(seed)
    turns = [np.linalg.qr(rng.normal(size=(width, width)))[0] for _ in range(depth)]
    left, right = (np.linalg.qr(rng.normal(size=(4, 4)))[0][:, :rank] for _ in "ab")
    values = 1 + np.arange(rank)
    hidden = [
        turns[i + 1][:, :rank] * values @ turns[i][:, :rank].T for i in range(depth - 1)
    ]
    return model_of(
        (left * values) @ turns[-1][:, :rank].T,
        np.reshape(hidden, (depth - 1, width, width)),
        turns[0][:, :rank] * values @ right.T,
    )


def model_of(head, hidden, features):
    return DeepUFM(*(jnp.asarray(x, float) for x in (head, hidden, features)))


def flat(model):
    return np.asarray(ravel_pytree(model)[0])


@pytest.mark.parametrize(
    ("rank", "width", "depth"), [(3, 5, 3), (4, 4, 3), (3, 6, 1), (2, 5, 2)]
)
def test_counts_of_balanced_models(rank, width, depth):
    model = balanced(rank, width, depth)
    got = gauge_directions(model)
    idle = width - rank
    pairs, idle_pairs = width * (width - 1) // 2, idle * (idle - 1) // 2
    skew = depth * (pairs - idle_pairs)
    symmetric = depth * (pairs + width - idle_pairs - idle)
    assert got.rotations.shape[1] == skew
    assert got.scalings.shape[1] == symmetric
    # The same from ranks of tangents written down one by one.
    tangents = [
        plain.gauge_tangents(flat(model), 4, width, depth, sign) for sign in (-1, 1)
    ]
    assert np.linalg.matrix_rank(tangents[0], rtol=1e-9) == skew
    assert np.linalg.matrix_rank(tangents[1], rtol=1e-9) == symmetric
    # And they span the same.
    for basis, columns in zip((got.rotations, got.scalings), tangents, strict=True):
        rest = columns - basis @ (basis.T @ columns)
        assert np.max(np.abs(rest)) < 1e-13 * np.max(np.abs(columns))


def test_unbalanced_models_have_all_directions_once():
    rng = np.random.default_rng(2)
    shapes = [(4, 5), (2, 5, 5), (5, 4)]
    model = model_of(*(rng.normal(size=s) for s in shapes))
    got = gauge_directions(model)
    both = got.all
    np.testing.assert_allclose(both.T @ both, np.eye(both.shape[1]), atol=1e-12)
    tangents = np.concatenate(
        [plain.gauge_tangents(flat(model), 4, 5, 3, s) for s in (-1, 1)], axis=1
    )
    assert both.shape[1] == np.linalg.matrix_rank(tangents, rtol=1e-9) == 74
    # 90 parameters and 16 logits: one of the 75 generators does nothing.
    # Of a rotation nothing is left in the norm; of what scalings add, here, something.
    assert np.max(np.abs(got.rotations.T @ flat(model))) < 1e-13
    assert np.max(np.abs(got.scalings.T @ flat(model))) > 0.1


def test_rotations_are_derivatives_of_turned_models():
    model = balanced(3, 5, 2)
    rng = np.random.default_rng(3)
    generator = rng.normal(size=(5, 5))
    generator -= generator.T

    def turned(angle):
        turn = scipy.linalg.expm(angle * generator)
        hidden = turn @ model.hidden
        return flat(model_of(model.head, hidden, model.features)), flat(
            model_of(model.head @ turn.T, hidden, model.features)
        )

    (broken, there), (_, back) = turned(1e-5), turned(-1e-5)
    direction = (there - back) / 2e-5
    rotations = gauge_directions(model).rotations
    rest = direction - rotations @ (rotations.T @ direction)
    assert np.linalg.norm(rest) < 1e-9 * np.linalg.norm(direction)
    # Turning on one side of the interface only is no gauge.
    direction = (broken - flat(model)) / 1e-5
    both = gauge_directions(model).all
    rest = direction - both @ (both.T @ direction)
    assert np.linalg.norm(rest) > 0.1 * np.linalg.norm(direction)
    assert np.allclose(plain.logits(there, 4, 5, 2), model.logits(), atol=1e-12)


def test_nothing_moves_a_model_of_zeros():
    model = model_of(np.zeros((4, 5)), np.zeros((1, 5, 5)), np.zeros((5, 4)))
    assert gauge_directions(model).all.shape == (65, 0)


def test_small_layers_beside_large_ones_count():
    """Units that only one of two layers uses, that one 1e-4 of the other."""
    model = balanced(3, 5, 1)
    skewed = DeepUFM(model.head * 1e4, model.hidden, model.features * 1e-4)
    got = gauge_directions(skewed)
    assert got.all.shape[1] == gauge_directions(model).all.shape[1] == 21
