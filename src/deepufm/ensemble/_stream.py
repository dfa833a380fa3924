"""Lanes: members integrated side by side, each replaced by the next when it is done.

`vmap` of an integration steps until its slowest member is done, and computes every
member all the while. Here a fixed number of lanes steps together; every few steps
those that are done hand in their results and load the next members that wait. When
none waits and few lanes still run, those few go on in a narrower program: one hard
member among many costs little more than it does alone.

A lane whose member failed is done like any other; no member sees another.

Layout: explicit solvers broadcast over lanes that come last, (modes, lanes), which
takes no transposition and half the time of `vmap`; where the flow does not take lanes,
or the solver is implicit, steps are mapped over lanes that come first.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree

from .._types import IntScalar
from ..dynamics import (
    AbstractFlow,
    AbstractTimeClock,
    Lane,
    Leg,
    Method,
    Outcome,
    Point,
    SolveStats,
    advance,
    at_start,
    attempt,
    attempt_lanes,
    begin,
    finish,
    here,
    num_saves,
    schedule_of,
    with_value,
)
from ._unrolled import Unrolled

# Lanes that are done wait for this many steps at most.
_CHECK_EVERY = 4
# When no member waits and few lanes still run, those go on in a narrower program, of
# this part of the lanes. Native ones are no fewer than are worth it, and one in the
# end: XLA (jaxlib 0.10) does not vectorise exponentials over 2 to 32 lanes on a CPU; a
# step of 16 costs as much as one of 40 (part `widths` of benchmarks/bench_ensemble.py).
# Programs must be compiled: below some number lanes stay.
_SHRINK = 8
_WORTH_IT = 40
_SHRINKABLE = 32


class Members(eqx.Module):
    """All members: leaves lead with the member axis."""

    flows: AbstractFlow
    starts: PyTree

    @property
    def count(self) -> int:
        """How many there are."""
        return jax.tree.leaves(self.starts)[0].shape[0]

    def at(self, index: Int[Array, "..."]) -> "Members":
        """Returns those at `index`; beyond the last, the last."""
        return jax.tree.map(lambda x: x.at[index].get(mode="clip"), self)


class _Results(eqx.Module):
    """What is handed in, one row a member."""

    rows: Point | None  # saved points, (members, saves)
    written: Bool[Array, "members saves"]
    last: Point
    outcome: Outcome
    stats: SolveStats


class _Pool(eqx.Module):
    """The lanes, who is in them, and what was handed in."""

    lanes: Lane
    member: Int[Array, " lanes"]  # the number of members where a lane is empty
    phase: Int[Array, " lanes"]
    stats: SolveStats  # of earlier phases
    waiting: IntScalar  # the next member
    results: _Results
    computed: IntScalar  # lane-steps


class Stream(eqx.Module):
    """How lanes are run: a `Method`, a layout and a number of lanes.

    **Arguments:** `width` the number of lanes; `native` whether steps are taken by
    `attempt_lanes`.
    """

    method: Method
    width: int = eqx.field(static=True)
    native: bool = eqx.field(static=True)

    def __call__(self, members: Members, valid: IntScalar) -> tuple[Leg, IntScalar]:
        """Integrates the first `valid` members.

        **Returns:** their orbits, leading with the member axis; the number of
        lane-steps that were computed, those of lanes that were done included.
        """
        widths = _widths(min(self.width, members.count), self.native)
        pool = self._open(members, valid, widths[0])
        for width, narrower in zip(widths, [*widths[1:], 0]):
            pool = _narrowed(pool, width, members.count, self._axis)
            pool = self._run(pool, members, valid, narrower)
        results = pool.results
        rows = results.rows
        nothing = jnp.zeros(results.written.shape, results.last.reading.dtype)
        leg = Leg(
            written=results.written,
            readings=nothing if rows is None else rows.reading,
            log_times=nothing if rows is None else rows.log_time,
            states=None if rows is None else rows.state,
            last=results.last,
            outcome=results.outcome,
            stats=results.stats,
            done=results.outcome == Outcome.reached,
        )
        return leg, pool.computed

    @property
    def _axis(self) -> int:
        """Where the lanes are in the state of a lane."""
        return -1 if self.native else 0

    def _map(self, function: Callable) -> Callable:
        return jax.vmap(function, in_axes=self._axis, out_axes=self._axis)

    def _run(self, pool: _Pool, members: Members, valid, narrower: int) -> _Pool:
        """Steps until no member waits and no more than `narrower` lanes are busy."""

        def busy(pool: _Pool):
            working = jnp.sum(pool.member < members.count)
            return (pool.waiting < valid) | (working > narrower)

        def steps(pool: _Pool) -> _Pool:
            carry = pool.lanes, pool.results.rows, pool.results.written
            lanes, rows, written = jax.lax.fori_loop(
                0, _CHECK_EVERY, lambda _, c: self._step(pool.member, *c), carry
            )
            results = eqx.tree_at(
                lambda r: (r.rows, r.written),
                pool.results,
                (rows, written),
                is_leaf=lambda x: x is None,
            )
            computed = pool.computed + _CHECK_EVERY * pool.member.shape[0]
            pool = eqx.tree_at(
                lambda p: (p.lanes, p.results, p.computed),
                pool,
                (lanes, results, computed),
            )
            return self._refill(pool, members, valid)

        return jax.lax.while_loop(busy, steps, pool)

    def _step(self, member, lanes: Lane, rows, written):
        """Takes one step in every lane, and saves where one stands on a save point."""
        method = self.method
        if self.native:
            trials = attempt_lanes(lanes, method)
        else:
            trials = jax.vmap(lambda lane: attempt(lane, method))(lanes)
        row = lanes.row
        lanes, saved = self._map(lambda lane, trial: advance(lane, trial, method))(
            lanes, trials
        )
        if written.shape[1] == 0:
            return lanes, rows, written
        to = jnp.where(saved, member, written.shape[0])
        written = written.at[to, row].set(True, mode="drop")
        points = self._kept(self._lead(self._map(here)(lanes)))
        rows = jax.tree.map(
            lambda all_, new: all_.at[to, row].set(new, mode="drop"), rows, points
        )
        return lanes, rows, written

    def _kept(self, points: Point) -> Point:
        """Returns what is wanted of saved points."""
        if self.method.wants_states:
            return points
        return eqx.tree_at(lambda p: p.state, points, None)

    def _lead(self, tree: PyTree) -> PyTree:
        """Returns a tree of lanes with the lane axis first."""
        return jax.tree.map(lambda x: jnp.moveaxis(x, self._axis, 0), tree)

    def _place(self, tree: PyTree) -> PyTree:
        """Returns a tree that leads with lanes with the lane axis where it belongs."""
        return jax.tree.map(lambda x: jnp.moveaxis(x, 0, self._axis), tree)

    def _open(self, members: Members, valid, width: int) -> _Pool:
        """Returns the lanes with the first members, and room for all results."""
        index = jnp.arange(width)
        count, saves = members.count, num_saves(self.method.saves)
        points = jax.vmap(at_start)(members.starts)
        rows = None
        if saves:

            def room(leaf):
                shape = (count, saves, *leaf.shape[1:])
                return jnp.full(shape, jnp.nan, leaf.dtype).at[:, 0].set(leaf)

            rows = jax.tree.map(room, self._kept(points))
        zeros = jnp.zeros((count,), int)
        results = _Results(
            rows=rows,
            written=jnp.zeros((count, saves), bool).at[:, :1].set(True),
            last=jax.vmap(at_start)(members.starts),
            outcome=jax.vmap(lambda _: Outcome.non_finite)(zeros),
            stats=SolveStats(zeros, zeros, zeros),
        )
        zeros = jnp.zeros((width,), int)
        member = jnp.where(index < valid, index, count)
        lanes = self._begin(members, member, zeros, None, None)
        return _Pool(
            lanes=_stopped(lanes, member == count),
            member=member,
            phase=zeros,
            stats=SolveStats(zeros, zeros, zeros),
            waiting=jnp.minimum(width, valid),
            results=results,
            computed=jnp.asarray(0),
        )

    def _begin(self, members: Members, member, phase, points, rows) -> Lane:
        """Returns lanes at the start of `phase`; at t = 0 where `points` is None."""
        here = members.at(member)
        if points is None:
            points = self._place(jax.vmap(at_start)(here.starts))
            rows = jnp.ones_like(member)

        def one(flow, point, row, phase):
            schedule = schedule_of(flow)
            if schedule is None:
                return begin(flow, point, self.method, row)
            dtype = point.reading.dtype
            switch = schedule.log_ends.astype(dtype)[phase]
            now = with_value(flow, schedule.values[phase])
            return begin(now, point, self.method, row, switch)

        axis = self._axis
        return jax.vmap(one, in_axes=(0, axis, 0, 0), out_axes=axis)(
            here.flows, points, rows, phase
        )

    def _refill(self, pool: _Pool, members: Members, valid) -> _Pool:
        """Takes in results of lanes that are done, and gives each its next work."""
        count = members.count
        ended = ~pool.lanes.running & (pool.member < count)
        endings = self._map(lambda lane: finish(lane, self.method))(pool.lanes)
        stats = jax.tree.map(
            lambda a, b: a + jnp.where(ended, b, 0), pool.stats, endings.stats
        )
        schedule = schedule_of(members.flows)
        last_phase = 0 if schedule is None else schedule.log_switches.shape[-1]
        reached = endings.outcome == Outcome.reached
        goes_on = ended & reached & ~endings.done & (pool.phase < last_phase)
        leaves = ended & ~goes_on
        results = _handed_in(
            pool.results, jnp.where(leaves, pool.member, count),
            self._lead(endings.last), endings.outcome, stats,
        )  # fmt: skip

        free = leaves | (pool.member >= count)
        new = pool.waiting + jnp.cumsum(free) - 1
        loads = free & (new < valid)
        member = jnp.where(free, jnp.where(loads, new, count), pool.member)
        phase = jnp.where(loads, 0, jnp.where(goes_on, pool.phase + 1, pool.phase))
        starts = self._place(jax.vmap(at_start)(members.at(member).starts))
        points = _where(loads, starts, endings.last, self._axis)
        row = jnp.where(loads, 1, pool.lanes.row)
        lanes = self._begin(members, member, phase, points, row)
        lanes = _where(loads | goes_on, lanes, pool.lanes, self._axis)
        return _Pool(
            lanes=_stopped(lanes, member == count),
            member=member,
            phase=phase,
            stats=jax.tree.map(lambda x: jnp.where(free, 0, x), stats),
            waiting=jnp.minimum(pool.waiting + jnp.sum(free), valid),
            results=results,
            computed=pool.computed,
        )


def _widths(width: int, native: bool) -> list[int]:
    """Returns the numbers of lanes of the programs, one after the other."""
    if width < _SHRINKABLE:
        return [width]
    if not native:
        return [width, width // _SHRINK]
    narrower = [max(width // _SHRINK, _WORTH_IT)] if width >= 2 * _WORTH_IT else []
    return [width, *narrower, 1]


def _handed_in(results: _Results, to, last: Point, outcome, stats) -> _Results:
    """Writes the results of lanes to the rows `to` of their members."""
    new = (last, outcome, stats)
    old = (results.last, results.outcome, results.stats)
    last, outcome, stats = jax.tree.map(
        lambda all_, x: all_.at[to].set(x, mode="drop"), old, new
    )
    return _Results(results.rows, results.written, last, outcome, stats)


def _narrowed(pool: _Pool, width: int, count: int, axis: int) -> _Pool:
    """Returns the pool with its busy lanes in the first `width`, which hold them."""
    if pool.member.shape[0] == width:
        return pool
    order = jnp.argsort(pool.member >= count, stable=True)[:width]
    lanes = jax.tree.map(lambda x: jnp.take(x, order, axis=axis), pool.lanes)
    member, phase, stats = jax.tree.map(
        lambda x: x[order], (pool.member, pool.phase, pool.stats)
    )
    return _Pool(lanes, member, phase, stats, pool.waiting, pool.results, pool.computed)


def _stopped(lanes: Lane, empty) -> Lane:
    return eqx.tree_at(lambda x: x.running, lanes, lanes.running & ~empty)


def _where(mask, a: PyTree, b: PyTree, axis: int) -> PyTree:
    """Chooses lane by lane."""

    def choose(x, y):
        shape = (1,) * (x.ndim - 1)
        shape = (*shape, -1) if axis == -1 else (-1, *shape)
        return jnp.where(mask.reshape(shape), x, y)

    return jax.tree.map(choose, a, b)


def for_lanes(method: Method, unrolled: bool) -> Method:
    """Returns a method whose steps have forward-mode derivatives, and are quick.

    Left to itself diffrax scans over stages in a way that has reverse mode alone.
    """
    if unrolled:
        solver = Unrolled(cast(diffrax.AbstractERK, method.solver))
        return eqx.tree_at(lambda m: m.solver, method, solver)
    if getattr(method.solver, "scan_kind", "lax") is not None:
        return method
    solver = dataclasses.replace(cast(Any, method.solver), scan_kind="lax")
    return eqx.tree_at(lambda m: m.solver, method, solver)


def is_native(flow: AbstractFlow, method: Method) -> bool:
    """Returns whether the steps of this flow broadcast over lanes."""
    explicit = isinstance(method.solver, diffrax.AbstractERK) and isinstance(
        method.solver.tableau, diffrax.ButcherTableau
    )
    timed = isinstance(method.clock, AbstractTimeClock)
    return explicit and timed and flow.takes_lanes
