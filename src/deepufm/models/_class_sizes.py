"""Class sizes: one number for all classes, or one for each, classes in order."""

from typing import TypeAlias

import jax.numpy as jnp
import numpy as np

from .._types import Labels

# n for balanced classes, (n_1, ..., n_K) otherwise. Static: it fixes array shapes.
ClassSizes: TypeAlias = int | np.integer | tuple[int, ...]


def class_sizes(num_classes: int, per_class: ClassSizes) -> tuple[int, ...]:
    """Returns the number of examples of each class, (n_1, ..., n_K).

    **Raises:** `ValueError` for a size below 1, or a tuple of another length than K.
    """
    given = per_class if isinstance(per_class, tuple) else (per_class,) * num_classes
    if not all(isinstance(size, int | np.integer) for size in given):
        raise ValueError(
            "Argument `per_class` must be a whole number, or a tuple of one for each "
            f"class, but is {per_class}."
        )
    sizes = tuple(int(size) for size in given)
    if len(sizes) != num_classes:
        raise ValueError(
            "Argument `per_class` must be one number, or one for each of the "
            f"{num_classes} classes, but has {len(sizes)}: {per_class}."
        )
    if min(sizes) < 1:
        raise ValueError(
            f"Argument `per_class` must be at least 1, but is {per_class}. A class "
            "without examples cannot be learned: leave it out."
        )
    return sizes


def checked_sizes(per_class: ClassSizes) -> ClassSizes:
    """Returns n as an int or the sizes as a tuple of ints, for any K.

    **Raises:** `ValueError` for a size below 1.
    """
    if isinstance(per_class, tuple):
        return class_sizes(len(per_class), per_class)
    (size,) = class_sizes(1, per_class)
    return size


def class_labels(num_classes: int, per_class: ClassSizes) -> Labels:
    """Returns 0, ..., 0, 1, ..., 1, ...: the class of each example, classes in order.

    **Raises:** `ValueError` as `class_sizes`.
    """
    sizes = class_sizes(num_classes, per_class)
    return jnp.asarray(np.repeat(np.arange(num_classes), sizes))
