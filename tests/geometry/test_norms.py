"""Norms at any scale that a float has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepufm.geometry import frobenius_norm, log_frobenius_norm

X = np.random.default_rng(0).standard_normal((3, 4))
norms = jax.jit(lambda x: (frobenius_norm(x), log_frobenius_norm(x)))


@pytest.mark.parametrize("exponent", [-305, -200, 0, 200, 306])
def test_norms_are_numpys_at_any_scale(exponent):
    reference = np.linalg.norm(X)
    scale = 10.0**exponent
    norm, log_norm = norms(jnp.asarray(scale * X))
    assert float(norm) == pytest.approx(reference * scale, rel=1e-15)
    expected = np.log(reference) + np.log(10.0) * exponent
    assert float(log_norm) == pytest.approx(expected, rel=1e-15, abs=2e-15)


def test_the_logarithm_outlives_the_largest_float():
    _, log_norm = norms(jnp.full((3, 4), 1e308))
    expected = 308 * np.log(10.0) + 0.5 * np.log(12.0)
    assert float(log_norm) == pytest.approx(expected, rel=1e-15)


def test_zeros_have_a_norm_of_zero_with_finite_derivatives():
    assert [float(v) for v in norms(jnp.zeros((3, 4)))] == [0.0, -np.inf]
    assert not np.any(jax.grad(frobenius_norm)(jnp.zeros((3, 4))))


def test_a_nan_comes_out_as_one():
    norm, log_norm = norms(jnp.zeros((3, 4)).at[1, 1].set(jnp.nan))
    assert np.isnan([float(norm), float(log_norm)]).all()


@pytest.mark.parametrize("axis", [0, 1, (0, 1)])
def test_axes_are_reduced_as_asked(axis):
    reference = np.sqrt(np.sum(X**2, axis=axis))
    np.testing.assert_allclose(frobenius_norm(jnp.asarray(X), axis), reference, 1e-15)
    logs = log_frobenius_norm(jnp.asarray(X), axis)
    np.testing.assert_allclose(logs, np.log(reference), rtol=1e-14, atol=1e-15)
