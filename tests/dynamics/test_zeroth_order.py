"""The linear flow at the origin against the matrix exponential and the true flow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import expm

import deepufm as ufm
from deepufm import DeepUFM, Outcome

TIME = 0.8


def small_model(key, num_classes, examples, width):
    one, two = jax.random.split(key)
    return DeepUFM(
        head=jax.random.normal(one, (num_classes, width)),
        hidden=jnp.zeros((0, width, width)),
        features=jax.random.normal(two, (width, examples)),
    )


@pytest.mark.parametrize("time", [0.0, 1e-9, 3.0])
@pytest.mark.parametrize("per_class", [2, (1, 4, 2)])
def test_solution_is_the_exponential_of_the_linear_flow(key, per_class, time):
    sizes = (2, 2, 2) if per_class == 2 else per_class
    model = small_model(key, 3, sum(sizes), 4)
    residual = np.eye(3)[:, np.repeat(np.arange(3), sizes)] - 1 / 3
    # d/dt (W; Hᵀ) = [[0, M], [Mᵀ, 0]] (W; Hᵀ).
    generator = np.block(
        [[np.zeros((3, 3)), residual], [residual.T, np.zeros((sum(sizes),) * 2)]]
    )
    stacked = np.vstack([model.head, model.features.T])
    want = expm(time * generator) @ stacked
    got = ufm.zeroth_order_solution(model, time, per_class)
    error = np.vstack([got.head, got.features.T]) - want
    # Measured 5e-14 at t = 3, all of it SciPy's: against mpmath's exponential 2e-15.
    assert np.max(np.abs(error)) < 1e-13 * np.max(np.abs(want))
    # The change alone, 1e-9 of the state at the second time, is not a difference.
    change = np.vstack([got.head - model.head, (got.features - model.features).T])
    series = time * generator @ stacked
    if time < 1:
        assert np.max(np.abs(change - series)) < 1e-15 * np.max(np.abs(stacked))


def test_error_to_the_true_flow_falls_like_the_square_of_the_start(key):
    """P2 Thm 8, with classes of unequal size; relative to the solution's norm."""
    per_class, sizes = (2, 1, 1), np.array([1e-1, 1e-2, 1e-3])
    model, flow = (
        small_model(key, 3, 4, 4),
        ufm.GradientFlow(ufm.CrossEntropy(), (2, 1, 1)),
    )
    errors = []
    for size in sizes:
        start = jax.tree.map(lambda x, size=size: size * x, model)
        path = ufm.solve(flow, start, stop=ufm.FinalTime(TIME), saves=2, rtol=1e-12)
        assert path.outcome == Outcome.reached
        linear = ufm.zeroth_order_solution(start, TIME, per_class)
        pairs = zip(jax.tree.leaves(path.final), jax.tree.leaves(linear))
        squares = sum(float(jnp.sum((x - y) ** 2)) for x, y in pairs)
        norm = sum(float(jnp.sum(x**2)) for x in jax.tree.leaves(linear))
        errors.append((squares / norm) ** 0.5)
    slopes = np.diff(np.log(errors)) / np.diff(np.log(sizes))
    np.testing.assert_allclose(slopes, 2, atol=0.1)


def test_deeper_models_are_refused(key):
    model = ufm.gaussian(key, num_classes=3, per_class=1, width=3, depth=2)
    with pytest.raises(ValueError, match="depth 1, but the model has depth 2"):
        ufm.zeroth_order_solution(model, 1.0, 1)


@pytest.mark.parametrize("per_class", [2, (1, 1, 2)])
def test_class_sizes_that_miss_the_features_are_refused(key, per_class):
    model = small_model(key, 3, 3, 3)
    with pytest.raises(ValueError, match="features have 3"):
        ufm.zeroth_order_solution(model, 1.0, per_class)
