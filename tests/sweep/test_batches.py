"""Batches and buckets: every cell once, in programs that cost least."""

import itertools

import pytest

import deepufm as ufm
from deepufm.cli._progress import _duration
from deepufm.sweep import Grid, SweepSpec, UniformModesFamily, batches
from deepufm.sweep._buckets import COMPILATION, bucket_edges, edge_above

DEPTHS = tuple(range(1, 9))


def least_cost(sizes, seconds):
    """Tries every set of edges that holds the largest size."""
    ordered = sorted(sizes)
    costs = []
    for count in range(len(ordered)):
        for lower in itertools.combinations(ordered[:-1], count):
            edges = [*lower, ordered[-1]]
            padded = [next(e for e in edges if e >= size) for size in ordered]
            work = sum(seconds(s, e) for s, e in zip(ordered, padded))
            costs.append((work + COMPILATION * len(edges), tuple(edges)))
    return min(costs)


@pytest.mark.parametrize("unit", [1e-9, 1e-5, 1e-4, 1e-3, 1.0])
def test_edges_are_those_of_least_cost(unit):
    sizes = [800, 10, 50, 100, 200, 75]

    def seconds(size, edge):
        return unit * edge**2 * (1 + size % 7)

    cost, want = least_cost(sizes, seconds)
    edges = bucket_edges(sizes, seconds)
    got = sum(seconds(s, edge_above(edges, s)) for s in sizes)
    assert got + COMPILATION * len(edges) == pytest.approx(cost, rel=1e-12)
    assert edges == want


def test_the_main_job_is_one_program_and_a_large_sweep_several():
    shapes = {batch.shape for batch in batches(SweepSpec())}
    assert [(shape.width, shape.depth) for shape in shapes] == [(100, 10)]
    wide = SweepSpec(grid=Grid(width=(10, 800), seed=tuple(range(100))))
    assert {batch.shape.width for batch in batches(wide)} == {10, 800}


@pytest.mark.parametrize("seeds", [1, 7, 5000])
def test_every_cell_is_in_one_batch_that_holds_it(seeds):
    grid = Grid(
        num_classes=(4, 8),
        per_class=1,
        width=1,
        depth=DEPTHS,
        seed=tuple(range(seeds)),
    )
    spec = SweepSpec(grid=grid, family=UniformModesFamily(), stop=ufm.FinalTime(1e3))
    work = batches(spec)
    cells = [cell for batch in work for cell in batch.cells]
    assert len(cells) == len(set(cells)) == 16
    for batch in work:
        assert 1 <= batch.size <= len(batch.cells) * seeds
        assert all(spec.shape_of(cell) == batch.shape for cell in batch.cells)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (59.6, "1 min 00 s"), (3599.4, "59 min 59 s"), (7260, "2 h 01 min")],
)
def test_time_left_in_words(seconds, words):
    assert _duration(seconds) == words
