"""-dL/dθ of a `DeepUFM` in factors, to be scaled before they are multiplied out.

Linear layers: with left products A_l = W_L ... W_l (A_{L+1} = I), the residual
R = -dL/dZ, and G_l = R H_l^T where H_1 are the features and H_{l+1} = W_l H_l,

    dW_l/dt = A_{l+1}^T G_l,   G_{l+1} = G_l W_l^T,   dH_1/dt = A_1^T R.

Every product but the last has K rows, never nK columns: n times less work than
propagating the features forward. The scans carry K x d matrices only; the outer
products of all layers are one batched product.

Activated layers, H_{l+1} = s(W_l H_l) with gates s', have no products that all examples
share; there the usual forward and backward passes take the place of A and G:

    dW_l/dt = B_l H_l^T,   B_l = gate_l * (W_{l+1}^T B_{l+1}),   B_L = R,
    dH_1/dt = W_1^T B_1.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._types import Logits, RealScalar
from ..models import AbstractActivation, DeepUFM, propagate

Residual = Callable[[Logits], tuple[Logits, RealScalar]]


class Factors(eqx.Module):
    """The blocks of -dL/dθ / exp(log_scale): head, lefts^T rights, first^T last.

    `first` and `head` are products of all layers but one, like every block.
    """

    head: Float[Array, "classes width"]
    lefts: Float[Array, "layers terms width"]
    rights: Float[Array, "layers terms width"]
    first: Float[Array, "rows width"]
    last: Float[Array, "rows examples"] | None  # `None` for the identity

    def blocks(self, scale: RealScalar) -> DeepUFM:
        """Returns `scale` times the blocks, multiplied out."""
        first = (scale * self.first).T
        return DeepUFM(
            head=scale * self.head,
            hidden=outer_products(scale * self.lefts, self.rights),
            features=first if self.last is None else first @ self.last,
        )


def linear_factors(state: DeepUFM, residual: Residual) -> tuple[Factors, RealScalar]:
    """Returns the factors of -dL/dθ of the linear model, and their log_scale."""

    def leftward(left, layer):
        return left @ layer, left

    def rightward(gradient, layer):
        return gradient @ layer.T, gradient

    first, lefts = jax.lax.scan(leftward, state.head, state.hidden, reverse=True)
    error, log_scale = residual(first @ state.features)
    head, gradients = jax.lax.scan(rightward, error @ state.features.T, state.hidden)
    return Factors(head, lefts, gradients, first, error), log_scale


def activated_factors(
    state: DeepUFM,
    residual: Residual,
    activation: AbstractActivation,
    depth: RealScalar | None,
) -> tuple[Factors, RealScalar]:
    """Returns the factors of -dL/dθ of the activated model, and their log_scale."""

    def backward(pulled, layer_and_gates):
        layer, gates = layer_and_gates
        gated = gates * pulled
        return layer.T @ gated, gated.T

    last, inputs, gates = propagate(state, activation, depth)
    error, log_scale = residual(state.head @ last)
    first, lefts = jax.lax.scan(
        backward, state.head.T @ error, (state.hidden, gates), reverse=True
    )
    rights = jnp.swapaxes(inputs, 1, 2)
    return Factors(error @ last.T, lefts, rights, first.T, None), log_scale


# Up to this many terms a sum of outer products, fused into one pass over the output,
# beats a batched matrix product, whose inner dimension is too short to pay for its
# packing (benchmarks/bench_rhs.py: a whole right-hand side takes 263 against 338 us at
# K = 10, d = 100, L = 8; they are level at K = 32 to 48, and it loses from 64 on).
_MAX_FUSED_TERMS = 32


def outer_products(
    lefts: Float[Array, "layers terms width"],
    rights: Float[Array, "layers terms width"],
) -> Float[Array, "layers width width"]:
    """Returns lefts^T rights for every layer at once."""
    terms = lefts.shape[1]
    if terms > _MAX_FUSED_TERMS:
        return jnp.einsum("lkd,lke->lde", lefts, rights)
    total = lefts[:, 0, :, None] * rights[:, 0, None, :]
    for k in range(1, terms):
        total = total + lefts[:, k, :, None] * rights[:, k, None, :]
    return total
