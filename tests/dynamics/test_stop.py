"""Stops: where they end, and what they refuse."""

import math

import equinox as eqx
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import optimistix as optx
import pytest
from oracles import trajectories

import deepufm as ufm
from deepufm import Outcome, SaveEvery
from deepufm.dynamics._crossing import FallingCrossing

SAVES = SaveEvery(100.0, 2)


@pytest.fixture(scope="module")
def fig1():
    """P2 Fig. 1, K = 8 and L = 1: norm, log-loss and state at t = 1e4 (mpmath)."""
    run = trajectories()[0]
    point = next(point for point in run["points"] if point["t"] == 1e4)
    return ufm.HadamardFlow(8, 1.0), jnp.log(jnp.asarray(run["a0"])), point


def test_final_norm_ends_at_the_norm_at_the_right_time(fig1):
    flow, start, point = fig1
    norm = sum(point["a"])
    path = ufm.solve(flow, start, stop=ufm.FinalNorm(norm), saves=SAVES)
    assert path.outcome == Outcome.reached
    np.testing.assert_allclose(flow.log_norm(path.final), math.log(norm), atol=1e-13)
    np.testing.assert_allclose(path.final_log_time, math.log(1e4), atol=1e-6)
    np.testing.assert_allclose(path.final, np.log(point["a"]), rtol=0, atol=1e-7)


def test_log_loss_below_ends_at_the_loss_at_the_right_time(fig1):
    flow, start, point = fig1
    goal = point["log_loss"]
    path = ufm.solve(flow, start, stop=ufm.LogLossBelow(goal), saves=SAVES)
    assert path.outcome == Outcome.reached
    np.testing.assert_allclose(flow.log_loss(path.final), goal, rtol=1e-13)
    np.testing.assert_allclose(path.final_log_time, math.log(1e4), atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_an_event_where_the_state_is_steep_is_reached_in_both_precisions(dtype):
    # Escaping from 1e-30, log a rises by 60 while the reading rises by one.
    path = ufm.solve(
        ufm.HadamardFlow(2, 1.0),
        jnp.log(jnp.asarray([1e-30], dtype)),
        stop=ufm.FinalNorm(0.5),
        saves=SAVES,
    )
    assert path.outcome == Outcome.reached
    assert path.final.dtype == path.final_log_time.dtype == dtype
    resolution = 100 * float(jnp.finfo(dtype).eps) * 5
    np.testing.assert_allclose(path.final, math.log(0.5), rtol=0, atol=resolution)


def crossing(function, lower, upper, dtype=jnp.float64):
    def of_y(y, args):
        del args
        return function(y)

    solution = optx.root_find(
        of_y,
        FallingCrossing(),
        jnp.asarray(upper, dtype),
        options={"lower": lower, "upper": upper},
        throw=False,
    )
    return solution.value, solution.result == optx.RESULTS.successful


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("root", [1e-6, 0.3, 7.0])
def test_crossings_are_found_to_the_last_digit_whatever_the_slope(scale, root):
    value, good = crossing(lambda y: scale * (jnp.exp(root) - jnp.exp(y)), 0.0, 8.0)
    assert good
    # The rounding of e^y over its slope.
    assert abs(float(value) - root) < 1e-15 * (1 + root)


def test_where_nothing_is_crossed_the_end_is_returned():
    # As diffrax asks of the members of a batch that end without an event.
    value, good = crossing(lambda y: 8.0 - y, 2.0, 8.0)
    assert good
    assert value == 8.0


def test_log_loss_of_a_late_state_is_that_of_mpmath():
    log_a = jnp.log(jnp.asarray([300.0, 200.0, 100.0]))
    margins = [2 * (300 + 100), 2 * (200 + 100), 2 * (300 + 200)]
    with mp.workdps(500):
        want = mp.log(mp.log(1 + mp.fsum(mp.e ** (-mp.mpf(m)) for m in margins)))
    got = ufm.HadamardFlow(4, 2.0).log_loss(log_a)
    np.testing.assert_allclose(got, float(want), rtol=1e-14)


BAD_STOPS = [
    (lambda: ufm.FinalTime(0.0), "after the start, t > 0, but is 0"),
    (lambda: ufm.FinalTime(-1.0), "after the start, t > 0, but is -1"),
    (lambda: ufm.FinalTime(math.nan), "after the start.*nan"),
    (lambda: ufm.FinalTime(math.inf), "finite, but is inf.*log=..."),
    (lambda: ufm.FinalTime(log=math.inf), "finite"),
    (lambda: ufm.FinalTime(), "either t or log="),
    (lambda: ufm.FinalTime(1.0, log=0.0), "either t or log="),
    (lambda: ufm.FinalNorm(0.0), "positive and finite, but is 0"),
    (lambda: ufm.FinalNorm(-2.0), "positive and finite, but is -2"),
    (lambda: ufm.FinalNorm(math.nan), "positive and finite, but is nan"),
    (lambda: ufm.LogLossBelow(math.nan), "must be finite.*nan"),
    (lambda: ufm.LogLossBelow(-math.inf), "must be finite.*inf"),
]


@pytest.mark.parametrize(("build", "message"), BAD_STOPS)
def test_bad_stop_is_refused(build, message):
    with pytest.raises(ValueError, match=message) as error:
        build()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("clock", "stop"),
    [
        (ufm.LogTime(), ufm.FinalNorm(0.5)),
        (ufm.LogNorm(), ufm.FinalNorm(0.5)),
        (ufm.LogTime(), ufm.LogLossBelow(0.5)),
    ],
    ids=["norm", "norm-of-clock", "loss"],
)
def test_a_stop_behind_the_start_is_refused(clock, stop):
    start = jnp.log(jnp.asarray([0.5, 0.5, 0.5]))
    with pytest.raises(ValueError, match=r"before the start: \w+ already holds"):
        ufm.solve(ufm.HadamardFlow(4, 1.0), start, clock=clock, stop=stop, saves=SAVES)


def test_a_stop_behind_a_traced_start_ends_at_the_start():
    # Nothing can be refused under jit; the goal holds at once and is reported so.
    @eqx.filter_jit
    def run(start):
        return ufm.solve(
            ufm.HadamardFlow(2, 1.0), start, stop=ufm.FinalNorm(0.5), saves=SAVES
        )

    start = jnp.log(jnp.asarray([1.5]))
    path = run(start)
    assert path.outcome == Outcome.reached
    np.testing.assert_array_equal(path.final, start)
    assert path.final_log_time == -math.inf
