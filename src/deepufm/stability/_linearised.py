"""The linearised regime, ‖a‖_1 << 1: what it does to ratios, how long it lasts.

    da_i/dt = a_i^{1+p} (1 - a_i),    p = (L-1)/(L+1),           (P1 Thm 4.4, P2 Thm 5)

with rates wrong by a relative O(‖a‖_1²). A ratio obeys

    d log(a_i/a_j)/dt = (a_i^p - a_j^p) - (a_i^{1+p} - a_j^{1+p}):

for L > 1 the first difference wins, the rich get richer; at L = 1 it is exactly zero,
and the second one, -(a_i - a_j), makes modes equal.

All modes go through the same values, at different times: mode i is where the leading
one was Δ_i earlier, and Δ_i, the time from a_i(0) to the leading a(0), never changes.
So states are found from the leading mode, not from the time. For starts of size a(0)
the escape takes up a part a(0)^p of all time, and where that is below 1e-16 no t
resolves it; a lag does. Times are natural logarithms: t ~ a(0)^{-p}/p may be e^{5000}.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize
from jaxtyping import Array, Float

from .._types import Modes, RealLike, RealScalar
from ..analysis import effective_rank_from_log
from ..dynamics import (
    FinalNorm,
    HadamardFlow,
    LogNorm,
    Outcome,
    SaveAt,
    SigmoidalFlow,
    checked_depth,
    depth_power,
    solve,
)

_EPS = float(np.finfo(float).eps)
# In place of log 0, so that root finders see numbers.
_LOG_NOTHING = -1e6
# Of the full flow: well below the O(N²) that it is there to measure.
_RTOL = 1e-11


def ratio_growth(
    log_a: Modes, depth: RealLike
) -> tuple[Float[Array, "modes modes"], RealScalar]:
    """Returns (G / exp(log_speed), log_speed), G_ij = d log(a_i/a_j)/dt linearised.

    Exact also for nearly equal modes, and at L = 1, where a_i^p - a_j^p vanishes: both
    differences come from log(a_i/a_j) by `expm1`. G is antisymmetric.

    **Arguments:** `log_a` (K-1,), natural logarithms, below 0; -inf is a mode that is
    zero, which has no ratio (NaN). `depth` real, >= 1 or inf; may be traced.

    **Raises:** `ValueError` for a depth below 1.
    """
    power = depth_power(checked_depth(depth).astype(log_a.dtype))
    zero = log_a == -jnp.inf
    largest = jnp.max(log_a)
    u = jnp.where(zero, largest, log_a)
    larger = jnp.maximum(u[:, None], u[None, :])
    gaps = u[:, None] - u[None, :]
    below = -jnp.abs(gaps)
    # log of the larger of the two coefficients, p and a, of the differences.
    flat = power == 0
    log_power = jnp.where(flat, -jnp.inf, jnp.log(jnp.where(flat, 1, power)))
    log_unit = jnp.maximum(log_power, largest)
    rich = jnp.exp(log_power - log_unit) * _relative_expm1(below, power)
    full = jnp.exp(larger - log_unit) * jnp.expm1((1 + power) * below)
    growth = -jnp.sign(gaps) * jnp.exp(power * (larger - largest)) * (rich - full)
    growth = jnp.where(zero[:, None] | zero[None, :], jnp.nan, growth)
    return growth, power * largest + log_unit


def _relative_expm1(x, power):
    """Returns expm1(p x)/p, x at p = 0."""
    flat = power == 0
    safe = jnp.where(flat, 1, power)
    return jnp.where(flat, x, jnp.expm1(safe * x) / safe)


def rich_get_richer_exponent(depth: RealLike, mode: RealLike = 0.0) -> RealScalar:
    """Returns p - a/(1-a): small differences of equal modes a grow as ‖a‖_1 to this.

    Of log(a_i/a_j), linearised in it as well, in the time log ‖a‖_1. At a -> 0 it is
    p = (L-1)/(L+1): nothing at L = 1, and ever more with depth. The full flow's
    exponent at deep neural collapse is p - a (P1 Thm 4.3), the same to O(a²).

    **Arguments:** `depth` real, >= 1 or inf; `mode` a in [0, 1), each of the K-1.

    **Raises:** `ValueError` for a depth below 1.
    """
    a = jnp.asarray(mode, float)
    return depth_power(checked_depth(depth)) - a / (1 - a)


@dataclass(frozen=True)
class LinearisedExit:
    """Where the linearised regime is left, as it predicts itself.

    - `exit_norm`: ‖a‖_1 at which it ends.
    - `log_time`: natural log of the time spent.
    - `log_a`, (K-1,): natural log of the modes then; -inf for those that are zero.
    """

    exit_norm: float
    log_time: float
    log_a: np.ndarray

    @property
    def effective_rank(self) -> float:
        """Of the modes at exit (P1 eq. 60)."""
        return float(effective_rank_from_log(jnp.asarray(self.log_a)))


def linearised_exit(
    log_a0: Modes | Float[np.ndarray, " modes"],
    depth: float | int,
    exit_norm: float | int,
) -> LinearisedExit:
    """Returns when the linearised flow reaches ‖a‖_1 = `exit_norm`, and the modes then.

    **Arguments:**

    - `log_a0`: the start, (K-1,), natural logarithms, down to e^{-1e5}.
    - `depth`: L >= 1 or inf.
    - `exit_norm`: above ‖a(0)‖_1 and below 1.

    **Returns:** a `LinearisedExit`, exact to rounding.

    **Raises:** `ValueError` for a start or a norm that is none of these.

    !!! example
        linearised_exit(jnp.log(a0), depth=2, exit_norm=0.1).effective_rank
    """
    start = _checked_start(log_a0, depth, exit_norm)
    alive = np.flatnonzero(start > -np.inf)
    log_time = _log_time(depth)
    lead = float(np.max(start))
    lags = [log_time(float(u), lead) for u in start[alive]]
    log_exit = float(np.log(exit_norm))

    def modes_at(leading: float) -> np.ndarray:
        behind = [
            _behind(log_time, leading, float(u), lag)
            for u, lag in zip(start[alive], lags)
        ]
        return np.asarray(behind)

    def excess(leading: float) -> float:
        return _log_sum(modes_at(leading)) - log_exit

    # The largest mode is at most the norm and at least its share.
    low = max(lead, log_exit - float(np.log(alive.size)))
    if excess(low) < 0:
        low = _root(excess, low, log_exit)
    log_a = np.full_like(start, -np.inf)
    log_a[alive] = modes_at(low)
    return LinearisedExit(float(exit_norm), log_time(lead, low), log_a)


def _log_time(depth: float | int) -> Callable[[float, float], float]:
    """Returns the log of the time from one log a to a larger one."""
    flow = SigmoidalFlow.linearised(depth)

    def log_time(start: float, end: float) -> float:
        found = _time_to(flow, jnp.asarray([start]), jnp.asarray([end]))
        return max(float(found[0]), _LOG_NOTHING)

    return log_time


@jax.jit
def _time_to(flow: SigmoidalFlow, start: Modes, end: Modes) -> Modes:
    return flow.log_time_to(start, end)


def _behind(log_time, leading: float, start: float, lag: float) -> float:
    """Returns log a of the mode that the leading one is ahead of by e^lag."""

    def late(u: float) -> float:
        return log_time(u, leading) - lag

    # It has grown, and has not overtaken; either may hold to the last bit only.
    if late(start) <= 0:
        return start
    if late(leading) >= 0:
        return leading
    return _root(late, start, leading)


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    found = scipy.optimize.root_scalar(
        function, bracket=(low, high), method="brentq", xtol=_EPS, rtol=4 * _EPS
    )
    return float(found.root)


def _log_sum(logs: np.ndarray) -> float:
    return float(np.logaddexp.reduce(logs))


@dataclass(frozen=True)
class LinearisedComparison:
    """The full reduced flow beside the linearised one, at the same norms.

    - `exit_norms`, (exits,): ‖a‖_1, rising.
    - `log_a`, `predicted_log_a`, (exits, K-1): natural logs of the modes.
    - `log_time`, `predicted_log_time`, (exits,): natural logs of the times.
    - `ratio_errors`, (exits,): the largest error of a log(a_i/a_j); O(N²).
    - `time_errors`, (exits,): |t/t_predicted - 1|; t is wrong by O(N^{2-p}).
    - `effective_ranks`, `predicted_effective_ranks`, (exits,).
    """

    exit_norms: np.ndarray
    log_a: np.ndarray
    predicted_log_a: np.ndarray
    log_time: np.ndarray
    predicted_log_time: np.ndarray

    @property
    def ratio_errors(self) -> np.ndarray:
        alive = self.log_a[0] > -np.inf
        errors = self.log_a[:, alive] - self.predicted_log_a[:, alive]
        return np.ptp(errors, axis=1)

    @property
    def time_errors(self) -> np.ndarray:
        return np.abs(np.expm1(self.log_time - self.predicted_log_time))

    @property
    def effective_ranks(self) -> np.ndarray:
        return np.asarray(effective_rank_from_log(jnp.asarray(self.log_a)))

    @property
    def predicted_effective_ranks(self) -> np.ndarray:
        return np.asarray(effective_rank_from_log(jnp.asarray(self.predicted_log_a)))


def compare_with_linearised(
    num_classes: int,
    log_a0: Modes | Float[np.ndarray, " modes"],
    depth: float | int,
    exit_norms: Sequence[float | int] | Float[np.ndarray, " exits"],
    *,
    rtol: float | int = _RTOL,
    max_steps: int = 100_000,
) -> LinearisedComparison:
    """Solves the full reduced flow, and compares it with `linearised_exit`.

    **Arguments:**

    - `num_classes`: K, a power of two.
    - `log_a0`, `depth`: as in `linearised_exit`.
    - `exit_norms`: where to compare, rising, from above ‖a(0)‖_1 to below 1.
    - `rtol`, `max_steps`: of `solve`, on the `LogNorm` clock.

    **Returns:** a `LinearisedComparison`.

    **Raises:** `ValueError` as `linearised_exit`, for norms that do not rise, or a
    start that does not fit `num_classes`; `RuntimeError` if the full flow did not get
    there.
    """
    norms = np.asarray(exit_norms, float)
    if norms.ndim != 1 or norms.size == 0 or np.any(np.diff(norms) <= 0):
        raise ValueError(
            f"Argument `exit_norms` must hold rising norms, but is {exit_norms}."
        )
    start = _checked_start(log_a0, depth, float(norms[0]))
    _checked_start(log_a0, depth, float(norms[-1]))
    readings = np.log(norms) - _log_sum(start)
    path = solve(
        HadamardFlow(num_classes, depth),
        jnp.asarray(start),
        # A little beyond, so that the last reading is passed whatever the rounding.
        stop=FinalNorm(1.001 * float(norms[-1])),
        clock=LogNorm(),
        saves=SaveAt(jnp.asarray(readings)),
        # Of high order for its tolerance; below a norm of 1 nothing is stiff.
        solver=diffrax.Dopri8(),
        rtol=rtol,
        max_steps=max_steps,
    )
    if path.outcome != Outcome.reached or path.state is None:
        raise RuntimeError(f"The full flow did not reach ‖a‖_1 = {norms[-1]}: {path}")
    exits = [linearised_exit(start, depth, float(norm)) for norm in norms]
    return LinearisedComparison(
        exit_norms=norms,
        log_a=np.asarray(path.state)[1:],
        predicted_log_a=np.stack([exit.log_a for exit in exits]),
        log_time=np.asarray(path.log_time)[1:],
        predicted_log_time=np.asarray([exit.log_time for exit in exits]),
    )


def _checked_start(log_a0, depth: float | int, exit_norm: float | int) -> np.ndarray:
    """Returns the start as an array, having checked what `linearised_exit` asks."""
    start = np.asarray(log_a0, float)
    if not depth >= 1:
        raise ValueError(f"Argument `depth` must be at least 1, but is {depth}.")
    if start.ndim != 1 or not np.all(start < 0) or np.all(start == -np.inf):
        raise ValueError(
            "Argument `log_a0` must be log a, one entry a mode, with every a_i below 1 "
            f"and one of them positive, but is {log_a0}."
        )
    log_norm = _log_sum(start)
    if not log_norm < np.log(exit_norm) < 0:
        raise ValueError(
            "The norm at the exit must lie between that of the start, e^"
            f"{log_norm:.6g}, and 1, where linearising is wrong, but is {exit_norm}."
        )
    return start
