"""Rates of the reduced flows against mpmath, and what they do at zeros."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import (
    P2_DISTANCE_RATE,
    P2_LOG_RATIO,
    P2_LOG_RATIO_RATE,
    P2_RISING_DISTANCE,
    mp_log_rates,
    rates,
)

import deepufm as ufm
from deepufm.dynamics._hadamard_flow import _log_b

# Every logarithm below is a sum of a few numbers at most its own size, or of size one.
ROUNDING = 4e-15

cases = pytest.mark.parametrize("case", rates(), ids=lambda case: case["name"])


@eqx.filter_jit
def everything(flow, log_a):
    direction, log_speed = flow(log_a)
    return flow.log_rates(log_a), direction, log_speed, flow.log_loss(log_a)


@eqx.filter_jit
def velocity(flow, log_a, log_rate):
    return flow.velocity(log_a, log_rate)


@eqx.filter_jit
def partition(a):
    return _log_b(a)


@eqx.filter_jit
def logit_everything(flow, a):
    direction, log_speed = flow(a)
    return direction, log_speed, flow.log_loss(a)


def flow_and_state(case, depth):
    a = np.asarray(case["a"])
    return ufm.HadamardFlow(len(a) + 1, depth), jnp.log(jnp.asarray(a))


def assert_logs_agree(got, want, tolerance=ROUNDING):
    want = np.asarray(want)
    error = np.abs(np.asarray(got) - want) / np.maximum(1, np.abs(want))
    assert np.max(error) < tolerance


@cases
@pytest.mark.parametrize("depth", [1, 2, 3, 8])
def test_log_rates_have_full_relative_accuracy(case, depth):
    flow, log_a = flow_and_state(case, float(depth))
    log_rates, _, _, log_loss = everything(flow, log_a)
    assert_logs_agree(log_rates + log_a, case["log_dadt"][str(depth)])
    assert_logs_agree(log_loss, case["log_log_d"])


@cases
@pytest.mark.parametrize("depth", [1, 8])
def test_direction_and_speed_give_the_rate_of_every_mode_that_is_not_negligible(
    case, depth
):
    flow, log_a = flow_and_state(case, float(depth))
    _, direction, log_speed, _ = everything(flow, log_a)
    want = np.asarray(case["log_dadt"][str(depth)]) - np.asarray(log_a)
    seen = np.asarray(direction) > 1e-290
    # The oracle gives log da/dt; taking log a off it leaves a rounding of log a.
    tolerance = ROUNDING + np.finfo(float).eps * np.max(np.abs(log_a))
    assert_logs_agree(jnp.log(direction[seen]) + log_speed, want[seen], tolerance)
    # What the direction drops is e^{-660} of the largest rate or less.
    assert np.all(want[~seen] < np.max(want) - 660)
    assert 1e-3 < np.max(np.asarray(direction)) <= len(direction) + 1


@cases
@pytest.mark.parametrize("depth", [1, 8])
def test_velocity_is_the_rate_times_that_of_the_clock(case, depth):
    """For clocks as fast as the flow is slow, e^{-2000} a unit of time and less."""
    flow, log_a = flow_and_state(case, float(depth))
    rates = np.asarray(case["log_dadt"][str(depth)]) - np.asarray(log_a)
    # Within half a unit of the fastest; what is left over is what must be seen.
    log_rate = 0.5 - np.max(rates)
    got = np.asarray(velocity(flow, log_a, jnp.asarray(log_rate)))
    seen = got > 1e-290
    size = np.finfo(float).eps * (np.max(np.abs(log_a)) + 4 * abs(log_rate))
    want = rates[seen] + log_rate
    assert_logs_agree(np.log(got[seen]), want, ROUNDING + size)
    assert np.all(rates[~seen] < np.max(rates) - 660)


@pytest.mark.parametrize("depth", [1.0, 3.0])
def test_dead_modes_have_no_velocity(depth):
    log_a = jnp.asarray([0.0, -jnp.inf, -1.0])
    got = velocity(ufm.HadamardFlow(4, depth), log_a, jnp.asarray(300.0))
    assert got[1] == 0
    assert np.all(np.asarray(got)[[0, 2]] > 0)
    assert np.all(np.isfinite(got))


@cases
def test_logit_flow_gives_b_over_d(case):
    a = jnp.asarray(case["a"])
    direction, log_speed, log_loss = logit_everything(ufm.LogitFlow(a.shape[0] + 1), a)
    want = np.asarray(case["log_dadt"]["0"])
    seen = np.asarray(direction) > 1e-290
    assert_logs_agree(jnp.log(direction[seen]) + log_speed, want[seen])
    assert np.all(want[~seen] < np.max(want) - 660)
    assert_logs_agree(log_loss, case["log_log_d"])


@cases
def test_log_b_and_log_d(case):
    log_b, log_d = partition(jnp.asarray(case["a"]))
    assert_logs_agree(log_b, case["log_b"])
    # log D itself is below the smallest double for the largest norms.
    want = math.exp(case["log_log_d"])
    np.testing.assert_allclose(log_d, want, rtol=1e-12, atol=1e-323)


@pytest.mark.parametrize("depth", [1.5, math.inf])
@pytest.mark.parametrize("name", ["K8_moderate", "K8_norm_1e4", "K16_spread_1e3"])
def test_depth_is_any_real_number_or_infinite(name, depth):
    case = next(case for case in rates() if case["name"] == name)
    flow, log_a = flow_and_state(case, depth)
    log_rates, _, _, _ = everything(flow, log_a)
    assert_logs_agree(log_rates, mp_log_rates(case["a"], depth))


def test_depth_may_be_traced_and_vmapped():
    log_a = jnp.log(jnp.asarray([0.3, 0.1, 0.7]))
    depths = [1.0, 1.5, 4.0, math.inf]

    def log_rates(depth):
        return ufm.HadamardFlow(4, depth).log_rates(log_a)

    got = jax.jit(jax.vmap(log_rates))(jnp.asarray(depths))
    for row, depth in zip(got, depths):
        assert_logs_agree(row, mp_log_rates(jnp.exp(log_a), depth))


def test_rate_of_p2_log_ratio_survives_the_difference():
    # Both rates are sums of e^{-29} and less; naive 1 - p loses all digits.
    log_a = jnp.log(jnp.asarray(P2_LOG_RATIO))
    _, direction, log_speed, _ = everything(ufm.HadamardFlow(16, 1.0), log_a)
    rate = (direction[0] - direction[1]) * jnp.exp(log_speed)
    np.testing.assert_allclose(rate, P2_LOG_RATIO_RATE, rtol=1e-13)


def test_rate_of_p2_uniform_distance_is_positive():
    log_a = jnp.log(jnp.asarray(P2_RISING_DISTANCE))
    _, direction, log_speed, _ = everything(ufm.HadamardFlow(8, 1.0), log_a)
    _, rate = jax.jvp(ufm.uniform_distance, (log_a,), (direction * jnp.exp(log_speed),))
    np.testing.assert_allclose(rate, P2_DISTANCE_RATE, rtol=1e-13)


@pytest.mark.parametrize("depth", [1.0, 2.0, math.inf])
def test_zero_modes_stay_and_leave_the_others_exact(depth):
    flow = ufm.HadamardFlow(4, depth)
    alive = jnp.asarray([0.5, 0.25])
    log_a = jnp.append(jnp.log(alive), -jnp.inf)
    log_rates, direction, log_speed, _ = everything(flow, log_a)
    assert direction[2] == 0
    assert log_rates[2] == -jnp.inf
    # mpmath's log 0 is -inf: give the dead mode a value that adds nothing.
    want = mp_log_rates([0.5, 0.25, 1e-300], depth)[:2]
    assert_logs_agree(log_rates[:2], want)
    assert_logs_agree(jnp.log(direction[:2]) + log_speed, want)


@pytest.mark.parametrize("depth", [1.0, 3.0])
def test_zero_modes_have_finite_derivatives(depth):
    log_a = jnp.log(jnp.asarray([0.5, 0.25]))

    @jax.jit
    def rate(alive, depth):
        state = jnp.append(alive, -jnp.inf)
        direction, log_speed = ufm.HadamardFlow(4, depth)(state)
        return direction * jnp.exp(log_speed)

    jacobian, by_depth = jax.jit(jax.jacrev(rate, argnums=(0, 1)))(log_a, depth)
    step = 1e-6
    for column in range(2):
        shift = step * np.eye(2)[column]
        slope = (rate(log_a + shift, depth) - rate(log_a - shift, depth)) / (2 * step)
        np.testing.assert_allclose(jacobian[:, column], slope, rtol=1e-8, atol=1e-9)
    ahead = rate(log_a, depth + step) - rate(log_a, depth)
    np.testing.assert_allclose(by_depth, ahead / step, rtol=1e-5, atol=1e-9)


def test_no_mode_alive_is_an_equilibrium():
    direction, log_speed = ufm.HadamardFlow(4, 2.0)(jnp.full(3, -jnp.inf))
    np.testing.assert_array_equal(direction, 0)
    assert log_speed == -jnp.inf


def test_norm_growth_and_length_are_those_of_the_rates():
    a, rate = np.array([0.5, 2.0, 0.125]), np.array([0.3, 0.2, 0.9])
    flow = ufm.HadamardFlow(4, 2.0)
    log_a, direction = jnp.log(a), jnp.asarray(rate)
    assert flow.log_norm(log_a) == pytest.approx(math.log(a.sum()), rel=1e-15)
    growth = flow.log_growth(log_a, direction)
    assert growth == pytest.approx(math.log((a * rate).sum() / a.sum()), rel=1e-14)
    length = flow.log_length(log_a, direction)
    assert length == pytest.approx(math.log(np.linalg.norm(a * rate)), rel=1e-14)


def test_norm_growth_and_length_of_logits_of_either_sign():
    a, rate = np.array([0.5, -2.0, 0.0]), np.array([0.3, -0.2, 0.9])
    flow = ufm.LogitFlow(4)
    state, direction = jnp.asarray(a), jnp.asarray(rate)
    assert flow.log_norm(state) == pytest.approx(math.log(2.5), rel=1e-15)
    growth = flow.log_growth(state, direction)
    assert growth == pytest.approx(math.log((0.3 + 0.2) / 2.5), rel=1e-14)
    length = flow.log_length(state, direction)
    assert length == pytest.approx(math.log(np.linalg.norm(rate)), rel=1e-14)


BAD_FLOWS = [
    (lambda: ufm.HadamardFlow(6, 2.0), "power of two.*is 6.*GradientFlow"),
    (lambda: ufm.HadamardFlow(1, 2.0), "power of two.*is 1"),
    (lambda: ufm.LogitFlow(12), "power of two.*is 12"),
    (lambda: ufm.HadamardFlow(4, 0.5), "`depth` must be at least 1.*0.5.*LogitFlow"),
    (lambda: ufm.HadamardFlow(4, math.nan), "`depth` must be at least 1.*nan"),
    (
        lambda: ufm.log_modes(jnp.asarray([1.0, -0.5])),
        "at least 0, but entry 1 is -0.5",
    ),
    (lambda: ufm.log_modes(jnp.asarray([math.nan, 1.0])), "finite.*entry 0 is nan"),
]


@pytest.mark.parametrize(("build", "message"), BAD_FLOWS)
def test_bad_flow_is_refused(build, message):
    with pytest.raises(ValueError, match=message) as error:
        build()
    assert "\n" not in str(error.value)


def test_log_modes_takes_zeros():
    np.testing.assert_array_equal(
        ufm.log_modes(jnp.asarray([1.0, 0.0])), [0.0, -math.inf]
    )
