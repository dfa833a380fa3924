"""Where training ends: the direction at t = infinity, with a certificate.

A package of its own, after `analysis` and `ensemble`, since limits take both: the
judgement of stationary points and the integration of many members.
"""

from ._approach import approach as approach
from ._basins import Basin as Basin, basins as basins
from ._conditions import (
    IN_SIGHT as IN_SIGHT,
    INVADING_GROWTH as INVADING_GROWTH,
    LARGEST_TIE as LARGEST_TIE,
    LIVING as LIVING,
    NEAR as NEAR,
    RESIDUAL as RESIDUAL,
    RESOLUTION as RESOLUTION,
)
from ._full import (
    is_plain as is_plain,
    least_gaps as least_gaps,
    mean_logits as mean_logits,
)
from ._limit import limit as limit
from ._log_norm_time import (
    HELD_FROM as HELD_FROM,
    at_norm as at_norm,
    followed as followed,
    growth_exponents as growth_exponents,
)
from ._reduced import ReducedRoute as ReducedRoute
from ._result import (
    Limit as Limit,
    LimitStatus as LimitStatus,
    Share as Share,
    wilson as wilson,
)
