"""`solve`: one flow on one clock to one stop."""

from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array

from .._types import State
from ._assemble import Observe, assemble
from ._check import check_solve, checked_rtol, default_solver
from ._clock import AbstractClock, LogTime
from ._flow import AbstractFlow
from ._gradient_flow import GradientFlow
from ._leg import follow
from ._path import Path
from ._saves import Saves
from ._segment import Method
from ._stop import AbstractStop


def solve(
    flow: AbstractFlow,
    y0: State,
    *,
    stop: AbstractStop,
    clock: AbstractClock | None = None,
    saves: Saves = 200,
    observe: Observe | None = None,
    keep_states: bool | None = None,
    solver: diffrax.AbstractSolver | None = None,
    rtol: float | None = None,
    max_steps: int = 100_000,
    adjoint: diffrax.AbstractAdjoint | None = None,
) -> Path:
    """Integrates `flow` from `y0` at time 0 until `stop`.

    **Arguments:**

    - `y0`: the start: a `DeepUFM` for `GradientFlow`; log a for `HadamardFlow` and
        `SigmoidalFlow`; alpha, (L+1, modes), for the layerwise flows; a for
        `LogitFlow`; Z for `LogitMatrixFlow`.
    - `stop`: `FinalTime`, `FinalNorm` or `LogLossBelow`.
    - `clock`: what the integration steps in; `LogTime()` if `None`. The orbit is the
        same under every clock.
    - `saves`: the number of saved points, equal steps of the clock, where the stop
        fixes the clock's end (`FinalTime` on `PhysicalTime` and `LogTime`, `FinalNorm`
        of a reduced flow on `LogNorm`); otherwise a `SaveEvery`; or a `SaveAt` with
        the readings themselves. The first is the start.
    - `observe`: `observe(flow, log_time, state) -> dict` of arrays, called at every
        saved point; `ufm.metrics` is the standard one.
    - `keep_states`: whether to keep the states at the saved points; by default for all
        but `GradientFlow` (a state of d = 100, L = 10 takes 0.8 MB).
    - `solver`: a diffrax solver; `default_solver(flow, clock)` if `None`.
    - `rtol`: the largest relative error of a step, as the flow measures it: of any
        single value in the flows of modes, of any layer's Frobenius norm in the full
        one, of ‖Z‖_F in that of the logits. If `None`, 1e-7 for the full flow, 1e-6 for
        that with activations, 1e-8 for all others; 1e-5 in float32.
    - `max_steps`: step budget, rejected steps included; each phase of a
        `PiecewiseConstant` has its own.
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
    if keep_states is None:
        keep_states = not isinstance(flow, GradientFlow)
    # Strongly typed, or a start like `jnp.full(3, 0.5)` would be compiled for apart.
    y0 = jax.tree.map(lambda leaf: jnp.asarray(leaf, leaf.dtype), y0)
    method = make_method(
        flow, y0, stop, clock, saves, solver, rtol, max_steps, adjoint,
        wants_states=keep_states or observe is not None,
    )  # fmt: skip
    return _solve(flow, y0, method, observe, keep_states)


@eqx.filter_jit
def _solve(flow, y0, method: Method, observe, keep_states: bool) -> Path:
    return assemble(flow, follow(flow, y0, method), observe, keep_states)


def make_method(
    flow: AbstractFlow,
    y0: State,
    stop: AbstractStop,
    clock: AbstractClock | None,
    saves: Saves | None,
    solver: diffrax.AbstractSolver | None,
    rtol: float | None,
    max_steps: int,
    adjoint: diffrax.AbstractAdjoint | None = None,
    *,
    wants_states: bool,
) -> Method:
    """Returns the options of `solve`, defaults filled in."""
    clock = LogTime() if clock is None else clock
    solver = default_solver(flow, clock) if solver is None else solver
    dtype = jnp.result_type(*jax.tree.leaves(y0))
    rtol = checked_rtol(rtol, flow, dtype)
    floor = 400 * float(jnp.finfo(dtype).eps)
    return Method(
        stop=stop,
        clock=clock,
        saves=saves,
        solver=_with_stage_solver(solver, max(rtol, floor)),
        rtol=jnp.asarray(rtol, dtype),
        max_steps=max_steps,
        adjoint=diffrax.RecursiveCheckpointAdjoint() if adjoint is None else adjoint,
        wants_states=wants_states,
    )


def _with_stage_solver(solver: diffrax.AbstractSolver, rtol: float):
    """Gives an implicit solver a root finder that converges at rates of 10^6.

    diffrax's default linearises once a step, and its test of convergence stalls on
    rounding noise where the scale of the unknowns is far above the tolerance. Here the
    stages (of order one: log a and x) are linearised one by one and solved to a
    hundredth of the tolerance, absolute below one and relative above. On K = 16 to
    ‖a‖ = 1e6 this rejects none of 742 steps; the default gave up. A root finder of the
    user's own is left alone.
    """
    if not isinstance(solver, diffrax.AbstractImplicitSolver):
        return solver
    finder = solver.root_finder
    # A placeholder where `diffeqsolve` would fill in the controller's tolerance.
    unset = not isinstance(getattr(finder, "rtol", 0.0), float | Array)
    if not (unset or isinstance(finder, diffrax.VeryChord)):
        return solver
    # An array, so that another tolerance needs no other program.
    kappa: Any = jnp.asarray(0.01 * rtol)
    finder = optx.Chord(rtol=1.0, atol=1.0, kappa=kappa)
    return eqx.tree_at(lambda s: s.root_finder, solver, finder)
