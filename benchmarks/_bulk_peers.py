"""Contenders of `bench_ensemble.py`: `ensemble`, and the peers it is compared with.

All get the same right-hand side and clock, s = log(1 + t), and all cores.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from _bulk import Contender, Done, Members
from _bulk_hosts import Processes

import deepufm as ufm
from deepufm.ensemble import Strategy, available_cores as cores, ensemble

try:
    import _bulk_numba
except ImportError:
    _bulk_numba = None

SOLVERS = {
    "Tsit5": diffrax.Tsit5(),
    "Dopri5": diffrax.Dopri5(),
    "Dopri8": diffrax.Dopri8(),
}
# Members on which the slow are timed: their time a member does not depend on it.
MOST_SCIPY, MOST_NUMBALSODA = 200, 20_000
# `vmap` of more would take minutes; its time a member grows with their number.
MOST_VMAP = 10_000


def flow_of(num_classes: int):
    """Returns depth -> flow."""
    return lambda depth: ufm.HadamardFlow(num_classes=num_classes, depth=depth)


def bulk(members: Members, time: float, rtol: float, **options) -> ufm.Path:
    """Runs `ensemble` on the reduced flow, final states alone."""
    flow = flow_of(members.log_a.shape[1] + 1)
    stop = ufm.FinalTime(time)
    log_a = jnp.asarray(members.log_a)
    depths = jnp.asarray(members.depths)
    return ensemble(flow, depths, log_a, stop=stop, rtol=rtol, **options)


def ours(solver: str, strategy: Strategy, most: int) -> Contender:
    """Returns `ensemble` with one solver."""

    def run(members, time, tolerance):
        path = bulk(members, time, tolerance, solver=SOLVERS[solver], strategy=strategy)
        return Done(path.final, np.mean(path.stats.num_steps))

    if strategy is Strategy.LANES:
        return Contender(f"ensemble {solver}", "ours", run, most)
    like = f"ensemble {solver}"
    return Contender(f"vmap of it, {solver}", "vmap", run, most, like)


@eqx.filter_jit
def _plain(solver, chunk, flows, starts, end, tolerance):
    """`diffeqsolve` as a user would write it, mapped over all members or chunks."""

    def one(member):
        flow, start = member

        def rates(s, log_a, args):
            del args
            direction, log_speed = flow(log_a)
            return direction * jnp.exp(log_speed + s)

        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(rates), solver, 0.0, end, None, start,
            stepsize_controller=diffrax.PIDController(rtol=tolerance, atol=tolerance),
            max_steps=100_000, throw=False,
        )  # fmt: skip
        assert solution.ys is not None
        return solution.ys[0], solution.stats["num_steps"]

    if chunk is None:
        return jax.vmap(one)((flows, starts))
    return jax.lax.map(one, (flows, starts), batch_size=chunk)


def plain(solver: str, chunk: int | None, most: int) -> Contender:
    """Returns `jit(vmap(diffeqsolve))`, in a thread a core; in chunks if asked for."""

    def run(members, time, tolerance):
        count = cores()
        # Of one shape each, for one compiled program: the last are done twice.
        each = -(-members.count // count)
        index = np.minimum(np.arange(each)[None] * count + np.arange(count)[:, None],
                           members.count - 1)  # fmt: skip
        flows = eqx.filter_vmap(flow_of(members.log_a.shape[1] + 1))
        end, tolerance = jnp.log1p(time), jnp.asarray(tolerance)

        def share(i: int):
            own = flows(jnp.asarray(members.depths[index[i]]))
            log_a = jnp.asarray(members.log_a[index[i]])
            out = _plain(SOLVERS[solver], chunk, own, log_a, end, tolerance)
            return jax.block_until_ready(out)

        with ThreadPoolExecutor(count) as pool:
            parts = list(pool.map(share, range(count)))
        states = np.empty_like(members.log_a)
        for i, (own, _) in enumerate(parts):
            states[index[i]] = own
        return Done(states, np.mean([np.mean(steps) for _, steps in parts]))

    name = "vmap(diffeqsolve)" if chunk is None else f"vmap({chunk}) in turn"
    like = None if chunk is None else f"vmap(diffeqsolve), {solver}"
    return Contender(f"{name}, {solver}", "vmap", run, most, like)


def scipy_peers(processes: Processes) -> list[Contender]:
    """Returns SciPy's solvers, in a process a core."""

    def run(method, members, time, tolerance):
        end = float(np.log1p(time))
        states, spent = processes.run(
            method, members.depths, members.log_a, end, tolerance
        )
        return Done(states, cpu_elsewhere=spent)

    names = {
        "DOP853": ("SciPy DOP853", "SciPy"),
        "LSODA": ("SciPy LSODA", "SciPy"),
        "odeint": ("SciPy odeint", "odeint"),
    }
    return [
        Contender(name, family, partial(run, method), MOST_SCIPY)
        for method, (name, family) in names.items()
    ]


def numbalsoda_peers(tiny: bool) -> list[Contender]:
    """Returns numbalsoda's solvers, in a thread a core; none where not installed."""
    if _bulk_numba is None:
        return []

    def contender(solver: str, vectorised: bool) -> Contender:
        assert _bulk_numba is not None
        integrate = _bulk_numba.runner(solver, vectorised, cores())

        def run(members, time, tolerance):
            end = float(np.log1p(time))
            return Done(integrate(members.depths, members.log_a, end, tolerance))

        exp = "" if vectorised else ", C's exp"
        name = f"numbalsoda {solver}{exp}"
        like = None if vectorised else f"numbalsoda {solver}"
        # A family of its own: what one writes at first, beside what can be had.
        return Contender(name, f"numbalsoda{exp}", run, MOST_NUMBALSODA, like)

    kinds = [("dop853", True)]
    if not tiny:
        kinds += [("dop853", False), ("lsoda", True)]
    return [contender(*kind) for kind in kinds]
