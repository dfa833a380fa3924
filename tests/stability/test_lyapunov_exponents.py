"""Lyapunov exponents and finite-time stretching against closed forms."""

from typing import ClassVar

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from jaxtyping import Array, Float

import deepufm as ufm
from deepufm.dynamics import AbstractFlow, AbstractStop, Outcome, make_method
from deepufm.stability._lyapunov_exponents import _end, lyapunov_exponents
from deepufm.stability._stretching import finite_time_stretching, log_singular_values


class Quadratic(AbstractFlow):
    """x'_i = sum_j A_ij x_j + sum_jk B_ijk x_j x_k, errors relative to the largest."""

    matrix: Float[Array, "n n"]
    products: Float[Array, "n n n"]
    norm_diverges: ClassVar[bool] = True
    is_smooth: ClassVar[bool] = True
    growth_is_exact: ClassVar[bool] = False
    log_state: ClassVar[bool] = False

    def __call__(self, state):
        direction = self.matrix @ state + (self.products @ state) @ state
        return direction, jnp.zeros(())

    def log_norm(self, state):
        return 0.5 * jnp.log(jnp.sum(state**2))

    def log_growth(self, state, direction):
        return self.log_norm(direction) - self.log_norm(state)

    def log_length(self, state, direction):
        del state
        return self.log_norm(direction)

    def log_activity(self, state, direction):
        return self.log_growth(state, direction)

    def log_loss(self, state):
        return self.log_norm(state)

    def relative_error(self, error, before, after):
        size = jnp.maximum(jnp.max(jnp.abs(before)), jnp.max(jnp.abs(after)))
        return jnp.max(jnp.abs(error)) / jnp.maximum(size, 1e-290)

    def check(self, state):
        del state


class AtReading(AbstractStop):
    """Stops where the clock reads a given number."""

    reading: Float[Array, ""]

    def excess(self, flow, log_time, state):
        del flow, log_time, state
        return jnp.asarray(-1.0)

    def final_reading(self, flow, clock, state):
        del flow, clock, state
        return self.reading


def at(reading):
    return AtReading(jnp.asarray(reading, float))


def three(matrix, products=None, **options):
    """Options of a solve in three dimensions; all share one program."""
    products = jnp.zeros((3, 3, 3)) if products is None else products
    given = {
        "y0": jnp.asarray([1.0, 0.3, -0.2]),
        "clock": ufm.PhysicalTime(),
        "segments": 1000,
        "normalised": False,
        "rtol": 1e-8,
        "solver": diffrax.Tsit5(),
    }
    flow = Quadratic(jnp.asarray(matrix, float), products)
    return {"flow": flow, **given, **options}


def test_linear_decay_has_exponent_minus_one_long_after_the_state_underflows():
    found = lyapunov_exponents(**three(-np.eye(3), stop=ufm.FinalTime(1e4)))
    assert found.outcome == Outcome.reached
    np.testing.assert_allclose(found.exponents, -1, atol=1e-8)
    np.testing.assert_allclose(found.running, -1, atol=1e-8)
    assert float(jnp.max(jnp.abs(found.final))) < 1e-300
    # Two trajectories 1e-8 apart, never brought close again, agree to the last bit
    # from some time on: log of their distance over t drifts to 0.
    times = np.asarray([1e2, 1e3, 1e4])
    states = np.exp(-times)[None] * np.asarray([1.0, 1 + 1e-8])[:, None]
    distance = np.maximum(np.abs(states[1] - states[0]), 5e-324)
    drifting = np.log(distance / 1e-8) / times
    np.testing.assert_allclose(drifting, [-1, -0.726, -0.0726], atol=1e-3)


TURN = [[0.3, -2.0, 0.0], [2.0, 0.3, 0.0], [0.0, 0.0, -0.5]]
# Real, not normal; complex (a scaled rotation); defective, with its log(t)/t.
REAL = [[0.5, 3.0, -1.0], [0.0, -0.2, 2.0], [0.0, 0.0, -0.6]]
DEFECTIVE = [[0.1, 1.0, 0.0], [0.0, 0.1, 1.0], [0.0, 0.0, 0.1]]


@pytest.mark.parametrize(
    ("matrix", "spectrum", "close"),
    [
        (REAL, [0.5, -0.2, -0.6], 0.02),
        (TURN, [0.3, 0.3, -0.5], 0.02),
        (DEFECTIVE, [0.1, 0.1, 0.1], 0.03),
    ],
    ids=["real", "scaled rotation", "defective"],
)
def test_exponents_of_linear_systems_are_real_parts_of_eigenvalues(
    matrix, spectrum, close
):
    found = lyapunov_exponents(**three(matrix, stop=ufm.FinalTime(400.0)))
    assert bool(jnp.all(found.resolved))
    np.testing.assert_allclose(found.exponents, spectrum, atol=close)
    # Liouville: the volume grows by the trace, at every reading.
    volume = jnp.sum(found.running, axis=1)
    np.testing.assert_allclose(volume, np.trace(matrix), rtol=1e-7)
    # The estimate closes in like 1/t.
    error = np.max(np.abs(np.asarray(found.running) - spectrum), axis=1)
    assert error[-1] < 0.5 * error[249]
    np.testing.assert_allclose(found.readings, np.arange(1, 1001) * 0.4)
    np.testing.assert_allclose(found.log_times, np.log(found.readings))


@pytest.mark.parametrize("matrix", [REAL, TURN, DEFECTIVE])
def test_stretching_is_the_singular_values_of_the_matrix_exponential(matrix):
    found = finite_time_stretching(**three(matrix, stop=ufm.FinalTime(10.0)))
    for i in (99, 499, 999):
        propagator = scipy.linalg.expm(np.asarray(matrix) * found.readings[i])
        _, values, right = np.linalg.svd(propagator)
        np.testing.assert_allclose(
            found.log_stretching[i], np.log(values), rtol=1e-6, atol=1e-6
        )
        if values[0] > 1.01 * values[1]:
            cosine = abs(right[0] @ np.asarray(found.directions[i]))
            assert cosine == pytest.approx(1, abs=1e-9)


def test_stretching_far_beyond_floats():
    # expm of a triangle: ratios of e^{4000} at the last reading.
    rates = np.asarray([3.0, 1.0, -1.0])
    matrix = np.diag(rates) + np.diag([1.0, 1.0], 1)
    options = three(matrix, y0=jnp.zeros(3), stop=ufm.FinalTime(1000.0))
    found = finite_time_stretching(**options)
    # The i-th compound of expm(At) tends to one of rank one, of the first i right and
    # left eigenvectors: log s_i = rate_i t and an offset of their volumes.
    _, right = np.linalg.eig(matrix)
    left = np.linalg.inv(right)
    minors = [
        np.sqrt(
            np.linalg.det(right[:, :i].T @ right[:, :i])
            * np.linalg.det(left[:i] @ left[:i].T)
        )
        for i in range(1, 4)
    ]
    offsets = np.diff(np.log(minors), prepend=0.0)
    np.testing.assert_allclose(
        found.log_stretching[-1], 1000 * rates + offsets, rtol=0, atol=1e-4
    )


def test_graded_singular_values_keep_relative_accuracy():
    rng = np.random.default_rng(0)
    columns, scales = rng.standard_normal((4, 4)), np.asarray([0.0, -20, -40, -600])
    logs, left = log_singular_values(columns, scales)
    np.testing.assert_allclose(left.T @ left, np.eye(4), atol=1e-14)
    mp = pytest.importorskip("mpmath")
    with mp.workdps(700):
        graded = mp.matrix(4, 4)
        for i in range(4):
            for j in range(4):
                graded[i, j] = mp.mpf(columns[i, j]) * mp.exp(int(scales[j]))
        exact = mp.svd_r(graded, compute_uv=False)
        wanted = [float(mp.log(value)) for value in exact]
    np.testing.assert_allclose(logs, wanted, rtol=1e-14, atol=1e-13)


LORENZ = [[-10.0, 10.0, 0.0], [28.0, -1.0, 0.0], [0.0, 0.0, -8 / 3]]


def test_lorenz_system_has_its_published_exponents():
    products = jnp.zeros((3, 3, 3)).at[1, 0, 2].set(-1.0).at[2, 0, 1].set(1.0)
    start = jnp.asarray([1.0, 2.0, 20.0])
    stop = ufm.FinalTime(500.0)
    found = lyapunov_exponents(**three(LORENZ, products, y0=start, stop=stop))
    # Sprott, Chaos and Time-Series Analysis (2003): 0.9056, 0, -14.5723. Spans of 500
    # scatter by 0.006 about them.
    np.testing.assert_allclose(found.exponents, [0.9056, 0, -14.5723], atol=0.025)
    assert float(jnp.sum(found.exponents)) == pytest.approx(-41 / 3, rel=1e-6)
    assert float(jnp.mean(found.resolved)) > 0.95


K, DEPTH = 4, 2
FLOW = ufm.HadamardFlow(K, DEPTH)
POWER = (DEPTH - 1) / (DEPTH + 1)
FIRST, LAST = 0.5, 20.0
RAY = jnp.full(K - 1, np.log(FIRST / (K - 1)))


def reduced(clock, end, start=RAY):
    return lyapunov_exponents(
        FLOW, start, stop=at(end), clock=clock, segments=10, rtol=1e-9,
        solver=diffrax.Tsit5(),
    )  # fmt: skip


def test_etf_exponents_have_their_closed_form_on_clocks_of_norm_and_time():
    by_norm = reduced(ufm.LogNorm(), np.log(LAST / FIRST))
    log_time = by_norm.log_times[-1]
    clock = ufm.LogTime(0.1)
    by_time = reduced(clock, clock.reading(log_time))
    for found in (by_norm, by_time):
        assert found.outcome == Outcome.reached
        assert found.exponents.shape == (K - 2,)
        norms = jnp.exp(found.log_norms)
        # d log|δ a-hat|/d log N = p - N/(K-1), P1 Thm 4.3.
        wanted = POWER * (jnp.log(norms) - np.log(FIRST)) - (norms - FIRST) / (K - 1)
        total = jnp.cumsum(found.growth, axis=0)
        np.testing.assert_allclose(total, np.stack([wanted] * 2, 1), rtol=0, atol=1e-6)
        assert float(norms[-1]) == pytest.approx(LAST, rel=1e-7)
        assert float(found.log_times[-1]) == pytest.approx(float(log_time), abs=1e-7)
        np.testing.assert_allclose(
            found.exponents, total[-1] / found.readings[-1], rtol=1e-12
        )
        assert bool(jnp.all(found.resolved))


def test_a_dead_mode_has_no_tangent_and_path_length_is_a_clock():
    # Two equal modes of three. ArcLength measures a in the 2-norm, along the ray.
    log_mode = np.log(FIRST / 2)
    end = (LAST - FIRST) / np.sqrt(2)
    start = jnp.asarray([log_mode, -jnp.inf, log_mode])
    found = reduced(ufm.ArcLength(), end, start)
    assert found.outcome == Outcome.reached
    assert found.exponents.shape == (1,)

    def rate(log_norm):
        # P1 D.4: p - K mu/(K-2+2x), x = e^{-K mu/2}, mu = N/2.
        mu = np.exp(log_norm) / 2
        return POWER - K * mu / (K - 2 + 2 * np.exp(-K * mu / 2))

    wanted = scipy.integrate.quad(rate, np.log(FIRST), np.log(LAST), epsabs=1e-12)[0]
    assert float(jnp.sum(found.growth)) == pytest.approx(wanted, abs=1e-6)
    assert not np.any(np.asarray(found.final_vectors)[:, 1])
    assert np.isneginf(np.asarray(found.final)[1])
    assert float(found.log_norms[-1]) == pytest.approx(np.log(LAST), abs=1e-8)


def log_ratio_rates(log_norm, log_hat):
    """d log a-hat/d log N, in plain NumPy, of P1 eq. 6."""
    a = np.exp(log_norm + log_hat)
    hadamard = scipy.linalg.hadamard(K)[1:, 1:]
    psi = 1.0 - hadamard
    rates = (psi @ np.exp(-psi @ a)) * a**POWER
    return rates / (np.exp(log_hat) @ rates) - 1


def propagator(log_hat, start, span):
    """Columns: central differences of log a-hat at the end, for those at the start."""

    def end(shift):
        solved = scipy.integrate.solve_ivp(
            log_ratio_rates, (start, start + span), log_hat + shift, "DOP853",
            rtol=1e-12, atol=1e-13,
        )  # fmt: skip
        return solved.y[:, -1]

    # An orthonormal basis of the section sum a-hat·v = 0.
    section = scipy.linalg.null_space(np.exp(log_hat)[None])
    step = 1e-4
    # Shifts leave the simplex to second order: even, so central differences lose it.
    return np.stack([(end(step * v) - end(-step * v)) / (2 * step) for v in section.T])


def test_stretching_off_the_ray_agrees_with_differences_of_the_flow():
    a = np.asarray([0.7, 0.2, 0.1])
    log_hat, span = np.log(a / a.sum()), 1.5
    wanted = np.linalg.svd(propagator(log_hat, np.log(a.sum()), span).T)[1]
    options = {
        "stop": at(span), "clock": ufm.LogNorm(), "segments": 10, "rtol": 1e-9,
        "solver": diffrax.Tsit5(),
    }  # fmt: skip
    found = finite_time_stretching(FLOW, jnp.log(a), **options)
    np.testing.assert_allclose(np.exp(found.log_stretching[-1]), wanted, rtol=1e-5)
    # Neither vectors nor the clock change it.
    by_key = finite_time_stretching(FLOW, jnp.log(a), **options, key=jax.random.key(7))
    np.testing.assert_allclose(
        by_key.log_stretching, found.log_stretching, rtol=0, atol=1e-7
    )
    options |= {"clock": ufm.LogTime(0.1)}
    options["stop"] = at(ufm.LogTime(0.1).reading(jnp.asarray(found.log_times[-1])))
    by_time = finite_time_stretching(FLOW, jnp.log(a), **options)
    np.testing.assert_allclose(
        by_time.log_stretching[-1], found.log_stretching[-1], rtol=0, atol=1e-7
    )
    cosine = by_time.directions[-1] @ found.directions[-1]
    assert abs(float(cosine)) == pytest.approx(1, abs=1e-7)
    # The direction is a perturbation at equal norm.
    assert abs(float(np.exp(log_hat) @ found.directions[-1])) < 1e-12


def test_full_flow_on_the_etf_ray_has_gauge_and_imbalance_exponents():
    """At K = d = 4, L = 1: W = cU, H = cUᵀ of rank 3, in units of log‖θ‖.

    δW = WA, δH = -AH leave Z alone: 6 antisymmetric A rotate, exponent 0; 9 symmetric
    ones (none on the kernel alone) unbalance, with W^T W - H H^T conserved: -2. The
    parts that see 1, or only the kernel, stand still while the norm grows: δW = 1wᵀ (4)
    and δH = k1ᵀ (1, k the kernel), -1.
    """
    model = ufm.hadamard(
        jax.random.key(1), jnp.full(3, 4.0), per_class=1, width=4, depth=1
    )
    flow = ufm.GradientFlow(ufm.CrossEntropy(), 1)
    found = finite_time_stretching(
        flow, model, stop=ufm.FinalTime(30.0), segments=5, rtol=1e-8
    )
    growth = found.log_norms[-1] - float(flow.log_norm(model))
    exponents = found.log_stretching[-1] / growth
    assert exponents.shape == (31,)
    for wanted, count in ((0.0, 6), (-1.0, 5), (-2.0, 9)):
        assert np.sum(np.abs(exponents - wanted) < 1e-6) == count


def test_failures_are_reported_and_what_came_before_is_kept():
    # e^t overflows at t = 709.8, in segment 71 of 10 each.
    found = lyapunov_exponents(**three(np.eye(3), stop=ufm.FinalTime(1e4)))
    assert found.outcome == Outcome.non_finite
    assert int(found.num_segments) == 70
    np.testing.assert_allclose(found.exponents, 1, rtol=1e-6)
    np.testing.assert_allclose(found.running[:70], 1, rtol=1e-6)
    assert np.all(np.isnan(found.running[70:]))
    assert np.all(np.isfinite(found.final))
    # Vectors of length e^{-400} at the first end: their squares are no floats.
    found = lyapunov_exponents(**three(-np.eye(3), stop=ufm.FinalTime(4e5)))
    assert found.outcome == Outcome.non_finite
    assert int(found.num_segments) == 0
    assert np.all(np.isnan(found.exponents))


def test_a_reading_that_no_clock_knows_is_found_by_following_the_orbit():
    options = three(np.eye(3), stop=ufm.FinalNorm(10.0))
    flow, y0, stop = options["flow"], options["y0"], options["stop"]
    method = make_method(
        flow, y0, stop, options["clock"], None, options["solver"], 1e-8, 100_000,
        wants_states=False,
    )  # fmt: skip
    end, outcome = _end(flow, y0, method, 1e-8)
    assert outcome == Outcome.reached
    norm = np.linalg.norm(np.asarray(y0))
    assert float(end) == pytest.approx(np.log(10 / norm), abs=1e-7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"segments": 0}, "segments"),
        ({"num_exponents": 0}, "num_exponents"),
        ({"num_exponents": 4}, "There are 3 exponents"),
        ({"num_exponents": 3, "normalised": True}, "There are 2 exponents"),
    ],
)
def test_what_there_is_no_exponent_of_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        lyapunov_exponents(**three(np.eye(3), stop=ufm.FinalTime(1.0), **options))


def test_flows_without_tangents_are_refused():
    model = ufm.gaussian(
        jax.random.key(0), num_classes=4, per_class=1, width=4, depth=2
    )
    loss = ufm.CrossEntropy()
    switch = ufm.PiecewiseConstant((1e-3, 0.0), (10.0,))
    for flow, message in (
        (ufm.GradientFlow(loss, 1, activation=ufm.ReLU()), "kinks"),
        (ufm.GradientFlow(loss, 1, switch), "switches"),
        (ufm.GradientFlow(loss, 1, depth=2), "Padded"),
    ):
        with pytest.raises(ValueError, match=message):
            lyapunov_exponents(flow, model, stop=ufm.FinalTime(1.0), segments=3)
    with pytest.raises(ValueError, match="LogNorm"):
        lyapunov_exponents(
            ufm.GradientFlow(ufm.MSE(), 1), model, stop=ufm.FinalNorm(9.0), segments=3,
            clock=ufm.LogNorm(),
        )  # fmt: skip
