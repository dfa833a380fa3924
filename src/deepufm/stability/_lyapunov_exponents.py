"""Lyapunov exponents of an orbit by tangent vectors and QR, on any clock.

k tangent vectors are carried along the orbit (`TangentFlow`). At the end of each of
many segments of the clock they are orthonormalised, V = QR, and go on as Q; the growth
of the j-th is the sum of log R_jj (Benettin et al. 1980), and the exponents are

    lambda_j(s) = (1/s) · sum of log R_jj up to the reading s,

a running estimate at every reading. Units are those of the clock: per unit of t
(`PhysicalTime`), of log(1 + t/t0) (`LogTime`), of log norm (`LogNorm`), of path.

`normalised` (the default) asks about the direction y/‖y‖, two orbits being compared
where their norms are equal. A vector then stands for all that differ from it by a
multiple of the flow's direction f, and is measured after a projection along f:

    w = v - f <∇log norm, v>/<∇log norm, f>,    so that <∇log norm, w> = 0,

as it is where the state is log a (then w = d log a-hat), divided by the norm otherwise.
There is one exponent fewer than unknowns. Otherwise orbits are compared at equal time,
and a perturbation along the flow counts as well (an exponent of 0 on `PhysicalTime`, if
the orbit neither rests nor diverges).

A factor R_jj is known relative to the length of the whole j-th vector: where that is
far more than R_jj, by the flow's faster growing directions, digits are lost
(`cancellation`). Shorter segments lose fewer.
"""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float

from .._types import IntScalar, PRNGKey, RealScalar, State, Tracer
from ..dynamics import (
    AbstractClock,
    AbstractFlow,
    AbstractLayerwiseFlow,
    AbstractStop,
    AbstractTimeClock,
    GradientFlow,
    LogTime,
    Method,
    Outcome,
    Point,
    SaveEvery,
    TangentFlow,
    TangentState,
    check_solve,
    dead_level,
    default_solver,
    is_dead,
    make_method,
    one_leg,
    schedule_of,
    solve,
)

Vectors = Float[Array, "exponents unknowns"]
# A growth factor is taken for known if its relative error is below this.
_KNOWN = 0.01
# Powers of the smallest normal number, 2e-308: shorter vectors have squares that
# underflow, and near it vectors stand still, since what changes them is flushed to 0.
_SHORTEST = 0.42


class LyapunovExponents(eqx.Module):
    """Growth rates of perturbations along an orbit, and how they were come by.

    Rows are the ends of segments; those that were not reached hold NaN.

    - `exponents`: the last running estimate, per unit of the clock's reading, in the
        order of the vectors: falling, once these have turned.
    - `running`: the estimate at every reading.
    - `growth`: log R_jj of every segment alone.
    - `triangles`: R of every segment, with unit diagonal: row i is R_ij/R_ii.
    - `cancellation`: log of ‖v_j‖/R_jj at the ends. The relative error of R_jj is about
        rtol·exp(cancellation).
    - `resolved`: whether that is below 0.01 for all j.
    - `readings`, `log_times`, `log_norms`: where the ends are.
    - `num_segments`: how many were done.
    - `outcome`: `reached`, or why a segment was not done; also `non_finite` where a
        vector shrank by more than 1e-130 within one (take more segments), or the norm
        stood still at its end.
    - `initial_vectors`, `final_vectors`: Q, a vector a row, in the flat order of the
        state; relative to the norm, where the state is no logarithm.
    - `final`: the state at the last end.
    """

    exponents: Float[Array, "*batch exponents"]
    running: Float[Array, "*batch segments exponents"]
    growth: Float[Array, "*batch segments exponents"]
    triangles: Float[Array, "*batch segments exponents exponents"]
    cancellation: Float[Array, "*batch segments exponents"]
    resolved: Bool[Array, "*batch segments"]
    readings: Float[Array, "*batch segments"]
    log_times: Float[Array, "*batch segments"]
    log_norms: Float[Array, "*batch segments"]
    num_segments: IntScalar
    outcome: Outcome
    initial_vectors: Float[Array, "*batch exponents unknowns"]
    final_vectors: Float[Array, "*batch exponents unknowns"]
    final: State


def lyapunov_exponents(
    flow: AbstractFlow,
    y0: State,
    *,
    stop: AbstractStop,
    segments: int,
    clock: AbstractClock | None = None,
    num_exponents: int | None = None,
    normalised: bool = True,
    key: PRNGKey | None = None,
    solver: diffrax.AbstractSolver | None = None,
    rtol: float | None = None,
    max_steps: int = 100_000,
) -> LyapunovExponents:
    """Estimates the Lyapunov exponents of the orbit from `y0` to `stop`.

    **Arguments:**

    - `flow`, `y0`, `stop`, `clock`, `solver`, `rtol`: as in `solve`. Where the clock
        does not know its reading at the stop, the orbit is followed once to find out.
    - `segments`: the number of equal parts of the clock's way, at whose ends vectors
        are orthonormalised and estimates given.
    - `num_exponents`: k, the first ones; all if `None`, one fewer than unknowns if
        `normalised`. Modes at zero (log a = -inf) are no unknowns. The cost of a step
        is about k + 1 (explicit) steps of the flow, or (k + 1)³ (implicit).
    - `normalised`: whether perturbations are those of the direction y/‖y‖. The flow's
        norm must then be of degree one in y, or the state be log a.
    - `key`: of the random vectors at the start; `jax.random.key(0)` if `None`.
    - `max_steps`: step budget of each segment.

    **Returns:** `LyapunovExponents`. Nothing is raised on failure: `outcome` says how
    it ended, and the segments before are kept.

    **Raises:** `ValueError` as `solve`, and for less than one segment, a number of
    exponents that there is not, flows with kinks, with parameters that switch, and with
    padded layers.

    **Reference:** Benettin, Galgani, Giorgilli & Strelcyn, Meccanica 15 (1980).

    !!! example
        found = ufm.lyapunov_exponents(
            ufm.HadamardFlow(8, 2), log_a, clock=ufm.LogNorm(),
            stop=ufm.FinalNorm(10.0), segments=20,
        )
    """
    clock = LogTime() if clock is None else clock
    check_solve(
        flow, y0, stop=stop, clock=clock, saves=None, solver=solver, rtol=rtol,
        max_steps=max_steps,
    )  # fmt: skip
    _check_flow(flow)
    if not (isinstance(segments, int) and segments >= 1):
        raise ValueError(
            f"Argument `segments` must be a whole number of at least 1, but is "
            f"{segments}. Exponents "
            "want many: vectors are orthonormalised at the end of each."
        )
    y0 = jax.tree.map(lambda leaf: jnp.asarray(leaf, leaf.dtype), y0)
    if flow.log_state and isinstance(y0, Tracer):
        # How many exponents there are must not depend on values.
        dead = jnp.any(is_dead(y0))
        y0 = eqx.error_if(y0, dead, "Traced states must have no dead modes (-inf).")
    moving = _moving(flow, y0)
    most = int(np.sum(moving)) - int(normalised)
    count = most if num_exponents is None else num_exponents
    if not 1 <= count <= most:
        raise ValueError(
            f"There are {most} exponents here"
            f"{' (one fewer than unknowns: `normalised`)' if normalised else ''}, of "
            f"which `num_exponents` must ask for at least 1, but it is {num_exponents}."
        )
    solver = default_solver(flow, clock) if solver is None else solver
    method = make_method(
        flow, y0, stop, clock, None, solver, rtol, max_steps, wants_states=False
    )
    end, outcome = _end(flow, y0, method, rtol)
    key = jax.random.key(0) if key is None else key
    draw = jax.random.normal(key, (count, moving.size), end.dtype)
    draw = draw * jnp.asarray(moving, end.dtype)[None, :]
    return _run(flow, y0, draw, method, end, outcome, segments, normalised)


def _check_flow(flow: AbstractFlow) -> None:
    TangentFlow(flow)  # refuses kinks
    if schedule_of(flow) is not None:
        raise ValueError(
            "Exponents are those of one autonomous flow, but a parameter of this one "
            "switches (PiecewiseConstant). Take `flow.at(log_time)`."
        )
    layered = isinstance(flow, GradientFlow | AbstractLayerwiseFlow)
    if layered and flow.depth is not None:
        raise ValueError(
            "Padded layers never move and have no exponents. Take the model without "
            "padding, and no `depth=` of the flow."
        )


def _moving(flow: AbstractFlow, y0: State) -> np.ndarray:
    """Returns which unknowns move; a traced state is taken to have no dead modes."""
    leaves = jax.tree.leaves(y0)
    if not flow.log_state or any(isinstance(leaf, Tracer) for leaf in leaves):
        return np.ones(sum(leaf.size for leaf in leaves), bool)
    return ~np.asarray(is_dead(leaves[0])).ravel()


def _end(
    flow: AbstractFlow, y0: State, method: Method, rtol: float | None
) -> tuple[RealScalar, Outcome]:
    """Returns the reading at the stop; what was reached, where it was not."""
    dtype = jnp.result_type(*jax.tree.leaves(y0))
    end = method.stop.final_reading(flow, method.clock, y0)
    if end is not None:
        return end.astype(dtype), Outcome.reached
    path = solve(
        flow, y0, stop=method.stop, clock=method.clock, rtol=rtol,
        saves=SaveEvery(method.clock.horizon, 1), keep_states=False,
        solver=method.solver, max_steps=method.max_steps,
    )  # fmt: skip
    return path.final_reading, path.outcome


@eqx.filter_jit
def _run(
    flow: AbstractFlow,
    y0: State,
    draw: Vectors,
    method: Method,
    end: RealScalar,
    outcome: Outcome,
    segments: int,
    normalised: bool,
) -> LyapunovExponents:
    """Goes from segment to segment; all share one compiled integration."""
    tangent = TangentFlow(flow, transverse=normalised)
    dtype = end.dtype
    _, unravel = ravel_pytree(y0)
    if flow.log_state:
        y0 = jnp.maximum(y0, dead_level(dtype))
    basis, _ = _orthonormal(_measured(flow, y0, draw, normalised))

    def segment(carry, edges):
        point, vectors, over, outcome = carry
        before, after = edges
        # Of ordinary size here, whatever the norm: the tangent flow is linear.
        start = tangent.start(point.state, jax.vmap(unravel)(vectors))
        leg = one_leg(
            tangent, Point(start, point.log_time, before), method, after,
            jnp.zeros((0,), dtype), over=over,
        )  # fmt: skip
        last: TangentState = leg.last.state
        raw = last.matrix()
        new, triangle = _orthonormal(_measured(flow, last.state, raw, normalised))
        factors = jnp.diagonal(triangle)
        long = factors > jnp.finfo(dtype).tiny ** _SHORTEST
        known = jnp.all(long) & jnp.all(jnp.isfinite(triangle))
        reached = leg.outcome == Outcome.reached
        now = Outcome.where(reached & ~known, Outcome.non_finite, leg.outcome)
        outcome = Outcome.where(over, outcome, now)
        done = reached & known & ~over
        log_time = leg.last.log_time
        if not isinstance(method.clock, AbstractTimeClock):
            log_time = jnp.logaddexp(point.log_time, log_time)  # counted from `before`
        arrived = Point(last.state, log_time, after)
        carry = _choose(done, (arrived, new), (point, vectors))
        growth = jnp.log(factors)
        if normalised and not flow.log_state:
            growth = growth - (flow.log_norm(last.state) - flow.log_norm(point.state))
        row = (
            growth,
            triangle / factors[:, None],
            jnp.log(jnp.linalg.norm(raw, axis=1)) - jnp.log(factors),
            after,
            log_time,
            flow.log_norm(last.state),
        )
        row = jax.tree.map(lambda leaf: jnp.where(done, leaf, jnp.nan), row)
        return (*carry, over | ~done, outcome), (done, row)

    origin = Point(y0, jnp.asarray(-jnp.inf, dtype), jnp.zeros((), dtype))
    edges = end * jnp.linspace(0, 1, segments + 1, dtype=dtype)
    begin = (origin, basis, jnp.asarray(False), Outcome.reached)
    carry, (done, rows) = jax.lax.scan(segment, begin, (edges[:-1], edges[1:]))
    point, vectors, _, ended = carry
    growth, triangles, cancellation, readings, log_times, log_norms = rows
    num_segments = jnp.sum(done)
    running = jnp.cumsum(growth, axis=0) / readings[:, None]
    final = point.state
    if flow.log_state:
        final = jnp.where(is_dead(final), -jnp.inf, final)
    found = Outcome.where(outcome == Outcome.reached, ended, outcome)
    return LyapunovExponents(
        exponents=jnp.where(
            num_segments > 0, running[jnp.maximum(num_segments - 1, 0)], jnp.nan
        ),
        running=running,
        growth=growth,
        triangles=triangles,
        cancellation=cancellation,
        resolved=jnp.all(method.rtol * jnp.exp(cancellation) < _KNOWN, axis=1),
        readings=readings,
        log_times=log_times,
        log_norms=log_norms,
        num_segments=num_segments,
        outcome=found,
        initial_vectors=basis,
        final_vectors=vectors,
        final=final,
    )


def _measured(
    flow: AbstractFlow, state: State, vectors: Vectors, normalised: bool
) -> Vectors:
    """Projects vectors along the flow onto those that leave the norm as it is."""
    if not normalised:
        return vectors
    direction, _ = flow(state)
    _, unravel = ravel_pytree(state)
    _, slope = jax.linearize(flow.log_norm, state)
    pace = slope(direction)
    slopes = jax.vmap(lambda vector: slope(unravel(vector)))(vectors)
    return vectors - (slopes / pace)[:, None] * ravel_pytree(direction)[0][None, :]


def _orthonormal(
    vectors: Vectors,
) -> tuple[Vectors, Float[Array, "exponents exponents"]]:
    """Returns Q, a vector a row, and R with a non-negative diagonal."""
    basis, triangle = jnp.linalg.qr(vectors.T)
    signs = jnp.where(jnp.diagonal(triangle) < 0, -1, 1).astype(vectors.dtype)
    return signs[:, None] * basis.T, signs[:, None] * triangle


def _choose(first, a, b):
    return jax.tree.map(lambda x, y: jnp.where(first, x, y), a, b)
