"""Members of every kind end where independent integrators say."""

from typing import ClassVar

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from independent import matrices_at, reduced_to_norm, reduced_to_time
from oracles import DNC_RAY, DNC_START

import deepufm as ufm
from deepufm import AbstractFlow, Outcome, PiecewiseConstant, SaveAt, SaveEvery
from deepufm.ensemble import ensemble


def row_of(path, i):
    return jax.tree.map(lambda leaf: np.asarray(leaf[i]), path)


def flow_of(depth):
    return ufm.HadamardFlow(num_classes=4, depth=depth)


def log_modes(a):
    return jax.vmap(ufm.log_modes)(jnp.asarray(a))


# On the ray of the first row of `DNC_RAY` log t at this norm is known to all digits.
_, _, MU, RAY_LOG_TIME, _ = DNC_RAY[0]
DEPTHS = [1.0, 2.0, np.inf, 1.0, 3.5]
STARTS = log_modes(
    [
        [DNC_START / 3] * 3,
        [0.02, 0.05, 0.01],
        [0.5, 0.2, 0.0],
        [1e-5, 2.0, 1.0],
        [0.3, 0.2, 0.1],
    ]
)
READINGS = np.asarray([1.0, 3.0, 6.0])  # of log(1 + t); the norm is met at 5 to 9


@pytest.fixture(scope="module")
def norm_path():
    return ensemble(
        flow_of,
        jnp.asarray(DEPTHS),
        STARTS,
        stop=ufm.FinalNorm(3 * MU),
        saves=SaveAt(jnp.asarray(READINGS)),
        solver=diffrax.Tsit5(),
        lanes=2,
    )


@pytest.mark.parametrize("i", range(len(DEPTHS)))
def test_a_norm_that_no_clock_reads_is_landed_on(norm_path, i):
    got = row_of(norm_path, i)
    final, log_time = reduced_to_norm(STARTS[i], DEPTHS[i], 3 * MU)
    assert got.outcome == Outcome.reached
    np.testing.assert_allclose(got.final, final, atol=2e-7)
    np.testing.assert_allclose(got.final_log_time, log_time, rtol=1e-7)
    # To rounding, whatever the tolerance.
    np.testing.assert_allclose(np.exp(got.final).sum(), 3 * MU, rtol=1e-13)


def test_the_ray_takes_its_closed_time(norm_path):
    np.testing.assert_allclose(norm_path.final_log_time[0], RAY_LOG_TIME, rtol=1e-8)


@pytest.mark.parametrize("i", range(len(DEPTHS)))
def test_save_points_before_the_stop_are_hit_and_later_ones_nan(norm_path, i):
    got = row_of(norm_path, i)
    seen = np.append(0, READINGS)
    seen = seen[seen < np.log1p(np.exp(got.final_log_time))]
    assert got.num_saved == len(seen)
    np.testing.assert_array_equal(got.reading[: len(seen)], seen)
    for rows in (got.reading, got.log_time, got.state[:, 0]):
        assert np.all(np.isnan(rows[len(seen) :]))
    log_times = np.log(np.expm1(seen[1:]))
    np.testing.assert_allclose(got.log_time[1 : len(seen)], log_times, rtol=1e-14)
    want = reduced_to_time(STARTS[i], DEPTHS[i], log_times)
    np.testing.assert_allclose(got.state[1 : len(seen)], want, atol=2e-7)


def test_some_members_stop_before_the_last_save_and_some_after(norm_path):
    assert set(np.asarray(norm_path.num_saved).tolist()) == {3, 4}


def test_implicit_steps_on_the_clock_of_the_norm():
    """One stage, which compiles in half of Kvaerno3's time."""
    rows = [1, 3, 4]
    path = ensemble(
        flow_of,
        jnp.asarray([DEPTHS[i] for i in rows]),
        STARTS[jnp.asarray(rows)],
        stop=ufm.FinalNorm(100.0),
        clock=ufm.LogNorm(),
        solver=diffrax.ImplicitEuler(),
        rtol=1e-6,
        lanes=1,
    )
    for row, i in enumerate(rows):
        got = row_of(path, row)
        final, log_time = reduced_to_norm(STARTS[i], DEPTHS[i], 100.0)
        assert got.outcome == Outcome.reached
        np.testing.assert_allclose(np.exp(got.final).sum(), 100.0, rtol=1e-3)
        # First order: the square root of the tolerance.
        np.testing.assert_allclose(got.final, final, atol=1e-3)
        np.testing.assert_allclose(got.final_log_time, log_time, rtol=1e-3)


MODEL_DEPTHS = [1, 3, 2, 3, 1]


@pytest.fixture(scope="module")
def models():
    """K = 3, n = 1, d = 4; identities beyond the depth."""
    rng, rows = np.random.default_rng(2), []
    for depth in MODEL_DEPTHS:
        head, hidden, features = (
            rng.normal(size=shape) / 2 for shape in ((3, 4), (2, 4, 4), (4, 3))
        )
        hidden[depth - 1 :] = np.eye(4)
        rows.append(ufm.DeepUFM(*(jnp.asarray(x) for x in (head, hidden, features))))
    return jax.tree.map(lambda *x: jnp.stack(x), *rows)


def test_models_padded_in_depth_end_where_the_plain_ones_do(models):
    path = ensemble(
        lambda depth: ufm.GradientFlow(ufm.CrossEntropy(), 1, depth=depth),
        jnp.asarray(MODEL_DEPTHS, float),
        models,
        stop=ufm.FinalTime(30.0),
        solver=diffrax.Tsit5(),
        rtol=1e-9,
        lanes=2,
    )
    assert np.all(np.asarray(path.outcome == Outcome.reached))
    for i, depth in enumerate(MODEL_DEPTHS):
        got, start = row_of(path.final, i), row_of(models, i)
        layers = start.head, start.hidden[: depth - 1], start.features
        head, *hidden, features = matrices_at(*layers, labels=[0, 1, 2], time=30.0)
        np.testing.assert_allclose(got.head, head, atol=1e-7)
        np.testing.assert_allclose(got.features, features, atol=1e-7)
        if hidden:
            np.testing.assert_allclose(got.hidden[: depth - 1], hidden[::-1], atol=1e-7)
        np.testing.assert_array_equal(
            got.hidden[depth - 1 :], start.hidden[depth - 1 :]
        )


class Decay(AbstractFlow):
    """y' = 1 - λy of one number: exponentials, phase by phase."""

    weight_decay: jax.Array | PiecewiseConstant
    norm_diverges: ClassVar[bool] = True
    is_smooth: ClassVar[bool] = True
    growth_is_exact: ClassVar[bool] = False
    log_state: ClassVar[bool] = False

    def __call__(self, state):
        assert not isinstance(self.weight_decay, PiecewiseConstant)
        return 1 - self.weight_decay * state, jnp.zeros(())

    def log_norm(self, state):
        return jnp.log(jnp.abs(state[0]))

    def log_growth(self, state, direction):
        return self.log_length(state, direction) - self.log_norm(state)

    def log_length(self, state, direction):
        del state
        return jnp.log(jnp.abs(direction[0]))

    def log_activity(self, state, direction):
        return self.log_growth(state, direction)

    def log_loss(self, state):
        return -state[0]

    def relative_error(self, error, before, after):
        return jnp.abs(error[0]) / jnp.maximum(jnp.abs(before[0]), jnp.abs(after[0]))

    def check(self, state):
        if state.shape != (1,):
            raise ValueError("One number.")


# λ falls, so that y rises all the way and the path is as long as y has risen.
RATES = np.asarray([[1.0, 0.4, 0.0], [3.0, 0.5, 0.1], [0.8, 0.7, 0.2], [2.0, 0.1, 0.0],
                    [0.5, 0.3, 0.1]])  # fmt: skip
SWITCHES = np.asarray([[0.5, 2.0], [0.1, 7.0], [1.0, 1.5], [3.0, 30.0], [2.0, 4.0]])
HEIGHTS = np.asarray([0.2, 0.1, 0.5, 0.3, 0.01])
FINAL = 10.0  # before the last switch of the fourth


def height(i, times):
    """y at each of `times`."""
    y, began, out = HEIGHTS[i], 0.0, np.full(len(times), np.nan)
    for rate, end in zip(RATES[i], [*SWITCHES[i], np.inf]):

        def at(t, rate=rate, y=y, began=began):
            gone = t - began
            if rate == 0:
                return y + gone
            return y * np.exp(-rate * gone) - np.expm1(-rate * gone) / rate

        here = (times >= began) & (times <= end)
        out[here] = at(times[here])
        y, began = at(end) if np.isfinite(end) else y, end
    return out


def through_phases(**options):
    def decay(phases):
        return Decay(PiecewiseConstant(*phases))

    return ensemble(
        decay,
        (jnp.asarray(RATES), jnp.asarray(SWITCHES)),
        jnp.asarray(HEIGHTS)[:, None],
        stop=ufm.FinalTime(FINAL),
        solver=diffrax.Tsit5(),
        rtol=1e-9,
        lanes=2,
        **options,
    )


def assert_heights(path):
    assert np.all(np.asarray(path.outcome == Outcome.reached))
    np.testing.assert_allclose(path.final_log_time, np.log(FINAL), rtol=1e-13)
    for i in range(len(HEIGHTS)):
        got = row_of(path, i)
        saved = int(got.num_saved)
        np.testing.assert_allclose(
            got.final[0], height(i, np.asarray([FINAL])), rtol=1e-8
        )
        times = np.exp(got.log_time[:saved])
        np.testing.assert_allclose(got.state[:saved, 0], height(i, times), rtol=1e-8)
        assert np.all(np.isnan(got.state[saved:]))


def test_phases_end_at_their_times():
    path = through_phases(saves=6)
    assert_heights(path)
    np.testing.assert_array_equal(path.num_saved, 6)
    want = np.broadcast_to(np.linspace(0, np.log1p(FINAL), 6), (5, 6))
    np.testing.assert_allclose(path.reading, want, rtol=1e-14)


def test_phases_end_at_times_that_the_clock_does_not_read():
    """On path length both a switch and the stop are landed on."""
    path = through_phases(clock=ufm.ArcLength(), saves=SaveEvery(0.5, 40))
    assert_heights(path)
    risen = path.final[:, 0] - HEIGHTS
    np.testing.assert_allclose(path.final_reading, risen, rtol=1e-8)
    np.testing.assert_array_equal(path.num_saved, 1 + np.floor(risen / 0.5))
