"""How solves end: every outcome, with the last valid state and its time."""

from collections.abc import Callable
from typing import ClassVar

import diffrax
import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import solve_ivp
from scipy.special import expi

import deepufm as ufm
from deepufm import AbstractFlow, Outcome, SaveEvery


class LineFlow(AbstractFlow):
    """y' = field(y) of one number, without any guard."""

    field: Callable = eqx.field(static=True)
    norm_diverges: ClassVar[bool] = True
    is_smooth: ClassVar[bool] = True
    growth_is_exact: ClassVar[bool] = False
    log_state: ClassVar[bool] = False

    def __call__(self, state):
        direction = self.field(state)
        return direction, jnp.where(direction[0] == 0, -jnp.inf, 0.0)

    def log_norm(self, state):
        return jnp.log(jnp.abs(state[0]))

    def log_growth(self, state, direction):
        return jnp.log(direction[0] / state[0])

    def log_length(self, state, direction):
        del state
        return jnp.log(jnp.abs(direction[0]))

    def log_activity(self, state, direction):
        return self.log_length(state, direction)

    def log_loss(self, state):
        return -state[0]

    def relative_error(self, error, before, after):
        size = jnp.maximum(jnp.max(jnp.abs(before)), jnp.max(jnp.abs(after)))
        return jnp.max(jnp.abs(error)) / size

    def check(self, state):
        pass


def cliff(y):
    """Speed 1, and nothing defined beyond y = 2."""
    return jnp.where(y < 2, 1.0, jnp.nan)


def still(y):
    return jnp.zeros_like(y)


def assert_last_state_is_valid(path):
    assert np.all(np.isfinite(path.final))
    assert np.isfinite(path.final_log_time)
    assert np.isfinite(path.final_reading)


def test_non_finite_keeps_the_last_valid_state():
    path = ufm.solve(
        LineFlow(cliff),
        jnp.ones(1),
        clock=ufm.PhysicalTime(),
        stop=ufm.FinalTime(4.0),
        saves=9,
        keep_states=True,
    )
    assert path.outcome == Outcome.non_finite
    assert_last_state_is_valid(path)
    # y = 1 + t up to the cliff at t = 1; saves at t = 0, 0.5 and perhaps 1.
    np.testing.assert_allclose(path.final, 2.0, rtol=1e-9)
    np.testing.assert_allclose(path.final[0], 1 + path.final_reading, rtol=1e-12)
    num_saved = int(path.num_saved)
    assert num_saved in (2, 3)
    assert path.state is not None
    np.testing.assert_allclose(
        path.state[:num_saved, 0], 1 + 0.5 * np.arange(num_saved), rtol=1e-12
    )
    for rows in (path.state, path.log_time, path.reading):
        assert np.all(np.isnan(rows[num_saved:]))


def test_step_underflow_is_told_from_non_finite():
    # y' = e^y blows up at t = 1: finite states, and steps that shrink for ever.
    path = ufm.solve(
        LineFlow(jnp.exp),
        jnp.full((1,), 1e-3),
        clock=ufm.PhysicalTime(),
        stop=ufm.FinalTime(2.0),
        saves=3,
    )
    assert path.outcome == Outcome.step_underflow
    assert_last_state_is_valid(path)
    np.testing.assert_allclose(path.final_reading, np.exp(-1e-3), rtol=1e-6)
    assert path.num_saved == 1


def test_not_met_at_rest():
    path = ufm.solve(
        LineFlow(still),
        jnp.ones(1),
        stop=ufm.FinalNorm(2.0),
        saves=SaveEvery(1.0, 3),
    )
    assert path.outcome == Outcome.not_met
    assert_last_state_is_valid(path)
    np.testing.assert_array_equal(path.final, 1.0)
    assert path.num_saved == 3


def test_step_budget_keeps_what_was_reached():
    flow, start = ufm.HadamardFlow(2, 1.0), jnp.log(jnp.asarray([0.1]))
    path = ufm.solve(flow, start, stop=ufm.FinalTime(1e100), saves=3, max_steps=20)
    assert path.outcome == Outcome.step_budget
    assert path.stats.num_steps == 20
    assert_last_state_is_valid(path)
    assert path.num_saved == 1
    assert np.all(np.isnan(path.log_time[1:]))
    # The state lies on the orbit at its time: dt = (1 + e^{2a})/(2a) da.
    a = float(np.exp(path.final[0]))
    time = 0.5 * (np.log(a / 0.1) + expi(2 * a) - expi(0.2))
    np.testing.assert_allclose(path.final_log_time, np.log(time), atol=1e-6)


@pytest.mark.parametrize(
    ("clock", "solver"),
    [
        (ufm.LogTime(), None),
        (ufm.LogTime(), diffrax.Tsit5()),
        (ufm.LogNorm(), None),
    ],
    ids=["Dopri8", "Tsit5", "Kvaerno5"],
)
def test_a_zero_mode_stays_zero_and_leaves_the_others_alone(clock, solver):
    # With the third of three modes zero, those of K = 4 obey d log a_i/dt = (b_i/D) of
    # their own; integrated by SciPy below.
    def rhs(t, u):
        del t
        a1, a2 = np.exp(u)
        # Psi for K = 4 by rows {1,3}, {2,3}, {1,2}, with a_3 = 0.
        m = 2 * np.array([a1, a2, a1 + a2])
        e = np.exp(-m)
        return 2 * np.array([e[0] + e[2], e[1] + e[2]]) / (1 + e.sum())

    a0 = np.array([0.2, 0.3])
    end = solve_ivp(
        rhs, (0, 1e3), np.log(a0), method="DOP853", rtol=1e-12, atol=1e-13
    ).y[:, -1]
    time_clock = isinstance(clock, ufm.LogTime)
    path = ufm.solve(
        ufm.HadamardFlow(4, 1.0),
        jnp.log(jnp.asarray([0.2, 0.3, 0.0])),
        clock=clock,
        stop=ufm.FinalTime(1e3) if time_clock else ufm.FinalNorm(np.exp(end).sum()),
        saves=2,
        solver=solver,
    )
    assert path.outcome == Outcome.reached
    np.testing.assert_allclose(path.final[:2], end, rtol=0, atol=1e-7)
    assert path.final[2] == -np.inf
    assert path.state is not None
    np.testing.assert_array_equal(path.state[:, 2], -np.inf)
    np.testing.assert_allclose(path.final_log_time, np.log(1e3), atol=1e-6)


OPTIONS = [
    ({"saves": 1}, "`saves`.*at least 2, but is 1"),
    ({"max_steps": 0}, "`max_steps` must be at least 1, but is 0"),
    ({"rtol": 0.0}, "`rtol` must lie between .* and 1, but is 0"),
    ({"rtol": 1e-16}, "`rtol` must lie between .*1e-16.*float64"),
    ({"rtol": 2.0}, "`rtol` must lie between .* 2"),
    ({"rtol": float("nan")}, "`rtol` must lie between .* nan"),
    ({"clock": ufm.ArcLength()}, "FinalTime on ArcLength.*SaveEvery"),
    ({"stop": ufm.FinalNorm(9.0)}, "FinalNorm on LogTime.*SaveEvery"),
    ({"stop": ufm.LogLossBelow(-9.0)}, "LogLossBelow on LogTime.*SaveEvery"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS)
def test_bad_option_is_refused(options, message):
    given = {"stop": ufm.FinalTime(1.0)} | options
    with pytest.raises(ValueError, match=message) as error:
        ufm.solve(ufm.HadamardFlow(4, 1.0), jnp.zeros(3), **given)
    assert "\n" not in str(error.value)


STARTS = [
    (
        ufm.HadamardFlow(4, 1.0),
        jnp.zeros(4),
        r"K = 4 .* must have shape \(3,\).*\(4,\)",
    ),
    (ufm.HadamardFlow(4, 1.0), jnp.asarray([0.0, jnp.nan, 0.0]), "log a_1 is nan"),
    (ufm.HadamardFlow(4, 1.0), jnp.asarray([0.0, jnp.inf, 0.0]), "log a_1 is inf"),
    (ufm.HadamardFlow(4, 1.0), jnp.full(3, -jnp.inf), "At least one a_i .* positive"),
    (ufm.LogitFlow(4), jnp.asarray([0.0, jnp.nan, 0.0]), "must be finite"),
    (ufm.LogitFlow(4), jnp.zeros(2), r"must have shape \(3,\)"),
]


@pytest.mark.parametrize(("flow", "start", "message"), STARTS)
def test_bad_start_is_refused(flow, start, message):
    with pytest.raises(ValueError, match=message) as error:
        ufm.solve(flow, start, stop=ufm.FinalTime(1.0))
    assert "\n" not in str(error.value)


def test_an_implicit_solver_is_refused_for_too_many_unknowns():
    model = ufm.DeepUFM(jnp.ones((10, 64)), jnp.ones((1, 64, 64)), jnp.ones((64, 50)))
    flow = ufm.GradientFlow(ufm.CrossEntropy(), 5)
    with pytest.raises(ValueError, match="at most 4000.* but this flow has 7936"):
        ufm.solve(
            flow, model, stop=ufm.FinalTime(1.0), saves=2, solver=diffrax.Kvaerno5()
        )


def test_log_norm_is_refused_where_the_norm_does_not_diverge():
    class Bounded(LineFlow):
        norm_diverges: ClassVar[bool] = False

    with pytest.raises(ValueError, match="norm that grows for ever.*LogTime"):
        ufm.solve(
            Bounded(still),
            jnp.ones(1),
            clock=ufm.LogNorm(),
            stop=ufm.FinalTime(1.0),
            saves=SaveEvery(1.0, 3),
        )


@pytest.mark.parametrize(("step", "capacity"), [(0.0, 3), (-1.0, 3), (1.0, 0)])
def test_bad_save_grid_is_refused(step, capacity):
    with pytest.raises(ValueError, match="`SaveEvery` needs"):
        SaveEvery(step, capacity)
