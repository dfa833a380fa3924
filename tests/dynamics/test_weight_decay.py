"""Weight decay: the vector field, e^{-2 lambda t} for balancedness, and rest points."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepufm as ufm
from deepufm import MSE, CrossEntropy, DeepUFM, GradientFlow

LABELS = np.repeat(np.arange(3), 2)
TARGET = np.eye(3)[:, LABELS]
RATES = np.array([0.0, 0.01, 0.05])


@pytest.fixture(scope="module")
def model(key):
    return ufm.gaussian(key, num_classes=3, per_class=2, width=4, depth=2)


def plain_rates(model: DeepUFM, decay: float, squared: bool = False):
    """-dL/dθ - λθ of the linear model at depth 2, blocks in the model's order."""
    head, hidden, features = map(
        np.asarray, (model.head, model.hidden[0], model.features)
    )
    logits = head @ hidden @ features
    weights = np.exp(logits - logits.max(0))
    residual = TARGET - (logits if squared else weights / weights.sum(0))
    return [
        residual @ (hidden @ features).T - decay * head,
        (head.T @ residual @ features.T - decay * hidden)[None],
        hidden.T @ head.T @ residual - decay * features,
    ]


def scaled(tree, factor):
    return jax.tree.map(lambda x: factor * x, tree)


@jax.jit
def velocities(model, decay):
    """dθ/dt of both losses."""
    found = {}
    for loss in (CrossEntropy(), MSE()):
        direction, log_speed = GradientFlow(loss, 2, decay)(model)
        speed = jnp.exp(log_speed)
        found[type(loss).__name__] = scaled(direction, speed)
    return found


@pytest.mark.parametrize("decay", [0.0, 1e-3, 10.0])
def test_flow_is_minus_the_gradient_minus_decay_times_the_parameters(model, decay):
    found = velocities(model, decay)
    for loss in ("CrossEntropy", "MSE"):
        want = plain_rates(model, decay, squared=loss == "MSE")
        for got, rate in zip(jax.tree.leaves(found[loss]), want):
            # Measured: 3.8e-16 at the most.
            assert np.linalg.norm(got - rate) <= 2e-15 * np.linalg.norm(rate)


@jax.jit
def decayed(model, decay):
    flow = GradientFlow(CrossEntropy(), 2, decay)
    return *flow(model), flow.log_loss(model), flow.log_norm(model)


def test_at_log_loss_minus_2000_the_direction_is_the_decay_alone(model):
    # e^{-2000} is below any float; margins are near 2000.
    large = 2000 ** (1 / 3) * jnp.eye(4)
    big = DeepUFM(
        head=0.1 * model.head + large[:3],
        hidden=0.1 * model.hidden + large[None],
        features=0.1 * model.features + large[:, LABELS],
    )
    direction, log_speed, log_loss, log_norm = decayed(big, 1e-3)
    assert -3000 < log_loss < -1000
    np.testing.assert_allclose(log_speed, np.log(1e-3) + log_norm, rtol=1e-14)
    for got, parameters in zip(jax.tree.leaves(direction), jax.tree.leaves(big)):
        np.testing.assert_allclose(
            np.exp(log_speed) * got, -1e-3 * parameters, rtol=1e-13
        )
    squares = [np.sum(x**2) for x in jax.tree.leaves(direction)]
    np.testing.assert_allclose(sum(squares), 1, rtol=1e-12)


def test_a_model_of_zeros_is_at_rest(model):
    direction, log_speed, _, _ = decayed(jax.tree.map(jnp.zeros_like, model), 0.1)
    assert log_speed == -np.inf
    assert all(np.all(x == 0) for x in jax.tree.leaves(direction))


@jax.jit
@functools.partial(jax.vmap, in_axes=(None, 0, 0))
def run(model, decay, time):
    path = ufm.solve(
        GradientFlow(CrossEntropy(), 2, decay),
        model,
        stop=ufm.FinalTime(time),
        saves=5,
        keep_states=True,
        rtol=1e-9,
    )
    return path, path.outcome == ufm.Outcome.reached


@pytest.fixture(scope="module")
def paths(model):
    """Traced rates in one program; the last member runs until it rests."""
    rates, times = np.append(RATES, 0.05), np.append(np.full(3, 30.0), 600.0)
    path, reached = run(model, rates, times)
    assert np.all(reached)
    return path


def at(tree, index):
    return jax.tree.map(lambda x: x[index], tree)


def balancedness(state: DeepUFM):
    layers = [np.asarray(x) for x in (state.features, state.hidden[0], state.head)]
    return [b.T @ b - a @ a.T for a, b in zip(layers, layers[1:])]


@pytest.mark.parametrize("member", range(3))
def test_balancedness_matrices_decay_at_twice_the_rate(model, paths, member):
    """Also λ = 0 as a traced number, where they are conserved."""
    start = balancedness(model)
    size = max(float(np.sum(x**2)) for x in jax.tree.leaves(model))
    for row in range(5):
        state = at(paths.state, (member, row))
        factor = np.exp(-2 * RATES[member] * np.exp(paths.log_time[member, row]))
        assert 0.04 < factor <= 1
        for got, want in zip(balancedness(state), start):
            # Measured: 4.7e-11.
            assert np.linalg.norm(got - factor * want) < 2.5e-10 * size


def test_a_long_run_ends_where_the_gradient_balances_the_decay(paths):
    final = at(paths.final, -1)
    rest = plain_rates(final, 0.05)
    for rate, parameters in zip(rest, jax.tree.leaves(final)):
        pull = 0.05 * np.linalg.norm(parameters)
        assert pull > 0.01  # it has not gone to zero
        assert np.linalg.norm(rate) < 1e-8 * pull  # measured: 2.4e-9


def test_no_decay_is_the_plain_flow():
    plain, zero = GradientFlow(CrossEntropy(), 2), GradientFlow(CrossEntropy(), 2, 0)
    assert plain.weight_decay is None
    assert jax.tree.structure(plain) == jax.tree.structure(zero)
    assert plain.norm_diverges
    assert zero.norm_diverges
    assert not GradientFlow(CrossEntropy(), 2, 1e-9).norm_diverges


def test_the_default_is_the_plain_flow_inside_jit_too():
    # Constants made by jax.numpy are traced there, and would pass for a decay.
    @jax.jit
    def build(x):
        flow = GradientFlow(CrossEntropy(), 2)
        assert flow.weight_decay is None
        assert flow.norm_diverges
        return x

    build(1.0)


def test_log_norm_clock_is_refused_with_decay(model):
    with pytest.raises(ValueError, match="`LogNorm` needs a norm that grows for ever"):
        ufm.solve(
            GradientFlow(CrossEntropy(), 2, 1e-3),
            model,
            stop=ufm.FinalNorm(1e3),
            clock=ufm.LogNorm(),
            saves=ufm.SaveEvery(1.0, 2),
        )


@pytest.mark.parametrize("decay", [-1e-3, np.nan, np.inf])
def test_a_rate_that_is_no_decay_is_refused(decay):
    with pytest.raises(ValueError, match="finite and at least 0"):
        GradientFlow(CrossEntropy(), 2, decay)


def test_frozen_layers_do_not_decay(model):
    padded = DeepUFM(
        model.head, jnp.concatenate([model.hidden, jnp.eye(4)[None]]), model.features
    )

    @jax.jit
    def both(model, depth):
        flow = GradientFlow(CrossEntropy(), 2, 0.5, depth=depth)
        return flow(model)

    direction, log_speed = both(padded, 2)
    got = [direction.head, direction.hidden[:1], direction.features]
    for rate, want in zip(got, plain_rates(model, 0.5)):
        np.testing.assert_allclose(np.exp(log_speed) * rate, want, rtol=1e-12)
    np.testing.assert_array_equal(direction.hidden[1], 0)


@pytest.mark.parametrize("decay", [0.0, 1e-8])
def test_the_velocity_is_linear_in_the_decay_at_zero_too(model, decay):
    def velocity(rate):
        flow = ufm.GradientFlow(ufm.CrossEntropy(), 2, rate)
        direction, log_speed = flow(model)
        return jnp.exp(log_speed) * direction.head

    slope = jax.jit(jax.jacfwd(velocity))(jnp.asarray(decay))
    np.testing.assert_allclose(slope, -model.head, rtol=1e-12)
