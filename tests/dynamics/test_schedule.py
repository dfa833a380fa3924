"""Phases: one solve through a switch is two solves chained by hand, on every clock."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepufm as ufm
from deepufm import CrossEntropy, GradientFlow, Outcome, PiecewiseConstant, SaveEvery

# Log-loss 0.75 at the start, -0.84 at the switch, -5.35 at the end.
DECAY, SWITCH, FINAL = 0.2, 5.0, 40.0
SCHEDULE = PiecewiseConstant((DECAY, 0.0), (SWITCH,))
FLOW = GradientFlow(CrossEntropy(), 1, SCHEDULE)


def draw(seed):
    return ufm.gaussian(
        jax.random.key(seed), num_classes=3, per_class=1, width=3, depth=1, scale=1.5
    )


@pytest.mark.parametrize(
    ("values", "times", "message"),
    [
        ((1.0, 0.0), (), "one switch time fewer than values, but has 2 values and 0"),
        ((1.0,), (1.0,), "one switch time fewer"),
        ((1.0, 0.0), (0.0,), "positive, finite and rising"),
        ((1.0, 0.0), (-1.0,), "positive, finite and rising"),
        ((1.0, 0.0), (np.inf,), "positive, finite and rising"),
        ((1.0, 0.0, 1.0), (2.0, 2.0), "positive, finite and rising"),
        ((1.0, 0.0, 1.0), (3.0, 2.0), "positive, finite and rising"),
    ],
)
def test_bad_phases_are_refused(values, times, message):
    with pytest.raises(ValueError, match=message):
        PiecewiseConstant(values, times)


def test_negative_decay_in_a_later_phase_is_refused():
    with pytest.raises(ValueError, match="finite and at least 0"):
        GradientFlow(CrossEntropy(), 1, PiecewiseConstant((0.1, -0.1), (1.0,)))


def test_a_schedule_of_zeros_is_no_decay():
    flow = GradientFlow(CrossEntropy(), 1, PiecewiseConstant((0.0, 0.0), (1.0,)))
    assert flow.weight_decay is None


def test_at_a_switch_the_value_is_that_of_the_phase_before():
    schedule = PiecewiseConstant((3.0, 2.0, 1.0), (4.0, 9.0))
    log_times = np.log([1e-300, 4.0, 4.0000001, 9.0, 9.0000001, 1e300])
    values = jax.vmap(schedule)(jnp.append(-jnp.inf, log_times))
    np.testing.assert_array_equal(values, [3, 3, 3, 2, 2, 1, 1])


def test_a_flow_of_phases_has_no_one_speed():
    with pytest.raises(ValueError, match=r"Use `flow.at\(log_time\)\(state\)`"):
        FLOW(draw(0))
    assert FLOW.at(jnp.log(jnp.asarray(1.0))).weight_decay == DECAY
    assert FLOW.at(jnp.log(jnp.asarray(9.0))).weight_decay == 0


@jax.jit
def by_hand(model, decay, time):
    """One phase, with a traced rate: also 0 for the second one."""
    path = ufm.solve(
        GradientFlow(CrossEntropy(), 1, decay), model, stop=ufm.FinalTime(time),
        saves=2, rtol=1e-10,
    )  # fmt: skip
    return path.final


@pytest.fixture(scope="module")
def start():
    return draw(0)


@pytest.fixture(scope="module")
def chained(start):
    """The states at the switch and at the end."""
    middle = by_hand(start, DECAY, SWITCH)
    return middle, by_hand(middle, 0.0, FINAL - SWITCH)


def row_of(tree, row):
    return jax.tree.map(lambda x: x[row], tree)


def distance(state, reference):
    """The largest relative error of a block."""
    pairs = [(state.head, reference.head), (state.features, reference.features)]
    return max(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs)


def observe(flow, log_time, state):
    return {
        "decay": flow.weight_decay,
        "log_time": log_time,
        "log_loss": flow.log_loss(state),
    }


def solve(start, time=FINAL, **options):
    options = {"stop": ufm.FinalTime(time), "saves": 25, "rtol": 1e-10} | options
    return ufm.solve(FLOW, start, observe=observe, **options)


@pytest.fixture(scope="module")
def log_path(start):
    return solve(start, keep_states=True)


def assert_rows_are_in_order(path, start):
    saved = int(path.num_saved)
    reading, log_time = np.asarray(path.reading), np.asarray(path.log_time)
    assert np.all(np.diff(reading[:saved]) > 0)
    assert np.all(np.diff(log_time[1:saved]) > 0)
    assert np.all(np.isnan(reading[saved:]))
    assert np.all(np.isnan(log_time[saved:]))
    assert reading[0] == 0
    assert log_time[0] == -np.inf
    np.testing.assert_array_equal(path.observables["log_time"], log_time)
    decays = np.where(log_time[:saved] <= np.log(SWITCH), DECAY, 0)
    np.testing.assert_array_equal(path.observables["decay"][:saved], decays)
    assert int(path.stats.num_steps) == int(
        path.stats.num_accepted + path.stats.num_rejected
    )
    if path.state is not None:
        assert distance(row_of(path.state, 0), start) == 0


def test_log_time_passes_the_switch_as_two_solves_do(start, chained, log_path):
    assert log_path.outcome == Outcome.reached
    assert log_path.num_saved == 25
    assert_rows_are_in_order(log_path, start)
    # Measured: 7.5e-12, at 1e-10 a step.
    assert distance(log_path.final, chained[1]) < 5e-11
    np.testing.assert_allclose(log_path.final_log_time, np.log(FINAL), rtol=1e-14)
    readings = np.linspace(0, np.log1p(FINAL), 25)
    np.testing.assert_allclose(log_path.reading, readings, rtol=1e-14)
    np.testing.assert_allclose(
        np.exp(log_path.log_time), np.expm1(readings), rtol=1e-12
    )


def test_saved_states_of_both_phases_are_those_of_solves_to_their_time(
    start, chained, log_path
):
    for row in (6, 12, 18, 23):
        time = float(np.exp(log_path.log_time[row]))
        if time <= SWITCH:
            want = by_hand(start, DECAY, time)
        else:
            want = by_hand(chained[0], 0.0, time - SWITCH)
        assert distance(row_of(log_path.state, row), want) < 5e-11


def test_a_final_time_before_the_switch_knows_nothing_of_it(start):
    path = solve(start, 2.0, keep_states=True)
    assert path.outcome == Outcome.reached
    assert path.num_saved == 25
    np.testing.assert_allclose(path.final_log_time, np.log(2.0), rtol=1e-14)
    assert distance(path.final, by_hand(start, DECAY, 2.0)) < 5e-11
    assert np.all(np.asarray(path.observables["decay"]) == DECAY)


def test_a_final_time_at_the_switch_ends_there(start, chained):
    path = solve(start, SWITCH, keep_states=True)
    assert path.outcome == Outcome.reached
    assert path.num_saved == 25
    assert distance(path.final, chained[0]) < 5e-11


MAX_STEPS = 400


@jax.jit
@jax.vmap
def physical(model, switch, time):
    flow = GradientFlow(CrossEntropy(), 1, PiecewiseConstant([DECAY, 0.0], [switch]))
    path = ufm.solve(
        flow, model, stop=ufm.FinalTime(time), clock=ufm.PhysicalTime(), saves=5,
        observe=observe, rtol=1e-10, max_steps=MAX_STEPS,
    )  # fmt: skip
    return path, path.outcome == Outcome.reached, path.outcome == Outcome.step_budget


@pytest.fixture(scope="module")
def batch(start):
    """Two models through the switch, and one whose first phase is too long."""
    other = draw(1)
    models = jax.tree.map(lambda *x: jnp.stack(x), start, other, start)
    return physical(models, np.array([SWITCH, 3.0, 1e5]), np.array([FINAL, 9.0, 2e5]))


def test_physical_time_and_a_batch_of_models_pass_their_switches(chained, batch):
    path, reached, _ = batch
    np.testing.assert_array_equal(reached, [True, True, False])
    np.testing.assert_allclose(path.reading[0], np.linspace(0, FINAL, 5), rtol=1e-14)
    first, second = (row_of(path.final, row) for row in (0, 1))
    assert distance(first, chained[1]) < 5e-11
    middle = by_hand(draw(1), DECAY, 3.0)
    assert distance(second, by_hand(middle, 0.0, 6.0)) < 5e-11
    np.testing.assert_array_equal(path.observables["decay"][0], [DECAY, 0, 0, 0, 0])


def test_a_budget_spent_in_the_first_phase_is_the_end(batch):
    path, _, spent = batch
    np.testing.assert_array_equal(spent, [False, False, True])
    # The second phase takes no step, and moves nothing.
    assert path.stats.num_steps[2] == MAX_STEPS
    assert path.final_log_time[2] < np.log(1e5)
    assert path.num_saved[2] == 1
    assert np.all(np.isnan(path.reading[2, 1:]))
    assert path.final_observables["decay"][2] == DECAY


def test_arc_length_stops_on_the_switch_and_at_the_time(start, chained):
    """Where the clock knows no reading for either, both are found as events."""
    path = solve(start, clock=ufm.ArcLength(), saves=SaveEvery(0.2, 60))
    assert path.outcome == Outcome.reached
    assert 5 < path.num_saved < 60
    assert_rows_are_in_order(path, start)
    # Measured: 1.3e-11, and the time to rounding.
    assert distance(path.final, chained[1]) < 1e-10
    np.testing.assert_allclose(path.final_log_time, np.log(FINAL), rtol=1e-13)
    np.testing.assert_allclose(
        path.reading[: path.num_saved], 0.2 * np.arange(int(path.num_saved)), rtol=1e-12
    )


def log_loss(state):
    logits = np.asarray(state.head @ state.features)
    shifted = logits - logits.max(0)
    return np.log(np.sum(np.log(np.exp(shifted).sum(0)) - np.diag(shifted)))


def test_a_stop_met_in_the_first_phase_ends_there(start, chained):
    before, middle, after = map(log_loss, (start, *chained))
    assert after < middle < before
    path = solve_to_loss(start, (before + middle) / 2)
    assert path.outcome == Outcome.reached
    assert path.final_log_time < np.log(SWITCH)
    np.testing.assert_allclose(log_loss(path.final), (before + middle) / 2, rtol=1e-9)
    assert path.final_observables["decay"] == DECAY
    assert_rows_are_in_order(path, start)
    time = float(np.exp(path.final_log_time))
    assert distance(path.final, by_hand(start, DECAY, time)) < 5e-11


def solve_to_loss(start, threshold):
    return solve(start, stop=ufm.LogLossBelow(threshold), saves=SaveEvery(0.25, 40))


def test_a_stop_met_in_the_second_phase_is_reached_through_the_first(start, chained):
    threshold = log_loss(chained[1])
    path = solve_to_loss(start, threshold)
    assert path.outcome == Outcome.reached
    np.testing.assert_allclose(path.final_log_time, np.log(FINAL), rtol=5e-10)
    assert distance(path.final, chained[1]) < 5e-11
    assert path.final_observables["decay"] == 0
    assert_rows_are_in_order(path, start)


def test_the_rounding_of_a_clock_is_not_past_a_switch():
    """`LogTime` returns log t of the switch a rounding late."""
    decay = ufm.PiecewiseConstant((0.1, 0.0), (3.0,))
    switch = float(decay.log_switches[0])
    late = [float(decay(jnp.asarray(switch + d))) for d in (2.3e-16, 1e-13)]
    assert late == [0.1, 0.0]
