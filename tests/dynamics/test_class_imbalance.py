"""Classes of unequal size: gradients by autodiff, a whole run by SciPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import solve_ivp

import deepufm as ufm
from deepufm import MSE, CrossEntropy, DeepUFM, GradientFlow, ReLU

# At random, but for the class of a single example.
RANDOM = (*map(int, np.random.default_rng(0).integers(2, 7, 3)), 1)
SIZES = (5, 2, 1)
LABELS = np.repeat(np.arange(3), SIZES)


def plain_loss(model: DeepUFM, sizes, squared: bool, relu: bool):
    signal = model.features
    for layer in model.hidden:
        signal = jax.nn.relu(layer @ signal) if relu else layer @ signal
    logits = model.head @ signal
    target = np.repeat(np.eye(len(sizes)), sizes, axis=1)
    if squared:
        return jnp.sum((logits - target) ** 2) / 2
    return -jnp.sum(target * jax.nn.log_softmax(logits, axis=0))


def test_flow_is_minus_the_gradient_of_the_sum_over_all_examples(key):
    sizes = RANDOM

    @jax.jit
    def flows_and_gradients(model):
        cases = [(False, False), (False, True), (True, False), (True, True)]
        found = []
        for squared, relu in cases:
            loss = MSE() if squared else CrossEntropy()
            flow = GradientFlow(loss, sizes, activation=ReLU() if relu else None)
            loss_and_gradient = jax.value_and_grad(plain_loss)
            value, gradient = loss_and_gradient(model, sizes, squared, relu)
            found.append((*flow(model), gradient, flow.log_loss(model), value))
        return found

    model = ufm.gaussian(
        key, num_classes=len(sizes), per_class=sizes, width=5, depth=2, scale=1.5
    )
    assert model.features.shape == (5, sum(sizes))
    for direction, log_speed, gradient, log_loss, loss in flows_and_gradients(model):
        np.testing.assert_allclose(np.exp(log_loss), loss, rtol=1e-14)
        for got, want in zip(jax.tree.leaves(direction), jax.tree.leaves(gradient)):
            error = np.exp(log_speed) * np.asarray(got) + np.asarray(want)
            assert np.linalg.norm(error) <= 5e-15 * np.linalg.norm(want)


def test_labels_are_the_classes_in_order(start):
    flow = GradientFlow(CrossEntropy(), SIZES)
    np.testing.assert_array_equal(flow.labels(start), LABELS)
    equal = GradientFlow(CrossEntropy(), (2, 2, 2)).labels(start)
    np.testing.assert_array_equal(equal, GradientFlow(CrossEntropy(), 2).labels(start))


def rates(_, flat):
    """The linear model of depth 1, K = 3 and d = 3, in plain NumPy."""
    head, features = flat[:9].reshape(3, 3), flat[9:].reshape(3, 8)
    logits = head @ features
    weights = np.exp(logits - logits.max(0))
    residual = np.eye(3)[:, LABELS] - weights / weights.sum(0)
    return np.concatenate(
        [(residual @ features.T).ravel(), (head.T @ residual).ravel()]
    )


@pytest.fixture(scope="module")
def start(key):
    return ufm.gaussian(key, num_classes=3, per_class=SIZES, width=3, depth=1)


def run(start, log_time):
    return ufm.solve(
        GradientFlow(CrossEntropy(), SIZES),
        start,
        stop=ufm.FinalTime(log=log_time),
        saves=20,
        observe=observe,
        rtol=1e-9,
    )


def observe(flow, log_time, state):
    del log_time
    return {"log_loss": flow.log_loss(state)}


def test_a_run_with_a_class_of_one_agrees_with_scipy(start):
    path = run(start, np.log(20.0))
    flat = np.concatenate([np.ravel(start.head), np.ravel(start.features)])
    exact = solve_ivp(
        rates, (0.0, 20.0), flat, method="DOP853", rtol=1e-12, atol=1e-14
    ).y[:, -1]
    got = np.concatenate([np.ravel(path.final.head), np.ravel(path.final.features)])
    assert np.linalg.norm(got - exact) < 2e-10 * np.linalg.norm(
        exact
    )  # measured: 3.9e-11


def test_a_run_with_a_class_of_one_converges_to_zero_loss(start):
    path = run(start, 30.0)
    assert path.outcome == ufm.Outcome.reached
    losses = np.asarray(path.observables["log_loss"])
    assert np.all(np.diff(losses) < 0)
    # The loss falls like 1/t, up to powers of log t.
    assert -36 < losses[-1] < -26
    logits = np.asarray(path.final.head @ path.final.features)
    np.testing.assert_array_equal(logits.argmax(0), LABELS)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((3, 0, 1), "`per_class` must be at least 1"),
        ((3, -1, 1), "`per_class` must be at least 1"),
    ],
)
def test_a_class_without_examples_is_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        GradientFlow(CrossEntropy(), sizes)


def test_sizes_that_do_not_fit_the_model_are_refused(start):
    for sizes, message in [
        ((5, 2, 2), r"\(5, 2, 2\) the features must have shape \(3, 9\)"),
        ((5, 3), "one for each of the 3 classes, but has 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            GradientFlow(CrossEntropy(), sizes).check(start)


# The analysis of logits, K = 6.
SIX = (4, 1, 6, 2, 2, 3)
OWN = np.repeat(np.arange(6), SIX)


def plain_class_means(matrix):
    return np.stack([matrix[:, k == OWN].mean(axis=1) for k in range(6)], axis=1)


@jax.jit
def unequal(logits):
    return (
        ufm.class_means(logits, 6, SIX),
        ufm.etf_distance(logits, SIX),
        ufm.residual_energy(logits, SIX),
    )


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e300])
def test_means_and_distances_of_unequal_classes_against_plain_sums(scale):
    """The residual by a projection on what is constant in classes and of mean zero."""
    logits = np.random.default_rng(0).standard_normal((6, 18))
    means, distance, residual = unequal(scale * logits)
    np.testing.assert_allclose(means, scale * plain_class_means(logits), rtol=1e-13)
    target = (np.eye(6) - 1 / 6)[:, OWN]
    cosine = np.sum(logits * target) / np.linalg.norm(logits) / np.linalg.norm(target)
    np.testing.assert_allclose(distance, 2 - 2 * cosine, rtol=1e-13)
    # V: class-constant rows orthogonal to the row of ones, from a QR.
    indicators = np.eye(6)[OWN]
    v = np.linalg.qr(indicators - indicators.mean(0))[0][:, :5]
    u = np.linalg.qr(np.eye(6) - 1 / 6)[0][:, :5]
    outside = logits - u @ (u.T @ logits @ v) @ v.T
    want = np.linalg.norm(outside) / np.linalg.norm(logits)
    np.testing.assert_allclose(residual, want, rtol=1e-13)


def test_collapse_of_unequal_classes_is_at_distance_zero():
    etf = (np.eye(6) - 1 / 6)[:, OWN]
    means, distance, _ = unequal(0.3 * etf)
    np.testing.assert_allclose(means, 0.3 * (np.eye(6) - 1 / 6), atol=1e-15)
    assert distance < 1e-29
    assert unequal(-etf)[1] == pytest.approx(4, rel=1e-14)
