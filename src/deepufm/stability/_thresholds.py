"""From what norm and down to what depth an invariant ray is stable.

Within its support a ray is stable at mu = N/|S| exactly if p < h(mu), the least of the
h_k of `_ray_spectrum`, where p = (L-1)/(L+1) is all there is of depth. So

    critical depth at a norm:  L = (1 + h)/(1 - h),
    threshold at a depth:      the last mu with h(mu) = p, times |S|.

Simplex ETF: N = p(K-1). Cross-polytope: mu = (2/K)[kappa + W_0(p e^{-kappa})], kappa =
p(K-2)/2, below P1's bound p.

`stability_threshold` asks for more than negative exponents: that small perturbations
die as the norm grows. They do not, and it is inf,

- at L = 1, but for the simplex ETF: a dead mode invades at every norm (`_exponents`);
- where a class is misclassified: a dead mode falls behind like 1/N, and invades above
  a part (b/b_i)^{1/p} of the living ones, which falls exponentially;
- where some h_k falls to zero: on six modes of eight classes, and on rays of 6, 10, 12
  and 14 modes of sixteen. They are stable in a window of norms.

Solved for y = mu/p in y·h_k(py)/(py) = 1, where y = 1 at p = 0: the threshold has full
relative accuracy, and a derivative, down to L = 1.
"""

import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import scipy.optimize
from jaxtyping import Array, Float

from .._types import Modes, RealLike, RealScalar
from ..dynamics import FallingCrossing, checked_depth, depth_power
from ._exponents import checked_norm, one_number
from ._ray_spectrum import RaySpectrum, branch_ratios, ray_spectrum
from ._rays import ray_support

# Where turning points of h_k are looked for. Margins are even: at mu = 64 all but the
# least term is below e^{-128}.
_LARGEST = 64.0
_POINTS = 4000


def critical_depth(
    direction: Modes | Float[np.ndarray, " modes"], norm: RealLike
) -> RealScalar:
    """Returns the depth below which the exponents of a ray are negative at this norm.

    (1 + h)/(1 - h), inf for h >= 1. At exactly L = 1 every ray but the simplex ETF is
    unstable nevertheless, as dead modes invade it.

    **Arguments:** as `stability_exponents`; `norm` may be traced, mapped over and
    differentiated.

    **Returns:** L, real, >= 1.

    **Raises:** `ValueError` for a direction that is not invariant, or a norm that is
    negative or not finite.
    """
    spectrum = ray_spectrum(ray_support(direction))
    mu = checked_norm(norm) / spectrum.size
    return _critical_depth(mu, spectrum.shares, spectrum.counts, spectrum.margins)


@eqx.filter_jit
def _critical_depth(mu, shares, counts, margins) -> RealScalar:
    rates = mu * branch_ratios(shares, counts, margins, mu)
    least = jnp.min(rates, initial=jnp.inf)
    finite = least < 1
    safe = jnp.where(finite, least, 0)
    return jnp.where(finite, (1 + safe) / (1 - safe), jnp.inf)


def stability_threshold(
    direction: Modes | Float[np.ndarray, " modes"], depth: RealLike
) -> RealScalar:
    """Returns the norm ‖a‖_1 above which a ray is stable for good.

    **Arguments:**

    - `direction`: K-1 mode weights of any scale, made outside of jit; ones are the
        simplex ETF.
    - `depth`: L, real, >= 1 or inf; may be traced, mapped over and differentiated any
        number of times (by the implicit function theorem).

    **Returns:** N >= 0; inf where there is none (`stability_windows` has the norms at
    which exponents are negative, if any). Its derivative is then 0.

    **Raises:** `ValueError` for a direction that is not invariant (`is_ray_invariant`),
    or a depth below 1.

    !!! example
        c = ufm.structure_modes(ufm.Structure.CROSS_POLYTOPE, 16)
        slope = jax.grad(lambda depth: ufm.stability_threshold(c, depth))(2.0)

    **Reference:** P1 Thm 4.3; with W_0 for its structure c above.
    """
    spectrum = ray_spectrum(ray_support(direction))
    depth = checked_depth(one_number("depth", depth))
    power = depth_power(depth)
    if spectrum.falls or not spectrum.spans:
        return jnp.full_like(power, jnp.inf)
    if not len(spectrum.shares):  # one mode of K = 2 is all there is
        return jnp.zeros_like(power)
    rises = [_rises(spectrum, branch) for branch in range(len(spectrum.shares))]
    crossing = _last_crossing(
        power, spectrum.shares, spectrum.counts, spectrum.margins, _stacked(rises)
    )
    if not spectrum.dead_modes:
        return spectrum.size * crossing
    shallow = power == 0
    return jnp.where(shallow, jnp.inf, spectrum.size * jnp.where(shallow, 1, crossing))


def stability_windows(
    direction: Modes | Float[np.ndarray, " modes"], depth: RealLike
) -> tuple[tuple[float, float], ...]:
    """Returns all intervals of norm where every exponent of a ray is negative.

    On rays that misclassify a class this is stability against ever smaller
    perturbations only, see `stability_threshold`.

    **Arguments:** as `stability_threshold`, but `depth` not traced. On the host.

    **Returns:** open intervals (from, to) of N = ‖a‖_1, rising; `to` may be inf.

    **Raises:** `ValueError` as `stability_threshold`.
    """
    spectrum = ray_spectrum(ray_support(direction))
    power = float(depth_power(checked_depth(depth)))
    if power == 0:
        return () if spectrum.dead_modes else ((0.0, math.inf),)
    branches = range(len(spectrum.shares))
    roots = {root for branch in branches for root in _roots(spectrum, branch, power)}
    ends = [0.0, *sorted(roots), math.inf]
    windows = []
    for low, high in zip(ends, ends[1:]):
        middle = low + 1 if math.isinf(high) else (low + high) / 2
        if all(_rate(spectrum, branch, middle) > power for branch in branches):
            windows.append((low * spectrum.size, high * spectrum.size))
    return tuple(windows)


class _Rises(eqx.Module):
    """The intervals on which h_k grows, one after another, of one k or of all.

    - `level`: h_k at the start; inf for those that only fill up.
    - `low`, `high`: mu at start and end.
    - `y_low`, `y_high`: bounds of mu/h_k on the first, where mu may be zero.
    """

    level: Float[Array | np.ndarray, "*branches rises"]
    low: Float[Array | np.ndarray, "*branches rises"]
    high: Float[Array | np.ndarray, "*branches rises"]
    y_low: Float[Array | np.ndarray, "*branches rises"]
    y_high: Float[Array | np.ndarray, "*branches rises"]


@eqx.filter_jit
def _last_crossing(power, shares, counts, margins, rises: _Rises) -> RealScalar:
    """Returns the last mu at which the least of the h_k is `power`."""

    def excess(y, args):
        power, share = args
        return 1 - y * branch_ratios(share, counts, margins, power * y)

    def crossing(share, rises):
        # The last rise that starts below: all later ones stay above.
        last = jnp.max(jnp.where(rises.level <= power, jnp.arange(len(rises.level)), 0))
        rise = jax.tree.map(lambda x: jnp.asarray(x, power.dtype)[last], rises)
        bounded = jnp.where(power == 0, 1, jax.lax.stop_gradient(power))
        high = jnp.where(power == 0, jnp.inf, rise.high / bounded)
        lower = jnp.maximum(rise.y_low, rise.low / bounded)
        upper = jnp.minimum(rise.y_high, high)
        found = optx.root_find(
            excess, FallingCrossing(), (lower + upper) / 2, (power, share),
            options={"lower": lower, "upper": upper},
        )  # fmt: skip
        return found.value

    return power * jnp.max(jax.vmap(crossing)(jnp.asarray(shares), rises))


def _rises(spectrum: RaySpectrum, branch: int) -> _Rises:
    """Returns where an h_k that grows without bound does."""
    turns = _turning_points(spectrum, branch)
    # From here on h_k is above 1, and so above any p.
    top = 2 * max(_LARGEST, spectrum.counts[0] / spectrum.shares[branch, 0])
    ends = np.concatenate([[0.0], turns, [top]])
    low, high = ends[::2], ends[1::2]
    level = _rate(spectrum, branch, low)
    grid = np.concatenate([_grid(spectrum), [top]])
    inverse = grid / _rate(spectrum, branch, grid)
    first = low == 0
    # mu = top is the y of p = 1 only.
    return _Rises(
        level, low, np.where(first & (high == top), np.inf, high),
        np.where(first, np.min(inverse) / 2, 0),
        np.where(first, 2 * np.max(inverse), np.inf),
    )  # fmt: skip


def _stacked(rises: list[_Rises]) -> _Rises:
    """Returns those of all k as one, with as many rises each."""
    longest = max(len(rise.level) for rise in rises)

    def stack(*rows):
        return np.stack(
            [np.pad(r, (0, longest - len(r)), constant_values=np.inf) for r in rows]
        )

    return jax.tree.map(stack, *rises)


def _rate(spectrum: RaySpectrum, branch: int, mu):
    """Returns h_k on the host, of one mu or of many."""
    decay = _decay(spectrum.margins, mu)
    return mu * (decay @ spectrum.shares[branch]) / (decay @ spectrum.counts)


def _slope(spectrum: RaySpectrum, branch: int, mu):
    """Returns d log h_k/d log mu, by means of margins: 1 - mu(<w>_alpha - <w>_beta)."""
    means = []
    for weights in (spectrum.shares[branch], spectrum.counts):
        counted = weights > 0
        margins = spectrum.margins[counted]
        decay = weights[counted] * _decay(margins, mu)
        means.append(decay @ margins / np.sum(decay, axis=-1))
    return 1 - mu * (means[0] - means[1])


def _decay(margins, mu) -> np.ndarray:
    return np.exp(-np.asarray(mu)[..., None] * (margins - margins[0]))


def _grid(spectrum: RaySpectrum) -> np.ndarray:
    """Returns norms per mode, from where all margins are small to where all are not."""
    return np.geomspace(1e-3 / spectrum.margins[-1], _LARGEST, _POINTS)


def _turning_points(spectrum: RaySpectrum, branch: int) -> np.ndarray:
    """Returns the mu > 0 at which h_k stops to grow or to fall, rising."""
    grid = _grid(spectrum)
    slopes = _slope(spectrum, branch, grid)
    changes = np.flatnonzero(np.sign(slopes[1:]) != np.sign(slopes[:-1]))
    found = [
        _root(lambda mu: _slope(spectrum, branch, mu), grid[i], grid[i + 1])
        for i in changes
    ]
    return np.asarray(found, float)


def _roots(spectrum: RaySpectrum, branch: int, power: float) -> list[float]:
    """Returns all mu > 0 with h_k(mu) = p > 0: one at most between turning points."""
    rises = spectrum.shares[branch, 0] > 0
    limit = spectrum.counts[0] / spectrum.shares[branch, 0] if rises else 0.0
    # Beyond this h_k is above 1, or far below any p.
    top = 2 * max(_LARGEST, limit)
    ends = [0.0, *_turning_points(spectrum, branch), top]
    return [
        _root(lambda mu: float(_rate(spectrum, branch, mu)) - power, low, high)
        for low, high in zip(ends, ends[1:])
        if (_rate(spectrum, branch, low) < power)
        != (_rate(spectrum, branch, high) < power)
    ]


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    """Returns where a function of opposite signs at the ends is zero."""
    found = scipy.optimize.root_scalar(
        function, method="brentq", bracket=(low, high), xtol=1e-300, rtol=1e-15
    )
    return float(found.root)
