"""`metrics` says of a state what NumPy says of its matrices."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import logsumexp

import deepufm as ufm
from deepufm.dynamics import AbstractFlow

A = np.array([1.5, 1.0, 0.5])
DEPTH, PER_CLASS = 2, 3
SHARED = {
    "effective_rank", "nuclear_norm", "singular_values", "kl", "reverse_kl",
    "uniform_distance", "etf_distance", "log_norm", "log_loss", "logit_margin",
    "parameter_margin", "smoothed_parameter_margin",
}  # fmt: skip


@pytest.fixture(scope="module")
def full(key):
    model = ufm.gaussian(key, num_classes=4, per_class=PER_CLASS, width=6, depth=DEPTH)
    flow = ufm.GradientFlow(ufm.CrossEntropy(), PER_CLASS)
    return model, flow, jax.jit(ufm.metrics)(flow, jnp.asarray(0.0), model)


def test_full_metrics_against_numpy(full):
    model, _, seen = full
    logits = np.asarray(model.head) @ np.asarray(model.hidden[0])
    logits = logits @ np.asarray(model.features)
    labels = np.repeat(np.arange(4), PER_CLASS)
    values = np.linalg.svd(logits, compute_uv=False)
    p = values / values.sum()
    assert seen["effective_rank"] == pytest.approx(np.exp(-(p * np.log(p)).sum()))
    means = logits.reshape(4, 4, PER_CLASS).mean(-1)
    np.testing.assert_allclose(
        seen["singular_values"],
        np.linalg.svd(np.repeat(means, PER_CLASS, axis=1), compute_uv=False),
        rtol=1e-12,
    )
    top = np.linalg.svd(means, compute_uv=False)[:3]
    kl = -np.log(3) - np.log(top / top.sum()).mean()
    assert seen["kl"] == pytest.approx(kl, rel=1e-12)
    own = logits[labels, np.arange(12)]
    loss = (logsumexp(logits, axis=0) - own).sum()
    assert seen["log_loss"] == pytest.approx(np.log(loss), rel=1e-12)
    rivals = np.where(np.arange(4)[:, None] == labels, -np.inf, logits).max(0)
    margin = (own - rivals).min()
    assert seen["logit_margin"] == pytest.approx(
        margin / np.linalg.norm(logits), rel=1e-12
    )
    squares = sum(float((np.asarray(x) ** 2).sum()) for x in jax.tree.leaves(model))
    assert seen["log_norm"] == pytest.approx(0.5 * np.log(squares), rel=1e-12)
    assert seen["parameter_margin"] == pytest.approx(
        margin / squares ** ((DEPTH + 1) / 2), rel=1e-12
    )
    etf = np.eye(4) - 0.25
    weights = np.asarray(model.head) @ np.asarray(model.head).T
    distance = weights / np.trace(weights) - etf / 3
    assert seen["alignment_weights"] == pytest.approx(
        np.linalg.norm(distance), rel=1e-12
    )


def test_both_flows_agree_on_a_hadamard_start(key):
    """One state seen by both flows; all but the scales agree."""
    model = ufm.hadamard(key, jnp.asarray(A), per_class=1, width=6, depth=DEPTH)
    look = jax.jit(ufm.metrics)
    full = look(ufm.GradientFlow(ufm.CrossEntropy(), 1), jnp.asarray(0.0), model)
    units = ufm.scale_map(4, 1, DEPTH)
    log_a = jnp.log(units.to_reduced(jnp.asarray(A)))
    reduced = look(ufm.HadamardFlow(4, DEPTH), jnp.asarray(0.0), log_a)
    for name in ("effective_rank", "kl", "reverse_kl", "uniform_distance",
                 "etf_distance", "logit_margin", "parameter_margin",
                 "smoothed_parameter_margin"):  # fmt: skip
        np.testing.assert_allclose(full[name], reduced[name], rtol=1e-11, err_msg=name)
    np.testing.assert_allclose(
        full["singular_values"][:3], units.to_full(reduced["singular_values"]), 1e-11
    )
    # The reduced flow's loss is that of one of the K examples.
    assert full["log_loss"] == pytest.approx(
        float(reduced["log_loss"]) + np.log(4), rel=1e-12
    )
    assert float(full["off_diagonal_energy"]) < 1e-14
    assert float(full["balancedness_relative"]) < 1e-14


def test_logit_metrics_at_the_origin_are_finite():
    flow = ufm.LogitFlow(4)
    seen = ufm.metrics(flow, jnp.asarray(-jnp.inf), jnp.zeros(3))
    assert seen.keys() == SHARED
    assert float(seen["log_loss"]) == pytest.approx(np.log(np.log(4)))
    assert float(seen["logit_margin"]) == 0


def test_keys_are_the_documented_ones(full):
    _, _, seen = full
    assert seen.keys() > SHARED
    assert "off_diagonal_energy" in seen
    model = ufm.gaussian(
        jax.random.key(1), num_classes=3, per_class=2, width=3, depth=1
    )
    flow = ufm.GradientFlow(ufm.CrossEntropy(), 2)
    keys = jax.eval_shape(ufm.metrics, flow, jnp.asarray(0.0), model).keys()
    assert seen.keys() - keys == {"off_diagonal_energy"}


BALANCEDNESS = {
    "balancedness_absolute", "balancedness_relative", "balancedness_normalised",
}  # fmt: skip
MATRIX = SHARED | {"mean_effective_rank", "alignment_logits", "residual_energy"}
FULL = MATRIX | {"alignment_weights", "alignment_features"}
SMOOTHED = {"smoothed_parameter_margin"}
ENERGY = {"off_diagonal_energy"}


@pytest.mark.parametrize(
    ("flow", "keys"),
    [
        (ufm.GradientFlow(ufm.CrossEntropy(), 3), FULL | BALANCEDNESS | ENERGY),
        (ufm.GradientFlow(ufm.MSE(), 3), (FULL | BALANCEDNESS | ENERGY) - SMOOTHED),
        (
            ufm.GradientFlow(ufm.CrossEntropy(), 3, activation=ufm.ReLU()),
            FULL | ENERGY,
        ),
        (ufm.GradientFlow(ufm.CrossEntropy(), (2, 3, 3, 4)), FULL | BALANCEDNESS),
        (ufm.GradientFlow(ufm.CrossEntropy(), 3, 0.1), FULL | BALANCEDNESS | ENERGY),
        (ufm.LogitMatrixFlow(ufm.CrossEntropy(), 3), MATRIX | ENERGY),
        (ufm.LogitMatrixFlow(ufm.MSE(), (2, 3, 3, 4)), MATRIX - SMOOTHED),
    ],
)
def test_every_flow_has_the_keys_of_the_table(full, flow, keys):
    model, _, _ = full
    state = model if isinstance(flow, ufm.GradientFlow) else model.logits()
    seen = jax.eval_shape(ufm.metrics, flow, jnp.asarray(0.0), state)
    assert seen.keys() == keys


SIZES = (1, 4, 2)


@pytest.fixture(scope="module")
def unequal(key):
    """A ReLU model of unequal classes, and its logits as a state of their own."""
    model = ufm.gaussian(key, num_classes=3, per_class=SIZES, width=6, depth=3)
    signal = np.asarray(model.features)
    for layer in np.asarray(model.hidden):
        signal = np.maximum(layer @ signal, 0)
    logits = np.asarray(model.head) @ signal
    full = ufm.GradientFlow(ufm.CrossEntropy(), SIZES, activation=ufm.ReLU())
    matrix = ufm.LogitMatrixFlow(ufm.MSE(), SIZES)
    zero = jnp.asarray(0.0)
    look = jax.jit(
        lambda model, logits: (
            ufm.metrics(full, zero, model), ufm.metrics(matrix, zero, logits),
        )
    )  # fmt: skip
    return model, logits, look(model, jnp.asarray(logits))


def test_metrics_of_unequal_classes_and_relu_layers_against_numpy(unequal):
    model, logits, seen = unequal
    labels = np.repeat(np.arange(3), SIZES)
    means = np.stack([logits[:, labels == k].mean(1) for k in range(3)], axis=1)
    # Each mean as often as its class has examples.
    values = np.linalg.svd(means[:, labels], compute_uv=False)
    share = values / values.sum()
    target = (np.eye(3) - 1 / 3)[:, labels]
    cosine = np.sum(logits * target) / np.linalg.norm(logits) / np.linalg.norm(target)
    scaled = means / np.linalg.svd(means, compute_uv=False).sum()
    p = np.linalg.svd(logits, compute_uv=False)
    p = p / p.sum()
    expected = {
        "nuclear_norm": values.sum(),
        "mean_effective_rank": np.exp(-(share * np.log(share)).sum()),
        "effective_rank": np.exp(-(p * np.log(p)).sum()),
        "kl": -np.log(2) - np.log(values[:2] / values[:2].sum()).mean(),
        "etf_distance": 2 - 2 * cosine,
        "alignment_logits": np.linalg.norm(scaled - (np.eye(3) - 1 / 3) / 2),
    }
    for found in seen:
        np.testing.assert_allclose(found["singular_values"], values, rtol=1e-12)
        for name, want in expected.items():
            assert found[name] == pytest.approx(want, rel=1e-12), name

    own = logits[labels, np.arange(7)]
    margin = (
        own - np.where(np.arange(3)[:, None] == labels, -np.inf, logits).max(0)
    ).min()
    squares = sum(float(np.sum(x**2)) for x in jax.tree.leaves(model))
    full, matrix = seen
    loss = (logsumexp(logits, axis=0) - own).sum()
    assert full["log_loss"] == pytest.approx(np.log(loss), rel=1e-12)
    assert full["parameter_margin"] == pytest.approx(margin / squares**2, rel=1e-12)
    features = np.asarray(model.features)
    centred = np.stack([features[:, labels == k].mean(1) for k in range(3)], axis=1)
    gram = centred.T @ centred
    distance = np.linalg.norm(gram / np.trace(gram) - (np.eye(3) - 1 / 3) / 2)
    assert full["alignment_features"] == pytest.approx(distance, rel=1e-12)
    error = np.linalg.norm(logits - np.eye(3)[:, labels]) ** 2 / 2
    assert matrix["log_loss"] == pytest.approx(np.log(error), rel=1e-12)
    # Of depth 0, and of norm ‖Z‖.
    norm = np.linalg.norm(logits)
    assert matrix["log_norm"] == pytest.approx(np.log(norm), rel=1e-12)
    assert matrix["parameter_margin"] == pytest.approx(margin / norm, rel=1e-12)


class _Still(AbstractFlow):
    norm_diverges: ClassVar[bool] = False
    is_smooth: ClassVar[bool] = True
    growth_is_exact: ClassVar[bool] = False
    log_state: ClassVar[bool] = False

    def __call__(self, state):
        return 0 * state, jnp.asarray(-jnp.inf)

    def log_norm(self, state):
        return state[0]

    log_loss = log_norm

    def log_growth(self, state, direction):
        return (state + direction)[0]

    log_length = log_growth
    log_activity = log_growth

    def relative_error(self, error, before, after):
        return (error + before + after)[0]

    def check(self, state):
        pass


def test_an_unknown_flow_is_refused():
    with pytest.raises(TypeError, match="Pass an `observe` of your own"):
        ufm.metrics(_Still(), jnp.asarray(0.0), jnp.zeros(3))
