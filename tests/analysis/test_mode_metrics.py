"""Metrics of flows of modes against those of the matrices they stand for, and NumPy."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

import deepufm as ufm

ALPHA = np.array([[0.9, -0.3, 1.8], [1.1, 0.6, 1.5], [0.4, 0.9, 1.2]])
A = np.prod(ALPHA, axis=0)
NEVER = jnp.asarray(-jnp.inf)
PER_CLASS = 3


@pytest.fixture(scope="module")
def pair(key):
    """The same state seen layer by layer and as matrices; one mode is negative."""
    alpha = jnp.asarray(ALPHA)
    model = ufm.hadamard_layers(key, alpha, per_class=PER_CLASS, width=5)
    matrix_flow = ufm.GradientFlow(ufm.CrossEntropy(), PER_CLASS)
    flow = ufm.LayerwiseHadamardFlow(4, PER_CLASS)
    return ufm.metrics(flow, NEVER, alpha), ufm.metrics(matrix_flow, NEVER, model)


@pytest.mark.parametrize(
    "name",
    [
        "log_loss", "log_norm", "logit_margin", "parameter_margin",
        "smoothed_parameter_margin", "etf_distance", "effective_rank", "nuclear_norm",
        "kl", "reverse_kl", "uniform_distance", "balancedness_absolute",
        "balancedness_relative", "balancedness_normalised",
    ],
)  # fmt: skip
def test_layerwise_metrics_are_those_of_the_matrices(pair, name):
    layerwise, matrix = pair
    np.testing.assert_allclose(layerwise[name], matrix[name], rtol=1e-13)


def test_layerwise_singular_values_are_those_of_the_logits(pair):
    layerwise, matrix = pair
    # In the order of the modes, and without signs.
    np.testing.assert_allclose(layerwise["singular_values"], np.abs(A), rtol=1e-14)
    falling = np.sort(np.abs(A))[::-1]
    np.testing.assert_allclose(matrix["singular_values"][:3], falling, rtol=1e-13)


def test_the_negative_mode_counts_in_distance_and_margin(pair):
    layerwise, _ = pair
    psi = np.array([[2, 0, 2], [0, 2, 2], [2, 2, 0]])
    share = A / np.linalg.norm(A)
    distance = np.sum((share - 1 / math.sqrt(3)) ** 2)
    np.testing.assert_allclose(layerwise["etf_distance"], distance, rtol=1e-13)
    margin = np.min(psi @ share) / (4 * math.sqrt(PER_CLASS))
    np.testing.assert_allclose(layerwise["logit_margin"], margin, rtol=1e-13)
    unsigned = np.min(psi @ np.abs(share)) / (4 * math.sqrt(PER_CLASS))
    assert abs(margin - unsigned) > 0.01


def test_padding_changes_no_metric(pair):
    layerwise, _ = pair
    padded = np.concatenate([ALPHA[:2], np.ones((2, 3)), ALPHA[2:]])
    flow = ufm.LayerwiseHadamardFlow(4, PER_CLASS, depth=2)
    seen = ufm.metrics(flow, NEVER, jnp.asarray(padded))
    assert seen.keys() == layerwise.keys()
    for name, want in layerwise.items():
        np.testing.assert_allclose(seen[name], want, rtol=1e-13, err_msg=name)


def test_metrics_of_zero_layers_are_finite():
    alpha = jnp.zeros((3, 3)).at[1:].set(1.0)
    seen = ufm.metrics(ufm.LayerwiseHadamardFlow(4, PER_CLASS), NEVER, alpha)
    np.testing.assert_allclose(seen["log_loss"], math.log(12 * math.log(4)), rtol=1e-14)
    assert seen["logit_margin"] == 0
    assert seen["effective_rank"] == 0
    finite = {name for name, value in seen.items() if np.all(np.isfinite(value))}
    assert seen.keys() - finite == {"kl"}  # a dead mode is infinitely far


def assert_spectrum(seen, a):
    share = a / a.sum()
    modes = len(a)
    want = {
        "singular_values": a,
        "nuclear_norm": a.sum(),
        "effective_rank": np.exp(-np.sum(share * np.log(share))),
        "kl": -math.log(modes) - np.mean(np.log(share)),
        "reverse_kl": math.log(modes) + np.sum(share * np.log(share)),
        "uniform_distance": np.sum((share - 1 / modes) ** 2) / 2,
    }
    for name, value in want.items():
        np.testing.assert_allclose(seen[name], value, rtol=1e-13, err_msg=name)


def test_layerwise_metrics_of_the_squared_error_against_numpy():
    targets = np.sqrt([2, 5, 1])
    seen = ufm.metrics(
        ufm.LayerwiseMSEFlow(jnp.asarray(targets)), NEVER, jnp.asarray(ALPHA)
    )
    assert_spectrum(seen, np.abs(A))
    loss = np.sum((targets - A) ** 2) / 2
    np.testing.assert_allclose(seen["log_loss"], math.log(loss), rtol=1e-13)
    norm = np.linalg.norm(ALPHA)
    np.testing.assert_allclose(seen["log_norm"], math.log(norm), rtol=1e-14)
    gap = np.max(np.linalg.norm(np.diff(ALPHA**2, axis=0), axis=1))
    np.testing.assert_allclose(seen["balancedness_absolute"], gap, rtol=1e-13)


def test_metrics_of_sigmoids_against_numpy():
    a = np.array([0.5, 1e-3, 1.9, 0.7])
    seen = ufm.metrics(ufm.SigmoidalFlow.mse(4, 2, 3.0), NEVER, jnp.log(a))
    assert_spectrum(seen, a)
    loss = np.sum((math.sqrt(2) - a) ** 2) / 2
    np.testing.assert_allclose(seen["log_loss"], math.log(loss), rtol=1e-13)
    np.testing.assert_allclose(seen["log_norm"], math.log(a.sum()), rtol=1e-14)
    # The singular vectors are unknown, and what depends on them is not given.
    assert "etf_distance" not in seen
    assert "logit_margin" not in seen
