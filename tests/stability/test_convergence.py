import jax.numpy as jnp
import numpy as np
import pytest

import deepufm as ufm
from deepufm.limits import followed
from deepufm.stability._convergence import (
    convergence_pace,
    convergence_time,
    finite_time_basin,
    return_time,
)
from deepufm.stability._starts import mode_starts


def made_path(directions, log_norms):
    """A path whose saved states are given."""
    log_a = np.log(directions) - np.log(np.sum(directions, axis=1, keepdims=True))
    state = jnp.asarray(log_a + np.asarray(log_norms)[:, None])
    times = jnp.asarray(np.exp(log_norms))
    zero = jnp.asarray(0)
    return ufm.Path(
        times, times, state, {}, jnp.asarray(len(times)), state[-1], times[-1],
        times[-1], {}, ufm.Outcome.reached, ufm.SolveStats(zero, zero, zero),
    )  # fmt: skip


@pytest.fixture(scope="module")
def collapse():
    return ufm.limit(ufm.HadamardFlow(4, 2), np.log([3.0, 3.1, 2.9]))


def test_return_time_of_collapse():
    # (L-1)/(L+1) - N/(K-1) at K = 8, L = 2, N = 14.
    assert return_time([1 / 3 - 2, -5.0]) == pytest.approx(0.6)
    assert return_time([-0.5 + 3j, -2.0]) == 2.0
    assert return_time([0.0, -1.0]) == np.inf
    with pytest.raises(ValueError, match="no NaN"):
        return_time([np.nan])


def test_pace_and_time_of_a_power_of_the_norm(collapse):
    log_norms = np.linspace(0, 5, 41)
    apart = 0.3 * np.exp(-log_norms)
    directions = 1 + apart[:, None] * np.asarray([1.0, -1.0, 0.0])
    path = made_path(directions, log_norms)
    pace = convergence_pace(path, collapse, from_log_norm=1.99)
    assert pace.slope == pytest.approx(-1, abs=2e-3)
    assert pace.points == 25
    assert pace.standard_error < 1e-3
    found = convergence_time(path, collapse, angle=0.05)
    # tan(angle) = apart·sqrt(2/3).
    first = np.flatnonzero(np.arctan(apart * np.sqrt(2 / 3)) < 0.05)[0]
    assert found.index == first
    assert found.log_norm == pytest.approx(log_norms[first])
    assert found.log_time == pytest.approx(np.exp(log_norms[first]))


def test_time_counts_from_the_last_return(collapse):
    apart = np.asarray([0.5, 0.01, 0.5, 0.01, 0.01])
    directions = 1 + apart[:, None] * np.asarray([1.0, -1.0, 0.0])
    path = made_path(directions, np.arange(5.0))
    assert convergence_time(path, collapse).index == 3
    beyond = convergence_time(path, collapse, angle=1e-4)
    assert (beyond.log_norm, beyond.index) == (np.inf, -1)
    with pytest.raises(ValueError, match="needs three"):
        convergence_pace(path, collapse, from_log_norm=3.5)


def test_finite_time_basin_counts_starts_near_a_direction():
    flow = ufm.HadamardFlow(8, 2)
    log_a = mode_starts(8, 5.0, range(40), seed=2)
    cross = np.asarray([1.0, 0, 1, 0, 1, 0, 1])
    one, none = (
        np.ones(7),
        finite_time_basin(flow, log_a, cross, stop=ufm.FinalNorm(300.0), angle=1e-9),
    )
    assert (none.count, none.starts, none.failed) == (0, 40, 0)
    found = finite_time_basin(flow, log_a, one, stop=ufm.FinalNorm(300.0))
    # The same norm by SciPy's LSODA, and an angle by the arc cosine.
    psi = np.asarray(ufm.psi_matrix(8), float)
    ends = [followed(x, 2.0, np.log(60.0), psi, rtol=1e-9) for x in log_a]
    now = np.exp(np.asarray(ends))
    cosines = np.sum(now, axis=1) / np.linalg.norm(now, axis=1) / np.sqrt(7)
    assert found.count == np.sum(np.arccos(np.minimum(cosines, 1)) < 0.1) > 0
    elsewhere = now[np.argmin(cosines)]
    either = np.stack([one, 2 * elsewhere])
    both = finite_time_basin(flow, log_a, either, stop=ufm.FinalNorm(300.0))
    assert found.count < both.count <= 40
    assert found.low < found.fraction < found.high
    with pytest.raises(ValueError, match="directions"):
        finite_time_basin(flow, log_a, np.ones(3), stop=ufm.FinalNorm(300.0))


def test_limits_that_are_not_certified_are_refused(collapse):
    path = made_path(np.ones((3, 3)), np.arange(3.0))
    open_end = ufm.limit(ufm.HadamardFlow(4, 2), np.log(np.full((1, 3), 1e40)))
    with pytest.raises(ValueError, match="certified"):
        convergence_time(path, open_end)
    with pytest.raises(ValueError, match="positive"):
        convergence_time(path, collapse, angle=0.0)
