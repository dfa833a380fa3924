"""The unit of work of a sweep: grid points that share a program.

Batches depend on the specification alone, not on what is done already or on how many
workers there are: a sweep that was interrupted goes on with the same ones.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import jax

from ._buckets import member_seconds
from ._family import Shape
from ._spec import Cell, SweepSpec

# Members of small states are integrated many at once, but so that even a short sweep
# has work for several workers, and is written as it goes.
_FEWEST_MEMBERS, _MOST_MEMBERS = 64, 4096
_BATCHES = 8
# On a CPU a member with this many parameters or more has nothing to gain from company,
# and a batch is one grid point; elsewhere batches are filled up to this many numbers.
_LARGE_MODEL = 1000
_MOST_NUMBERS = 2**28


@dataclass(frozen=True)
class Batch:
    """Cells of one shape, all their seeds; `size` counts members, padding included."""

    shape: Shape
    cells: tuple[Cell, ...]
    size: int


def batches(spec: SweepSpec) -> list[Batch]:
    """Returns all work of a sweep, longest first, so that no long batch comes last."""
    groups: dict[Shape, list[Cell]] = {}
    for cell in spec.grid.cells():
        groups.setdefault(spec.shape_of(cell), []).append(cell)
    work = []
    for shape, cells in groups.items():
        cells.sort(key=_seconds, reverse=True)
        each = _cells_a_batch(spec, shape, len(cells))
        size = each * len(spec.grid.values("seed"))
        work += [Batch(shape, part, size) for part in _parts(cells, each)]
    return sorted(work, key=lambda batch: -sum(map(_seconds, batch.cells)))


def _cells_a_batch(spec: SweepSpec, shape: Shape, cells: int) -> int:
    """Returns how many cells of a shape are integrated together."""
    seeds = len(spec.grid.values("seed"))
    examples = shape.num_classes * shape.per_class
    numbers = shape.width * (shape.depth * shape.width + shape.num_classes + examples)
    if jax.default_backend() == "cpu":
        most = 1 if numbers >= _LARGE_MODEL else _MOST_MEMBERS
    else:
        # All saved states are held until they have been looked at.
        most = _MOST_NUMBERS // (numbers * (spec.num_saves + 10))
    even = max(_FEWEST_MEMBERS, math.ceil(cells * seeds / _BATCHES))
    return max(1, min(cells, math.ceil(min(even, most) / seeds)))


def _parts(cells: list[Cell], each: int) -> Iterator[tuple[Cell, ...]]:
    for start in range(0, len(cells), each):
        yield tuple(cells[start : start + each])


def _seconds(cell: Cell) -> float:
    return member_seconds(cell.depth, cell.width) * cell.num_classes
