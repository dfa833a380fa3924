"""`limit`'s certificate for starts of the reduced flow, at any accuracy, and faster.

A start is judged as `limit` judges it (`approach`); what differs is the integration
between its readings. `limit` keeps log a to 1e-5, which decides which modes die. Next
to the boundary of two basins the integration must not itself choose the side: here
errors are as small as is asked for, down to rounding, and readings go on to larger
norms, where even what began at 1e-12 from a boundary has left it.

SciPy's LSODA through `odeint`, whose loop is not in Python, and a rate in a dozen NumPy
calls: half of `limit`'s time a member, at its accuracy.
"""

import warnings
from dataclasses import dataclass

import numpy as np
import scipy.integrate

from ..analysis import ReducedKKT
from ..limits import LimitStatus, ReducedRoute, approach

# As in `limit`: the norm that is held in the exponentials from there on, and readings.
HELD_FROM = 1e4
_TARGETS = (
    *np.log([3e2, 1e3, HELD_FROM]),
    *(np.log(HELD_FROM) + np.asarray([2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0])),
)
_RESIDUAL = 1e-10
_MAX_STEPS = 100_000


@dataclass(frozen=True)
class Destination:
    """Where a start goes.

    - `direction`: (K-1,), of sum 1; NaN where nothing stationary is in sight.
    - `rank`, `objective`: of the limit, sum of a^q at a least margin of 1; 0 and NaN.
    - `status`: a `LimitStatus`.
    """

    direction: np.ndarray
    rank: int
    objective: float
    status: LimitStatus

    @property
    def certified(self) -> bool:
        """Whether the limit is."""
        return self.status is LimitStatus.CERTIFIED


def destinations(
    num_classes: int, depth: float, log_a: np.ndarray, *, rtol: float = 1e-5
) -> list[Destination]:
    """Returns where starts of the reduced flow go, certified where it can be.

    **Arguments:**

    - `log_a`: natural logarithms of modes, (starts, K-1), of any norm.
    - `rtol`: the error of log a in a step of the integration.
    """
    log_a = np.asarray(log_a, float)
    depths = np.full(len(log_a), float(depth))
    route = PreciseRoute(num_classes, depths, log_a, rtol)
    ends = []
    for finding in approach(route, _RESIDUAL):
        point = finding.point
        if point is None:
            nothing = np.full(num_classes - 1, np.nan)
            ends.append(Destination(nothing, 0, np.nan, finding.status))
            continue
        ends.append(
            Destination(
                route.direction(point),
                point.rank,
                float(getattr(point, "objective", np.nan)),
                finding.status,
            )
        )
    return ends


class PreciseRoute(ReducedRoute):
    """The route of `limit`, integrated at any accuracy."""

    targets = tuple(float(target) for target in _TARGETS)

    def __init__(self, num_classes, depths, log_a, rtol):
        super().__init__(num_classes, depths, log_a)
        self.rtol = rtol
        self.known: dict[tuple, ReducedKKT | None] = {}

    def _vertex(self, member, support, active) -> ReducedKKT | None:
        """Returns the point with these modes and margins; members share what is known.

        Few vertices are many members' limits, and each costs a linear program.
        """
        key = float(self.depths[member]), support.tobytes(), active.tobytes()
        if key not in self.known:
            self.known[key] = super()._vertex(member, support, active)
        return self.known[key]

    def advance(self, target: float, busy: np.ndarray) -> np.ndarray:
        """Integrates the busy members, one by one."""
        arrived = np.zeros(len(busy), bool)
        is_held = bool(target > np.log(HELD_FROM) + 1e-9)
        reached = self.log_norms()
        for i in np.flatnonzero(busy).tolist():
            start = at_norm(self.log_a[i], HELD_FROM) if is_held else self.log_a[i]
            end = integrated(
                start, float(self.depths[i]), target - reached[i], self.psi,
                rtol=self.rtol, is_held=is_held,
            )  # fmt: skip
            if end is None:
                continue
            arrived[i] = True
            self.log_a[i] = at_norm(end, HELD_FROM) if is_held else end
            if is_held:
                self.held[i] = target - np.log(HELD_FROM)
        return arrived


def integrated(
    log_a: np.ndarray,
    depth: float,
    length: float,
    psi: np.ndarray,
    *,
    rtol: float,
    is_held: bool = False,
) -> np.ndarray | None:
    """Returns log a after `length` of the time log ‖a‖_1, None where that failed.

    **Arguments:** `is_held`: keep the norm, and move the direction as if it grew.
    """
    alive = log_a > -np.inf
    columns, power = psi[:, alive], (depth - 1) / (depth + 1)
    norm = float(np.sum(np.exp(log_a[alive])))

    def rate(now, _):
        below = now - now.max()
        share = np.exp(below)
        scale = norm / share.sum() if is_held else np.exp(now.max())
        margins = columns @ (share * scale)
        rates = (np.exp(margins.min() - margins) @ columns) * np.exp(power * below)
        growth = rates * (share.sum() / (share @ rates))
        return growth - 1 if is_held else growth

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", scipy.integrate.ODEintWarning)
        found, report = scipy.integrate.odeint(
            rate, log_a[alive], (0.0, length), rtol=rtol, atol=rtol,
            mxstep=_MAX_STEPS, full_output=True,
        )  # fmt: skip
    if report["message"] != "Integration successful." or not np.all(np.isfinite(found)):
        return None
    end = np.full_like(log_a, -np.inf)
    end[alive] = found[-1]
    return end


def at_norm(log_a: np.ndarray, norm: float) -> np.ndarray:
    """Returns log a rescaled to a 1-norm."""
    return log_a + (np.log(norm) - np.logaddexp.reduce(log_a))
