"""Lanes: faults stay where they are, neighbours do not matter, little is wasted."""

from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from independent import reduced_to_time

import deepufm as ufm
from deepufm import Outcome
from deepufm.ensemble import Members, compiled, ensemble, make_share

# Below 32 lanes there is no narrower program.
COUNT, LANES = 600, 32
BUDGET = 400  # at 1e-8 an ordinary member takes a quarter of that
BROKEN, HARD, TWIN = 17, 63, 50
# Three escapes, each sharper than the tolerance likes: more steps than the budget.
HARD_START, HARD_DEPTH = np.log([1e-6, 1e-7, 1e-8]), 8.0


def flow_of(depth):
    return ufm.HadamardFlow(num_classes=4, depth=depth)


OPTIONS: dict[str, Any] = dict(
    stop=ufm.FinalTime(1e6), solver=diffrax.Tsit5(), rtol=1e-8, max_steps=BUDGET
)


def row_of(path, i):
    return jax.tree.map(lambda leaf: np.asarray(leaf[i]), path)


@pytest.fixture(scope="module")
def members():
    """Depths 1 to 8 and a(0) of norm 3; member 0 once more at place 50."""
    rng = np.random.default_rng(0)
    a = rng.uniform(size=(COUNT, 3))
    log_a = np.log(3 * a / a.sum(axis=1, keepdims=True))
    depths = rng.integers(1, 9, COUNT).astype(float)
    log_a[TWIN], depths[TWIN] = log_a[0], depths[0]
    return depths, log_a


@pytest.fixture(scope="module")
def clean(members):
    depths, log_a = members
    return ensemble(
        flow_of, jnp.asarray(depths), jnp.asarray(log_a), lanes=LANES, **OPTIONS
    )


@pytest.fixture(scope="module")
def faulty(members):
    """A start from NaN, and one that exhausts its budget."""
    depths, log_a = (x.copy() for x in members)
    log_a[BROKEN, 1] = np.nan
    log_a[HARD], depths[HARD] = HARD_START, HARD_DEPTH
    return ensemble(
        flow_of, jnp.asarray(depths), jnp.asarray(log_a), lanes=LANES, **OPTIONS
    )


def test_faulty_members_change_no_other(clean, faulty):
    others = np.delete(np.arange(COUNT), [BROKEN, HARD])
    assert np.all(np.asarray(clean.outcome == Outcome.reached))
    assert np.all(np.asarray(faulty.outcome == Outcome.reached)[others])
    np.testing.assert_allclose(faulty.final[others], clean.final[others], rtol=1e-13)
    for name in ("num_steps", "num_accepted", "num_rejected"):
        got, want = (getattr(path.stats, name)[others] for path in (faulty, clean))
        np.testing.assert_array_equal(got, want)
    np.testing.assert_allclose(faulty.final_log_time[others], np.log(1e6), rtol=1e-14)


def test_a_start_from_nan_is_non_finite_and_goes_nowhere(faulty):
    broken = row_of(faulty, BROKEN)
    assert broken.outcome == Outcome.non_finite
    assert broken.final_log_time == -np.inf
    assert broken.stats.num_accepted == 0
    assert broken.stats.num_steps == 1
    assert np.isnan(broken.final).tolist() == [False, True, False]


def test_a_member_that_runs_out_of_steps_keeps_its_last_state_and_time(faulty):
    hard = row_of(faulty, HARD)
    assert hard.outcome == Outcome.step_budget
    assert hard.stats.num_steps == BUDGET
    assert 0 < hard.final_log_time < np.log(1e6)
    want = reduced_to_time(HARD_START, HARD_DEPTH, hard.final_log_time)[0]
    # Sharp escapes: log a is known no better than their time.
    np.testing.assert_allclose(hard.final, want, atol=1e-4)


def test_the_budget_is_each_members_own(clean):
    """All of a lane's members together take more steps than one of them may."""
    steps = np.asarray(clean.stats.num_steps)
    assert steps.max() < BUDGET
    assert steps.sum() > 2 * LANES * BUDGET


def test_a_member_does_not_depend_on_its_place_or_neighbours(members, clean):
    depths, log_a = (jnp.asarray(x[:1]) for x in members)
    alone = row_of(ensemble(flow_of, depths, log_a, lanes=1, **OPTIONS), 0)
    for place in (0, TWIN):
        got = row_of(clean, place)
        np.testing.assert_allclose(got.final, alone.final, rtol=1e-13)
        assert got.final_log_time == alone.final_log_time
        assert got.outcome == alone.outcome
        assert got.stats.num_steps == alone.stats.num_steps


@pytest.fixture(scope="module")
def share(members):
    """One thread's work: a function of the members and how many of them count."""
    depths, log_a = (jnp.asarray(x[::2]) for x in members)
    ready = Members(jax.vmap(flow_of)(depths), log_a)
    return ready, compiled(make_share(ready, lanes=LANES, **OPTIONS), "cpu")


def test_refilled_lanes_compute_few_steps_too_many(share):
    members, run = share
    path, computed = run(members, jnp.asarray(members.count))
    needed = int(jnp.sum(path.stats.num_steps))
    assert needed <= computed[0] <= 1.15 * needed


def test_one_hard_member_does_not_keep_all_lanes(share):
    """It goes on in a narrower program, or it would cost 32 lanes for all its steps."""
    members, run = share
    count = 128
    depths = members.flows.depth.at[count - 1].set(HARD_DEPTH)
    starts = members.starts.at[count - 1].set(HARD_START)
    path, computed = run(Members(jax.vmap(flow_of)(depths), starts), jnp.asarray(count))
    steps = np.asarray(path.stats.num_steps[:count])
    assert steps[-1] == BUDGET > 4 * np.median(steps)
    assert computed[0] <= 1.5 * steps.sum()  # 2 and more otherwise


def test_members_that_do_not_count_are_not_integrated(share):
    members, run = share
    path, computed = run(members, jnp.asarray(0))
    assert computed[0] == 0
    assert not np.any(np.asarray(path.stats.num_steps))
