"""Gradient flow of the full model in every parameter (P1 eqs. 37-38).

With left products A_l = W_L ... W_l (A_{L+1} = I), the residual R = -dL/dZ, and
G_l = R H_l^T where H_1 are the features and H_{l+1} = W_l H_l,

    dW_l/dt = A_{l+1}^T G_l,   G_{l+1} = G_l W_l^T,   dH_1/dt = A_1^T R.

Every product but the last has K rows, never nK columns: n times less work than
propagating the features forward. The scans carry K x d matrices only; the outer
products of all layers are one batched product. The direction is divided by its size,
whose logarithm goes into `log_speed`.
"""

from typing import ClassVar

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._types import Labels, RealLike, RealScalar, Tracer
from ..geometry import frobenius_norm, log_frobenius_norm
from ..models import AbstractLoss, DeepUFM
from ._flow import AbstractFlow


class GradientFlow(AbstractFlow):
    """dθ/dt = -∇L(θ) for a `DeepUFM` (P1 eq. 38), the loss summed over examples.

    The norm is the Frobenius norm of all parameters. `LogNorm` advances by
    ‖dθ‖/‖θ‖, since the norm itself falls at first from most Gaussian starts.

    **Arguments:**

    - `loss`: an `AbstractLoss`.
    - `per_class`: n; the features hold n columns a class, classes in order.
    - `depth`: the true depth L where the model is padded (may be traced). Hidden layers
        from the L-th on are then frozen, and count in no norm and no error estimate.
    """

    loss: AbstractLoss
    per_class: int = eqx.field(static=True)
    depth: RealScalar | None
    growth_is_exact: ClassVar[bool] = False
    log_state: ClassVar[bool] = False

    def __init__(
        self,
        loss: AbstractLoss,
        per_class: int,
        *,
        depth: RealLike | None = None,
    ):
        if per_class < 1:
            raise ValueError(
                f"Argument `per_class` must be at least 1, but is {per_class}."
            )
        self.loss = loss
        self.per_class = per_class
        self.depth = None if depth is None else jnp.asarray(depth, float)

    @property
    def norm_diverges(self) -> bool:
        """Whether the loss has no finite minimiser."""
        return self.loss.norm_diverges

    def __call__(self, state: DeepUFM) -> tuple[DeepUFM, RealScalar]:
        """Returns (dθ/dt / exp(log_speed), log_speed)."""
        with jax.default_matmul_precision("highest"):
            return self._motion(state)

    def _motion(self, state: DeepUFM) -> tuple[DeepUFM, RealScalar]:
        def leftward(left, layer):
            return left @ layer, left

        def rightward(gradient, layer):
            return gradient @ layer.T, gradient

        first, lefts = jax.lax.scan(leftward, state.head, state.hidden, reverse=True)
        residual, log_speed = self.loss.residual(
            first @ state.features, self.labels(state)
        )
        last, gradients = jax.lax.scan(
            rightward, residual @ state.features.T, state.hidden
        )
        # Both ends are products of all layers but one, like every block of the
        # direction. They are zero at rest, but also beside a single layer of zeros.
        size = jnp.maximum(_largest(first), _largest(last))
        still = size == 0
        scale = 1 / jnp.where(still, 1, size)
        # `unvmap_any`: a batch takes the branch only where some member is still.
        at_rest = jax.lax.cond(
            eqxi.unvmap_any(still),
            lambda: self._speed_at_rest(state, lefts, gradients),
            lambda: jnp.zeros_like(size),
        )
        at_rest = jnp.where(still, at_rest, 0)
        direction = DeepUFM(
            head=scale * last,
            hidden=self._drop_frozen(scale * _outer_products(lefts, gradients)),
            features=(scale * first).T @ residual,
        )
        return direction, log_speed - jnp.log(scale) + at_rest

    def _speed_at_rest(self, state: DeepUFM, lefts, gradients) -> RealScalar:
        """Returns what to add to log_speed where both ends of the products are zero.

        0 where a layer between them still moves; -inf at rest; NaN where nothing moves
        only because the product of the layers is below the smallest float, so that a
        model frozen by underflow is never taken for one at rest.
        """
        moves = jnp.any(self._drop_frozen(_outer_products(lefts, gradients)))
        hidden = frobenius_norm(state.hidden, axis=(1, 2))
        frozen = self._drop_frozen(jnp.ones_like(hidden)) == 0
        ends = [frobenius_norm(state.head), frobenius_norm(state.features)]
        norms = jnp.concatenate([jnp.where(frozen, 1, hidden), jnp.stack(ends)])
        logs = jnp.log(jnp.where(norms == 0, 1, norms))
        tiny = jnp.log(jnp.finfo(norms.dtype).tiny)
        underflow = jnp.all(norms > 0) & (jnp.sum(logs) - jnp.max(logs) < tiny)
        return jnp.where(moves, 0, jnp.where(underflow, jnp.nan, -jnp.inf))

    def labels(self, state: DeepUFM) -> Labels:
        """Returns the class of each example, (nK,)."""
        return jnp.asarray(np.repeat(np.arange(state.num_classes), self.per_class))

    def true_depth(self, state: DeepUFM) -> RealScalar:
        """Returns L, without padding."""
        if self.depth is None:
            return jnp.asarray(state.depth, state.head.dtype)
        return self.depth.astype(state.head.dtype)

    def layer_norms(self, state: DeepUFM) -> Float[Array, " blocks"]:
        """Returns the Frobenius norms of H_1, W_1 ... W_L; 0 for frozen layers."""
        hidden = frobenius_norm(self._drop_frozen(state.hidden), axis=(1, 2))
        ends = [frobenius_norm(state.features)[None], frobenius_norm(state.head)[None]]
        return jnp.concatenate([ends[0], hidden, ends[1]])

    def log_norm(self, state: DeepUFM) -> RealScalar:
        """Returns log ‖θ‖_F over all parameters that move."""
        return log_frobenius_norm(self.layer_norms(state))

    def log_growth(self, state: DeepUFM, direction: DeepUFM) -> RealScalar:
        """Returns log of ‖direction‖_F/‖θ‖_F."""
        return self.log_norm(direction) - self.log_norm(state)

    def log_length(self, state: DeepUFM, direction: DeepUFM) -> RealScalar:
        """Returns log ‖direction‖_F."""
        del state
        return self.log_norm(direction)

    def log_activity(self, state: DeepUFM, direction: DeepUFM) -> RealScalar:
        """Returns log of (1 + ‖θ‖)·‖direction‖/‖θ‖."""
        weight = jax.nn.softplus(self.log_norm(state))
        return self.log_growth(state, direction) + weight

    def log_loss(self, state: DeepUFM) -> RealScalar:
        """Returns the log of the loss summed over all examples."""
        return self.loss.log_loss(state.logits(), self.labels(state))

    def relative_error(
        self, error: DeepUFM, before: DeepUFM, after: DeepUFM
    ) -> RealScalar:
        """Returns the largest ‖error‖_F/‖layer‖_F over the layers that move."""
        size = jnp.maximum(self.layer_norms(before), self.layer_norms(after))
        errors = self.layer_norms(error)
        # Not `errors > 0`: a NaN must come out as one.
        still = errors == 0
        return jnp.max(jnp.where(still, 0, errors / jnp.where(still, 1, size)))

    def check(self, state: DeepUFM) -> None:
        """Checks the shapes, the padding's depth and that the parameters are finite."""
        if not isinstance(state, DeepUFM):
            raise ValueError(
                "The state of `GradientFlow` must be a `DeepUFM`, but is a "
                f"{type(state).__name__}. Build one with `gaussian`, `hadamard` or "
                "`balanced`."
            )
        examples = state.num_classes * self.per_class
        if state.features.shape != (state.width, examples):
            raise ValueError(
                f"With K = {state.num_classes} and per_class = {self.per_class} the "
                f"features must have shape ({state.width}, {examples}), but have "
                f"{state.features.shape}. Give both the flow and the model one n."
            )
        if self.depth is not None and not isinstance(self.depth, Tracer):
            depth = float(self.depth)
            if not (1 <= depth <= state.depth and depth == round(depth)):
                raise ValueError(
                    "Argument `depth` must be a whole number from 1 to the depth of "
                    f"the arrays, {state.depth}, but is {depth}."
                )
        for name in ("head", "hidden", "features"):
            leaf = getattr(state, name)
            if isinstance(leaf, Tracer):
                continue
            if not bool(jnp.all(jnp.isfinite(leaf))):
                raise ValueError(
                    f"The model's {name} must be finite, but holds NaN or inf."
                )

    def _drop_frozen(
        self, layers: Float[Array, "layers ..."]
    ) -> Float[Array, "layers ..."]:
        if self.depth is None:
            return layers
        moving = jnp.arange(layers.shape[0], dtype=self.depth.dtype) < self.depth - 1
        moving = moving.reshape(moving.shape + (1,) * (layers.ndim - 1))
        return jnp.where(moving, layers, 0)


def _largest(x: Float[Array, "classes width"]) -> RealScalar:
    """Returns the largest magnitude, a constant to differentiation."""
    return jax.lax.stop_gradient(jnp.max(jnp.abs(x)))


# Up to this many classes a sum of K outer products, fused into one pass over the
# output, beats a batched matrix product, whose inner dimension is too short to pay for
# its packing (benchmarks/bench_rhs.py: a whole right-hand side takes 263 against 338 us
# at K = 10, d = 100, L = 8; they are level at K = 32 to 48, and it loses from 64 on).
_MAX_FUSED_CLASSES = 32


def _outer_products(
    lefts: Float[Array, "layers classes width"],
    gradients: Float[Array, "layers classes width"],
) -> Float[Array, "layers width width"]:
    """Returns A^T G for every layer at once."""
    num_classes = lefts.shape[1]
    if num_classes > _MAX_FUSED_CLASSES:
        return jnp.einsum("lkd,lke->lde", lefts, gradients)
    total = lefts[:, 0, :, None] * gradients[:, 0, None, :]
    for k in range(1, num_classes):
        total = total + lefts[:, k, :, None] * gradients[:, k, None, :]
    return total
