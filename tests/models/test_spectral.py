"""Starts with given logits: Hadamard, balanced, partners, near a structure."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import mp_log_rates

import deepufm as ufm


def phi(size):
    """The Sylvester-Hadamard matrix, from the parities of common digits."""
    digits = [[(i & j).bit_count() for j in range(size)] for i in range(size)]
    return (-1.0) ** np.array(digits)


def hadamard_logits(a, per_class):
    """Φ diag(0, a) Φᵀ/(K√n) ⊗ 1ᵀ."""
    size = len(a) + 1
    core = phi(size) @ np.diag([0, *a]) @ phi(size).T / (size * math.sqrt(per_class))
    return np.repeat(core, per_class, axis=1)


def layers_of(model):
    """H_1, W_1, ..., W_L, in NumPy."""
    return [np.asarray(x) for x in (model.features, *model.hidden, model.head)]


def product_of(model):
    return functools.reduce(lambda below, layer: layer @ below, layers_of(model))


def singular_values(matrix):
    return np.linalg.svd(np.asarray(matrix), compute_uv=False)


def assert_balanced(model):
    layers = layers_of(model)
    for below, above in zip(layers, layers[1:]):
        size = float(np.linalg.norm(below)) ** 2
        np.testing.assert_allclose(
            above.T @ above, below @ below.T, rtol=0, atol=1e-13 * size
        )


@pytest.mark.parametrize(("depth", "per_class"), [(1, 3), (2, 1), (2, 3), (5, 1)])
def test_hadamard_start_has_its_logits_and_is_balanced(key, depth, per_class):
    a = [1.5, 0.0, 0.25]
    model = ufm.hadamard(key, jnp.asarray(a), per_class=per_class, width=5, depth=depth)
    assert model.depth == depth
    np.testing.assert_allclose(
        product_of(model), hadamard_logits(a, per_class), rtol=0, atol=1e-14
    )
    values = singular_values(product_of(model))
    np.testing.assert_allclose(values, [1.5, 0.25, 0, 0], rtol=1e-13, atol=1e-14)
    assert_balanced(model)
    # Every layer has the singular values a^{1/(L+1)}.
    want = np.sort(np.asarray(a) ** (1 / (depth + 1)))[::-1]
    for layer in layers_of(model):
        got = singular_values(layer)[:3]
        np.testing.assert_allclose(got, want, rtol=1e-13, atol=1e-14)


def test_hadamard_start_of_any_scale(key):
    a = np.array([1e-300, 2e-300, 0.5e-300])
    model = ufm.hadamard(key, jnp.asarray(a), per_class=1, width=5, depth=2)
    got = np.asarray(model.logits()) / 1e-300
    np.testing.assert_allclose(got, hadamard_logits(a / 1e-300, 1), rtol=0, atol=1e-13)


# Rows are H_1, W_1, ..., W_L, columns the three modes.
LAYERS = [
    np.array([[2.0, 0.5, 1e-3], [0.25, -3.0, 1.0], [1.5, 1.0, -0.1]]),
    np.array([[1.0, 0.0, 2.0], [0.5, 7.0, -1.0], [1e-4, 1.0, -3.0]]),
    np.array([[1e3, -2.0, 1e-2], [-1e-3, -2.0, 5.0]]),
]


@pytest.mark.parametrize("alpha", LAYERS)
def test_hadamard_layers_have_their_singular_values_and_multiply(key, alpha):
    model = ufm.hadamard_layers(key, jnp.asarray(alpha), per_class=3, width=5)
    assert model.depth == len(alpha) - 1
    # The signs multiply too.
    want = hadamard_logits(np.prod(alpha, axis=0), per_class=3)
    # Rounding of a product is that of the product of the norms.
    scale = np.prod(np.max(np.abs(alpha), axis=1))
    np.testing.assert_allclose(product_of(model), want, rtol=0, atol=3e-16 * scale)
    for layer, row in zip(layers_of(model), alpha):
        wanted = np.sort(np.abs(row))[::-1]
        # A small singular value is known to the rounding of the largest.
        np.testing.assert_allclose(
            singular_values(layer)[:3], wanted, rtol=0, atol=3e-15 * wanted[0]
        )


def test_unbalanced_hadamard_layers_still_share_singular_vectors(key):
    alpha = LAYERS[0]
    model = ufm.hadamard_layers(key, jnp.asarray(alpha), per_class=3, width=5)
    layers = layers_of(model)
    below, above = layers[0] @ layers[0].T, layers[1].T @ layers[1]
    # alpha_i² of one and the next layer on the same directions: their difference has
    # the eigenvalues alpha_{l+1,i}² - alpha_{l,i}² and zeros.
    want = np.sort([*(alpha[1] ** 2 - alpha[0] ** 2), 0.0, 0.0])
    np.testing.assert_allclose(
        np.linalg.eigvalsh(above - below), want, rtol=0, atol=3e-14
    )


def test_equal_hadamard_layers_are_the_balanced_start(key):
    a = np.array([1.5, 0.0, 0.25])
    alpha = jnp.asarray(np.stack([a ** (1 / 3)] * 3))
    equal = ufm.hadamard_layers(key, alpha, per_class=3, width=5)
    start = ufm.hadamard(key, jnp.asarray(a), per_class=3, width=5, depth=2)
    for got, want in zip(layers_of(equal), layers_of(start)):
        np.testing.assert_allclose(got, want, rtol=0, atol=3e-16)


def test_spectral_partner_keeps_the_largest_singular_values_alone(key):
    model = ufm.gaussian(key, num_classes=4, per_class=3, width=5, depth=2)
    partner = ufm.spectral_partner(jax.random.key(1), model)
    assert layers_of(partner)[0].shape == (5, 12)
    assert (partner.width, partner.depth) == (5, 2)
    values = singular_values(product_of(model))
    assert values[3] > 1e-3 * values[0]  # what the partner leaves out
    found = singular_values(product_of(partner))
    np.testing.assert_allclose(found[:3], values[:3], rtol=3e-15)
    assert found[3] < 1e-15 * found[0]
    assert_balanced(partner)
    # The largest is mode 1, and the singular vectors are those of Hadamard logits.
    want = hadamard_logits(values[:3], per_class=3)
    np.testing.assert_allclose(product_of(partner), want, rtol=0, atol=2e-15)


@pytest.mark.parametrize(
    ("num_classes", "examples", "width", "message"),
    [
        (4, 6, 5, "classes of one size, but 6 examples are no multiple of 4"),
        (3, 6, 5, "`num_classes` must be a power of two.*is 3"),
        (4, 4, 3, "`width` must be at least num_classes = 4, but is 3"),
    ],
)
def test_a_model_without_a_partner_is_refused(
    key, num_classes, examples, width, message
):
    model = ufm.DeepUFM(
        head=jnp.ones((num_classes, width)),
        hidden=jnp.ones((0, width, width)),
        features=jnp.ones((width, examples)),
    )
    with pytest.raises(ValueError, match=message):
        ufm.spectral_partner(key, model)


@pytest.mark.parametrize("depth", [1, 3])
def test_balanced_start_has_its_logits(key, depth):
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(3, 6))
    model = ufm.balanced(key, jnp.asarray(logits), width=4, depth=depth)
    np.testing.assert_allclose(product_of(model), logits, rtol=0, atol=1e-13)
    assert_balanced(model)


def test_balanced_start_of_deficient_rank(key):
    generator = np.random.default_rng(1)
    logits = generator.normal(size=(4, 1)) @ generator.normal(size=(1, 8))
    model = ufm.balanced(key, jnp.asarray(logits), width=4, depth=2)
    # Rounding leaves other singular values near 1e-16, whose cube roots are 1e-5.
    np.testing.assert_allclose(product_of(model), logits, rtol=0, atol=1e-13)
    assert_balanced(model)
    zero = ufm.balanced(key, jnp.zeros((4, 8)), width=4, depth=2)
    assert all(np.all(layer == 0) for layer in layers_of(zero))


def of_rank(rank):
    generator = np.random.default_rng(rank)
    return generator.normal(size=(4, rank)) @ generator.normal(size=(rank, 8))


def test_logits_of_rank_two_pass_a_bottleneck_of_width_two(key):
    logits = of_rank(2)
    model = ufm.balanced(key, jnp.asarray(logits), width=2, depth=2, bottleneck=True)
    assert model.hidden.shape == (1, 2, 2)
    size = float(np.linalg.norm(logits))
    np.testing.assert_allclose(product_of(model), logits, rtol=0, atol=2e-15 * size)
    assert_balanced(model)


def test_logits_of_rank_three_do_not_pass_a_bottleneck_of_width_two(key):
    message = "through a width of 2 have rank 2 at most, but 4 x 8 ones"
    with pytest.raises(ValueError, match=message):
        ufm.balanced(key, jnp.asarray(of_rank(3)), width=2, depth=2, bottleneck=True)


@pytest.mark.parametrize("start", ["hadamard", "balanced"])
def test_padded_balanced_starts_hold_the_same_model(key, start):
    a = jnp.asarray([1.5, 1.0, 0.25])

    def build(**padding):
        sizes: dict[str, Any] = {"width": 5, "depth": 2} | padding
        if start == "hadamard":
            return ufm.hadamard(key, a, per_class=3, **sizes)
        return ufm.balanced(key, jnp.asarray(hadamard_logits(a, 3)), **sizes)

    plain, padded = build(), build(pad_width=7, pad_depth=4)
    np.testing.assert_array_equal(padded.head[:, :5], plain.head)
    np.testing.assert_array_equal(padded.hidden[:1, :5, :5], plain.hidden)
    np.testing.assert_array_equal(padded.features[:5], plain.features)
    np.testing.assert_array_equal(padded.hidden[1:], np.stack([np.eye(7)] * 2))
    np.testing.assert_allclose(
        product_of(padded), product_of(plain), rtol=0, atol=1e-14
    )


# Perturbations and norms are traced: one program for each set of sizes.
near = jax.jit(
    ufm.near_structure, static_argnames=("per_class", "width", "depth", "bottleneck")
)


def structure_logits(structure, sizes, norm):
    columns = np.repeat(np.asarray(structure), sizes, axis=1)
    return norm * columns / np.linalg.norm(columns)


# The classes' sizes, the depth.
NEAR = [(3, 2), ((1, 3, 2, 1), 1)]


@pytest.mark.parametrize(("per_class", "depth"), NEAR)
# The root 1/(L+1), rounded, moves x by up to |log x|·2^{-53}: 5e-14 at 1e-200.
@pytest.mark.parametrize(("norm", "rtol"), [(50.0, 2.5e-15), (1e-200, 5e-14)])
def test_without_perturbation_the_logits_are_the_structure(
    key, per_class, depth, norm, rtol
):
    structure = ufm.cross_polytope(4)
    sizes = {"per_class": per_class, "width": 5, "depth": depth}
    model = near(key, structure, norm=norm, perturbation=0.0, **sizes)
    want = structure_logits(structure, per_class, 1.0)
    got = product_of(model) / norm
    np.testing.assert_allclose(got, want, rtol=0, atol=rtol)
    np.testing.assert_allclose(np.linalg.norm(got), 1, rtol=rtol)
    assert_balanced(model)


@pytest.mark.parametrize(("per_class", "depth"), NEAR)
@pytest.mark.parametrize("perturbation", [1e-6, 0.5])
def test_every_layer_is_perturbed_by_what_was_asked(
    key, per_class, depth, perturbation
):
    structure = ufm.cross_polytope(4)
    sizes = {"per_class": per_class, "width": 5, "depth": depth, "norm": 50.0}
    exact = layers_of(near(key, structure, perturbation=0.0, **sizes))
    moved = layers_of(near(key, structure, perturbation=perturbation, **sizes))
    differences = [after - before for before, after in zip(exact, moved)]
    for difference, before in zip(differences, exact):
        ratio = np.linalg.norm(difference) / np.linalg.norm(before)
        # The difference of doubles near 1 is known to 1e-16.
        np.testing.assert_allclose(ratio, perturbation, rtol=2e-15 / perturbation)
    # Layers get numbers of their own: the noise of two overlapping blocks differs.
    for below, above in zip(differences, differences[1:]):
        rows, columns = np.minimum(below.shape, above.shape)
        blocks = [np.ravel(x[:rows, :columns]) for x in (below, above)]
        assert abs(np.corrcoef(blocks)[0, 1]) < 0.9


def test_a_polygon_passes_a_bottleneck_of_width_two(key):
    pentagon = ufm.regular_polygon(5)
    model = near(key, pentagon, per_class=2, width=2, depth=3, norm=10, bottleneck=True)
    assert model.hidden.shape == (2, 2, 2)
    want = structure_logits(pentagon, 2, 10.0)
    np.testing.assert_allclose(product_of(model), want, rtol=0, atol=1e-14)
    # Two equal singular values of 10/√2 in Z, so (10/√2)^{1/4} in every layer.
    for layer in layers_of(model):
        np.testing.assert_allclose(
            singular_values(layer), (10 / math.sqrt(2)) ** 0.25, rtol=3e-15
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": 0.0}, "`norm` must be positive and finite, but is 0"),
        ({"norm": -1.0}, "`norm` must be positive and finite, but is -1"),
        ({"norm": math.inf}, "`norm` must be positive and finite, but is inf"),
        ({"perturbation": -0.1}, "`perturbation` must be finite and at least 0.*-0.1"),
        ({"perturbation": math.nan}, "`perturbation` must be finite.*nan"),
        ({"width": 2}, "`width` must be at least num_classes = 4.*bottleneck"),
        ({"width": 2, "bottleneck": True}, "width of 2 have rank 2 at most"),
        ({"per_class": (1, 1, 1)}, "one for each of the 4 classes, but has 3"),
    ],
)
def test_bad_starts_near_a_structure_are_refused(key, changes, message):
    given = {"per_class": 1, "width": 4, "depth": 2, "norm": 1.0} | changes
    with pytest.raises(ValueError, match=message):
        ufm.near_structure(key, ufm.simplex_etf(4), **given)


def test_alternating_modes_follow_p1_eq_49():
    got = ufm.alternating_modes(8, gamma=2.0, delta=0.5)
    np.testing.assert_array_equal(got, [2, 0.5, 2, 0.5, 2, 0.5, 2])
    np.testing.assert_array_equal(ufm.alternating_modes(2, 3, 1), [3.0])
    # delta = 0: K/2 equal modes, the cross-polytope of rank K/2.
    modes = np.asarray(ufm.alternating_modes(4, gamma=1.0, delta=0.0))
    paired = np.abs(hadamard_logits(modes, 1))
    np.testing.assert_array_equal(np.sort(paired)[:, :2], 0)


@pytest.mark.parametrize("excess", [0.9, 1.1])
def test_alternating_modes_move_apart_from_the_ratio_of_p1(excess):
    # At depth 3 and K = 8 the threshold is (8/6)^{4/2} = 16/9. Late, b of P1 eq. 6 is
    # 2(K/2 - 1) e^{-K(gamma+delta)/2} for gamma and K e^{-K(gamma+delta)/2} for delta.
    ratio = 16 / 9 * excess
    modes = ufm.alternating_modes(8, gamma=20 * ratio, delta=20.0)
    rates = mp_log_rates(np.asarray(modes), depth=3.0)
    want = math.log(excess) / 2
    np.testing.assert_allclose(rates[0] - rates[1], want, rtol=0, atol=5e-14)


@pytest.mark.parametrize(
    ("num_classes", "gamma", "message"),
    [
        (7, 1.0, "`num_classes` must be even, but is 7"),
        (0, 1.0, "`num_classes` must be even, but is 0"),
        (8, -1.0, "at least 0, but entry 0 is -1.0"),
        (8, math.nan, "at least 0, but entry 0 is nan"),
    ],
)
def test_bad_alternating_modes_are_refused(num_classes, gamma, message):
    with pytest.raises(ValueError, match=message):
        ufm.alternating_modes(num_classes, gamma=gamma, delta=0.5)


BAD_MODES = [
    ([1.0, -0.5, 0.1], "`a` must be finite and at least 0, but entry 1 is -0.5"),
    ([math.nan, 0.5, 0.1], "entry 0 is nan"),
    ([1.0, 0.5, math.inf], "entry 2 is inf"),
    ([0.0] * 3, "At least one a_i must be positive.*equilibrium"),
    ([1.0] * 5, "`num_classes` must be a power of two.*is 6.*GradientFlow"),
]


@pytest.mark.parametrize(("a", "message"), BAD_MODES)
def test_bad_hadamard_modes_are_refused(key, a, message):
    with pytest.raises(ValueError, match=message) as error:
        ufm.hadamard(key, jnp.asarray(a), per_class=1, width=8, depth=2)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("shape", "filling", "message"),
    [
        ((1, 3), 1.0, "must hold one row a matrix"),
        ((3, 5), 1.0, "`num_classes` must be a power of two.*is 6"),
        ((3, 7), 1.0, "`width` must be at least num_classes = 8, but is 7"),
        ((3, 3), math.nan, "`alpha` must be finite"),
    ],
)
def test_bad_hadamard_layers_are_refused(key, shape, filling, message):
    with pytest.raises(ValueError, match=message):
        ufm.hadamard_layers(key, jnp.full(shape, filling), per_class=1, width=7)


def test_too_narrow_a_width_is_refused(key):
    with pytest.raises(ValueError, match="`width` must be at least num_classes = 4"):
        ufm.hadamard(key, jnp.ones(3), per_class=1, width=3, depth=2)
    with pytest.raises(ValueError, match="`width` must be at least num_classes = 4"):
        ufm.balanced(key, jnp.ones((4, 4)), width=3, depth=2)


def test_logits_that_are_not_finite_are_refused(key):
    with pytest.raises(ValueError, match="`logits` must be finite"):
        ufm.balanced(key, jnp.full((4, 4), jnp.nan), width=4, depth=2)


def test_a_bottleneck_knows_float32s_rounding(key):
    polygon = ufm.regular_polygon(6).astype(jnp.float32)
    model = ufm.balanced(key, polygon, width=2, depth=1, bottleneck=True)
    np.testing.assert_allclose(model.head @ model.features, polygon, atol=1e-5)


@pytest.mark.parametrize(
    ("a", "depth", "message"),
    [
        ([1.0, -1.0], 2, "entry 1 is -1"),
        ([np.nan, 1.0], 2, "entry 0 is nan"),
        ([1.0, 1.0], 0, "`depth` must be a whole number"),
    ],
)
def test_layer_modes_refuse_what_has_no_root(a, depth, message):
    with pytest.raises(ValueError, match=message):
        ufm.layer_modes(jnp.asarray(a), depth)
