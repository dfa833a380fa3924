"""Lyapunov functions along orbits, and the regions in which theorems say they fall."""

import dataclasses
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepufm as ufm
from deepufm.stability._lyapunov_functions import (
    KLDivergence,
    LogLoss,
    LogRatio,
    UniformDistance,
)
from deepufm.stability._monotonicity import (
    collapse_basin_bound,
    log_ratio_threshold,
    monotone_along,
    ratio_threshold,
)

START = ufm.log_modes(ufm.alternating_modes(16, 0.2, 0.1))


def solved(depth):
    flow = ufm.HadamardFlow(16, depth)
    return flow, ufm.solve(flow, START, stop=ufm.FinalTime(1e6), saves=40)


@pytest.fixture(scope="module")
def deep():
    return solved(2.0)


@pytest.fixture(scope="module")
def shallow():
    return solved(1.0)


@eqx.filter_jit
def rates(function, log_a, depths):
    """dV/d log N, and whether its sign is certain, for rows of log a and depths."""

    def one(u, depth):
        flow = ufm.HadamardFlow(log_a.shape[1] + 1, depth)
        parts = function.parts(flow, u)
        return function.log_norm_rate(flow, u), jnp.abs(parts.sum) > parts.error

    return jax.vmap(one)(log_a, depths)


def test_kl_rises_with_depth_from_the_start_of_figure_10(deep):
    """P1 Fig. 10: alternating modes (0.2, 0.1), K = 16, L = 2, all the way."""
    found = monotone_along(KLDivergence(), *deep)
    assert found.first_rising == 0
    assert found.first_increase == 1
    assert not found.monotone
    assert np.all(found.rates > 0)
    assert np.all(np.diff(found.values) > 0)
    assert found.log_time[0] == -np.inf
    assert str(found) == (
        "rate positive first at state 0, value risen first at state 1"
    )


def test_kl_never_rises_without_hidden_layers_from_the_same_start(shallow):
    found = monotone_along(KLDivergence(), *shallow)
    assert found.monotone
    assert np.all(found.rates < 0)
    assert found.values[-1] < 0.5 * found.values[0]
    assert str(found) == "never rises at 40 saved states"


def test_the_exact_rate_is_the_slope_of_the_saved_values(deep):
    """Against central differences in log N along the solved orbit."""
    flow, path = deep
    found = monotone_along(KLDivergence(), flow, path)
    log_norm = np.log(np.sum(np.exp(np.asarray(path.state)), axis=1))
    slopes = np.gradient(found.values, log_norm)
    late = slice(3, -2)
    np.testing.assert_allclose(slopes[late], found.rates[late], rtol=0.1)


def test_the_loss_always_falls(deep):
    found = monotone_along(LogLoss(), *deep)
    assert found.monotone
    assert found.values[-1] < -10


def test_a_rise_between_saves_counts_only_beyond_the_tolerance(shallow):
    """A state put back to where the orbit was before is an increase, and no rate is."""
    flow, path = shallow
    state = np.array(path.state)
    state[20] = state[18]
    broken = dataclasses.replace(path, state=jnp.asarray(state))
    found = monotone_along(KLDivergence(), flow, broken)
    assert found.first_increase == 20
    assert found.first_rising is None
    assert not found.monotone
    assert monotone_along(KLDivergence(), flow, broken, tolerance=0.9).monotone


@pytest.mark.parametrize("num_classes", [4, 8])
def test_m_falls_on_the_bound_of_theorem_7(num_classes):
    """P2 Thm 7, at L = 1: points with M equal to the bound, over norms."""
    rng = np.random.default_rng(num_classes)
    size, count = num_classes - 1, 2000
    norms = 10 ** rng.uniform(-2, 2, count)
    bounds = np.array([collapse_basin_bound(num_classes, norm) for norm in norms])
    noise = rng.standard_normal((count, size)) * 10 ** rng.uniform(-2, 1, (count, size))
    noise -= np.mean(noise, axis=1, keepdims=True)
    noise /= np.linalg.norm(noise, axis=1, keepdims=True)
    share = 1 / size + np.sqrt(2 * bounds)[:, None] * noise
    assert np.all(share > 0)
    log_a = jnp.asarray(np.log(norms[:, None] * share))
    rate, certain = rates(UniformDistance(), log_a, jnp.ones(count))
    assert np.all(rate < 0)
    assert np.all(certain)


def test_the_bound_is_that_of_both_regimes():
    assert collapse_basin_bound(8, 0.1) == 1 / 512
    np.testing.assert_allclose(collapse_basin_bound(8, 1e3), 1 / (18 * 512 * 1e6))
    assert collapse_basin_bound(8, 1e-300) == 1 / 512
    assert collapse_basin_bound(8, 1e155) > 0


def test_above_the_threshold_the_ratio_grows_at_every_norm_and_it_is_sharp():
    """P1 eq. 51; below it, the ratio falls once the norm is large."""
    depths = np.array([1.2, 1.5, 2.0, 3.0, 8.0, math.inf])
    deltas = 10 ** np.linspace(-6, 2, 9)
    depth, delta = (x.ravel() for x in np.meshgrid(depths, deltas))
    logs = np.array([log_ratio_threshold(8, L) for L in depth])

    def signs(offset):
        gamma = np.log(delta) + logs * (1 + offset)
        log_a = np.stack([gamma, np.log(delta)] * 4, axis=1)[:, :7]
        rate, certain = rates(LogRatio(), jnp.asarray(log_a), jnp.asarray(depth))
        assert np.all(certain)
        return np.asarray(rate)

    assert np.all(signs(1e-6) > 0)
    below = signs(-1e-6)
    gap = 4 * delta * np.expm1(logs)
    assert np.all(below[gap > 20] < 0)
    # At small norms it grows below as well: the condition is only sufficient there.
    assert np.all(below[gap < 1e-3] > 0)
    assert np.sum(gap > 20) > 10


def test_thresholds_of_the_paper():
    np.testing.assert_allclose(ratio_threshold(4, 2), 8, rtol=1e-14)
    np.testing.assert_allclose(ratio_threshold(16, 2), (8 / 7) ** 3, rtol=1e-14)
    np.testing.assert_allclose(ratio_threshold(8, 3), (4 / 3) ** 2, rtol=1e-14)
    np.testing.assert_allclose(ratio_threshold(8, math.inf), 4 / 3, rtol=1e-14)
    assert ratio_threshold(8, 1) == math.inf
    assert ratio_threshold(2, 3) == math.inf
    # Beyond the largest double, and still a number.
    assert ratio_threshold(8, 1.0001) == math.inf
    want = math.log(4 / 3) * (2.0001 / 0.0001)
    np.testing.assert_allclose(log_ratio_threshold(8, 1.0001), want, rtol=1e-10)
    # P1 Fig. 10 starts above its threshold.
    assert ratio_threshold(16, 2) < 2


@pytest.mark.usefixtures("unhooked")
def test_misuse_is_refused(shallow):
    flow, path = shallow
    stateless = dataclasses.replace(path, state=None)
    with pytest.raises(ValueError, match="keep_states"):
        monotone_along(KLDivergence(), flow, stateless)
    with pytest.raises(ValueError, match="negative"):
        monotone_along(KLDivergence(), flow, path, tolerance=-1.0)
    state = path.state.at[:, 3].set(-jnp.inf)
    with pytest.raises(ValueError, match="finite along the path"):
        monotone_along(KLDivergence(), flow, dataclasses.replace(path, state=state))
    with pytest.raises(ValueError, match="power of two"):
        collapse_basin_bound(6, 1.0)
    with pytest.raises(ValueError, match="positive"):
        collapse_basin_bound(8, 0.0)
    with pytest.raises(ValueError, match="at least 1"):
        ratio_threshold(8, 0.5)
