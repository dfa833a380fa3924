"""Where starts of the reduced flow go, with `limit`'s certificate, at any accuracy.

`limit` keeps log a to 1e-5, which decides which modes die. Next to the boundary of two
basins the integration must not itself choose the side: here errors are as small as is
asked for, down to rounding, and what began at 1e-12 from a boundary still leaves it, as
readings go on to large norms.
"""

from dataclasses import dataclass

import numpy as np

from ..limits import RESIDUAL, LimitStatus, ReducedRoute, approach


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
    route = ReducedRoute(num_classes, depths, log_a, rtol)
    ends = []
    for finding in approach(route, RESIDUAL):
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
