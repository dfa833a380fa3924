"""Activations between the layers: positively homogeneous ones (P1 App. B).

sigma(c x) = c sigma(x) for c > 0, so that sigma(x) = gate(x)·x with a gate that sees
only the sign. The logits W_L s(W_{L-1} s(... s(W_1 H_1))) stay homogeneous of degree
L+1 in the parameters, and everything that rests on that (log-scaled speeds, normalised
margins, `LogNorm`) holds as in the linear model, which is the activation `None`.
"""

import abc

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float


class AbstractActivation(eqx.Module):
    """A positively homogeneous activation, applied elementwise."""

    @abc.abstractmethod
    def gate(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Returns the derivative at `x`, which is sigma(x)/x away from zero."""

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Returns sigma(x)."""
        return self.gate(x) * x


class ReLU(AbstractActivation):
    """max(x, 0), or x·`negative_slope` below zero (leaky).

    The derivative at zero is `negative_slope`, that is 0 for the plain one: a unit
    whose pre-activation is exactly 0 is at rest, as in `jax.nn.relu`.
    """

    negative_slope: float = eqx.field(static=True, default=0.0, converter=float)

    def __check_init__(self):
        if not 0 <= self.negative_slope <= 1:
            raise ValueError(
                "Argument `negative_slope` of `ReLU` must lie between 0 and 1, "
                f"but is {self.negative_slope}."
            )

    def gate(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Returns 1 above zero and `negative_slope` at and below it."""
        return jnp.where(x > 0, 1, self.negative_slope).astype(x.dtype)
