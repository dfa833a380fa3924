"""The tangent flow: first-order differences, pacing, errors and misuse."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepufm as ufm
from deepufm.dynamics._tangent_flow import TangentFlow, TangentState

FLOW = ufm.HadamardFlow(4, 2)
LOG_A = jnp.log(jnp.asarray([0.7, 0.2, 0.1]))
VECTORS = jnp.asarray([[0.3, -1.0, 0.5], [1.0, 2.0, -0.2]])


def full_flow():
    shapes = {"head": (4, 4), "hidden": (1, 4, 4), "features": (4, 4)}
    rng = np.random.default_rng(0)
    draws = {name: 0.5 * rng.standard_normal(shape) for name, shape in shapes.items()}
    model = ufm.DeepUFM(**{name: jnp.asarray(draw) for name, draw in draws.items()})
    return ufm.GradientFlow(ufm.CrossEntropy(), 1), model


# Compiled once for all tests: operation by operation takes longer.
evaluate = eqx.filter_jit(lambda flow, state: flow(state))
begin = eqx.filter_jit(lambda flow, state, vectors: flow.start(state, vectors))
look = eqx.filter_jit(
    lambda flow, state: (flow.motion(state), flow.log_norm(state), flow.log_loss(state))
)
measure = eqx.filter_jit(lambda flow, *states: flow.relative_error(*states))


def velocity(flow, state):
    direction, log_speed = evaluate(flow, state)
    speed = np.exp(float(log_speed))
    return jax.tree.map(lambda leaf: jnp.asarray(speed * np.asarray(leaf)), direction)


def shifted(state, step, vector):
    return jax.tree.map(lambda x, v: jnp.asarray(np.add(x, step * v)), state, vector)


def differences(flow, state, vector):
    """Central differences of dy/dt along a vector, flat."""
    ends = [velocity(flow, shifted(state, step, vector)) for step in (1e-5, -1e-5)]
    return (flat(ends[0]) - flat(ends[1])) / 2e-5


def vectors_like(state, count):
    rng = np.random.default_rng(3)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.standard_normal((count, *leaf.shape))), state
    )


def flat(state):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(state)])


def rows(vectors):
    leaves = jax.tree.leaves(vectors)
    return np.concatenate([np.reshape(leaf, (len(leaf), -1)) for leaf in leaves], 1)


@pytest.mark.parametrize("kind", ["reduced", "full"])
def test_vectors_move_by_the_derivative_of_the_velocity(kind):
    flow, state = (FLOW, LOG_A) if kind == "reduced" else full_flow()
    tangent = TangentFlow(flow)
    start = begin(tangent, state, vectors_like(state, 2))
    moved = rows(velocity(tangent, start).vectors)
    for i in range(2):
        vector = jax.tree.map(lambda leaf, i=i: leaf[i], start.vectors)
        wanted = differences(flow, state, vector)
        scale = np.max(np.abs(wanted))
        np.testing.assert_allclose(moved[i], wanted, rtol=0, atol=1e-7 * scale)


def test_transverse_vectors_stay_orthogonal_and_differ_along_the_flow_alone():
    flow, state = FLOW, LOG_A
    across = TangentFlow(flow, transverse=True)
    start = begin(across, state, vectors_like(state, 2))
    along = flat(evaluate(flow, state)[0])
    unit = along / np.linalg.norm(along)
    assert np.max(np.abs(rows(start.vectors) @ unit)) < 1e-14

    # <v, f> does not change: d<v, f> = <dv, f> + <v, Df·f>, by differences.
    moved, step = velocity(across, start), 1e-6
    products = []
    for sign in (step, -step):
        there = shifted(start, sign, moved)
        products.append(rows(there.vectors) @ flat(velocity(flow, there.state)))
    size = np.linalg.norm(rows(moved.vectors)) * np.linalg.norm(along)
    assert np.max(np.abs(products[0] - products[1])) / (2 * step) < 1e-6 * size

    # The rest of dv is that of the plain tangent flow.
    plain = velocity(TangentFlow(flow), TangentState(start.state, start.vectors))
    extra = rows(plain.vectors) - rows(moved.vectors)
    rest = extra - (extra @ unit)[:, None] * unit[None, :]
    assert np.max(np.abs(rest)) < 1e-13
    assert np.max(np.abs(extra)) > 0.01


def test_speed_stays_apart_where_it_underflows():
    # Margins near 2000: the speed is e^{-2000}, and direction of ordinary size.
    start = begin(TangentFlow(FLOW), LOG_A + jnp.log(4000.0), VECTORS)
    direction, log_speed = evaluate(TangentFlow(FLOW), start)
    assert float(log_speed) < -1500
    assert np.all(np.isfinite(direction.vectors))
    assert float(jnp.max(jnp.abs(direction.vectors))) > 0.1


def test_clocks_and_stops_see_the_flow_itself():
    tangent = TangentFlow(FLOW)
    start = begin(tangent, LOG_A, VECTORS)
    ours, log_norm, log_loss = look(tangent, start)
    its, its_log_norm, its_log_loss = look(FLOW, LOG_A)
    for name in ("log_speed", "log_growth", "log_length", "log_activity"):
        assert float(getattr(ours, name)) == pytest.approx(
            float(getattr(its, name)), rel=1e-14
        )
    np.testing.assert_allclose(ours.direction.state, its.direction, rtol=1e-14)
    assert float(log_norm) == pytest.approx(float(its_log_norm), rel=1e-14)
    assert float(log_loss) == pytest.approx(float(its_log_loss), rel=1e-14)
    assert tangent.norm_diverges


def test_errors_are_relative_to_each_vector():
    tangent = TangentFlow(FLOW)
    vectors = jnp.asarray([[3.0, 4.0, 0.0], [0.0, 5e-200, 0.0]])
    before = begin(tangent, LOG_A, vectors)
    zero = np.zeros(3)

    def error(first, second, state=zero):
        given = TangentState(
            jnp.asarray(state), jnp.asarray(np.stack([zero + first, zero + second]))
        )
        return float(measure(tangent, given, before, before))

    assert error(0.0, 0.0) == 0
    assert error(1e-3, 0.0) == pytest.approx(np.sqrt(3) * 1e-3 / 5)
    assert error(0.0, 1e-203) == pytest.approx(np.sqrt(3) * 1e-3 / 5)
    assert error(0.0, 0.0, np.asarray([0.0, -0.2, 0.0])) == pytest.approx(0.2)
    assert np.isnan(error(np.nan, 0.0))


def test_vectors_of_zero_stay_zero_with_no_error():
    tangent = TangentFlow(FLOW)
    start = begin(tangent, LOG_A, jnp.zeros((2, 3)))
    direction, _ = evaluate(tangent, start)
    assert not np.any(direction.vectors)
    assert float(measure(tangent, direction, start, start)) > 0  # of y alone


@pytest.mark.parametrize("transverse", [False, True])
def test_a_dead_mode_has_no_tangent(transverse):
    log_a = LOG_A.at[1].set(-jnp.inf)
    tangent = TangentFlow(FLOW, transverse=transverse)
    start = begin(tangent, log_a, VECTORS)
    assert np.all(np.isfinite(start.state))
    direction, _ = evaluate(tangent, start)
    assert not np.any(direction.vectors[:, 1])
    # What its entry says moves nothing else.
    other = evaluate(tangent, begin(tangent, log_a, VECTORS.at[:, 1].set(9.0)))[0]
    np.testing.assert_array_equal(other.vectors, direction.vectors)
    assert np.all(np.isfinite(direction.vectors))


def test_at_rest_nothing_moves():
    # a = s: the squared error is zero, and log_speed -inf or direction 0.
    flow = ufm.SigmoidalFlow(2)
    tangent = TangentFlow(flow)
    direction, _ = evaluate(tangent, begin(tangent, jnp.zeros(3), VECTORS))
    assert not np.any(direction.state)
    assert np.all(np.isfinite(direction.vectors))


def test_vectors_across_a_tiny_flow_are_those_across_a_large_one():
    """Squares of layers of 1e-60 at L = 2 would be no floats."""
    flow, model = full_flow()
    tangent = TangentFlow(flow, transverse=True)
    tiny = jax.tree.map(lambda x: 1e-60 * x, model)
    vectors = jax.tree.map(lambda x: jnp.ones((1, *x.shape)), model)
    found = begin(tangent, tiny, vectors)
    along, _ = flow(tiny)
    leaves = zip(jax.tree.leaves(found.vectors), jax.tree.leaves(along))
    scale = max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(along))
    overlap = sum(float(jnp.sum(v[0] * x / scale)) for v, x in leaves)
    assert abs(overlap) < 1e-12
    assert np.all(np.isfinite(ravel(found.vectors)))
    moved = evaluate(tangent, found)[0]
    assert np.all(np.isfinite(ravel(moved.vectors)))


def ravel(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def test_misuse_is_named(unhooked):
    del unhooked
    tangent = TangentFlow(FLOW)
    with pytest.raises(ValueError, match=r"`start\(state, vectors\)`"):
        tangent.check(LOG_A)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="Tangent vectors must have"):
        tangent.check(TangentState(LOG_A, VECTORS[:, :2]))
    with pytest.raises(ValueError, match="K-1 modes"):
        tangent.check(TangentState(LOG_A[:2], VECTORS[:, :2]))
    tangent.check(TangentState(LOG_A, VECTORS))
    kinked = ufm.GradientFlow(ufm.CrossEntropy(), 1, activation=ufm.ReLU())
    with pytest.raises(ValueError, match="kinks"):
        TangentFlow(kinked)
