"""Flows of every layer's singular values, balanced or not (P1 eqs. 40-41).

Where the gradient keeps the singular vectors of all layers, mode i has one value
alpha_i^(l) in each of H_1, W_1, ..., W_L, with logit singular value
a_i = prod_l alpha_i^(l), and

    d alpha_i^(l)/dt = r_i(a) prod_{r != l} alpha_i^(r).

The drive r_i is (√n/D) b_i for cross-entropy under Hadamard initialisation, where it
couples the modes (P1 eq. 41; P2 Thm 2), and s_i - a_i for the squared error, under any
singular vectors of Y (P2 section 2; Saxe et al. 2014). Each difference
(alpha_i^(l))² - (alpha_i^(r))² is conserved.

Units are the matrix flow's own: these are `GradientFlow` seen through the singular
vectors, with its time, its loss, its norm ‖θ‖_F and its clocks. `scale_map` leads on to
`HadamardFlow`.

The state is alpha itself, (L+1, modes), row 0 that of the features, of either sign: an
unbalanced start may hold zeros and cross them. Products are taken as sums of logarithms
from either side of the missing layer, never by dividing.
"""

import abc
import math
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._types import Modes, RealLike, RealScalar, Tracer
from ..geometry import log_frobenius_norm, psi_matvec, safe_scale
from ..models import ClassSizes, class_sizes, log_softplus
from ._flow import AbstractFlow
from ._hadamard_flow import check_count, check_num_classes, scaled_rates

LayerModes = Float[Array, "matrices modes"]


class AbstractLayerwiseFlow(AbstractFlow):
    """d alpha_i^(l)/dt = r_i(a) prod_{r != l} alpha_i^(r), for a drive r."""

    depth: eqx.AbstractVar[RealScalar | None]
    is_smooth: ClassVar[bool] = True
    growth_is_exact: ClassVar[bool] = False
    log_state: ClassVar[bool] = False

    @abc.abstractmethod
    def drive(self, a: Modes) -> tuple[Modes, RealScalar]:
        """Returns (r / exp(log_scale), log_scale) at logit singular values `a`."""

    @abc.abstractmethod
    def log_mode_loss(self, a: Modes) -> RealScalar:
        """Returns the natural logarithm of the loss at logit singular values `a`."""

    def logit_modes(self, state: LayerModes) -> Modes:
        """Returns a_i, the products over the layers."""
        signs, logs = _signs_and_logs(state)
        return jnp.prod(signs, axis=0) * jnp.exp(jnp.sum(logs, axis=0))

    def __call__(self, state: LayerModes) -> tuple[LayerModes, RealScalar]:
        """Returns (d alpha/dt / exp(log_speed), log_speed)."""
        drive, log_scale = self.drive(self.logit_modes(state))
        signs, logs = _leave_one_out(state)
        moving = self._moving(state)
        largest = jnp.max(jnp.where(moving & (signs != 0), logs, -jnp.inf))
        still = jnp.isneginf(largest)
        size = jnp.where(still, 0, largest)
        # Where the sign is 0, for the derivative alone: no bound by `largest`.
        excess = jnp.minimum(logs - size, jnp.log(jnp.finfo(logs.dtype).max))
        products = jnp.where(moving, jnp.exp(excess), 0)
        log_speed = jnp.where(still, -jnp.inf, log_scale + size)
        return drive[None, :] * signs * products, log_speed

    def log_norm(self, state: LayerModes) -> RealScalar:
        """Returns log of ‖θ‖_F, over all modes of all layers that move."""
        return log_frobenius_norm(jnp.where(self._moving(state), state, 0))

    def log_growth(self, state: LayerModes, direction: LayerModes) -> RealScalar:
        """Returns log of ‖direction‖_F/‖θ‖_F, as `GradientFlow`."""
        return self.log_norm(direction) - self.log_norm(state)

    def log_length(self, state: LayerModes, direction: LayerModes) -> RealScalar:
        """Returns log ‖direction‖_F."""
        del state
        return self.log_norm(direction)

    def log_activity(self, state: LayerModes, direction: LayerModes) -> RealScalar:
        """Returns log of (1 + ‖θ‖)·‖direction‖/‖θ‖."""
        weight = jax.nn.softplus(self.log_norm(state))
        return self.log_growth(state, direction) + weight

    def log_loss(self, state: LayerModes) -> RealScalar:
        """Returns the log of the loss summed over all examples, as `GradientFlow`."""
        return self.log_mode_loss(self.logit_modes(state))

    def relative_error(
        self, error: LayerModes, before: LayerModes, after: LayerModes
    ) -> RealScalar:
        """Returns the largest error of any alpha, relative to its own size.

        The larger of the sizes at both ends of the step: an entry may start at zero or
        cross it.
        """
        size = jnp.maximum(jnp.abs(before), jnp.abs(after))
        still = error == 0
        return jnp.max(jnp.where(still, 0, jnp.abs(error) / jnp.where(still, 1, size)))

    def _moving(self, state: LayerModes) -> Array:
        """Returns which rows move, (L+1, 1): not the padding before the last row."""
        rows = jnp.arange(state.shape[0], dtype=state.dtype)
        if self.depth is None:
            return jnp.ones_like(rows, bool)[:, None]
        inner = rows < self.depth.astype(state.dtype)
        return (inner | (rows == state.shape[0] - 1))[:, None]


class LayerwiseHadamardFlow(AbstractLayerwiseFlow):
    """Cross-entropy under Hadamard initialisation, layer by layer (P1 eq. 41).

    d alpha_i^(l)/dt = (√n/D) b_i prod_{r != l} alpha_i^(r), with margins Ψa/(K√n).
    A balanced start follows `HadamardFlow` through `scale_map`; L = 1 is P2 Thm 2.

    **Arguments:**

    - `num_classes`: K, a power of two.
    - `per_class`: n.
    - `depth`: the true depth where the state is padded with rows of ones before the
        last (may be traced).

    **Raises:** `ValueError` for K no power of two, or n below 1.

    !!! example
        flow = ufm.LayerwiseHadamardFlow(num_classes=8, per_class=3)
        alpha = jnp.full((3, 7), 0.1).at[0].set(0.0)  # L = 2, features at zero
        path = ufm.solve(flow, alpha, stop=ufm.FinalTime(1e6))
    """

    num_classes: int = eqx.field(static=True)
    per_class: int = eqx.field(static=True)
    depth: RealScalar | None
    norm_diverges: ClassVar[bool] = True

    def __init__(
        self, num_classes: int, per_class: int = 1, *, depth: RealLike | None = None
    ):
        check_num_classes(num_classes)
        class_sizes(1, per_class)
        self.num_classes = num_classes
        self.per_class = per_class
        self.depth = None if depth is None else jnp.asarray(depth, float)

    def drive(self, a: Modes) -> tuple[Modes, RealScalar]:
        """Returns √n b/D in two factors; b and D see a/(K√n)."""
        log_scale, b, partition = scaled_rates(self.relative_modes(a))
        return b / partition, log_scale[0] + 0.5 * math.log(self.per_class)

    def relative_modes(self, a: Modes) -> Modes:
        """Returns a/(K√n), whose margins Ψa/(K√n) are the logit gaps."""
        return a / (self.num_classes * math.sqrt(self.per_class))

    def log_mode_loss(self, a: Modes) -> RealScalar:
        """Returns log of Kn log D."""
        log_odds = jax.nn.logsumexp(-psi_matvec(self.relative_modes(a)))
        return math.log(self.num_classes * self.per_class) + log_softplus(log_odds)

    def check(self, state: LayerModes) -> None:
        """Checks the number of modes, the depth, and that all values are finite."""
        _check_layers(self, state)
        check_count(state[0], self.num_classes)


class LayerwiseMSEFlow(AbstractLayerwiseFlow):
    """The squared error, layer by layer: modes evolve independently (P2 section 2).

    d alpha_i^(l)/dt = (s_i - a_i) prod_{r != l} alpha_i^(r), for `MSE` from layers that
    share the singular vectors of Y.

    **Arguments:**

    - `targets`: s, (modes,), the singular values of Y: `mse_targets(K, n)`.
    - `depth`: as for `LayerwiseHadamardFlow`.

    **Raises:** `ValueError` for targets that are negative or not finite.
    """

    targets: Modes
    depth: RealScalar | None
    norm_diverges: ClassVar[bool] = False

    def __init__(self, targets: Modes, *, depth: RealLike | None = None):
        self.targets = jnp.asarray(targets, float)
        known = not isinstance(self.targets, Tracer)
        if self.targets.ndim != 1 or (
            known and not np.all(np.isfinite(self.targets) & (self.targets >= 0))
        ):
            raise ValueError(
                "Argument `targets` must hold one finite number >= 0 a mode, but is "
                f"{targets}. Those of Y are `mse_targets(K, n)`."
            )
        self.depth = None if depth is None else jnp.asarray(depth, float)

    def drive(self, a: Modes) -> tuple[Modes, RealScalar]:
        """Returns s - a, divided by its largest entry, and that one's logarithm."""
        error = self.targets.astype(a.dtype) - a
        scale, at_rest = safe_scale(error), jnp.all(error == 0)
        return error / scale, jnp.where(at_rest, -jnp.inf, jnp.log(scale))

    def log_mode_loss(self, a: Modes) -> RealScalar:
        """Returns log of ‖s - a‖²/2."""
        error = self.targets.astype(a.dtype) - a
        return 2 * log_frobenius_norm(error) - math.log(2)

    def check(self, state: LayerModes) -> None:
        """Checks the number of modes, the depth, and that all values are finite."""
        _check_layers(self, state)
        if state.shape[1:] != self.targets.shape:
            raise ValueError(
                f"The flow has {self.targets.shape[0]} targets, so that the state must "
                f"have shape (L+1, {self.targets.shape[0]}), but has {state.shape}."
            )


def mse_targets(num_classes: int, per_class: ClassSizes) -> Modes:
    """Returns the singular values of Y, √n_c for each class: all √n if balanced.

    **Raises:** `ValueError` as `class_sizes`.
    """
    return jnp.sqrt(jnp.asarray(class_sizes(num_classes, per_class), float))


def _signs_and_logs(x: LayerModes) -> tuple[LayerModes, LayerModes]:
    """Returns x/s and log s with s = |x|, 1 at zero.

    s is a constant to differentiation, so that the derivatives are those of x, which
    do not vanish at zero: one layer of zeros moves at once.
    """
    size = jax.lax.stop_gradient(jnp.where(x == 0, 1, jnp.abs(x)))
    return x / size, jnp.log(size)


def _leave_one_out(state: LayerModes) -> tuple[LayerModes, LayerModes]:
    """Returns sign and log magnitude of the product of all other layers, for each."""
    signs, logs = _signs_and_logs(state)

    def others(values, accumulate, neutral, combine):
        first = jnp.full_like(values[:1], neutral)
        before = accumulate(jnp.concatenate([first, values[:-1]]))
        after = accumulate(jnp.concatenate([first, values[:0:-1]]))[::-1]
        return combine(before, after)

    return (
        others(signs, lambda x: jnp.cumprod(x, axis=0), 1, jnp.multiply),
        others(logs, lambda x: jnp.cumsum(x, axis=0), 0, jnp.add),
    )


def _check_layers(flow: AbstractLayerwiseFlow, state) -> None:
    if getattr(state, "ndim", None) != 2 or state.shape[0] < 2:
        raise ValueError(
            "The state of a layerwise flow holds one row a matrix, H_1, W_1, ..., W_L: "
            "its shape must be (L+1, modes), but is "
            f"{getattr(state, 'shape', type(state).__name__)}."
        )
    if flow.depth is not None and not isinstance(flow.depth, Tracer):
        depth, deepest = float(flow.depth), state.shape[0] - 1
        if not (1 <= depth <= deepest and depth == round(depth)):
            raise ValueError(
                "Argument `depth` must be a whole number from 1 to the depth of the "
                f"state, {deepest}, but is {depth}."
            )
    if not isinstance(state, Tracer) and not np.all(np.isfinite(np.asarray(state))):
        raise ValueError(
            "The state of a layerwise flow must be finite, but holds NaN or inf."
        )
