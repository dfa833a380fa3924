"""Checks of sizes and scales that all initialisers share."""

from typing import TypeAlias

import equinox as eqx
import numpy as np
from jaxtyping import Array, Float, Int

from .._types import Tracer

Size: TypeAlias = int | Int[Array, ""] | np.integer


def within(value, least, most, name: str):
    """Checks a traced value when it is known; concrete ones were checked before."""
    if not isinstance(value, Tracer):
        return value
    wrong = ~((value >= least) & (value <= most) & (value > 0))
    return eqx.error_if(
        value, wrong, f"`{name}` is outside its padding, or not positive"
    )


def static_size(name: str, size: Size) -> int:
    """Returns a size as an int; a traced one has none."""
    if isinstance(size, Tracer):
        raise ValueError(
            f"A traced `{name}` needs `pad_{name}`, the largest {name} of the batch."
        )
    return int(size)


def check_positive(name: str, value) -> None:
    """Raises `ValueError` where a concrete scale is zero, negative or not finite."""
    if isinstance(value, Tracer):
        return
    if not np.isfinite(value) or value <= 0:
        raise ValueError(
            f"Argument `{name}` must be positive and finite, but is {value}. At zero "
            "every layer vanishes, which is an equilibrium of the flow."
        )


def check_modes(name: str, a: Float[Array, "..."]) -> None:
    """Raises `ValueError` where a concrete `a` has a negative or non-finite entry."""
    if isinstance(a, Tracer):
        return
    values = np.ravel(np.asarray(a))
    wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if wrong.size:
        index = int(wrong[0])
        raise ValueError(
            f"Every entry of `{name}` must be finite and at least 0, but entry {index} "
            f"is {values[index]}. Singular values carry no sign: pass magnitudes."
        )


def check_sizes(
    num_classes, width, depth, pad_width=None, pad_depth=None, bottleneck=None
) -> None:
    """Raises `ValueError` for sizes below 1, d < K unasked, and too small a padding.

    **Arguments:** `bottleneck` whether d < K was asked for; `None` where it cannot be.
    """
    smallest = {"num_classes": 2, "width": 1, "depth": 1}
    given = {"num_classes": num_classes, "width": width, "depth": depth}
    for name, least in smallest.items():
        size = given[name]
        if isinstance(size, Tracer):
            continue
        if size != int(size):
            raise ValueError(
                f"Argument `{name}` must be a whole number, but is {size}."
            )
        if size < least:
            raise ValueError(
                f"Argument `{name}` must be at least {least}, but is {size}."
            )
    if isinstance(width, Tracer) or isinstance(depth, Tracer):
        return
    if width < num_classes and not bottleneck:
        raise ValueError(
            f"Argument `width` must be at least num_classes = {num_classes}, but is "
            f"{width}. Use a wider model"
            + (", or `bottleneck=True`." if bottleneck is False else ".")
        )
    for name, size, pad in (("width", width, pad_width), ("depth", depth, pad_depth)):
        if pad is not None and pad < size:
            raise ValueError(
                f"Argument `pad_{name}` must be at least {name} = {size}, but is {pad}."
            )
