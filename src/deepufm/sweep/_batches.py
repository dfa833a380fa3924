"""The unit of work of a sweep: grid points that share a program.

Batches depend on the specification and the kind of device, not on what is done already
or on how many workers there are: a sweep that was interrupted goes on with the same.
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
# A model with this many parameters or more has nothing to gain from company on a CPU,
# and a batch is one grid point.
_LARGE_MODEL = 1000
# Numbers that a program may hold: all saved states, until they have been looked at.
_MOST_NUMBERS_CPU, _MOST_NUMBERS = 2**26, 2**30


@dataclass(frozen=True)
class Batch:
    """Cells of one shape, all their seeds, `size` members in the program at once."""

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
        size = min(each * len(spec.grid.values("seed")), _most_members(spec, shape))
        work += [Batch(shape, part, size) for part in _parts(cells, each)]
    return sorted(work, key=lambda batch: -sum(map(_seconds, batch.cells)))


def _cells_a_batch(spec: SweepSpec, shape: Shape, cells: int) -> int:
    """Returns how many cells of a shape are integrated together."""
    seeds = len(spec.grid.values("seed"))
    if jax.default_backend() == "cpu" and _numbers(shape) >= _LARGE_MODEL:
        return 1
    members = max(_FEWEST_MEMBERS, math.ceil(cells * seeds / _BATCHES))
    members = min(members, _most_members(spec, shape))
    return max(1, min(cells, math.ceil(members / seeds)))


def _most_members(spec: SweepSpec, shape: Shape) -> int:
    """Returns how many members of a shape a program may have."""
    most = _MOST_NUMBERS_CPU if jax.default_backend() == "cpu" else _MOST_NUMBERS
    each = _numbers(shape) * (spec.num_saves + 10)
    return max(1, min(_MOST_MEMBERS, most // each))


def _numbers(shape: Shape) -> int:
    """Returns the parameters of a member; flows of modes have fewer."""
    examples = shape.num_classes * shape.per_class
    return shape.width * (shape.depth * shape.width + shape.num_classes + examples)


def _parts(cells: list[Cell], each: int) -> Iterator[tuple[Cell, ...]]:
    for start in range(0, len(cells), each):
        yield tuple(cells[start : start + each])


def _seconds(cell: Cell) -> float:
    return member_seconds(cell.depth, cell.width) * cell.num_classes
