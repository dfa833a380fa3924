"""`limit`: the direction that gradient flow tends to, with a certificate."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._types import State
from ..analysis import Verdict, classify
from ..dynamics import AbstractFlow, GradientFlow, HadamardFlow, Path
from ..geometry import angle_between
from ._approach import AbstractRoute, Finding, approach
from ._conditions import RESIDUAL
from ._full import FullRoute, check_flow, checked_means, checked_models, late_means
from ._reduced import ReducedRoute
from ._result import Limit, object_array

# Structures are named once for objectives that agree to this many digits.
_ALIKE = 8
# Limits are known to ten digits: what is further from a structure only resembles it.
_EXACT = 1e-6


def limit(
    flow: AbstractFlow,
    path_or_state: Path | State | np.ndarray,
    *,
    tolerance: float = RESIDUAL,
    name: Callable[[np.ndarray], str] | None = None,
) -> Limit:
    """Returns the direction at t = infinity, certified where it can be.

    The state is followed to larger and larger norms, in the time log norm (full flow:
    as class means of balanced layers), until two readings in a row point to one
    stationary point of P1 eq. 3, a strict local minimum, the angle to it shrinks, and
    no mode that it lacks grows. What is not seen to settle so is not certified, and
    `status` says why. From a norm of 1e4 on that in the exponentials is held, where a
    state may have been rescaled to; modes go on dying.

    The full flow's continuation takes the layers for balanced. They become so as the
    norm grows, but slowly in deep models: what imbalance is left at the state given
    may still turn a flow near the boundary of two basins.

    **Arguments:**

    - `flow`: a `HadamardFlow` of finite depth (one for each member as `jax.vmap` makes
        them, its `depth` a vector), or a linear `GradientFlow` of cross-entropy without
        weight decay and with as many examples in every class.
    - `path_or_state`: a `Path`, of which the final state is taken, or a state; of one
        member, or of a batch with a leading axis. Early states are followed first (from
        very small starts `solve` does it better). Of the full flow also late class
        means of the logits, (K, K) or (members, K, K), with the flow's `depth` given;
        where their least gap is below 50, what they lead to is not certified.
    - `tolerance`: the largest residual of a certified limit.
    - `name`: what to call a structure, from its class-mean logits (K, K), once for all
        of one rank, depth and objective (to 8 digits); by default `classify` does.

    **Returns:** a `Limit`.

    **Raises:** `ValueError` for other flows, for states that do not fit the flow, and
    without float64.

    **Reference:** Lyu & Li 2019 (KKT); P1 sections 3 and 4.

    !!! example
        limit = ufm.limit(flow, ufm.solve(flow, log_a0, stop=ufm.FinalTime(1e10)))
        limit.certified, limit.structure, limit.rank
    """
    if not 0 < tolerance < 1:
        raise ValueError(
            f"Argument `tolerance` must be between 0 and 1, but is {tolerance}."
        )
    if jnp.zeros(()).dtype != jnp.float64:
        raise ValueError(
            "`limit` needs float64: margins of 1e4 are compared to a few units. Set "
            '`jax.config.update("jax_enable_x64", True)`.'
        )
    state = path_or_state
    if isinstance(path_or_state, Path):
        state = path_or_state.final
    route, is_batch = _route(flow, state)
    findings = approach(route, tolerance)
    result = _gathered(findings, route, _named if name is None else name)
    return result if is_batch else result[0]


def _route(flow: AbstractFlow, state) -> tuple[AbstractRoute, bool]:
    """Returns the route for a flow's states, and whether they are a batch."""
    if isinstance(flow, HadamardFlow):
        return _reduced_route(flow, state)
    if isinstance(flow, GradientFlow):
        return _full_route(flow, state)
    raise ValueError(
        "`limit` knows `HadamardFlow` and `GradientFlow`, but the flow is a "
        f"{type(flow).__name__}. Many flows of one kind are one flow made by "
        "`jax.vmap`, as in jax.vmap(lambda L: HadamardFlow(16, L))(depths)."
    )


def _reduced_route(flow: HadamardFlow, state) -> tuple[AbstractRoute, bool]:
    log_a = np.asarray(state, float)
    modes = flow.num_classes - 1
    if log_a.ndim not in (1, 2) or log_a.shape[-1] != modes or not len(log_a):
        raise ValueError(
            f"States of the reduced flow of K = {flow.num_classes} classes have shape "
            f"({modes},) or (members, {modes}), with a member or more, but this has "
            f"{log_a.shape}."
        )
    is_batch = log_a.ndim == 2
    log_a = np.atleast_2d(log_a)
    depths = np.asarray(flow.depth, float)
    if depths.ndim and not (is_batch and depths.shape == (len(log_a),)):
        raise ValueError(
            f"A flow with depths of shape {depths.shape} needs a batch of as many "
            f"states, but their shape is {log_a.shape}."
        )
    depths = np.broadcast_to(depths, (len(log_a),))
    if not np.all(np.isfinite(depths)):
        raise ValueError(
            "`limit` needs a finite depth: at infinite depth the objective counts "
            "modes, and its minima are not isolated."
        )
    wrong = np.any(np.isnan(log_a) | (log_a == np.inf), axis=1)
    wrong |= np.all(log_a == -np.inf, axis=1)
    if np.any(wrong):
        raise ValueError(
            "States must hold log a with every a_i finite and one of them positive, "
            f"but member {int(np.argmax(wrong))} does not. Leave failed members out."
        )
    return ReducedRoute(flow.num_classes, depths, log_a), is_batch


def _full_route(flow: GradientFlow, state) -> tuple[AbstractRoute, bool]:
    check_flow(flow)
    if isinstance(state, np.ndarray | jax.Array):
        means, depth, is_batch = checked_means(flow, np.asarray(state))
        width = means.shape[1]
    else:
        models, is_batch = checked_models(flow, state)
        means, depth = late_means(flow, models), models.depth
        width = models.width
    assert isinstance(flow.per_class, int)
    return FullRoute(means, depth, flow.per_class, width), is_batch


def _named(logits: np.ndarray) -> str:
    """Returns the name of a structure that logits are, not only resemble."""
    found = classify(logits)
    if found.structure is not None and found.distance > _EXACT:
        return f"other (rank {found.rank})"
    return found.name


def _gathered(
    findings: list[Finding], route: AbstractRoute, name: Callable[[np.ndarray], str]
) -> Limit:
    """Returns the findings as arrays, members first."""
    rows = [_row(finding, route, i) for i, finding in enumerate(findings)]
    names: dict[tuple, str] = {}
    for i, (row, finding) in enumerate(zip(rows, findings)):
        point = finding.point
        row["structure"] = ""
        if point is not None:
            alike = point.rank, f"{point.objective:.{_ALIKE}g}", route.depth_of(i)
            if alike not in names:
                names[alike] = name(route.logits(point))
            row["structure"] = names[alike]
    objects = ("verdict", "structure", "status")
    return Limit(
        **{
            key: (object_array if key in objects else np.stack)([r[key] for r in rows])
            for key in rows[0]
        }
    )


def _row(finding: Finding, route: AbstractRoute, member: int) -> dict[str, Any]:
    """Returns one member's fields of `Limit`, but for the structure's name."""
    point = finding.point
    row = {
        "depth": route.depth_of(member),
        "log_norm": finding.log_norm,
        "passed_saddle": finding.passed_saddle(route),
        "status": finding.status,
        "angle": finding.angle,
    }
    if point is None:
        nothing = np.full(route.shape, np.nan)
        numbers = ("objective", "logit_margin", "parameter_margin", "kkt_residual")
        return (
            row
            | dict.fromkeys((*numbers, "start_angle"), np.nan)
            | {
                "direction": nothing,
                "duals": nothing,
                "rank": 0,
                "verdict": Verdict.NOT_STATIONARY,
            }
        )
    depth = route.depth_of(member)
    objective = route.objective(point, member)
    # Of n examples a class the singular values are sqrt(n) times those of the means.
    size = (depth + 1) * objective * route.per_class ** (1 / (depth + 1))
    return row | {
        "direction": route.direction(point),
        "duals": point.duals,
        "rank": point.rank,
        "objective": objective,
        "logit_margin": 1 / np.linalg.norm(route.logits(point)),
        "parameter_margin": size ** (-(depth + 1) / 2),
        "kkt_residual": point.residual,
        "verdict": point.verdict,
        "start_angle": angle_between(finding.start, route.unit(point)),
    }
