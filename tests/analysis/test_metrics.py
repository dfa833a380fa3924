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


class _Still(AbstractFlow):
    norm_diverges: ClassVar[bool] = False
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
