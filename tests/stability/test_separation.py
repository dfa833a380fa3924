"""The time at which the classes are separated, and the growth of layers after it."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import solve_ivp

import deepufm as ufm
from deepufm.stability._separation import (
    first_violation,
    norm_growth,
    norm_path,
    separation_stop,
    separation_time,
)

FLOW = ufm.GradientFlow(ufm.CrossEntropy(), 2)


def model_of(std, seed=2):
    """A Gaussian start of K = 3, n = 2, d = 3, L = 2; one shape, one program."""
    return ufm.gaussian(
        jax.random.key(seed), num_classes=3, per_class=2, width=3, depth=2, std=std
    )


@pytest.fixture(scope="module")
def separated():
    return separation_time(FLOW, model_of(0.7), rtol=1e-9)


def rates(_, state):
    """The full flow in NumPy: the gradient by the chain rule, layer by layer."""
    features, hidden, head = np.split(state, [18, 27])
    features, hidden, head = (x.reshape(3, -1) for x in (features, hidden, head))
    logits = head @ hidden @ features
    exponentials = np.exp(logits - logits.max(axis=0))
    residual = np.kron(np.eye(3), np.ones(2)) - exponentials / exponentials.sum(axis=0)
    return np.concatenate(
        [
            np.ravel(hidden.T @ head.T @ residual),
            np.ravel(head.T @ residual @ features.T),
            np.ravel(residual @ (hidden @ features).T),
        ]
    )


def loss_of(state):
    features, hidden, head = np.split(state, [18, 27])
    logits = head.reshape(3, 3) @ hidden.reshape(3, 3) @ features.reshape(3, 6)
    own = logits[np.repeat(np.arange(3), 2), np.arange(6)]
    return np.sum(np.log(np.sum(np.exp(logits - own), axis=0)))


def flat(model):
    leaves = (model.features, model.hidden, model.head)
    return np.concatenate([np.ravel(leaf) for leaf in leaves])


def test_separation_time_is_where_the_summed_loss_is_log_2(separated):
    """Against SciPy's integrator, with its own root finder for the event."""

    def crossing(_, state):
        return loss_of(state) - np.log(2.0)

    crossing.terminal = True
    solution = solve_ivp(
        rates, (0.0, 1e4), flat(model_of(0.7)), method="DOP853", events=crossing,
        rtol=1e-12, atol=1e-14,
    )  # fmt: skip
    assert separated.reached
    assert np.exp(separated.log_time) == pytest.approx(solution.t[-1], rel=1e-6)
    assert separated.log_loss == pytest.approx(np.log(np.log(2.0)), abs=1e-9)
    np.testing.assert_allclose(flat(separated.state), solution.y[:, -1], rtol=1e-5)


@pytest.mark.parametrize("per_class", [1, 3])
def test_reduced_flows_count_all_examples(per_class):
    """K = 2: 2n log(1 + e^{-2a}) = log 2 at t0."""
    flow = ufm.HadamardFlow(num_classes=2, depth=1)
    stop = separation_stop(flow, per_class)
    end = -0.5 * np.log(np.expm1(np.log(2.0) / (2 * per_class)))
    assert float(stop.threshold) == pytest.approx(np.log(np.log1p(np.exp(-2 * end))))
    excess = stop.excess(flow, jnp.zeros(()), jnp.log(jnp.array([end])))
    assert abs(excess) < 1e-14


def test_start_that_is_separated_has_time_zero():
    start = jnp.log(jnp.full(3, 2.0))
    flow = ufm.HadamardFlow(num_classes=4, depth=2)
    found = separation_time(flow, start, per_class=2)
    assert found.reached
    assert found.log_time == -np.inf
    # Every margin is 2·2·2 = 8 there.
    exact = np.log(8 * np.log1p(3 * np.exp(-8.0)))
    assert found.log_loss == pytest.approx(exact, rel=1e-12)


@eqx.filter_jit
def both(flow, model):
    return norm_growth(flow, model), flow(model)


def test_growth_is_the_same_for_every_layer_and_kind_of_layer():
    """Twice the product of a layer with its velocity, of which the flow knows nothing.

    Near the uniform softmax and far from it, there with kinks and padded to depth 3.
    """
    padded = ufm.gaussian(
        jax.random.key(3), num_classes=3, per_class=2, width=3, depth=2, pad_depth=3,
        std=1.5,
    )  # fmt: skip
    relu = ufm.GradientFlow(ufm.CrossEntropy(), 2, activation=ufm.ReLU(), depth=2)
    cases = [(FLOW, model_of(0.1)), (relu, padded)]
    for flow, model in cases:
        (growth, log_scale), (direction, log_speed) = both(flow, model)
        pairs = [
            (model.head, direction.head),
            (model.features, direction.features),
            (model.hidden[0], direction.hidden[0]),
        ]
        for layer, velocity in pairs:
            exact = 2 * np.exp(log_speed) * np.sum(np.asarray(layer * velocity))
            assert growth * np.exp(log_scale) == pytest.approx(exact, rel=1e-11)


@pytest.mark.parametrize("margin", [5.0, 1e3, 1e5])
def test_growth_is_exact_at_any_margin(margin):
    """Z = s·I, K = 3: d‖W‖²/dt = 2·3·2·p·s with p = e^-s/(1 + 2e^-s)."""
    eye = jnp.eye(3)
    model = ufm.DeepUFM(margin * eye, jnp.zeros((0, 3, 3)), eye)
    growth, log_scale = norm_growth(ufm.GradientFlow(ufm.CrossEntropy(), 1), model)
    exact = np.log(12 * margin) - margin - np.log1p(2 * np.exp(-margin))
    assert np.log(growth) + log_scale == pytest.approx(exact, rel=1e-14)


def test_norms_fall_from_a_gaussian_start_and_rise_once_separated(separated):
    start = model_of(0.7)
    before = norm_path(FLOW, start, stop=ufm.FinalTime(1e4))
    assert not before.monotone
    assert before.violation == 0
    assert before.growth[0] < 0
    assert np.all(before.norms[1] < before.norms[0])
    # The three norms, H_1, W_1, W_2, differ by constants in their squares (P1 eq. 2).
    gaps = np.diff(before.norms**2, axis=1)
    np.testing.assert_allclose(gaps, gaps[:1].repeat(len(gaps), axis=0), rtol=1e-4)
    first = [start.features, start.hidden, start.head]
    np.testing.assert_allclose(before.norms[0], [np.linalg.norm(x) for x in first])

    after = norm_path(FLOW, separated, stop=ufm.FinalTime(1e4))
    assert after.monotone
    assert after.violation is None
    assert after.log_time[0] == separated.log_time
    assert after.log_time[-1] == pytest.approx(
        np.log(1e4 + np.exp(separated.log_time)), rel=1e-12
    )
    assert np.all(after.least_margin > 0)
    assert np.all(np.diff(after.norms, axis=0) > 0)
    # The path's own slope of ‖W‖² in log t, at the middle of fine steps.
    time = np.exp(after.log_time)
    slope = np.diff(after.norms[:, 0] ** 2) / np.diff(after.log_time)
    exact = after.growth * np.exp(after.log_scale) * time
    np.testing.assert_allclose(slope, 0.5 * (exact[1:] + exact[:-1]), rtol=0.02)


def test_first_fall_is_found():
    norms = np.array([[1.0, 2.0], [1.1, 2.1], [1.2, 2.1 * (1 - 1e-9)], [1.3, 2.0]])
    rising = np.ones(4)
    assert first_violation(norms[:3], rising[:3], 1e-7) is None
    assert first_violation(norms, rising, 1e-7) == 3
    assert first_violation(norms, rising, 1e-12) == 2
    assert first_violation(norms, np.array([1.0, 0.0, 1.0, 1.0]), 1e-7) == 1
    assert first_violation(norms, np.array([np.nan, 1.0, 1.0, 1.0]), 1e-7) == 0
    assert first_violation(np.where(norms == 2.1, np.nan, norms), rising, 1e-7) == 1


@pytest.mark.usefixtures("unhooked")
def test_flows_without_separation_are_refused(separated):
    squared: Any = ufm.GradientFlow(ufm.MSE(), 2)
    decaying: Any = ufm.GradientFlow(ufm.CrossEntropy(), 2, weight_decay=1e-3)
    reduced: Any = ufm.HadamardFlow(4, 2)
    sigmoids: Any = ufm.SigmoidalFlow.linearised(1)
    with pytest.raises(ValueError, match="but the loss is MSE"):
        separation_stop(squared)
    with pytest.raises(ValueError, match="With weight decay"):
        separation_stop(decaying)
    with pytest.raises(ValueError, match="a flow of cross-entropy"):
        separation_stop(sigmoids)
    with pytest.raises(ValueError, match="knows its own"):
        separation_stop(FLOW, per_class=2)
    with pytest.raises(ValueError, match="at least 1"):
        separation_stop(reduced, per_class=0)
    with pytest.raises(ValueError, match="those of a `GradientFlow`"):
        norm_growth(reduced, separated.state)
    with pytest.raises(ValueError, match="With weight decay"):
        norm_path(decaying, model_of(0.7), stop=ufm.FinalTime(1.0))


def test_start_that_never_separates_is_not_reached():
    """At rest: all layers are zero."""
    resting = jax.tree.map(jnp.zeros_like, model_of(0.7))
    found = separation_time(FLOW, resting, rtol=1e-9)
    assert not found.reached
    assert found.outcome == ufm.Outcome.not_met
    assert found.log_loss == pytest.approx(np.log(6 * np.log(3.0)))
    with pytest.raises(ValueError, match="did not get to a loss of log 2"):
        norm_path(FLOW, found, stop=ufm.FinalTime(1.0))
