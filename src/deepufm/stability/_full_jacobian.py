"""The Jacobian of the full gradient flow, minus the Hessian of its loss: symmetric.

In units of exp(log_unit), the size of the residual R = -dL/dZ (and of the decay λ),

    J = B + Q^T R' Q - λ,    Q = dZ/dθ,    R' = dR/dZ,

where B is the derivative of Q^T R with R held. Late in training Q^T R' Q exceeds B by
the margin, 1e8-fold or more. Both are kept apart: on the complement of the gauge
directions, the stiff directions that Q sees and the soft ones in its null space are
told apart first, and the soft block has no part of Q^T R' Q. Where the scales are far
apart it is diagonalised by itself, less B_nr J_rr^{-1} B_rn, so that an exponent of -1
beside one of -1e12 keeps its digits.

Normalised, θ/‖θ‖ moves in the time s = log ‖θ‖ as F/<θ-hat, F> - θ-hat, F = dθ/dt.
Linearised on the sphere's tangent space, where F is parallel to θ,

    P J P/g - 1,    g = <θ, F>/‖θ‖²,    P = 1 - θ-hat θ-hat^T.

Elsewhere -e (P J θ-hat/g + e)^T is added, e the drift F/(g‖θ‖) - θ-hat.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._types import Logits, RealScalar
from ..dynamics import GradientFlow, PiecewiseConstant
from ..models import MSE, DeepUFM, class_labels
from ._gauge import gauge_directions
from ._hessian import LinearHessian, layers_of

# Dense matrices of more unknowns take minutes and gigabytes.
MOST_DENSE = 3000
# Stiff and soft exponents this far apart are found apart, with a relative error of
# its square.
_SEPARATE = 1e-7
# Singular values of Q below this part of the largest are zero.
_RANK = 1e-10


class Spectrum(NamedTuple):
    """Exponents with what counts as zero beside them; gauge; log of the unit; drift."""

    exponents: np.ndarray
    thresholds: np.ndarray
    gauge: np.ndarray
    balance: np.ndarray
    log_unit: float
    drift: float


class ScaledLoss(eqx.Module):
    """The residual and the weight decay in units of exp(log_unit)."""

    flow: GradientFlow  # without padding
    log_unit: RealScalar

    def residual(self, logits: Logits) -> Logits:
        """Returns R/exp(log_unit)."""
        labels = class_labels(logits.shape[0], self.flow.per_class)
        # The squared error at its minimum has no logarithm.
        if isinstance(self.flow.loss, MSE):
            own = jnp.arange(logits.shape[0])[:, None] == labels[None, :]
            return (own.astype(logits.dtype) - logits) * jnp.exp(-self.log_unit)
        error, log_scale = self.flow.loss.residual(logits, labels)
        return error * jnp.exp(log_scale - self.log_unit)

    @property
    def decay(self) -> RealScalar:
        """λ/exp(log_unit)."""
        rate = self.flow.weight_decay
        assert not isinstance(rate, PiecewiseConstant)
        return jnp.zeros(()) if rate is None else rate * jnp.exp(-self.log_unit)

    @eqx.filter_jit
    def parts(self, logits: Logits) -> tuple[Logits, Float[Array, "numbers numbers"]]:
        """Returns R, and R' as a matrix of the flattened logits."""
        slope = jax.jacfwd(self.residual)(logits)
        return self.residual(logits), slope.reshape(logits.size, logits.size)


def scaled_loss(flow: GradientFlow, state: DeepUFM) -> tuple[ScaledLoss, DeepUFM]:
    """Returns the loss in its own unit, and the model without padding in depth.

    **Raises:** `ValueError` for flows that have no Jacobian here, padding that is no
    identity, or a state that does not fit.
    """
    if flow.activation is not None:
        raise ValueError(
            "Jacobians are of smooth flows, but this `GradientFlow` has the activation "
            f"{type(flow.activation).__name__}, whose kinks have none. Use the linear "
            "model, activation=None."
        )
    if isinstance(flow.weight_decay, PiecewiseConstant):
        raise ValueError(
            "A flow whose weight decay changes with time has no one Jacobian at a "
            "state. Use `flow.at(log_time)`."
        )
    flow.check(state)
    decay = flow.weight_decay
    plain = GradientFlow(flow.loss, flow.per_class, 0.0 if decay is None else decay)
    if flow.depth is not None:
        state = _without_padding(state, int(flow.depth))
    return ScaledLoss(plain, _log_unit(plain, state)), state


def _without_padding(state: DeepUFM, depth: int) -> DeepUFM:
    padding = np.asarray(state.hidden[depth - 1 :])
    if not np.array_equal(padding, np.broadcast_to(np.eye(state.width), padding.shape)):
        raise ValueError(
            f"At depth={depth} the hidden layers from the {depth}-th on are padding, "
            "and must be identities, but are not."
        )
    return DeepUFM(state.head, state.hidden[: depth - 1], state.features)


def _log_unit(flow: GradientFlow, model: DeepUFM) -> RealScalar:
    """Returns the log of the unit of rates: 0 for the squared error."""
    if isinstance(flow.loss, MSE):
        return jnp.zeros(())
    _, log_scale = flow.loss.residual(model.logits(), flow.labels(model))
    if flow.weight_decay is None:
        return log_scale
    assert isinstance(flow.weight_decay, jax.Array)
    return jnp.logaddexp(log_scale, jnp.log(flow.weight_decay))


class Base(NamedTuple):
    """A state, flattened; F there; and where normalised g and the drift e.

    Where not, g = 1, and e is empty. All in units of exp(log_unit).
    """

    theta: np.ndarray
    force: np.ndarray
    growth: float
    drift: np.ndarray

    @property
    def ray(self) -> np.ndarray:
        """θ-hat as a column."""
        return (self.theta / np.linalg.norm(self.theta))[:, None]

    def measured_drift(self, largest: float) -> float:
        """Returns ‖e‖, or where nothing is normalised ‖F‖/(‖θ‖·largest)."""
        if self.drift.size:
            return float(np.linalg.norm(self.drift))
        size = np.linalg.norm(self.force)
        scale = np.linalg.norm(self.theta) * largest
        return 0.0 if size == 0 else float(size / scale) if scale > 0 else np.inf


def base_point(
    theta: np.ndarray, force: np.ndarray, normalised: bool, log_unit: float
) -> Base:
    """Returns the `Base`.

    **Raises:** `ValueError` where the norm does not grow, and normalised dynamics have
    no time.
    """
    if not normalised:
        return Base(theta, force, 1.0, np.zeros(0))
    norm = np.linalg.norm(theta)
    unit = theta / norm if norm > 0 else theta
    growth = float(unit @ force / norm) if norm > 0 else 0.0
    if not growth > 0:
        raise ValueError(
            "Normalised dynamics take the logarithm of the norm for their time, which "
            f"must grow, but d log ‖θ‖/dt is {growth}·exp({log_unit}) at this state. "
            "Use normalised=False."
        )
    return Base(theta, force, growth, force / (growth * norm) - unit)


class Dense(NamedTuple):
    """All parts of J at a state: `held` is B - λ, `seen` Q, (K, N, P), `slope` R'."""

    flow: GradientFlow
    model: DeepUFM
    base: Base
    held: np.ndarray
    seen: np.ndarray
    slope: np.ndarray
    log_unit: float

    @property
    def seen_rows(self) -> np.ndarray:
        """Q as a matrix."""
        return self.seen.reshape(-1, self.seen.shape[-1])


def dense(flow: GradientFlow, state: DeepUFM, normalised: bool) -> Dense:
    """Returns the parts of J.

    **Raises:** `ValueError` as `scaled_loss` and `base_point`, and for a model of more
    than `MOST_DENSE` parameters.
    """
    loss, model = scaled_loss(flow, state)
    count = sum(x.size for x in jax.tree.leaves(model))
    if count > MOST_DENSE:
        raise ValueError(
            f"All exponents of {count} parameters need a dense matrix of that size, "
            f"and at most {MOST_DENSE} are taken. Ask for the largest few, which need "
            "none: top=10."
        )
    hessian = LinearHessian(layers_of(model))
    residual, slope = (np.asarray(x, float) for x in loss.parts(model.logits()))
    decay, log_unit = float(loss.decay), float(loss.log_unit)
    theta = hessian.flat(hessian.layers)
    force = hessian.pulled(residual) - decay * theta
    held = hessian.held(residual)
    held[np.diag_indices_from(held)] -= decay
    base = base_point(theta, force, normalised, log_unit)
    return Dense(loss.flow, model, base, held, hessian.seen(), slope, log_unit)


def full_spectrum(
    flow: GradientFlow,
    state: DeepUFM,
    normalised: bool,
    tolerance: float,
    rank_tolerance: float = _RANK,
) -> Spectrum:
    """Returns all exponents, physical, gauge and balance apart."""
    parts = dense(flow, state, normalised)
    base, shift = parts.base, float(normalised)
    directions = gauge_directions(parts.model, rank_tolerance=rank_tolerance)
    removed = directions.all
    if normalised:
        removed = np.concatenate([base.ray, removed], axis=1)
    exponents, thresholds = _physical(parts, _complement(removed), shift)
    gauge, balance = (
        np.linalg.eigvalsh(u.T @ parts.held @ u) / base.growth - shift
        for u in (directions.rotations, directions.scalings)
    )
    log_unit = parts.log_unit + float(np.log(base.growth))
    drift = base.measured_drift(np.max(np.abs(exponents), initial=0))
    return Spectrum(exponents, tolerance * thresholds, gauge, balance, log_unit, drift)


def _physical(parts: Dense, basis, shift: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns exponents on the span of `basis`, and the scale of each."""
    _, values, turn = np.linalg.svd(_what_loss_sees(parts) @ basis)
    count = int(np.sum(values > _RANK * np.max(values, initial=0)))
    turned = basis @ turn.T
    matrix = turned.T @ parts.held @ turned / parts.base.growth
    matrix[np.diag_indices_from(matrix)] -= shift
    visible = parts.seen_rows @ turned[:, :count]
    stiff, mixed, soft = (
        matrix[:count, :count], matrix[:count, count:], matrix[count:, count:]
    )  # fmt: skip
    stiff += visible.T @ parts.slope @ visible / parts.base.growth
    fast, slow = np.linalg.eigvalsh(stiff), np.zeros(0)
    small = max(np.max(np.abs(x), initial=0) for x in (mixed, soft))
    if soft.size and small <= _SEPARATE * np.min(np.abs(fast), initial=np.inf):
        # By least squares: margins beyond doubles leave `stiff` singular.
        bent = np.linalg.lstsq(stiff, mixed)[0]
        slow = np.linalg.eigvalsh(soft - mixed.T @ bent)
    else:
        fast = np.linalg.eigvalsh(matrix)
    # Normalised, soft rates are differences of ones of order 1; at rest they may all
    # be the rounding of stiff ones.
    largest = max(np.max(np.abs(fast), initial=0), shift)
    largest = largest or np.max(np.abs(slow), initial=0)  # the loss may see nothing
    floor = max(np.max(np.abs(slow), initial=0), 1.0) if shift else largest
    scales = np.repeat([largest, floor], [len(fast), len(slow)])
    return np.concatenate([fast, slow]), scales


def _what_loss_sees(parts: Dense) -> np.ndarray:
    """Returns the rows of Q, for softmax those of z_k - z_y for all k != y."""
    seen = parts.seen
    if isinstance(parts.flow.loss, MSE):
        return parts.seen_rows
    labels = np.asarray(class_labels(seen.shape[0], parts.flow.per_class))
    gaps = seen - seen[labels, np.arange(len(labels))][None]
    return gaps[np.arange(seen.shape[0])[:, None] != labels]


def _complement(columns: np.ndarray) -> np.ndarray:
    """Returns an orthonormal basis of what is orthogonal to independent columns."""
    full, _ = np.linalg.qr(columns, mode="complete")
    return full[:, columns.shape[1] :]


def full_reactivity(flow: GradientFlow, state: DeepUFM, normalised: bool) -> float:
    """Returns the top eigenvalue of the symmetric part of the Jacobian."""
    parts = dense(flow, state, normalised)
    base = parts.base
    seen = parts.seen_rows
    matrix = (parts.held + seen.T @ parts.slope @ seen) / base.growth
    if not normalised:
        return float(np.linalg.eigvalsh(matrix)[-1])
    basis = _complement(base.ray)
    bent = np.outer(base.drift, (matrix @ base.ray)[:, 0] + base.drift)
    inside = basis.T @ (matrix - (bent + bent.T) / 2) @ basis
    return float(np.linalg.eigvalsh(inside)[-1]) - 1
