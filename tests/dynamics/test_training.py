"""The papers' training rules: phases of descent, and the flows that they follow."""

import jax
import numpy as np
import pytest

import deepufm as ufm
from deepufm import CrossEntropy, PiecewiseConstant, ReLU, Training

RULE = Training(0.1, (6, 4, 5), (0.2, 0.0, 0.05), mean=True)
SIZES = (1, 2)
LABELS = np.repeat(np.arange(2), SIZES)


def test_descent_switches_its_decay_after_the_epochs_of_a_phase(key):
    model = ufm.gaussian(key, num_classes=2, per_class=SIZES, width=3, depth=1)
    run = ufm.descend(
        model, CrossEntropy(), RULE.optimiser(), RULE.steps, per_class=SIZES,
        mean=RULE.mean, saves=(5, 6, 7, 10, 11, 15), keep_states=True,
    )  # fmt: skip
    head, features = np.asarray(model.head), np.asarray(model.features)
    heads, decays = {}, np.repeat([0.2, 0.0, 0.05], [6, 4, 5])
    for step, decay in enumerate(decays, start=1):
        weights = np.exp(head @ features)
        error = (weights / weights.sum(0) - np.eye(2)[:, LABELS]) / 3
        head, features = (
            head - 0.1 * (error @ features.T + decay * head),
            features - 0.1 * (head.T @ error + decay * features),
        )
        heads[step] = head
    assert run.state is not None
    for row, step in enumerate(run.step):
        np.testing.assert_allclose(run.state.head[row], heads[int(step)], rtol=1e-13)
    np.testing.assert_allclose(run.final.features, features, rtol=1e-13)


def test_a_rule_without_decay_is_plain_descent():
    rule = Training(0.1, (3, 4), (0.0, 0.0))
    assert rule.steps == 7
    gradient = np.ones(2)
    optimiser = rule.optimiser()
    change, _ = optimiser.update(gradient, optimiser.init(np.zeros(2)), np.ones(2))
    np.testing.assert_array_equal(change, [-0.1, -0.1])
    assert rule.flow(CrossEntropy(), 3, 2).weight_decay is None


def test_the_flow_of_a_mean_is_scaled_by_the_number_of_examples():
    flow = RULE.flow(CrossEntropy(), 2, SIZES, activation=ReLU())
    schedule = flow.weight_decay
    assert isinstance(schedule, PiecewiseConstant)
    assert flow.per_class == SIZES
    assert flow.activation == ReLU()
    np.testing.assert_allclose(schedule.values, [0.6, 0.0, 0.15], rtol=1e-15)
    # 6 and 10 updates of step 0.1/3.
    np.testing.assert_allclose(schedule.log_switches, np.log([0.2, 1 / 3]), rtol=1e-14)
    stop = RULE.stop(2, SIZES)
    np.testing.assert_allclose(stop.log_time, np.log(0.5), rtol=1e-14)


def test_the_flow_of_a_sum_keeps_step_and_decay():
    rule = Training(0.1, (6, 4), (0.2, 0.0))
    schedule = rule.flow(CrossEntropy(), 2, 5).weight_decay
    assert isinstance(schedule, PiecewiseConstant)
    np.testing.assert_allclose(schedule.values, [0.2, 0.0], rtol=1e-15)
    np.testing.assert_allclose(schedule.log_switches, [np.log(0.6)], rtol=1e-14)
    np.testing.assert_allclose(rule.stop(2, 5).log_time, 0, atol=1e-15)
    one = Training(0.1, (6,), (0.2,), mean=True).flow(CrossEntropy(), 2, 5).weight_decay
    assert isinstance(one, jax.Array)
    np.testing.assert_allclose(one, 2.0, rtol=1e-15)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, (1,), (0.0,)), "`step_size` must be positive, but is 0.0"),
        ((float("nan"), (1,), (0.0,)), "`step_size` must be positive"),
        ((0.1, (), ()), "one weight decay a phase"),
        ((0.1, (1, 2), (0.0,)), "one weight decay a phase"),
        ((0.1, (1, 0), (0.0, 0.0)), "Epochs must be at least 1"),
        ((0.1, (1,), (-0.1,)), "weight decays at least 0"),
    ],
)
def test_bad_rules_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Training(*arguments)


def test_the_presets_are_the_papers_numbers():
    """P1 App. E.1, Fig. 3: 300,000 epochs at 0.08, λ = 1e-3 for 200,000; P2 sec. 6."""
    rule = ufm.P1_FIGURE_3
    assert (rule.step_size, rule.steps, rule.mean) == (0.08, 300_000, True)
    assert rule.epochs == (200_000, 100_000)
    assert rule.weight_decay == (1e-3, 0.0)
    schedule = rule.flow(CrossEntropy(), 10, 5).weight_decay
    assert isinstance(schedule, PiecewiseConstant)
    np.testing.assert_allclose(schedule.values, [0.05, 0], rtol=1e-15)
    np.testing.assert_allclose(np.exp(schedule.log_switches), [320.0], rtol=1e-13)
    np.testing.assert_allclose(rule.stop(10, 5).log_time, np.log(480.0), rtol=1e-14)
    rule = ufm.P2_FIGURE_2
    assert (rule.step_size, rule.mean, rule.weight_decay) == (0.01, False, (0.0,))
