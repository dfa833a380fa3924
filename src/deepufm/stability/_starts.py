"""Random starts that are numbered: start i is the same whatever else is drawn.

NumPy's Philox is counter-based: its key is the seed, and start i takes the numbers from
counter i·2^192 on. So start i does not depend on how many are drawn, in what rounds, or
where; and it is the same direction at every depth and scale, so that points of a grid
are compared on the same starts. Models are drawn from JAX's key of the seed, folded
with i.
"""

from collections.abc import Callable

import jax
import numpy as np

from ..models import DeepUFM, gaussian

Draw = Callable[[np.random.Generator], np.ndarray]


def numbered_generator(seed: int, number: int) -> np.random.Generator:
    """Returns the generator of one start's numbers."""
    return np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, number]))


def mode_starts(
    num_classes: int,
    scale: float,
    numbers: range,
    *,
    seed: int = 0,
    draw: Draw | None = None,
) -> np.ndarray:
    """Returns log a of numbered starts of the reduced flow, (starts, K-1).

    **Arguments:**

    - `num_classes`: K.
    - `scale`: the 1-norm of a.
    - `numbers`: which starts.
    - `draw`: makes the direction of one start, K-1 non-negative modes, from a NumPy
        generator; uniform on [0, 1] by default (P1 Fig. 4).

    **Raises:** `ValueError` for draws that are no modes.
    """
    modes = num_classes - 1
    one = (lambda rng: rng.uniform(size=modes)) if draw is None else draw
    a = np.asarray([one(numbered_generator(seed, i)) for i in numbers], float)
    if a.shape != (len(numbers), modes) or not (
        np.all(a >= 0) and np.all(np.isfinite(a)) and np.all(np.any(a > 0, axis=1))
    ):
        raise ValueError(
            f"Argument `draw` must return {modes} finite, non-negative modes, not all "
            "zero."
        )
    with np.errstate(divide="ignore"):
        return np.log(a / np.sum(a, axis=1, keepdims=True)) + np.log(scale)


def model_starts(
    num_classes: int,
    depth: int,
    width: int,
    scale: float,
    numbers: range,
    *,
    per_class: int = 1,
    seed: int = 0,
) -> DeepUFM:
    """Returns numbered Gaussian models, leading axis the starts (`gaussian`).

    **Arguments:** entries are `scale`·N(0, 1/d); the rest as in `gaussian`.

    **Raises:** `ValueError` as `gaussian`.
    """
    key = jax.random.key(seed)
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(np.asarray(numbers))
    return jax.vmap(
        lambda key: gaussian(
            key,
            num_classes=num_classes,
            per_class=per_class,
            width=width,
            depth=depth,
            scale=scale,
        )
    )(keys)
