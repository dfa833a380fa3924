import numpy as np
import pytest

import deepufm as ufm


def counted(found) -> list[tuple[ufm.AtlasEntry, int]]:
    """Entries and counts, where every start has a limit."""
    assert all(basin.entry is not None for basin in found)
    return [(basin.entry, basin.count) for basin in found]


def test_all_starts_of_depth_one_collapse():
    ((collapse, count),) = counted(ufm.basins(4, 1, starts=5))
    assert (collapse.rank, count) == (3, 5)


def test_every_limit_is_in_the_atlas():
    found = counted(ufm.basins(8, 2, starts=40, seed=3))
    assert sum(count for _, count in found) == 40
    # Of 64 minima in 4 orbits (section H of the independent values).
    assert sum(entry.orbit for entry, _ in found) == 64
    counts = [count for _, count in found]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] < 40
    # The same limits, told apart by their objectives alone.
    rng = np.random.default_rng(3)
    a = np.stack([rng.uniform(size=7) for _ in range(40)])
    a *= 1e-3 / a.sum(axis=1, keepdims=True)
    limits = ufm.limit(ufm.HadamardFlow(8, 2), np.log(a))
    objectives = limits.objective / 8 ** (2 / 3)
    for entry, count in found:
        assert np.sum(np.abs(objectives / entry.objective - 1) < 1e-9) == count


def test_starts_may_be_of_any_kind():
    def beside_collapse(rng):
        return 1 + 0.01 * rng.normal(size=3)

    found = counted(ufm.basins(4, 2, starts=6, scale=5.0, draw=beside_collapse))
    assert [(entry.rank, count) for entry, count in found] == [(3, 6), (2, 0)]


@pytest.mark.usefixtures("unhooked")
def test_starts_that_are_none_are_refused():
    with pytest.raises(ValueError, match="3 non-negative modes"):
        ufm.basins(4, 2, starts=2, draw=lambda rng: rng.normal(size=2))
    with pytest.raises(ValueError, match="at least 1"):
        ufm.basins(4, 2, starts=0)
