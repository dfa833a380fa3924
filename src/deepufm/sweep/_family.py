"""Families: how a point of the grid and a seed become a flow and its start.

A family says which axes it has, and builds members whose depth, width, scale and seed
are traced, so that one compiled program serves all members of one static shape.
"""

import abc
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._types import PRNGKey, RealScalar, State
from ..dynamics import AbstractFlow, GradientFlow, HadamardFlow, log_modes
from ..models import CrossEntropy, gaussian


class Shape(NamedTuple):
    """What fixes a compiled program: array sizes, padding included."""

    num_classes: int
    per_class: int
    width: int
    depth: int


class Family(abc.ABC):
    """A recipe for members; subclasses are frozen dataclasses, so they can be sent."""

    @abc.abstractmethod
    def check(self, num_classes: int, width: int, depth: float) -> None:
        """Raises `ValueError` where no member has these sizes."""

    @property
    @abc.abstractmethod
    def axes(self) -> tuple[str, ...]:
        """The grid axes that this family reads."""

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


@dataclass(frozen=True)
class GaussianFamily(Family):
    """`GradientFlow` with cross-entropy from Gaussian entries (P1 Figs 2, 5, 11).

    Entries are `scale`·N(0, 1/d), or N(0, scale²) with `plain_std`.
    """

    plain_std: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        """All of them."""
        return ("num_classes", "per_class", "width", "depth", "scale")

    def check(self, num_classes, width, depth):
        """Refuses d < K and fractional depths."""
        if width < num_classes:
            raise ValueError(
                f"Argument `width` must be at least num_classes = {num_classes}, but "
                f"is {width}. Use a wider model."
            )
        if not float(depth).is_integer():
            raise ValueError(
                "Argument `depth` must be a whole number for the full flow, but is "
                f"{depth:g}. Only the reduced flow has real depths."
            )

    def member(self, shape, key, depth, width, scale):
        """Returns a padded model and the flow that knows its true depth."""
        model = gaussian(
            key,
            num_classes=shape.num_classes,
            per_class=shape.per_class,
            width=width.astype(int),
            depth=depth.astype(int),
            pad_width=shape.width,
            pad_depth=shape.depth,
            scale=1.0 if self.plain_std else scale,
            std=scale if self.plain_std else None,
        )
        return GradientFlow(CrossEntropy(), shape.per_class, depth=depth), model


@dataclass(frozen=True)
class UniformModesFamily(Family):
    """`HadamardFlow` from uniform singular values (P1 Figs 4 and 9).

    The K-1 values are drawn from U[low, high], then scaled to the 1-norm `scale`.
    """

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self):
        if not 0 <= self.low < self.high:
            raise ValueError(
                "Singular values are drawn from U[low, high] with 0 <= low < high, but "
                f"low = {self.low} and high = {self.high}."
            )

    @property
    def axes(self) -> tuple[str, ...]:
        """The reduced flow has no width, and n is absorbed in its units."""
        return ("num_classes", "depth", "scale")

    def check(self, num_classes, width, depth):
        """Refuses K that is no power of two."""
        del width
        HadamardFlow(num_classes, depth)

    def member(self, shape, key, depth, width, scale):
        """Returns the reduced flow and log a(0)."""
        del width
        a = jax.random.uniform(
            key, (shape.num_classes - 1,), minval=self.low, maxval=self.high
        )
        flow = HadamardFlow(shape.num_classes, depth)
        return flow, log_modes(a) - jnp.log(jnp.sum(a)) + jnp.log(scale)
