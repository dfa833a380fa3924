"""Gradient flows on the logits themselves, depth 0 (P2 Thm 6, section 4.4.2).

    LogitMatrixFlow:  dZ/dt = Y - P,          state Z, (K, nK), any K and class sizes
    LogitFlow:        d a_i/dt = b_i/D,       state a, (K-1,), under Hadamard vectors

The first is in the units of the summed loss; with Z = Φ diag(0, a') Φᵀ/(K√n) ⊗ 1ᵀ it
is the second at a = a'/(K√n), t = t'/K.
"""

from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from .._types import Labels, Logits, Modes, RealScalar, Tracer
from ..geometry import frobenius_norm, log_frobenius_norm
from ..models import (
    AbstractLoss,
    ClassSizes,
    checked_sizes,
    class_labels,
    class_sizes,
)
from ._flow import AbstractFlow
from ._hadamard_flow import (
    check_count,
    check_num_classes,
    log_loss_of,
    log_or_zero,
    scaled_rates,
)


class LogitMatrixFlow(AbstractFlow):
    """dZ/dt = -dL/dZ: the logit matrix optimised directly, the loss summed.

    Under cross-entropy, from logits with Hadamard singular vectors, the simplex ETF is
    approached monotonically (P2 Thm 6), as the max-margin solution of logistic
    regression. Norm and path are measured in the Frobenius norm; `LogNorm`
    advances by ‖dZ‖/‖Z‖.

    **Arguments:** `loss`, an `AbstractLoss`; `per_class`, n or the class sizes.

    **Raises:** `ValueError` for a class without examples.
    """

    loss: AbstractLoss
    per_class: ClassSizes = eqx.field(static=True)
    is_smooth: ClassVar[bool] = True
    growth_is_exact: ClassVar[bool] = False
    log_state: ClassVar[bool] = False

    def __init__(self, loss: AbstractLoss, per_class: ClassSizes):
        self.loss = loss
        self.per_class = checked_sizes(per_class)

    @property
    def norm_diverges(self) -> bool:
        """Whether the loss has no finite minimiser."""
        return self.loss.norm_diverges

    def __call__(self, state: Logits) -> tuple[Logits, RealScalar]:
        """Returns (dZ/dt / exp(log_speed), log_speed)."""
        return self.loss.residual(state, self.labels(state))

    def labels(self, state: Logits) -> Labels:
        """Returns the class of each example, (examples,)."""
        return class_labels(state.shape[0], self.per_class)

    def log_norm(self, state: Logits) -> RealScalar:
        """Returns log ‖Z‖_F."""
        return log_frobenius_norm(state)

    def log_growth(self, state: Logits, direction: Logits) -> RealScalar:
        """Returns log of ‖direction‖_F/‖Z‖_F."""
        return log_frobenius_norm(direction) - log_frobenius_norm(state)

    def log_length(self, state: Logits, direction: Logits) -> RealScalar:
        """Returns log ‖direction‖_F."""
        del state
        return log_frobenius_norm(direction)

    def log_activity(self, state: Logits, direction: Logits) -> RealScalar:
        """Returns log ‖direction‖_F: logits are of the size of the margins."""
        return self.log_length(state, direction)

    def log_loss(self, state: Logits) -> RealScalar:
        """Returns the log of the loss summed over all examples."""
        return self.loss.log_loss(state, self.labels(state))

    def relative_error(self, error: Logits, before: Logits, after: Logits):
        """Returns ‖error‖_F/‖Z‖_F: the logits are one block."""
        size = jnp.maximum(frobenius_norm(before), frobenius_norm(after))
        worst = frobenius_norm(error)
        return jnp.where(worst == 0, 0, worst / jnp.where(worst == 0, 1, size))

    def check(self, state: Logits) -> None:
        """Checks the number of examples and that the logits are finite."""
        if getattr(state, "ndim", None) != 2:
            raise ValueError(
                "The state of `LogitMatrixFlow` is the logit matrix, (K, examples), "
                f"but has shape {getattr(state, 'shape', type(state).__name__)}."
            )
        examples = sum(class_sizes(state.shape[0], self.per_class))
        if state.shape[1] != examples:
            raise ValueError(
                f"With K = {state.shape[0]} and per_class = {self.per_class} the "
                f"logits must have {examples} columns, one an example, but have "
                f"{state.shape[1]}."
            )
        if not isinstance(state, Tracer) and not np.all(np.isfinite(np.asarray(state))):
            raise ValueError("The logits must be finite, but hold NaN or inf.")


class LogitFlow(AbstractFlow):
    """Gradient flow on the logits themselves, depth 0 (P2 Thm 6).

    The state is a, (K-1,), linear and of either sign. For K = 2 the margin m = 2a is
    that of logistic regression, m' = 4/(1 + e^m). Norm, path and loss as in
    `HadamardFlow`.

    **Arguments:** `num_classes` K, a power of two (`ValueError` otherwise).
    """

    num_classes: int = eqx.field(static=True)
    norm_diverges: ClassVar[bool] = True
    is_smooth: ClassVar[bool] = True
    growth_is_exact: ClassVar[bool] = True
    log_state: ClassVar[bool] = False

    def __init__(self, num_classes: int):
        check_num_classes(num_classes)
        self.num_classes = num_classes

    def __call__(self, state: Modes) -> tuple[Modes, RealScalar]:
        """Returns (da/dt / exp(log_speed), log_speed)."""
        log_speed, b, partition = scaled_rates(state)
        return b / partition, log_speed[0]

    def log_norm(self, state: Modes) -> RealScalar:
        """Returns log of the sum of |a|."""
        return log_or_zero(jnp.sum(jnp.abs(state)))

    def log_growth(self, state: Modes, direction: Modes) -> RealScalar:
        """Returns log of d log(sum |a|)/dt; NaN while negative entries shrink it."""
        growth = jnp.sum(jnp.sign(state) * direction)
        return log_or_zero(growth) - self.log_norm(state)

    def log_length(self, state: Modes, direction: Modes) -> RealScalar:
        """Returns log of the 2-norm of da/dt."""
        del state
        return log_frobenius_norm(direction)

    def log_activity(self, state: Modes, direction: Modes) -> RealScalar:
        """Returns log of the 2-norm of da/dt: a is of the size of the margins."""
        return self.log_length(state, direction)

    def log_loss(self, state: Modes) -> RealScalar:
        """Returns log log D."""
        return log_loss_of(state)

    def relative_error(self, error: Modes, before: Modes, after: Modes) -> RealScalar:
        """Returns the largest error over the largest entry: a is one block."""
        size = jnp.maximum(jnp.max(jnp.abs(before)), jnp.max(jnp.abs(after)))
        worst = jnp.max(jnp.abs(error))
        return jnp.where(worst == 0, 0, worst / size)

    def check(self, state: Modes) -> None:
        """Checks the number of modes and that they are finite."""
        check_count(state, self.num_classes)
        if isinstance(state, Tracer):
            return
        if not np.all(np.isfinite(np.asarray(state))):
            raise ValueError("The state of `LogitFlow` is a, and must be finite.")
