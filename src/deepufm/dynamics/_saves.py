"""Where along the clock an orbit is saved."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._types import RealScalar, Tracer


def _real(x) -> RealScalar:
    return jnp.asarray(x, float)


class SaveEvery(eqx.Module):
    """Save at every `step` of the clock, up to `capacity` points, start included.

    For stops that no clock reading is known for in advance. Rows that were not reached
    hold NaN; `path.num_saved` counts the others.
    """

    step: RealScalar = eqx.field(converter=_real)
    capacity: int = eqx.field(static=True)

    def __check_init__(self):
        if not isinstance(self.step, Tracer) and not self.step > 0:
            raise ValueError(f"`SaveEvery` needs a positive step, but has {self.step}.")
        if self.capacity < 1:
            raise ValueError(
                f"`SaveEvery` needs room for at least the start, but has capacity "
                f"{self.capacity}."
            )


def save_times(saves: int | SaveEvery, end: RealScalar) -> Float[Array, " saves"]:
    if isinstance(saves, SaveEvery):
        step = saves.step.astype(end.dtype)
        # Points past the end, where there is one, collapse onto it; `_assemble` keeps
        # the first of them.
        return jnp.minimum(step * jnp.arange(saves.capacity, dtype=end.dtype), end)
    # The last point must be the end to the last bit, or it would not be saved.
    fractions = jnp.linspace(0, 1, saves, dtype=end.dtype)
    return jnp.where(fractions < 1, end * fractions, end)
