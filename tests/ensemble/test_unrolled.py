"""Stages written out: the steps are those of diffrax's own loop."""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepufm.ensemble._unrolled import Unrolled

# With and without a last stage that is the step, or the next one's first stage.
SOLVERS = [
    diffrax.Heun, diffrax.Midpoint, diffrax.Ralston, diffrax.Bosh3, diffrax.Dopri5,
    diffrax.Tsit5, diffrax.Dopri8,
]  # fmt: skip


def pendulum(t, y, args):
    """Depends on time, and couples two leaves by what is not linear."""
    del args
    angle, speed = y
    return speed, -jnp.sin(angle) * (1 + 0.3 * jnp.cos(t))


@pytest.mark.parametrize("solver", SOLVERS)
def test_two_steps_are_those_of_the_loop_over_stages(solver):
    term = diffrax.ODETerm(pendulum)
    plain, unrolled = solver(scan_kind="lax"), Unrolled(solver())
    y = jnp.linspace(0.1, 2.0, 3), jnp.linspace(-1.0, 1.0, 3)
    got, want = y, y
    times = jnp.asarray([0.0, 0.3, 0.45])
    state = unrolled.init(term, times[0], times[1], y, None)
    other = plain.init(term, times[0], times[1], y, None)
    for t0, t1 in zip(times[:-1], times[1:]):
        got, error, _, state, _ = unrolled.step(term, t0, t1, got, None, state, False)
        want, expected, _, other, _ = plain.step(term, t0, t1, want, None, other, False)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-14, atol=1e-15)
        for a, b in zip(error, expected, strict=True):
            # An error is a difference of stages of order one.
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-16)
    # The velocity at the end of the step, which starts the next.
    for a, b in zip(state, pendulum(times[-1], got, None), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-14)
    assert unrolled.order(term) == plain.order(term)
    assert unrolled.error_order(term) == plain.error_order(term)


def test_single_precision_stays_so():
    term, solver = diffrax.ODETerm(decay), Unrolled(diffrax.Dopri5())
    t0, t1, y = (jnp.asarray(x, jnp.float32) for x in (0.5, 0.7, [1.0, 2.0]))
    state = solver.init(term, t0, t1, y, None)
    y1, error, _, state, _ = solver.step(term, t0, t1, y, None, state, False)
    assert y1.dtype == error.dtype == state.dtype == jnp.float32


def test_no_number_stays_none():
    """At a time that is none the step is none, and no step of zero velocity."""
    term, solver = diffrax.ODETerm(decay), Unrolled(diffrax.Dopri5())
    t0, t1, y = jnp.asarray(jnp.nan), jnp.asarray(0.7), jnp.ones(2)
    state = solver.init(term, t0, t1, y, None)
    y1, error, *_ = solver.step(term, t0, t1, y, None, state, False)
    assert np.all(np.isnan(y1))
    assert np.all(np.isnan(error))


def decay(t, y, args):
    """Decays faster and faster."""
    del args
    return -y * (1 + t)


def test_steps_broadcast_over_lanes_that_start_and_end_apart():
    """Times with the lanes, which come last, give each lane the step it has alone."""
    term = diffrax.ODETerm(decay)
    solver = Unrolled(diffrax.Dopri5())
    starts, ends = jnp.asarray([0.0, 0.5, 2.0]), jnp.asarray([0.1, 0.9, 2.01])
    y = jnp.arange(1.0, 7.0).reshape(2, 3)
    with jax.numpy_rank_promotion("allow"):
        state = solver.init(term, starts, ends, y, None)
        together, *_ = solver.step(term, starts, ends, y, None, state, False)
    for lane in range(3):
        state = solver.init(term, starts[lane], ends[lane], y[:, lane], None)
        alone, *_ = solver.step(
            term, starts[lane], ends[lane], y[:, lane], None, state, False
        )
        np.testing.assert_allclose(together[:, lane], alone, rtol=1e-15)
