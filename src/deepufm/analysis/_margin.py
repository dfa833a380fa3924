"""Margins: how far each example is from being misclassified, and what they tend to.

Logits are K × nK, column k one example; `labels` holds each column's class. The margin
of an example is

    z_y − max_{k≠y} z_k,

positive exactly when it is classified correctly. Two normalised forms of the smallest
margin over the data:

- `logit_margin`: of Z/‖Z‖_F (P1 Fig. 3 and App. E);
- `parameter_margin`: over ‖θ‖^{L+1}, θ all L+1 matrices (the logits are homogeneous of
  degree L+1 in them), with the smoothed form that Lyu & Li (2019) prove non-decreasing.

For Hadamard logits (n = 1) the margins are the entries of Ψa, from class 0's column.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._types import Labels, Logits, Modes, RealLike, RealScalar
from ..geometry import psi_matvec
from ._spectrum import unit


def margins(logits: Logits, labels: Labels) -> Float[Array, " examples"]:
    """Returns z_y − max_{k≠y} z_k for every example.

    **Arguments:** `logits` (K, examples), K >= 2; `labels` the class of each column.

    **Returns:** one margin an example, NaN where the label is not a class.

    **Raises:** `ValueError` for a single class.
    """
    num_classes = logits.shape[0]
    if num_classes < 2:
        raise ValueError(
            "Argument `logits` must have at least two rows (classes), but its shape is "
            f"{logits.shape}: a margin compares two classes. Columns are examples."
        )
    classes = jnp.arange(num_classes, dtype=labels.dtype)
    own = classes[:, None] == labels[None, :]
    own_logit = jnp.sum(jnp.where(own, logits, 0.0), axis=0)
    rival = jnp.max(jnp.where(own, -jnp.inf, logits), axis=0)
    return jnp.where(jnp.any(own, axis=0), own_logit - rival, jnp.nan)


def logit_margin(logits: Logits, labels: Labels) -> RealScalar:
    """Returns the smallest margin of Z/‖Z‖_F, 0 for Z = 0.

    It depends on the direction of Z only. For n examples a class it is 1/√n times that
    of the class means when the examples of a class agree.

    **Reference:** P1 Fig. 3 and App. E.
    """
    return jnp.min(margins(unit(logits), labels))


def logit_margin_from_log(log_a: Modes) -> RealScalar:
    """Returns `logit_margin` of Z = Φ diag(0, a) Φᵀ, min(Ψa)/(K‖a‖₂), from u = log a.

    One example a class; 0 if every mode is dead.
    """
    largest = jax.lax.stop_gradient(jnp.max(log_a))
    a = jnp.exp(log_a - jnp.where(largest == -jnp.inf, 0.0, largest))
    sum_squares = jnp.sum(a * a)
    norm = jnp.sqrt(jnp.where(sum_squares == 0, 1.0, sum_squares))
    return jnp.min(psi_matvec(a)) / ((log_a.shape[0] + 1) * norm)


def parameter_margin(
    margin_min: RealScalar, log_norm: RealScalar, depth: RealLike
) -> RealScalar:
    """Returns min margin/‖θ‖^{L+1}.

    **Arguments:** `margin_min` the smallest of `margins`; `log_norm` log‖θ‖ over all
    L+1 matrices; `depth` L, possibly traced.

    **Returns:** the normalised margin. Parameters that are all 0 have none, and get
    `margin_min` back.

    **Reference:** Lyu & Li 2019, "Gradient descent maximizes the margin of homogeneous
    neural networks".
    """
    return _over_norm_power(margin_min, log_norm, depth)


def smoothed_parameter_margin(
    log_loss: RealScalar, log_norm: RealScalar, depth: RealLike
) -> RealScalar:
    """Returns −log(e^loss − 1)/‖θ‖^{L+1}, non-decreasing in time once loss < log 2.

    Positive exactly when loss < log 2, never above `parameter_margin`, and tends to
    it. Under cross-entropy it is this that Lyu & Li prove monotone; −log(loss), which
    it approaches as loss/2 → 0, is their form for the exponential loss, and exceeds
    the margin itself where one example dominates the loss.

    **Arguments:** `log_loss` the logarithm of the cross-entropy *summed* over examples;
    `log_norm`, `depth` as in `parameter_margin`.

    **Returns:** the smoothed margin, finite at any loss > 0: log_loss = −1e6 is fine.

    **Reference:** Lyu & Li 2019, as for `parameter_margin`.
    """
    return _over_norm_power(-_log_expm1_exp(log_loss), log_norm, depth)


def _log_expm1_exp(log_loss):
    """Returns log(e^loss − 1) from log(loss), whichever of the two is extreme."""
    loss = jnp.exp(log_loss)
    small = loss < 1
    # A loss below eps changes nothing in log_loss + loss/2, and its square may vanish.
    counts = loss > jnp.finfo(loss.dtype).eps
    inner = jnp.where(small & counts, loss, 1.0)
    outer = jnp.where(small, 1.0, loss)
    ratio = jnp.where(counts, jnp.log(jnp.expm1(inner) / inner), 0.0)
    return jnp.where(
        small,
        jnp.where(small, log_loss, 0.0) + ratio,
        outer + jnp.log(-jnp.expm1(-outer)),
    )


def _over_norm_power(value, log_norm, depth):
    """Returns value·exp(−(L+1)·log‖θ‖), as one exponential; NaN at infinite depth."""
    power = jnp.asarray(depth, dtype=log_norm.dtype) + 1
    log_norm = jnp.where(log_norm == -jnp.inf, 0.0, log_norm)
    zero = value == 0
    log_value = jnp.log(jnp.abs(jnp.where(zero, 1, value)))
    over = jnp.sign(value) * jnp.exp(log_value - power * log_norm)
    return jnp.where(jnp.isinf(power), jnp.nan, over)
