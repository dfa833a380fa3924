"""Orbits that slide along a kink of the velocity, as ReLU layers make them do."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import deepufm as ufm
from deepufm import AbstractFlow


class Gutter(AbstractFlow):
    """(x, z)' = (1, -1/2) where z > 0, and (3, 3/2) below: z = 0 attracts.

    On z = 0 the velocity is the mean of both that keeps z, three quarters of the first
    and one of the second (Filippov): x' = 3/2.
    """

    norm_diverges: ClassVar[bool] = True
    is_smooth: ClassVar[bool] = False
    growth_is_exact: ClassVar[bool] = False
    log_state: ClassVar[bool] = False

    def __call__(self, state):
        above = jnp.asarray([1.0, -0.5])
        below = jnp.asarray([3.0, 1.5])
        return jnp.where(state[1] > 0, above, below), jnp.zeros(())

    def log_norm(self, state):
        return jnp.log(jnp.linalg.norm(state))

    def log_growth(self, state, direction):
        return self.log_norm(direction) - self.log_norm(state)

    def log_length(self, state, direction):
        del state
        return self.log_norm(direction)

    def log_activity(self, state, direction):
        return self.log_length(state, direction)

    def log_loss(self, state):
        return -state[0]

    def relative_error(self, error, before, after):
        size = jnp.maximum(jnp.linalg.norm(before), jnp.linalg.norm(after))
        return jnp.linalg.norm(error) / size

    def crosses_kink(self, before, after):
        return (before[1] > 0) != (after[1] > 0)

    def check(self, state):
        pass


def slide(rtol):
    """From (1, 1) to the gutter at (3, 0) at t = 2, along it to (6, 0) at t = 4."""
    return ufm.solve(
        Gutter(),
        jnp.ones(2),
        clock=ufm.PhysicalTime(),
        stop=ufm.FinalTime(4.0),
        saves=2,
        rtol=rtol,
    )


def test_an_orbit_slides_at_the_mean_velocity_to_the_root_of_the_tolerance():
    tolerances = np.asarray([1e-4, 1e-6, 1e-8])
    paths = [slide(float(rtol)) for rtol in tolerances]
    assert all(path.outcome == ufm.Outcome.reached for path in paths)
    ends = np.asarray([path.final for path in paths])
    errors = np.abs(ends - [6.0, 0.0]).max(axis=1)
    # A step let through is sqrt(rtol) of |x| <= 6. Measured 2e-2, 2e-3 and 2e-5.
    assert np.all(errors < 6 * np.sqrt(tolerances))
    steps = np.asarray([int(path.stats.num_steps) for path in paths])
    assert np.all(steps < 40 / np.sqrt(tolerances))


def test_a_smooth_flow_lets_nothing_through():
    """The same velocity, said to be smooth, stops the controller at the kink."""

    class SmoothGutter(Gutter):
        is_smooth: ClassVar[bool] = True

    path = ufm.solve(
        SmoothGutter(),
        jnp.ones(2),
        clock=ufm.PhysicalTime(),
        stop=ufm.FinalTime(4.0),
        saves=2,
        rtol=1e-6,
        max_steps=2000,
    )
    assert path.outcome != ufm.Outcome.reached
    assert float(path.final_log_time) == pytest.approx(np.log(2), abs=1e-3)


def test_relu_layers_slide_as_small_steps_of_descent_do():
    """Units sit on their kinks from t = 1 on; descent knows nothing of tolerances.

    Where several do at once no one orbit is determined, and the limits of small steps
    and of small tolerances need not be the same; here they are within 1e-3.
    """
    sizes, loss, relu = (9, 5, 3, 1), ufm.CrossEntropy(), ufm.ReLU()
    model = ufm.gaussian(
        jax.random.key(0), num_classes=4, per_class=sizes, width=10, depth=2
    )
    flow = ufm.GradientFlow(loss, sizes, activation=relu)
    path = ufm.solve(flow, model, stop=ufm.FinalTime(10.0), saves=2)
    assert path.outcome == ufm.Outcome.reached
    run = ufm.descend(
        model, loss, optax.sgd(2e-4), 50_000, per_class=sizes, activation=relu, saves=2
    )
    logits, reference = flow.logits(path.final), flow.logits(run.final)
    distance = jnp.linalg.norm(logits - reference) / jnp.linalg.norm(reference)
    # Measured 7.3e-4, and 8.6e-4 from a solve at rtol 1e-8.
    assert float(distance) < 3e-3


def test_no_step_is_let_through_but_across_a_kink():
    """Gates of 1 and 1 - 1e-9: at rest, steps at the stability limit are no kinks."""
    model = ufm.gaussian(
        jax.random.key(0), num_classes=4, per_class=2, width=6, depth=2
    )
    nearly = ufm.GradientFlow(ufm.MSE(), 2, activation=ufm.ReLU(1 - 1e-9))
    linear = ufm.GradientFlow(ufm.MSE(), 2, activation=ufm.ReLU(1.0))
    ends = [
        ufm.solve(flow, model, stop=ufm.FinalTime(300.0), saves=2).final
        for flow in (nearly, linear)
    ]
    heads = np.asarray([end.head for end in ends])
    # Measured 6e-10; with steps let through at rest, 6e-4.
    np.testing.assert_allclose(*heads, rtol=0, atol=5e-9 * np.abs(heads).max())
