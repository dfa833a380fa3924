from concurrent.futures import Executor, Future, ThreadPoolExecutor
from types import SimpleNamespace

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate

import deepufm as ufm
from deepufm.stability import _basin_fractions, _ends
from deepufm.stability._arrivals import all_minima, follow_together, read_off
from deepufm.stability._basin_fractions import basin_fractions, starts_needed
from deepufm.stability._destinations import destinations
from deepufm.stability._starts import mode_starts


class Failing(Executor):
    """Fails on its second piece of work."""

    calls = 0

    def submit(self, fn, /, *args, **kwargs):
        self.calls += 1
        future = Future()
        if self.calls == 2:
            future.set_exception(RuntimeError("lost a worker"))
        else:
            future.set_result(fn(*args, **kwargs))
        return future


def test_starts_are_the_same_however_they_are_drawn():
    whole = mode_starts(8, 0.1, range(10), seed=3)
    np.testing.assert_array_equal(mode_starts(8, 0.1, range(4, 7), seed=3), whole[4:7])
    np.testing.assert_allclose(np.sum(np.exp(whole), axis=1), 0.1, rtol=1e-14)
    other = mode_starts(8, 10.0, range(10), seed=3)
    np.testing.assert_allclose(other - whole, np.log(100), rtol=1e-12)
    assert np.max(np.abs(mode_starts(8, 0.1, range(10), seed=4) - whole)) > 0.1


def test_minima_are_every_point_of_every_orbit():
    minima = all_minima(8, 2.0)
    # 64 strict minima in 4 orbits (section H of the independent values).
    assert len(minima.units) == 64
    assert sorted(np.bincount(minima.entry).tolist()) == [1, 7, 28, 28]


def test_what_is_read_off_is_what_limit_certifies():
    log_a = mode_starts(8, 1e-3, range(40), seed=1)
    minima = all_minima(8, 2.0)
    early, late = follow_together(8, 2.0, log_a, 40)
    found = read_off(minima, 2.0, early, late)
    assert np.mean(found >= 0) > 0.3
    limits = ufm.limit(ufm.HadamardFlow(8, 2), log_a, name=lambda _: "")
    expected = minima.find(limits.direction)
    np.testing.assert_array_equal(found[found >= 0], expected[found >= 0])
    # The same certificate with the faster integration, member by member.
    ends = destinations(8, 2.0, log_a)
    assert all(end.certified for end in ends)
    np.testing.assert_array_equal(
        minima.find(np.stack([end.direction for end in ends])), expected
    )
    # Where the readings disagree, or one failed, nothing is read off.
    other = read_off(minima, 2.0, np.roll(early, 1, axis=0), late)
    assert np.sum(other >= 0) < 0.5 * np.sum(found >= 0)
    assert np.all(read_off(minima, 2.0, early, np.full_like(late, np.nan)) == -1)


@pytest.mark.parametrize("share", [0.0, 0.03, 0.5, 0.9])
def test_starts_needed_are_the_fewest(share):
    def half_width(n):
        z = 1.959963984540054
        return z / (1 + z * z / n) * np.sqrt(share * (1 - share) / n + z * z / 4 / n**2)

    needed = starts_needed(share, 0.02)
    assert half_width(needed) <= 0.02 < half_width(needed - 1)


def test_rounds_stop_once_every_interval_is_narrow(monkeypatch):
    monkeypatch.setattr(_basin_fractions, "_PILOT", 20)
    seen = []
    found = basin_fractions(
        4, [3], [1e-3, 5.0], half_width=0.12, batched=False, max_starts=300,
        progress=lambda done, wanted: seen.append((done, wanted)),
    )  # fmt: skip
    assert found.is_narrow
    for scale in (1e-3, 5.0):
        rows = found.at(3, scale)
        assert sum(row.count for row in rows) == rows[0].starts
        assert max(row.half_width for row in rows) <= 0.12
        assert sum(row.fraction for row in rows) == pytest.approx(1)
    assert all(done <= wanted for done, wanted in seen)
    assert seen[-1][0] == seen[-1][1] == found.followed
    # One number in advance: the same starts, so the same counts.
    fixed = basin_fractions(
        4, [3], [1e-3], starts=found.at(3, 1e-3)[0].starts, batched=False
    )
    counts = [(row.rank, row.count) for row in found.at(3, 1e-3)]
    assert [(row.rank, row.count) for row in fixed.rows] == counts


def test_all_starts_of_depth_one_collapse():
    found = basin_fractions(4, [1], [0.1], starts=5, batched=False)
    (row,) = found.rows
    assert (row.rank, row.fraction, row.structure) == (3, 1.0, "simplex ETF")


def test_chunks_that_fail_have_a_share_of_their_own(monkeypatch):
    monkeypatch.setattr(_basin_fractions, "_CHUNKS", (1000, 10, 32))
    found = basin_fractions(4, [3], [1.0], starts=25, batched=False, executor=Failing())
    assert len(found.failures) == 1
    assert "lost a worker" in found.failures[0]
    assert "10 starts of 10 to 19" in found.failures[0]
    last = found.rows[-1]
    assert (last.count, last.certified) == (10, False)
    assert "RuntimeError" in last.structure
    assert sum(row.count for row in found.rows) == 25


def by_scipy(flow, params, models, *, stop, max_steps):
    """`ensemble` of three classes at L = 1, by SciPy's BDF in log(1 + t)."""
    del flow, params, max_steps

    def rate(s, y):
        head, features = y.reshape(2, 3, 3)
        logits = head @ features
        odds = np.exp(logits - np.diag(logits))
        np.fill_diagonal(odds, 0)
        wrong = odds / (1 + np.sum(odds, axis=0))
        residual = np.diag(np.sum(wrong, axis=0)) - wrong
        moved = np.stack([residual @ features.T, head.T @ residual])
        return np.exp(s) * moved.ravel()

    ends = []
    for head, features in zip(models.head, models.features, strict=True):
        start = np.stack([head, features]).ravel()
        end = float(stop.log_time)
        found = scipy.integrate.solve_ivp(rate, (0, end), start, "LSODA", rtol=1e-7)
        ends.append(found.y[:, -1].reshape(2, 3, 3))
    ends = jnp.asarray(np.stack(ends))
    final = eqx.tree_at(
        lambda m: (m.head, m.features), models, (ends[:, 0], ends[:, 1])
    )
    return SimpleNamespace(final=final)


def test_full_flow_against_width_in_an_executor(monkeypatch):
    monkeypatch.setattr(_ends, "ensemble", by_scipy)  # which is compiled for seconds
    with ThreadPoolExecutor(1) as executor:
        found = basin_fractions(3, [1], [0.5], [3], starts=2, executor=executor)
    (row,) = found.rows
    assert (row.width, row.rank, row.count) == (3, 2, 2)
    assert row.entry is None


@pytest.mark.parametrize(
    ("points", "options", "message"),
    [
        (([], [1.0]), {}, "empty"),
        (([0.5], [1.0]), {}, "at least 1"),
        (([1.5], [1.0], [4]), {}, "whole numbers"),
        (([2], [0.0]), {}, "positive"),
        (([2], [1.0]), {"half_width": 0.6}, "half_width"),
        (([2], [1.0]), {"starts": 0}, "at least 1"),
    ],
)
def test_points_and_levels_that_are_none_are_refused(points, options, message):
    with pytest.raises(ValueError, match=message):
        basin_fractions(4, *points, **options)
