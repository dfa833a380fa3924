"""Lyapunov functions of the reduced flow, with exact derivatives along it.

For a function V of the direction a-hat, and f_i = d log a_i/dt,

    dV/dt = Σ_{i<j} c_ij (f_i - f_j),    c_ij >= 0 where a_i >= a_j:      (P2 eq. 11)

    KL(uniform‖a-hat)     (a-hat_i - a-hat_j)/(K-1)                (P1 eq. 52)
    KL(a-hat‖uniform)     a-hat_i a-hat_j log(a_i/a_j)             (P2 B.3.1)
    M, P2 eq. 12          a-hat_i a-hat_j (a-hat_i - a-hat_j)
    M-tilde, P2 B.3.2     2 (K-1) cos³ a-hat_i a-hat_j (a-hat_i - a-hat_j)
    log-ratio             1 for the largest and the smallest mode  (P2 B.3.3)

with cos = ‖a‖_1/(√(K-1) ‖a‖_2). P1 eq. 61 and P2 B.3.2 define one and the same
M-tilde = ‖Z/‖Z‖_F - S/‖S‖_F‖_F² = 2 - 2 cos, and since cos² = 1/(1 + 2(K-1)M) it rises
exactly where M of P2 eq. 12 does. Every function falls where larger modes grow more
slowly. Rates are sums of such parts, so that what is equal cancels exactly, and a sum
of rounding errors goes with them: signs can be told from noise.

Of the loss D and the margin the parts have one sign: Lyu & Li's (2019) proof, as a sum.
Depth 0 is `LogitFlow`, for positive a; everywhere else the state is log a.
"""

import abc
import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._types import BoolScalar, Modes, RealScalar
from ..analysis import (
    etf_distance_from_log,
    kl_from_uniform,
    log_ratio,
    reverse_kl_from_uniform,
    smoothed_parameter_margin,
    uniform_distance,
)
from ..dynamics import HadamardFlow, LogitFlow
from ..geometry import psi_matrix
from ._fitness import Fitness, fitness, logs

ReducedFlow = HadamardFlow | LogitFlow


class Parts(eqx.Module):
    """dV/dt as a sum, in units of exp(log_speed)."""

    parts: Float[Array, " parts"]
    growth: RealScalar  # d log(sum a)/dt in units of exp(log_growth_speed)
    log_growth_speed: RealScalar
    log_unit: RealScalar  # log_speed - log_growth_speed
    error: RealScalar  # bounds the rounding error of the sum of `parts`
    applies: BoolScalar  # whether the theorem, if any, speaks of this state

    @property
    def log_speed(self) -> RealScalar:
        """Log of the unit of `parts`."""
        return self.log_growth_speed + self.log_unit

    @property
    def sum(self) -> RealScalar:
        """dV/dt in units of exp(log_speed)."""
        return jnp.sum(self.parts)

    @property
    def alignment(self) -> RealScalar:
        """The sum over the sum of absolute values, from -1 to 1; -1 where all is 0."""
        total = jnp.sum(jnp.abs(self.parts))
        return jnp.where(total == 0, -1, self.sum / jnp.where(total == 0, 1, total))


class AbstractLyapunov(eqx.Module):
    """A function that falls along the flow, or is conjectured to.

    `flow` is a `HadamardFlow`, with state log a, or a `LogitFlow`, with state a > 0.
    """

    @abc.abstractmethod
    def value(self, flow: ReducedFlow, state: Modes) -> RealScalar:
        """Returns V."""

    @abc.abstractmethod
    def parts(self, flow: ReducedFlow, state: Modes) -> Parts:
        """Returns dV/dt as a sum of parts."""

    @abc.abstractmethod
    def proven(self, num_classes: int, depth: float | int) -> bool:
        """Returns whether V is proven never to rise: see `theorem`."""

    def rate(self, flow: ReducedFlow, state: Modes) -> tuple[RealScalar, RealScalar]:
        """Returns (dV/dt / exp(log_speed), log_speed), t the flow's own time.

        Like a flow's velocity: at margins of 1e5 the rate itself underflows.
        """
        parts = self.parts(flow, state)
        return parts.sum, parts.log_speed

    def log_norm_rate(self, flow: ReducedFlow, state: Modes) -> RealScalar:
        """Returns dV/ds with s = log(sum a), the time of the `LogNorm` clock."""
        parts = self.parts(flow, state)
        return parts.sum / parts.growth * jnp.exp(parts.log_unit)


def theorem(lyapunov: AbstractLyapunov, num_classes: int, depth: float | int) -> bool:
    """Returns whether a function is proven never to rise from positive modes.

    | function            | L = 0  | L = 1      | L > 1  |
    |---------------------|--------|------------|--------|
    | KL(uniform‖a-hat)   | all K  | all K (a)  | K = 2  |
    | KL(a-hat‖uniform)   | all K  | K <= 4     | K = 2  |
    | M, M-tilde          | all K (b) | K <= 4 (c) | K = 2 |
    | log-ratio           | K <= 8 | K <= 8 (d) | K = 2  |
    | loss                | always | always     | always |
    | smoothed margin     | L finite, once the loss is below log 2 (e) | | |

    (a) P2 Thm 3; (b) P2 Thm 6; (c) P2 Thm 4; (d) P2 B.3.3; (e) Lyu & Li 2019. At K = 2
    there is one mode and nothing to compare. At K = 4 b_i < b_j wherever a_i > a_j,
    and so is a_i^p b_i at p <= 0: all parts are negative, for every function. That also
    takes the K = 8 log-ratio, where it holds of the largest and the smallest mode, to
    L = 0. The two divergences at L = 0, for all K: with m = Psi a,

        Σ b_i log(a_i/N) = Σ_u e^{-m_u} Σ_i Psi_iu log(a_i/N)
                        <= K Σ_u e^{-m_u} log(m_u/KN)
                        <= Σ b_i · log(1/(K-1)) <= Σ b_i · Σ a-hat log a-hat

    by Jensen's inequality, then Chebyshev's (e^{-m} falls where log m rises) and
    Jensen's again; the same two steps with 1/a in place of log a give
    mean(b_i/a_i) >= Σ b_i/N.

    **Arguments:** `num_classes` K, a power of two; `depth` 0, or real and >= 1, or inf.

    **Raises:** `ValueError` for another depth or K.
    """
    if num_classes < 2 or num_classes & (num_classes - 1):
        raise ValueError(
            "Argument `num_classes` must be a power of two, at least 2, but is "
            f"{num_classes}."
        )
    if not (depth == 0 or depth >= 1):
        raise ValueError(
            "Argument `depth` must be 0 (`LogitFlow`) or at least 1 (`HadamardFlow`), "
            f"but is {depth}."
        )
    return lyapunov.proven(num_classes, depth)


class KLDivergence(AbstractLyapunov):
    """V = KL(uniform‖a-hat), +inf (and without a rate, NaN) once a mode is zero."""

    def value(self, flow: ReducedFlow, state: Modes) -> RealScalar:
        return kl_from_uniform(logs(flow, state)[0])

    def parts(self, flow: ReducedFlow, state: Modes) -> Parts:
        at = fitness(flow, state)
        dead = jnp.any(at.log_ratios == -jnp.inf)
        weights = _share_differences(at) / at.share.shape[0]
        return _pairwise(at, jnp.where(dead, jnp.nan, weights))

    def proven(self, num_classes: int, depth: float | int) -> bool:
        return num_classes == 2 or depth <= 1


class ReverseKLDivergence(AbstractLyapunov):
    """V = KL(a-hat‖uniform)."""

    def value(self, flow: ReducedFlow, state: Modes) -> RealScalar:
        return reverse_kl_from_uniform(logs(flow, state)[0])

    def parts(self, flow: ReducedFlow, state: Modes) -> Parts:
        at = fitness(flow, state)
        return _pairwise(at, _share_products(at) * _gaps(at))

    def proven(self, num_classes: int, depth: float | int) -> bool:
        return num_classes == 2 or depth == 0 or (num_classes == 4 and depth == 1)


class UniformDistance(AbstractLyapunov):
    """V = M = Σ(a-hat_i - 1/(K-1))²/2 (P2 eq. 12)."""

    def value(self, flow: ReducedFlow, state: Modes) -> RealScalar:
        return uniform_distance(logs(flow, state)[0])

    def parts(self, flow: ReducedFlow, state: Modes) -> Parts:
        at = fitness(flow, state)
        return _pairwise(at, _share_products(at) * _share_differences(at))

    def proven(self, num_classes: int, depth: float | int) -> bool:
        return num_classes == 2 or depth == 0 or (num_classes == 4 and depth == 1)


class ETFDistance(AbstractLyapunov):
    """V = M-tilde = ‖Z/‖Z‖_F - S/‖S‖_F‖_F² (P1 eq. 61, P2 B.3.2)."""

    def value(self, flow: ReducedFlow, state: Modes) -> RealScalar:
        return etf_distance_from_log(logs(flow, state)[0])

    def parts(self, flow: ReducedFlow, state: Modes) -> Parts:
        at = fitness(flow, state)
        size = at.share.shape[0]
        cosine = 1 / jnp.sqrt(size * jnp.sum(at.share**2))
        weights = _share_products(at) * _share_differences(at)
        return _pairwise(at, 2 * size * cosine**3 * weights)

    def proven(self, num_classes: int, depth: float | int) -> bool:
        return UniformDistance().proven(num_classes, depth)


class LogRatio(AbstractLyapunov):
    """V = max(log a) - min(log a), +inf (and without a rate, NaN) once a mode is zero.

    The rate is the one-sided one, to the future: among modes that tie, the fastest
    becomes the largest, the slowest the smallest.
    """

    def value(self, flow: ReducedFlow, state: Modes) -> RealScalar:
        return log_ratio(logs(flow, state)[0])

    def parts(self, flow: ReducedFlow, state: Modes) -> Parts:
        """b_i - b_j term against term, and the rest b_j (a_i^p - a_j^p)."""
        at = fitness(flow, state)
        u, d = at.log_ratios, at.deviation
        top = jnp.argmax(jnp.where(u == jnp.max(u), d, -jnp.inf))
        bottom = jnp.argmin(jnp.where(u == jnp.min(u), d, jnp.inf))
        size = u.shape[0]
        psi = jnp.asarray(psi_matrix(size + 1), u.dtype)
        # Each has K/4 of the terms, 2 e^{-m}, to itself; all pairs have equal weight.
        gains = psi[top] * (2 - psi[bottom]) / 4
        losses = psi[bottom] * (2 - psi[top]) / 4
        pairs = gains[:, None] * losses[None, :] * (8 / (size + 1)) * at.factor[top]
        differences = at.weight[:, None] - at.weight[None, :]
        errors = at.weight_error[:, None] + at.weight_error[None, :]
        ratio = jnp.expm1(-jnp.abs(at.power) * (u[top] - u[bottom]))
        larger = jnp.maximum(at.factor[top], at.factor[bottom])
        lift = -jnp.sign(at.power) * larger * ratio
        parts = jnp.append(jnp.ravel(pairs * differences), at.b[bottom] * lift)
        parts = jnp.where(u[bottom] == -jnp.inf, jnp.nan, parts)
        error = jnp.sum(pairs * errors)
        error = error + jnp.abs(lift) * jnp.sum(psi[bottom] * at.weight_error)
        return _parts(at, parts, error)

    def proven(self, num_classes: int, depth: float | int) -> bool:
        return num_classes == 2 or (num_classes <= 8 and depth <= 1)


class LogLoss(AbstractLyapunov):
    """V = log log D, the logarithm of the loss of one example."""

    def value(self, flow: ReducedFlow, state: Modes) -> RealScalar:
        return flow.log_loss(state)

    def parts(self, flow: ReducedFlow, state: Modes) -> Parts:
        """D log D/dt = -Σ (b_i/D) a_i f_i, of which b_i/D = f_i a_i^{-p}."""
        at = fitness(flow, state)
        # log D is S = D - 1 but for a factor.
        odds = jnp.exp(at.log_sum)
        small = odds < 1e-20
        odds = jnp.where(small, 1, odds)
        log_factor = jnp.where(small, 0, jnp.log(jnp.log1p(odds) / odds))
        log_unit = at.log_speed_over_sum - log_factor
        alive = at.log_ratios > -jnp.inf
        log_a = jnp.where(alive, at.log_ratios, 0) + at.log_reference
        # At infinite depth a factor of 0 would meet log 0.
        exponents = jnp.where(alive, (1 - at.power) * log_a, -jnp.inf) + log_unit
        # In front of the sum; f is of order one where it counts.
        largest = jnp.max(exponents)
        parts = -(at.f**2) * jnp.exp(exponents - largest)
        return _parts(at, parts, _margin_error(at, parts), log_unit=largest)

    def proven(self, num_classes: int, depth: float | int) -> bool:
        del num_classes, depth
        return True


class SmoothedMargin(AbstractLyapunov):
    """V = -γ, γ = q/‖θ‖^{L+1} the `smoothed_parameter_margin` of all K examples.

    With S = D - 1, H >= 0 the entropy of e^{-m}/S, c = K S/((1+S)(1 - D^{-K})) >= 1,
    r = (D^K - 1)/(KS) >= 1, and expectations under weights a_i^{2/(L+1)},

        dγ/dt·‖θ‖^{L+1} = n E[f²]/E[f] + q Var[f]/E[f],    q = -log(D^K - 1),
        n = (c - 1)(H - log S) + H + log K + log r,

    so that γ rises wherever q > 0, where the summed loss K log D is below log 2: Lyu &
    Li (2019), without an inequality. Their theorem says nothing elsewhere. The depth
    must be finite (NaN if not).
    """

    def value(self, flow: ReducedFlow, state: Modes) -> RealScalar:
        at = fitness(flow, state)
        log_loss = flow.log_loss(state) + math.log(state.shape[0] + 1)
        depth = (1 + at.power) / (1 - at.power)
        return -smoothed_parameter_margin(log_loss, _log_parameter_norm(at), depth)

    def parts(self, flow: ReducedFlow, state: Modes) -> Parts:
        at = fitness(flow, state)
        margin, surplus = _margin_terms(at.margins)
        weights = jax.nn.softmax((1 - at.power) * at.log_ratios)
        mean = jnp.sum(weights * at.f)
        squares = (at.deviation[:, None] - at.deviation[None, :]) ** 2
        products = weights[:, None] * weights[None, :]
        spread = 0.5 * margin * products * squares / mean
        growth = surplus * jnp.sum(weights * at.f**2) / mean
        parts = -jnp.append(jnp.ravel(spread), growth)
        parts = jnp.where(at.power < 1, parts, jnp.nan)
        log_power = 2 / (1 - at.power) * _log_parameter_norm(at)
        error = _margin_error(at, parts)
        found = _parts(at, parts, error, log_unit=-log_power)
        return eqx.tree_at(lambda p: p.applies, found, margin > 0)

    def proven(self, num_classes: int, depth: float | int) -> bool:
        del num_classes
        return math.isfinite(depth)


def _margin_terms(margins: Modes) -> tuple[RealScalar, RealScalar]:
    """Returns q and n of `SmoothedMargin` from m."""
    size = margins.shape[0]
    num_classes = size + 1
    log_sum = jax.nn.logsumexp(-margins)
    log_shares = jax.nn.log_softmax(-margins)
    entropy = -jnp.sum(jnp.exp(log_shares) * log_shares)
    lam = jnp.log1p(jnp.exp(log_sum))  # log D
    counts = jnp.arange(num_classes, dtype=margins.dtype)
    # (1 - D^{-K})/(1 - 1/D) = Σ_j D^{-j}: c - 1 as a ratio of positive sums.
    decays = jnp.exp(-counts * lam)
    excess = jnp.sum(-jnp.expm1(-counts * lam)) / jnp.sum(decays)
    log_classes = math.log(num_classes)
    total = num_classes * lam
    # log(D^K - 1) where D^K may overflow, and where it is nearly 1.
    large = total > 1
    low = jnp.where(large, 0, lam)
    log_ratio_low = jnp.log1p(jnp.mean(jnp.expm1(counts * low)))
    high = jnp.where(large, total, 1)
    log_ratio_high = high + jnp.log(-jnp.expm1(-high)) - log_classes - log_sum
    log_r = jnp.where(large, log_ratio_high, log_ratio_low)
    surplus = excess * (entropy - log_sum) + entropy + log_classes + log_r
    return -log_sum - log_classes - log_r, surplus


def _log_parameter_norm(at: Fitness) -> RealScalar:
    """Returns log ‖θ‖ of the balanced model, log ‖Z‖_F at depth 0 (P1 D.3, n = 1).

    Its L+1 = 2/(1-p) layers share singular values (K a_i)^{1/(L+1)}.
    """
    exponent = 1 - at.power
    log_unit = at.log_reference + math.log(at.log_ratios.shape[0] + 1)
    log_squares = jnp.log(2 / exponent) + jax.nn.logsumexp(exponent * at.log_ratios)
    return 0.5 * (log_squares + exponent * log_unit)


def _pairwise(at: Fitness, weights: Float[Array, "modes modes"]) -> Parts:
    """Σ_{i<j} c_ij (f_i - f_j), c antisymmetric, every pair in two halves."""
    differences = at.deviation[:, None] - at.deviation[None, :]
    errors = at.deviation_error[:, None] + at.deviation_error[None, :]
    parts = 0.5 * jnp.ravel(weights * differences)
    return _parts(at, parts, 0.5 * jnp.sum(jnp.abs(weights) * errors))


def _parts(at: Fitness, parts, error, log_unit: RealScalar | float = 0.0) -> Parts:
    """Adds the rounding of a-hat, of weights, and of the sum to `error`."""
    eps = float(jnp.finfo(parts.dtype).eps)
    alive = at.log_ratios > -jnp.inf
    spread = jnp.max(jnp.where(alive, jnp.max(at.log_ratios) - at.log_ratios, 0))
    roundings = (parts.shape[0] + 4 * at.log_ratios.shape[0] + 40) * (1 + spread) * eps
    return Parts(
        parts=parts,
        growth=at.growth,
        log_growth_speed=at.log_speed,
        log_unit=jnp.asarray(log_unit, parts.dtype),
        error=error + roundings * jnp.sum(jnp.abs(parts)),
        applies=jnp.ones((), bool),
    )


def _margin_error(at: Fitness, parts) -> RealScalar:
    """Of parts in which e^{-m} stands as a factor, so that m's roundings count."""
    eps = float(jnp.finfo(parts.dtype).eps)
    size = at.log_ratios.shape[0]
    return (size + 9) * eps * (1 + jnp.max(at.margins)) * jnp.sum(jnp.abs(parts))


def _gaps(at: Fitness) -> Float[Array, "modes modes"]:
    """log(a_i/a_j), finite also for modes that are zero."""
    u = jnp.maximum(at.log_ratios, -1e30)
    return u[:, None] - u[None, :]


def _share_differences(at: Fitness) -> Float[Array, "modes modes"]:
    """a-hat_i - a-hat_j, exact for nearly equal modes."""
    gaps = _gaps(at)
    larger = jnp.maximum(at.share[:, None], at.share[None, :])
    return -jnp.sign(gaps) * larger * jnp.expm1(-jnp.abs(gaps))


def _share_products(at: Fitness) -> Float[Array, "modes modes"]:
    return at.share[:, None] * at.share[None, :]
