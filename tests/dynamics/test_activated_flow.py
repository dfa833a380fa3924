"""ReLU models: gradients, homogeneity and padding against passes written out here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepufm as ufm
from deepufm import MSE, CrossEntropy, DeepUFM, GradientFlow, ReLU

CLASSES, PER_CLASS, WIDTH, DEPTH = 3, 2, 5, 3
LABELS = np.repeat(np.arange(CLASSES), PER_CLASS)
EXAMPLES = np.arange(CLASSES * PER_CLASS)
SLOPES = {"linear": 1.0, "relu": 0.0, "leaky": 0.1}
ACTIVATIONS = {"linear": None, "relu": ReLU(), "leaky": ReLU(0.1)}
LOSSES = {"cross-entropy": CrossEntropy(), "mse": MSE()}


def draw(seed, **options):
    return ufm.gaussian(
        jax.random.key(seed), num_classes=CLASSES, per_class=PER_CLASS, width=WIDTH,
        depth=DEPTH, **options,
    )  # fmt: skip


def plain_loss(model: DeepUFM, slope: float, squared: bool):
    signal = model.features
    for layer in model.hidden:
        before = layer @ signal
        signal = jnp.where(before > 0, before, slope * before)
    logits = model.head @ signal
    if squared:
        error = logits - (np.arange(CLASSES)[:, None] == LABELS[None, :]).astype(float)
        return jnp.sum(error**2) / 2
    return -jnp.sum(jax.nn.log_softmax(logits, axis=0)[LABELS, EXAMPLES])


def row_of(tree, row):
    return jax.tree.map(lambda x: x[row], tree)


@jax.jit
def flows_and_gradients(model):
    """Every loss and activation at one model, in one program."""
    found = {}
    for loss in LOSSES:
        for name, slope in SLOPES.items():
            flow = GradientFlow(LOSSES[loss], PER_CLASS, activation=ACTIVATIONS[name])
            gradient = jax.grad(plain_loss)(model, slope, loss == "mse")
            found[loss, name] = (*flow(model), gradient, flow.log_loss(model))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_flow_is_minus_the_gradient_for_every_loss_and_activation(seed):
    for case, found in flows_and_gradients(draw(seed)).items():
        direction, log_speed, gradient, _ = found
        for got, want in zip(jax.tree.leaves(direction), jax.tree.leaves(gradient)):
            error = np.exp(log_speed) * np.asarray(got) + np.asarray(want)
            # Measured: 4.3e-16 at the most.
            bound = 2e-15 * np.linalg.norm(want)
            assert np.linalg.norm(error) <= bound, case


@pytest.mark.parametrize("seed", range(3))
def test_every_layer_grows_its_squared_norm_alike(seed):
    """Euler's theorem: the logits are homogeneous of degree one in each layer."""
    model = draw(seed)
    for direction, *_ in flows_and_gradients(model).values():
        hidden = np.sum(direction.hidden * model.hidden, (1, 2))
        growth = [
            np.sum(direction.head * model.head),
            *hidden,
            np.sum(direction.features * model.features),
        ]
        # Measured: 2.8e-16 of the norms of both.
        scale = float(np.linalg.norm(direction.head) * np.linalg.norm(model.head))
        np.testing.assert_allclose(growth, growth[0], atol=2e-15 * scale)


def backward(model: DeepUFM, slope: float, log_unit: float):
    """-dL/dθ e^{-log_unit} of cross-entropy, and log L; nothing is taken from 1."""
    signals, gates = [np.asarray(model.features)], []
    for layer in np.asarray(model.hidden):
        before = layer @ signals[-1]
        gates.append(np.where(before > 0, 1.0, slope))
        signals.append(gates[-1] * before)
    logits = np.asarray(model.head) @ signals[-1]
    gaps = logits - logits[LABELS, EXAMPLES]
    gaps[LABELS, EXAMPLES] = -np.inf
    total = np.log1p(np.exp(gaps).sum(0))
    error = -np.exp(gaps - total - log_unit)
    error[LABELS, EXAMPLES] = -error.sum(0)
    shift = gaps.max()
    log_loss = shift + np.log((np.exp(gaps - shift)).sum())  # where all gaps are large
    rates = [error @ signals[-1].T]
    pulled = np.asarray(model.head).T @ error
    layers = []
    for layer, gate, signal in zip(model.hidden[::-1], gates[::-1], signals[-2::-1]):
        layers.append((gate * pulled) @ signal.T)
        pulled = np.asarray(layer).T @ (gate * pulled)
    hidden = np.reshape(layers[::-1], (len(layers), *np.shape(model.head.T)[:1] * 2))
    return [rates[0], hidden, pulled], log_loss


def assert_equal_rates(direction, rates, rtol):
    for got, want in zip(jax.tree.leaves(direction), rates):
        assert np.linalg.norm(got - want) <= rtol * np.linalg.norm(want)


def test_every_activation_keeps_its_digits_at_log_loss_minus_500():
    # Margins above 500: 1 - p_y = e^{-500} rounds to 0 in the plain formula. The logits
    # carry roundings of 500 * 1e-16 into the exponent. (Measured: 3e-14.)
    rest = draw(0, scale=0.2)
    large = 625**0.5 * np.eye(WIDTH)
    model = DeepUFM(
        head=rest.head + large[:CLASSES],
        hidden=rest.hidden + jnp.eye(WIDTH)[None],
        features=rest.features + large[:, LABELS],
    )
    for (loss, name), found in flows_and_gradients(model).items():
        if loss == "mse":
            continue
        direction, log_speed, _, found_loss = found
        rates, log_loss = backward(model, SLOPES[name], float(log_speed))
        assert -700 < log_loss < -500
        assert_equal_rates(direction, rates, 2e-13)
        assert 1 < max(np.max(np.abs(rate)) for rate in rates) < 1e4
        np.testing.assert_allclose(found_loss, log_loss, rtol=1e-14)


def test_relu_and_linear_flows_agree_where_all_units_are_active():
    found = flows_and_gradients(jax.tree.map(jnp.abs, draw(1)))
    for loss in LOSSES:
        linear, speed, *_ = found[loss, "linear"]
        for name in ("relu", "leaky"):
            direction, log_speed, *_ = found[loss, name]
            # Each is divided by a size of its own, which the speed makes up for.
            ratio = np.exp(speed - log_speed)
            want = [ratio * rate for rate in jax.tree.leaves(linear)]
            assert_equal_rates(direction, want, 1e-14)


def test_a_unit_at_exactly_zero_is_on_the_lower_side():
    model = draw(2)
    dark = DeepUFM(model.head, model.hidden.at[0, 1].set(0), model.features)
    found = flows_and_gradients(dark)
    for name in ("relu", "leaky"):
        direction, log_speed, *_ = found["cross-entropy", name]
        rates, _ = backward(dark, SLOPES[name], float(log_speed))
        assert_equal_rates(direction, rates, 1e-13)
    direction = found["cross-entropy", "relu"][0]
    np.testing.assert_array_equal(direction.hidden[0, 1], 0)  # it is at rest
    assert np.any(direction.hidden[0] != 0)
    direction = found["cross-entropy", "leaky"][0]
    assert np.any(direction.hidden[0, 1] != 0)


@jax.jit
@jax.vmap
def padded_flow(seed, depth):
    model = ufm.gaussian(
        jax.random.key(seed), num_classes=CLASSES, per_class=PER_CLASS, width=WIDTH,
        depth=depth, pad_width=WIDTH + 1, pad_depth=4,
    )  # fmt: skip
    flow = GradientFlow(CrossEntropy(), PER_CLASS, depth=depth, activation=ReLU())
    return model, *flow(model), flow.logits(model), flow.layer_norms(model)


def test_padding_with_a_traced_depth_changes_nothing():
    """At L = 1 too, where the identities must not clip the features' negative half."""
    depths = np.array([1, 2, 3, 4])
    found = padded_flow(np.full(4, 5), depths)
    for row, depth in enumerate(depths):
        padded, direction, log_speed, logits, norms = row_of(found, row)
        model = DeepUFM(
            padded.head[:, :WIDTH],
            padded.hidden[: depth - 1, :WIDTH, :WIDTH],
            padded.features[:WIDTH],
        )
        assert np.any(model.features < 0)
        (head, hidden, features), _ = backward(model, 0.0, float(log_speed))
        assert_equal_rates(
            (
                direction.head[:, :WIDTH],
                direction.hidden[: depth - 1, :WIDTH, :WIDTH],
                direction.features[:WIDTH],
            ),
            (head, hidden, features),
            1e-13,
        )
        np.testing.assert_array_equal(direction.hidden[depth - 1 :], 0)
        np.testing.assert_array_equal(direction.features[WIDTH:], 0)
        signal = np.asarray(model.features)
        for layer in np.asarray(model.hidden):
            signal = np.maximum(layer @ signal, 0)
        np.testing.assert_allclose(logits, model.head @ signal, atol=1e-14)
        blocks = [model.features, *model.hidden, model.head]
        want = [np.linalg.norm(block) for block in blocks]
        np.testing.assert_allclose(norms[np.r_[0:depth, -1]], want, rtol=1e-14)


@pytest.fixture(scope="module")
def path():
    # Orbits slide along the kinks, where pre-activations stay at zero and steps are not
    # of the solver's order: a loose tolerance reaches the end in a few hundred.
    flow = GradientFlow(CrossEntropy(), PER_CLASS, activation=ReLU())
    return ufm.solve(
        flow, draw(0), stop=ufm.FinalTime(1e3), saves=20, keep_states=True, rtol=1e-4
    )


def test_differences_of_squared_norms_are_conserved(path):
    states = path.state
    assert path.outcome == ufm.Outcome.reached
    squares = np.stack(
        [
            np.sum(states.features**2, (1, 2)),
            *np.sum(states.hidden**2, (2, 3)).T,
            np.sum(states.head**2, (1, 2)),
        ]
    )
    differences = np.diff(squares, axis=0)
    assert np.all(squares[:, -1] > 2 * squares[:, 0])
    drift = np.max(np.abs(differences - differences[:, :1])) / np.max(squares)
    # Measured: 1.4e-4, of the tolerance of 1e-4 a step; 4.2e-6 at 1e-7.
    assert drift < 7e-4


def test_the_loss_of_relu_layers_falls_all_the_way(path):
    losses = [
        float(plain_loss(row_of(path.state, row), 0.0, False)) for row in range(20)
    ]
    assert np.all(np.diff(losses) < 0)
    assert losses[-1] < 0.01 * losses[0]
