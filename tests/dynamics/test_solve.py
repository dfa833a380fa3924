"""`solve` on the reduced flows against mpmath orbits, closed forms and quadratures.

All solves with one K, clock, kind of stop and `saves` share one compilation.
"""

import math

import diffrax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest
from oracles import DNC_RAY, DNC_START, dnc_log_norm, trajectories
from scipy.special import expi

import deepufm as ufm
from deepufm import Outcome, SaveEvery


def ray_id(item):
    return f"K{item[0]}-L{item[1]}-log_t={item[3]:.0f}"


def on_ray(num_classes, l1_norm):
    return jnp.asarray([math.log(l1_norm / (num_classes - 1))] * (num_classes - 1))


rays = pytest.mark.parametrize("item", DNC_RAY, ids=ray_id)


@pytest.mark.parametrize("run", trajectories(), ids=lambda run: run["name"])
@pytest.mark.parametrize(("rtol", "bound"), [(1e-10, 1e-9), (None, 1e-7)])
def test_trajectories_of_the_papers(run, rtol, bound):
    flow = ufm.HadamardFlow(run["num_classes"], float(run["depth"]))
    start = jnp.log(jnp.asarray(run["a0"]))
    for point in run["points"]:
        path = ufm.solve(
            flow,
            start,
            stop=ufm.FinalTime(point["t"]),
            saves=2,
            observe=ufm.metrics,
            rtol=rtol,
        )
        assert path.outcome == Outcome.reached
        np.testing.assert_allclose(path.final, np.log(point["a"]), rtol=0, atol=bound)
        seen = path.final_observables
        for name in ("kl", "effective_rank"):
            np.testing.assert_allclose(seen[name], point[name], rtol=bound)
        np.testing.assert_allclose(seen["log_loss"], point["log_loss"], atol=bound)


@pytest.mark.parametrize(("rtol", "bound"), [(1e-10, 1e-8), (None, 1e-5)])
@pytest.mark.parametrize("item", [i for i in DNC_RAY if i[3] < 700], ids=ray_id)
def test_dnc_ray_in_time_to_1e300(item, rtol, bound):
    num_classes, depth, mu, log_time, log_slope = item
    path = ufm.solve(
        ufm.HadamardFlow(num_classes, float(depth)),
        on_ray(num_classes, DNC_START),
        stop=ufm.FinalTime(log=log_time),
        saves=2,
        observe=ufm.metrics,
        rtol=rtol,
    )
    assert path.outcome == Outcome.reached
    height = np.exp(path.final)
    # The relative error of the time at which the ray has a given norm.
    late = (height - mu) * math.exp(-log_slope)
    assert np.max(np.abs(late)) < bound


@rays
def test_dnc_ray_in_log_norm_to_ten_to_the_million(item):
    num_classes, depth, mu, log_time, _ = item
    path = ufm.solve(
        ufm.HadamardFlow(num_classes, float(depth)),
        on_ray(num_classes, DNC_START),
        clock=ufm.LogNorm(),
        stop=ufm.FinalNorm(math.exp(dnc_log_norm(num_classes, mu))),
        saves=2,
        rtol=1e-9,
    )
    assert path.outcome == Outcome.reached
    np.testing.assert_allclose(path.final, math.log(mu), rtol=0, atol=1e-13)
    # A rounding of the state log a moves log t = K·mu by its relative size; at
    # t = 10^(10^6) that is 4e-9 a step.
    bound = 1e-8 + 1e-14 * log_time
    np.testing.assert_allclose(path.final_log_time, log_time, rtol=0, atol=bound)


def test_logistic_margin_does_not_stall_where_one_minus_p_rounds_to_zero():
    # m' = 4/(1 + e^m) from 0: e^m + m = 4t + 1.
    path = ufm.solve(
        ufm.LogitFlow(2), jnp.zeros(1), stop=ufm.FinalTime(2.5e17), saves=2
    )
    with mp.workdps(30):
        margin = mp.findroot(lambda m: m + mp.e**m - 1 - 4 * mp.mpf(2.5e17), 41)
    assert margin == pytest.approx(41.4465, abs=5e-5)
    np.testing.assert_allclose(2 * path.final[0], float(margin), atol=1e-7)


@pytest.mark.parametrize("height", [1e-3, 0.5, 3.0])
def test_escape_from_a_scale_of_1e_minus_30(height):
    # K = 2, L = 1: da/dt = 2a/(1 + e^{2a}), the logistic equation's escape from 0.
    path = ufm.solve(
        ufm.HadamardFlow(2, 1.0),
        jnp.log(jnp.asarray([1e-30])),
        stop=ufm.FinalNorm(height),
        saves=SaveEvery(100.0, 2),
    )
    assert path.outcome == Outcome.reached
    time = 0.5 * (math.log(height / 1e-30) + expi(2 * height) - expi(2e-30))
    np.testing.assert_allclose(path.final_log_time, math.log(time), atol=1e-7)


@pytest.mark.parametrize("height", [1e-3, 0.5, 3.0])
def test_escape_of_a_deep_ray_from_a_scale_of_1e_minus_30(height):
    # K = 4, L = 2 on a = mu·1: dt = (e^{4 mu} + 3)/(4 mu^{4/3}) dmu.
    path = ufm.solve(
        ufm.HadamardFlow(4, 2.0),
        on_ray(4, 3e-30),
        stop=ufm.FinalNorm(3 * height),
        saves=SaveEvery(100.0, 2),
    )
    assert path.outcome == Outcome.reached
    ends = mp.linspace(mp.log(mp.mpf("1e-30")), mp.log(height), 40)
    time = mp.quad(lambda u: (mp.e ** (4 * mp.e**u) + 3) / 4 * mp.e ** (-u / 3), ends)
    np.testing.assert_allclose(path.final_log_time, float(mp.log(time)), atol=1e-7)


def test_error_is_proportional_to_the_tolerance():
    run = trajectories()[3]
    point = run["points"][3]
    tolerances = np.array([1e-5, 1e-6, 1e-7, 1e-8, 1e-9])
    errors = []
    for rtol in tolerances:
        path = ufm.solve(
            ufm.HadamardFlow(16, float(run["depth"])),
            jnp.log(jnp.asarray(run["a0"])),
            stop=ufm.FinalTime(point["t"]),
            saves=2,
            observe=ufm.metrics,
            rtol=float(rtol),
        )
        errors.append(np.max(np.abs(path.final - np.log(point["a"]))))
    slope = np.polyfit(np.log(tolerances), np.log(errors), 1)[0]
    assert 0.7 < slope < 1.3


def test_saves_are_equal_steps_of_the_clock_from_start_to_end():
    start = jnp.log(jnp.asarray([0.1, 0.2, 0.3]))
    path = ufm.solve(ufm.HadamardFlow(4, 2.0), start, stop=ufm.FinalTime(1e3), saves=9)
    assert path.state is not None
    end = math.log1p(1e3)
    assert path.num_saved == 9
    np.testing.assert_allclose(path.reading, np.linspace(0, end, 9), rtol=1e-15)
    np.testing.assert_array_equal(path.state[0], start)
    np.testing.assert_allclose(path.state[-1], path.final, rtol=1e-14)
    assert path.log_time[0] == -math.inf
    np.testing.assert_allclose(path.log_time[-1], math.log(1e3), rtol=1e-15)
    np.testing.assert_allclose(
        path.log_time[1:], np.log(np.expm1(np.asarray(path.reading[1:]))), rtol=1e-13
    )
    assert path.observables == {}
    assert path.stats.num_steps == path.stats.num_accepted + path.stats.num_rejected


def test_saved_states_lie_on_the_orbit():
    # Each row is the final state of a solve of its own: nothing is interpolated.
    flow, start = ufm.HadamardFlow(4, 2.0), jnp.log(jnp.asarray([0.1, 0.2, 0.3]))
    path = ufm.solve(
        flow, start, stop=ufm.FinalTime(1e3), saves=9, solver=diffrax.Tsit5()
    )
    assert path.state is not None
    for row in (1, 4, 7):
        alone = ufm.solve(
            flow, start, stop=ufm.FinalTime(log=path.log_time[row]), saves=9
        )
        np.testing.assert_allclose(path.state[row], alone.final, rtol=0, atol=1e-7)


def test_one_compilation_serves_other_times_depths_states_and_tolerances():
    traces = []

    def observe(flow, log_time, state):
        del log_time
        traces.append(flow)
        return {"norm": flow.log_norm(state)}

    def solve(depth, time, a, rtol):
        return ufm.solve(
            ufm.HadamardFlow(2, depth),
            jnp.log(jnp.asarray([a])),
            stop=ufm.FinalTime(time),
            saves=3,
            observe=observe,
            rtol=rtol,
        )

    path = solve(1.0, 10.0, 0.1, 1e-8)
    first = len(traces)
    assert first > 0
    np.testing.assert_allclose(path.observables["norm"][-1], path.final[0], rtol=1e-14)
    solve(2.5, 1e10, 0.2, 1e-6)
    solve(math.inf, 3.0, 1e-8, 1e-9)
    assert len(traces) == first
