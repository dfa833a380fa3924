"""`solve`: one flow on one clock to one stop. The only caller of `diffeqsolve`."""

from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import PyTree

from .._types import State
from ._assemble import Observe, assemble, outcome_of
from ._check import check_solve, checked_rtol, default_solver
from ._clock import AbstractClock, AbstractStateClock, LogTime
from ._controller import RelativeController
from ._crossing import FallingCrossing
from ._flow import AbstractFlow
from ._gradient_flow import GradientFlow
from ._path import Path
from ._problem import Problem, embed
from ._saves import SaveEvery, save_times
from ._stop import AbstractStop


def solve(
    flow: AbstractFlow,
    y0: State,
    *,
    stop: AbstractStop,
    clock: AbstractClock | None = None,
    saves: int | SaveEvery = 200,
    observe: Observe | None = None,
    keep_states: bool | None = None,
    solver: diffrax.AbstractSolver | None = None,
    rtol: float | None = None,
    max_steps: int = 100_000,
    adjoint: diffrax.AbstractAdjoint | None = None,
) -> Path:
    """Integrates `flow` from `y0` at time 0 until `stop`.

    **Arguments:**

    - `y0`: the start: log a, (K-1,), for `HadamardFlow`; a for `LogitFlow`; a `DeepUFM`
        for `GradientFlow`.
    - `stop`: `FinalTime`, `FinalNorm` or `LogLossBelow`.
    - `clock`: what the integration steps in; `LogTime()` if `None`. The orbit is the
        same under every clock.
    - `saves`: the number of saved points, equal steps of the clock, where the stop
        fixes the clock's end (`FinalTime` on `PhysicalTime` and `LogTime`, `FinalNorm`
        of a reduced flow on `LogNorm`); otherwise a `SaveEvery`. The first is the
        start.
    - `observe`: `observe(flow, log_time, state) -> dict` of arrays, called at every
        saved point; `ufm.metrics` is the standard one.
    - `keep_states`: whether to keep the states at the saved points; by default for the
        reduced flows only (a state of d = 100, L = 10 takes 0.8 MB).
    - `solver`: a diffrax solver; `default_solver(flow, clock)` if `None`.
    - `rtol`: the largest relative error of a step, as the flow measures it: of any a_i
        in the reduced flow, of any layer's Frobenius norm in the full one. If `None`,
        1e-8 for the reduced flows and 1e-7 for the full one, 1e-5 in float32.
    - `max_steps`: step budget, rejected steps included.
    - `adjoint`: how to differentiate. `None` is diffrax's `RecursiveCheckpointAdjoint`:
        reverse mode (`grad`, `vjp`). `diffrax.ForwardMode()` gives forward mode (`jvp`,
        `jacfwd`), `diffrax.DirectAdjoint()` both, at a higher cost.

    **Returns:** a `Path`. How it ended is `path.outcome`; nothing is raised on failure,
    and the state reached is always there.

    **Raises:** `ValueError`, before anything is compiled, for a start that does not fit
    the flow, a stop that is already behind it, or options that do not fit each other.

    !!! example
        flow = ufm.HadamardFlow(num_classes=16, depth=2)
        path = ufm.solve(flow, jnp.log(a0), stop=ufm.FinalTime(1e10))
    """
    check_solve(
        flow, y0, stop=stop, clock=clock, saves=saves, solver=solver, rtol=rtol,
        max_steps=max_steps,
    )  # fmt: skip
    clock = LogTime() if clock is None else clock
    solver = default_solver(flow, clock) if solver is None else solver
    dtype = jnp.result_type(*jax.tree.leaves(y0))
    rtol = checked_rtol(rtol, flow, dtype)
    solver = _with_stage_solver(solver, max(rtol, 400 * float(jnp.finfo(dtype).eps)))
    if keep_states is None:
        keep_states = not isinstance(flow, GradientFlow)
    adjoint = diffrax.RecursiveCheckpointAdjoint() if adjoint is None else adjoint
    # Strongly typed, or a start like `jnp.full(3, 0.5)` would be compiled for apart.
    y0 = jax.tree.map(lambda leaf: jnp.asarray(leaf, leaf.dtype), y0)
    return _solve(
        flow, y0, stop, clock, saves, observe, keep_states, solver,
        jnp.asarray(rtol, dtype), max_steps, adjoint,
    )  # fmt: skip


@eqx.filter_jit
def _solve(
    flow, y0, stop, clock, saves, observe, keep_states, solver, rtol, max_steps, adjoint
) -> Path:
    problem, inner = embed(flow, clock, y0)
    dtype = jnp.result_type(*jax.tree.leaves(y0))
    start = jnp.zeros((), dtype)
    end = stop.final_reading(flow, clock, y0)
    event = excess = None
    if end is None:
        excess = _excess(problem, stop)
        event = _event(excess)
        behind = stop.excess(flow, jnp.asarray(-jnp.inf, dtype), y0) >= 0
        end = jnp.where(behind, 0, clock.horizon)
    end = jnp.maximum(end.astype(dtype), start)
    times = save_times(saves, end)

    # Time clocks know log t from the reading; nothing else may be wanted of a state.
    needed = keep_states or observe is not None or isinstance(clock, AbstractStateClock)
    saved = diffrax.SubSaveAt(ts=times, fn=_state if needed else _nothing)
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(problem.vector_field),
        solver,
        t0=start,
        t1=end,
        dt0=None,
        y0=inner,
        saveat=diffrax.SaveAt(subs=[saved, diffrax.SubSaveAt(t1=True)]),
        stepsize_controller=RelativeController(
            problem.relative_error,
            rtol,
            times,
            excess=excess,
            **_pid_coefficients(solver),
        ),
        adjoint=adjoint,
        event=event,
        max_steps=max_steps,
        throw=False,
    )
    outcome = outcome_of(solution.result, event is not None, end)
    return assemble(problem, observe, keep_states, solution, outcome)


def _excess(problem: Problem, stop: AbstractStop):
    def excess(t, y):
        return stop.excess(problem.flow, problem.log_time(t, y), problem.state(y))

    return excess


def _event(excess) -> diffrax.Event:
    def shortfall(t, y, args, **kwargs):
        del args, kwargs
        # diffrax wants events in the default type, also of a float32 state.
        return -excess(t, y).astype(float)

    return diffrax.Event(shortfall, FallingCrossing(), direction=False)


def _state(t, y, args) -> PyTree:
    del t, args
    return y


def _nothing(t, y, args) -> None:
    del t, y, args


def _with_stage_solver(solver: diffrax.AbstractSolver, rtol: float):
    """Gives an implicit solver a root finder that converges at rates of 10^6.

    diffrax's default linearises once a step, and its test of convergence stalls on
    rounding noise where the scale of the unknowns is far above the tolerance. Here the
    stages (of order one: log a and x) are linearised one by one and solved to a
    hundredth of the tolerance, absolute below one and relative above. On K = 16 to
    ‖a‖ = 1e6 this rejects 25 steps of 1,491; the default gave up. A root finder of the
    user's own is left alone.
    """
    implicit = isinstance(solver, diffrax.AbstractImplicitSolver)
    if not implicit or not isinstance(solver.root_finder, diffrax.VeryChord):
        return solver
    # An array, so that another tolerance needs no other program.
    kappa: Any = jnp.asarray(0.01 * rtol)
    finder = optx.Chord(rtol=1.0, atol=1.0, kappa=kappa)
    return eqx.tree_at(lambda s: s.root_finder, solver, finder)


def _pid_coefficients(solver: diffrax.AbstractSolver) -> dict[str, float]:
    """PI control for explicit methods, which run at their stability limit late on."""
    if isinstance(solver, diffrax.AbstractImplicitSolver):
        return {}
    return {"pcoeff": 0.2, "icoeff": 0.4}
