"""Derivatives through `solve`, forward and reverse, against finite differences."""

import functools
import math

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepufm as ufm
from deepufm import SaveEvery

# Three entries of log a, the depth, and what the stop is set to.
POINT = [math.log(0.1), math.log(0.3), math.log(0.02), 2.5, math.log(50.0)]
EVENT_POINT = [*POINT[:4], 5.0]
STEP = 1e-4

both_modes = pytest.mark.parametrize("mode", ["forward", "reverse"])


def final_state(point, adjoint=None, rtol=1e-8):
    path = ufm.solve(
        ufm.HadamardFlow(4, point[3]),
        point[:3],
        stop=ufm.FinalTime(log=point[4]),
        saves=2,
        adjoint=adjoint,
        rtol=rtol,
    )
    return path.final


def crossing(point, adjoint=None, rtol=1e-8):
    path = ufm.solve(
        ufm.HadamardFlow(4, point[3]),
        point[:3],
        stop=ufm.FinalNorm(point[4]),
        saves=SaveEvery(100.0, 2),
        adjoint=adjoint,
        rtol=rtol,
    )
    return jnp.append(path.final, path.final_log_time)


@functools.cache
def jacobian_of(function, mode):
    """Compiled once for all the points at which it is taken."""
    if mode == "reverse":
        return jax.jit(jax.jacrev(function))
    adjoint = diffrax.ForwardMode()
    return jax.jit(jax.jacfwd(lambda point: function(point, adjoint)))


def central_differences(function, point, columns):
    """Differences of solves at 1e-12: their noise over STEP is 1e-8, STEP² likewise."""
    slopes = []
    for column in columns:
        shift = STEP * np.eye(5)[column]
        ahead, behind = (
            function(jnp.asarray(np.asarray(point) + sign * shift), rtol=1e-12)
            for sign in (1, -1)
        )
        slopes.append((ahead - behind) / (2 * STEP))
    return np.stack(slopes, axis=-1)


@both_modes
def test_derivatives_by_start_depth_and_final_time(mode):
    got = jacobian_of(final_state, mode)(jnp.asarray(POINT))
    want = central_differences(final_state, POINT, range(5))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)
    assert np.max(np.abs(want)) > 0.1


@both_modes
def test_derivatives_of_an_event(mode):
    point = jnp.asarray(EVENT_POINT)
    got = jacobian_of(crossing, mode)(point)
    want = central_differences(crossing, EVENT_POINT, range(5))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    # The norm that the stop fixes moves with the stop alone: sum a_i du_i = 0, or 1.
    modes = np.exp(np.asarray(crossing(point)[:3]))
    np.testing.assert_allclose(modes @ got[:3], [0, 0, 0, 0, 1], atol=1e-5)


@both_modes
def test_a_dead_mode_leaves_the_other_derivatives_finite(mode):
    point = np.array(POINT)
    point[1] = -np.inf
    got = jacobian_of(final_state, mode)(jnp.asarray(point))
    columns = [0, 2, 3, 4]
    want = central_differences(final_state, point, columns)
    alive = [0, 2]
    np.testing.assert_allclose(
        got[np.ix_(alive, columns)], want[alive], rtol=1e-6, atol=1e-7
    )


def test_derivative_of_the_matrix_flow(key):
    flow = ufm.GradientFlow(ufm.CrossEntropy(), 2)

    def log_loss(scale, adjoint=None, rtol=1e-8):
        model = ufm.gaussian(
            key, num_classes=3, per_class=2, width=4, depth=2, scale=scale
        )
        path = ufm.solve(
            flow,
            model,
            stop=ufm.FinalTime(1e3),
            saves=2,
            adjoint=adjoint,
            rtol=rtol,
        )
        return flow.log_loss(path.final)

    at = jnp.asarray(0.5)
    forward = jax.jit(jax.jacfwd(lambda s: log_loss(s, diffrax.ForwardMode())))(at)
    ahead, behind = (log_loss(at + sign * STEP, rtol=1e-12) for sign in (1, -1))
    want = (ahead - behind) / (2 * STEP)
    np.testing.assert_allclose(forward, want, rtol=1e-5)
    assert abs(want) > 1e-3
