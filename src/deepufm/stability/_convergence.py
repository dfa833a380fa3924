"""Stability measures of attractors: how fast starts come back, how many, how soon.

The attractors of the flows here lie at infinity: directions, reached as ‖a‖ grows for
ever, and in the time s = log ‖a‖_1 they are what fixed points are elsewhere. What
libraries of multistable systems measure, Attractors.jl (Datseris et al.; its
accumulator of stability measures) foremost, is then:

| measure                        | here                                               |
|--------------------------------|----------------------------------------------------|
| characteristic return time     | `return_time` of exponents in log norm, at a norm: |
|                                | it shortens like 1/N for ties, and stays of order  |
|                                | one for dying modes                                |
| reactivity                     | `reactivity`; for DNC, whose Jacobian is           |
|                                | symmetric, the largest exponent                    |
| maximal amplification, and     | `finite_time_stretching`: the growth from one norm |
| when                           | to another; for DNC (N*/N)^p e^{-(N*-N)/(K-1)},    |
|                                | largest at the threshold N*                        |
| basin fraction, basin stability| `basin_fractions`: one number here, as starts are  |
|                                | drawn from a measure that the user gives           |
| finite-time basin stability    | `finite_time_basin`                                |
| minimal critical shock         | `critical_shock` of DNC, an upper bound            |
| maximal and mean noncritical   | none: shocks towards a structure itself are        |
| shock                          | survived up to the edge of the state space, where  |
|                                | modes are zero, so that these measure that edge    |
| convergence time: mean, median,| `convergence_time` of a path; statistics over      |
| maximum                        | paths are NumPy's                                  |
| convergence pace (time over    | the quotient of `convergence_time` and             |
| the start's distance)          | `Limit.start_angle`; `convergence_pace` is the     |
|                                | power of the norm by which the angle falls late,   |
|                                | as directions settle like 1/N and not like e^{-ct} |
| edge states                    | `edge_state`                                       |
| intermingledness of basins     | none: boundaries are smooth where their edge state |
|                                | has one unstable direction, as all that we saw     |
| persistence, tipping under a   | none: a depth does not drift. Differences of       |
| drift of parameters            | `basin_fractions` between two points compare equal |
|                                | starts (start i is the same at every point)        |

Distances are angles between directions, in radians. Norm and time enter as their
natural logarithms.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import scipy.stats

from ..dynamics import AbstractStop, HadamardFlow, Outcome, Path
from ..ensemble import ensemble
from ..geometry import row_angles
from ..limits import Limit, wilson

# Angles below this are differences of rounding.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class FiniteTimeBasin:
    """The share of starts that have come near a direction.

    - `count` of `starts`, as a `fraction`; `low`, `high`: Wilson's interval.
    - `failed`: starts whose integration did not reach the stop, counted as not near.
    """

    count: int
    starts: int
    fraction: float
    low: float
    high: float
    failed: int


@dataclass(frozen=True)
class ConvergenceTime:
    """When the angle to the limit has fallen below a threshold for good.

    - `log_norm`, `log_time`: natural logarithms of ‖a‖_1 and t of the first saved point
        from which on all have a smaller angle; inf where the last one has not.
    - `index`: its number among the saved points; -1 where there is none.
    """

    log_norm: float
    log_time: float
    index: int


@dataclass(frozen=True)
class ConvergencePace:
    """The power of the norm that the angle to the limit falls by.

    - `slope`: d log(angle)/d log ‖a‖_1; -1 where ties sharpen.
    - `standard_error`: of the line fitted to the saved points; it measures how straight
        they are, and is no statistical error, since paths have no noise.
    - `points`: how many were fitted.
    """

    slope: float
    standard_error: float
    points: int


def return_time(exponents) -> float:
    """Returns -1/(largest exponent): the log norm in which a disturbance falls to 1/e.

    **Arguments:** `exponents` of a structure, real or complex, in the time log norm;
    those that stand for super-linear contraction left out, or -inf. Only their real
    parts count.

    **Returns:** a number of e-folds of the norm; inf where a disturbance does not fall.

    **Raises:** `ValueError` for none, or NaN.

    !!! example
        # DNC, K = 8, L = 2 at norm 14: the exponent is 1/3 - 14/7
        ufm.return_time([1/3 - 2])  # 0.6
    """
    real = np.real(np.asarray(exponents))
    if real.size == 0 or np.any(np.isnan(real)):
        raise ValueError(
            "Argument `exponents` must hold a number or more, and no NaN, but is "
            f"{exponents}."
        )
    largest = float(np.max(real))
    return -1 / largest if largest < 0 else np.inf


def finite_time_basin(
    flow: HadamardFlow,
    log_a: np.ndarray,
    directions: np.ndarray,
    *,
    stop: AbstractStop,
    angle: float = 0.1,
    confidence: float = 0.95,
) -> FiniteTimeBasin:
    """Returns the share of starts near a direction at a time or norm.

    It tends to the basin's share as the time grows and then the angle shrinks; before,
    it counts what a user who stops there would see.

    **Arguments:**

    - `flow`: the reduced flow.
    - `log_a`: starts, (starts, K-1), as `mode_starts` draws them.
    - `directions`: (K-1,), or the points of an orbit, (points, K-1), of any scale; near
        any of them counts.
    - `stop`: `FinalTime`, or `FinalNorm`.
    - `angle`: what near means, radians.

    **Raises:** `ValueError` as `ensemble`, and for directions that do not fit.
    """
    points = np.atleast_2d(np.asarray(directions, float))
    if points.ndim != 2 or points.shape[1] != flow.num_classes - 1:
        raise ValueError(
            f"Argument `directions` must have shape ({flow.num_classes - 1},) or "
            f"(points, {flow.num_classes - 1}), but has {np.shape(directions)}."
        )
    if not 0 < angle < np.pi:
        raise ValueError(f"Argument `angle` must be 0 to pi, but is {angle}.")
    path = ensemble(flow, None, jnp.asarray(log_a), stop=stop)
    reached = np.asarray(path.outcome == Outcome.reached)
    now = np.asarray(path.final)
    now = np.exp(now - np.max(now, axis=1, keepdims=True))
    apart = np.stack([row_angles(now, point) for point in points])
    near = reached & np.any(apart < angle, axis=0)  # NaN is not near
    count, total = int(np.sum(near)), len(near)
    low, high = wilson(count, total, confidence)
    failed = int(np.sum(~reached))
    return FiniteTimeBasin(count, total, count / total, low, high, failed)


def convergence_time(
    path: Path, limit: Limit, *, angle: float = 0.1
) -> ConvergenceTime:
    """Returns the log norm and log time from which a path stays near its limit.

    **Arguments:**

    - `path`: of one member of the reduced flow, with saved states.
    - `limit`: its `Limit`, certified.
    - `angle`: the threshold, radians.

    **Raises:** `ValueError` for a limit that is not certified, paths of other flows or
    batches, without saved states, or an angle that is not positive.
    """
    if not angle > 0:
        raise ValueError(f"Argument `angle` must be positive, but is {angle}.")
    log_norm, log_time, apart = _angle_along(path, limit)
    outside = np.flatnonzero(~(apart < angle))
    first = int(outside[-1]) + 1 if outside.size else 0
    if first == len(apart):
        return ConvergenceTime(np.inf, np.inf, -1)
    return ConvergenceTime(float(log_norm[first]), float(log_time[first]), first)


def convergence_pace(
    path: Path, limit: Limit, *, from_log_norm: float | None = None
) -> ConvergencePace:
    """Returns d log(angle)/d log ‖a‖_1 late on a path.

    Ties of margins are sharp to 1/‖a‖, so that the slope is -1 where a limit's
    multipliers differ and nothing else is left to happen. Modes that still die make it
    less steep. To a limit whose multipliers are all equal, as DNC's, angles fall like
    exp(-‖a‖/(K-1)), which is no power: the slope goes on steepening.

    **Arguments:**

    - `path`, `limit`: as in `convergence_time`.
    - `from_log_norm`: the log ‖a‖_1 from which on to fit; `None`: the last e-fold of
        the norm. Points whose angle is rounding, below 1e-12, are left out.

    **Raises:** `ValueError` as `convergence_time`, and with fewer than three points.
    """
    log_norm, _, apart = _angle_along(path, limit)
    seen = apart > _ROUNDING
    last = np.max(log_norm[seen], initial=log_norm[0])
    begin = last - 1 if from_log_norm is None else from_log_norm
    late = (log_norm >= begin) & seen
    if np.sum(late) < 3:
        raise ValueError(
            f"The path has {int(np.sum(late))} saved points from log norm {begin:.4g} "
            "on, but a pace needs three. Save more, or fit from further back."
        )
    line = scipy.stats.linregress(log_norm[late], np.log(apart[late]))
    slope, _, _, _, error = np.asarray(line)
    return ConvergencePace(float(slope), float(error), int(np.sum(late)))


def _angle_along(path: Path, limit: Limit) -> tuple[np.ndarray, ...]:
    """Returns log ‖a‖_1, log t and the angle to the limit at each saved point."""
    if limit.status.ndim or not limit.certified:
        raise ValueError(
            "Argument `limit` must be the certified limit of one member, but is "
            f"{limit}"
        )
    states = None if path.state is None else np.asarray(path.state)
    if states is None or states.ndim != 2 or states.shape[1] != limit.direction.size:
        raise ValueError(
            "Argument `path` must hold the saved states of one member of the reduced "
            "flow, (saves, K-1). Solve with `saves`, and keep the states."
        )
    saved = int(path.num_saved)
    states = states[:saved]
    top = np.max(states, axis=1, keepdims=True)
    log_norm = np.logaddexp.reduce(states, axis=1)
    apart = row_angles(np.exp(states - top), limit.direction)
    return log_norm, np.asarray(path.log_time)[:saved], apart
