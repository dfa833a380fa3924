"""From a followed orbit to a `Path`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from .._types import RealScalar
from ._flow import AbstractFlow
from ._leg import Leg
from ._path import Path
from ._schedule import at_time

Observe = Callable[[AbstractFlow, RealScalar, Any], dict[str, Array]]


def assemble(
    flow: AbstractFlow, leg: Leg, observe: Observe | None, keep_states: bool
) -> Path:
    """Builds the `Path`; rows that were not reached become NaN.

    `observe` is mapped over the saved states and the last one after the solve, not
    called inside it: it is compiled once, and a batch of solves does not run it for
    all members whenever one of them saves.
    """
    last = leg.last

    def rows(leaf, final):
        # The last state stands in for rows that were not reached, until masked.
        kept = jnp.where(_as_rows(leg.written, leaf), leaf, final)
        return jnp.concatenate([kept, final[None]])

    readings = rows(leg.readings, last.reading)
    log_times = rows(leg.log_times, last.log_time)
    # The start is saved with the first step; without one it is the last state.
    saved = leg.written.at[:1].set(True)
    saved = saved.at[1:].set(saved[1:] & (readings[1:-1] > readings[:-2]))

    def look(point):
        log_time, state = point
        if observe is None:
            return {}
        return observe(at_time(flow, log_time), log_time, state)

    def mask(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            leaf = leaf.astype(float)  # integers have no NaN
        return jnp.where(_as_rows(saved, leaf), leaf[:-1], jnp.nan)

    states, observed = None, {}
    if leg.states is not None:
        states = jax.tree.map(rows, leg.states, last.state)
        observed = jax.lax.map(look, (log_times, states))
    return Path(
        reading=mask(readings),
        log_time=mask(log_times),
        state=jax.tree.map(mask, states) if keep_states else None,
        observables=jax.tree.map(mask, observed),
        num_saved=jnp.sum(saved),
        final=last.state,
        final_log_time=last.log_time,
        final_reading=last.reading,
        final_observables=jax.tree.map(lambda leaf: leaf[-1], observed),
        outcome=leg.outcome,
        stats=leg.stats,
    )


def _as_rows(saved: Bool[Array, " saves"], leaf: Array) -> Array:
    """Returns `saved` with the leaf's number of dimensions."""
    return saved.reshape(saved.shape + (1,) * (leaf.ndim - 1))
