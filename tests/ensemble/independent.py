"""Orbits that share no code with the package: SciPy's DOP853 at 1e-12.

The reduced flow (P1 eq. 6) is written by digit parities, the matrix flow by hand.
Times are reached on s = log(1 + t), norms on s = log ‖a‖_1, where all exponentials
cancel but that of the time.
"""

import functools
import math
from typing import Any

import numpy as np
from scipy.integrate import solve_ivp

TIGHT: dict[str, Any] = {"method": "DOP853", "rtol": 1e-12, "atol": 1e-14}


def _rates(log_a, depth: float):
    """d log a/dt as (log scale, rates)."""
    modes = np.arange(1, len(log_a) + 1)
    psi = np.array([[2.0 * ((i & j).bit_count() % 2) for j in modes.tolist()]
                    for i in modes.tolist()])  # fmt: skip
    margins = psi @ np.exp(log_a)
    weights = np.exp(margins.min() - margins)
    power = 1.0 if math.isinf(depth) else (depth - 1) / (depth + 1)
    # At depth 1 a zero stays zero all the same.
    rates = np.where(np.isneginf(log_a), 0, psi @ weights * np.exp(power * log_a))
    log_partition = np.log1p(np.exp(-margins.min()) * weights.sum())
    return -margins.min() - log_partition, rates


def reduced_to_time(log_a, depth: float, log_times) -> np.ndarray:
    """Returns log a at rising log t, one row each."""

    def velocity(s, u):
        log_scale, rates = _rates(_with_zeros(log_a, u), depth)
        return (math.exp(log_scale + s) * rates)[alive]

    log_a = np.asarray(log_a)
    alive = np.isfinite(log_a)
    ends = np.logaddexp(0, np.atleast_1d(log_times))
    done = solve_ivp(velocity, (0, ends[-1]), log_a[alive], t_eval=ends, **TIGHT)
    return np.stack([_with_zeros(log_a, u) for u in done.y.T])


def reduced_to_norm(log_a, depth: float, norm: float) -> tuple[np.ndarray, float]:
    """Returns log a where its norm is `norm`, and log t there."""

    def velocity(_, y):
        u = _with_zeros(log_a, y[:-1])
        log_scale, rates = _rates(u, depth)
        a = np.exp(u)
        growth = a @ rates / a.sum()
        return np.append(rates[alive] / growth, np.exp(-log_scale) / growth)

    log_a = np.asarray(log_a)
    alive = np.isfinite(log_a)
    span = np.log(np.exp(log_a).sum()), math.log(norm)
    start = np.append(log_a[alive], 0.0)
    end = solve_ivp(velocity, span, start, **TIGHT).y[:, -1]
    return _with_zeros(log_a, end[:-1]), math.log(end[-1])


def _with_zeros(log_a, values):
    u = np.full_like(log_a, -np.inf)
    u[np.isfinite(log_a)] = values
    return u


def matrices_at(head, hidden, features, labels, time: float) -> list[np.ndarray]:
    """Returns (W_L, W_{L-1}, ..., W_1, H) of the cross-entropy's flow at `time`."""
    start = [np.asarray(m) for m in (head, *hidden[::-1], features)]
    splits = np.cumsum([m.size for m in start])[:-1]

    def unpack(y):
        return [p.reshape(m.shape) for p, m in zip(np.split(y, splits), start)]

    def velocity(_, y):
        factors = unpack(y)
        logits = functools.reduce(np.matmul, factors)
        odds = np.exp(logits - logits.max(axis=0))
        residual = -odds / odds.sum(axis=0)
        residual[labels, np.arange(len(labels))] += 1
        moves = []
        for i, factor in enumerate(factors):
            left = functools.reduce(np.matmul, factors[:i], np.eye(len(start[0])))
            right = functools.reduce(np.matmul, factors[i + 1 :], np.eye(len(factor.T)))
            moves.append(left.T @ residual @ right.T)
        return np.concatenate([m.ravel() for m in moves])

    y = np.concatenate([m.ravel() for m in start])
    return unpack(solve_ivp(velocity, (0, time), y, **TIGHT).y[:, -1])
