"""Sharing members among devices, and among the cores of a CPU.

Members are dealt out in turn, so that every share has as many easy and hard ones. Each
share is integrated by a loop of its own; no device waits for another.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from .._types import Device
from ._compiling import compiled
from ._stream import Members

_SHARDED = PartitionSpec("members")


def may_run_together(solver: diffrax.AbstractSolver, platform: str) -> bool:
    """Returns whether threads may run programs with this solver at the same time.

    XLA's CPU client (jaxlib 0.10) can lock up for ever where two programs factor
    batches of matrices at once: both hold a thread of its pool and wait for another.
    """
    implicit = isinstance(solver, diffrax.AbstractImplicitSolver)
    return not (implicit and platform == "cpu")


def available_cores() -> int:
    """Returns the cores this process may use, which a batch system may limit."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def over_cores(
    run: Callable[..., PyTree], members: Members, solver: diffrax.AbstractSolver
) -> PyTree:
    """Runs a share of the members on every core of the CPU, where the solver lets it.

    A compiled program of small loops uses one core, but lets go of Python's lock, so
    that threads share the cores.
    """
    run = compiled(run, "cpu")
    shares = min(available_cores(), members.count)
    if shares == 1 or not may_run_together(solver, "cpu"):
        return run(members, jnp.asarray(members.count))
    return _over_threads(run, members, [None] * shares, shares)


def over_devices(
    run: Callable[..., PyTree],
    members: Members,
    devices: Sequence[Device],
    solver: diffrax.AbstractSolver,
) -> PyTree:
    """Runs a share of the members on every device, without communication.

    Explicit solvers run as one program, sharded over the devices; those of several
    processes may be among them, and every process gets all results. Implicit solvers
    cannot (lineax's linear solves refuse arrays that are sharded by hand): they run as
    a program and a thread a device; on devices of a CPU one after the other.

    **Raises:** `ValueError` for an implicit solver on devices of other processes, and
    where no device is of this one.
    """
    local = [device.process_index == jax.process_index() for device in devices]
    here = all(local)
    if not any(local):
        raise ValueError(
            "Argument `devices` must hold a device of every process that calls with "
            f"it, but none is of process {jax.process_index()}."
        )
    if isinstance(solver, diffrax.AbstractImplicitSolver):
        if not here:
            raise ValueError(
                "Implicit solvers run on devices of this process only. Use "
                "`devices=jax.local_devices()` with a part of the members in each "
                "process, or a sweep with a Dask executor."
            )
        threads = len(devices)
        if not may_run_together(solver, devices[0].platform):
            threads = 1
        run = compiled(run, devices[0].platform)
        return _over_threads(run, members, devices, threads)
    mesh = Mesh(np.asarray(devices), ("members",))
    sharding = NamedSharding(mesh, _SHARDED)

    def spread(x):
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, sharding, lambda i: host[i])

    shares = len(devices)
    numbers = np.asarray(_numbers(members.count, shares))
    arguments = jax.tree.map(spread, (_dealt(members, shares), numbers))
    results = compiled(Sharded(run, mesh), devices[0].platform)(*arguments)
    if not here:
        results = multihost_utils.process_allgather(results, tiled=True)
    return _gathered(results, members.count)


class Sharded(eqx.Module):
    """Runs the shares that lead the arrays, one on every device of the mesh."""

    run: Callable[..., PyTree]
    mesh: Mesh = eqx.field(static=True)

    def __call__(self, members: Members, numbers: jax.Array) -> PyTree:
        """Returns what `run` makes of each share and its number of members."""
        arrays, static = eqx.partition((self.run, members, numbers), eqx.is_array)

        def local(run_arrays, shares):
            share = jax.tree.map(lambda x: x[0], shares)
            run, members, number = eqx.combine((run_arrays, *share), static)
            return jax.tree.map(lambda x: x[None], run(members, number))

        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(PartitionSpec(), _SHARDED),
            out_specs=_SHARDED,
            check_vma=False,
        )(arrays[0], arrays[1:])


def _over_threads(
    run: Callable[..., PyTree],
    members: Members,
    devices: Sequence[Device | None],
    threads: int,
) -> PyTree:
    """Runs a share for every device, or on the default one, so many at a time."""
    shares = len(devices)
    dealt = _dealt(members, shares)
    numbers = _numbers(members.count, shares)
    # Threads start with none of the settings that hold where `with` has changed them.
    x64 = jnp.zeros(()).dtype == jnp.float64
    here = next(iter(jnp.zeros(()).devices()))

    def share(i: int, number: int) -> PyTree:
        with jax.enable_x64(x64):
            part = jax.tree.map(lambda x: x[i], dealt), np.asarray(number)
            part = jax.device_put(part, here if devices[i] is None else devices[i])
            return jax.device_get(run(*part))

    # With no member to integrate: compiles before threads would all do so.
    share(0, 0)
    with ThreadPoolExecutor(threads) as pool:
        done = list(pool.map(share, range(shares), numbers))
    return _gathered(jax.tree.map(lambda *x: np.stack(x), *done), members.count)


def _numbers(count: int, shares: int) -> list[int]:
    """Returns how many members there are in each share."""
    return [len(range(i, count, shares)) for i in range(shares)]


def _dealt(members: Members, shares: int) -> Members:
    """Returns members in turn, (shares, each); the last one fills up the rest."""
    each = -(-members.count // shares)
    index = np.arange(each * shares).reshape(each, shares).T
    index = np.minimum(index, members.count - 1)
    # On the host, where each of these takes a fraction of what it takes to dispatch.
    return jax.tree.map(lambda x: np.asarray(x)[index], members)


def _gathered(results: PyTree, count: int) -> PyTree:
    """Undoes `_dealt`."""

    def gather(x):
        total = x.shape[0] * x.shape[1]
        x = np.swapaxes(np.asarray(x), 0, 1).reshape(total, *x.shape[2:])
        return jnp.asarray(x[:count])

    return jax.tree.map(gather, results)
