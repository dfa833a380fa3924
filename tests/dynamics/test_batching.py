"""Rows of a `vmap` over members equal single solves by value.

To 1e-9 or so, not to the last bit: a batched product may sum in another order, and one
rounding more or less in an error estimate moves the step sizes by as much.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepufm as ufm
from deepufm import Outcome, SaveEvery

# Seed, depth, width and scale of each member; K = 3, n = 2.
MEMBERS = [(0, 1, 3, 1.0), (1, 3, 4, 0.5), (2, 2, 4, 0.3), (0, 3, 5, 1.0)]


def is_reached(path):
    return path.outcome == Outcome.reached


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
    path = ufm.solve(flow, model, stop=ufm.FinalTime(1e4), saves=2)
    return path, is_reached(path)


@pytest.fixture(scope="module")
def batch():
    columns = [jnp.asarray(column) for column in zip(*MEMBERS)]
    return jax.jit(jax.vmap(padded_member))(*columns)


@pytest.mark.parametrize("row", range(len(MEMBERS)))
def test_seeds_depths_widths_and_scales_in_one_batch(batch, row):
    path, reached = padded_member(*MEMBERS[row])
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


def test_a_padded_member_equals_an_unpadded_model(batch):
    row = 2
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
    assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-8, atol=1e-9)
    assert_close(got.head[:, :width], path.final.head)
    assert_close(got.features[:width], path.final.features)
    assert_close(got.hidden[: depth - 1, :width, :width], path.final.hidden)
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


def event_member(log_a):
    path = ufm.solve(
        ufm.HadamardFlow(2, 1.0),
        log_a,
        stop=ufm.FinalNorm(0.5),
        saves=SaveEvery(100.0, 2),
    )
    not_met = path.outcome == Outcome.not_met
    return path.final, path.final_log_time, is_reached(path), not_met


def test_a_member_without_an_event_spoils_no_other():
    # The second is at rest: a = 0, which only a traced start can be.
    starts = jnp.log(jnp.asarray([[1e-2], [0.0], [1e-30]]))
    final, log_time, reached, not_met = jax.jit(jax.vmap(event_member))(starts)
    np.testing.assert_array_equal(reached, [True, False, True])
    np.testing.assert_array_equal(not_met, [False, True, False])
    assert final[1] == -np.inf
    for row in (0, 2):
        single = event_member(starts[row])
        np.testing.assert_allclose(final[row], single[0], rtol=0, atol=1e-9)
        np.testing.assert_allclose(log_time[row], single[1], rtol=1e-9)
