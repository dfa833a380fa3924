"""The mirror and replicator forms of the reduced flow against plain formulas."""

import math

import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest

import deepufm as ufm

K = 8
PSI = np.array(
    [[2.0 * ((i & j).bit_count() % 2) for j in range(1, K)] for i in range(1, K)]
)
A = np.random.default_rng(0).exponential(size=K - 1)
DEPTHS = jnp.asarray([1.0, 1.0 + 1e-9, 2.0, 5.0, math.inf])
POWERS = [mp.mpf(0), mp.mpf(0), mp.mpf(1) / 3, mp.mpf(2) / 3, mp.mpf(1)]
# In doubles, 1 + 1e-9 is a little more.
POWERS[1] = (mp.mpf(1 + 1e-9) - 1) / (mp.mpf(1 + 1e-9) + 1)


def plain_energy(a):
    return jnp.log1p(jnp.sum(jnp.exp(-jnp.asarray(PSI) @ a)))


def exact_log_gradient(a):
    """log(b/D) in 40 digits."""
    with mp.workdps(40):
        a, psi = [mp.mpf(float(x)) for x in a], PSI.tolist()
        weights = [mp.exp(-mp.fdot(row, a)) for row in psi]
        total = mp.log1p(mp.fsum(weights))
        return [float(mp.log(mp.fdot(row, weights)) - total) for row in psi]


# All depths in one program.
over_depths = jax.jit(jax.vmap(ufm.mirror_map, in_axes=(None, 0)))
energy_gradient = jax.jit(ufm.energy_gradient)


@pytest.mark.parametrize("signs", [1, (-1) ** np.arange(K - 1)], ids=["all", "mixed"])
def test_energy_and_gradient_are_those_of_the_plain_formula(signs):
    a = jnp.asarray(signs * A)
    want, want_gradient = jax.value_and_grad(plain_energy)(a)
    gradient, log_scale = energy_gradient(a)
    np.testing.assert_allclose(ufm.energy(a), want, rtol=1e-14)
    got = np.asarray(gradient) * np.exp(log_scale)
    np.testing.assert_allclose(got, want_gradient, rtol=1e-14)


@pytest.mark.parametrize("size", [50.0, 1e4])
def test_gradient_keeps_its_direction_where_it_underflows(size):
    a = size * (1 + np.arange(K - 1) * 1e-3 / size)
    gradient, log_scale = energy_gradient(jnp.asarray(a))
    assert log_scale < -7 * size
    # The margins, 8 a, are resolved to their own roundings.
    got = np.log(-np.asarray(gradient)) + log_scale
    np.testing.assert_allclose(got, exact_log_gradient(a), rtol=1e-15)


def test_mirror_map_is_the_deformed_logarithm_at_any_depth():
    a = np.array([1e-3, 1e-120, 1.0, 1 + 1e-9, 7.0, 1e9, 0.5])
    got = over_depths(jnp.log(a), DEPTHS)
    with mp.workdps(60):
        logs = [mp.mpf(float(x)) for x in jnp.log(a)]
        want = [
            [float((1 - mp.exp(-p * x)) / p if p else x) for x in logs] for p in POWERS
        ]
    np.testing.assert_allclose(got, want, rtol=1e-13)
    # Its own inverse takes it back, as far as 1/p - φ' is resolved.
    inverse = jax.jit(jax.vmap(ufm.inverse_mirror_map))
    back = inverse(over_depths(jnp.log(A), DEPTHS), DEPTHS)
    np.testing.assert_allclose(back, jnp.broadcast_to(jnp.log(A), (5, 7)), rtol=1e-13)


def test_a_dual_beyond_the_range_of_the_map_gives_nan():
    dual = jnp.asarray([1.4, 1.5, 1.6])
    got = ufm.inverse_mirror_map(dual, 5.0)  # 1/p = 1.5
    np.testing.assert_allclose(got[0], -1.5 * math.log(1 - 1.4 / 1.5), rtol=1e-13)
    assert not np.any(np.isfinite(got[1:]))
    np.testing.assert_array_equal(ufm.inverse_mirror_map(dual, 1.0), dual)


def test_mirror_map_descends_the_energy_along_the_flow():
    """d/dt φ'(a) = -∇E: the same right-hand side at every depth."""

    @jax.jit
    @jax.vmap
    def dual_rate(depth):
        log_a = jnp.log(jnp.asarray(A))
        direction, log_speed = ufm.HadamardFlow(K, depth)(log_a)
        velocity = direction * jnp.exp(log_speed)
        return jax.jvp(lambda u: ufm.mirror_map(u, depth), (log_a,), (velocity,))[1]

    want = -jax.grad(plain_energy)(jnp.asarray(A))
    got = dual_rate(DEPTHS)
    np.testing.assert_allclose(got, jnp.broadcast_to(want, got.shape), rtol=1e-13)


def test_potential_is_the_closed_form_and_its_gradient_is_the_map():
    log_a = jnp.log(jnp.asarray(A))
    both = jax.jit(
        jax.vmap(jax.value_and_grad(ufm.mirror_potential), in_axes=(None, 0))
    )
    values, gradients = both(log_a, DEPTHS)
    with mp.workdps(60):
        a = [mp.exp(mp.mpf(float(x))) for x in log_a]
        entropy = mp.fsum(x * mp.log(x) - x for x in a)
        steep = mp.fsum(x - mp.log(x) for x in a)
        between = [
            mp.fsum((x - x ** (1 - p) / (1 - p)) / p for x in a) for p in POWERS[1:-1]
        ]
        want = [float(mp.re(v)) for v in (entropy, *between, steep)]
    np.testing.assert_allclose(values, want, rtol=1e-13)
    # By log a: a φ'(a).
    maps = over_depths(log_a, DEPTHS)
    np.testing.assert_allclose(gradients, maps * jnp.asarray(A)[None], rtol=1e-12)


replicate = jax.jit(ufm.replicator)


@pytest.mark.parametrize("depth", [1.0, 3.0, math.inf])
def test_replicator_is_the_derivative_of_the_normalised_modes(depth):
    direction, log_speed = replicate(ufm.HadamardFlow(K, depth), jnp.log(A))
    got = np.asarray(direction) * np.exp(log_speed)
    # P1 eq. 6 and the quotient rule, in plain NumPy.
    p = 1 if math.isinf(depth) else (depth - 1) / (depth + 1)
    weights = np.exp(-PSI @ A)
    rate = PSI @ weights / (1 + weights.sum()) * A ** (1 + p)
    want = rate / A.sum() - A * rate.sum() / A.sum() ** 2
    np.testing.assert_allclose(got, want, rtol=1e-12)
    assert abs(np.sum(got)) < 1e-15 * np.max(np.abs(got))


@pytest.mark.parametrize("depth", [1.0, 3.0, math.inf])
@pytest.mark.parametrize("size", [1e-5, 3.0, 1e4])
def test_neural_collapse_is_at_rest_to_the_last_bit(depth, size):
    direction, _ = replicate(ufm.HadamardFlow(K, depth), jnp.log(size) * jnp.ones(7))
    np.testing.assert_array_equal(direction, 0)


def test_dead_modes_keep_no_share_and_leave_the_others_theirs():
    flow, log_a = ufm.HadamardFlow(4, 2.0), jnp.log(jnp.asarray([0.5, 0.25]))
    direction, log_speed = ufm.replicator(flow, jnp.append(log_a, -jnp.inf))
    assert direction[2] == 0
    near, near_speed = ufm.replicator(flow, jnp.append(log_a, -700.0))
    np.testing.assert_allclose(
        direction[:2] * jnp.exp(log_speed), near[:2] * jnp.exp(near_speed), rtol=1e-13
    )


@pytest.mark.parametrize(
    "call", [ufm.mirror_map, ufm.inverse_mirror_map, ufm.mirror_potential]
)
def test_a_depth_below_one_is_refused(call):
    with pytest.raises(ValueError, match="`depth` must be at least 1.*0.5"):
        call(jnp.zeros(3), 0.5)


@pytest.mark.parametrize("call", [ufm.energy, ufm.energy_gradient])
def test_a_number_of_modes_that_is_no_power_of_two_less_one_is_refused(call):
    with pytest.raises(ValueError, match="power of two"):
        call(jnp.zeros(5))
