"""The model's logits and shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepufm import DeepUFM


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
