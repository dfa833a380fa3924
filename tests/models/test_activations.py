"""Positively homogeneous activations against JAX's own and by hand."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepufm as ufm

INPUTS = np.array([-1e300, -2.5, -1e-300, -0.0, 0.0, 1e-300, 0.75, 1e300])


@pytest.mark.parametrize("slope", [0.0, 0.125, 0.3])
def test_relu_is_the_larger_of_x_and_slope_times_x(slope):
    got = ufm.ReLU(negative_slope=slope)(jnp.asarray(INPUTS))
    np.testing.assert_array_equal(got, np.maximum(INPUTS, slope * INPUTS))


def test_relu_without_a_slope_is_the_plain_one():
    np.testing.assert_array_equal(ufm.ReLU()(jnp.asarray(INPUTS)), jax.nn.relu(INPUTS))


@pytest.mark.parametrize("slope", [0.0, 0.3])
def test_the_gate_is_one_above_zero_and_the_slope_at_and_below(slope):
    gate = ufm.ReLU(slope).gate(jnp.asarray(INPUTS))
    np.testing.assert_array_equal(gate, [slope] * 5 + [1] * 3)


@pytest.mark.parametrize("slope", [0.0, 0.3])
def test_the_gate_is_the_derivative_also_at_zero(slope):
    activation = ufm.ReLU(slope)
    gate = activation.gate(jnp.asarray(INPUTS))
    slopes = jax.vmap(jax.grad(activation))(jnp.asarray(INPUTS))
    np.testing.assert_array_equal(slopes, gate)
    if slope == 0:
        np.testing.assert_array_equal(jax.vmap(jax.grad(jax.nn.relu))(INPUTS), gate)


def test_a_positive_factor_comes_out():
    x, activation = jnp.asarray(INPUTS[1:-1]), ufm.ReLU(0.3)
    for factor in (2.0**-20, 2.0**20):  # powers of two round nothing
        want = factor * np.asarray(activation(x))
        np.testing.assert_array_equal(activation(factor * x), want)


def test_single_precision_stays_single():
    x = jnp.asarray(INPUTS[1:-1], jnp.float32)
    assert ufm.ReLU(0.3).gate(x).dtype == ufm.ReLU(0.3)(x).dtype == jnp.float32


def test_a_whole_number_is_a_slope():
    assert ufm.ReLU(0) == ufm.ReLU(0.0)
    assert isinstance(ufm.ReLU(0).negative_slope, float)


def test_a_slope_is_static():
    assert eqx.filter(ufm.ReLU(0.3), eqx.is_array) == ufm.ReLU(0.3)
    assert jax.tree.leaves(ufm.ReLU(0.3)) == []
    assert ufm.ReLU(0.3) != ufm.ReLU(0.2)


@pytest.mark.parametrize("slope", [-0.1, 1.1, 2.0, float("nan"), float("inf")])
def test_a_slope_outside_zero_to_one_is_refused(slope):
    message = f"`negative_slope`.*lie between 0 and 1, but is {slope}"
    with pytest.raises(ValueError, match=message) as error:
        ufm.ReLU(negative_slope=slope)
    assert "\n" not in str(error.value)
