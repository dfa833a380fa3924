import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest

from deepufm.analysis import (
    effective_rank,
    effective_rank_from_log,
    kl_from_uniform,
    log_ratio,
    normalised_modes,
    nuclear_norm,
    numerical_rank,
    reverse_kl_from_uniform,
    singular_values,
    uniform_distance,
)

SCALES = [1e-300, 1e-150, 1.0, 1e150, 1e300]

# P2's counterexamples to monotonicity at K = 8, L = 1, and how fast each metric moves
# along the flow: a, (KL, dKL/dt), (reverse KL, d/dt), (M, dM/dt). Computed with mpmath,
# 60 digits, at exactly these doubles; P2 D.2 prints dM/dt = 7.3e-4 for the first.
P2_VECTORS = [
    (
        [1, 1, 1, 1.25, 0.01, 0.01, 0.01],
        (1.449809575774115588556526, -0.04489112431174316251837154),
        (0.5248483388922432666964721, -0.00007679742702298574872031579),
        (0.05311287323908513528461130, 0.0007330787094099465721615139),
    ),
    (
        [1, 1, 1, 1, 0.001, 0.001, 0.001],
        (2.401600479090324853335323, -0.07645208081469635576536028),
        (0.5536891352859593256741005, -0.0009244282638517143147298933),
        (0.05338423290772169258196070, -0.00003339767006514253020935784),
    ),
    (
        [1.5, 1.5, 1.5, 2, 2**-10, 2**-10, 2**-10],
        (2.624181634872130371143931, -0.01088574669005447276961348),
        (0.5642947197963427272193363, 0.001498621391299236287116115),
        (0.05567579426700476427259765, 0.0004219059410986841862698484),
    ),
    (
        [1, 1, 1, 1.25, 2**-7, 2**-7, 2**-7],
        (1.554072280939142412034695, -0.04556746163417421100180980),
        (0.5321513498920986427695619, 0.0005799427775149934547534282),
        (0.05349247038501038213613704, 0.0007892711419628157024412617),
    ),
]

# The K = 16 vector of P2 B.3.3, where d(log a_1 − log a_2)/dt is printed as 1.8e-13.
P2_LOG_RATIO = [5.01, 0.99, 2, 5, 1, 5, 1, 2, 1, 5, 3, 5, 1, 5, 1]


def flow_in_log(a):
    """du/dt = b/D at L = 1, from the digits that i and j have in common."""
    index = np.arange(1, len(a) + 1)
    psi = 2.0 * (np.bitwise_count(index[:, None] & index[None, :]) % 2)
    e = np.exp(-psi @ a)
    return psi @ e / (1 + np.sum(e))


def every_metric(log_a):
    return jnp.stack(
        [
            kl_from_uniform(log_a),
            reverse_kl_from_uniform(log_a),
            uniform_distance(log_a),
            effective_rank_from_log(log_a),
            log_ratio(log_a),
        ],
        axis=-1,
    )


# Compiled once for each length of log_a; the first three entries are the divergences.
metrics = jax.jit(every_metric)
metric_rates = jax.jit(lambda log_a, rate: jax.jvp(every_metric, (log_a,), (rate,)))
metric_gradients = jax.jit(jax.jacrev(every_metric))
rank_and_gradient = jax.jit(jax.value_and_grad(effective_rank))
jit_normalised_modes = jax.jit(normalised_modes)


def exact_divergences(log_a):
    with mp.workdps(60):
        a = [mp.exp(mp.mpf(float(u))) for u in log_a]
        p = [x / mp.fsum(a) for x in a]
        n = len(p)
        kl = -mp.log(n) - mp.fsum(mp.log(x) for x in p) / n
        reverse = mp.log(n) + mp.fsum(x * mp.log(x) for x in p)
        distance = mp.fsum((x - mp.mpf(1) / n) ** 2 for x in p) / 2
        return kl, reverse, distance


@pytest.mark.parametrize(("a", "kl", "reverse_kl", "m"), P2_VECTORS)
def test_divergences_and_their_rates_agree_with_60_digits(a, kl, reverse_kl, m):
    a = np.array(a, dtype=float)
    values, rates = metric_rates(np.log(a), flow_in_log(a))
    expected = np.array([kl, reverse_kl, m])
    np.testing.assert_allclose(values[:3], expected[:, 0], rtol=1e-15)
    # The rate of the reverse KL loses 3 digits to cancellation, that of M 2 digits; the
    # worst errors seen are 9e-14 (first vector) and 6e-14 (second vector).
    np.testing.assert_allclose(rates[:3], expected[:, 1], rtol=3e-13)


def test_log_ratio_and_its_rate_agree_with_60_digits():
    a = np.array(P2_LOG_RATIO)
    values, rates = metric_rates(np.log(a), flow_in_log(a))
    np.testing.assert_allclose(values[4], np.log(5.01 / 0.99), rtol=1e-15)
    # mpmath, 60 digits
    np.testing.assert_allclose(rates[4], 1.824999973963138428853814e-13, rtol=1e-14)


@pytest.mark.parametrize("shape", ["one low", "one high", "normal"])
@pytest.mark.parametrize("offset", [0.0, -700.0, 1e5])
def test_divergences_keep_relative_accuracy_from_uniform_to_extreme(shape, offset):
    # Spreads of log a from 1e-11 (KL ~ 1e-22) to 1e3, seen at a scale of e^±(large).
    for spread in 10.0 ** np.arange(-11, 4, 2):
        low = np.where(np.arange(7) == 4, -1.0, 0.0)
        normal = np.random.default_rng(3).standard_normal(7)
        pattern = {"one low": low, "one high": -low, "normal": normal}[shape]
        log_a = offset + spread * pattern
        if np.ptp(log_a) == 0:  # the spread is below the rounding of the offset
            continue
        values = metrics(log_a)[:3]
        for value, exact in zip(values, exact_divergences(log_a), strict=True):
            assert abs(float(value) / exact - 1) < 5e-15


def test_divergences_keep_relative_accuracy_with_many_modes():
    log_a = 1e-9 * np.random.default_rng(0).standard_normal(255)
    values = metrics(log_a)[:3]
    for value, exact in zip(values, exact_divergences(log_a), strict=True):
        assert abs(float(value) / exact - 1) < 5e-15


def test_equal_modes_are_at_distance_zero():
    kl, reverse_kl, distance, rank, ratio = metrics(np.full(7, 0.3))
    assert (kl, reverse_kl, distance, ratio) == (0, 0, 0, 0)
    np.testing.assert_allclose(rank, 7, rtol=1e-15)


def test_gradients_agree_with_closed_forms():
    log_a = np.array([0.3, -1.0, 0.2, 0.0, -4.0, 1.0, -0.1])
    p = np.exp(log_a) / np.sum(np.exp(log_a))
    entropy = -np.sum(p * np.log(p))
    expected = [
        p - 1 / 7,
        p * (np.log(p) + entropy),
        p**2 - p * np.sum(p**2),
        -np.exp(entropy) * p * (np.log(p) + entropy),
        [0, 0, 0, 0, -1, 1, 0],
    ]
    np.testing.assert_allclose(
        metric_gradients(log_a), expected, rtol=1e-12, atol=1e-15
    )


def test_dead_modes_leave_values_defined_and_gradients_finite():
    log_a = np.array([0.5, -np.inf, 0.0, -np.inf, -2.0, 0.1, -np.inf])
    p = np.exp(log_a) / np.sum(np.exp(log_a))
    alive = p[p > 0]
    kl, reverse_kl, distance, rank, ratio = metrics(log_a)
    assert kl == jnp.inf
    assert ratio == jnp.inf
    expected = np.log(7) + np.sum(alive * np.log(alive))
    np.testing.assert_allclose(reverse_kl, expected, rtol=1e-14)
    np.testing.assert_allclose(distance, np.sum((p - 1 / 7) ** 2) / 2, rtol=1e-14)
    np.testing.assert_allclose(jit_normalised_modes(log_a), p, rtol=1e-15)
    expected = np.exp(-np.sum(alive * np.log(alive)))
    np.testing.assert_allclose(rank, expected, rtol=1e-14)
    rank, gradient = rank_and_gradient(np.exp(log_a))
    np.testing.assert_allclose(rank, expected, rtol=1e-14)
    assert np.all(np.isfinite(gradient))
    assert np.all(np.isfinite(metric_gradients(log_a)))


def test_vector_of_zeros_gives_the_documented_values():
    dead = np.full(7, -np.inf)
    assert metrics(dead).tolist() == [np.inf, 1, 1 / 14, 0, np.inf]
    assert np.all(np.isfinite(metric_gradients(dead)))
    assert np.all(jit_normalised_modes(dead) == 0)
    rank, gradient = rank_and_gradient(np.zeros(7))
    assert rank == 0
    assert np.all(np.isfinite(gradient))


def test_nan_is_not_hidden():
    log_a = np.array([0.0, np.nan, 1.0, 0.0, 0.0, 0.0, -np.inf])
    assert np.all(np.isnan(metrics(log_a)[1:4]))
    assert np.all(np.isnan(metrics(np.where(log_a < 0, 0, log_a))))
    assert np.isnan(rank_and_gradient(log_a)[0])


@pytest.mark.parametrize("scale", SCALES)
def test_effective_rank_and_its_gradient_ignore_scale(scale):
    values = np.array([3.0, 1.0, 0.25, 1e-3, 0.5, 2.0, 1e-6])
    p = values / values.sum()
    entropy = -np.sum(p * np.log(p))
    rank, gradient = rank_and_gradient(scale * values)
    np.testing.assert_allclose(rank, np.exp(entropy), rtol=1e-14)
    expected = -np.exp(entropy) * (np.log(p) + entropy) / values.sum()
    np.testing.assert_allclose(gradient * scale, expected, rtol=1e-12)


@pytest.mark.parametrize("alive", [1, 4, 7])
def test_effective_rank_of_equal_values_counts_them(alive):
    values = np.where(np.arange(7) < alive, 0.7, 0.0)
    np.testing.assert_allclose(rank_and_gradient(values)[0], alive, rtol=1e-14)
    log_a = np.where(np.arange(7) < alive, 1e6, -np.inf)
    np.testing.assert_allclose(metrics(log_a)[3], alive, rtol=1e-14)


def test_numerical_rank_counts_values_above_the_tolerance():
    values = jnp.array([[4.0, 1e-3, 1.0], [1e-305, 2e-305, 1e-307], [0.0, 0.0, 0.0]])
    assert numerical_rank(values, 1e-2).tolist() == [2, 2, 0]
    assert numerical_rank(values, 1e-5).tolist() == [3, 3, 0]


def test_singular_values_are_those_the_matrix_was_built_from():
    rng = np.random.default_rng(5)
    left = np.linalg.qr(rng.standard_normal((6, 4)))[0]
    right = np.linalg.qr(rng.standard_normal((9, 4)))[0]
    values = np.array([3.0, 1.0, 0.5, 0.2])
    matrices = left * values @ right.T * np.reshape(SCALES, (-1, 1, 1))
    found = jax.jit(singular_values)(matrices) / np.reshape(SCALES, (-1, 1))
    expected = np.append(values, [0, 0])
    np.testing.assert_allclose(
        found, np.broadcast_to(expected, (5, 6)), rtol=0, atol=5e-15
    )
    norm_and_gradient = jax.jit(jax.value_and_grad(nuclear_norm))
    for scale, matrix in zip(SCALES, matrices, strict=True):
        norm, gradient = norm_and_gradient(matrix)
        np.testing.assert_allclose(norm / scale, 4.7, rtol=1e-14)
        # The gradient is UVᵀ plus something on the null spaces.
        np.testing.assert_allclose(
            left.T @ gradient @ right, np.eye(4), rtol=0, atol=1e-13
        )


def test_leading_axes_are_a_batch():
    log_a = np.log(np.array([row[0] for row in P2_VECTORS], dtype=float))
    stacked = np.stack([log_a, 2 * log_a])
    batch = metrics(stacked)
    shares = jit_normalised_modes(stacked)
    for index in np.ndindex(2, 4):
        np.testing.assert_allclose(batch[index], metrics(stacked[index]), rtol=1e-15)
        expected = np.exp(stacked[index]) / np.sum(np.exp(stacked[index]))
        np.testing.assert_allclose(shares[index], expected, rtol=1e-15)


def test_float32_stays_float32_and_keeps_relative_accuracy():
    log_a = np.array([0, 1e-3, -1e-3, 5e-4, 0, -2e-3, 1e-4], dtype=np.float32)
    values = metrics(log_a)
    assert values.dtype == jnp.float32
    assert rank_and_gradient(np.exp(log_a))[0].dtype == jnp.float32
    for value, exact in zip(values[:3], exact_divergences(log_a), strict=True):
        assert abs(float(value) / exact - 1) < 2e-6
