"""The linearised regime against mpmath, closed forms and the full reduced flow."""

import math

import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest

from deepufm.stability._linearised import (
    compare_with_linearised,
    linearised_exit,
    ratio_growth,
    rich_get_richer_exponent,
)

RNG = np.random.default_rng(0)
DIRECTION = RNG.uniform(0.9, 1.0, 7)
DEPTHS = [1.0, 1.0 + 1e-9, 2.0, 5.0, math.inf]

growths = jax.jit(jax.vmap(ratio_growth, in_axes=(None, 0)))


def mp_power(depth):
    return mp.mpf(1) if math.isinf(depth) else (mp.mpf(depth) - 1) / (mp.mpf(depth) + 1)


def mp_growth(log_a, power):
    a = [mp.exp(mp.mpf(float(u))) for u in log_a]
    rates = [x**power * (1 - x) for x in a]
    return [[x - y for y in rates] for x in rates]


def mp_time(start, end, power):
    """∫ da/(a^{1+p} (1-a)) in log a."""
    points = mp.linspace(start, end, 12)
    return mp.quad(lambda u: mp.exp(-power * u) / (1 - mp.exp(u)), points)


@pytest.mark.parametrize(
    "log_a",
    [
        np.log(0.05) + 1e-15 * np.arange(7) * 8,
        np.log(0.1 * DIRECTION),
        np.log(1e-200 * DIRECTION),
        np.array([-0.1, -2.0, -40.0, -300.0, -300.0 - 1e-12, -1000.0, -2000.0]),
        -5000.0 + np.log(DIRECTION),
    ],
    ids=["nearly equal", "moderate", "tiny", "spread", "below the smallest double"],
)
def test_growth_of_ratios_has_full_relative_accuracy(log_a):
    """Where p and a are of one size the two differences compete; here they do not."""
    scaled, log_speed = growths(jnp.asarray(log_a), jnp.asarray(DEPTHS))
    scaled = np.asarray(scaled)
    assert np.all(np.isfinite(log_speed))
    for row, log_unit, depth in zip(scaled, log_speed, DEPTHS):
        np.testing.assert_array_equal(row, -row.T)
        with mp.workdps(4000 if log_a[0] < -4000 else 900):
            exact = mp_growth(log_a, mp_power(depth))
            unit = mp.exp(mp.mpf(float(log_unit)))
            want = np.array([[float(x / unit) for x in line] for line in exact])
        seen = np.abs(want) > 1e-290
        # The unit is a logarithm, and rounds like one.
        tolerance = 4e-14 + 3e-16 * (abs(float(log_unit)) + np.max(np.abs(log_a)))
        np.testing.assert_allclose(row[seen], want[seen], rtol=tolerance)
        assert np.all(np.abs(row[~seen]) < 1e-289)


def test_at_depth_one_modes_approach_each_other_and_at_more_the_rich_get_richer():
    """P1 Thm 4.4."""
    a = 1e-3 * DIRECTION
    scaled, log_speed = growths(jnp.log(jnp.asarray(a)), jnp.asarray(DEPTHS))
    difference = a[:, None] - a[None, :]
    got = np.asarray(scaled[0]) * np.exp(float(log_speed[0]))
    # a_i/a_j is only as good as the logarithms that stand for it.
    np.testing.assert_allclose(got, -difference, atol=1e-18, rtol=1e-13)
    for row in np.asarray(scaled[2:]):
        np.testing.assert_array_equal(np.sign(row), np.sign(difference))


def test_the_exponent_is_that_of_small_differences():
    for mode in (1e-6, 0.1, 0.3):
        log_a = math.log(mode) + 1e-10 * np.arange(2)
        scaled, log_speed = growths(jnp.asarray(log_a), jnp.asarray([1.0, 2.0, 5.0]))
        for row, log_unit, depth in zip(scaled, log_speed, (1.0, 2.0, 5.0)):
            power = (depth - 1) / (depth + 1)
            by_time = float(row[1, 0]) * math.exp(log_unit) / (log_a[1] - log_a[0])
            by_norm = by_time / (mode**power * (1 - mode))
            want = rich_get_richer_exponent(depth, mode)
            np.testing.assert_allclose(by_norm, want, rtol=1e-8)
    assert rich_get_richer_exponent(1) == 0
    assert rich_get_richer_exponent(math.inf) == 1


@pytest.mark.parametrize("depth", [1, 2, 9])
@pytest.mark.parametrize("size", [1e-2, 1e-30])
def test_every_mode_has_had_the_same_time_at_the_exit(depth, size):
    log_a0 = np.log(size * np.linspace(0.5, 1, 7) / 7)
    found = linearised_exit(log_a0, depth, 0.2)
    np.testing.assert_allclose(np.sum(np.exp(found.log_a)), 0.2, rtol=1e-14)
    with mp.workdps(25):
        for start, end in zip(log_a0[::3], found.log_a[::3]):
            start, end = mp.mpf(float(start)), mp.mpf(float(end))
            spent = mp_time(start, end, mp_power(depth))
            assert abs(float(mp.log(spent)) - found.log_time) < 1e-13 * abs(
                found.log_time
            ) + 3e-16 * abs(float(start))


def test_two_modes_at_depth_one_leave_as_logistic_curves():
    """a/(1-a) grows like e^t, whatever the start: 1e-300 here."""
    log_a0 = np.array([-690.0, -691.0, -np.inf])
    found = linearised_exit(log_a0, 1, 0.1)
    log_odds = found.log_a - np.log1p(-np.exp(found.log_a))
    np.testing.assert_allclose(log_odds[0] - log_odds[1], 1.0, rtol=1e-13)
    np.testing.assert_allclose(found.log_time, np.log(log_odds[0] + 690), rtol=1e-15)
    assert found.log_a[2] == -np.inf


def test_a_start_of_e_to_minus_5000_leaves_with_one_mode():
    """t ~ a(0)^{-p}/p: no time tells the escape apart; a_i^{-p} keeps its gaps."""
    log_a0 = -5000 + np.log(np.linspace(0.5, 1, 7))
    found = linearised_exit(log_a0, 2, 0.1)
    np.testing.assert_allclose(found.log_time, 5000 / 3 + np.log(3), rtol=1e-15)
    np.testing.assert_allclose(found.log_a[-1], np.log(0.1), rtol=1e-15)
    # a_i^{-p} = a_i(0)^{-p} - a_7(0)^{-p}, in units of e^{5000 p}.
    want = -5000 - 3 * np.log(np.linspace(0.5, 1, 7)[:-1] ** (-1 / 3) - 1)
    np.testing.assert_allclose(found.log_a[:-1], want, rtol=2e-14)
    assert found.effective_rank == 1


def test_equal_modes_stay_equal_and_near_ones_ordered():
    found = linearised_exit(np.array([-8.0, -8.0, -8.0 - 1e-14]), 3, 0.3)
    assert found.log_a[0] == found.log_a[1] >= found.log_a[2]
    np.testing.assert_allclose(np.exp(found.log_a), 0.1, rtol=1e-12)


def test_the_full_flow_departs_at_second_order():
    """Ratios by N², times a spread that itself grows like N^p; times by N^{2-p}."""
    norms = np.array([0.02, 0.04, 0.08, 0.16])
    for depth in (1.0, 2.0):
        power = (depth - 1) / (depth + 1)
        log_a0 = np.log(1e-3 * DIRECTION / np.sum(DIRECTION))
        found = compare_with_linearised(8, log_a0, depth, norms)
        slopes = np.diff(np.log2(found.ratio_errors))
        np.testing.assert_allclose(slopes, 2 + power, atol=0.05)
        absolute = found.time_errors * np.exp(found.predicted_log_time)
        slopes = np.diff(np.log2(absolute))
        np.testing.assert_allclose(slopes, 2 - power, atol=0.2)
        assert found.ratio_errors[-1] < 2e-4
        assert found.time_errors[-1] < 2e-4
        np.testing.assert_allclose(
            found.effective_ranks, found.predicted_effective_ranks, rtol=1e-4
        )
        np.testing.assert_allclose(np.sum(np.exp(found.log_a), 1), norms, rtol=1e-9)


def test_from_a_tiny_start_the_rank_at_the_exit_is_predicted():
    """By then one mode of seven is left (P1 section 4.3)."""
    log_a0 = np.log(1e-100 * np.linspace(0.5, 1, 7))
    found = compare_with_linearised(8, log_a0, 2.0, [0.02, 0.04, 0.08, 0.16])
    assert np.all(found.ratio_errors < 1e-8)
    assert np.all(found.time_errors < 1e-8)
    np.testing.assert_allclose(found.effective_ranks, 1, rtol=1e-12)
    assert found.log_time[0] > 70


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(
    ("log_a0", "depth", "norm"),
    [
        ([-5.0, 0.1], 2, 0.5),
        ([-np.inf, -np.inf], 2, 0.5),
        ([-5.0, -5.0], 0.5, 0.5),
        ([-5.0, -5.0], 2, 1.0),
        ([-1.0, -1.0], 2, 0.5),
    ],
)
def test_misuse_is_refused(log_a0, depth, norm):
    with pytest.raises(ValueError, match="must"):
        linearised_exit(np.array(log_a0), depth, norm)
    with pytest.raises(ValueError, match="must"):
        compare_with_linearised(4, np.array([*log_a0, -5.0]), 2, [0.5, 0.4])
