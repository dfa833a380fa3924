"""Starts and goals at the edge: sizes no double holds, both signs, rest, and NaN."""

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from diffrax import Dopri8
from scipy.special import expi

import deepufm as ufm

FEW = ufm.SaveEvery(1.0, 2)


def log_time_of_two_classes(log_a0, a):
    """log t of da/dt = 2a/(1 + e^{2a}): t = ½[log a/a0 + Ei(2a) - Ei(2a0)].

    For tiny a0, Ei(2a0) = γ + log 2a0 to rounding, also where a0 itself is no double.
    """
    start = np.euler_gamma + np.log(2) + log_a0
    return np.log(0.5 * (np.log(a) - log_a0 + expi(2 * a) - start))


@pytest.mark.parametrize(
    ("clock", "starts"),
    [
        # Arc length is counted in a itself, which must be a double.
        (ufm.ArcLength(), (-30.0, -400.0, -690.0)),
        (ufm.LogNorm(), (-30.0, -400.0, -2000.0)),
    ],
)
def test_elapsed_time_from_starts_that_underflow(clock, starts):
    flow = ufm.HadamardFlow(2, 1.0)
    for log_a0 in starts:
        path = ufm.solve(
            flow,
            jnp.asarray([log_a0]),
            stop=ufm.FinalNorm(2.0),
            clock=clock,
            solver=Dopri8(),
            # On `LogNorm` the stop fixes the end; both take a `SaveEvery`.
            saves=FEW,
        )
        assert path.outcome == ufm.Outcome.reached
        expected = log_time_of_two_classes(log_a0, 2.0)
        assert float(path.final_log_time) == pytest.approx(expected, abs=1e-6)


def test_an_escape_too_sharp_for_log_time_is_followed_on_a_state_clock():
    """K = 4, L = 8 from 1e-30 on the DNC ray: t = ∫ (e^{4m} + 3)/(4 m^{16/9}) dm."""
    edges = [mpmath.mpf(10) ** k for k in (-30, -28, -25, -20, -10, -4, -1, 0)]
    power = mpmath.mpf(16) / 9
    expected = mpmath.log(
        mpmath.quad(lambda m: (mpmath.exp(4 * m) + 3) / (4 * m**power), edges)
    )
    flow, start = ufm.HadamardFlow(4, 8.0), jnp.full(3, np.log(1e-30))
    stop = ufm.FinalNorm(3.0)
    path = ufm.solve(flow, start, stop=stop, clock=ufm.ArcLength(), saves=FEW)
    assert path.outcome == ufm.Outcome.reached
    assert float(path.final_log_time) == pytest.approx(float(expected), abs=1e-8)
    path = ufm.solve(flow, start, stop=ufm.FinalTime(1e30), saves=2)
    assert path.outcome == ufm.Outcome.step_underflow


def test_logits_of_either_sign_have_one_orbit():
    flow, start = ufm.LogitFlow(4), jnp.asarray([-1.0, -1.0, -0.5])
    stop = ufm.FinalTime(1e3)
    plain = ufm.solve(flow, start, stop=stop, saves=2, rtol=1e-10)
    path = ufm.solve(
        flow, start, stop=stop, clock=ufm.ArcLength(), saves=FEW, rtol=1e-10
    )
    np.testing.assert_allclose(path.final, plain.final, rtol=1e-7)


@pytest.mark.parametrize("goal", [float("nan"), -1.0])
def test_a_traced_goal_that_is_none_is_not_reached(goal):
    solve = jax.jit(
        lambda t: ufm.solve(
            ufm.HadamardFlow(4, 2.0), jnp.zeros(3), stop=ufm.FinalTime(t), saves=2
        )
    )
    path = solve(goal)
    assert path.outcome == ufm.Outcome.non_finite
    np.testing.assert_array_equal(path.final, jnp.zeros(3))
    assert int(path.num_saved) == 1


def _rank(flow, log_time, state):
    del flow, log_time
    return {"rank": ufm.numerical_rank(jnp.exp(state), 1e-3)}


def test_integer_observables_of_rows_not_reached_are_nan():
    path = ufm.solve(
        ufm.HadamardFlow(4, 2.0),
        jnp.zeros(3),
        stop=ufm.FinalTime(1e6),
        saves=5,
        max_steps=10,
        observe=_rank,
    )
    rank, saved = np.asarray(path.observables["rank"]), int(path.num_saved)
    assert path.outcome == ufm.Outcome.step_budget
    assert 1 <= saved < 5
    assert (rank[:saved] == 3).all()
    assert np.isnan(rank[saved:]).all()


def test_a_model_of_zeros_rests_at_any_time():
    model = ufm.DeepUFM(jnp.zeros((3, 4)), jnp.zeros((1, 4, 4)), jnp.zeros((4, 3)))
    flow = ufm.GradientFlow(ufm.CrossEntropy(), 1)
    direction, log_speed = flow(model)
    assert log_speed == -jnp.inf
    assert not any(bool(jnp.any(leaf)) for leaf in jax.tree.leaves(direction))
    path = ufm.solve(flow, model, stop=ufm.FinalTime(log=1000.0), saves=2)
    assert path.outcome == ufm.Outcome.reached
    assert not bool(jnp.any(path.final.head))


def test_a_model_frozen_by_underflow_is_not_at_rest(key):
    """Ten factors of 1e-40 are no double: nothing moves, and nothing was reached."""
    model = ufm.gaussian(
        key, num_classes=3, per_class=1, width=4, depth=10, scale=1e-40
    )
    flow = ufm.GradientFlow(ufm.CrossEntropy(), 1)
    path = ufm.solve(flow, model, stop=ufm.FinalTime(1e3), saves=2)
    assert path.outcome == ufm.Outcome.non_finite
    np.testing.assert_array_equal(path.final.head, model.head)


def test_a_single_layer_of_zeros_moves():
    """W_1 = 0 beside full ends: A_1 and G_2 vanish, dW_1/dt = A_2^T G_1 does not."""
    model = ufm.DeepUFM(jnp.eye(3, 4), jnp.zeros((1, 4, 4)), jnp.eye(4, 3))
    flow = ufm.GradientFlow(ufm.CrossEntropy(), 1)
    direction, log_speed = flow(model)
    moved = np.exp(float(log_speed)) * np.asarray(direction.hidden[0])
    expected = np.zeros((4, 4))
    expected[:3, :3] = np.eye(3) - 1 / 3  # Y - P at Z = 0
    np.testing.assert_allclose(moved, expected, atol=1e-15)


def test_logit_flow_on_log_norm_needs_a_norm_that_grows():
    for start in (jnp.zeros(3), jnp.asarray([1.0, -1.0, 1.0])):
        with pytest.raises(ValueError, match="counts the growth of sum"):
            ufm.solve(
                ufm.LogitFlow(4),
                start,
                stop=ufm.FinalNorm(9.0),
                clock=ufm.LogNorm(),
                saves=2,
            )


def test_single_precision_on_log_norm():
    start = jnp.asarray([0.1, 0.2, 0.3], jnp.float32)
    path = ufm.solve(
        ufm.HadamardFlow(4, 2.0),
        jnp.log(start),
        stop=ufm.FinalNorm(30.0),
        clock=ufm.LogNorm(),
        solver=Dopri8(),
        saves=2,
    )
    assert path.outcome == ufm.Outcome.reached
    assert path.final.dtype == jnp.float32
    assert float(jnp.sum(jnp.exp(path.final))) == pytest.approx(30.0, rel=1e-4)
