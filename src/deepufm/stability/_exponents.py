"""How fast perturbations of an invariant ray grow, per unit of log-norm time.

With s = log N, N = ‖a‖_1, and living modes mu = N/|S| (h_k and b_i: `_ray_spectrum`),

    within the support:   d log|δ(a_i/a_j)|/ds = p - h_k(mu),   |S|-1 exponents,

- simplex ETF: p - mu, K-2 times (P1 Thm 4.3);
- cross-polytope, P1's c: p - K mu/(K-2+2x), x = e^{-K mu/2}, K/2-1 times (P1 D.4,
  where b_i of odd i wants e^{-K mu/2}, and eq. 48 has one factor of it too many).

Across it, for a dead mode that is given a little, as a part of the norm:

- L = 1: d log(a_i/N)/ds = b_i/b - 1. It invades where b_i > b.
- L > 1: d log(a_i/N)/ds = (b_i/b)(a_i/mu)^p - 1 -> -1. The mode stands still and the
  norm grows past it. Its own growth is of higher order, a_i^{1+p}: the exponent is -1,
  approached like a power of a_i, and not minus infinity. The mode shrinks as long as
  a_i/mu < (b/b_i)^{1/p}, the `invasion ratio`, which is the width of the basin and goes
  to zero like e^{-mu·const} on rays that misclassify. On c it tends to
  ((K-2)/K)^{(L+1)/(L-1)} (P1 eq. 51). It holds to first order in a_i, where the mode
  itself does not move the margins (a_i << 1).

At L = 1 some mode invades every ray but the simplex ETF, at every norm. For of all a of
one norm, a' = (N/(K-1))·1 has the least log D, strictly, and log D is convex with
gradient -b_i/D: sum_i (a'_i - a_i) b_i > 0, that is, the mean of b_i over all modes is
above b, that over the living.

Exponents are those of a frozen norm. Stability at all norms to come is
`stability_threshold`'s.
"""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from .._types import Modes, RealLike, RealScalar, Tracer
from ..dynamics import checked_depth, depth_power
from ._ray_spectrum import RaySpectrum, ray_spectrum
from ._rays import ray_support


class StabilityExponents(eqx.Module):
    """Growth of the perturbations of a ray, in units of 1/(log of the norm).

    Batched by `vmap`, arrays have leading axes.

    - `norm`, `depth`: N = ‖a‖_1 and L.
    - `within`: exponents of the ratios of living modes, |S|-1; those of one eigenvalue
        stand together, in an order that is the same at every norm and depth.
    - `transverse`: exponents of a_i/N of the dead modes as a_i -> 0, K-1-|S|, by rising
        number. -1 for L > 1. At L = 1 b_i/b - 1, inf where that is beyond floats.
    - `log_rate_ratio`: log(b_i/b) of the dead modes: finite where b_i/b is not.
    - `log_invasion_ratio`: log of a_i/mu above which a dead mode outgrows the living
        ones, -log(b_i/b)/p; at L = 1 -inf where it always does and inf where it never
        does. To first order in a_i.
    - `modes`, `dead_modes`: the numbers i >= 1 of both.
    """

    norm: Float[Array, "*batch"]
    depth: Float[Array, "*batch"]
    within: Float[Array, "*batch living"]
    transverse: Float[Array, "*batch dead"]
    log_rate_ratio: Float[Array, "*batch dead"]
    log_invasion_ratio: Float[Array, "*batch dead"]
    modes: tuple[int, ...] = eqx.field(static=True)
    dead_modes: tuple[int, ...] = eqx.field(static=True)

    @property
    def size(self) -> int:
        """|S|, the number of living modes."""
        return len(self.modes)

    @property
    def leading(self) -> Float[Array, "*batch"]:
        """The largest of all exponents; -inf where there are none (K = 2)."""
        both = jnp.concatenate([self.within, self.transverse], axis=-1)
        return jnp.max(both, axis=-1, initial=-jnp.inf)

    @property
    def stable(self) -> Bool[Array, "*batch"]:
        """Whether all exponents are negative at this norm.

        Rays that misclassify have negative ones at large norms, and yet are left:
        ever smaller dead modes invade (`stability_threshold`, which is inf).
        """
        return self.leading < 0


def stability_exponents(
    direction: Modes | Float[np.ndarray, " modes"], norm: RealLike, depth: RealLike
) -> StabilityExponents:
    """Returns the growth of every perturbation of an invariant ray at one norm.

    **Arguments:**

    - `direction`: K-1 mode weights of any scale, made outside of jit; ones are the
        simplex ETF.
    - `norm`: N = ‖a‖_1 >= 0, finite. It and `depth` may be traced: map and
        differentiate over them.
    - `depth`: L, real, >= 1 or inf.

    **Returns:** `StabilityExponents`, in log-norm time.

    **Raises:** `ValueError` for a direction that is not invariant (`is_ray_invariant`),
    a norm that is negative or not finite, or a depth below 1.

    !!! example
        found = ufm.stability_exponents(jnp.ones(15), norm=10.0, depth=3)
        found.leading, found.stable  # (L-1)/(L+1) - N/(K-1) = -1/6, True

    **Reference:** P1 Thm 4.3 and D.4.
    """
    spectrum = ray_spectrum(ray_support(direction))
    norm, depth = checked_norm(norm), checked_depth(one_number("depth", depth))
    return _exponents(spectrum, norm, depth)


@eqx.filter_jit
def _exponents(spectrum: RaySpectrum, norm, depth) -> StabilityExponents:
    power = depth_power(depth)
    mu = norm / spectrum.size
    ratio = spectrum.log_rate_ratio(mu)
    shallow = power == 0
    transverse = jnp.where(shallow, jnp.expm1(jnp.where(shallow, ratio, 0)), -1)
    never = jnp.where(ratio > 0, -jnp.inf, jnp.inf)
    return StabilityExponents(
        norm=norm,
        depth=depth,
        within=power - spectrum.rates(mu)[spectrum.branches],
        transverse=transverse,
        log_rate_ratio=ratio,
        log_invasion_ratio=jnp.where(
            shallow, never, -ratio / jnp.where(shallow, 1, power)
        ),
        modes=spectrum.modes,
        dead_modes=spectrum.dead_modes,
    )


def one_number(name: str, value: RealLike) -> RealScalar:
    """Returns a number as an array, after checking that it is one."""
    array = jnp.asarray(value, float)
    if array.ndim:
        raise ValueError(
            f"Argument `{name}` must be one number, but has shape {array.shape}. Map "
            "over several with `jax.vmap`, or see `stability_diagram`."
        )
    return array


def checked_norm(norm: RealLike) -> RealScalar:
    """Returns N as an array, after checking that it is finite and not negative."""
    array = one_number("norm", norm)
    if isinstance(array, Tracer):
        right = (array >= 0) & (array < jnp.inf)
        return eqx.error_if(array, ~right, "`norm` must be finite and at least 0.")
    if not 0 <= float(array) < np.inf:
        raise ValueError(
            f"Argument `norm`, ‖a‖_1, must be finite and at least 0, but is {norm}."
        )
    return array
