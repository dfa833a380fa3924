"""Cross-entropy where 1 - p and e^{-margin} have long underflowed, against mpmath;
the squared error against its plain formula.
"""

import math

import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest

import deepufm as ufm
from deepufm.models import log_softplus

loss = ufm.CrossEntropy()
residual = jax.jit(loss.residual)
log_loss = jax.jit(loss.log_loss)
softplus_and_slope = jax.jit(jax.value_and_grad(log_softplus))
mse_residual = jax.jit(ufm.MSE().residual)
mse_log_loss = jax.jit(ufm.MSE().log_loss)


def exact(logits, labels):
    """(Y - P, loss) in as many digits as the smallest probability needs."""
    z = np.asarray(logits)
    with mp.workdps(60 + int(np.ptp(z))):
        matrix, total = np.empty(z.shape, object), mp.mpf(0)
        for column, label in enumerate(labels):
            values = [mp.mpf(x) for x in z[:, column].tolist()]
            powers = [mp.e**x for x in values]
            total += mp.log(mp.fsum(powers)) - values[label]
            for row in range(len(values)):
                rest = [p for k, p in enumerate(powers) if k != row]
                share = mp.fsum(rest) if row == label else -powers[row]
                matrix[row, column] = share / mp.fsum(powers)
        return matrix, total


def one_example(margin):
    """Four classes, the first ahead of the others by about `margin`."""
    return jnp.asarray([[margin], [0.0], [0.25], [-0.5]]), jnp.asarray([0])


@pytest.mark.parametrize(
    ("margin", "log_value"),
    # loss = log(1 + 3 e^{-margin}): 1.2745e-17 at 40; beyond the doubles at 750.
    [(40.0, math.log(1.2745e-17)), (750.0, -748.90)],
)
def test_log_loss_of_four_classes_at_one_margin(margin, log_value):
    logits = jnp.asarray([[margin], [0.0], [0.0], [0.0]])
    got = log_loss(logits, jnp.asarray([0]))
    with mp.workdps(400):
        want = mp.log(mp.log(1 + 3 * mp.e ** (-mp.mpf(margin))))
    np.testing.assert_allclose(got, float(want), rtol=1e-15)
    assert float(got) == pytest.approx(log_value, abs=3e-3)


@pytest.mark.parametrize("margin", [-750.0, -40.0, -1.0, 0.0, 3.0, 40.0, 750.0])
def test_residual_and_loss_of_one_example(margin):
    logits, labels = one_example(margin)
    scaled, log_scale = residual(logits, labels)
    matrix, total = exact(logits, [0])
    with mp.workdps(700):
        for row in range(4):
            want = float(matrix[row, 0] * mp.e ** (-mp.mpf(float(log_scale))))
            np.testing.assert_allclose(scaled[row, 0], want, rtol=1e-13, atol=1e-300)
        want_log = float(mp.log(total))
    np.testing.assert_allclose(log_loss(logits, labels), want_log, rtol=1e-14)
    np.testing.assert_allclose(jnp.max(jnp.abs(scaled)), 1, rtol=1e-13)


def several(key, scale):
    labels = jnp.asarray([0, 0, 1, 1, 2, 2])
    return scale * jax.random.normal(key, (3, 6)), labels


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_residual_and_loss_of_several_examples(key, scale):
    logits, labels = several(key, scale)
    scaled, log_scale = residual(logits, labels)
    matrix, total = exact(logits, labels.tolist())
    with mp.workdps(900):
        unit = mp.e ** mp.mpf(float(log_scale))
        want = np.vectorize(lambda x: float(x / unit))(matrix)
        want_log = float(mp.log(total))
    np.testing.assert_allclose(scaled, want, rtol=1e-12, atol=1e-300)
    np.testing.assert_allclose(log_loss(logits, labels), want_log, rtol=1e-14)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 10.0])
def test_residual_is_minus_the_gradient_of_the_loss(key, scale):
    logits, labels = several(key, scale)

    def plain(z):
        return -jnp.sum(jax.nn.log_softmax(z, axis=0)[labels, jnp.arange(6)])

    def own(z):
        return jnp.exp(loss.log_loss(z, labels))

    scaled, log_scale = residual(logits, labels)
    got = np.exp(log_scale) * np.asarray(scaled)
    np.testing.assert_allclose(
        got, -jax.jit(jax.grad(plain))(logits), rtol=1e-9, atol=1e-13
    )
    np.testing.assert_allclose(
        got, -jax.jit(jax.grad(own))(logits), rtol=1e-9, atol=1e-13
    )


def test_columns_of_the_residual_sum_to_zero(key):
    scaled, _ = residual(*several(key, 20.0))
    np.testing.assert_allclose(jnp.sum(scaled, axis=0), 0, atol=2e-14)


@pytest.mark.parametrize("margin", [3.0, 40.0, 750.0])
def test_a_common_shift_of_all_logits_changes_nothing_but_their_rounding(margin):
    # Eighths are exact at 1e8, so here not even the rounding is left.
    logits, labels = one_example(margin)
    shifted = logits + 1e8
    np.testing.assert_array_equal(shifted - 1e8, logits)
    for got, want in zip(residual(shifted, labels), residual(logits, labels)):
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(log_loss(shifted, labels), log_loss(logits, labels))


def test_a_shift_changes_other_logits_by_their_rounding(key):
    logits, labels = several(key, 5.0)
    got = log_loss(logits + 1e8, labels)
    np.testing.assert_allclose(got, log_loss(logits, labels), atol=4 * 1e8 * 2.2e-16)


def test_log_loss_has_the_derivative_of_mpmath_late():
    # d log(loss)/d margin = -1, up to e^{-margin}.
    labels = jnp.asarray([0])

    @jax.jit
    @jax.grad
    def slope(margin):
        return loss.log_loss(jnp.asarray([[1.0], [0.0], [0.0]]) * margin, labels)

    for margin in (40.0, 750.0):
        np.testing.assert_allclose(slope(margin), -1, rtol=1e-15)


@pytest.mark.parametrize(
    "x",
    [-1e3, -745.5, -100.0, -30.0, -18.5, -18.000001, -18.0, -17.999999, -17.5]
    + [-10.0, -1.0, -1e-8, 0.0, 1.0, 30.0, 1e3],
)
def test_log_softplus_against_mpmath(x):
    with mp.workdps(500):
        want = float(mp.log(mp.log(1 + mp.e ** mp.mpf(x))))
        slope = float(1 / ((1 + mp.e ** -mp.mpf(x)) * mp.log(1 + mp.e ** mp.mpf(x))))
    got, got_slope = softplus_and_slope(x)
    np.testing.assert_allclose(got, want, rtol=4e-16, atol=4e-16)
    np.testing.assert_allclose(got_slope, slope, rtol=1e-14)


def test_log_softplus_of_minus_infinity():
    assert log_softplus(jnp.asarray(-jnp.inf)) == -jnp.inf


@jax.jit
@jax.value_and_grad
def plain_mse(logits, labels):
    return jnp.sum((jax.nn.one_hot(labels, 3, axis=0) - logits) ** 2) / 2


@jax.jit
@jax.grad
def own_mse_gradient(logits, labels):
    return jnp.exp(ufm.MSE().log_loss(logits, labels))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_squared_error_and_residual_are_the_plain_ones(key, scale):
    logits, labels = several(key, scale)
    scaled, log_scale = mse_residual(logits, labels)
    value, gradient = plain_mse(logits, labels)
    got = math.exp(log_scale) * np.asarray(scaled)
    np.testing.assert_allclose(got, -gradient, rtol=1e-14)
    assert np.max(np.abs(scaled)) == 1
    np.testing.assert_allclose(
        mse_log_loss(logits, labels), math.log(value), rtol=1e-15, atol=1e-15
    )
    np.testing.assert_allclose(own_mse_gradient(logits, labels), gradient, rtol=1e-14)


def test_the_squared_error_is_at_rest_at_its_target():
    labels = jnp.asarray([0, 0, 1, 1, 2, 2])
    target = jnp.asarray(np.repeat(np.eye(3), 2, axis=1))
    scaled, log_scale = mse_residual(target, labels)
    np.testing.assert_array_equal(scaled, 0)
    assert log_scale == -jnp.inf
    assert mse_log_loss(target, labels) == -jnp.inf
    np.testing.assert_array_equal(own_mse_gradient(target, labels), 0)


@pytest.mark.parametrize("size", [1e200, 1e-200])
def test_the_squared_error_neither_overflows_nor_underflows(size):
    labels = jnp.asarray([0, 0, 1, 1, 2, 2])
    target = np.repeat(np.eye(3), 2, axis=1)
    # Off the class entries, where a difference of 1e-200 from the target is a double.
    errors = np.random.default_rng(0).standard_normal((3, 6)) * (1 - target)
    logits = jnp.asarray(target - size * errors)
    scaled, log_scale = mse_residual(logits, labels)
    largest = np.max(np.abs(errors))
    np.testing.assert_allclose(scaled, errors / largest, rtol=5e-16, atol=1e-199)
    np.testing.assert_allclose(log_scale, math.log(size * largest), rtol=5e-16)
    want = 2 * math.log(size) + math.log(np.sum(errors**2) / 2)
    np.testing.assert_allclose(mse_log_loss(logits, labels), want, rtol=5e-16)
