"""The search finds what the papers found by hand, and nothing that is forbidden."""

import equinox as eqx
import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest

from deepufm.stability._counterexamples import (
    CounterexampleSearch,
    _draw,
    find_counterexample,
)
from deepufm.stability._lyapunov_functions import (
    AbstractLyapunov,
    KLDivergence,
    LogRatio,
    ReverseKLDivergence,
    SmoothedMargin,
    UniformDistance,
    theorem,
)


@pytest.fixture(scope="module", autouse=True)
def quick_to_compile():
    """What is found is checked in 50 digits, so that how fast it is found is free."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def mp_value(function, a):
    n, norm = len(a), mp.fsum(a)
    share = [x / norm for x in a]
    if isinstance(function, UniformDistance):
        return mp.fsum((x - mp.mpf(1) / n) ** 2 for x in share) / 2
    if isinstance(function, KLDivergence):
        return -mp.log(n) - mp.fsum(mp.log(x) for x in share) / n
    if isinstance(function, ReverseKLDivergence):
        return mp.log(n) + mp.fsum(x * mp.log(x) for x in share)
    return mp.log(max(a)) - mp.log(min(a))


def mp_rate(function, log_a, depth):
    """dV/d log(sum a) by central differences along the flow."""
    a = [mp.exp(mp.mpf(float(u))) for u in log_a]
    n = len(a)

    def psi(v):
        odd = [
            [j for j in range(n) if ((i + 1) & (j + 1)).bit_count() % 2]
            for i in range(n)
        ]
        return [2 * mp.fsum(v[j] for j in row) for row in odd]

    power = mp.mpf(depth - 1) / (depth + 1)
    b = psi([mp.exp(-m) for m in psi(a)])
    f = [x * y**power for x, y in zip(b, a)]
    growth = mp.fdot(a, f) / mp.fsum(a)
    step = mp.mpf(10) ** -16 / growth

    def shifted(sign):
        return mp_value(function, [y * mp.exp(sign * step * x) for x, y in zip(f, a)])

    return (shifted(1) - shifted(-1)) / (2 * step) / growth


def assert_is_a_counterexample(found: CounterexampleSearch):
    assert found.violated
    assert found.num_violations > 0
    assert found.alignment > found.rounding > 0
    assert not theorem(found.lyapunov, found.num_classes, found.depth)
    with mp.workdps(50):
        rate = mp_rate(found.lyapunov, found.log_a, found.depth)
    assert rate > 0
    np.testing.assert_allclose(found.rate, float(rate), rtol=1e-10)


def assert_finds_none(found: CounterexampleSearch):
    assert theorem(found.lyapunov, found.num_classes, found.depth)
    assert not found.violated
    assert found.num_violations == 0
    assert found.alignment < -0.01
    assert found.rate < 0


def test_m_falls_for_four_classes_and_rises_for_eight():
    """P2 Thm 4. At K = 4 the parts all have one sign: nothing is even near."""
    found = find_counterexample(UniformDistance(), 4, 1, starts=500, steps=50)
    assert_finds_none(found)
    assert found.alignment == -1
    assert_is_a_counterexample(
        find_counterexample(UniformDistance(), 8, 1, starts=50, steps=100)
    )


def test_m_rises_for_sixteen_classes():
    assert_is_a_counterexample(
        find_counterexample(UniformDistance(), 16, 1, starts=50, steps=100)
    )


def test_the_log_ratio_rises_for_sixteen_classes():
    """P2 B.3.3; and without depth as well, where M and the divergences fall."""
    found = find_counterexample(LogRatio(), 16, 1, starts=300, steps=150)
    assert_is_a_counterexample(found)


def test_the_log_ratio_falls_for_eight_classes():
    assert_finds_none(find_counterexample(LogRatio(), 8, 1, starts=300, steps=100))


def test_kl_falls_without_hidden_layers_and_rises_with_one():
    """P2 Thm 3 and P1 Thm 4.3; the starts include nearly collapsed and tiny ones."""

    def search(depth):
        return find_counterexample(
            KLDivergence(), 8, depth, starts=200, steps=60, norms=(1e-6, 1e2)
        )

    none = search(1)
    assert_finds_none(none)
    found = search(2)
    assert_is_a_counterexample(found)
    assert found.num_violations > 150


def test_reverse_kl_rises_for_eight_classes():
    """P2 B.3.1. The last lanes, filled up, are not counted."""

    def search(starts):
        return find_counterexample(
            ReverseKLDivergence(), 8, 1, starts=starts, steps=100, lanes=25
        )

    few, more, most = search(50), search(60), search(75)
    assert_is_a_counterexample(few)
    assert most.alignment >= more.alignment >= few.alignment
    assert few.num_violations <= more.num_violations <= few.num_violations + 10
    assert more.num_violations <= most.num_violations <= more.num_violations + 15
    assert f"{more.num_violations} of 60 starts" in str(more)


class Silent(AbstractLyapunov):
    """Rises everywhere, but its theorem speaks of nothing."""

    applies: bool = eqx.field(static=True)

    def value(self, flow, state):
        raise NotImplementedError

    def parts(self, flow, state):
        found = UniformDistance().parts(flow, state)
        rising = jnp.abs(found.parts) + 1
        return eqx.tree_at(
            lambda p: (p.parts, p.error, p.applies),
            found,
            (rising, 0.0 * found.error, jnp.asarray(self.applies)),
        )

    def proven(self, num_classes, depth):
        del num_classes, depth
        return False


@pytest.mark.parametrize("applies", [True, False])
def test_what_its_theorem_does_not_speak_of_is_no_violation(applies):
    found = find_counterexample(Silent(applies), 4, 1, starts=3, steps=1)
    assert found.violated is applies
    assert found.num_violations == 3 * applies


def test_the_margin_at_infinite_depth_is_refused():
    with pytest.raises(ValueError, match="infinite depth"):
        find_counterexample(SmoothedMargin(), 4, np.inf)


def test_starts_spread_over_the_ranges_and_do_not_depend_on_their_number():
    drawn = _draw(4000, 7, 3, (1e-3, 1e2), (1e-2, 10.0))
    np.testing.assert_array_equal(
        drawn[:10], _draw(10, 7, 3, (1e-3, 1e2), (1e-2, 10.0))
    )
    log_norm = np.log10(np.sum(np.exp(drawn), axis=1))
    spread = np.log10(np.std(drawn, axis=1))
    counts = np.histogram(log_norm, bins=5, range=(-3, 2))[0]
    assert np.sum(counts) == 4000
    assert np.all(np.abs(counts - 800) < 120)
    assert np.quantile(spread, 0.1) < -1.6
    assert np.quantile(spread, 0.9) > 0.6


@pytest.mark.parametrize(
    "options",
    [{"starts": 0}, {"steps": -1}, {"norms": (1.0, 0.1)}, {"spreads": (0.0, 1.0)}],
)
def test_misuse_is_refused(options):
    with pytest.raises(ValueError, match="must be"):
        find_counterexample(KLDivergence(), 8, 1, **options)
