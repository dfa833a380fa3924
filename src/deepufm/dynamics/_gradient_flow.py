"""Gradient flow of the full model in every parameter (P1 eqs. 37-38).

    dθ/dt = -∇L(θ) - λθ,

the loss summed over examples. The gradient comes from `_gradient` in factors; the
direction is divided by its size, whose logarithm goes into `log_speed`, beside the
factor that the loss takes out of its residual. Weight decay joins by the logarithm of
the sum of both speeds: late in training λθ is the larger by any power, and the
direction stays of ordinary size.
"""

from typing import ClassVar

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._types import BoolScalar, Labels, Logits, RealLike, RealScalar, Tracer
from ..geometry import frobenius_norm, log_frobenius_norm
from ..models import (
    AbstractActivation,
    AbstractLoss,
    ClassSizes,
    DeepUFM,
    checked_sizes,
    class_labels,
    class_sizes,
    propagate,
)
from ._flow import AbstractFlow
from ._gradient import Factors, activated_factors, linear_factors
from ._schedule import PiecewiseConstant, at_time


class GradientFlow(AbstractFlow):
    """dθ/dt = -∇L(θ) - λθ for a `DeepUFM` (P1 eq. 38), the loss summed over examples.

    The norm is the Frobenius norm of all parameters. `LogNorm` advances by
    ‖dθ‖/‖θ‖, since the norm itself falls at first from most Gaussian starts. `log_loss`
    is that of the data; the penalty λ‖θ‖²/2 is not in it.

    With a ReLU the velocity jumps where a pre-activation is zero, and orbits may slide
    along such kinks, pushed back from either side (the flow is then a differential
    inclusion). There `solve` lets steps across a kink through unchecked that change no
    layer by more than the square root of `rtol`: the orbit is accurate to that order,
    at some thousand steps. (Where several units slide at once the inclusion may have
    more orbits than one, and descent and flow may differ by more.)

    **Arguments:**

    - `loss`: an `AbstractLoss`.
    - `per_class`: n, or the class sizes (n_1, ..., n_K); the features hold that many
        columns a class, classes in order.
    - `weight_decay`: λ >= 0, or a `PiecewiseConstant` of the flow's time.
    - `depth`: the true depth L where the model is padded (may be traced). Hidden layers
        from the L-th on are then frozen, and count in no norm and no error estimate.
    - `activation`: what stands after W_1 ... W_{L-1} (P1 App. B); `None` is linear.

    **Raises:** `ValueError` for a class without examples, or a negative λ.

    !!! example
        flow = ufm.GradientFlow(ufm.CrossEntropy(), (5, 5, 1), activation=ufm.ReLU())
    """

    loss: AbstractLoss
    per_class: ClassSizes = eqx.field(static=True)
    weight_decay: RealScalar | PiecewiseConstant | None  # `None` is none at all
    depth: RealScalar | None
    activation: AbstractActivation | None
    growth_is_exact: ClassVar[bool] = False
    log_state: ClassVar[bool] = False

    def __init__(
        self,
        loss: AbstractLoss,
        per_class: ClassSizes,
        weight_decay: RealLike | PiecewiseConstant = 0.0,
        *,
        depth: RealLike | None = None,
        activation: AbstractActivation | None = None,
    ):
        self.loss = loss
        self.per_class = checked_sizes(per_class)
        self.weight_decay = _checked_decay(weight_decay)
        self.depth = None if depth is None else jnp.asarray(depth, float)
        self.activation = activation

    @property
    def norm_diverges(self) -> bool:
        """Whether the loss has no finite minimiser, and nothing decays the weights."""
        return self.loss.norm_diverges and self.weight_decay is None

    @property
    def is_smooth(self) -> bool:
        """Whether no activation puts kinks into the loss."""
        return self.activation is None

    def crosses_kink(self, before: DeepUFM, after: DeepUFM) -> BoolScalar:
        """Returns whether any unit's gate differs between two states."""
        assert self.activation is not None
        _, _, gates = propagate(before, self.activation, self.depth)
        _, _, others = propagate(after, self.activation, self.depth)
        return jnp.any(gates != others)

    def at(self, log_time: RealScalar) -> "GradientFlow":
        """Returns the flow with the weight decay of log t, which is then constant."""
        flow = at_time(self, log_time)
        assert isinstance(flow, GradientFlow)
        return flow

    def __call__(self, state: DeepUFM) -> tuple[DeepUFM, RealScalar]:
        """Returns (dθ/dt / exp(log_speed), log_speed)."""
        if isinstance(self.weight_decay, PiecewiseConstant):
            raise ValueError(
                "A flow whose weight decay changes with time has no one speed at a "
                "state. Use `flow.at(log_time)(state)`; `solve` does so by itself."
            )
        with jax.default_matmul_precision("highest"):
            factors, log_speed = self._factors(state)
            direction, log_speed = self._scaled(state, factors, log_speed)
        if self.weight_decay is None:
            return direction, log_speed
        return self._with_decay(state, direction, log_speed)

    def _factors(self, state: DeepUFM) -> tuple[Factors, RealScalar]:
        labels = self.labels(state)

        def residual(logits):
            return self.loss.residual(logits, labels)

        if self.activation is None:
            return linear_factors(state, residual)
        return activated_factors(state, residual, self.activation, self.depth)

    def _scaled(
        self, state: DeepUFM, factors: Factors, log_scale: RealScalar
    ) -> tuple[DeepUFM, RealScalar]:
        """Divides the gradient by its size, and adds the size's log to the speed."""
        # Both ends are products of all layers but one, like every block of the
        # direction. They are zero at rest, but also beside a single layer of zeros.
        size = jnp.maximum(_largest(factors.first), _largest(factors.head))
        still = size == 0
        scale = 1 / jnp.where(still, 1, size)
        # `unvmap_any`: a batch takes the branch only where some member is still.
        at_rest = jax.lax.cond(
            eqxi.unvmap_any(still),
            lambda: self._speed_at_rest(state, factors),
            lambda: jnp.zeros_like(size),
        )
        at_rest = jnp.where(still, at_rest, 0)
        direction = factors.blocks(scale)
        direction = eqx.tree_at(
            lambda d: d.hidden, direction, self.drop_frozen(direction.hidden)
        )
        return direction, log_scale - jnp.log(scale) + at_rest

    def _speed_at_rest(self, state: DeepUFM, factors: Factors) -> RealScalar:
        """Returns what to add to log_speed where both ends of the products are zero.

        0 where a layer between them still moves; -inf at rest; NaN where nothing moves
        only because the product of the layers is below the smallest float, so that a
        model frozen by underflow is never taken for one at rest.
        """
        one = jnp.ones((), state.head.dtype)
        moves = jnp.any(self.drop_frozen(factors.blocks(one).hidden))
        hidden = frobenius_norm(state.hidden, axis=(1, 2))
        frozen = self.drop_frozen(jnp.ones_like(hidden)) == 0
        ends = [frobenius_norm(state.head), frobenius_norm(state.features)]
        norms = jnp.concatenate([jnp.where(frozen, 1, hidden), jnp.stack(ends)])
        logs = jnp.log(jnp.where(norms == 0, 1, norms))
        tiny = jnp.log(jnp.finfo(norms.dtype).tiny)
        underflow = jnp.all(norms > 0) & (jnp.sum(logs) - jnp.max(logs) < tiny)
        speed = jnp.where(moves, 0, jnp.where(underflow, jnp.nan, -jnp.inf))
        return speed.astype(norms.dtype)

    def _with_decay(
        self, state: DeepUFM, direction: DeepUFM, log_speed: RealScalar
    ) -> tuple[DeepUFM, RealScalar]:
        """Adds -λθ to exp(log_speed)·direction, both in units of the faster one."""
        assert isinstance(self.weight_decay, jax.Array)
        rate = self.weight_decay.astype(log_speed.dtype)
        positive = rate > 0
        log_rate = jnp.where(positive, jnp.log(jnp.where(positive, rate, 1)), -jnp.inf)
        # A gradient below the smallest float (NaN) is nothing beside the decay.
        lost = jnp.isnan(log_speed) & positive
        log_speed = jnp.where(lost, -jnp.inf, log_speed)
        log_decay = log_rate + self.log_norm(state)
        total = jnp.logaddexp(log_speed, log_decay)
        still = jnp.isneginf(total)
        unit = jnp.where(still, 0, total)
        pull = jnp.exp(log_speed - unit)
        # At a rate of zero by the rate itself, for its derivative.
        most = jnp.log(jnp.finfo(unit.dtype).max)
        linear = rate * jnp.exp(jnp.minimum(-unit, most))
        decay = jnp.where(positive, jnp.exp(log_rate - unit), linear)
        moving = eqx.tree_at(lambda s: s.hidden, state, self.drop_frozen(state.hidden))
        combined = jax.tree.map(lambda d, x: pull * d - decay * x, direction, moving)
        return combined, total

    def logits(self, state: DeepUFM) -> Logits:
        """Returns Z, (K, examples), of this flow's activation and depth."""
        return state.logits(self.activation, self.depth)

    def labels(self, state: DeepUFM) -> Labels:
        """Returns the class of each example, (examples,)."""
        return class_labels(state.num_classes, self.per_class)

    def true_depth(self, state: DeepUFM) -> RealScalar:
        """Returns L, without padding."""
        if self.depth is None:
            return jnp.asarray(state.depth, state.head.dtype)
        return self.depth.astype(state.head.dtype)

    def layer_norms(self, state: DeepUFM) -> Float[Array, " blocks"]:
        """Returns the Frobenius norms of H_1, W_1 ... W_L; 0 for frozen layers."""
        hidden = frobenius_norm(self.drop_frozen(state.hidden), axis=(1, 2))
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
        return self.loss.log_loss(self.logits(state), self.labels(state))

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
        examples = sum(class_sizes(state.num_classes, self.per_class))
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

    def drop_frozen(
        self, layers: Float[Array, "layers ..."]
    ) -> Float[Array, "layers ..."]:
        """Returns hidden layers with zeros in place of those that are padding."""
        if self.depth is None:
            return layers
        moving = jnp.arange(layers.shape[0], dtype=self.depth.dtype) < self.depth - 1
        moving = moving.reshape(moving.shape + (1,) * (layers.ndim - 1))
        return jnp.where(moving, layers, 0)


def _largest(x: Float[Array, "..."]) -> RealScalar:
    """Returns the largest magnitude, a constant to differentiation."""
    return jax.lax.stop_gradient(jnp.max(jnp.abs(x)))


def _checked_decay(decay) -> RealScalar | PiecewiseConstant | None:
    """Returns λ as an array or a schedule, `None` where it is zero for ever."""
    values = decay.values if isinstance(decay, PiecewiseConstant) else decay
    # Not by jnp: under `jit` that would make a traced zero of the default.
    if not isinstance(values, Tracer):
        array = np.asarray(values, float)
        if array.ndim and not isinstance(decay, PiecewiseConstant):
            raise ValueError(
                "Argument `weight_decay` must be one number, or a PiecewiseConstant of "
                f"several, but is {decay}."
            )
        if not np.all((array >= 0) & np.isfinite(array)):
            raise ValueError(
                f"Argument `weight_decay` must be finite and at least 0, but is "
                f"{array}."
            )
        if not np.any(array > 0):
            return None
    return decay if isinstance(decay, PiecewiseConstant) else jnp.asarray(decay, float)
