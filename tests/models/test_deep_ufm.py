"""The model's logits and shapes, linear and activated."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepufm import AbstractActivation, DeepUFM, ReLU
from deepufm.models import propagate


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_logits_are_the_product_of_all_layers(depth):
    generator = np.random.default_rng(depth)
    head, features = generator.normal(size=(3, 5)), generator.normal(size=(5, 6))
    hidden = generator.normal(size=(depth - 1, 5, 5))
    model = DeepUFM(jnp.asarray(head), jnp.asarray(hidden), jnp.asarray(features))
    want = features
    for layer in hidden:  # W_1 acts first
        want = layer @ want
    np.testing.assert_allclose(model.logits(), head @ want, rtol=1e-12)
    assert (model.num_classes, model.width, model.depth) == (3, 5, depth)


def test_padding_does_not_change_the_logits():
    generator = np.random.default_rng(0)
    model = DeepUFM(
        *(jnp.asarray(generator.normal(size=s)) for s in [(3, 5), (1, 5, 5), (5, 6)])
    )
    hidden = np.stack([np.zeros((7, 7)), np.eye(7)])
    hidden[0, :5, :5] = model.hidden[0]
    padded = DeepUFM(
        head=jnp.pad(model.head, ((0, 0), (0, 2))),
        hidden=jnp.asarray(hidden),
        features=jnp.pad(model.features, ((0, 2), (0, 0))),
    )
    np.testing.assert_allclose(padded.logits(), model.logits(), rtol=1e-13)


def test_a_batch_of_models_keeps_its_sizes():
    model = DeepUFM(jnp.ones((3, 5)), jnp.ones((1, 5, 5)), jnp.ones((5, 6)))
    batch = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), model)
    assert (batch.num_classes, batch.width, batch.depth) == (3, 5, 2)
    logits = jax.vmap(lambda m: m.logits())(batch)
    np.testing.assert_allclose(logits[1], 8 * logits[0])


@pytest.mark.parametrize(
    ("hidden", "features"), [((1, 4, 4), (5, 6)), ((1, 5, 5), (4, 6))]
)
def test_layers_of_different_widths_are_refused(unhooked, hidden, features):
    del unhooked
    with pytest.raises(ValueError, match="must share one width.*but have") as error:
        DeepUFM(jnp.ones((3, 5)), jnp.ones(hidden), jnp.ones(features))
    assert "\n" not in str(error.value)


# K = 3 classes, 6 examples, width 5; a traced depth shares a program.
logits = eqx.filter_jit(lambda model, *args: model.logits(*args))


def arrays(depth, seed=0):
    generator = np.random.default_rng(seed)
    shapes = [(3, 5), (depth - 1, 5, 5), (5, 6)]
    return [generator.normal(size=shape) for shape in shapes]


def model_of(arrays):
    return DeepUFM(*(jnp.asarray(array) for array in arrays))


def forward(arrays, slope):
    """The logits, and the input and the gates of every hidden layer."""
    head, hidden, inputs = arrays
    all_inputs, gates = [], []
    for layer in hidden:
        outputs = layer @ inputs
        all_inputs.append(inputs)
        gates.append(np.where(outputs > 0, 1, slope))
        inputs = np.where(outputs > 0, outputs, slope * outputs)
    return head @ inputs, all_inputs, gates


def padded(arrays, width, layers):
    """Zeros beyond the width, identities beyond the depth."""
    head, hidden, features = arrays
    grow = width - head.shape[1]
    frozen = np.broadcast_to(np.eye(width), (layers - len(hidden), width, width))
    hidden = np.pad(hidden, ((0, 0), (0, grow), (0, grow)))
    return [
        np.pad(head, ((0, 0), (0, grow))),
        np.concatenate([hidden, frozen]),
        np.pad(features, ((0, grow), (0, 0))),
    ]


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("slope", [0.0, 0.2])
def test_activated_logits_are_a_plain_forward_pass_padded_or_not(depth, slope):
    plain = arrays(depth)
    want, _, _ = forward(plain, slope)
    # Sums of 5 terms of mixed sign; measured 2.5e-16 of the largest.
    atol = 1.5e-15 * np.max(np.abs(want))
    got = logits(model_of(plain), ReLU(slope))
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)
    larger = model_of(padded(plain, width=7, layers=5))
    got = logits(larger, ReLU(slope), jnp.asarray(float(depth)))
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)


def test_padding_of_one_layer_leaves_negative_features_alone():
    head, hidden, features = arrays(1)
    negative = [head, hidden, -np.abs(features)]
    model = model_of(padded(negative, width=7, layers=5))
    got = logits(model, ReLU(), jnp.asarray(1.0))
    np.testing.assert_allclose(got, head @ negative[2], rtol=0, atol=2e-15)
    # Taken for five true layers, the identities would be activated.
    np.testing.assert_array_equal(logits(model, ReLU(), jnp.asarray(6.0)), 0)


def test_positive_pre_activations_make_the_model_linear():
    positive = [np.abs(array) for array in arrays(4)]
    positive[0] *= np.where(np.arange(5) % 2, 1, -1)  # the head acts on no unit's sign
    want, _, _ = forward(positive, 1.0)
    atol = 3e-15 * np.max(np.abs(want))
    for activation in (None, ReLU()):
        got = logits(model_of(positive), activation)
        np.testing.assert_allclose(got, want, rtol=0, atol=atol)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_activated_logits_are_homogeneous_of_degree_depth_plus_one(depth):
    plain = arrays(depth)
    once = np.asarray(logits(model_of(plain), ReLU(0.2)))
    doubled = logits(model_of([2 * array for array in plain]), ReLU(0.2))
    # Doubling rounds nothing.
    np.testing.assert_array_equal(doubled, 2.0 ** (depth + 1) * once)


class Absolute(AbstractActivation):
    """|x|: any gate that sees only the sign is positively homogeneous."""

    def gate(self, x):
        return jnp.sign(x)


def test_an_activation_of_ones_own_is_a_gate():
    head, hidden, features = arrays(2)
    got = logits(model_of([head, hidden, features]), Absolute())
    want = head @ np.abs(hidden[0] @ features)
    np.testing.assert_allclose(got, want, rtol=0, atol=5e-15)


def test_propagate_gives_the_input_and_the_gates_of_every_layer():
    plain = padded(arrays(4), width=7, layers=5)
    last, inputs, gates = jax.jit(propagate)(
        model_of(plain), ReLU(0.2), jnp.asarray(4.0)
    )
    _, want_inputs, want_gates = forward([plain[0], plain[1][:3], plain[2]], 0.2)
    np.testing.assert_allclose(inputs[:3], want_inputs, rtol=2e-15, atol=2e-15)
    # Beyond the true width every pre-activation is 0, where the gate is the slope.
    np.testing.assert_array_equal(gates[:3], want_gates)
    # Frozen layers pass on what they get.
    np.testing.assert_array_equal(gates[3:], 1)
    np.testing.assert_array_equal(inputs[3], inputs[4])
    np.testing.assert_array_equal(last, inputs[4])
