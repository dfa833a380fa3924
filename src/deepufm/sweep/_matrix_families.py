"""Families of the full flow, and of the logit matrix itself."""

import abc
from dataclasses import dataclass, field
from typing import ClassVar

import jax
import numpy as np

from .._types import PRNGKey, RealScalar
from ..dynamics import (
    GradientFlow,
    HadamardFlow,
    LogitMatrixFlow,
    PiecewiseConstant,
)
from ..models import (
    AbstractActivation,
    AbstractLoss,
    ClassSizes,
    CrossEntropy,
    DeepUFM,
    Structure,
    class_sizes,
    gaussian,
    near_structure,
    orthogonal,
    spectral_partner,
)
from ._family import Family, Shape


@dataclass(frozen=True, kw_only=True)
class MatrixFamily(Family):
    """`GradientFlow` from a start that subclasses draw.

    **Arguments:**

    - `loss`, `activation`: as in `GradientFlow`.
    - `weight_decay`: λ, until the flow's time `decay_until`, for ever if `None`.
    - `class_sizes`: the K class sizes, in place of the axis `per_class`.
    - `bottleneck`: allow d < K.
    """

    loss: AbstractLoss = field(default_factory=CrossEntropy)
    activation: AbstractActivation | None = None
    weight_decay: float = 0.0
    decay_until: float | None = None
    class_sizes: tuple[int, ...] = ()
    bottleneck: bool = False

    @abc.abstractmethod
    def start(
        self,
        shape: Shape,
        sizes: ClassSizes,
        key: PRNGKey,
        depth: RealScalar,
        width: RealScalar,
        scale: RealScalar,
    ) -> DeepUFM:
        """Returns the initial model."""

    @property
    def axes(self) -> tuple[str, ...]:
        """All of them, but the class size where sizes are given."""
        sizes = () if self.class_sizes else ("per_class",)
        return ("num_classes", *sizes, "width", "depth", "scale")

    def check(self, num_classes, width, depth):
        """Refuses d < K unasked, fractional depths, and class sizes of another K."""
        if width < num_classes and not self.bottleneck:
            raise ValueError(
                f"Argument `width` must be at least num_classes = {num_classes}, but "
                f"is {width}. Use a wider model, or `bottleneck=True`."
            )
        if not float(depth).is_integer():
            raise ValueError(
                "Argument `depth` must be a whole number for the full flow, but is "
                f"{depth:g}. Only the reduced flow has real depths."
            )
        if self.class_sizes:
            class_sizes(num_classes, self.class_sizes)
        GradientFlow(self.loss, 1, self._decay())

    def member(self, shape, key, depth, width, scale):
        """Returns the flow, which knows its true depth, and a model."""
        sizes = self.class_sizes or shape.per_class
        flow = GradientFlow(
            self.loss,
            sizes,
            self._decay(),
            depth=depth if "depth" in self.padded else None,
            activation=self.activation,
        )
        return flow, self.start(shape, sizes, key, depth, width, scale)

    def _decay(self) -> float | PiecewiseConstant:
        if self.decay_until is None:
            return self.weight_decay
        if not self.weight_decay > 0:
            raise ValueError("`decay_until` needs a `weight_decay` that is positive.")
        return PiecewiseConstant((self.weight_decay, 0.0), (self.decay_until,))


@dataclass(frozen=True)
class GaussianFamily(MatrixFamily):
    """From Gaussian entries (P1 Figs 2, 5, 11).

    Entries are `scale`·N(0, 1/d), or N(0, scale²) with `plain_std`.
    """

    plain_std: bool = False
    padded: ClassVar[tuple[str, ...]] = ("width", "depth")

    def start(self, shape, sizes, key, depth, width, scale):
        """Draws a padded Gaussian model."""
        return gaussian(
            key,
            num_classes=shape.num_classes,
            per_class=sizes,
            width=width.astype(int),
            depth=depth.astype(int),
            pad_width=shape.width,
            pad_depth=shape.depth,
            scale=1.0 if self.plain_std else scale,
            std=scale if self.plain_std else None,
            bottleneck=self.bottleneck,
        )


@dataclass(frozen=True)
class OrthogonalFamily(MatrixFamily):
    """From orthogonal layers whose singular values are all `scale`."""

    padded: ClassVar[tuple[str, ...]] = ("width", "depth")

    def start(self, shape, sizes, key, depth, width, scale):
        """Draws a padded orthogonal model."""
        return orthogonal(
            key,
            num_classes=shape.num_classes,
            per_class=sizes,
            width=width.astype(int),
            depth=depth.astype(int),
            pad_width=shape.width,
            pad_depth=shape.depth,
            scale=scale,
            bottleneck=self.bottleneck,
        )


@dataclass(frozen=True)
class PartnerFamily(MatrixFamily):
    """From the Hadamard partner of the Gaussian start of one seed (P2 section 6)."""

    plain_std: bool = False
    exact: ClassVar[tuple[str, ...]] = ("width", "depth")

    def check(self, num_classes, width, depth):
        """Refuses also what no Hadamard start has."""
        super().check(num_classes, width, depth)
        if self.class_sizes or self.activation is not None or self.bottleneck:
            raise ValueError(
                "A Hadamard start needs classes of one size, linear layers and a width "
                "of at least K: leave out class sizes, activation and bottleneck."
            )
        HadamardFlow(num_classes, 1)  # K a power of two

    def start(self, shape, sizes, key, depth, width, scale):
        """Draws a Gaussian model and takes over its logits' singular values."""
        del depth, width  # those of the shape
        model = gaussian(
            key,
            num_classes=shape.num_classes,
            per_class=sizes,
            width=shape.width,
            depth=shape.depth,
            scale=1.0 if self.plain_std else scale,
            std=scale if self.plain_std else None,
        )
        return spectral_partner(key, model)


@dataclass(frozen=True)
class StructureFamily(MatrixFamily):
    """From balanced layers near a structure: ‖Z‖_F is the axis `scale`.

    **Arguments:** `structure` which one; `perturbation` of every layer, relative.
    """

    structure: Structure = Structure.SIMPLEX_ETF
    perturbation: float = 0.0
    exact: ClassVar[tuple[str, ...]] = ("width", "depth")

    def check(self, num_classes, width, depth):
        """Refuses also structures of a rank above the width, and activations."""
        super().check(num_classes, width, depth)
        if self.activation is not None:
            raise ValueError("A structure's logits are those of linear layers.")
        rank = np.linalg.matrix_rank(np.asarray(self.structure.logits(num_classes)))
        if rank > width:
            raise ValueError(
                f"Logits through a width of {width} have rank {width} at most, but "
                f"those of {self.structure.value} have {rank} at K = {num_classes}."
            )

    def start(self, shape, sizes, key, depth, width, scale):
        """Builds the structure's logits and perturbs the layers."""
        del depth, width  # those of the shape
        return near_structure(
            key,
            self.structure.logits(shape.num_classes),
            per_class=sizes,
            width=shape.width,
            depth=shape.depth,
            norm=scale,
            perturbation=self.perturbation,
            bottleneck=self.bottleneck,
        )


@dataclass(frozen=True, kw_only=True)
class LogitMatrixFamily(Family):
    """`LogitMatrixFlow` from logits `scale`·N(0, 1) (P2 Thm 6)."""

    loss: AbstractLoss = field(default_factory=CrossEntropy)
    class_sizes: tuple[int, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """Logits have no layers."""
        return ("num_classes", *(() if self.class_sizes else ("per_class",)), "scale")

    def check(self, num_classes, width, depth):
        """Refuses class sizes of another K."""
        del width, depth
        if self.class_sizes:
            class_sizes(num_classes, self.class_sizes)

    def member(self, shape, key, depth, width, scale):
        """Returns the flow and the logits."""
        del depth, width
        sizes = self.class_sizes or shape.per_class
        examples = sum(class_sizes(shape.num_classes, sizes))
        logits = scale * jax.random.normal(key, (shape.num_classes, examples))
        return LogitMatrixFlow(self.loss, sizes), logits
