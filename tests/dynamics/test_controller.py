"""The step controller: relative error, landings, and ends that are told apart."""

import diffrax
import jax.numpy as jnp
import numpy as np
import pytest

import deepufm as ufm
from deepufm.dynamics._controller import RelativeController


def relative_to_start(error, before, after):
    del after
    return jnp.max(jnp.abs(error) / jnp.abs(before))


def controller(landings=(0.0, 1.0, 2.0)):
    return RelativeController(
        relative_to_start,
        jnp.asarray(1e-6),
        jnp.asarray(landings),
    )


def unit_speed(*args):
    del args
    return jnp.ones(1)


def started(landings=(0.0, 1.0, 2.0)):
    """A controller about to try a step, with y = 1 and y' = 1."""
    steering = controller(landings)
    end, state = steering.init(
        None, jnp.asarray(0.0), jnp.asarray(2.0), jnp.ones(1), None, None,
        unit_speed, 5.0,
    )  # fmt: skip
    return steering, end, state


def adapt(steering, state, start, end, error, y=1.0):
    return steering.adapt_step_size(
        jnp.asarray(start), jnp.asarray(end), jnp.full(1, y), jnp.full(1, y), None,
        jnp.full(1, error), 5.0, state,
    )  # fmt: skip


def test_first_step_changes_the_state_by_a_hundredth():
    _, end, _ = started()
    assert float(end) == pytest.approx(0.01)


@pytest.mark.parametrize("y", [1e-200, 1.0, 1e200])
def test_acceptance_is_relative_to_the_size_of_the_state(y):
    steering, _, state = started()
    for ratio, accepted in ((0.9e-6, True), (1.1e-6, False)):
        keep, *_ = adapt(steering, state, 0.0, 0.1, ratio * y, y)
        assert bool(keep) == accepted


def test_steps_end_on_landings_and_take_up_their_size_again():
    steering, _, state = started()
    # The error of a step of 0.45 asks for one of about 2: it lands on 1.
    keep, start, end, _, state, _ = adapt(steering, state, 0.35, 0.8, 1e-10)
    assert keep
    assert (float(start), float(end)) == (0.8, 1.0)
    # After the landing the step of about 2 is resumed, and lands on 2.
    keep, start, end, _, state, _ = adapt(steering, state, 0.8, 1.0, 1e-30)
    assert keep
    assert (float(start), float(end)) == (1.0, 2.0)


def test_a_gap_of_under_two_steps_is_halved():
    steering, _, state = started()
    # A step of 0.6 is rejected and shrunk to the controller's least factor, 0.2...
    keep, start, end, _, _, _ = adapt(steering, state, 0.8, 0.95, 1e-2)
    assert not keep
    assert float(end) - float(start) == pytest.approx(0.2 * 0.15)
    # ...while an accepted one that would leave a sliver before 1 is cut to the middle.
    factor = 0.9 * (0.3e-6 / 1e-6) ** -0.2
    step = 0.1 * factor
    assert 0.1 < step < 0.15
    keep, start, end, _, _, _ = adapt(steering, state, 0.75, 0.85, 0.3e-6)
    assert keep
    assert (float(start), float(end)) == pytest.approx((0.85, 0.925))


def test_ends_are_told_apart():
    steering, _, state = started()
    ulp = float(np.spacing(0.5))
    *_, result = adapt(steering, state, 0.5, 0.5 + ulp, 1.0)
    assert result == diffrax.RESULTS.dt_min_reached
    # A shrunken step that rounds back to itself is as stuck.
    *_, result = adapt(steering, state, 0.5, 0.5 + 2 * ulp, 1.5e-6)
    assert result == diffrax.RESULTS.dt_min_reached
    *_, result = adapt(steering, state, 0.5, 0.5 + ulp, float("nan"))
    assert result == diffrax.RESULTS.internal_error
    *_, result = adapt(steering, state, 0.5, 0.6, float("nan"))
    assert result == diffrax.RESULTS.successful


def test_tiny_modes_are_resolved_relative_to_themselves():
    # Modes of 1e-30 and 1: the errors of both logarithms count alike.
    flow = ufm.HadamardFlow(4, 1.0)
    state = jnp.log(jnp.asarray([1e-30, 1.0, 1e-3]))
    error = jnp.asarray([3e-9, 1e-9, -2e-9])
    assert flow.relative_error(error, state, state) == 3e-9


def test_logits_are_one_block():
    flow = ufm.LogitFlow(4)
    before, after = jnp.asarray([0.0, 0.5, -1.0]), jnp.asarray([0.0, 0.5, -2.0])
    got = flow.relative_error(jnp.asarray([1e-9, 0.0, 0.0]), before, after)
    assert float(got) == pytest.approx(5e-10)
    assert flow.relative_error(jnp.zeros(3), jnp.zeros(3), jnp.zeros(3)) == 0


def taken(steering, ratios, order=5.0):
    """The steps that follow errors of `ratios` tolerances, and which were accepted."""
    start, end, y = jnp.asarray(0.0), jnp.asarray(1e-3), jnp.ones(1)
    _, state = steering.init(
        None, start, jnp.asarray(1e9), y, None, None, unit_speed, order
    )
    steps, kept = [], []
    for ratio in ratios:
        error = jnp.full(1, ratio * 1e-6)
        keep, start, end, _, state, _ = steering.adapt_step_size(
            start, end, y, y, None, error, order, state
        )
        steps.append(float(end - start))
        kept.append(bool(keep))
    return steps, kept


def test_steps_follow_the_trend_of_accepted_errors():
    """By hand: e h^-5 grew from one step to the next, and would as much again."""
    steps, kept = taken(controller(()), [0.1, 0.1, 0.8])
    assert kept == [True, True, True]
    alone = 0.9 * 0.1**-0.2
    assert steps[0] == pytest.approx(1e-3 * alone)
    # The error stayed: the coefficient fell, which is no reason for a longer step yet.
    assert steps[1] == pytest.approx(steps[0] * alone)
    growth = (0.8 / steps[1] ** 5) / (0.1 / steps[0] ** 5)
    expected = 0.9 * (0.8 / steps[1] ** 5 * growth) ** -0.2
    assert expected < steps[1] * 0.9 * 0.8**-0.2
    assert steps[2] == pytest.approx(expected)


def test_no_step_grows_after_a_rejection_and_the_limits_hold():
    steps, kept = taken(controller(()), [10.0, 1e-3, 0.0, 1e-9, np.nan, np.inf, 0.0])
    assert kept == [False, True, True, True, False, False, True]
    assert steps[0] == pytest.approx(1e-3 * 0.9 * 10**-0.2)
    assert steps[1] == pytest.approx(steps[0])
    assert steps[2] == pytest.approx(10 * steps[1])
    assert steps[3] == pytest.approx(10 * steps[2])  # zero tells of no trend
    assert steps[4] == pytest.approx(0.2 * steps[3])
    assert steps[5] == pytest.approx(0.2 * steps[4])
    assert steps[6] == pytest.approx(steps[5])


def test_a_blow_up_is_followed_without_rejecting_every_second_step():
    """y' = y², a fixed factor a step; PI control rejects nearly every second one."""

    def square(t, y, args):
        del t, args
        return y**2

    def count(control):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(square), diffrax.Dopri8(), 0.0,
            1 - 1e-5, None, jnp.ones(1), stepsize_controller=control,
        )  # fmt: skip
        # The solution 1/(1 - t) magnifies errors as it magnifies time.
        assert solution.ys is not None
        np.testing.assert_allclose(solution.ys[-1], 1e5, rtol=1e-2)
        return {k: int(v) for k, v in solution.stats.items() if "steps" in k}

    ours = count(RelativeController(relative_to_start, jnp.asarray(1e-8), jnp.zeros(0)))
    theirs = count(diffrax.PIDController(rtol=1e-8, atol=0.0, pcoeff=0.2, icoeff=0.4))
    assert ours["num_rejected_steps"] <= 0.1 * ours["num_steps"]
    assert theirs["num_rejected_steps"] >= 0.4 * theirs["num_steps"]
    assert ours["num_steps"] < 0.6 * theirs["num_steps"]
