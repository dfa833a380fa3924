"""Limits of the reduced flow, K = 8.

What they should be is known: the 64 strict minima of K = 8 (section H of the project's
independent values, tests/oracles.json) for L > 1, collapse for L = 1. Which of them a
start goes to is checked by an integration of another field written out here.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
from oracles import kkt_points

import deepufm as ufm
from deepufm.limits import ReducedRoute, growth_exponents

K = 8
RANDOM = 10
# Then: beside collapse, late, on a saddle, beside it.
DEPTHS = np.asarray([1.0] * 2 + [2.0] * 4 + [3.0] * 4 + [2.0, 5.0, 1.0, 1.0])
BESIDE, LATE, ON_SADDLE, OFF_SADDLE = range(RANDOM, RANDOM + 4)
SQUARES = np.asarray([1.0, 1, 0, 1, 0, 0, 1])  # cross-polytope: a saddle at L = 1


def starts() -> np.ndarray:
    rng = np.random.default_rng(1)
    a = rng.uniform(size=(RANDOM, K - 1))
    a *= 1e-3 / a.sum(axis=1, keepdims=True)
    beside = 0.3 * np.linspace(0.98, 1.02, K - 1)
    late = 400 * np.asarray([0.26, 0.25, 1e-4, 0.24, 1e-5, 1e-4, 0.25])
    rest = np.stack([beside, late, SQUARES, SQUARES + 1e-4])
    with np.errstate(divide="ignore"):
        return np.log(np.vstack([a, rest]))


def flows(depths):
    return jax.vmap(lambda depth: ufm.HadamardFlow(K, depth))(jnp.asarray(depths))


@pytest.fixture(scope="module")
def limits():
    return ufm.limit(flows(DEPTHS), jnp.asarray(starts()))


def test_all_random_starts_are_certified(limits):
    assert np.all(limits.certified[:RANDOM])
    assert np.max(limits.kkt_residual[:RANDOM]) < 1e-13


def test_limits_are_the_known_minima(limits):
    for i in np.flatnonzero(limits.certified):
        depth = DEPTHS[i]
        known = [
            point["objective"] * K ** (2 / (depth + 1))
            for point in kkt_points()
            if len(point["a"]) == K - 1 and point["L"] == depth and point["minimum"]
        ]
        assert np.min(np.abs(np.asarray(known) / limits.objective[i] - 1)) < 1e-12


def test_depth_one_collapses(limits):
    np.testing.assert_allclose(limits.direction[:2], 1 / (K - 1), rtol=1e-12)
    assert list(limits.structure[:2]) == ["simplex ETF"] * 2
    # ‖θ‖² = 2·sum sigma = 2·(K-1) at a least gap of 1.
    np.testing.assert_allclose(limits.parameter_margin[:2], 1 / 14, rtol=1e-12)
    np.testing.assert_allclose(limits.logit_margin[:2], 1 / np.sqrt(7), rtol=1e-12)


def test_beside_collapse_and_late_starts_end_where_they_must(limits):
    assert limits.structure[BESIDE] == "simplex ETF"
    assert limits.structure[LATE] == "cross-polytope"
    np.testing.assert_allclose(limits.direction[LATE], SQUARES / 4, atol=1e-12)
    assert np.all(limits.certified[[BESIDE, LATE]])


def test_a_saddle_that_the_start_lies_on_is_told_from_a_minimum(limits):
    # At L = 1 modes that are dead stay so, though they would pay.
    assert limits.status[ON_SADDLE] is ufm.LimitStatus.SADDLE
    assert limits.verdict[ON_SADDLE] is ufm.Verdict.SADDLE
    np.testing.assert_allclose(limits.direction[ON_SADDLE], SQUARES / 4, rtol=1e-12)


def test_a_saddle_that_is_passed_is_reported(limits):
    assert limits.certified[OFF_SADDLE]
    assert limits.structure[OFF_SADDLE] == "simplex ETF"
    assert limits.passed_saddle[OFF_SADDLE]
    assert not np.any(limits.passed_saddle[:OFF_SADDLE])


def test_duals_price_the_modes(limits):
    psi = np.asarray(ufm.psi_matrix(K))
    for i in np.flatnonzero(limits.certified):
        power = 2 / (DEPTHS[i] + 1)
        a = limits.direction[i] / np.min(psi @ limits.direction[i])
        alive = a > 0
        slopes = power * a[alive] ** (power - 1)
        np.testing.assert_allclose((psi @ limits.duals[i])[alive], slopes, rtol=1e-9)
        assert np.all(limits.duals[i] >= 0)
        assert np.all(limits.duals[i][psi @ a > 1 + 1e-9] == 0)


def by_lsoda(log_a, depth, log_norm):
    """log a where ‖a‖_1 = exp(log_norm), from d log a/d log ‖a‖_1 written out anew."""
    bits = np.arange(1, K)
    odd = [[(int(i) & int(j)).bit_count() % 2 for j in bits] for i in bits]
    psi = 2.0 * np.asarray(odd)
    power = (depth - 1) / (depth + 1)

    def rate(_, u):
        a = np.exp(u)
        b = psi @ np.exp(np.min(psi @ a) - psi @ a)
        speed = b * np.exp(power * (u - np.max(u)))
        return speed * np.sum(a) / np.sum(a * speed)

    length = log_norm - np.logaddexp.reduce(log_a)
    found = scipy.integrate.solve_ivp(
        rate, (0, length), log_a, "LSODA", rtol=1e-8, atol=1e-8
    )
    return found.y[:, -1]


@pytest.mark.parametrize("member", range(RANDOM))
def test_another_integration_approaches_the_limit(limits, member):
    target = limits.direction[member] / np.linalg.norm(limits.direction[member])
    angles = []
    for norm in (30.0, 1e3, 3e4):
        a = np.exp(by_lsoda(starts()[member], DEPTHS[member], np.log(norm)))
        angles.append(np.linalg.norm(a / np.linalg.norm(a) - target))
    # Modes of L = 2 die slowly: at 3e4 one of these ten is half a radian away.
    assert angles[1] < angles[0]
    assert angles[2] < max(angles[1], 1e-7)


def test_growth_exponents_are_the_flow_s():
    rng = np.random.default_rng(3)
    log_a = rng.normal(size=K - 1)
    flow = ufm.HadamardFlow(K, 2.5)
    rates = np.exp(np.asarray(flow.log_rates(jnp.asarray(log_a))))
    a = np.exp(log_a)
    expected = rates * np.sum(a) / np.sum(a * rates)
    found = growth_exponents(log_a, 2.5, np.asarray(ufm.psi_matrix(K)))
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_a_growth_that_overflows_is_no_absence_of_growth():
    point = ufm.reduced_kkt(np.asarray([1.0, 1.0, 0.0]), 2)
    states = np.stack([np.full(3, 800.0), np.log([5.0, 5.0, 1e-9])])
    route = ReducedRoute(4, np.full(2, 2.0), states)
    assert route.is_invaded(0, point)
    assert not route.is_invaded(1, point)


def test_shares_count_every_member(limits):
    shares = limits.shares()
    assert sum(share.count for share in shares) == len(DEPTHS)
    assert shares[-1].structure == "not certified (saddle)"
    # Wilson's interval of 1 in 13 at 95 %, from its formula.
    z, p, n = 1.959963984540054, 1 / 14, 14
    centre, half = p + z**2 / (2 * n), z * np.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    expected = [(centre - half) / (1 + z**2 / n), (centre + half) / (1 + z**2 / n)]
    np.testing.assert_allclose([shares[-1].low, shares[-1].high], expected, rtol=1e-9)
    assert str(limits).startswith("13 of 14 certified")
    assert "simplex ETF, rank 7, objective 7, L = 1" in str(limits)
    np.testing.assert_array_equal(limits.depth, DEPTHS)


def test_one_member_of_a_batch_reads_like_one(limits):
    one = limits[0]
    assert one.direction.shape == (K - 1,)
    assert str(one).startswith("simplex ETF, rank 7, certified: ")
    with pytest.raises(IndexError, match="one member"):
        one[0]


@pytest.mark.usefixtures("unhooked")
def test_bad_input_is_refused():
    flow = ufm.HadamardFlow(K, 2)
    with pytest.raises(ValueError, match=r"shape \(7,\) or \(members, 7\)"):
        ufm.limit(flow, jnp.zeros(6))
    with pytest.raises(ValueError, match="finite depth"):
        ufm.limit(ufm.HadamardFlow(K, jnp.inf), jnp.zeros(7))
    with pytest.raises(ValueError, match="member 1 does not"):
        ufm.limit(flow, jnp.stack([jnp.zeros(7), jnp.full(7, jnp.nan)]))
    with pytest.raises(ValueError, match="needs a batch of as many"):
        ufm.limit(flows([1.0, 2.0]), jnp.zeros((3, 7)))
    with pytest.raises(ValueError, match="knows `HadamardFlow` and `GradientFlow`"):
        ufm.limit(ufm.LogitFlow(K), jnp.zeros(7))
    with jax.enable_x64(False), pytest.raises(ValueError, match="needs float64"):
        ufm.limit(flow, jnp.zeros(7))
