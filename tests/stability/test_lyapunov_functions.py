"""Lyapunov functions and their rates against 60 and 130 digits, and what is proven."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest
from oracles import P2_DISTANCE_RATE, P2_LOG_RATIO, P2_LOG_RATIO_RATE

import deepufm as ufm
from deepufm.stability._lyapunov_functions import (
    ETFDistance,
    KLDivergence,
    LogLoss,
    LogRatio,
    ReverseKLDivergence,
    SmoothedMargin,
    UniformDistance,
    theorem,
)

FUNCTIONS = [
    KLDivergence(),
    ReverseKLDivergence(),
    UniformDistance(),
    ETFDistance(),
    LogRatio(),
    LogLoss(),
    SmoothedMargin(),
]
NAMES = [type(function).__name__ for function in FUNCTIONS]
RNG = np.random.default_rng(0)
NOISE = RNG.standard_normal(7)

# a (K = 8, L = 1), then KL, reverse KL, M, M-tilde and their rates by time; mpmath, 60
# digits, the rates also by differences of the values.
P2_CASES = [
    (
        [1.0, 1.0, 1.0, 1.25, 0.01, 0.01, 0.01],
        (1.449809575774115588556526, -0.04489112431174316251837154),
        (0.5248483388922432666964721, -0.00007679742702298574872031579),
        (0.05311287323908513528461130, P2_DISTANCE_RATE),
        (0.4853613729020407197208660, 0.004457750321342559649510587),
    ),
    (
        [1.5, 1.5, 1.5, 2.0, 2.0**-10, 2.0**-10, 2.0**-10],
        (2.624181634872130371143931, -0.01088574669005447276961348),
        (0.5642947197963427272193363, 0.001498621391299236287116115),
        (0.05567579426700476427264760, 0.0004219059410986841862698484),
        (0.5007096559600464290211873, 0.002488346879828544449480744),
    ),
    (
        [1.0, 1.0, 1.0, 1.0, 0.001, 0.001, 0.001],
        (2.401600479090324853335323, -0.07645208081469635576536028),
        (0.5536891352859593256741005, -0.0009244282638517143147298933),
        (0.05338423290772169258196070, -0.00003339767006514253020935784),
        (0.4870087819156638089312337, -0.0002024246702160890485165905),
    ),
    (
        [1.0, 1.0, 1.0, 1.25, 2.0**-7, 2.0**-7, 2.0**-7],
        (1.554072280939142412034695, -0.04556746163417421100180980),
        (0.5321513498920986427695619, 0.0005799427775149934547534282),
        (0.05349247038501038213613704, 0.0007892711419628157024412617),
        (0.4876643874023705531278222, 0.004777589262212624361104173),
    ),
]

# log a: moderate, spread, nearly collapsed (M ~ 1e-20 and 1e-31) at several norms,
# tiny, and at margins of 1e4 to 1e5.
STATES = {
    "moderate": NOISE,
    "spread": 1 + 4 * NOISE,
    "near collapse": 1e-9 * NOISE,
    "last bits": math.log(0.01) + 4e-15 * NOISE,
    "tiny": math.log(1e-9) + 0.3 * NOISE,
    "large": math.log(3e3) + NOISE,
    "large near collapse": math.log(1e4) + 1e-7 * NOISE,
}


@eqx.filter_jit
def everything(flow, state):
    return [
        (
            function.value(flow, state),
            function.parts(flow, state),
            function.log_norm_rate(flow, state),
        )
        for function in FUNCTIONS
    ]


def mp_psi(v):
    n = len(v)
    return [
        2 * mp.fsum(v[j] for j in range(n) if ((i + 1) & (j + 1)).bit_count() % 2)
        for i in range(n)
    ]


def mp_values(a, depth):
    n = len(a)
    norm = mp.fsum(a)
    share = [x / norm for x in a]
    length = mp.sqrt(mp.fsum(x * x for x in a))
    loss = mp.log1p(mp.fsum(mp.exp(-m) for m in mp_psi(a)))
    squares = [((n + 1) * x) ** (mp.mpf(2) / (depth + 1)) for x in a]
    parameters = ((depth + 1) * mp.fsum(squares)) ** (mp.mpf(depth + 1) / 2)
    return [
        -mp.log(n) - mp.fsum(mp.log(x) for x in share) / n,
        mp.log(n) + mp.fsum(x * mp.log(x) for x in share),
        mp.fsum((x - mp.mpf(1) / n) ** 2 for x in share) / 2,
        mp.fsum((x / length - 1 / mp.sqrt(n)) ** 2 for x in a),
        mp.log(max(a)) - mp.log(min(a)),
        mp.log(loss),
        mp.log(mp.expm1((n + 1) * loss)) / parameters,
    ]


def mp_everything(log_a, depth):
    """V, dV/dt by central differences along the flow, and d log(sum a)/dt."""
    a = [mp.exp(u) for u in log_a]
    weights = [mp.exp(-m) for m in mp_psi(a)]
    power = mp.mpf(depth - 1) / (depth + 1)
    partition = 1 + mp.fsum(weights)
    f = [b / partition * x**power for b, x in zip(mp_psi(weights), a)]
    step = mp.mpf(10) ** -40 / max(f)

    def shifted(sign):
        moved = [mp.exp(u + sign * step * rate) for u, rate in zip(log_a, f)]
        return mp_values(moved, depth)

    rates = [(x - y) / (2 * step) for x, y in zip(shifted(1), shifted(-1))]
    return mp_values(a, depth), rates, mp.fdot(a, f) / mp.fsum(a)


@pytest.mark.parametrize(
    "case", P2_CASES, ids=lambda case: f"{case[0][3]}-{case[0][4]}"
)
def test_the_papers_counterexamples_have_their_values_and_rates(case):
    a, *expected = case
    found = everything(ufm.HadamardFlow(8, 1.0), jnp.log(jnp.asarray(a)))
    for (value, parts, _), (want, want_rate) in zip(found, expected):
        np.testing.assert_allclose(value, want, rtol=1e-14)
        rate = parts.sum * jnp.exp(parts.log_speed)
        condition = float(jnp.sum(jnp.abs(parts.parts)) / jnp.abs(parts.sum))
        np.testing.assert_allclose(rate, want_rate, rtol=3e-14 * condition)


def test_p2_log_ratio_rises_at_sixteen_classes():
    """The rates of the two modes differ by one percent of the larger."""
    flow, log_a = ufm.HadamardFlow(16, 1.0), jnp.log(jnp.asarray(P2_LOG_RATIO))
    rate, log_speed = eqx.filter_jit(LogRatio().rate)(flow, log_a)
    np.testing.assert_allclose(
        float(rate) * math.exp(log_speed), P2_LOG_RATIO_RATE, rtol=1e-13
    )


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_rates_are_right_to_their_own_bound_everywhere(depth):
    """Against 130 digits; the bound itself is a few hundred roundings of the parts."""
    for name, log_a in STATES.items():
        flow = ufm.HadamardFlow(8, float(depth)) if depth else ufm.LogitFlow(8)
        state = jnp.asarray(log_a) if depth else jnp.exp(jnp.asarray(log_a))
        found = everything(flow, state)
        with mp.workdps(130):
            exact = [mp.mpf(float(x)) for x in state]
            exact = exact if depth else [mp.log(x) for x in exact]
            want = mp_everything(exact, depth)
            growth = want[2]
            for label, (value, parts, by_norm), v, rate in zip(NAMES, found, *want[:2]):
                where = f"{label}, {name}"
                assert abs(value - float(v)) <= 5e-15 * abs(float(v)), where
                scale = float(rate / mp.exp(mp.mpf(float(parts.log_speed))))
                # What the logarithm of the speed has lost at margins of 1e5.
                rounded = 3e-15 * (1 + abs(float(parts.log_speed)))
                error = abs(float(parts.sum) - scale)
                assert error <= float(parts.error) + rounded * abs(scale), where
                # Near collapse the derivative at the ties of the last bits is exact.
                total = float(jnp.sum(jnp.abs(parts.parts)))
                assert float(parts.error) <= 2e-9 * total, where
                relative = float(
                    (mp.mpf(float(by_norm)) - rate / growth) * growth / rate
                )
                condition = total / abs(float(parts.sum))
                assert abs(relative) <= 1e-13 * condition, where


def test_rates_near_collapse_are_those_of_the_exponent():
    """At L = 1 and M ~ 1e-31, d log M/d log N = -2μ (P1 Thm 4.3)."""
    log_a = jnp.asarray(math.log(0.01) + 4e-15 * NOISE)
    value, parts, by_norm = everything(ufm.HadamardFlow(8, 1.0), log_a)[2]
    assert 1e-33 < value < 1e-29
    assert parts.sum < -1000 * parts.error
    np.testing.assert_allclose(by_norm / value, -0.02, rtol=1e-12)


def test_equal_modes_rest_exactly():
    found = everything(ufm.HadamardFlow(8, 2.0), jnp.asarray(np.full(7, -0.3)))
    for value, parts, by_norm in found[:5]:
        assert value == 0
        assert parts.sum == 0
        assert by_norm == 0
        assert parts.alignment == -1


def test_m_tilde_is_a_function_of_m():
    flow = ufm.HadamardFlow(8, 2.0)
    for log_a in STATES.values():
        found = everything(flow, jnp.asarray(log_a))
        (m, m_parts, _), (tilde, tilde_parts, _) = found[2], found[3]
        root = jnp.sqrt(1 + 14 * m)
        np.testing.assert_allclose(tilde, 28 * m / (root * (1 + root)), rtol=1e-13)
        np.testing.assert_allclose(
            tilde_parts.sum, 14 / root**3 * m_parts.sum, rtol=1e-9
        )


def test_ties_of_the_log_ratio_count_to_the_future():
    """Two modes tie for the largest, two for the smallest, at different rates."""
    a = np.array([0.25, 0.3, 0.4, 0.05, 0.1, 0.05, 0.4])
    flow = ufm.HadamardFlow(8, 2.0)
    direction, _ = flow(jnp.log(jnp.asarray(a)))
    f = np.asarray(direction)
    assert np.ptp(f[[2, 6]]) > 1e-3
    assert np.ptp(f[[3, 5]]) > 1e-3
    want = np.max(f[[2, 6]]) - np.min(f[[3, 5]])
    _, parts, by_norm = everything(flow, jnp.log(jnp.asarray(a)))[4]
    np.testing.assert_allclose(by_norm, want / (a @ f / a.sum()), rtol=1e-13)
    assert parts.applies


def test_modes_that_are_zero_change_nothing_but_what_is_infinite():
    """The others move as if the zeros were e^{-600}."""
    flow = ufm.HadamardFlow(8, 2.0)
    log_a = jnp.asarray(NOISE).at[jnp.asarray([2, 5])].set(-jnp.inf)
    dead = everything(flow, log_a)
    small = everything(flow, jnp.where(jnp.isneginf(log_a), -600.0, log_a))
    for name, got, want in zip(NAMES, dead, small):
        if name in ("KLDivergence", "LogRatio"):
            assert got[0] == jnp.inf
            assert jnp.isnan(got[2])
        else:
            np.testing.assert_allclose(got[0], want[0], rtol=1e-13)
            np.testing.assert_allclose(got[2], want[2], rtol=1e-12)


def test_the_margin_rises_just_where_its_theorem_says_and_may_fall_above():
    """Lyu & Li (2019): once the loss of all K examples is below log 2."""
    flow = ufm.HadamardFlow(8, 2.0)
    for shift in np.linspace(-2, 2, 21):
        log_a = jnp.asarray(NOISE + shift)
        found = everything(flow, log_a)
        parts, loss = found[6][1], 8 * math.exp(float(found[5][0]))
        assert bool(parts.applies) == (loss < math.log(2))
        if parts.applies:
            assert jnp.all(parts.parts <= 0)
    assert jnp.isnan(everything(ufm.HadamardFlow(8, math.inf), log_a)[6][0])


def test_rates_can_be_differentiated_at_collapse_and_with_modes_at_zero():
    def rate(log_a, depth):
        return UniformDistance().log_norm_rate(ufm.HadamardFlow(8, depth), log_a)

    slope = jax.jit(jax.grad(rate, argnums=(0, 1)))
    states = (jnp.zeros(7), jnp.zeros(7).at[3].set(-jnp.inf), jnp.asarray(9 * NOISE))
    for log_a in states:
        for leaf in slope(log_a, 1.0):
            assert jnp.all(jnp.isfinite(leaf))


def test_what_is_proven():
    def row(function, depth):
        return [theorem(function, k, depth) for k in (2, 4, 8, 16)]

    yes, no = [True] * 4, [True, False, False, False]
    assert row(KLDivergence(), 1) == yes  # P2 Thm 3
    for distance in (UniformDistance(), ETFDistance(), ReverseKLDivergence()):
        assert row(distance, 0) == yes  # P2 Thm 6
        assert row(distance, 1) == [True, True, False, False]  # P2 Thm 4
    assert row(LogRatio(), 1) == [True, True, True, False]  # P2 B.3.3
    assert row(LogRatio(), 0) == [True, True, True, False]
    for function in FUNCTIONS[:5]:
        assert row(function, 2.5) == no
    assert row(LogLoss(), math.inf) == yes
    assert row(SmoothedMargin(), 3) == yes
    assert not theorem(SmoothedMargin(), 8, math.inf)


@pytest.mark.usefixtures("unhooked")
def test_misuse_is_refused():
    with pytest.raises(ValueError, match="power of two"):
        theorem(LogLoss(), 6, 1)
    with pytest.raises(ValueError, match="at least 1"):
        theorem(LogLoss(), 8, 0.5)
    with pytest.raises(ValueError, match="positive modes"):
        UniformDistance().value(ufm.LogitFlow(4), jnp.asarray([1.0, -1.0, 1.0]))
    flow: Any = ufm.SigmoidalFlow(1.0)
    with pytest.raises(ValueError, match="reduced flows"):
        UniformDistance().value(flow, jnp.zeros(3))
