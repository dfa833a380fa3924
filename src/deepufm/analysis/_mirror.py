"""The reduced flow as a mirror flow, and as a replicator equation (P2 App. B).

With the energy E(a) = log D = log(1 + Σ exp(-Ψa)) (P2 eq. 8, in absorbed units and for
one example), whose gradient is -b/D, the reduced flow of depth L is

    d/dt φ'(a_i) = -∂E/∂a_i,    φ'(a) = (1 - a^{-p})/p,   p = (L-1)/(L+1).

φ' is the mirror map: log a at L = 1, where the potential is the negative entropy
Σ(a log a - a) and the flow is P2's entropic mirror descent; a deformed logarithm at
L > 1.
The normalised modes obey a replicator equation, with fitness the relative growth:

    d a-hat_i/dt = a-hat_i (f_i - Σ_j a-hat_j f_j),   f_i = (b_i/D) a_i^p   (P2 eq. 11).
"""

import jax
import jax.numpy as jnp

from .._types import Modes, RealLike, RealScalar
from ..dynamics import HadamardFlow, LogitFlow, checked_depth, depth_power


def energy(a: Modes) -> RealScalar:
    """Returns E(a) = log(1 + Σ exp(-Ψa)), the loss of one example (P2 eq. 8).

    **Arguments:** `a` (K-1,), of either sign, in the reduced flow's units.

    **Raises:** `ValueError` unless K is a power of two.
    """
    return jnp.exp(LogitFlow(a.shape[0] + 1).log_loss(a))


def energy_gradient(a: Modes) -> tuple[Modes, RealScalar]:
    """Returns (g / exp(log_scale), log_scale) with g = ∇E(a) = -b/D.

    In two factors, like a flow: at margins of 1e5 the gradient underflows, its
    direction does not.

    **Raises:** `ValueError` unless K is a power of two.
    """
    b, log_scale = LogitFlow(a.shape[0] + 1)(a)
    return -b, log_scale


def mirror_map(log_a: Modes, depth: RealLike) -> Modes:
    """Returns φ'(a) = (1 - a^{-p})/p, log a at depth 1.

    **Arguments:** `log_a` natural logarithms; `depth` real, >= 1 or inf.

    **Raises:** `ValueError` for a depth below 1.
    """
    power = _power(log_a, depth)
    flat = power == 0
    safe = jnp.where(flat, 1, power)
    return jnp.where(flat, log_a, -jnp.expm1(-safe * log_a) / safe)


def inverse_mirror_map(dual: Modes, depth: RealLike) -> Modes:
    """Returns log a with φ'(a) = `dual`: inf at a dual of 1/p, NaN above.

    **Raises:** `ValueError` for a depth below 1.
    """
    power = _power(dual, depth)
    flat = power == 0
    safe = jnp.where(flat, 1, power)
    return jnp.where(flat, dual, -jnp.log1p(-safe * dual) / safe)


def mirror_potential(log_a: Modes, depth: RealLike) -> RealScalar:
    """Returns Σφ(a_i) with φ(0) = 0: Σ(a log a - a) at depth 1.

    φ(a) = (a - a^{1-p}/(1-p))/p. At infinite depth (p = 1) it is a - log a, up to a
    constant that is infinite, and not taken along.

    **Raises:** `ValueError` for a depth below 1.
    """
    power = _power(log_a, depth)
    a = jnp.exp(log_a)
    flat, steep = power == 0, power == 1
    p = jnp.where(flat | steep, 0.5, power)
    # (a - a^{1-p})/p - a^{1-p}/(1-p): the first without cancellation as p -> 0.
    between = -a * jnp.expm1(-p * log_a) / p - a * jnp.exp(-p * log_a) / (1 - p)
    entropy = a * (log_a - 1)
    return jnp.sum(jnp.where(flat, entropy, jnp.where(steep, a - log_a, between)))


def replicator(flow: HadamardFlow, log_a: Modes) -> tuple[Modes, RealScalar]:
    """Returns (d a-hat/dt / exp(log_speed), log_speed) of the normalised modes.

    Each difference of fitnesses is averaged, Σ_j a-hat_j (f_i - f_j), so that equal
    fitnesses cancel exactly. (P2 eq. 11; P1 after eq. 6.)

    **Arguments:** `log_a` (K-1,), the flow's state.
    """
    fitness, log_speed = flow(log_a)
    share = jax.nn.softmax(log_a)
    advantage = jnp.sum(share[None, :] * (fitness[:, None] - fitness[None, :]), axis=1)
    return share * advantage, log_speed


def _power(like: Modes, depth: RealLike) -> RealScalar:
    return depth_power(checked_depth(depth).astype(like.dtype))
