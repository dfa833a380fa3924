"""The reduced flow in log-norm time: against DOP853, and from tiny starts."""

import numpy as np
import pytest
import scipy.integrate

import deepufm as ufm
from deepufm.limits import at_norm, followed, growth_exponents

PSI = np.asarray(ufm.psi_matrix(8), float)


def rate_of(depth):
    """Equation 6 of P1 over d log N/dt, written out."""
    power = (depth - 1) / (depth + 1)

    def rate(_, log_a):
        a = np.exp(log_a)
        b = PSI @ np.exp(-PSI @ a)
        f = b * a**power
        return f * np.sum(a) / np.sum(a * f)

    return rate


@pytest.mark.parametrize("depth", [1.0, 2.5])
def test_modes_are_those_of_another_integrator(depth):
    log_a = np.log(np.random.default_rng(0).uniform(0.1, 1, 7))
    want = scipy.integrate.solve_ivp(
        rate_of(depth), (0, 2), log_a, "DOP853", rtol=1e-12, atol=1e-12
    ).y[:, -1]
    found = followed(log_a, depth, 2.0, PSI, rtol=1e-10)
    assert found is not None
    np.testing.assert_allclose(found, want, atol=1e-8)
    grown = np.logaddexp.reduce(found) - np.logaddexp.reduce(log_a)
    assert grown == pytest.approx(2.0, abs=1e-8)


def test_dead_modes_stay_dead_and_a_held_norm_stays():
    log_a = np.log([1.0, 2.0, 0.5, 1.0, 1.0, 3.0, 1.0])
    log_a[2] = -np.inf
    found = followed(at_norm(log_a, 1e4), 2.0, 1.0, PSI, rtol=1e-6, is_held=True)
    assert found is not None
    assert found[2] == -np.inf
    assert np.logaddexp.reduce(found) == pytest.approx(np.log(1e4), abs=1e-3)
    growth = growth_exponents(log_a, 2.0, PSI)
    assert growth[2] == 0
    alive = np.isfinite(log_a)
    assert np.sum(np.exp(log_a[alive]) * growth[alive]) == pytest.approx(9)


@pytest.mark.parametrize("depth", [1.0, 1.0001, 10.0])
@pytest.mark.parametrize("scale", [1e-6, 1e-8, 1e-12])
def test_tiny_starts_are_followed(depth, scale):
    """The rate is all but constant there, and invites steps to where a overflows."""
    a = np.random.default_rng(1).dirichlet(np.ones(7), size=6)
    for log_a in np.log(scale * a):
        end = followed(log_a, depth, np.log(300 / scale), PSI, rtol=1e-5)
        assert end is not None
        assert np.logaddexp.reduce(end) == pytest.approx(np.log(300), abs=1e-3)
