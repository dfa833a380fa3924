"""Thresholds against tables, Lambert's W, scans of eigenvalues, and differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ray_oracles import C_DEPTHS, C_THRESHOLDS, brute_rates, direction
from scipy.special import lambertw

import deepufm as ufm
from deepufm.stability._ray_spectrum import RaySpectrum
from deepufm.stability._rays import ray_invariant_structures, structure_modes
from deepufm.stability._thresholds import (
    _last_crossing,
    _rises,
    _stacked,
    critical_depth,
    stability_threshold,
    stability_windows,
)

C = ufm.Structure.CROSS_POLYTOPE


def power(depth):
    return 1.0 if np.isinf(depth) else (depth - 1) / (depth + 1)


def c_threshold(num_classes, depth):
    """K mu*/2 with mu* = (2/K)[kappa + W_0(p e^{-kappa})], kappa = p(K-2)/2."""
    p = power(depth)
    kappa = p * (num_classes - 2) / 2
    return kappa + lambertw(p * np.exp(-kappa)).real


@pytest.fixture(scope="module")
def of_c():
    """The threshold of c for 16 classes and its first two derivatives, compiled."""
    ray = structure_modes(C, 16)

    def threshold(depth):
        return stability_threshold(ray, depth)

    first = jax.grad(threshold)
    return jax.jit(lambda x: (threshold(x), first(x), jax.grad(first)(x)))


@pytest.mark.parametrize("num_classes", C_THRESHOLDS)
def test_thresholds_of_the_cross_polytope(num_classes):
    ray = structure_modes(C, num_classes)
    depths = np.array([*C_DEPTHS, 1 + 1e-9, 1.001, 1e6, np.inf])
    found = jax.vmap(lambda depth: stability_threshold(ray, depth))(jnp.asarray(depths))
    np.testing.assert_allclose(found[:6], C_THRESHOLDS[num_classes], rtol=4e-16)
    known = [c_threshold(num_classes, depth) for depth in depths]
    np.testing.assert_allclose(found, known, rtol=1e-14)
    # Scale of the weights, and one depth alone.
    one = stability_threshold(1e-3 * ray, depths[1])
    assert float(one) == pytest.approx(float(found[1]), rel=4e-16)


@pytest.mark.parametrize("num_classes", [2, 4, 16, 1024])
def test_thresholds_of_neural_collapse(num_classes):
    depths = np.array([1.0, 1 + 1e-12, 1.5, 7.0, np.inf])
    ray = jnp.ones(num_classes - 1)
    found = jax.vmap(lambda depth: stability_threshold(ray, depth))(jnp.asarray(depths))
    known = np.array([power(depth) * (num_classes - 1) for depth in depths])
    np.testing.assert_allclose(found, 0 if num_classes == 2 else known, rtol=4e-16)


@pytest.mark.parametrize("depth", [1 + 1e-6, 1.7, 3.0, 40.0])
def test_derivatives_of_a_threshold_in_depth(of_c, depth):
    """F(m, p) = 7p + p e^{-m} - m = 0 with m = K mu/2, and p' = 2/(L+1)²."""
    _, slope, bend = of_c(depth)
    p, norm = power(depth), c_threshold(16, depth)
    first, second = 2 / (depth + 1) ** 2, -4 / (depth + 1) ** 3
    x = np.exp(-norm)
    denominator = 1 + p * x
    by_power = (7 + x) / denominator
    np.testing.assert_allclose(slope, by_power * first, rtol=1e-13)
    # d/dp of (7 + x)/(1 + p x) along the solution.
    x_slope = -x * by_power
    change = x_slope / denominator - (7 + x) * (x + p * x_slope) / denominator**2
    np.testing.assert_allclose(bend, change * first**2 + by_power * second, rtol=1e-11)
    step = 1e-4 * (depth - 1)
    ahead = (of_c(depth + step)[0] - of_c(depth - step)[0]) / (2 * step)
    np.testing.assert_allclose(slope, ahead, rtol=1e-7)


def test_depth_one(of_c):
    """Collapse is stable at every norm; any other ray is invaded."""
    ray = jnp.ones(15)
    slope = jax.jit(jax.grad(lambda depth: stability_threshold(ray, depth)))
    assert float(slope(1.0)) == 15 / 2
    assert [float(x) for x in of_c(1.0)] == [np.inf, 0, 0]
    assert stability_windows(ray, 1) == ((0.0, np.inf),)
    assert stability_windows(structure_modes(C, 16), 1.0) == ()
    assert float(critical_depth(ray, 0.0)) == 1


@pytest.mark.parametrize("depth", [1.1, 1.4, 2.0, 30.0])
def test_windows_are_where_all_eigenvalues_are_negative(depth):
    for entry in ray_invariant_structures(16):
        windows = stability_windows(entry.direction, depth)
        ends = [end / entry.size for window in windows for end in window]
        mus = np.array([0.02, 0.2, 0.45, 0.7, 0.95, 1.2, 1.6, 2.5, 6.0])
        edges = np.array([end for end in ends if 0 < end < np.inf])
        for mu in np.concatenate([mus, edges * (1 - 1e-9), edges * (1 + 1e-9)]):
            inside = any(low < mu * entry.size < high for low, high in windows)
            least = np.min(brute_rates(16, entry.modes, mu), initial=np.inf)
            assert inside == (power(depth) < least)


def test_rays_that_are_stable_in_a_window_have_no_threshold():
    # The greatest h, to three digits, by scans of eigenvalues.
    tops = {
        (1, 2, 3, 4, 5, 6): 0.278,
        (1, 2, 4, 7, 8, 11): 0.693,
        (1, 2, 3, 4, 5, 6, 8, 9, 10, 12): 0.201,
        (1, 2, 3, 4, 5, 6, 8, 9, 10, 13, 14, 15): 0.110,
        tuple(range(1, 15)): 0.278,
    }
    for entry in ray_invariant_structures(16):
        top = tops.get(entry.modes)
        if top is None:
            (window,) = stability_windows(entry.direction, 5.0)
            assert window[1] == np.inf
            continue
        below, above = ((1 + p) / (1 - p) for p in (top - 2e-3, top + 2e-3))
        (window,) = stability_windows(entry.direction, below)
        assert window[1] < np.inf
        assert stability_windows(entry.direction, above) == ()
        assert float(stability_threshold(entry.direction, below)) == np.inf


def test_thresholds_where_windows_begin():
    depth = 2.3
    for entry in ray_invariant_structures(8):
        (window, *_) = (*stability_windows(entry.direction, depth), (np.inf, np.inf))
        endless = window[1] == np.inf and entry.spans
        # A ray that misclassifies loses to dead modes, however small they start.
        known = window[0] if endless else np.inf
        found = float(stability_threshold(entry.direction, depth))
        assert found == pytest.approx(known, rel=1e-13)
        if 0 < window[0] < np.inf:
            critical = float(critical_depth(entry.direction, window[0]))
            assert critical == pytest.approx(depth, rel=1e-12)


def test_critical_depths():
    norms = np.array([0.0, 1e-9, 0.4, 2.0, 14.9, 15.0, 1e4])
    find = jax.jit(jax.vmap(lambda norm: critical_depth(np.ones(15), norm)))
    mu = norms / 15
    with np.errstate(divide="ignore"):
        known = np.where(mu < 1, (1 + mu) / (1 - np.minimum(mu, 1)), np.inf)
    np.testing.assert_allclose(find(jnp.asarray(norms)), known, rtol=1e-13)
    slope = jax.jit(jax.grad(lambda norm: critical_depth(np.ones(15), norm)))
    assert float(slope(5.0)) == pytest.approx(2 / (1 - 1 / 3) ** 2 / 15, rel=1e-13)
    assert float(slope(20.0)) == 0
    # One living mode has no exponents within.
    assert float(critical_depth(direction(4, [1]), 1.0)) == np.inf


def test_a_rate_that_dips_has_the_last_of_its_crossings():
    """No ray of 16 classes has one: h = mu(1+40x)/(20.5(1+x)), x = e^{-2 mu}, made up.

    It rises to 0.33, falls to 0.24 and rises for ever.
    """
    made_up = RaySpectrum(
        np.array([2.0, 4.0]), np.array([20.5, 20.5]), np.array([[1.0, 40.0]]),
        np.zeros(1, int), np.zeros((1, 3)), (1, 2), (3,),
    )  # fmt: skip

    def rate(mu):
        x = np.exp(-2 * mu)
        return mu * (1 + 40 * x) / (20.5 * (1 + x))

    rises = _stacked([_rises(made_up, 0)])
    assert rises.level.shape == (1, 2)
    grid = np.linspace(1e-4, 60, 600_001)
    for p in (0.1, 0.2, 0.25, 0.3, 0.5, 1.0):
        found = float(
            _last_crossing(
                jnp.asarray(p), made_up.shares, made_up.counts, made_up.margins, rises
            )
        )
        last = grid[np.flatnonzero(rate(grid) < p)[-1]]
        assert found == pytest.approx(last, abs=2e-4)
        assert rate(found) == pytest.approx(p, rel=1e-13)


def test_minima_with_equal_modes_are_invariant_and_become_stable():
    listed = {entry.modes for entry in ray_invariant_structures(16)}
    equal = 0
    for entry in ufm.atlas(16, 2):
        alive = entry.a[entry.a > 0]
        if entry.verdict is not ufm.Verdict.MINIMUM or np.ptp(alive) > 1e-9:
            continue
        equal += 1
        assert entry.modes in listed
        threshold = float(stability_threshold(entry.a, 2))
        assert threshold < np.inf
        mu = threshold / entry.rank
        ahead, behind = (brute_rates(16, entry.modes, mu * f) for f in (1.001, 0.999))
        assert np.min(ahead) > 1 / 3 > np.min(behind)
    assert equal >= 3


@pytest.mark.parametrize("call", [stability_threshold, stability_windows])
def test_what_has_no_threshold_is_refused(call):
    with pytest.raises(ValueError, match="must be invariant"):
        call(np.array([1.0, 2.0, 1.0]), 2.0)
    with pytest.raises(ValueError, match="`depth` must be at least 1"):
        call(np.ones(3), 0.9)
    with pytest.raises(ValueError, match="`norm`"):
        critical_depth(np.ones(3), np.nan)
