"""What a sweep computes: a grid of members, and how each is integrated."""

import itertools
import math
import numbers
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import diffrax

from ..dynamics import AbstractClock, AbstractStop, FinalTime, LogTime, SaveEvery
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
    saves: int | SaveEvery = 25

    @property
    def num_saves(self) -> int:
        """The number of saved points of a member."""
        saves = self.saves
        return saves.capacity if isinstance(saves, SaveEvery) else saves

    def shape_of(self, cell: Cell) -> Shape:
        """Returns the padded shape that this cell's members are run in.

        One program serves all depths and widths of a given K and n where the family
        pads along them: a compilation costs more than the padding of a grid up to some
        hundred members.
        """

        def size(axis: str) -> int:
            if axis in self.family.padded:
                return int(max(self.grid.values(axis)))
            return getattr(cell, axis) if axis in self.family.exact else 1

        width, depth = int(size("width")), int(size("depth"))
        return Shape(cell.num_classes, cell.per_class, width, depth)
