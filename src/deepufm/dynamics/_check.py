"""What `solve` refuses before anything is compiled, and what it takes by default."""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np

from .._types import State, Tracer
from ._clock import AbstractClock, LogNorm, LogTime
from ._flow import AbstractFlow
from ._gradient_flow import GradientFlow
from ._logit_flow import LogitFlow, LogitMatrixFlow
from ._saves import SaveAt, SaveEvery, Saves
from ._stop import AbstractStop

# An implicit step factors a dense Jacobian: 4000² doubles are 128 MB.
_MAX_IMPLICIT_UNKNOWNS = 4000


def check_solve(
    flow: AbstractFlow,
    y0: State,
    *,
    stop: AbstractStop,
    clock: AbstractClock | None = None,
    saves: Saves | None = 200,
    solver: diffrax.AbstractSolver | None = None,
    rtol: float | None = None,
    max_steps: int = 100_000,
) -> None:
    """Raises the `ValueError` that `solve` would for these arguments.

    Computes no more than the norm and the loss of the start; traced values are not
    looked at.
    """
    clock = LogTime() if clock is None else clock
    _check_kinds(y0, stop, clock, saves)
    flow.check(y0)
    solver = default_solver(flow, clock) if solver is None else solver
    check_options(flow, y0, stop, clock, saves, solver, max_steps)
    checked_rtol(rtol, flow, jnp.result_type(*jax.tree.leaves(y0)))


def default_solver(flow: AbstractFlow, clock: AbstractClock) -> diffrax.AbstractSolver:
    """Returns the solver that `benchmarks/bench_solve.py` found best for this pair.

    - A reduced flow on `LogNorm`: Kvaerno5, implicit, since rates grow like the norm.
        (Below a norm of about 1e3 explicit ones are several times faster.)
    - A reduced flow elsewhere: Dopri8, level with Tsit5 at an error of 1e-4 and ahead
        from 1e-6 on.
    - The full flow: Tsit5. A step's cost there is moving stages of 0.8 MB through
        memory, of which Dopri8 has twice as many: at d = 100 and an error of 1e-6 it
        takes 1.5 (L = 3) to 2 times (L = 10) as long.
    """
    if isinstance(flow, GradientFlow):
        return diffrax.Tsit5()
    if isinstance(clock, LogNorm):
        return diffrax.Kvaerno5()
    return diffrax.Dopri8()


def _check_kinds(y0, stop, clock, saves) -> None:
    """Names an argument of the wrong kind, where jax would say something odd."""
    if not isinstance(stop, AbstractStop):
        raise ValueError(
            f"Argument `stop` must be a stop such as FinalTime(1e8), but is {stop!r}."
        )
    if not isinstance(clock, AbstractClock):
        raise ValueError(
            f"Argument `clock` must be a clock such as LogTime(), but is {clock!r}."
        )
    if not isinstance(saves, SaveEvery | SaveAt | int | np.integer | None):
        raise ValueError(
            "Argument `saves` must be a whole number, a SaveEvery(step, capacity) or a "
            f"SaveAt(readings), but is {saves!r}."
        )
    for leaf in jax.tree.leaves(y0):
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                "The start must hold floating-point arrays, but has one of type "
                f"{dtype or type(leaf).__name__}. Use jnp.asarray(..., float)."
            )


def _check_grows(a) -> None:
    if not isinstance(a, Tracer) and not (
        bool(jnp.all(a >= 0)) and bool(jnp.any(a > 0))
    ):
        raise ValueError(
            "`LogNorm` counts the growth of sum |a|, which needs a start with every "
            "a_i at least 0 and one above it. Use `LogTime` or `ArcLength`."
        )


def _check_nonzero(logits) -> None:
    if not isinstance(logits, Tracer) and not bool(jnp.any(logits != 0)):
        raise ValueError(
            "`LogNorm` counts relative growth, of which logits of zero have none. Use "
            "`LogTime` or `ArcLength`."
        )


def checked_rtol(rtol: float | None, flow: AbstractFlow, dtype) -> float:
    if isinstance(rtol, Tracer):
        raise ValueError("Argument `rtol` must be a number, not a traced value.")
    floor = 10 * float(jnp.finfo(dtype).eps)
    if rtol is None:
        if dtype != jnp.float64:
            return 1e-5
        if not flow.is_smooth:
            return 1e-6
        return 1e-7 if isinstance(flow, GradientFlow) else 1e-8
    if not floor <= rtol < 1:
        raise ValueError(
            f"Argument `rtol` must lie between {floor:.0e} (ten roundings of {dtype}) "
            f"and 1, but is {rtol}. Smaller errors need float64."
        )
    return rtol


def check_options(flow, y0, stop, clock, saves, solver, max_steps) -> None:
    """Raises `ValueError` for options that do not fit each other."""
    if isinstance(clock, LogNorm) and not flow.norm_diverges:
        raise ValueError(
            "`LogNorm` needs a norm that grows for ever, but this flow comes to rest "
            "(MSE), or does so while its weights decay. Use `LogTime`."
        )
    if isinstance(clock, LogNorm):
        if isinstance(flow, LogitFlow):
            _check_grows(y0)
        elif isinstance(flow, LogitMatrixFlow):
            _check_nonzero(y0)
    if max_steps < 1:
        raise ValueError(
            f"Argument `max_steps` must be at least 1, but is {max_steps}."
        )
    leaves = jax.tree.leaves(y0)
    unknowns = sum(leaf.size for leaf in leaves)
    implicit = isinstance(solver, diffrax.AbstractImplicitSolver)
    if implicit and unknowns > _MAX_IMPLICIT_UNKNOWNS:
        raise ValueError(
            f"An implicit solver factors a dense Jacobian, at most "
            f"{_MAX_IMPLICIT_UNKNOWNS}², but this flow has {unknowns} unknowns "
            f"({8e-9 * unknowns**2:.0f} GB). Use an explicit solver such as "
            "diffrax.Dopri8(), or a narrower balanced model of the same rank."
        )
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        fixed = stop.final_reading(flow, clock, y0) is not None
    else:
        fixed = _check_ahead(flow, y0, stop, clock)
    if isinstance(saves, int | np.integer):
        if saves < 2:
            raise ValueError(
                "Argument `saves` counts the start and the end: it must be at least 2, "
                f"but is {saves}."
            )
        if not fixed:
            raise ValueError(
                f"{type(stop).__name__} on {type(clock).__name__} ends at a clock "
                "reading that is not known in advance. Give "
                "`saves=SaveEvery(step, capacity)`, a step of the clock."
            )


def _check_ahead(flow, y0, stop, clock) -> bool:
    """Refuses a stop behind the start; says whether the clock's end is known."""
    end = stop.final_reading(flow, clock, y0)
    if end is not None and not isinstance(end, Tracer) and jnp.isinf(end) and end > 0:
        raise ValueError(
            f"{type(clock).__name__} cannot show that time: it is beyond the largest "
            "float. Use `LogTime`."
        )
    if end is not None and not isinstance(end, Tracer) and not end > 0:
        raise ValueError(_BEHIND.format(stop=type(stop).__name__))
    excess = stop.excess(flow, jnp.asarray(-jnp.inf, jax.tree.leaves(y0)[0].dtype), y0)
    if not isinstance(excess, Tracer) and excess >= 0:
        raise ValueError(_BEHIND.format(stop=type(stop).__name__))
    return end is not None


_BEHIND = (
    "The stop lies before the start: {stop} already holds at the initial state. Choose "
    "a later one, or a smaller start."
)
