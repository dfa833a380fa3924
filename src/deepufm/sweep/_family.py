"""Families: how a point of the grid and a seed become a flow and its start.

A family says which axes it has, and builds members whose depth, width, scale and seed
are traced, so that one compiled program serves all members of one static shape.
"""

import abc
from typing import ClassVar, NamedTuple

from .._types import PRNGKey, RealScalar, State
from ..dynamics import AbstractFlow


class Shape(NamedTuple):
    """What fixes a compiled program: array sizes, padding included."""

    num_classes: int
    per_class: int
    width: int
    depth: int


class Family(abc.ABC):
    """A recipe for members; subclasses are frozen dataclasses, so they can be sent."""

    # Which of `width` and `depth` arrays are padded along (one program for all values),
    # and which set array sizes as they are (a program for each value).
    padded: ClassVar[tuple[str, ...]] = ()
    exact: ClassVar[tuple[str, ...]] = ()

    @property
    @abc.abstractmethod
    def axes(self) -> tuple[str, ...]:
        """The grid axes that this family reads."""

    @abc.abstractmethod
    def check(self, num_classes: int, width: int, depth: float) -> None:
        """Raises `ValueError` where no member has these sizes."""

    @abc.abstractmethod
    def member(
        self,
        shape: Shape,
        key: PRNGKey,
        depth: RealScalar,
        width: RealScalar,
        scale: RealScalar,
    ) -> tuple[AbstractFlow, State]:
        """Returns the flow and the start; all arguments but `shape` may be traced."""
