"""Jacobian spectra of the reduced flow, against closed forms and high precision.

The closed forms are those of P1 D.4, checked elsewhere to 60 digits.
"""

import jax.numpy as jnp
import mpmath as mp
import numpy as np
import plain_networks as plain
import pytest

import deepufm as ufm
from deepufm.stability._jacobian import Stability, jacobian_spectrum, reactivity


@pytest.mark.parametrize("mu", [1e-30, 1e-8, 0.3, 1.0, 1e3, 1e8])
@pytest.mark.parametrize("depth", [1, 3])
def test_collapse_in_the_reduced_flow(mu, depth):
    flow = ufm.HadamardFlow(8, depth)
    got = jacobian_spectrum(flow, jnp.log(mu * jnp.ones(7)))
    exponent = (depth - 1) / (depth + 1) - mu
    np.testing.assert_allclose(got.exponents, np.full(6, exponent), rtol=1e-13)
    assert (got.n_stable, got.n_unstable) == ((6, 0) if exponent < 0 else (0, 6))
    assert (got.n_neutral, got.n_gauge, got.n_balance) == (0, 0, 0)
    assert got.drift == 0
    assert got.complete
    # At equal modes J is symmetric in log a too.
    assert reactivity(flow, jnp.log(mu * jnp.ones(7))) == pytest.approx(
        exponent, rel=1e-12
    )


@pytest.mark.parametrize("mu", [1e-30, 1e-8, 0.3, 1.0, 1e3, 1e8])
@pytest.mark.parametrize("depth", [1, 2])
def test_cross_polytope_in_the_reduced_flow(mu, depth):
    a = np.where(np.arange(7) % 2 == 0, mu, 0.0)
    got = jacobian_spectrum(ufm.HadamardFlow(8, depth), ufm.log_modes(jnp.asarray(a)))
    x, q = np.exp(-4 * mu), (depth - 1) / (depth + 1)
    within = q - 8 * mu / (6 + 2 * x)
    across = -2 * np.expm1(-4 * mu) / (6 + 2 * x) if depth == 1 else -1.0
    expected = np.sort([within] * 3 + [across] * 3)[::-1]
    np.testing.assert_allclose(got.exponents, expected, rtol=1e-12)
    # At L = 1 the dead modes invade, at every norm; at L = 2 the ray needs one.
    unstable = np.sum(expected > 0)
    assert got.n_unstable == unstable
    assert got.n_stable == 6 - unstable
    assert (got.verdict is Stability.UNSTABLE) == (depth == 1 or mu < 0.2)


def test_at_the_threshold_collapse_is_neutral():
    got = jacobian_spectrum(ufm.HadamardFlow(4, 3), jnp.log(0.5 * jnp.ones(3)))
    assert got.n_neutral == 2
    assert got.verdict is Stability.NEUTRAL


def exact_rates(a, depth):
    """f_i = d log a_i/dt of the reduced flow, in mpmath."""
    psi = np.asarray(ufm.psi_matrix(len(a) + 1)).astype(int)
    p = (mp.mpf(depth) - 1) / (depth + 1)
    decays = [mp.exp(-mp.fdot(map(int, row), a)) for row in psi]
    total = 1 + mp.fsum(decays)
    b = [mp.fdot(map(int, row), decays) / total for row in psi]
    return [x * y**p for x, y in zip(b, a, strict=True)]


def exact_jacobian(field, a):
    """Central differences with a step of 1e-20 of each entry, at 80 digits."""
    columns = []
    for i in range(len(a)):
        step = a[i] * mp.mpf("1e-20")
        up, down = list(a), list(a)
        up[i] += step
        down[i] -= step
        moved = zip(field(up), field(down), strict=True)
        columns.append([(x - y) / (2 * step) for x, y in moved])
    return np.array(columns, dtype=object).T


@pytest.mark.parametrize("depth", [1, 2.5])
def test_any_state_of_the_reduced_flow(depth):
    modes = [0.7, 1.9, 0.1, 0.4, 0.05, 0.8, 0.3]
    flow, state = ufm.HadamardFlow(8, depth), jnp.log(jnp.asarray(modes))
    with mp.workdps(80):
        a = [mp.mpf(x) for x in modes]
        norm = mp.fsum(a)

        def velocity(a):
            return [x * f for x, f in zip(a, exact_rates(a, depth), strict=True)]

        raw = exact_jacobian(velocity, a).astype(float)

        def direction(shares):
            # d a-hat/d log N at this norm.
            moved = velocity([norm * x for x in shares])
            total = mp.fsum(moved)
            return [m / total - x for m, x in zip(moved, shares, strict=True)]

        shares = [x / norm for x in a]
        normalised = exact_jacobian(direction, shares).astype(float)
        drift = float(mp.re(mp.fsum(abs(x) for x in direction(shares))))
        f = exact_rates(a, depth)
        growth = float(mp.re(mp.fdot(shares, f)))

        def log_rates(a):
            f = exact_rates(a, depth)
            g = mp.fdot(a, f) / mp.fsum(a)
            return [x / g for x in f]

        # δ log a to δ of d log a-hat/ds; norms kept by the tangent space.
        logs = (exact_jacobian(log_rates, a) * np.array(a, dtype=object)).astype(float)
    got = jacobian_spectrum(flow, state, normalised=False)
    expected = np.sort(np.linalg.eigvals(raw).real)[::-1]
    unit = np.exp(got.log_unit)
    np.testing.assert_allclose(got.exponents * unit, expected, rtol=1e-10)

    got = jacobian_spectrum(flow, state)
    tangent = plain.complement(np.ones((7, 1)))
    expected = np.linalg.eigvals(tangent.T @ normalised @ tangent)
    expected = expected[np.argsort(-expected.real)]
    np.testing.assert_allclose(got.exponents, expected, rtol=1e-10)
    assert got.drift == pytest.approx(drift, rel=1e-12)
    assert np.exp(got.log_unit) == pytest.approx(growth, rel=1e-12)

    tangent = plain.complement(np.asarray(modes)[:, None])
    inside = tangent.T @ (logs + logs.T) @ tangent / 2
    top = np.linalg.eigvalsh(inside)[-1]
    assert reactivity(flow, state) == pytest.approx(top, rel=1e-10)


@pytest.mark.parametrize(
    "decades", [[0, 56, 0, 51, 18, 61, 50], [0, 200, 100, 300, 50, 250, 150]]
)
def test_raw_exponents_keep_their_digits_beside_ones_1e50_larger(decades):
    """Of the first state the usual algorithm (eigvalsh) loses two."""
    modes = 2 * 10.0 ** -np.asarray(decades, float)
    got = jacobian_spectrum(
        ufm.HadamardFlow(8, 2), jnp.log(jnp.asarray(modes)), normalised=False
    )
    with mp.workdps(700):
        a = [mp.mpf(x) for x in modes]
        f = exact_rates(a, 2)
        raw = exact_jacobian_matrix(a, f)
        exact = sorted(mp.eigsy(raw, eigvals_only=True), reverse=True)
        unit = mp.exp(mp.mpf(got.log_unit))
        ratios = [float(x / (y * unit)) for x, y in zip(exact, got.exponents)]
    np.testing.assert_allclose(ratios, np.ones(7), rtol=1e-12)


def exact_jacobian_matrix(a, f):
    """diag((1+p) f) - G H G at L = 2, in mpmath."""
    psi = np.asarray(ufm.psi_matrix(len(a) + 1)).astype(int)
    decays = [mp.exp(-mp.fdot(map(int, row), a)) for row in psi]
    total = 1 + mp.fsum(decays)
    b = [mp.fdot(map(int, row), decays) / total for row in psi]
    p = mp.mpf(1) / 3
    matrix = mp.matrix(len(a), len(a))
    for i in range(len(a)):
        for j in range(len(a)):
            pair = [int(x * y) for x, y in zip(psi[i], psi[j], strict=True)]
            curve = mp.fdot(pair, decays) / total - b[i] * b[j]
            matrix[i, j] = -curve * (a[i] * a[j]) ** ((1 + p) / 2)
        matrix[i, i] += (1 + p) * f[i]
    return matrix


def test_a_norm_beyond_floats_is_refused():
    with pytest.raises(ValueError, match="below the largest float"):
        jacobian_spectrum(ufm.HadamardFlow(4, 2), jnp.asarray([800.0, 0.0, 0.0]))


@pytest.mark.parametrize("mu", [1.0, 1e8, 1e20, 1e200])
def test_small_exponents_of_a_ray_are_not_lost_beside_large_ones(mu):
    """Six modes of eight classes: p - h with h -> 0 twice, and with h -> 2 mu."""
    (six,) = [ray for ray in ufm.ray_invariant_structures(8) if ray.size == 6]
    log_a = jnp.where(jnp.asarray(six.direction) > 0, jnp.log(mu), -jnp.inf)
    found = ufm.jacobian_spectrum(ufm.HadamardFlow(8, 2), log_a)
    assert found.n_unstable == 2
    if mu > 1:
        np.testing.assert_allclose(found.exponents[:2], 1 / 3, rtol=1e-12)
        np.testing.assert_allclose(found.exponents[-1], -2 * mu, rtol=1e-7)


def test_exponents_that_are_rounding_are_refused():
    log_a = jnp.asarray([100.0, 100 - 1e-3, 100 - 3e-3])
    with pytest.raises(ValueError, match="rounding"):
        ufm.jacobian_spectrum(ufm.HadamardFlow(4, 2), log_a)
