"""Layerwise flows against mpmath, SciPy, the matrix flow and the reduced flow."""

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest
from scipy.integrate import solve_ivp

import deepufm as ufm
from deepufm import (
    GradientFlow,
    HadamardFlow,
    LayerwiseHadamardFlow,
    LayerwiseMSEFlow,
    Outcome,
)

TIGHT = {"rtol": 1e-11, "saves": 2}

call = eqx.filter_jit(lambda flow, state: (*flow(state), flow.log_loss(state)))


@eqx.filter_jit
def sizes(flow, state, direction):
    names = ("log_growth", "log_length", "log_activity")
    logs = [getattr(flow, name)(state, direction) for name in names]
    return jnp.stack([flow.log_norm(state), *logs])


def rate(flow, state):
    direction, log_speed, _ = call(flow, state)
    return np.asarray(direction) * np.exp(log_speed)


def psi(k):
    indices = range(1, k)
    return np.array([[2 * ((i & j).bit_count() % 2) for j in indices] for i in indices])


def exact(alpha, per_class):
    """Sign and log |d alpha/dt|, and the log-loss, from P1 eq. 41 in 60 digits."""
    layers, modes = alpha.shape
    with mp.workdps(60):
        x = [[mp.mpf(float(v)) for v in row] for row in alpha]
        core, k, root = psi(modes + 1), modes + 1, mp.sqrt(per_class)
        a = [mp.fprod(row[i] for row in x) / (k * root) for i in range(modes)]
        weights = [mp.exp(-mp.fdot(row, a)) for row in core.tolist()]
        odds = mp.fsum(weights)
        signs, logs = np.zeros(alpha.shape), np.full(alpha.shape, -math.inf)
        for i in range(modes):
            drive = root * mp.fdot(core[i].tolist(), weights) / (1 + odds)
            for row in range(layers):
                value = drive * mp.fprod(x[r][i] for r in range(layers) if r != row)
                signs[row, i] = int(mp.sign(value))
                if value:
                    logs[row, i] = float(mp.log(abs(value)))
        loss = k * per_class * mp.log1p(odds)
        return signs, logs, float(mp.log(loss))


DRAWN = np.random.default_rng(0).normal(size=(3, 7))
CLASS = np.arange(7)
STATES = {
    "K = 2": np.array([[0.3], [-1.2]]),
    "L = 1": DRAWN[:2],
    "L = 2": DRAWN,
    "a zero in some layer": DRAWN * (CLASS != [[2], [4], [6]]),
    "two zeros in one mode": DRAWN * (CLASS != [[2], [2], [9]]),
    "margins of 540": 540**0.5 * (1 + 0.05 * DRAWN[:2]),
    "negative margins": np.array([[10.0], [-10.0]]) + 3 * DRAWN[:2],
    "products of 1e-480": 1e-120 * DRAWN[[0, 1, 2, 0, 1]],
    "rows of 1e60 and 1e-60": np.array([[1e60], [-1e-60], [1.0]]) * DRAWN,
}


@pytest.mark.parametrize("per_class", [1, 3])
@pytest.mark.parametrize("name", STATES)
def test_rates_are_p1_eq_41_to_all_digits(name, per_class):
    alpha = STATES[name]
    flow = LayerwiseHadamardFlow(alpha.shape[1] + 1, per_class)
    signs, logs, want_loss = exact(alpha, per_class)
    direction, log_speed, loss = call(flow, jnp.asarray(alpha))
    direction = np.asarray(direction)
    np.testing.assert_array_equal(np.sign(direction), signs)
    moves = signs != 0
    got = np.log(np.abs(direction[moves])) + log_speed
    error = np.abs(got - logs[moves]) / np.maximum(1, np.abs(logs[moves]))
    # Measured 4e-14, where logarithms of 138 cancel; 2e-15 elsewhere.
    assert np.max(error) < 2e-13
    assert 1e-3 < np.max(np.abs(direction)) < 100
    np.testing.assert_allclose(loss, want_loss, rtol=1e-14, atol=1e-14)


def test_the_states_above_reach_the_extremes_they_name():
    _, _, loss = exact(STATES["margins of 540"], 1)
    assert -550 < loss < -400
    _, _, loss = exact(STATES["negative margins"], 1)
    assert loss > 5
    _, logs, _ = exact(STATES["products of 1e-480"], 1)
    assert np.max(logs) < math.log(5e-324)
    signs, _, _ = exact(STATES["two zeros in one mode"], 1)
    assert not np.any(signs[:, 2])


def test_two_zeros_in_every_mode_are_rest():
    alpha = jnp.asarray(DRAWN).at[:2].set(0.0)
    direction, log_speed, _ = call(LayerwiseHadamardFlow(8), alpha)
    np.testing.assert_array_equal(direction, 0)
    assert log_speed == -jnp.inf


def test_derivatives_at_zeros_are_those_of_the_products():
    alpha = jnp.asarray([[0.0, 0.5, -0.3], [0.4, 0.0, 0.8], [0.9, 0.7, 0.0]])
    tangent = jnp.asarray(DRAWN[:, :3])

    def velocity(x):
        direction, log_speed = LayerwiseHadamardFlow(4, 3)(x)
        return direction * jnp.exp(log_speed)

    _, slope = jax.jit(lambda x, v: jax.jvp(velocity, (x,), (v,)))(alpha, tangent)
    flow, step = LayerwiseHadamardFlow(4, 3), 1e-5
    ahead, behind = (rate(flow, alpha + s * step * tangent) for s in (1, -1))
    want = (ahead - behind) / (2 * step)
    np.testing.assert_allclose(slope, want, rtol=0, atol=1e-9)


@pytest.mark.parametrize("per_class", [1, 3])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_balanced_rates_are_the_reduced_flow_in_other_units(depth, per_class):
    # d log a/dt = Σ_l (d alpha_l/dt)/alpha_l, and t' = t·(t'/t).
    a = jnp.asarray([1.5, 0.02, 40.0])
    alpha = padded(np.asarray(ufm.layer_modes(a, depth)), 5)
    velocity = rate(LayerwiseHadamardFlow(4, per_class, depth=depth), alpha)
    got = np.sum(velocity / alpha, axis=0)
    units = ufm.scale_map(4, per_class, float(depth))
    reduced = rate(HadamardFlow(4, float(depth)), jnp.log(units.to_reduced(a)))
    np.testing.assert_allclose(got, reduced * np.exp(units.log_time_factor), rtol=1e-13)


# Padded to one depth, so that all depths share one program.
PADDED = LayerwiseHadamardFlow(4, 3, depth=2)


def padded(alpha, deepest=3):
    """Rows of ones before the last."""
    ones = np.ones((deepest + 1 - len(alpha), alpha.shape[1]))
    return jnp.asarray(np.concatenate([alpha[:-1], ones, alpha[-1:]]))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_balanced_orbits_are_those_of_the_reduced_flow(depth):
    a = np.array([0.9, 0.05, 0.6])
    start = padded(np.asarray(ufm.layer_modes(jnp.asarray(a), depth)))
    flow = LayerwiseHadamardFlow(4, 3, depth=depth)
    path = ufm.solve(flow, start, stop=ufm.FinalTime(1e4), **TIGHT)
    units = ufm.scale_map(4, 3, float(depth))
    reduced = ufm.solve(
        HadamardFlow(4, float(depth)),
        jnp.log(units.to_reduced(jnp.asarray(a))),
        stop=ufm.FinalTime(log=units.log_time_to_reduced(jnp.log(1e4))),
        **TIGHT,
    )
    assert path.outcome == Outcome.reached
    got = flow.logit_modes(path.final)
    want = units.to_full(jnp.exp(reduced.final))
    np.testing.assert_allclose(got, want, rtol=1e-12)  # measured 2e-13


# Unbalanced, of both signs, with zeros, in two modes of which an entry must cross zero.
START = np.array([[0.0, 0.3, -0.8], [1.1, -0.6, 0.5], [0.4, 0.9, 0.2]])
TIME = 30.0


def integrated(formula, time, start):
    options = {"method": "DOP853", "rtol": 1e-13, "atol": 1e-15}
    path = solve_ivp(formula, (0, time), start.ravel(), **options)
    return path.y[:, -1].reshape(start.shape)


@pytest.fixture(scope="module")
def by_scipy():
    """P1 eq. 41 in plain NumPy, n = 3 and L = 2."""

    def formula(_, flat):
        x, y, z = flat.reshape(3, 3)
        weights = np.exp(-psi(4) @ (x * y * z) / (4 * np.sqrt(3)))
        drive = np.sqrt(3) * (psi(4) @ weights) / (1 + weights.sum())
        return (drive * np.array([y * z, x * z, x * y])).ravel()

    return integrated(formula, TIME, START)


CLOCKS = [(ufm.LogTime(), 2), (ufm.ArcLength(), ufm.SaveEvery(1.0, 3))]


@pytest.fixture(scope="module", params=CLOCKS, ids=["LogTime", "ArcLength"])
def orbit(request):
    clock, saves = request.param
    options = {"stop": ufm.FinalTime(TIME), "rtol": 1e-11}
    return ufm.solve(PADDED, padded(START), clock=clock, saves=saves, **options)


def test_orbit_from_an_unbalanced_start_is_scipys_on_each_clock(orbit, by_scipy):
    assert orbit.outcome == Outcome.reached
    np.testing.assert_allclose(orbit.final_log_time, math.log(TIME), rtol=1e-14)
    final = np.asarray(orbit.final)
    np.testing.assert_array_equal(final[2], 1)
    np.testing.assert_allclose(final[[0, 1, 3]], by_scipy, rtol=3e-13)  # measured 5e-14
    # Zeros are left, and crossed.
    assert final[0, 0] > 1
    assert np.any(np.sign(final[[0, 1, 3]]) * np.sign(START) < 0)


def test_differences_of_squares_are_conserved(orbit):
    final = np.asarray(orbit.final)[[0, 1, 3]]
    change = np.diff(final**2, axis=0) - np.diff(START**2, axis=0)
    assert np.max(np.abs(change)) < 3e-14 * np.max(final**2)  # measured 6e-15
    assert np.max(np.abs(np.diff(START**2, axis=0))) > 0.5


def bases(key, right):
    """R_0 ... R_{L-1} of the layers built from `key`: those with all values 1."""
    model = ufm.hadamard_layers(key, jnp.ones((3, 3)), per_class=3, width=5)
    rotations = [np.asarray(model.features) @ right]
    for hidden in np.asarray(model.hidden):
        rotations.append(hidden @ rotations[-1])
    return rotations


def matrices(model):
    return [np.asarray(x) for x in (model.features, *model.hidden, model.head)]


def projected(model, rotations, left, right):
    """The layers seen through singular vectors, (L+1, modes, modes)."""
    outs, ins = [*rotations, left], [right, *rotations]
    return np.array([o.T @ m @ i for o, m, i in zip(outs, matrices(model), ins)])


def assert_moves_as(got, model, want):
    """Diagonal as `want`, nothing elsewhere, nor outside the singular vectors."""
    size = np.max(np.abs(want))
    diagonal = np.array([np.diag(layer) for layer in got])
    np.testing.assert_allclose(diagonal, want, rtol=1e-12, atol=1e-14 * size)
    off = got * (1 - np.eye(got.shape[1]))
    assert np.max(np.abs(off)) < 1e-14 * size
    norms = [np.linalg.norm(m) for m in matrices(model)]
    np.testing.assert_allclose(norms, np.linalg.norm(want, axis=1), rtol=1e-13)


def test_hadamard_layers_move_as_the_matrix_flow_moves_them(key):
    left = np.vstack([np.ones(3), 1 - psi(4)]) / 2  # the columns of Φ but the first
    right = np.repeat(left, 3, axis=0) / math.sqrt(3)
    alpha = jnp.asarray(START)
    model = ufm.hadamard_layers(key, alpha, per_class=3, width=5)
    rotations = bases(key, right)
    direction, log_speed, _ = call(GradientFlow(ufm.CrossEntropy(), 3), model)
    direction = jax.tree.map(lambda x: x * jnp.exp(log_speed), direction)
    want = rate(LayerwiseHadamardFlow(4, 3), alpha)
    assert_moves_as(projected(direction, rotations, left, right), direction, want)


@pytest.mark.parametrize("per_class", [2, (3, 1, 2)])
@pytest.mark.parametrize("name", ["unbalanced", "small", "large"])
def test_layers_under_the_squared_error_move_as_the_matrix_flow(name, per_class):
    # Any orthonormal vectors are singular ones of a balanced Y; unit ones otherwise.
    rng = np.random.default_rng(1)
    left = np.linalg.qr(rng.normal(size=(3, 3)))[0] if per_class == 2 else np.eye(3)
    sizes = np.array([2, 2, 2] if per_class == 2 else per_class)
    right = np.repeat(left / np.sqrt(sizes)[:, None], sizes, axis=0)
    rotations = [np.linalg.qr(rng.normal(size=(4, 3)))[0] for _ in range(2)]
    alpha = {"unbalanced": 1.0, "small": 1e-90, "large": 20.0}[name] * START
    outs, ins = [*rotations, left], [right, *rotations]
    layers = [o @ np.diag(x) @ i.T for o, x, i in zip(outs, alpha, ins)]
    model = ufm.DeepUFM(
        head=jnp.asarray(layers[2]),
        hidden=jnp.asarray(layers[1])[None],
        features=jnp.asarray(layers[0]),
    )
    flow = LayerwiseMSEFlow(ufm.mse_targets(3, per_class))
    direction, log_speed, loss = call(GradientFlow(ufm.MSE(), per_class), model)
    want, want_speed, want_loss = call(flow, jnp.asarray(alpha))
    direction = jax.tree.map(lambda x: x * jnp.exp(log_speed - want_speed), direction)
    got = projected(direction, rotations, left, right)
    assert_moves_as(got, direction, np.asarray(want))
    np.testing.assert_allclose(loss, want_loss, rtol=1e-13, atol=1e-14)


SMALL = jnp.asarray([1e-3, 0.2, 1.0])


@pytest.fixture(scope="module")
def mse_orbits():
    """L = 1 unbalanced, and balanced modes at L = 1 and 2; one program."""
    balanced = [np.asarray(ufm.layer_modes(SMALL, depth)) for depth in (1, 2)]
    starts = [(1, START[:2]), (1, balanced[0]), (2, balanced[1])]
    return [
        ufm.solve(
            LayerwiseMSEFlow(ufm.mse_targets(3, (1, 4, 9)), depth=depth),
            padded(start, 2),
            stop=ufm.FinalTime(2.5),
            **TIGHT,
        ).final
        for depth, start in starts
    ]


def test_squared_error_from_an_unbalanced_start_is_scipys(mse_orbits):
    targets = np.array([1.0, 2, 3])

    def formula(_, flat):
        h, w = flat.reshape(2, 3)
        return np.concatenate([(targets - h * w) * w, (targets - h * w) * h])

    want = integrated(formula, 2.5, START[:2])
    np.testing.assert_allclose(mse_orbits[0][::2], want, rtol=4e-13)  # measured 7e-14
    np.testing.assert_array_equal(mse_orbits[0][1], 1)


@pytest.mark.parametrize("depth", [1, 2])
def test_balanced_squared_error_is_the_exact_sigmoid(mse_orbits, depth):
    flow = ufm.SigmoidalFlow.mse(3, (1, 4, 9), depth)
    want = exact_sigmoid(flow, jnp.log(SMALL), jnp.log(2.5))
    got = np.log(np.prod(mse_orbits[depth], axis=0))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-12)  # measured 4e-13


exact_sigmoid = eqx.filter_jit(lambda flow, start, log_t: flow.solution(start, log_t))


@pytest.mark.parametrize(
    "build",
    [
        functools.partial(LayerwiseHadamardFlow, 4),
        functools.partial(LayerwiseMSEFlow, jnp.asarray([1.0, 2.0, 3.0])),
    ],
    ids=["Hadamard", "MSE"],
)
def test_padding_changes_nothing_and_never_moves(build):
    flow, bare = build(depth=2), build()
    alpha, wide = jnp.asarray(START), padded(START, 5)
    (want, *want_logs), (got, *logs) = call(bare, alpha), call(flow, wide)
    np.testing.assert_allclose(got[np.r_[0, 1, 5]], want, rtol=1e-14)
    np.testing.assert_array_equal(got[2:5], 0)
    np.testing.assert_allclose(logs, want_logs, rtol=1e-13)
    want = sizes(bare, alpha, want)
    np.testing.assert_allclose(sizes(flow, wide, got), want, rtol=1e-13)
    # A part in a thousand of one entry, 0.5; zeros have no error to be relative to.
    error = jnp.zeros_like(wide).at[1, 2].set(5e-4)
    assert flow.relative_error(error, wide, wide) == pytest.approx(1e-3, rel=1e-14)


def test_norm_and_length_are_those_of_the_matrices_that_move():
    norm, length = np.linalg.norm(START), np.linalg.norm(START**2)
    direction = padded(START**2).at[2].set(0.0)
    want = [norm, length / norm, length, (1 + norm) * length / norm]
    got = sizes(PADDED, padded(START), direction)
    np.testing.assert_allclose(got, np.log(want), rtol=1e-13)


LAYERS = jnp.ones((3, 3))
NAN, DEEP = LAYERS.at[0, 0].set(jnp.nan), LayerwiseHadamardFlow(4, depth=1.5)
BAD = [
    (lambda: LayerwiseHadamardFlow(6), "power of two.*is 6.*GradientFlow"),
    (lambda: LayerwiseHadamardFlow(4, 0), "`per_class` must be at least 1, but is 0"),
    (lambda: ufm.mse_targets(3, (1, 2)), "one for each of the 3 classes, but has 2"),
    (lambda: ufm.layer_modes(jnp.ones(3), 0), "`depth` must be a whole number.* is 0"),
    (lambda: PADDED.check(jnp.ones((4, 2))), r"K = 4 .*\(3,\), but has \(2,\)"),
    (lambda: PADDED.check(LAYERS[:1]), r"\(L\+1, modes\), but is \(1, 3\)"),
    (lambda: PADDED.check(LAYERS[:2]), "`depth` must be .* 1 to .*, 1, but is 2"),
    (lambda: DEEP.check(LAYERS), "`depth` must be a whole.* is 1.5"),
    (lambda: PADDED.check(NAN), "must be finite, but holds NaN or inf"),
    (
        lambda: LayerwiseMSEFlow(jnp.ones(2)).check(LAYERS),
        r"2 targets.*\(L\+1, 2\).*has \(3, 3\)",
    ),
]


@pytest.mark.parametrize(("act", "message"), BAD)
def test_bad_arguments_and_states_are_refused(act, message):
    with pytest.raises(ValueError, match=message):
        act()


def test_a_state_without_layers_is_refused(unhooked):
    del unhooked
    with pytest.raises(ValueError, match=r"\(L\+1, modes\), but is \(3,\)"):
        PADDED.check(jnp.ones(3))


def test_a_norm_clock_is_refused_where_the_norm_stays_finite():
    flow = LayerwiseMSEFlow(jnp.ones(3))
    with pytest.raises(ValueError, match="LogNorm"):
        ufm.solve(flow, LAYERS, stop=ufm.FinalTime(1.0), clock=ufm.LogNorm())
