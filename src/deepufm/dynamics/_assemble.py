"""From diffrax's solution to a `Path`."""

from collections.abc import Callable
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from .._types import RealScalar
from ._flow import AbstractFlow
from ._path import Outcome, Path, SolveStats

Observe = Callable[[AbstractFlow, RealScalar, Any], dict[str, Array]]


def assemble(problem, observe, keep_states, solution, outcome: Outcome) -> Path:
    """Builds the `Path`; rows that were not reached become NaN.

    `observe` is mapped over the saved states and the last one after the solve, not
    called inside it: it is compiled once, and a batch of solves does not run it for
    all members whenever one of them saves.
    """
    (readings, last_readings), (inners, last_inners) = solution.ts, solution.ys
    written = jnp.isfinite(readings)
    # The start is saved with the first step; without one it is the last state.
    saved = written.at[0].set(True)
    saved = saved.at[1:].set(saved[1:] & (readings[1:] > readings[:-1]))

    def rows(leaf, last):
        # The last state stands in for rows that were not reached, until masked.
        kept = jnp.where(_as_rows(written, leaf), leaf, last)
        return jnp.concatenate([kept, last])

    def look(point):
        reading, inner = point
        log_time = problem.log_time(reading, inner)
        if observe is None or inner is None:
            return log_time, {}
        return log_time, observe(problem.flow, log_time, problem.state(inner))

    def mask(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            leaf = leaf.astype(float)  # integers have no NaN
        return jnp.where(_as_rows(saved, leaf), leaf[:-1], jnp.nan)

    points = None if inners is None else jax.tree.map(rows, inners, last_inners)
    all_readings = rows(readings, last_readings)
    log_times, observed = jax.lax.map(look, (all_readings, points))
    states = jax.vmap(problem.state)(points) if keep_states else None
    return Path(
        reading=mask(all_readings),
        log_time=mask(log_times),
        state=jax.tree.map(mask, states),
        observables=jax.tree.map(mask, observed),
        num_saved=jnp.sum(saved),
        final=problem.state(jax.tree.map(lambda leaf: leaf[-1], last_inners)),
        final_log_time=log_times[-1],
        final_reading=last_readings[-1],
        final_observables=jax.tree.map(lambda leaf: leaf[-1], observed),
        outcome=outcome,
        stats=SolveStats(
            num_steps=solution.stats["num_steps"],
            num_accepted=solution.stats["num_accepted_steps"],
            num_rejected=solution.stats["num_rejected_steps"],
        ),
    )


def _as_rows(saved: Bool[Array, " saves"], leaf: Array) -> Array:
    """Returns `saved` with the leaf's number of dimensions."""
    return saved.reshape(saved.shape + (1,) * (leaf.ndim - 1))


def outcome_of(result: diffrax.RESULTS, awaited: bool, end: RealScalar) -> Outcome:
    """Translates diffrax's result; `awaited`: the stop was an event."""
    results = diffrax.RESULTS
    # A traced goal may be NaN or lie before the start; nothing was integrated then.
    done = Outcome.where(jnp.isfinite(end), Outcome.reached, Outcome.non_finite)
    if awaited:
        # Success without the event means the horizon, unless the goal held at once.
        done = Outcome.where(end > 0, Outcome.not_met, Outcome.reached)
    outcome = Outcome.where(result == results.successful, done, Outcome.non_finite)
    outcome = Outcome.where(result == results.event_occurred, Outcome.reached, outcome)
    outcome = Outcome.where(
        result == results.max_steps_reached, Outcome.step_budget, outcome
    )
    return Outcome.where(
        result == results.dt_min_reached, Outcome.step_underflow, outcome
    )
