"""Whether a Lyapunov function falls: along an orbit, and where theorems say it must.

Two tests of an orbit's saved states. The values can rise between two of them, beyond a
tolerance for the solver's error; and the exact rate of any one state can be positive,
beyond its own rounding, which no solver and no spacing of the saves can bring about.
"""

import math
from dataclasses import dataclass

import equinox as eqx
import jax
import numpy as np

from ..dynamics import Path, check_num_classes
from ._lyapunov_functions import AbstractLyapunov, ReducedFlow


@dataclass(frozen=True)
class Monotonicity:
    """A Lyapunov function along an orbit; index k is the k-th saved state.

    - `log_time`, (saves,): natural log of the flow's own time, -inf at the start.
    - `values`, (saves,): V.
    - `rates`, (saves,): dV/d log(sum a), exact.
    - `first_increase`: the first k with V_k - V_{k-1} above tolerance·max(|V_k|,
        |V_{k-1}|); `None` if there is none.
    - `first_rising`: the first k at which the rate is above a bound on its rounding
      error, of those that V's theorem speaks of (the smoothed margin: loss below log
      2); `None` if there is none.
    """

    log_time: np.ndarray
    values: np.ndarray
    rates: np.ndarray
    first_increase: int | None
    first_rising: int | None

    @property
    def monotone(self) -> bool:
        """Whether V falls, or rests, by both tests."""
        return self.first_increase is None and self.first_rising is None

    def __str__(self) -> str:
        if self.monotone:
            return f"never rises at {len(self.values)} saved states"
        told = []
        if self.first_rising is not None:
            told.append(f"rate positive first at state {self.first_rising}")
        if self.first_increase is not None:
            told.append(f"value risen first at state {self.first_increase}")
        return ", ".join(told)


def monotone_along(
    lyapunov: AbstractLyapunov,
    flow: ReducedFlow,
    path: Path,
    tolerance: float | int = 1e-6,
) -> Monotonicity:
    """Follows a Lyapunov function and its exact rate along a solved orbit.

    **Arguments:**

    - `flow`: that of `path`, a `HadamardFlow` or `LogitFlow`.
    - `path`: with saved states.
    - `tolerance`: how much V may rise between two saves, relative to itself. The solver
        is right to about `rtol` in log a; near collapse V is quadratic in log(a_i/a_j),
        and its error is `rtol` over the largest of these.

    **Returns:** a `Monotonicity`.

    **Raises:** `ValueError` for a path without states, a batch of paths, a tolerance
    that is negative, or a function that is not finite on it (the KL divergence and the
    log-ratio of a mode that is zero; the margin at infinite depth).

    !!! example
        path = ufm.solve(flow, log_a, stop=ufm.FinalTime(1e6))
        print(monotone_along(KLDivergence(), flow, path))
    """
    if path.state is None or path.num_saved.ndim:
        raise ValueError(
            "Argument `path` must be one orbit with its states: solve with "
            "`keep_states=True`, and take the members of an ensemble one by one."
        )
    if not tolerance >= 0:
        raise ValueError(
            f"Argument `tolerance` must not be negative, but is {tolerance}."
        )
    values, rates, rising = map(np.array, _along(lyapunov, flow, path.state))
    count = int(path.num_saved)
    values, rates, rising = values[:count], rates[:count], rising[:count]
    if not (np.all(np.isfinite(values)) and np.all(np.isfinite(rates))):
        first = int(np.argmin(np.isfinite(values) & np.isfinite(rates)))
        raise ValueError(
            f"{type(lyapunov).__name__} must be finite along the path, but is "
            f"{values[first]}, with a rate of {rates[first]}, at saved state {first}. "
            "A mode that is zero makes the KL divergence and the log-ratio infinite."
        )
    size = np.maximum(np.abs(values[1:]), np.abs(values[:-1]))
    increases = np.diff(values) > tolerance * size
    return Monotonicity(
        log_time=np.asarray(path.log_time)[:count],
        values=values,
        rates=rates,
        first_increase=_first(np.append(False, increases)),
        first_rising=_first(rising),
    )


@eqx.filter_jit
def _along(lyapunov: AbstractLyapunov, flow: ReducedFlow, states):
    def one(state):
        parts = lyapunov.parts(flow, state)
        rising = parts.applies & (parts.sum > parts.error)
        return lyapunov.value(flow, state), lyapunov.log_norm_rate(flow, state), rising

    return jax.vmap(one)(states)


def _first(flags: np.ndarray) -> int | None:
    return int(np.argmax(flags)) if np.any(flags) else None


def collapse_basin_bound(num_classes: int, norm: float | int) -> float:
    """Returns min(1/(8K²), 1/(18K³N²)): at L = 1 and ‖a‖_1 = N, M falls below it.

    M of P2 eq. 12, `UniformDistance`. Since N grows, falling M does not say that an
    orbit stays below the bound.

    **Arguments:** `num_classes` K, a power of two; `norm` N > 0.

    **Raises:** `ValueError` for another K or norm.

    **Reference:** P2 Thm 7.
    """
    check_num_classes(num_classes)
    if not norm > 0:
        raise ValueError(f"Argument `norm` must be positive, but is {norm}.")
    # N² may overflow, or vanish.
    root = 1 / (math.sqrt(18 * num_classes) * num_classes * norm)
    return min(1 / (8 * num_classes**2), min(root, 1) ** 2)


def ratio_threshold(num_classes: int, depth: float | int) -> float:
    """Returns (K/(K-2))^{(L+1)/(L-1)}: above it γ/δ grows for ever (P1 eq. 51).

    Of the alternating modes (γ, δ, γ, ..., γ), `ufm.alternating_modes`: with p =
    (L-1)/(L+1) their ratio grows exactly where

        (γ/δ)^p > K/(K - 2 + 2 e^{-K(γ-δ)/2}),

    which holds above the threshold at every norm, and only above it as K(γ-δ) -> inf.

    **Arguments:** `num_classes` K, a power of two; `depth` L >= 1 or inf.

    **Returns:** a number above 1; inf at L = 1, at K = 2, where there is no δ, and
    where it exceeds the largest double: see `log_ratio_threshold`.

    **Raises:** `ValueError` for another K or depth.

    **Reference:** P1 eq. 51.
    """
    log_threshold = log_ratio_threshold(num_classes, depth)
    return math.exp(log_threshold) if log_threshold < 709 else math.inf


def log_ratio_threshold(num_classes: int, depth: float | int) -> float:
    """Returns the natural log of `ratio_threshold`, finite for all L > 1 and K > 2."""
    check_num_classes(num_classes)
    if not depth >= 1:
        raise ValueError(f"Argument `depth` must be at least 1, but is {depth}.")
    if depth == 1 or num_classes == 2:
        return math.inf
    inverse_power = 1 + 2 / (depth - 1)
    return -math.log1p(-2 / num_classes) * inverse_power
