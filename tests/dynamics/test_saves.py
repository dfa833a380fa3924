"""`SaveAt`: orbits saved where the clock reads given numbers."""

import diffrax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import solve_ivp

import deepufm as ufm
from deepufm import Outcome, SaveAt

FINAL, START = 10.0, 0.3
END = float(ufm.LogTime().reading(jnp.log(FINAL)))


def solve(readings):
    """K = 2 at depth 1."""
    return ufm.solve(
        ufm.HadamardFlow(num_classes=2, depth=1),
        jnp.log(jnp.asarray([START])),
        stop=ufm.FinalTime(FINAL),
        saves=SaveAt(readings),
        solver=diffrax.Bosh3(),
    )


@pytest.fixture(scope="module")
def path():
    return solve([0.5, 1.75, END, 9.0])


def test_given_readings_are_hit_to_the_last_bit(path):
    assert path.outcome == Outcome.reached
    np.testing.assert_array_equal(path.reading[:4], [0, 0.5, 1.75, END])
    times = np.exp(path.log_time[:4])
    np.testing.assert_allclose(times, np.expm1(path.reading[:4]), rtol=1e-14)


def test_saved_states_are_those_of_another_integrator(path):
    """P1 eq. 6 for one mode: a' = 2a/(1 + e^2a)."""
    want = solve_ivp(
        lambda _, a: 2 * a / (1 + np.exp(2 * a)), (0, FINAL + 1e-9), [START],
        t_eval=np.exp(path.log_time[:4]), method="DOP853", rtol=1e-12, atol=1e-12,
    )  # fmt: skip
    np.testing.assert_allclose(np.exp(path.state[:4]).T, want.y, rtol=1e-7)


@pytest.mark.parametrize(("last", "saved"), [(END, 4), (2.0, 4), (8.0, 3)])
def test_readings_beyond_the_stop_are_not_reached(last, saved):
    path = solve([0.5, 1.75, last, 9.0])
    assert path.num_saved == saved
    assert path.state is not None
    for rows in (path.reading, path.log_time, path.state[:, 0]):
        assert np.isnan(rows).tolist() == saved * [False] + (5 - saved) * [True]
    np.testing.assert_allclose(path.final_log_time, np.log(FINAL), rtol=1e-14)


@pytest.mark.parametrize(
    "readings", [[1.0, 1.0], [2.0, 1.0], [0.0, 1.0], [-1.0, 1.0], [1.0, np.nan]]
)
def test_readings_that_do_not_rise_from_zero_are_refused(readings):
    with pytest.raises(ValueError, match="must be positive and rising"):
        SaveAt(readings)


@pytest.mark.usefixtures("unhooked")
def test_readings_must_be_a_list():
    with pytest.raises(ValueError, match=r"needs a list of readings.*\(2, 1\)"):
        SaveAt(jnp.ones((2, 1)))
