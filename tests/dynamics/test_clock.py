"""Clocks: their formulas, and the same orbit under all four."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from oracles import trajectories

import deepufm as ufm
from deepufm import Outcome, SaveEvery
from deepufm.dynamics import AbstractTimeClock

REDUCED_START = [0.02, 0.05, 0.03, 0.04, 0.01, 0.06, 0.035]


@pytest.mark.parametrize("t0", [1e-12, 1.0, 1e5])
def test_log_time_is_t0_expm1(t0):
    clock = ufm.LogTime(t0)
    for reading in (1e-9, 0.5, 30.0, 690.0):
        log_time = clock.log_time(jnp.asarray(reading))
        want = math.log(t0) + math.log(math.expm1(reading))
        assert float(log_time) == pytest.approx(want, rel=1e-15, abs=1e-14)
        assert float(clock.reading(log_time)) == pytest.approx(reading, rel=1e-13)
    assert clock.log_time(jnp.asarray(0.0)) == -jnp.inf
    assert clock.reading(jnp.asarray(-jnp.inf)) == 0


def test_log_time_has_times_beyond_every_float():
    clock, log_time = ufm.LogTime(), jnp.asarray(2.3e6)
    assert clock.reading(log_time) == 2.3e6
    assert clock.log_time(jnp.asarray(2.3e6)) == 2.3e6


def test_physical_time_is_time():
    clock = ufm.PhysicalTime()
    assert clock.log_time(jnp.asarray(0.0)) == -jnp.inf
    assert float(clock.log_time(jnp.asarray(7.0))) == pytest.approx(math.log(7))
    assert float(clock.reading(jnp.log(jnp.asarray(7.0)))) == pytest.approx(7)


def test_pace_is_speed_times_the_derivative_of_time():
    motion = ufm.Motion(
        direction=jnp.ones(2),
        log_speed=jnp.asarray(-900.0),
        log_growth=jnp.asarray(2.0),
        log_length=jnp.asarray(3.0),
        log_activity=jnp.asarray(0.0),
    )
    reading = jnp.asarray(5.0)
    paces = [
        (ufm.PhysicalTime(), -900.0),
        (ufm.LogTime(2.0), -900.0 + math.log(2) + 5),  # dt/ds = t0 e^s
        (ufm.ArcLength(), -3.0),
        (ufm.LogNorm(), -2.0),
    ]
    for clock, pace in paces:
        assert float(clock.log_pace(reading, motion)) == pytest.approx(pace)
        if isinstance(clock, AbstractTimeClock):
            assert float(clock.log_rate(reading)) == pytest.approx(pace + 900)


@pytest.mark.parametrize("t0", [0.0, -1.0, math.inf, math.nan])
def test_log_time_refuses_a_bad_unit(t0):
    with pytest.raises(ValueError, match=f"`t0`.*positive and finite.*{t0}"):
        ufm.LogTime(t0)


@pytest.fixture(scope="module")
def reduced_orbit():
    """K = 8, L = 2 at t = 1e6, on the default clock at a tight tolerance."""
    flow = ufm.HadamardFlow(8, 2.0)
    path = ufm.solve(
        flow,
        jnp.log(jnp.asarray(REDUCED_START)),
        stop=ufm.FinalTime(1e6),
        saves=2,
        observe=ufm.metrics,
        rtol=1e-11,
    )
    assert path.outcome == Outcome.reached
    return flow, path.final, jnp.exp(flow.log_norm(path.final))


def assert_on_orbit(path, final, log_time):
    assert path.outcome == Outcome.reached
    np.testing.assert_allclose(path.final, final, rtol=0, atol=1e-6)
    np.testing.assert_allclose(path.final_log_time, log_time, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("clock", "saves"),
    [(ufm.LogNorm(), 2), (ufm.ArcLength(), SaveEvery(0.05, 200))],
    ids=["LogNorm", "ArcLength"],
)
def test_reduced_flow_has_the_same_orbit_on_state_clocks(reduced_orbit, clock, saves):
    flow, final, norm = reduced_orbit
    path = ufm.solve(
        flow,
        jnp.log(jnp.asarray(REDUCED_START)),
        clock=clock,
        stop=ufm.FinalNorm(norm),
        saves=saves,
    )
    assert_on_orbit(path, final, math.log(1e6))


def test_reduced_flow_has_the_same_orbit_in_physical_time(reduced_orbit):
    flow, final, _ = reduced_orbit
    path = ufm.solve(
        flow,
        jnp.log(jnp.asarray(REDUCED_START)),
        clock=ufm.PhysicalTime(),
        stop=ufm.FinalTime(1e6),
        saves=2,
    )
    assert_on_orbit(path, final, math.log(1e6))
    np.testing.assert_allclose(path.final_reading, 1e6, rtol=1e-13)


def test_the_unit_of_log_time_does_not_matter(reduced_orbit):
    flow, final, _ = reduced_orbit
    path = ufm.solve(
        flow,
        jnp.log(jnp.asarray(REDUCED_START)),
        clock=ufm.LogTime(1e-4),
        stop=ufm.FinalTime(1e6),
        saves=2,
        observe=ufm.metrics,
    )
    assert_on_orbit(path, final, math.log(1e6))


def test_arc_length_is_the_length_of_the_path_in_a(reduced_orbit):
    # P2 E.5: ‖da‖_2 = ds. A chord falls short of its arc by (curvature·ds)²/24.
    flow, _, norm = reduced_orbit
    path = ufm.solve(
        flow,
        jnp.log(jnp.asarray(REDUCED_START)),
        clock=ufm.ArcLength(),
        stop=ufm.FinalNorm(norm),
        saves=SaveEvery(0.05, 200),
    )
    assert path.state is not None
    num_saved = int(path.num_saved)
    assert 50 < num_saved < 200
    readings = np.asarray(path.reading)[:num_saved]
    np.testing.assert_allclose(readings, 0.05 * np.arange(num_saved), rtol=1e-14)
    saved = np.exp(np.asarray(path.state))[:num_saved]
    assert np.all(readings <= path.final_reading)
    for rows in (path.reading, path.log_time, path.state):
        assert np.all(np.isnan(rows[num_saved:]))
    speed = np.linalg.norm(np.diff(saved, axis=0), axis=1) / 0.05
    assert np.all((speed > 1 - 1e-3) & (speed < 1 + 1e-6))


def test_log_norm_reads_the_growth_of_the_norm():
    run = trajectories()[0]
    start = jnp.log(jnp.asarray(run["a0"]))
    point = run["points"][-1]
    norm = sum(point["a"])
    path = ufm.solve(
        ufm.HadamardFlow(8, 1.0),
        start,
        clock=ufm.LogNorm(),
        stop=ufm.FinalNorm(norm),
        saves=2,
    )
    growth = math.log(norm / sum(run["a0"]))
    np.testing.assert_allclose(path.final_reading, growth, rtol=1e-13)
    np.testing.assert_allclose(path.final_log_time, math.log(point["t"]), atol=1e-6)
    np.testing.assert_allclose(path.final, np.log(point["a"]), rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def matrix_orbit(key):
    """K = 3, n = 2, d = 4, L = 2 from a Gaussian start to t = 1e3."""
    flow = ufm.GradientFlow(ufm.CrossEntropy(), 2)
    model = ufm.gaussian(key, num_classes=3, per_class=2, width=4, depth=2)
    path = ufm.solve(flow, model, stop=ufm.FinalTime(1e3), saves=2, rtol=1e-11)
    assert path.outcome == Outcome.reached
    return flow, model, path.final


@pytest.mark.parametrize(
    ("clock", "saves"),
    [
        (ufm.PhysicalTime(), 2),
        (ufm.ArcLength(), SaveEvery(1.0, 100)),
        (ufm.LogNorm(), SaveEvery(1.0, 100)),
    ],
    ids=["PhysicalTime", "ArcLength", "LogNorm"],
)
def test_matrix_flow_has_the_same_orbit_on_every_clock(matrix_orbit, clock, saves):
    flow, model, final = matrix_orbit
    path = ufm.solve(flow, model, clock=clock, stop=ufm.FinalTime(1e3), saves=saves)
    assert path.outcome == Outcome.reached
    np.testing.assert_allclose(path.final_log_time, math.log(1e3), atol=1e-9)
    for name in ("head", "hidden", "features"):
        want = np.asarray(getattr(final, name))
        error = np.linalg.norm(getattr(path.final, name) - want)
        assert error < 1e-6 * np.linalg.norm(want)
