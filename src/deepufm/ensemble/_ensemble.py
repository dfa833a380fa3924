"""`ensemble`: many members of one flow, each to its own end."""

import enum
import functools
from collections.abc import Callable, Sequence

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from .._types import Device, IntScalar, State, Tracer
from ..dynamics import (
    AbstractClock,
    AbstractFlow,
    AbstractStop,
    GradientFlow,
    Leg,
    Method,
    Observe,
    Path,
    Saves,
    assemble,
    check_solve,
    follow,
    make_method,
    num_saves,
)
from ._compiling import compiled
from ._spread import over_cores, over_devices
from ._stream import Members, Stream, for_lanes, is_native


class Strategy(enum.Enum):
    """How members share a device."""

    LANES = "lanes"  # side by side, each replaced by the next when it is done
    VMAP = "vmap"  # all side by side until the slowest is done; differentiable
    MAP = "map"  # one after the other (`lax.map`)


class Share(eqx.Module):
    """What one device does with its share of the members."""

    method: Method
    strategy: Strategy = eqx.field(static=True)
    width: int = eqx.field(static=True)
    observe: Observe | None = eqx.field(static=True)
    keep_states: bool = eqx.field(static=True)
    platform: str = eqx.field(static=True)

    def __call__(
        self, members: Members, valid: IntScalar
    ) -> tuple[Path, Int[Array, " members"]]:
        """Integrates the first `valid` members.

        **Returns:** their paths, and for each the number of lane-steps that were
        computed in all (0 where lanes were not used).
        """

        def whole(member):
            leg = follow(member.flows, member.starts, self.method)
            return self._path(member.flows, leg)

        none = jnp.zeros((members.count,), int)
        if self.strategy is not Strategy.LANES:
            mapped = jax.vmap(whole)
            if self.strategy is Strategy.MAP:
                mapped = functools.partial(jax.lax.map, whole)
            return _if_any(valid, mapped, members), none

        native = is_native(members.flows, self.method)
        method = for_lanes(self.method, native and self.platform == "cpu")
        stream = Stream(method, self.width, native)
        legs, computed = stream(members, valid)
        legs = members.flows, legs
        if self.observe is None:
            paths = jax.vmap(self._path)(*legs)
        else:
            # Metrics of all states at once would take many times the states' memory.
            paths = _in_batches(lambda leg: self._path(*leg), legs, self.width)
        return paths, jnp.broadcast_to(computed, none.shape)

    def _path(self, flow: AbstractFlow, leg: Leg) -> Path:
        return assemble(flow, leg, self.observe, self.keep_states)


def ensemble(
    flow_of: Callable[..., AbstractFlow] | AbstractFlow,
    params: PyTree,
    y0: State,
    *,
    stop: AbstractStop,
    clock: AbstractClock | None = None,
    saves: Saves | None = None,
    observe: Observe | None = None,
    keep_states: bool | None = None,
    solver: diffrax.AbstractSolver | None = None,
    rtol: float | None = None,
    max_steps: int = 100_000,
    lanes: int | None = None,
    strategy: Strategy | None = None,
    devices: Sequence[Device] | None = None,
) -> Path:
    """Integrates many members of one flow, each until its own `stop`.

    No member delays or spoils another: one that is slow, diverges or starts from NaN
    has its own outcome, last state and time in its row.

    **Arguments:**

    - `flow_of`: maps one member's parameters to its flow; or a flow, for all alike.
    - `params`: what `flow_of` takes, leaves leading with the member axis; `None` with
        a flow.
    - `y0`: the starts, leaves leading with the member axis.
    - `saves`: as in `solve`, or `None` (the default): the final states alone.
    - `stop`, `clock`, `observe`, `keep_states`, `solver`, `rtol`, `max_steps`: as in
        `solve`; the step budget is each member's own.
    - `lanes`: how many members are integrated side by side on a device, or a core. If
        `None`, as many as fill it and fit its caches (`default_lanes`).
    - `strategy`: a `Strategy`. If `None`, refilled lanes; one after the other for large
        states that are saved, on the CPU. Lanes have forward-mode derivatives, where
        the stop is a reading of the clock; others need `Strategy.VMAP`.
    - `devices`: devices to share the members among, each with its own loop. If `None`,
        the default device; if that is a CPU, all of its cores, in threads. Under `jit`
        one share on one device, whatever is given here.

    **Returns:** a `Path` with a leading member axis.

    **Raises:** `ValueError`, before anything is compiled, for starts that do not fit
    the flow, numbers of members that differ, or options that do not fit each other.

    !!! example
        flow_of = lambda depth: ufm.HadamardFlow(num_classes=16, depth=depth)
        path = ufm.ensemble(flow_of, depths, log_a0, stop=ufm.FinalTime(1e10))
    """
    members = make_members(flow_of, params, y0)
    if devices is not None and not len(devices):
        raise ValueError("Argument `devices` must name a device, or be None.")
    platform = jax.default_backend() if devices is None else devices[0].platform
    share = make_share(
        members, stop=stop, clock=clock, saves=saves, observe=observe,
        keep_states=keep_states, solver=solver, rtol=rtol, max_steps=max_steps,
        lanes=lanes, strategy=strategy, platform=platform,
    )  # fmt: skip
    traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((members, share)))
    if traced:
        return share(members, jnp.asarray(members.count))[0]
    if devices is None and platform != "cpu":
        return compiled(share, platform)(members, jnp.asarray(members.count))[0]
    if devices is None:
        return over_cores(share, members, share.method.solver)[0]
    return over_devices(share, members, devices, share.method.solver)[0]


def make_share(
    members: Members,
    *,
    stop: AbstractStop,
    clock: AbstractClock | None = None,
    saves: Saves | None = None,
    observe: Observe | None = None,
    keep_states: bool | None = None,
    solver: diffrax.AbstractSolver | None = None,
    rtol: float | None = None,
    max_steps: int = 100_000,
    lanes: int | None = None,
    strategy: Strategy | None = None,
    platform: str | None = None,
) -> Share:
    """Returns what integrates members like these, defaults filled in.

    **Raises:** `ValueError` as `ensemble`.
    """
    first = jax.tree.map(lambda x: x[0], members)

    def check(member):
        check_solve(
            member.flows, member.starts, stop=stop, clock=clock, saves=saves,
            solver=solver, rtol=rtol, max_steps=max_steps,
        )  # fmt: skip

    # Shapes and options only: what is wrong with one member's numbers is its own.
    eqx.filter_eval_shape(check, first)
    if keep_states is None:
        keep_states = not isinstance(first.flows, GradientFlow)
    method = make_method(
        first.flows, first.starts, stop, clock, saves, solver, rtol, max_steps,
        wants_states=keep_states or observe is not None,
    )  # fmt: skip
    platform = jax.default_backend() if platform is None else platform
    _check_strategy(strategy, lanes)
    if strategy is None:
        # Who asks for lanes gets them.
        usual = default_strategy(first.starts, method, platform)
        strategy = usual if lanes is None else Strategy.LANES
    if lanes is None:
        lanes = default_lanes(first.flows, first.starts, method, platform)
    width = int(lanes)
    return Share(method, strategy, width, observe, keep_states, platform)


def make_members(flow_of, params: PyTree, y0: State) -> Members:
    """Returns the members, after checking that all leaves lead with one axis."""
    leaves = jax.tree.leaves((params, y0))
    counts = {leaf.shape[0] if getattr(leaf, "ndim", 0) else 0 for leaf in leaves}
    if len(counts) != 1 or counts == {0}:
        shown = sorted(str(getattr(leaf, "shape", "a number")) for leaf in leaves)
        raise ValueError(
            "All leaves of `params` and `y0` must lead with one axis, the members, at "
            f"least one, but their shapes are {', '.join(shown)}."
        )
    (count,) = counts
    # Strongly typed, or a start like `jnp.full(3, 0.5)` would be compiled for apart.
    y0 = jax.tree.map(lambda leaf: jnp.asarray(leaf, leaf.dtype), y0)
    if isinstance(flow_of, AbstractFlow):
        if params is not None:
            raise ValueError(
                "Argument `params` must be None with one flow for all members. For "
                "parameters that differ give a function that returns a flow."
            )
        flows = jax.tree.map(
            lambda x: jnp.broadcast_to(jnp.asarray(x), (count, *jnp.shape(x))), flow_of
        )
        return Members(flows, y0)
    try:
        flows = eqx.filter_vmap(flow_of)(params)
    except RuntimeError as error:
        raise _named(error, flow_of, params, count) from None
    if not isinstance(flows, AbstractFlow):
        raise ValueError(
            "Argument `flow_of` must return a flow, but returns "
            f"{type(flows).__name__}."
        )
    return Members(flows, y0)


def _named(error: RuntimeError, flow_of, params: PyTree, count: int) -> Exception:
    """Returns what is wrong with the first member whose parameters are refused."""

    def refused(first: int, last: int) -> bool:
        try:
            eqx.filter_vmap(flow_of)(jax.tree.map(lambda x: x[first:last], params))
        except RuntimeError:
            return True
        return False

    first, last = 0, count
    while last - first > 1:
        middle = (first + last) // 2
        first, last = (first, middle) if refused(first, middle) else (middle, last)
    try:
        flow_of(jax.tree.map(lambda x: x[first], params))
    except ValueError as found:
        return ValueError(f"Member {first} of {count}: {found}")
    return error


def _in_batches(function: Callable, rows: PyTree, size: int) -> PyTree:
    """Maps a function over leading axes, `size` rows at a time.

    `lax.map` does so too, but not with empty arrays, which hidden layers are at L = 1.
    """
    count = jax.tree.leaves(rows)[0].shape[0]
    size = min(size, count)
    batches = -(-count // size)
    index = jnp.minimum(jnp.arange(batches * size), count - 1).reshape(batches, size)

    def batch(chosen):
        return jax.vmap(function)(jax.tree.map(lambda x: x[chosen], rows))

    results = jax.lax.map(batch, index)
    return jax.tree.map(
        lambda x: x.reshape(batches * size, *x.shape[2:])[:count], results
    )


def _if_any(valid: IntScalar, function: Callable, members: Members) -> PyTree:
    """Returns zeros, at once, where nothing is to be done: `over_cores` compiles so."""
    like = jax.eval_shape(function, members)

    def nothing(members):
        del members
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)

    return jax.lax.cond(valid > 0, function, nothing, members)


def _check_strategy(strategy: Strategy | None, lanes: int | None) -> None:
    if not isinstance(strategy, Strategy | None):
        raise ValueError(
            "Argument `strategy` must be one of Strategy.LANES, Strategy.VMAP and "
            f"Strategy.MAP, or None, but is {strategy!r}."
        )
    if lanes is None:
        return
    if not isinstance(lanes, int | np.integer) or lanes < 1:
        raise ValueError(
            f"Argument `lanes` must be a whole number, at least 1, but is {lanes}."
        )
    if strategy not in (None, Strategy.LANES):
        raise ValueError(
            f"Argument `lanes` must be None with {strategy}, which has no lanes."
        )


# A state of more numbers is a matrix model's: on a CPU nothing is gained, and cache
# lost, by moving several at once (benchmarks/bench_ensemble.py).
_LARGE_STATE = 1000


def default_strategy(start: State, method: Method, platform: str) -> Strategy:
    """Returns refilled lanes, but for large saved states on a CPU.

    Lanes hold the saved states of all members until the end; one after the other, each
    is done with before the next.
    """
    kept = method.wants_states and num_saves(method.saves) > 0
    large = _size(start) > _LARGE_STATE
    return Strategy.MAP if platform == "cpu" and large and kept else Strategy.LANES


def default_lanes(flow: AbstractFlow, start: State, method: Method, platform: str):
    """Returns the number of lanes: enough to fill the device, few enough for caches."""
    large, native = _size(start) > _LARGE_STATE, is_native(flow, method)
    if platform == "cpu":
        return 96 if native else 1 if large else 16
    return 16_384 if native else 256 if large else 4096


def _size(start: State) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(start))
