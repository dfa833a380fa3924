"""Independent modes: exact solutions against mpmath, and the flows that follow them."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest

import deepufm as ufm
from deepufm import Outcome, SigmoidalFlow

DEPTHS = jnp.asarray([1.0, 1.5, 2.0, 3.0, 10.0, math.inf])
ONES = jnp.ones(6)


# All exact solutions go through these two programs: six depths (or times), four modes.
@jax.jit
def values(depths, targets, rates, starts, log_times):
    def one(depth, rate, start, log_time):
        return SigmoidalFlow(depth, targets, rate).solution(start, log_time)

    return jax.vmap(one)(depths, rates, starts, log_times)


@jax.jit
def times(depths, targets, rates, starts, ends):
    def one(depth, rate, start, end):
        return SigmoidalFlow(depth, targets, rate).log_time_to(start, end)

    return jax.vmap(one)(depths, rates, starts, ends)


def lanes(row):
    """The same row for all six lanes."""
    return jnp.broadcast_to(jnp.asarray(row), (6, 4))


def exact_log_time(depth, target, rate, start, end):
    """Log of ∫ da/(c a^{1+p} (s - a)) over log a, by quadrature in 20 digits."""
    with mp.workdps(20):
        p = (
            mp.mpf(1)
            if math.isinf(depth)
            else (mp.mpf(depth) - 1) / (mp.mpf(depth) + 1)
        )
        log_s = mp.log(mp.mpf(float(target)))
        start, end = mp.mpf(float(start)), mp.mpf(float(end))
        y0, y1 = start - log_s, end - log_s
        # Breaks double from both ends: the integrand decays from one and has a pole
        # just beyond the other.
        breaks = {y0, y1}
        breaks |= {y for y in (y0 + 2**k for k in range(11)) if y < y1}
        breaks |= {-(mp.mpf(2) ** k) for k in range(-32, 11) if y0 < -(2.0**k) < y1}
        integral = mp.quad(
            lambda y: mp.exp(-p * (y - y0)) / -mp.expm1(y), sorted(breaks)
        )
        unit = mp.log(mp.mpf(float(rate))) + (1 + p) * log_s
        return float(mp.log(integral) - p * y0 - unit)


STARTS = np.array([-700.0, -40.0, -3.0, -0.5])
# Up to 1 - a/s of 1e-9, from both regimes of the series.
ENDS = [
    np.array([-690.0, -20.0, -0.7, -0.4]),
    np.array([-1e-3, -1.0, -1e-9, -1e-9]),
    np.array([-1e-9, -1e-9, -3 + 1e-12, -0.5 + 1e-12]),
]


@pytest.mark.parametrize("ends", ENDS, ids=["small", "large", "full and short"])
def test_time_to_a_value_is_the_integral_at_any_depth(ends):
    got = times(DEPTHS, jnp.ones(4), ONES, lanes(STARTS), lanes(ends))
    want = [
        [exact_log_time(depth, 1.0, 1.0, a, b) for a, b in zip(STARTS, ends)]
        for depth in DEPTHS.tolist()
    ]
    # Measured 2e-15 of the logarithm.
    np.testing.assert_allclose(got, want, rtol=1e-14, atol=1e-14)


TARGETS = np.sqrt([2.0, 2.0, 5.0, 0.01])
RATES = jnp.asarray([2.0, 2.5, 3.0, 4.0, 11.0, 0.3])


def test_time_to_a_value_counts_target_and_rate():
    starts, ends = np.log(TARGETS) - [30, 2, 9, 0.1], np.log(0.9 * TARGETS)
    ends[3] += 0.05
    got = times(DEPTHS, jnp.asarray(TARGETS), RATES, lanes(starts), lanes(ends))
    want = [
        [
            exact_log_time(depth, *(float(x) for x in (s, c, a, b)))
            for s, a, b in zip(TARGETS, starts, ends)
        ]
        for depth, c in zip(DEPTHS.tolist(), RATES)
    ]
    np.testing.assert_allclose(got, want, rtol=1e-14, atol=1e-14)


def test_depth_one_is_the_logistic_function():
    # log a = log s - log(1 + (s/a(0) - 1) e^{-c s t}), c = 2.
    log_times = np.log([1e-3, 0.3, 1.0, 3.0, 9.0, 200.0])
    starts = np.array([-700.0, -9.0, -1.0, -2.4])
    got = values(
        ONES, jnp.asarray(TARGETS), 2 * ONES, lanes(starts), jnp.asarray(log_times)
    )

    def logistic(s, a, t):
        with mp.workdps(30):
            s, a, t = mp.mpf(s), mp.exp(mp.mpf(a)), mp.exp(mp.mpf(t))
            return float(mp.log(s) - mp.log1p((s / a - 1) * mp.exp(-2 * s * t)))

    want = [
        [logistic(s, a, t) for s, a in zip(TARGETS.tolist(), starts.tolist())]
        for t in log_times.tolist()
    ]
    np.testing.assert_allclose(got, want, rtol=1e-14, atol=1e-14)


def test_solution_inverts_the_time():
    starts, ends = (
        np.array([-5.0, -3.0, -3.0, -0.5]),
        np.array([-4.0, -0.1, -1e-9, -0.4]),
    )
    for column in range(4):
        log_times = times(DEPTHS, jnp.ones(4), ONES, lanes(starts), lanes(ends))
        got = values(DEPTHS, jnp.ones(4), ONES, lanes(starts), log_times[:, column])
        error = got[:, column] - ends[column]
        assert np.max(np.abs(error)) < 5e-15  # measured 9e-16


def test_solution_of_sharp_escapes_has_the_time_asked_for():
    # From log a = -700 all values on the way up have the same log t to rounding.
    starts = lanes([-700.0, -300.0, -100.0, -50.0])
    log_times = 0.999 * times(DEPTHS, jnp.ones(4), ONES, starts, lanes([-0.5] * 4))
    for column in range(4):
        asked = log_times[:, column]
        reached = values(DEPTHS, jnp.ones(4), ONES, starts, asked)
        back = times(DEPTHS, jnp.ones(4), ONES, starts, reached)[:, column]
        np.testing.assert_allclose(back, asked, rtol=1e-15)


def test_modes_at_or_above_the_target_are_nan_and_dead_ones_stay_dead():
    starts = lanes([-jnp.inf, 0.0, 1.0, -2.0])
    for log_time in (-jnp.inf, 0.0, 700.0):
        got = values(DEPTHS, jnp.ones(4), ONES, starts, log_time * ONES)
        np.testing.assert_array_equal(got[:, 0], -jnp.inf)
        np.testing.assert_array_equal(jnp.isnan(got[:, 1:3]), True)
        assert np.all((got[:, 3] >= -2) & (got[:, 3] <= 0))
    got = times(
        DEPTHS,
        jnp.ones(4),
        ONES,
        lanes([-jnp.inf, -1.0, -1.0, -1.0]),
        lanes([-1.0, -2.0, 0.0, -1.0]),
    )
    np.testing.assert_array_equal(jnp.isnan(got[:, :3]), True)
    np.testing.assert_array_equal(got[:, 3], -jnp.inf)


def test_derivatives_of_the_solution_are_its_slopes():
    targets, rates = jnp.asarray(TARGETS), RATES
    starts = lanes(np.log(TARGETS) - [4, 2, 1, 0.1])
    log_times = jnp.asarray([0.0, 0.3, 0.5, 1.0, 0.7, 2.0])
    depths = DEPTHS.at[-1].set(40.0)

    def along(depths, starts, log_times, tangents):
        def f(*x):
            return values(x[0], targets, rates, x[1], x[2])

        return jax.jvp(f, (depths, starts, log_times), tangents)[1]

    zeros = jnp.zeros(6), jnp.zeros((6, 4)), jnp.zeros(6)
    derivative = jax.jit(along)
    for index, one in enumerate((ONES, jnp.ones((6, 4)), ONES)):
        tangents = (*zeros[:index], one, *zeros[index + 1 :])
        got = derivative(depths, starts, log_times, tangents)
        h = 1e-4

        def at(step, tangents=tangents):
            x = [a + step * v for a, v in zip((depths, starts, log_times), tangents)]
            return values(x[0], targets, rates, x[1], x[2])

        # One-sided, of third order: the depth cannot be below 1.
        want = (-11 * at(0) + 18 * at(h) - 9 * at(2 * h) + 2 * at(3 * h)) / (6 * h)
        # Measured 2e-10, the differences' own error.
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-9)


def test_escape_times_have_the_orders_of_p1_section_4_3():
    a, target, rate = -300.0, 3.0, 2.0

    def escape(depth, fraction):
        flow = SigmoidalFlow(depth, target, rate)
        return flow.log_escape_time(jnp.asarray([a]), fraction)[0]

    escape = jax.jit(escape)
    for fraction in (0.5, 0.9):
        odds = math.log(fraction / (1 - fraction)) + math.log(target) - a
        want = math.log(odds / (rate * target))
        np.testing.assert_allclose(escape(1.0, fraction), want, rtol=1e-14)
        # The next order is a(0)^p, e^{-100} at L = 2; all fractions agree to it.
        for depth, p in ((2.0, 1 / 3), (10.0, 9 / 11), (math.inf, 1.0)):
            want = -p * a - math.log(p * rate * target)
            np.testing.assert_allclose(escape(depth, fraction), want, rtol=1e-14)


call = eqx.filter_jit(lambda flow, state: (*flow(state), flow.log_loss(state)))


@pytest.mark.parametrize("depth", [1.0, 2.0, math.inf])
def test_rates_and_loss_are_the_formulas(depth):
    flow = SigmoidalFlow(depth, jnp.asarray(TARGETS), 3.0)
    p = 1.0 if math.isinf(depth) else (depth - 1) / (depth + 1)
    # Above the target, far below it, and dead.
    a = np.array([3.0, 1e-120, 0.0, 0.05])
    direction, log_speed, loss = call(flow, ufm.log_modes(jnp.asarray(a)))
    alive = a > 0
    want = 3 * np.where(alive, a, 1) ** p * (TARGETS - a) * alive
    np.testing.assert_allclose(direction * np.exp(log_speed), want, rtol=1e-13)
    np.testing.assert_allclose(np.exp(loss), np.sum((TARGETS - a) ** 2) / 2, rtol=1e-14)
    direction, log_speed, _ = call(flow, jnp.full(4, -jnp.inf))
    np.testing.assert_array_equal(direction, 0)
    assert log_speed == -jnp.inf


def test_norm_growth_and_length_are_those_of_the_rates():
    a, rate = np.array([0.5, 2.0, 0.125]), np.array([0.3, -0.02, 0.9])
    flow, log_a, direction = SigmoidalFlow(2), jnp.log(a), jnp.asarray(rate)
    names = ("log_growth", "log_length", "log_activity")

    @jax.jit
    def sizes(*x):
        return jnp.stack([flow.log_norm(x[0]), *(getattr(flow, n)(*x) for n in names)])

    got = sizes(log_a, direction)
    norm, step = a.sum(), np.linalg.norm(rate)
    want = [norm, (a @ rate) / norm, np.linalg.norm(a * rate), (1 + norm) * step]
    np.testing.assert_allclose(got, np.log(want), rtol=1e-14)


def assert_follows_the_exact_solution(path, depth, targets, rate):
    assert path.outcome == Outcome.reached
    starts = lanes(path.state[0])
    want = values(depth * ONES, targets, rate * ONES, starts, path.log_time)
    # Measured 3e-12 at a tolerance of 1e-11 a step.
    np.testing.assert_allclose(path.state, want, rtol=0, atol=2e-11)
    return np.exp(want)


@pytest.mark.parametrize("depth", [1.0, 2.0, 10.0])
def test_solve_follows_the_exact_solution_of_the_squared_error(depth):
    start = jnp.asarray([-20.0, -6.0, -2.0, 0.1])
    flow = SigmoidalFlow.mse(4, 3, depth)
    end = 0.2 + flow.log_escape_time(start)[1]
    path = ufm.solve(flow, start, stop=ufm.FinalTime(log=end), saves=6, rtol=1e-11)
    a = assert_follows_the_exact_solution(path, depth, jnp.full(4, 3**0.5), depth + 1)
    assert np.max(a) > 1.7


def test_solve_follows_the_exact_solution_of_the_linearised_regime():
    start = jnp.asarray([-20.0, -6.0, -5.0, -2.0])
    # With a target for each mode, to share the program of the squared error.
    flow, linearised = SigmoidalFlow(3.0, jnp.ones(4)), SigmoidalFlow.linearised(3.0)
    pairs = zip(call(flow, start), call(linearised, start))
    assert all(bool(jnp.all(one == other)) for one, other in pairs)
    stop = ufm.FinalTime(50.0)
    path = ufm.solve(flow, start, stop=stop, saves=6, rtol=1e-11)
    a = assert_follows_the_exact_solution(path, 3.0, jnp.ones(4), 1.0)
    assert np.max(a) > 0.99


@pytest.mark.parametrize("depth", [1.0, 3.0])
def test_linearised_rates_are_cross_entropys_up_to_the_square_of_the_norm(depth):
    a = np.array([0.3, 0.1, 0.6])
    sizes = np.array([1e-1, 1e-2, 1e-3])
    errors = []
    for size in sizes:
        log_a = jnp.log(size * a)
        linear, linear_speed, _ = call(SigmoidalFlow.linearised(depth), log_a)
        direction, speed, _ = call(ufm.HadamardFlow(4, depth), log_a)
        ratio = linear / direction * np.exp(linear_speed - speed)
        errors.append(np.max(np.abs(ratio - 1)))
    slopes = np.diff(np.log(errors)) / np.diff(np.log(sizes))
    np.testing.assert_allclose(slopes, 2, atol=0.2)


@pytest.mark.parametrize("depth", [1, 2])
def test_matrix_flow_under_the_squared_error_follows_the_sigmoids(key, depth):
    # Logits U diag(a) Vᵀ with V = U ⊗ 1/√n: singular vectors of Y, K modes of them.
    left = np.linalg.qr(np.random.default_rng(0).normal(size=(4, 4)))[0]
    right = np.repeat(left, 2, axis=0) / math.sqrt(2)
    log_a = np.array([-6.0, -3.0, -1.0, 0.1])
    logits = jnp.asarray((left * np.exp(log_a)) @ right.T)
    start = ufm.balanced(key, logits, width=5, depth=depth, pad_depth=2)
    path = ufm.solve(
        ufm.GradientFlow(ufm.MSE(), 2, depth=depth),
        start,
        stop=ufm.FinalTime(2.0),
        saves=2,
        rtol=1e-11,
    )
    assert path.outcome == Outcome.reached
    core = left.T @ np.asarray(path.final.logits()) @ right
    lane = values(
        depth * ONES,
        jnp.full(4, 2**0.5),
        (depth + 1) * ONES,
        lanes(log_a),
        math.log(2.0) * ONES,
    )
    want = np.exp(lane[0])
    np.testing.assert_allclose(np.diag(core), want, rtol=2e-11)  # measured 4e-12
    assert np.max(np.abs(core - np.diag(np.diag(core)))) < 1e-14


BAD_FLOWS = [
    (lambda: SigmoidalFlow(0.5), "`depth` must be at least 1.*0.5"),
    (lambda: SigmoidalFlow(2, 0.0), "`target` must be positive.*0.0"),
    (lambda: SigmoidalFlow(2, jnp.asarray([1.0, -1.0])), "`target` must be positive"),
    (lambda: SigmoidalFlow(2, rate=math.inf), "`rate` must be positive.*inf"),
    (lambda: SigmoidalFlow.mse(3, (1, 2), 2), "one for each of the 3 classes"),
    (
        lambda: SigmoidalFlow(2).log_escape_time(-jnp.ones(2), 1.0),
        "`fraction` must lie between 0 and 1, but is 1.0",
    ),
]
BAD_STATES = [
    (SigmoidalFlow.mse(3, 1, 2), jnp.zeros(2), "3 targets, but the state 2 modes"),
    (SigmoidalFlow(2), jnp.asarray([0.0, jnp.nan]), "finite and at least one positive"),
    (SigmoidalFlow(2), jnp.asarray([0.0, jnp.inf]), "finite and at least one positive"),
    (SigmoidalFlow(2), jnp.full(2, -jnp.inf), "finite and at least one positive"),
]


@pytest.mark.parametrize(("build", "message"), BAD_FLOWS)
def test_bad_argument_is_refused(build, message):
    with pytest.raises(ValueError, match=message) as error:
        build()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("flow", "state", "message"), BAD_STATES)
def test_bad_state_is_refused(flow, state, message):
    with pytest.raises(ValueError, match=message):
        flow.check(state)


def test_a_time_that_is_nan_has_no_value():
    """Rows of a path that were not reached; -inf alone is the start."""
    flow, start = ufm.SigmoidalFlow.linearised(2.0), jnp.asarray([-3.0, -1.0])
    assert np.isnan(flow.solution(start, jnp.nan)).all()
    np.testing.assert_array_equal(flow.solution(start, -jnp.inf), start)
