"""Random starts: reproducible seeds, their distributions, padding, refusals."""

import functools
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepufm as ufm

SIZES: dict[str, Any] = {"num_classes": 3, "per_class": 2, "width": 4, "depth": 3}


def gaussian(key, **changes):
    return ufm.gaussian(key, **(SIZES | changes))


def orthogonal(key, **changes):
    return ufm.orthogonal(key, **(SIZES | changes))


@pytest.fixture(scope="module")
def large():
    return gaussian(
        jax.random.key(0), num_classes=60, per_class=5, width=300, scale=2.0
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
    layers = [np.asarray(x) for x in (large.head, *large.hidden, large.features)]
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


def assert_padded(model, plain, width, depth, rtol):
    """`model` holds `plain`, zeros beyond d and identities beyond L."""
    assert_close = functools.partial(np.testing.assert_allclose, rtol=rtol)
    model = jax.tree.map(np.asarray, model)
    assert_close(model.head[:, :width], plain.head)
    assert_close(model.features[:width], plain.features)
    assert_close(model.hidden[: depth - 1, :width, :width], plain.hidden)
    np.testing.assert_array_equal(model.head[:, width:], 0)
    np.testing.assert_array_equal(model.features[width:], 0)
    np.testing.assert_array_equal(model.hidden[: depth - 1, width:], 0)
    np.testing.assert_array_equal(model.hidden[: depth - 1, :, width:], 0)
    frozen = model.hidden[depth - 1 :]
    identities = np.broadcast_to(np.eye(model.width), frozen.shape)
    np.testing.assert_array_equal(frozen, identities)


def padded(start, **changes):
    """The start with traced sizes, in arrays of width 8 and depth 4."""

    def build(width, depth):
        sizes = {"width": width, "depth": depth, "pad_width": 8, "pad_depth": 4}
        return start(jax.random.key(0), **(sizes | changes))

    return eqx.filter_jit(build)


@pytest.fixture(scope="module")
def padded_gaussian():
    return padded(gaussian)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("traced", [False, True])
def test_a_seed_gives_the_same_model_padded(key, padded_gaussian, depth, traced):
    plain = gaussian(key, depth=depth)
    if traced:
        model = padded_gaussian(jnp.asarray(4), jnp.asarray(depth))
    else:
        model = gaussian(key, depth=depth, pad_width=8, pad_depth=4)
    assert model.hidden.shape == (3, 8, 8)
    assert_padded(model, plain, 4, depth, rtol=1e-15)


def test_larger_models_extend_smaller_ones(key):
    # In plain units: `scale` divides by the root of the width.
    shallow, small = gaussian(key, std=1.0, depth=1), gaussian(key, std=1.0)
    large = gaussian(key, std=1.0, num_classes=60, per_class=5, width=300)
    np.testing.assert_array_equal(small.head, shallow.head)
    np.testing.assert_array_equal(small.features, shallow.features)
    np.testing.assert_array_equal(large.head[:3, :4], small.head)
    np.testing.assert_array_equal(large.hidden[:, :4, :4], small.hidden)
    np.testing.assert_array_equal(large.features[:4, :6], small.features)


def test_seeds_differ(key):
    other = gaussian(jax.random.key(1))
    assert np.all(np.asarray(gaussian(key).head) != np.asarray(other.head))


@pytest.mark.parametrize("delta", [0.0, 6.0, 300.0])
def test_small_gaussian_keeps_its_standard_deviation_at_another_width(key, delta):
    small = ufm.small_gaussian(key, **SIZES, delta=delta)
    # The draw of `gaussian` at unit deviation, whose moments are tested above.
    unit = gaussian(key, std=1.0)
    want = math.exp(-delta) / math.sqrt(3)
    for got, drawn in zip(jax.tree.leaves(small), jax.tree.leaves(unit)):
        np.testing.assert_allclose(got, want * np.asarray(drawn), rtol=1e-15)


def test_small_gaussian_of_p2_is_one_square_layer_of_deviation_1e_3(key):
    paper = ufm.small_gaussian(key, num_classes=4)
    unit = ufm.gaussian(key, num_classes=4, per_class=1, width=4, depth=1, std=1.0)
    # P2 section 6: "about 1e-3"; this is e^{-6}/2.
    ratios = np.asarray(paper.head) / np.asarray(unit.head)
    np.testing.assert_allclose(ratios, 1.2393760883331792e-3, rtol=1e-15)
    shapes = [leaf.shape for leaf in jax.tree.leaves(paper)]
    assert shapes == [(4, 4), (0, 4, 4), (4, 4)]


@pytest.fixture(scope="module")
def padded_orthogonal():
    return padded(orthogonal, scale=0.7, bottleneck=True)


# K = 3 and 6 examples: narrower than the classes, between both, wider than either.
@pytest.mark.parametrize(("width", "depth"), [(2, 1), (4, 3), (7, 2)])
def test_orthogonal_layers_have_one_singular_value(padded_orthogonal, width, depth):
    model = padded_orthogonal(jnp.asarray(width), jnp.asarray(depth))
    head, features = np.asarray(model.head), np.asarray(model.features)
    hidden = np.asarray(model.hidden)[: depth - 1, :width, :width]
    for layer in (head[:, :width], *hidden, features[:width]):
        values = np.linalg.svd(layer, compute_uv=False)
        # Measured 5e-16.
        np.testing.assert_allclose(values, 0.7, rtol=2.5e-15)


@pytest.mark.parametrize(("width", "depth"), [(2, 1), (4, 3)])
def test_a_seed_gives_the_same_orthogonal_model_padded(
    key, padded_orthogonal, width, depth
):
    plain = orthogonal(key, width=width, depth=depth, scale=0.7, bottleneck=True)
    assert (plain.width, plain.depth) == (width, depth)
    model = padded_orthogonal(jnp.asarray(width), jnp.asarray(depth))
    # Measured 0, but QR of a larger matrix may sum in another order.
    assert_padded(model, plain, width, depth, rtol=1e-13)


def test_orthogonal_layers_are_haar_distributed_and_independent():
    keys = jax.random.split(jax.random.key(3), 4000)
    sizes: dict[str, Any] = SIZES | {"per_class": 1, "width": 3}
    models = jax.jit(jax.vmap(lambda key: ufm.orthogonal(key, **sizes)))(keys)
    layers = (models.head[:, None], models.hidden, models.features[:, None])
    entries = np.concatenate(layers, axis=1).reshape(4000, 36)
    # Haar on O(3): mean 0, covariance I/3 and E q^4 = 3/(3·5); five deviations each.
    bound = 5 / math.sqrt(4000)
    assert np.max(np.abs(entries.mean(axis=0))) < bound / math.sqrt(3)
    assert np.max(np.abs(entries.T @ entries / 4000 - np.eye(36) / 3)) < bound / 3
    # var q^4 = E q^8 - (E q^4)^2 = 1/9 - 1/25.
    fourth = (entries**4).mean(axis=0)
    assert np.max(np.abs(fourth - 1 / 5)) < bound * math.sqrt(1 / 9 - 1 / 25)


BAD_SIZES = [
    ({"num_classes": 1}, "`num_classes` must be at least 2, but is 1"),
    ({"per_class": 0}, "`per_class` must be at least 1, but is 0"),
    ({"per_class": (1, 2)}, "one for each of the 3 classes, but has 2"),
    ({"width": 0}, "`width` must be at least 1, but is 0"),
    ({"depth": 0}, "`depth` must be at least 1, but is 0"),
    ({"width": 2}, "`width` must be at least num_classes = 3, but is 2.*bottleneck"),
    ({"pad_width": 3}, "`pad_width` must be at least width = 4, but is 3"),
    ({"pad_depth": 2}, "`pad_depth` must be at least depth = 3, but is 2"),
    ({"scale": 0.0}, "`scale` must be positive and finite, but is 0.*equilibrium"),
    ({"scale": -1.0}, "`scale` must be positive and finite, but is -1"),
    ({"scale": math.nan}, "`scale` must be positive and finite, but is nan"),
]
BAD_DEVIATIONS = [
    ({"std": 0.0}, "`std` must be positive and finite, but is 0"),
    ({"std": 1.0, "scale": 2.0}, "either `scale` or `std`"),
]


@pytest.mark.parametrize(
    ("start", "changes", "message"),
    [(start, *bad) for start in (gaussian, orthogonal) for bad in BAD_SIZES]
    + [(gaussian, *bad) for bad in BAD_DEVIATIONS],
)
def test_bad_sizes_and_scales_are_refused(key, start, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        start(key, **changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_classes": 1}, "`num_classes` must be at least 2, but is 1"),
        ({"width": 2}, "`width` must be at least num_classes = 3, but is 2"),
        ({"per_class": (1, 0, 2)}, "`per_class` must be at least 1.*leave it out"),
        # e^{-800} is no double.
        ({"delta": 800.0}, "`std` must be positive and finite, but is 0.*equilibrium"),
        ({"delta": math.nan}, "`std` must be positive and finite, but is nan"),
    ],
)
def test_bad_small_gaussians_are_refused(key, changes, message):
    with pytest.raises(ValueError, match=message):
        ufm.small_gaussian(key, **({"num_classes": 3} | changes))


@pytest.mark.parametrize("start", [gaussian, orthogonal])
@pytest.mark.parametrize("size", ["width", "depth"])
def test_traced_sizes_need_padding(key, start, size):
    with pytest.raises(ValueError, match=f"traced `{size}` needs `pad_{size}`"):
        jax.jit(lambda traced: start(key, **{size: traced}))(4)


def test_a_traced_width_beyond_its_padding_is_refused(padded_orthogonal):
    with pytest.raises(RuntimeError, match="`width` is outside its padding"):
        jax.block_until_ready(padded_orthogonal(jnp.asarray(9), jnp.asarray(2)))


def test_a_bottleneck_is_allowed_on_request(key):
    def draw(key):
        return gaussian(key, width=2, bottleneck=True)

    assert jax.eval_shape(draw, key).width == 2
