"""Descent beside its flow at P2's Fig. 2 setting: first order in the step."""

import jax
import numpy as np
import pytest
from scipy.integrate import solve_ivp

import deepufm as ufm

STEP, STEPS = 0.01, 4000


@pytest.fixture(scope="module")
def model(key):
    return ufm.small_gaussian(key, num_classes=4)


@pytest.fixture(scope="module")
def gaps(model):
    """At one final time, t = 40, with a step and its half."""
    return [
        ufm.compare_with_flow(
            model, ufm.CrossEntropy(), STEP / parts, STEPS * parts, per_class=1
        )
        for parts in (1, 2)
    ]


def rates(_, flat):
    head, features = flat.reshape(2, 4, 4)
    weights = np.exp(head @ features)
    residual = np.eye(4) - weights / weights.sum(0)
    return np.concatenate(
        [(residual @ features.T).ravel(), (head.T @ residual).ravel()]
    )


def test_distances_are_those_of_numpy_and_scipy(model, gaps):
    start = np.concatenate([np.ravel(model.head), np.ravel(model.features)])
    rows = [int(step) for step in gaps[0].step]
    flat, descent = start, {0: start}
    for step in range(1, STEPS + 1):
        flat = flat + STEP * rates(0, flat)
        if step in rows:
            descent[step] = flat
    times = STEP * np.array(rows)
    flow = solve_ivp(
        rates, (0, 40), start, "DOP853", t_eval=times, rtol=1e-12, atol=1e-17
    ).y.T

    def logits(flat):
        head, features = flat.reshape(2, 4, 4)
        return head @ features

    def distance(a, b):
        return np.linalg.norm(a - b) / np.linalg.norm(b)

    want = [distance(descent[step], at) for step, at in zip(rows, flow)]
    np.testing.assert_allclose(gaps[0].parameter_distance, want, rtol=1e-4, atol=1e-11)
    want = [distance(logits(descent[step]), logits(at)) for step, at in zip(rows, flow)]
    np.testing.assert_allclose(gaps[0].logit_distance, want, rtol=1e-4, atol=1e-11)


def test_distances_halve_with_the_step(gaps):
    whole, half = gaps
    # Measured: 4.2e-4 and 2.1e-4.
    assert 1e-4 < whole.parameter_distance[-1] < 1e-3
    for name in ("parameter_distance", "logit_distance"):
        ratio = getattr(whole, name)[-1] / getattr(half, name)[-1]
        np.testing.assert_allclose(ratio, 2, rtol=0.1)


def test_rows_are_powers_of_two_less_one_at_equal_times(gaps):
    for parts, gap in zip((1, 2), gaps):
        last = STEPS * parts
        powers = 2 ** np.arange(20) - 1
        np.testing.assert_array_equal(gap.step, [*powers[powers < last], last])
        times = STEP / parts * np.asarray(gap.step)
        assert gap.log_time[0] == -np.inf
        np.testing.assert_allclose(np.exp(gap.log_time), times, rtol=1e-12)
        np.testing.assert_array_equal(gap.parameter_distance[0], 0)
        assert gap.path.outcome == ufm.Outcome.reached
        assert gap.descent.outcome == ufm.Outcome.reached
        assert gap.descent.num_saved == gap.path.num_saved == len(gap.step)


def test_a_whole_number_of_doublings_has_no_row_twice(model):
    def steps(model):
        loss = ufm.CrossEntropy()
        return ufm.compare_with_flow(model, loss, STEP, 7, per_class=1).step

    assert jax.eval_shape(steps, model).shape == (4,)
