"""From the matrix flow's units to the reduced flow's and back (P1 D.3).

    a' = a/(K sqrt n),    t' = ((L+1)/K)·(K sqrt n)^{2L/(L+1)}·t

where a are the singular values of the logit matrix under `GradientFlow`, primes the
units of `HadamardFlow`. Times are carried as logarithms: they may be 10^(10^5).
"""

import math

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._types import Modes, RealLike, RealScalar, Tracer


class ScaleMap(eqx.Module):
    """The two factors of P1 D.3, in natural logarithm."""

    log_a_factor: RealScalar  # log(a'/a)
    log_time_factor: RealScalar  # log(t'/t)

    def to_reduced(self, a: Modes) -> Modes:
        """Returns the reduced flow's a' from singular values of the logit matrix."""
        return a * jnp.exp(self.log_a_factor)

    def to_full(self, a: Modes) -> Modes:
        """Returns singular values of the logit matrix from the reduced flow's a'."""
        return a * jnp.exp(-self.log_a_factor)

    def log_time_to_reduced(self, log_time: Float[Array, "..."]) -> Float[Array, "..."]:
        """Returns log t' from log t."""
        return log_time + self.log_time_factor

    def log_time_to_full(self, log_time: Float[Array, "..."]) -> Float[Array, "..."]:
        """Returns log t from log t'."""
        return log_time - self.log_time_factor


def scale_map(num_classes: int, per_class: int, depth: RealLike) -> ScaleMap:
    """Returns the map between `GradientFlow` and `HadamardFlow` (P1 D.3).

    **Arguments:** K >= 2, n >= 1 and the finite depth L >= 1 of the matrix flow.

    **Raises:** `ValueError` for other values.

    !!! example
        units = ufm.scale_map(num_classes=8, per_class=3, depth=2)
        start = jnp.log(units.to_reduced(singular_values))
    """
    traced = isinstance(depth, Tracer)
    if num_classes < 2 or per_class < 1 or not (traced or 1 <= depth < math.inf):
        raise ValueError(
            "`scale_map` needs num_classes >= 2, per_class >= 1 and a finite depth "
            f">= 1, but has {num_classes}, {per_class} and {depth}."
        )
    depth = jnp.asarray(depth, float)
    log_unit = jnp.log(jnp.asarray(num_classes, float)) + 0.5 * jnp.log(
        jnp.asarray(per_class, float)
    )
    time = jnp.log(depth + 1) - jnp.log(jnp.asarray(num_classes, float))
    return ScaleMap(
        log_a_factor=-log_unit,
        log_time_factor=time + 2 * depth / (depth + 1) * log_unit,
    )
