"""Families of the flows of singular values, from uniform draws.

Values are drawn from U[low, high], then scaled so that ‖a(0)‖_1 is the axis `scale`.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from .._types import RealScalar
from ..dynamics import (
    HadamardFlow,
    LayerwiseHadamardFlow,
    LayerwiseMSEFlow,
    LogitFlow,
    SigmoidalFlow,
    log_modes,
    mse_targets,
)
from ._family import Family


@dataclass(frozen=True)
class UniformFamily(Family):
    """What the families of modes share: the interval of the draw."""

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self):
        if not 0 <= self.low < self.high:
            raise ValueError(
                "Singular values are drawn from U[low, high] with 0 <= low < high, but "
                f"low = {self.low} and high = {self.high}."
            )

    def draw(self, key, shape: tuple[int, ...]):
        """Returns uniform values."""
        return jax.random.uniform(key, shape, minval=self.low, maxval=self.high)

    def log_draw(self, key, count: int, scale: RealScalar):
        """Returns logarithms of uniform values whose sum is `scale`."""
        a = self.draw(key, (count,))
        return log_modes(a) - jnp.log(jnp.sum(a)) + jnp.log(scale)


@dataclass(frozen=True)
class UniformModesFamily(UniformFamily):
    """`HadamardFlow` from uniform singular values (P1 Figs 4 and 9).

    With `linearised`, what it is near the origin, `SigmoidalFlow` (P1 Thm 4.4).
    """

    linearised: bool = False

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
        start = self.log_draw(key, shape.num_classes - 1, scale)
        if self.linearised:
            return SigmoidalFlow.linearised(depth), start
        return HadamardFlow(shape.num_classes, depth), start


@dataclass(frozen=True)
class MSEModesFamily(UniformFamily):
    """`SigmoidalFlow.mse`: K independent modes of the squared error, any K."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The class size sets the targets, √n."""
        return ("num_classes", "per_class", "depth", "scale")

    def check(self, num_classes, width, depth):
        """Refuses depths below 1."""
        del width
        SigmoidalFlow.mse(num_classes, 1, depth)

    def member(self, shape, key, depth, width, scale):
        """Returns the flow of the squared error's modes and log a(0)."""
        del width
        flow = SigmoidalFlow.mse(shape.num_classes, shape.per_class, depth)
        return flow, self.log_draw(key, shape.num_classes, scale)


@dataclass(frozen=True)
class LayerwiseFamily(UniformFamily):
    """Every layer's singular values, drawn apart: unbalanced starts (P1 eq. 41).

    All layers are then scaled by one factor, so that ‖a(0)‖_1 is the axis `scale`, in
    the matrix flow's units. `LayerwiseMSEFlow` with `squared_error`, else
    `LayerwiseHadamardFlow`.
    """

    squared_error: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        """Layers without a width."""
        return ("num_classes", "per_class", "depth", "scale")

    padded: ClassVar[tuple[str, ...]] = ("depth",)

    def check(self, num_classes, width, depth):
        """Refuses fractional depths, and for cross-entropy K no power of two."""
        del width
        if not float(depth).is_integer():
            raise ValueError(
                "Argument `depth` must be a whole number for the layerwise flow, but "
                f"is {depth:g}. Only the reduced flow has real depths."
            )
        if not self.squared_error:
            LayerwiseHadamardFlow(num_classes)

    def member(self, shape, key, depth, width, scale):
        """Returns the flow and alpha(0), padded with rows of ones before the last."""
        del width
        modes = shape.num_classes - (not self.squared_error)
        keys = jax.vmap(lambda layer: jax.random.fold_in(key, layer))(
            jnp.arange(shape.depth + 1)
        )
        drawn = jax.vmap(lambda layer_key: self.draw(layer_key, (modes,)))(keys)
        # Layer 0 is the features', 1 the head's: neither moves with the padding.
        order = jnp.asarray([0, *range(2, shape.depth + 1), 1])
        drawn = drawn[order]
        rows = jnp.arange(shape.depth + 1, dtype=depth.dtype)
        moving = (rows < depth) | (rows == shape.depth)
        drawn = jnp.where(moving[:, None], drawn, 1)
        total = jnp.sum(jnp.prod(drawn, axis=0))
        factor = (scale / total) ** (1 / (depth + 1))
        alpha = jnp.where(moving[:, None], factor * drawn, 1)
        if self.squared_error:
            targets = mse_targets(shape.num_classes, shape.per_class)
            return LayerwiseMSEFlow(targets, depth=depth), alpha
        flow = LayerwiseHadamardFlow(shape.num_classes, shape.per_class, depth=depth)
        return flow, alpha


@dataclass(frozen=True)
class LogitModesFamily(UniformFamily):
    """`LogitFlow` from uniform singular values (P2 Thm 6)."""

    @property
    def axes(self) -> tuple[str, ...]:
        """Logits have no layers."""
        return ("num_classes", "scale")

    def check(self, num_classes, width, depth):
        """Refuses K that is no power of two."""
        del width, depth
        LogitFlow(num_classes)

    def member(self, shape, key, depth, width, scale):
        """Returns the flow of the logits' modes and a(0)."""
        del depth, width
        log_a = self.log_draw(key, shape.num_classes - 1, scale)
        return LogitFlow(shape.num_classes), jnp.exp(log_a)
