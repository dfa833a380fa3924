"""What a sweep computes: a grid of members, and how each is integrated."""

import functools
import itertools
import math
import numbers
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import diffrax

from ..dynamics import AbstractClock, AbstractStop, FinalTime, LogTime, Saves, num_saves
from ._buckets import bucket_edges, edge_above, member_seconds
from ._family import Family, Shape
from ._matrix_families import GaussianFamily

# The order of the axes in every table and store; seeds come last.
AXES = ("num_classes", "per_class", "width", "depth", "scale")


@dataclass(frozen=True)
class Grid:
    """Every combination of the values of its axes, once for each seed.

    An axis with one value may be given as that number.

    **Raises:** `ValueError` for an axis that is empty, has a value twice, or holds a
    value out of range.
    """

    num_classes: tuple[int, ...] | int = (10,)
    per_class: tuple[int, ...] | int = (5,)
    width: tuple[int, ...] | int = (100,)
    depth: tuple[float, ...] | float = tuple(range(1, 11))
    scale: tuple[float, ...] | float = (1.0,)
    seed: tuple[int, ...] | int = tuple(range(5))

    def __post_init__(self):
        least = {"num_classes": 2, "per_class": 1, "width": 1, "depth": 1, "seed": 0}
        for axis in (*AXES, "seed"):
            given: Any = getattr(self, axis)
            single = isinstance(given, numbers.Real)
            values: tuple[Any, ...] = (given,) if single else tuple(given)
            # A frozen dataclass has no other way to normalise what it was given.
            object.__setattr__(self, axis, values)
            if not values:
                raise ValueError(f"The axis `{axis}` must have at least one value.")
            if len(set(values)) < len(values):
                raise ValueError(
                    f"The axis `{axis}` must name each value once, but is {values}."
                )
            for value in values:
                if axis == "scale" and not 0 < value < math.inf:
                    raise ValueError(
                        "Every `scale` must be positive and finite, but one is "
                        f"{value}. At scale 0 nothing moves."
                    )
                whole = axis in ("scale", "depth") or float(value).is_integer()
                if not whole:
                    raise ValueError(
                        f"Every `{axis}` must be a whole number, but one is {value}."
                    )
                if axis != "scale" and not value >= least[axis]:
                    raise ValueError(
                        f"Every `{axis}` must be at least {least[axis]}, but one is "
                        f"{value}."
                    )

    def values(self, axis: str) -> tuple[Any, ...]:
        """Returns the values along one axis, seeds included."""
        return getattr(self, axis)

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of values along each of `AXES`."""
        return tuple(len(self.values(axis)) for axis in AXES)

    def cells(self) -> Iterator["Cell"]:
        """Yields the grid points; a cell holds all seeds of one."""
        for index in itertools.product(*map(range, self.shape)):
            values = {
                axis: getattr(self, axis)[i]
                for axis, i in zip(AXES, index, strict=True)
            }
            yield Cell(index=index, **values)


@dataclass(frozen=True)
class Cell:
    """One grid point: the unit of work, and of writing."""

    index: tuple[int, ...]  # along `AXES`
    num_classes: int
    per_class: int
    width: int
    depth: float
    scale: float

    def __str__(self) -> str:
        return ", ".join(f"{axis}={getattr(self, axis):g}" for axis in AXES)


@dataclass(frozen=True)
class SweepSpec:
    """A sweep, whole. The default is P1 Figure 2 at full size.

    `solver` and `rtol` are `solve`'s, with its defaults where `None`.
    """

    grid: Grid = field(default_factory=Grid)
    family: Family = field(default_factory=GaussianFamily)
    stop: AbstractStop = field(default_factory=lambda: FinalTime(1e8))
    clock: AbstractClock = field(default_factory=LogTime)
    solver: diffrax.AbstractSolver | None = None
    rtol: float | None = None
    max_steps: int = 100_000
    saves: Saves = 25

    @property
    def num_saves(self) -> int:
        """The number of saved points of a member."""
        return num_saves(self.saves)

    def shape_of(self, cell: Cell) -> Shape:
        """Returns the padded shape that this cell's members are run in.

        One program serves all members of a shape. Along the axes that the family pads,
        sizes share one where that saves more compiling than it costs (`_buckets`).
        """
        edges = functools.partial(_edges, self.grid, self.family.padded)

        def size(axis: str) -> int:
            if axis in self.family.padded:
                return edge_above(edges(axis), int(getattr(cell, axis)))
            return getattr(cell, axis) if axis in self.family.exact else 1

        width, depth = int(size("width")), int(size("depth"))
        return Shape(cell.num_classes, cell.per_class, width, depth)


@functools.lru_cache(maxsize=64)
def _edges(grid: Grid, padded: tuple[str, ...], axis: str) -> tuple[int, ...]:
    """Returns the sizes that values along `axis` are padded to."""
    sizes = [int(value) for value in grid.values(axis)]
    others = [float(v) for v in grid.values("depth" if axis == "width" else "width")]
    # Members of one size along both axes.
    members = math.prod(grid.shape) * len(grid.values("seed"))
    each = members / (len(sizes) * len(others))
    flat = "width" not in padded  # modes alone: widths mean nothing

    def seconds(size: int, edge: int) -> float:
        del size
        pairs = [(o, edge) if axis == "width" else (edge, o) for o in others]
        return each * sum(member_seconds(d, 1 if flat else w) for d, w in pairs)

    return bucket_edges(sizes, seconds)
