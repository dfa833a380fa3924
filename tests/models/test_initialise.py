"""Initial models: reproducible seeds, exact Hadamard and balanced starts."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepufm as ufm

SIZES: dict[str, Any] = {"num_classes": 3, "per_class": 2, "width": 4, "depth": 3}
STATIC = (*SIZES, "pad_width", "pad_depth")
compiled = jax.jit(ufm.gaussian, static_argnames=STATIC)


def gaussian(key, **changes):
    return compiled(key, **(SIZES | changes))


def unjitted(key, **changes):
    return ufm.gaussian(key, **(SIZES | changes))


@pytest.fixture(scope="module")
def large():
    return gaussian(
        jax.random.key(0), num_classes=60, per_class=5, width=300, depth=3, scale=2.0
    )


def test_moments_of_a_gaussian_start(large):
    model = large
    for leaf in (model.head, model.hidden[0], model.hidden[1], model.features):
        values = np.asarray(leaf).ravel() * math.sqrt(300) / 2
        # Five standard deviations of each estimate.
        bound = 5 / math.sqrt(values.size)
        assert abs(values.mean()) < bound
        assert abs(values.var() - 1) < bound * math.sqrt(2)
        assert abs((values**4).mean() - 3) < bound * math.sqrt(96)


def test_layers_and_rows_are_independent(large):
    layers = [np.asarray(x) for x in (*large.hidden, large.features)]
    rows = np.concatenate(layers) * math.sqrt(300) / 2
    correlations = (rows @ rows.T) / 300 - np.eye(len(rows))
    off_diagonal = correlations[~np.eye(len(rows), dtype=bool)]
    assert np.max(np.abs(off_diagonal)) < 7 / math.sqrt(300)


def test_plain_standard_deviation(key):
    scaled, plain = gaussian(key, scale=0.3), gaussian(key, std=0.3 / 2)
    for got, want in zip(jax.tree.leaves(plain), jax.tree.leaves(scaled)):
        np.testing.assert_allclose(got, want, rtol=1e-15)


def test_scale_multiplies_every_entry(key):
    one, tiny = gaussian(key), gaussian(key, scale=1e-200)
    for got, want in zip(jax.tree.leaves(tiny), jax.tree.leaves(one)):
        np.testing.assert_allclose(got, 1e-200 * want, rtol=1e-15)


def test_a_seed_gives_the_same_model_in_a_batch():
    keys = jax.random.split(jax.random.key(7), 3)
    batch = jax.jit(jax.vmap(gaussian))(keys)
    for row in range(3):
        for got, want in zip(
            jax.tree.leaves(batch), jax.tree.leaves(gaussian(keys[row]))
        ):
            np.testing.assert_allclose(got[row], want, rtol=1e-15)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("traced", [False, True])
def test_a_seed_gives_the_same_model_padded(key, depth, traced):
    def draw(width, depth):
        return unjitted(key, width=width, depth=depth, pad_width=6, pad_depth=5)

    plain = gaussian(key, depth=depth)
    if traced:
        padded = jax.jit(draw)(jnp.asarray(4), jnp.asarray(depth))
    else:
        padded = gaussian(key, depth=depth, pad_width=6, pad_depth=5)
    assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-15)
    assert_close(padded.head[:, :4], plain.head)
    assert_close(padded.features[:4], plain.features)
    assert_close(padded.hidden[: depth - 1, :4, :4], plain.hidden)
    np.testing.assert_array_equal(padded.head[:, 4:], 0)
    np.testing.assert_array_equal(padded.features[4:], 0)
    np.testing.assert_array_equal(padded.hidden[: depth - 1, 4:], 0)
    np.testing.assert_array_equal(padded.hidden[: depth - 1, :, 4:], 0)
    frozen = np.broadcast_to(np.eye(6), (5 - depth, 6, 6))
    np.testing.assert_array_equal(padded.hidden[depth - 1 :], frozen)


def test_larger_models_extend_smaller_ones(key):
    # In plain units: `scale` divides by the root of the width.
    small = gaussian(key, std=1.0)
    large = gaussian(key, std=1.0, num_classes=5, per_class=3, width=7, depth=5)
    np.testing.assert_array_equal(large.head[:3, :4], small.head)
    np.testing.assert_array_equal(large.hidden[:2, :4, :4], small.hidden)
    np.testing.assert_array_equal(large.features[:4, :6], small.features)


def test_seeds_differ(key):
    other = gaussian(jax.random.key(1))
    assert np.all(np.asarray(gaussian(key).head) != np.asarray(other.head))


def hadamard_logits(a, per_class):
    """Φ diag(0, a) Φᵀ/(K√n) ⊗ 1ᵀ, with Φ from digit parities."""
    size = len(a) + 1
    phi = np.array(
        [[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    )
    core = phi @ np.diag([0, *a]) @ phi.T / (size * math.sqrt(per_class))
    return np.repeat(core, per_class, axis=1)


def assert_balanced(model):
    layers = [np.asarray(x) for x in (model.features, *model.hidden, model.head)]
    for below, above in zip(layers, layers[1:]):
        size = float(np.linalg.norm(below)) ** 2
        np.testing.assert_allclose(
            above.T @ above, below @ below.T, rtol=0, atol=1e-13 * size
        )


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("per_class", [1, 3])
def test_hadamard_start_has_its_logits_and_is_balanced(key, depth, per_class):
    a = [1.5, 0.0, 0.25]
    model = ufm.hadamard(key, jnp.asarray(a), per_class=per_class, width=5, depth=depth)
    assert model.depth == depth
    np.testing.assert_allclose(
        model.logits(), hadamard_logits(a, per_class), rtol=0, atol=1e-14
    )
    values = np.linalg.svd(model.logits(), compute_uv=False)
    np.testing.assert_allclose(values, [1.5, 0.25, 0, 0], rtol=1e-13, atol=1e-14)
    assert_balanced(model)
    # Every layer has the singular values a^{1/(L+1)}.
    want = np.sort(np.asarray(a) ** (1 / (depth + 1)))[::-1]
    for layer in (model.head, *model.hidden, model.features):
        got = np.linalg.svd(layer, compute_uv=False)[:3]
        np.testing.assert_allclose(got, want, rtol=1e-13, atol=1e-14)


def test_hadamard_start_of_any_scale(key):
    a = np.array([1e-300, 2e-300, 0.5e-300])
    model = ufm.hadamard(key, jnp.asarray(a), per_class=1, width=4, depth=2)
    got = np.asarray(model.logits()) / 1e-300
    np.testing.assert_allclose(got, hadamard_logits(a / 1e-300, 1), atol=1e-13)


@pytest.mark.parametrize("depth", [1, 3])
def test_balanced_start_has_its_logits(key, depth):
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(3, 6))
    model = ufm.balanced(key, jnp.asarray(logits), width=4, depth=depth)
    np.testing.assert_allclose(model.logits(), logits, rtol=0, atol=1e-13)
    assert_balanced(model)


def test_balanced_start_of_deficient_rank(key):
    generator = np.random.default_rng(1)
    logits = generator.normal(size=(4, 1)) @ generator.normal(size=(1, 8))
    model = ufm.balanced(key, jnp.asarray(logits), width=4, depth=2)
    # Rounding leaves other singular values near 1e-16, whose cube roots are 1e-5.
    np.testing.assert_allclose(model.logits(), logits, rtol=0, atol=1e-13)
    assert_balanced(model)
    zero = ufm.balanced(key, jnp.zeros((4, 8)), width=4, depth=2)
    assert all(np.all(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(zero))


@pytest.mark.parametrize("start", ["hadamard", "balanced"])
def test_padded_balanced_starts_hold_the_same_model(key, start):
    a = jnp.asarray([1.5, 1.0, 0.25])

    def build(**padding):
        sizes = {"width": 5, "depth": 2} | padding
        if start == "hadamard":
            return ufm.hadamard(key, a, per_class=2, **sizes)
        return ufm.balanced(key, jnp.asarray(hadamard_logits(a, 2)), **sizes)

    plain, padded = build(), build(pad_width=7, pad_depth=4)
    np.testing.assert_array_equal(padded.head[:, :5], plain.head)
    np.testing.assert_array_equal(padded.hidden[:1, :5, :5], plain.hidden)
    np.testing.assert_array_equal(padded.features[:5], plain.features)
    np.testing.assert_array_equal(padded.hidden[1:], np.stack([np.eye(7)] * 2))
    np.testing.assert_allclose(padded.logits(), plain.logits(), atol=1e-14)


BAD_GAUSSIANS = [
    ({"num_classes": 1}, "`num_classes` must be at least 2, but is 1"),
    ({"per_class": 0}, "`per_class` must be at least 1, but is 0"),
    ({"width": 0}, "`width` must be at least 1, but is 0"),
    ({"depth": 0}, "`depth` must be at least 1, but is 0"),
    ({"width": 2}, "`width` must be at least num_classes = 3, but is 2.*bottleneck"),
    ({"pad_width": 3}, "`pad_width` must be at least width = 4, but is 3"),
    ({"pad_depth": 2}, "`pad_depth` must be at least depth = 3, but is 2"),
    ({"scale": 0.0}, "`scale` must be positive and finite, but is 0.*equilibrium"),
    ({"scale": -1.0}, "`scale` must be positive and finite, but is -1"),
    ({"scale": math.nan}, "`scale` must be positive and finite, but is nan"),
    ({"std": 0.0}, "`std` must be positive and finite, but is 0"),
    ({"std": 1.0, "scale": 2.0}, "either `scale` or `std`"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_GAUSSIANS)
def test_bad_sizes_and_scales_are_refused(key, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        unjitted(key, **changes)
    assert "\n" not in str(error.value)


def test_traced_sizes_need_padding(key):
    with pytest.raises(ValueError, match="traced `width` needs `pad_width`"):
        jax.jit(lambda width: unjitted(key, width=width))(4)


def test_a_bottleneck_is_allowed_on_request(key):
    assert unjitted(key, width=2, bottleneck=True).width == 2


BAD_MODES = [
    ([1.0, -0.5, 0.1], "`a` must be finite and at least 0, but entry 1 is -0.5"),
    ([math.nan, 0.5, 0.1], "entry 0 is nan"),
    ([1.0, 0.5, math.inf], "entry 2 is inf"),
    ([1.0] * 5, "`num_classes` must be a power of two.*is 6.*GradientFlow"),
]


@pytest.mark.parametrize(("a", "message"), BAD_MODES)
def test_bad_hadamard_modes_are_refused(key, a, message):
    with pytest.raises(ValueError, match=message) as error:
        ufm.hadamard(key, jnp.asarray(a), per_class=1, width=8, depth=2)
    assert "\n" not in str(error.value)


def test_too_narrow_a_width_is_refused(key):
    with pytest.raises(ValueError, match="`width` must be at least num_classes = 4"):
        ufm.hadamard(key, jnp.ones(3), per_class=1, width=3, depth=2)
    with pytest.raises(ValueError, match="`width` must be at least num_classes = 4"):
        ufm.balanced(key, jnp.ones((4, 4)), width=3, depth=2)


def test_logits_that_are_not_finite_are_refused(key):
    with pytest.raises(ValueError, match="`logits` must be finite"):
        ufm.balanced(key, jnp.full((4, 4), jnp.nan), width=4, depth=2)
