"""Where along the clock an orbit is saved."""

from collections.abc import Sequence
from typing import TypeAlias

import equinox as eqx
import jax.numpy as jnp
import numpy as np
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


class SaveAt(eqx.Module):
    """Save the start, and where the clock reads the given numbers.

    **Arguments:** `readings`, positive and rising; `clock.reading(log_time)` turns
    times into them. Those beyond the stop are not reached, and hold NaN.

    **Raises:** `ValueError` for an order that is not rising from 0.

    !!! example
        saves = ufm.SaveAt(ufm.LogTime().reading(jnp.log(jnp.asarray([1e2, 1e4]))))
    """

    readings: Float[Array, " saves"]  # 0, the start, first

    def __init__(self, readings: Sequence[float] | Float[Array, " saves"]):
        given = jnp.asarray(readings, float)
        if given.ndim != 1:
            raise ValueError(
                f"`SaveAt` needs a list of readings, but has shape {given.shape}."
            )
        self.readings = jnp.concatenate([jnp.zeros((1,), given.dtype), given])
        if isinstance(given, Tracer):
            return
        if not bool(np.all(np.diff(np.asarray(self.readings)) > 0)):
            raise ValueError(
                "The readings of `SaveAt` must be positive and rising (the start, 0, "
                f"is saved by itself), but are {np.asarray(given)}."
            )


Saves: TypeAlias = int | SaveEvery | SaveAt


def num_saves(saves: Saves | None) -> int:
    """Returns the number of rows, the start included."""
    if saves is None:
        return 0
    if isinstance(saves, SaveEvery):
        return saves.capacity
    return saves.readings.shape[0] if isinstance(saves, SaveAt) else int(saves)


def save_times(saves: Saves | None, end: RealScalar) -> Float[Array, " saves"]:
    """Returns the readings of all rows; those past the end, if any, collapse onto it.

    `_assemble` keeps the first of them. With `SaveAt` they stay beyond it.
    """
    return save_time(saves, end, jnp.arange(num_saves(saves)))


def save_time(saves: Saves | None, end: RealScalar, row) -> Array:
    """Returns the reading of a row, or of several; inf beyond the last."""
    count = num_saves(saves)
    if saves is None or count == 0:
        return jnp.full(jnp.shape(row), jnp.inf, end.dtype)
    if isinstance(saves, SaveEvery):
        time = jnp.minimum(saves.step.astype(end.dtype) * row.astype(end.dtype), end)
    elif isinstance(saves, SaveAt):
        time = saves.readings.astype(end.dtype).at[row].get(mode="clip")
    else:
        # The last point must be the end to the last bit, or it would not be saved.
        fractions = jnp.linspace(0, 1, count, dtype=end.dtype).at[row].get(mode="clip")
        time = jnp.where(fractions < 1, end * fractions, end)
    return jnp.where(row < count, time, jnp.inf)
