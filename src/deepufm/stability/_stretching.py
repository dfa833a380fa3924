"""Finite-time stretching: how much an orbit's perturbations have grown by a reading.

The singular values of the tangent propagator from the start to a reading s,

    M(s) = Q(s) R_s ... R_2 R_1 Q(0)^T,

the largest of which is what the worst perturbation of the start is stretched by, its
right singular vector that perturbation (Eckhardt & Yao 1993). R_i are the triangles of
`lyapunov_exponents`; perturbations are measured as there.

The product is never formed: its entries range over more than a float does. It is kept
as D·U, log D the sums of log R_jj and U triangular with ones on the diagonal, of
ordinary size. One-sided Jacobi rotations on the columns of U^T D, kept as unit vectors
and logarithms of lengths, then give all singular values to a relative accuracy that
does not depend on D (Demmel & Veselić 1992).
"""

from dataclasses import dataclass

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from .._types import PRNGKey, State
from ..dynamics import AbstractClock, AbstractFlow, AbstractStop, Outcome
from ._lyapunov_exponents import lyapunov_exponents

_MAX_SWEEPS = 60
_EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class Stretching:
    """What perturbations of a start have become, at each of some clock readings.

    - `readings`, `log_times`, `log_norms`, (segments,): where. Only what was reached.
    - `log_stretching`, (segments, unknowns): natural logarithms of the propagator's
        singular values, falling. Divided by `readings` they are finite-time exponents.
    - `directions`, of the structure of the state with a leading axis `segments`: the
        perturbation of the start that is stretched most, of length 1. Relative to the
        norm, where the state is no logarithm.
    - `resolved`: whether all growth factors are known to a percent (`rtol` and the
        number of segments allowing).
    - `outcome`: how the solve ended.
    """

    readings: np.ndarray
    log_times: np.ndarray
    log_norms: np.ndarray
    log_stretching: np.ndarray
    directions: State
    resolved: bool
    outcome: Outcome


def finite_time_stretching(
    flow: AbstractFlow,
    y0: State,
    *,
    stop: AbstractStop,
    segments: int,
    clock: AbstractClock | None = None,
    normalised: bool = True,
    key: PRNGKey | None = None,
    solver: diffrax.AbstractSolver | None = None,
    rtol: float | None = None,
    max_steps: int = 100_000,
) -> Stretching:
    """Returns the singular values of the tangent propagator along an orbit.

    **Arguments:** as in `lyapunov_exponents`, whose vectors at the start here span all
    unknowns, so that neither they nor `key` change the result.

    **Returns:** `Stretching`, from the start to the end of each segment.

    **Raises:** `ValueError` as `lyapunov_exponents`.

    **Reference:** Eckhardt & Yao, Physica D 65 (1993): local Lyapunov exponents.

    !!! example
        found = ufm.finite_time_stretching(
            ufm.HadamardFlow(8, 2), log_a, stop=ufm.FinalTime(1e6), segments=50
        )
        found.log_stretching[:, 0]  # of the worst perturbation, reading by reading
    """
    found = lyapunov_exponents(
        flow, y0, stop=stop, segments=segments, clock=clock, normalised=normalised,
        key=key, solver=solver, rtol=rtol, max_steps=max_steps,
    )  # fmt: skip
    done = int(found.num_segments)
    growth = np.asarray(found.growth, float)[:done]
    triangles = np.asarray(found.triangles, float)[:done]
    basis = np.asarray(found.initial_vectors, float)
    logs, worst = _stretch(growth, triangles)
    _, unravel = ravel_pytree(found.final)
    directions = jnp.asarray(worst @ basis, found.initial_vectors.dtype)
    return Stretching(
        readings=np.asarray(found.readings)[:done],
        log_times=np.asarray(found.log_times)[:done],
        log_norms=np.asarray(found.log_norms)[:done],
        log_stretching=logs,
        directions=jax.vmap(unravel)(directions),
        resolved=bool(np.all(np.asarray(found.resolved)[:done])),
        outcome=found.outcome,
    )


def _stretch(
    growth: np.ndarray, triangles: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns log singular values, and the right vectors of the largest, by segment."""
    segments, count = growth.shape
    logs, upper = np.zeros(count), np.eye(count)
    values, worst = np.empty((segments, count)), np.empty((segments, count))
    for i in range(segments):
        # Row a of D^-1 R D is R_ab/R_aa · D_b/D_a, of the D before this segment.
        ratios = np.triu(logs[None, :] - logs[:, None])
        upper = np.triu(triangles[i] * np.exp(ratios)) @ upper
        logs = logs + growth[i]
        values[i], units = log_singular_values(upper.T, logs)
        worst[i] = units[:, 0]
    return values, worst


def log_singular_values(
    columns: np.ndarray, log_scales: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns log singular values of G = columns·exp(diag(log_scales)), falling.

    One-sided Jacobi: columns are turned in pairs until all are orthogonal. With lengths
    e^l and e^(l') of a pair, r = e^(l' - l) <= 1 and cosine c, the rotation has the
    tangent r·x, x = 2c/((1 - r²) + √((1 - r²)² + 4r²c²)), and is

        w <- w + r² x w',    w' <- w' - x w    (unit vectors, before the cosine),

    where nothing under- or overflows.

    **Returns:** the logarithms, and the left singular vectors of G as columns.
    """
    lengths = np.linalg.norm(columns, axis=0)
    units, logs = columns / lengths, log_scales + np.log(lengths)
    count = units.shape[1]
    for _ in range(_MAX_SWEEPS):
        worst = 0.0
        for i in range(count):
            for j in range(i + 1, count):
                a, b = (i, j) if logs[i] >= logs[j] else (j, i)
                cosine = float(units[:, a] @ units[:, b])
                worst = max(worst, abs(cosine))
                if abs(cosine) > _EPS:
                    _rotate(units, logs, a, b, cosine)
        if worst <= count * _EPS:
            break
    order = np.argsort(-logs, kind="stable")
    return logs[order], units[:, order]


def _rotate(units: np.ndarray, logs: np.ndarray, a: int, b: int, cosine: float) -> None:
    """Makes two columns orthogonal, of which `a` is the longer."""
    ratio = np.exp(logs[b] - logs[a])
    gap = 1 - ratio**2
    turn = 2 * cosine / (gap + np.hypot(gap, 2 * ratio * cosine))
    first = units[:, a] + ratio**2 * turn * units[:, b]
    second = units[:, b] - turn * units[:, a]
    log_cosine = -0.5 * np.log1p((ratio * turn) ** 2)
    for column, index in ((first, a), (second, b)):
        length = np.linalg.norm(column)
        units[:, index] = column / length
        logs[index] += np.log(length) + log_cosine
