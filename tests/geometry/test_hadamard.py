"""Phi, Psi and the products with Psi, against popcounts and exact integers."""

import re
from functools import partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from deepufm.geometry import psi_matrix, psi_matvec, sylvester_hadamard
from deepufm.geometry._hadamard import _DENSE_UP_TO, _sums_by_parity, _sums_dense

products = pytest.mark.parametrize("product", [_sums_dense, _sums_by_parity])


def odd_sets(num_classes: int) -> list[list[int]]:
    """Row by row, the positions where Psi is 2."""
    indices = range(1, num_classes)
    return [[j - 1 for j in indices if bin(i & j).count("1") % 2] for i in indices]


def whole(x) -> int:
    """The exact value of a double in units of 2^-1074, of which each is a multiple."""
    numerator, denominator = float(x).as_integer_ratio()
    return numerator * (2**1074 // denominator)


def assert_relative_error(got, v, rounding_bits: int, roundings: int):
    """`got` is the sum of v, then Psi v, within `roundings` of relative size 2^-bits.

    The sum, of twice as many terms, within twice as many.
    """
    terms = [whole(x) for x in np.asarray(v)]
    wanted = [2 * sum(terms[j] for j in odd) for odd in odd_sets(len(terms) + 1)]
    total, *entries = np.asarray(got)
    assert abs(whole(total) - sum(terms)) << rounding_bits <= 2 * roundings * sum(terms)
    for entry, want in zip(entries, wanted, strict=True):
        assert abs(whole(entry) - want) << rounding_bits <= roundings * want


@pytest.mark.parametrize("num_classes", [1, 2, 4, 8, 64])
def test_phi_is_the_papers_recursion(num_classes):
    expected = np.ones((1, 1))
    while len(expected) < num_classes:
        expected = np.block([[expected, expected], [expected, -expected]])
    phi = sylvester_hadamard(num_classes)
    assert phi.dtype == jnp.float64
    np.testing.assert_array_equal(phi, expected)


@pytest.mark.parametrize("num_classes", [2, 4, 16, 128])
def test_psi_is_two_where_the_popcount_is_odd(num_classes):
    psi = psi_matrix(num_classes)
    assert psi.dtype == jnp.float64
    expected = np.zeros((num_classes - 1, num_classes - 1))
    for row, odd in zip(expected, odd_sets(num_classes), strict=True):
        row[odd] = 2
    np.testing.assert_array_equal(psi, expected)


@pytest.mark.parametrize("num_classes", [2, 8, 64])
def test_psi_squared_and_row_sums(num_classes):
    psi = np.asarray(psi_matrix(num_classes))
    size = num_classes - 1
    np.testing.assert_array_equal(psi.sum(axis=1), num_classes)
    np.testing.assert_array_equal(psi @ psi, num_classes * (np.eye(size) + 1))


@products
@pytest.mark.parametrize("num_classes", [2, 4, 8, 16, 64, 256])
def test_every_entry_is_accurate_over_600_orders_of_magnitude(product, num_classes):
    # Recursive summation of n non-negative terms: at most n - 1 roundings of 2^-53; the
    # parity transform is a tree of depth log2 K.
    depth = num_classes.bit_length() - 1
    roundings = depth if product is _sums_by_parity else num_classes // 2
    rng = np.random.default_rng(num_classes)
    compiled = jax.jit(product)
    for spread in (1, 300):
        v = 10.0 ** rng.uniform(-spread, spread, num_classes - 1)
        assert_relative_error(compiled(v), v, 53, roundings)


@products
@pytest.mark.parametrize("num_classes", [16, 128])
def test_huge_entries_do_not_reach_rows_that_exclude_them(product, num_classes):
    # All that row 5 leaves out is near 1e300; what it adds up is near 1e-300.
    row = 5
    v = np.random.default_rng(0).uniform(1e299, 1e300, num_classes - 1)
    v[odd_sets(num_classes)[row]] *= 1e-300
    v[odd_sets(num_classes)[row]] *= 1e-300
    got = np.asarray(jax.jit(product)(v))
    assert 1e-301 < got[row + 1] < 1e-297
    assert_relative_error(got, v, 53, num_classes // 2)
    # The same in a lane beside an ordinary one, which takes another kernel.
    lanes = jax.jit(jax.vmap(product, in_axes=-1, out_axes=-1))
    got = np.asarray(lanes(np.stack([np.ones_like(v), v], axis=-1)))
    np.testing.assert_array_equal(got[1:, 0], num_classes)
    assert_relative_error(got[:, 1], v, 53, num_classes // 2)


@products
def test_float32_stays_float32_and_accurate(product):
    v = 10.0 ** np.random.default_rng(1).uniform(-35, 35, 63)
    v = v.astype(np.float32)
    got = jax.jit(product)(v)
    assert got.dtype == jnp.float32
    assert_relative_error(got, v, 24, 32)


magnitudes = st.one_of(st.just(0.0), st.floats(1e-300, 1e300))
compiled_dense, compiled_parity = jax.jit(_sums_dense), jax.jit(_sums_by_parity)


@settings(max_examples=50, deadline=None)
@given(st.lists(magnitudes, min_size=15, max_size=15))
def test_both_products_are_exact_to_rounding_on_any_input(entries):
    v = np.array(entries)
    assert_relative_error(compiled_dense(v), v, 53, 8)
    assert_relative_error(compiled_parity(v), v, 53, 4)


@pytest.mark.parametrize("num_classes", [_DENSE_UP_TO, 2 * _DENSE_UP_TO])
def test_matvec_and_its_derivatives_are_psi(num_classes):
    psi = np.asarray(psi_matrix(num_classes))
    rng = np.random.default_rng(2)
    v, w = rng.normal(size=(2, num_classes - 1))
    close = partial(np.testing.assert_allclose, rtol=1e-13, atol=1e-12)

    @jax.jit
    def all_at_once(v, w):
        value, tangent = jax.jvp(psi_matvec, (v,), (w,))
        gradient = jax.grad(lambda v: jnp.vdot(w, psi_matvec(v)))(v)
        return value, tangent, gradient

    value, tangent, gradient = all_at_once(v, w)
    close(value, psi @ v)
    close(tangent, psi @ w)
    close(gradient, psi @ w)  # = Psi^T w, as Psi is symmetric


@pytest.mark.parametrize("num_classes", [_DENSE_UP_TO, 2 * _DENSE_UP_TO])
def test_matvec_maps_over_either_axis(num_classes):
    v = np.random.default_rng(3).uniform(size=(num_classes - 1, 3))
    expected = np.asarray(psi_matrix(num_classes)) @ v
    last = jax.vmap(psi_matvec, in_axes=-1, out_axes=-1)
    first, last = jax.jit(lambda v: (jax.vmap(psi_matvec)(v.T), last(v)))(v)
    np.testing.assert_allclose(last, expected, rtol=1e-14)
    np.testing.assert_allclose(np.transpose(first), expected, rtol=1e-14)


def test_matvec_takes_the_parity_transform_beyond_the_switch_point():
    def operations(num_classes):
        return str(jax.make_jaxpr(psi_matvec)(jnp.ones(num_classes - 1)))

    assert "dot_general" in operations(_DENSE_UP_TO)
    assert "dot_general" not in operations(2 * _DENSE_UP_TO)


@pytest.mark.parametrize("num_classes", [-4, 0, 3, 6, 100])
def test_other_orders_are_refused_with_advice(num_classes):
    for function, least in ((sylvester_hadamard, 1), (psi_matrix, 2)):
        message = (
            f"Argument `num_classes` must be a power of two, {least} or more, for "
            f"Hadamard initialisation, but is {num_classes}. "
            "Use GradientFlow for general K."
        )
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            function(num_classes)


def test_psi_of_one_class_is_refused():
    with pytest.raises(ValueError, match="2 or more, .* but is 1"):
        psi_matrix(1)


@pytest.mark.parametrize("size", [0, 2, 5, 64])
def test_vectors_of_other_lengths_are_refused_with_advice(size):
    with pytest.raises(ValueError, match=rf"shape \({size},\)\. Use jax.vmap for"):
        psi_matvec(jnp.ones(size))
