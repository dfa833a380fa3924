"""Where an invariant ray is stable: a phase diagram over norm and real depth."""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from .._types import Modes
from ._exponents import stability_exponents
from ._rays import ray_support
from ._thresholds import critical_depth, stability_threshold

if TYPE_CHECKING:
    import xarray as xr


@dataclass(frozen=True)
class StabilityDiagram:
    """Stability of one ray over norms and depths.

    - `modes`: numbers i >= 1 of its living modes.
    - `norms`, `depths`: the axes; N = ‖a‖_1, and L.
    - `leading`, (depths, norms): the largest exponent in log-norm time, within the
        support or across it.
    - `stable`, (depths, norms): whether it is negative; see `StabilityExponents.stable`
        on rays that misclassify, whose thresholds are inf.
    - `thresholds`, (depths,): `stability_threshold`.
    - `critical_depths`, (norms,): `critical_depth`.
    """

    modes: tuple[int, ...]
    norms: np.ndarray
    depths: np.ndarray
    leading: np.ndarray
    stable: np.ndarray
    thresholds: np.ndarray
    critical_depths: np.ndarray

    def to_dataset(self) -> "xr.Dataset":
        """Returns all of it over the dimensions `depth` and `norm`."""
        import xarray as xr

        both = ("depth", "norm")
        return xr.Dataset(
            {
                "leading": (both, self.leading),
                "stable": (both, self.stable),
                "threshold": ("depth", self.thresholds),
                "critical_depth": ("norm", self.critical_depths),
            },
            {"depth": self.depths, "norm": self.norms},
            {"modes": list(self.modes)},
        )


def stability_diagram(
    direction: Modes | Float[np.ndarray, " modes"],
    norms: Float[jax.Array, " norms"] | Float[np.ndarray, " norms"],
    depths: Float[jax.Array, " depths"] | Float[np.ndarray, " depths"],
) -> StabilityDiagram:
    """Returns where an invariant ray is stable, in one mapped call.

    **Arguments:**

    - `direction`: K-1 mode weights of any scale.
    - `norms`: N = ‖a‖_1 >= 0, finite, in any order.
    - `depths`: L >= 1, real or inf, in any order.

    **Returns:** a `StabilityDiagram`.

    **Raises:** `ValueError` for a direction that is not invariant, or norms or depths
    out of their range.
    """
    support = ray_support(direction)
    sizes, levels = np.asarray(norms, float), np.asarray(depths, float)
    _check("norms", sizes, (sizes >= 0) & (sizes < np.inf), "finite and at least 0")
    _check("depths", levels, levels >= 1, "at least 1")

    (leading, stable), thresholds, critical = _cells(
        tuple(support.tolist()), jnp.asarray(sizes), jnp.asarray(levels)
    )
    return StabilityDiagram(
        tuple((np.flatnonzero(support) + 1).tolist()), sizes, levels,
        np.asarray(leading), np.asarray(stable), np.asarray(thresholds),
        np.asarray(critical),
    )  # fmt: skip


@functools.partial(jax.jit, static_argnums=0)
def _cells(support: tuple[bool, ...], sizes: jax.Array, levels: jax.Array):
    """Returns (leading, stable), thresholds, critical depths; compiled once a ray."""
    direction = np.asarray(support, float)

    def cell(norm, depth):
        found = stability_exponents(direction, norm, depth)
        return found.leading, found.stable

    over_norms = jax.vmap(cell, in_axes=(0, None))
    return (
        jax.vmap(over_norms, in_axes=(None, 0))(sizes, levels),
        jax.vmap(lambda depth: stability_threshold(direction, depth))(levels),
        jax.vmap(lambda norm: critical_depth(direction, norm))(sizes),
    )


def _check(name: str, values: np.ndarray, right: np.ndarray, what: str) -> None:
    if values.ndim != 1 or values.size == 0 or not np.all(right):
        raise ValueError(
            f"Argument `{name}` must be one-dimensional, not empty, and {what}, but is "
            f"{values}."
        )
