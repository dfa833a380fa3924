"""Rows of a `vmap` over members equal single solves by value.

To 1e-9 or so, not to the last bit: a batched product may sum in another order, and one
rounding more or less in an error estimate moves the step sizes by as much.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepufm as ufm
from deepufm import Outcome, SaveEvery

# Seed, depth, width and scale of each member; K = 3, n = 2.
MEMBERS = [(0, 1, 3, 1.0), (1, 3, 4, 0.5), (2, 2, 5, 0.3), (0, 3, 5, 1.0)]


def is_reached(path):
    return path.outcome == Outcome.reached


def log_loss(flow, log_time, state):
    del log_time
    return {"log_loss": flow.log_loss(state)}


def padded_member(seed, depth, width, scale):
    model = ufm.gaussian(
        jax.random.key(seed),
        num_classes=3,
        per_class=2,
        width=width,
        depth=depth,
        scale=scale,
        pad_width=5,
        pad_depth=3,
    )
    flow = ufm.GradientFlow(ufm.CrossEntropy(), 2, depth=depth)
    path = ufm.solve(flow, model, stop=ufm.FinalTime(1e4), saves=5, observe=log_loss)
    return path, is_reached(path)


@pytest.fixture(scope="module")
def batch():
    columns = [jnp.asarray(column) for column in zip(*MEMBERS)]
    return jax.jit(jax.vmap(padded_member))(*columns)


@pytest.fixture(scope="module")
def single():
    return jax.jit(padded_member)


@pytest.mark.parametrize("row", range(len(MEMBERS)))
def test_seeds_depths_widths_and_scales_in_one_batch(batch, single, row):
    path, reached = single(*[jnp.asarray(x) for x in MEMBERS[row]])
    assert reached
    assert batch[1][row]
    got = jax.tree.map(lambda leaf: leaf[row], batch[0])
    for name in ("head", "hidden", "features"):
        np.testing.assert_allclose(
            getattr(got.final, name), getattr(path.final, name), rtol=1e-9, atol=1e-10
        )
    for field in ("reading", "log_time", "final_log_time"):
        np.testing.assert_allclose(
            getattr(got, field), getattr(path, field), rtol=1e-14
        )
    np.testing.assert_allclose(
        got.observables["log_loss"], path.observables["log_loss"], rtol=1e-9
    )


@pytest.mark.parametrize("row", [0, 2])
def test_padded_members_equal_unpadded_models(batch, row):
    seed, depth, width, scale = MEMBERS[row]
    model = ufm.gaussian(
        jax.random.key(seed),
        num_classes=3,
        per_class=2,
        width=width,
        depth=depth,
        scale=scale,
    )
    path = ufm.solve(
        ufm.GradientFlow(ufm.CrossEntropy(), 2), model, stop=ufm.FinalTime(1e4), saves=2
    )
    got = jax.tree.map(lambda leaf: leaf[row], batch[0].final)
    close = {"rtol": 1e-8, "atol": 1e-9}
    np.testing.assert_allclose(got.head[:, :width], path.final.head, **close)
    np.testing.assert_allclose(got.features[:width], path.final.features, **close)
    np.testing.assert_allclose(
        got.hidden[: depth - 1, :width, :width], path.final.hidden, **close
    )
    # Padding has not moved.
    np.testing.assert_array_equal(got.head[:, width:], 0)
    np.testing.assert_array_equal(got.features[width:], 0)
    frozen = np.broadcast_to(np.eye(5), (3 - depth, 5, 5))
    np.testing.assert_array_equal(got.hidden[depth - 1 :], frozen)


def reduced_member(depth, log_time, log_a):
    path = ufm.solve(
        ufm.HadamardFlow(4, depth), log_a, stop=ufm.FinalTime(log=log_time), saves=2
    )
    return path.final, is_reached(path)


def test_depths_times_and_starts_of_the_reduced_flow():
    depths = jnp.asarray([1.0, 2.5, jnp.inf])
    log_times = jnp.asarray([600.0, 3.0, 23.0])
    starts = jnp.log(jnp.asarray([[0.1, 0.2, 0.3], [1e-9, 0.2, 0.0], [1.0, 2.0, 3.0]]))
    final, reached = jax.jit(jax.vmap(reduced_member))(depths, log_times, starts)
    assert jnp.all(reached)
    for row in range(3):
        want, _ = reduced_member(depths[row], log_times[row], starts[row])
        np.testing.assert_allclose(final[row], want, rtol=0, atol=1e-9)


def event_member(log_a, norm):
    path = ufm.solve(
        ufm.HadamardFlow(2, 1.0),
        log_a,
        stop=ufm.FinalNorm(norm),
        saves=SaveEvery(100.0, 2),
        max_steps=40,
    )
    budget = path.outcome == Outcome.step_budget
    return path.final, path.final_log_time, is_reached(path), budget


def test_a_member_that_ends_early_spoils_no_other():
    # The second never gets to its norm within the budget.
    starts, norms = jnp.log(jnp.asarray([[1e-2], [1e-30]])), jnp.asarray([1.0, 1e4])
    batch = jax.jit(jax.vmap(event_member))(starts, norms)
    np.testing.assert_array_equal(batch[2], [True, False])
    np.testing.assert_array_equal(batch[3], [False, True])
    for row in range(2):
        single = event_member(starts[row], norms[row])
        np.testing.assert_allclose(batch[0][row], single[0], rtol=0, atol=1e-9)
        np.testing.assert_allclose(batch[1][row], single[1], rtol=1e-9)
