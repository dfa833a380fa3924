"""One leg of an orbit, one step at a time, from outside: for many members at once.

`_leg` hands a leg to `diffeqsolve`. Here the same steps, chosen by the same controller,
are taken by diffrax's solvers one by one, so that `ensemble` can hold several members
side by side and replace each as it finishes. All functions are for one member, and are
mapped over lanes.

What differs from `_leg`: a stop that no reading is known for is the end of the step
that landed on it (to rounding), where `_leg` interpolates over what is left; and only
the next two save points are in view.
"""

import diffrax
import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._types import BoolScalar, IntScalar, RealScalar
from ._flow import AbstractFlow
from ._path import Outcome, SolveStats
from ._saves import save_time
from ._segment import Method, Point, Segment, controller, final_reading, plan

# The largest number of roundings between the end and a step that counts as reaching it.
_CLOSE = 100


class Lane(eqx.Module):
    """A member under way in a leg: a step from `before` to `after` is next."""

    segment: Segment
    inner: tuple  # the state that is integrated, at `before`
    before: RealScalar
    after: RealScalar
    solver_state: PyTree
    controller_state: PyTree
    num_steps: IntScalar
    num_accepted: IntScalar
    row: IntScalar  # of the next save
    result: diffrax.RESULTS
    running: BoolScalar


class Trial(eqx.Module):
    """What a solver makes of a step."""

    inner: tuple
    error: tuple
    solver_state: PyTree
    result: diffrax.RESULTS


class Ending(eqx.Module):
    """Where a leg ended, and how."""

    last: Point
    outcome: Outcome
    stats: SolveStats
    done: BoolScalar  # the stop was met, and not just a switch


def begin(
    flow: AbstractFlow,
    start: Point,
    method: Method,
    row: IntScalar,
    log_switch: RealScalar | None = None,
) -> Lane:
    """Returns the lane at `start`; `flow` is that of the phase that `log_switch` ends.

    **Arguments:** `row`, that of the next save.
    """
    # Later phases start elsewhere, but the only clocks that know the end of a flow in
    # phases are those of time, which do not ask where (`LogNorm` is refused there).
    final = final_reading(flow, start.state, method)
    segment, inner = plan(flow, start, method, final, log_switch)
    term = _term(segment)
    chooser = controller(segment, method, _landings(segment, method, row))
    solver = method.solver
    after, controller_state = chooser.init(
        term, segment.start, segment.end, inner, None, None, solver.func,
        _error_order(segment, method),
    )  # fmt: skip
    after = jnp.minimum(after, segment.end)
    zero = jnp.asarray(0)
    return Lane(
        segment=segment,
        inner=inner,
        before=segment.start,
        after=after,
        solver_state=solver.init(term, segment.start, after, inner, None),
        controller_state=controller_state,
        num_steps=zero,
        num_accepted=zero,
        row=row,
        result=diffrax.RESULTS.successful,
        running=segment.moves,
    )


def attempt(lane: Lane, method: Method) -> Trial:
    """Takes the step."""
    inner, error, _, solver_state, result = method.solver.step(
        _term(lane.segment), lane.before, lane.after, lane.inner, None,
        lane.solver_state, False,
    )  # fmt: skip
    assert error is not None  # refused by the controller's `init`
    return Trial(inner, error, solver_state, result)


def attempt_lanes(lanes: Lane, method: Method) -> Trial:
    """Takes the steps of many lanes, last, with an explicit method, and no mapping.

    The arithmetic of the stages broadcasts over lanes, and the flow takes them
    (`AbstractFlow.takes_lanes`): half the time of `vmap(attempt)`, which puts lanes
    first.
    """
    with jax.numpy_rank_promotion("allow"):
        trial = attempt(lanes, method)

    def spread(new, old):
        return jnp.broadcast_to(new, old.shape)

    return Trial(
        trial.inner,
        trial.error,
        jax.tree.map(spread, trial.solver_state, lanes.solver_state),
        jax.tree.map(spread, trial.result, lanes.result),
    )


def advance(lane: Lane, trial: Trial, method: Method) -> tuple[Lane, BoolScalar]:
    """Accepts or rejects a step.

    **Returns:** the lane, unchanged where it was not running; whether it now stands on
    save row `lane.row`.
    """
    segment, results = lane.segment, diffrax.RESULTS
    landings = _landings(segment, method, lane.row)
    chooser = controller(segment, method, landings)
    keep, before, after, _, controller_state, verdict = chooser.adapt_step_size(
        lane.before, lane.after, lane.inner, trial.inner, None, trial.error,
        _error_order(lane.segment, method), lane.controller_state,
    )  # fmt: skip
    keep, before = jnp.asarray(keep), jnp.asarray(before)
    met = jnp.asarray(False)
    if segment.awaits_event:
        assert controller_state.excess is not None
        # As the controller saw it: computed anew it may round to the other side, and
        # the controller would not land a second time.
        met = keep & (controller_state.excess >= 0)
    num_steps = lane.num_steps + 1
    spent = num_steps >= method.max_steps
    over = met | (before >= segment.end)
    result = results.where(keep, trial.result, results.successful)
    result = results.where(result == results.successful, verdict, result)
    okay = result == results.successful
    result = results.where(okay & ~over & spent, results.max_steps_reached, result)
    result = results.where(okay & met, results.event_occurred, result)

    after = _clipped(after, segment.end)
    stepped = Lane(
        segment=segment,
        inner=_choose(keep, trial.inner, lane.inner),
        before=before,
        after=after,
        solver_state=_choose(keep, trial.solver_state, lane.solver_state),
        controller_state=controller_state,
        num_steps=num_steps,
        num_accepted=lane.num_accepted + jnp.where(keep, 1, 0),
        row=lane.row + jnp.where(_lands(keep, lane.after, landings), 1, 0),
        result=result,
        running=okay & ~over & ~spent,
    )
    stepped = _choose(lane.running, stepped, lane)
    return stepped, stepped.row > lane.row


def finish(lane: Lane, method: Method) -> Ending:
    """Returns how a lane that no longer runs ended."""
    segment = lane.segment
    last = here(lane)
    if segment.awaits_event:
        # Their time depends on the start as well, which the steps alone do not see.
        last = eqxi.nondifferentiable(
            last,
            msg="Members that stop at an event, not at a reading of the clock, have no "
            "derivatives in lanes. Use `strategy=Strategy.VMAP`.",
        )
    outcome = segment.outcome(lane.result)
    done = segment.done(method.stop, lane.result, last)
    rejected = lane.num_steps - lane.num_accepted
    stats = SolveStats(lane.num_steps, lane.num_accepted, rejected)
    return Ending(last, outcome, stats, done & (outcome == Outcome.reached))


def here(lane: Lane) -> Point:
    """Returns where a lane is."""
    problem = lane.segment.problem
    log_time = problem.log_time(lane.before, lane.inner)
    return Point(problem.state(lane.inner), log_time, lane.before)


def _error_order(segment: Segment, method: Method) -> float:
    order = method.solver.error_order(_term(segment))
    assert order is not None
    return float(order)


def _term(segment: Segment) -> diffrax.ODETerm:
    return diffrax.ODETerm(segment.problem.vector_field)


def _landings(segment: Segment, method: Method, row: IntScalar):
    """Returns the readings of the next two saves; none where nothing is saved."""
    if method.saves is None:
        return jnp.zeros((0,), segment.end.dtype)
    horizon = jnp.asarray(method.clock.horizon, segment.end.dtype)
    end = horizon if segment.final is None else segment.final
    return save_time(method.saves, end, row + jnp.arange(2))


def _lands(keep: BoolScalar, after: RealScalar, landings) -> BoolScalar:
    return keep & (after == landings[0]) if landings.shape[0] else jnp.asarray(False)


def _clipped(after: RealScalar, end: RealScalar) -> RealScalar:
    near = end - after <= _CLOSE * jnp.finfo(end.dtype).eps * jnp.abs(end)
    return jnp.where(near, end, after)


def _choose(first, a: PyTree, b: PyTree) -> PyTree:
    return jax.tree.map(lambda x, y: jnp.where(first, x, y), a, b)
