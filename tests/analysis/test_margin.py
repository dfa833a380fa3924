import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest

from deepufm.analysis import (
    logit_margin,
    logit_margin_from_log,
    margins,
    parameter_margin,
    smoothed_parameter_margin,
)

SCALES = [1e-300, 1e-150, 1.0, 1e150, 1e300]

# Compiled once for each shape.
jit_margins = jax.jit(margins)
margin_and_gradient = jax.jit(jax.value_and_grad(logit_margin))
log_margin_and_gradient = jax.jit(jax.value_and_grad(logit_margin_from_log))
jit_parameter_margin = jax.jit(parameter_margin)
smoothed_and_gradients = jax.jit(jax.value_and_grad(smoothed_parameter_margin, (0, 1)))


@pytest.fixture(scope="module")
def logits():
    """K = 4 classes, 3 examples each."""
    return np.random.default_rng(0).standard_normal((4, 12))


@pytest.fixture(scope="module")
def labels():
    return np.array([0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3])


def margins_by_hand(logits, labels):
    columns = zip(logits.T, labels, strict=True)
    return [z[y] - max(np.delete(z, y)) for z, y in columns]


def test_margins_are_gaps_to_the_best_other_class(logits, labels):
    expected = margins_by_hand(logits, labels)
    assert min(expected) < 0 < max(expected)
    assert jit_margins(logits, labels).tolist() == expected
    shuffled = np.random.default_rng(1).permutation(labels)
    expected = margins_by_hand(logits, shuffled)
    assert jit_margins(logits, shuffled).tolist() == expected


def test_a_tie_has_margin_zero_and_a_label_that_is_no_class_nan(logits, labels):
    tied = logits.copy()
    tied[1, 0] = tied[0, 0] = 9.0
    assert jit_margins(tied, labels)[0] == 0
    found = jit_margins(logits, np.where(labels == 2, 4, labels))
    assert np.isnan(found).tolist() == [6 <= k < 9 for k in range(12)]


def test_one_class_has_no_margins():
    with pytest.raises(ValueError, match="at least two rows"):
        margins(jnp.ones((1, 3)), jnp.zeros(3, dtype=int))


@pytest.mark.parametrize("scale", SCALES)
def test_logit_margin_and_its_gradient_ignore_scale(logits, labels, scale):
    value, gradient = margin_and_gradient(logits * scale, labels)
    norm = np.linalg.norm(logits)
    every = margins_by_hand(logits, labels)
    worst, k = min(every), int(np.argmin(every))
    np.testing.assert_allclose(value, worst / norm, rtol=1e-13)
    expected = -logits * worst / norm**3
    rivals = np.where(np.arange(4) == labels[k], -np.inf, logits[:, k])
    expected[labels[k], k] += 1 / norm
    expected[np.argmax(rivals), k] -= 1 / norm
    np.testing.assert_allclose(gradient * scale, expected, rtol=1e-11, atol=1e-15)


def test_logit_margin_of_zero_and_of_nan(labels):
    value, gradient = margin_and_gradient(np.zeros((4, 12)), labels)
    assert value == 0
    assert np.all(np.isfinite(gradient))
    spoilt = np.ones((4, 12))
    spoilt[2, 5] = np.nan
    assert np.isnan(margin_and_gradient(spoilt, labels)[0])


def test_logit_margin_of_the_simplex(labels):
    # I − 11ᵀ/K, n times: gaps 1, norm √(n(K−1)).
    simplex = np.kron(np.eye(4) - 1 / 4, np.ones((1, 3)))
    value, _ = margin_and_gradient(simplex, labels)
    np.testing.assert_allclose(value, 1 / 9**0.5, rtol=1e-14)


@pytest.mark.parametrize("offset", [0.0, -2000.0, 2000.0])
def test_log_margin_is_that_of_the_explicit_hadamard_logits(offset):
    index = np.arange(8)
    phi = 1.0 - 2.0 * (np.bitwise_count(index[:, None] & index[None, :]) % 2)
    for a in ([3, 1, 0.5, 2, 0.1, 1.5, 0.7], [1, 0, 0, 2, 0, 0, 0.5]):
        logits = phi @ np.diag([0.0, *a]) @ phi.T
        expected = min(margins_by_hand(logits, index)) / np.linalg.norm(logits)
        with np.errstate(divide="ignore"):
            log_a = np.log(np.array(a, dtype=float)) + offset
        value, gradient = log_margin_and_gradient(log_a)
        # An offset of 2000 alone costs log a 2e-13.
        np.testing.assert_allclose(value, expected, rtol=1e-12, atol=1e-15)
        assert np.all(np.isfinite(gradient))
        np.testing.assert_allclose(np.sum(gradient), 0, atol=1e-15)


def test_log_margin_of_equal_and_of_dead_modes():
    value, gradient = log_margin_and_gradient(np.full(7, -3.0))
    np.testing.assert_allclose(value, 1 / 7**0.5, rtol=1e-15)
    value, gradient = log_margin_and_gradient(np.full(7, -np.inf))
    assert value == 0
    assert np.all(np.isfinite(gradient))


def test_parameter_margin_divides_by_the_norm_to_the_number_of_layers():
    for depth in (1, 3, 2.5):
        for log_norm in (-0.7, 0.0, 4.0):
            found = jit_parameter_margin(1.7, log_norm, depth)
            expected = 1.7 / np.exp(log_norm) ** (depth + 1)
            np.testing.assert_allclose(found, expected, rtol=1e-14)
    # ‖θ‖^{L+1} = e^1200 has no double; 1e-260·e^1200 has.
    with mp.workdps(40):
        expected = float(mp.mpf(1e-260) * mp.exp(1200))
    np.testing.assert_allclose(
        jit_parameter_margin(1e-260, -300.0, 3), expected, rtol=1e-12
    )


def test_parameter_margin_of_zero_parameters_is_zero():
    assert jit_parameter_margin(0.0, -np.inf, 2) == 0


def test_depth_may_be_mapped_over():
    depths = jnp.array([1, 2, 7])
    by_depth = jax.jit(jax.vmap(parameter_margin, (None, None, 0)))
    np.testing.assert_allclose(
        by_depth(3.0, 0.5, depths), 3 * np.exp(-0.5 * np.array([2, 3, 8])), rtol=1e-14
    )


@pytest.mark.parametrize(
    "log_loss", [-1e6, -800.0, -700.0, -36.0, -1.0, -0.36, -1e-9, 0.0, 1e-9, 3.0, 5.0]
)
def test_smoothed_margin_agrees_with_40_digits_at_any_loss(log_loss):
    value, gradients = smoothed_and_gradients(log_loss, 0.25, 2)
    with mp.workdps(40):
        loss = mp.exp(mp.mpf(log_loss))
        shrink = mp.exp(mp.mpf(-0.75))
        exact = -mp.log(mp.expm1(loss)) * shrink
        slopes = -loss * mp.exp(loss) / mp.expm1(loss) * shrink, -3 * exact
    np.testing.assert_allclose(value, float(exact), rtol=1e-14)
    np.testing.assert_allclose(gradients, [float(x) for x in slopes], rtol=1e-14)


def test_smoothed_margin_is_positive_exactly_below_loss_log_2():
    for shift in (-1e-6, 1e-6):
        log_loss = np.log(np.log(2)) + shift
        value = smoothed_and_gradients(log_loss, 0.1, 1)[0]
        assert np.sign(value) == -np.sign(shift)


def log_cross_entropy(logits, labels):
    with mp.workdps(60):
        loss = mp.mpf(0)
        for z, y in zip(logits.T, labels, strict=True):
            gaps = [mp.mpf(float(x)) - mp.mpf(float(z[y])) for x in np.delete(z, y)]
            loss += mp.log1p(mp.fsum(mp.exp(gap) for gap in gaps))
        return float(mp.log(loss))


def test_smoothed_margin_is_below_the_margin_and_tends_to_it(labels):
    target = np.kron(np.eye(4), np.ones((1, 3)))
    logits = target + 0.1 * np.random.default_rng(5).standard_normal((4, 12))
    gaps = []
    for size in (1.0, 3.0, 10.0, 30.0):
        hard = min(margins_by_hand(size * logits, labels))
        log_loss = log_cross_entropy(size * logits, labels)
        smooth = smoothed_and_gradients(log_loss, 0.0, 1)[0]
        assert smooth < hard
        gaps.append((hard - smooth) / hard)
    assert np.all(np.diff(gaps) < 0)
    assert gaps[-1] < 0.02


def test_smoothed_margin_of_one_binary_example_is_its_margin():
    # Two classes, logits (q, 0), q = ‖θ‖²/2: on this balanced ray the flow keeps the
    # normalised margin at ½, and so must a monotone lower bound of it. −log(loss) would
    # exceed the margin here and fall along the flow.
    for q in (0.5, 2.0, 30.0, 1e4):
        log_loss = log_cross_entropy(np.array([[q], [0.0]]), [0])
        log_norm = 0.5 * np.log(2 * q)
        smooth = smoothed_and_gradients(log_loss, log_norm, 1)[0]
        np.testing.assert_allclose(smooth, 0.5, rtol=1e-13)
