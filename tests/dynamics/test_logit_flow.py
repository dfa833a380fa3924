"""The flow of the logit matrix against autodiff, the flow of its modes, and e^{-t}."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepufm as ufm
from deepufm import LogitFlow, LogitMatrixFlow, Outcome

SIZES = (3, 1, 2)
LABELS = np.repeat(np.arange(3), SIZES)
RNG = np.random.default_rng(0)
LOGITS = jnp.asarray(2 * RNG.normal(size=(3, 6)))

call = eqx.filter_jit(lambda flow, state: (*flow(state), flow.log_loss(state)))


def cross_entropy(logits):
    return -jnp.sum(jax.nn.log_softmax(logits, axis=0)[LABELS, np.arange(6)])


def squared_error(logits):
    return 0.5 * jnp.sum((logits - jnp.eye(3)[:, LABELS]) ** 2)


@pytest.mark.parametrize(
    ("loss", "formula"),
    [(ufm.CrossEntropy(), cross_entropy), (ufm.MSE(), squared_error)],
)
def test_flow_is_minus_the_gradient_with_classes_of_unequal_size(loss, formula):
    value, gradient = jax.value_and_grad(formula)(LOGITS)
    direction, log_speed, log_loss = call(LogitMatrixFlow(loss, SIZES), LOGITS)
    got = np.asarray(direction) * np.exp(log_speed)
    np.testing.assert_allclose(got, -gradient, rtol=1e-14, atol=1e-15)
    np.testing.assert_allclose(log_loss, np.log(value), rtol=1e-14)


def test_logits_at_margins_of_2000_keep_their_rate():
    # One example: dz_y = -dz_k = e^{-2000}, to rounding.
    logits = jnp.asarray([[2000.0, 0.0], [0.0, 1500.0]])
    direction, log_speed, log_loss = call(
        LogitMatrixFlow(ufm.CrossEntropy(), 1), logits
    )
    np.testing.assert_allclose(log_speed, -1500, rtol=1e-15)
    np.testing.assert_allclose(log_loss, -1500, rtol=1e-15)
    np.testing.assert_allclose(
        direction, [[np.exp(-500), -1], [-np.exp(-500), 1]], rtol=1e-13
    )


def hadamard_vectors(num_classes, per_class):
    digits = np.arange(num_classes)
    odd = np.bitwise_count(digits[:, None] & digits[None, 1:]) % 2
    left = (1 - 2.0 * odd) / math.sqrt(num_classes)
    return left, np.repeat(left, per_class, axis=0) / math.sqrt(per_class)


@pytest.mark.parametrize("per_class", [1, 3])
def test_under_hadamard_vectors_the_modes_follow_the_flow_of_modes(per_class):
    # a' = a/(K√n) and t' = t/K, so that da/dt = √n da'/dt'.
    left, right = hadamard_vectors(8, per_class)
    a = np.array([3.0, -1.0, 0.0, 8.0, 2.5, 0.1, 30.0])
    logits = jnp.asarray((left * a) @ right.T)
    direction, log_speed, log_loss = call(
        LogitMatrixFlow(ufm.CrossEntropy(), per_class), logits
    )
    modes, mode_speed, mode_loss = call(
        LogitFlow(8), jnp.asarray(a / (8 * per_class**0.5))
    )
    core = left.T @ np.asarray(direction) @ right * np.exp(log_speed)
    want = np.asarray(modes) * np.exp(mode_speed) * per_class**0.5
    np.testing.assert_allclose(np.diag(core), want, rtol=2e-13)  # measured 4e-14
    assert np.max(np.abs(core - np.diag(np.diag(core)))) < 1e-14
    # Nothing outside the singular vectors either.
    norm = np.linalg.norm(direction) * np.exp(log_speed)
    np.testing.assert_allclose(norm, np.linalg.norm(want), rtol=1e-13)
    want_loss = mode_loss + math.log(8 * per_class)
    np.testing.assert_allclose(log_loss, want_loss, rtol=1e-13)


def distance(logits, per_class):
    """P2 eq. 12 of the singular values of the class means, in NumPy."""
    means = np.asarray(logits).reshape(len(logits), -1, per_class).mean(axis=2)
    values = np.linalg.svd(means, compute_uv=False)[: len(logits) - 1]
    share = values / values.sum()
    return np.sum((share - 1 / len(share)) ** 2) / 2


def test_distance_to_the_simplex_etf_falls_all_the_way():
    """P2 Thm 6, from random positive modes."""
    left, right = hadamard_vectors(8, 1)
    a = np.random.default_rng(5).exponential(size=7)
    path = ufm.solve(
        LogitMatrixFlow(ufm.CrossEntropy(), 1),
        jnp.asarray((left * a) @ right.T),
        stop=ufm.FinalTime(1e8),
        saves=40,
        keep_states=True,
    )
    assert path.outcome == Outcome.reached
    assert path.state is not None
    seen = np.array([distance(logits, 1) for logits in path.state])
    assert np.all(np.diff(seen) < 0)
    assert seen[-1] < 1e-2 * seen[0]


def test_squared_error_brings_the_logits_to_y_like_exp_minus_t():
    flow = LogitMatrixFlow(ufm.MSE(), SIZES)
    stop = ufm.FinalTime(8.0)
    path = ufm.solve(flow, LOGITS, stop=stop, saves=5, rtol=1e-11, keep_states=True)
    assert path.outcome == Outcome.reached
    assert path.state is not None
    targets = np.eye(3)[:, LABELS]
    for log_time, logits in zip(path.log_time, path.state):
        left = np.asarray(logits) - targets
        want = np.exp(-np.exp(log_time)) * (np.asarray(LOGITS) - targets)
        np.testing.assert_allclose(left, want, rtol=0, atol=2e-11)  # measured 1.1e-11
    direction, log_speed, log_loss = call(flow, jnp.asarray(targets))
    np.testing.assert_array_equal(direction, 0)
    assert (log_speed, log_loss) == (-jnp.inf, -jnp.inf)


def test_norm_growth_and_length_are_frobenius():
    flow, change = LogitMatrixFlow(ufm.CrossEntropy(), SIZES), 0.1 * LOGITS**2
    norm, length = np.linalg.norm(LOGITS), np.linalg.norm(change)
    names = ("log_growth", "log_length", "log_activity")

    @jax.jit
    def sizes(*x):
        return jnp.stack([flow.log_norm(x[0]), *(getattr(flow, n)(*x) for n in names)])

    got = sizes(LOGITS, change)
    np.testing.assert_allclose(
        got, np.log([norm, length / norm, length, length]), rtol=1e-13
    )
    error = flow.relative_error(change, LOGITS, 2 * LOGITS)
    np.testing.assert_allclose(error, length / (2 * norm), rtol=1e-14)
    assert flow.relative_error(0 * LOGITS, 0 * LOGITS, 0 * LOGITS) == 0


def test_only_a_loss_without_minimiser_has_a_diverging_norm():
    assert LogitMatrixFlow(ufm.CrossEntropy(), 1).norm_diverges
    assert not LogitMatrixFlow(ufm.MSE(), 1).norm_diverges
    with pytest.raises(ValueError, match="LogNorm"):
        ufm.solve(
            LogitMatrixFlow(ufm.MSE(), SIZES),
            LOGITS,
            stop=ufm.FinalTime(1.0),
            clock=ufm.LogNorm(),
        )


FLOW = LogitMatrixFlow(ufm.CrossEntropy(), SIZES)
BAD_STATES = [
    (FLOW, LOGITS[:, :5], r"K = 3 .*\(3, 1, 2\).* must have 6 columns.* have 5"),
    (FLOW, LOGITS.at[0, 0].set(jnp.inf), "must be finite, but hold NaN or inf"),
    (FLOW, jnp.ones((2, 6)), "one for each of the 2 classes, but has 3"),
]


@pytest.mark.parametrize(("flow", "state", "message"), BAD_STATES)
def test_bad_logits_are_refused(flow, state, message):
    with pytest.raises(ValueError, match=message) as error:
        flow.check(state)
    assert "\n" not in str(error.value)


def test_logits_that_are_no_matrix_are_refused(unhooked):
    del unhooked
    with pytest.raises(ValueError, match=r"logit matrix.*has shape \(3,\)"):
        FLOW.check(jnp.ones(3))


@pytest.mark.parametrize("per_class", [0, (1, 0, 2)])
def test_a_class_without_examples_is_refused(per_class):
    with pytest.raises(ValueError, match="`per_class` must be at least 1"):
        LogitMatrixFlow(ufm.CrossEntropy(), per_class)
