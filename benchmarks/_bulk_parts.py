"""The parts of `bench_ensemble.py` that look at `ensemble` alone.

As a script it runs one size in a process of its own, whose peak memory it tells:

    python benchmarks/_bulk_parts.py NUM_CLASSES MEMBERS
"""

import importlib
import json
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from _bulk import Members, draw, interleave_cpu
from _bulk_peers import SOLVERS, bulk, cores, flow_of
from _harness import number, seconds, show, time_of
from bench_full_ensemble import draw_models

import deepufm as ufm
from deepufm.ensemble import Strategy, ensemble

_ensemble = importlib.import_module("deepufm.ensemble._ensemble")
_stream = importlib.import_module("deepufm.ensemble._stream")

# What an error of 1e-4 to 1e-5 takes (part `compare`).
RTOL = 2.0**-17
TIME = 1e10


@contextmanager
def counted() -> Iterator[list[int]]:
    """Collects the lane-steps that calls of `ensemble` compute."""
    counts: list[int] = []
    spread = _ensemble.over_cores

    def spy(*args):
        out = spread(*args)
        # Each member has the count of its share; they were dealt out in turn.
        counts.append(int(jnp.sum(out[1][: cores()])))
        return out

    with mock.patch.object(_ensemble, "over_cores", spy):
        yield counts


def lane_steps(call: Callable[[], ufm.Path]) -> tuple[int, int]:
    """Returns the lane-steps computed, and those that the members needed."""
    with counted() as counts:
        path = call()
    return counts[0], int(jnp.sum(path.stats.num_steps))


# (waste) Lane-steps computed over steps needed.


def waste(tiny: bool) -> list[dict]:
    """Runs (waste)."""
    rows = []
    for count in (4,) if tiny else (1000, 10_000, 100_000):
        members = draw(count, 16)
        solver = SOLVERS["Tsit5" if tiny else "Dopri8"]
        call = partial(bulk, members, TIME, RTOL, solver=solver)
        computed, needed = lane_steps(call)
        rows.append(
            {"members": count, "computed": computed, "needed": needed}
            | {"waste": computed / needed}
        )
    columns = {
        "members": number("members", ",d"),
        "computed": number("computed", ",d"),
        "needed": number("needed", ",d"),
        "ratio": number("waste", ".3f"),
    }
    show(f"(waste) lane-steps, to t = {TIME:.0e}", columns, rows)
    return rows


# (hard) One member of 64 that needs many times the steps of the others.


def hard() -> list[dict]:
    """Runs (hard).

    The easy start at a norm of 1e4, where margins are so large that nothing moves
    before t = 1e300; the hard one is P1 Figure 4's.
    """
    count = 64
    log_a = draw(count, 16).log_a
    log_a[1:] += np.log(1e4 / 1e-3)
    members = Members(np.full(count, 2.0), log_a)
    rtol, time = 1e-10, 1e300
    solver = SOLVERS["Tsit5"]
    alone = members.first(1)
    flow, stop = ufm.HadamardFlow(16, 2.0), ufm.FinalTime(time)
    calls = {
        "it alone, solve": partial(
            ufm.solve, flow, jnp.asarray(alone.log_a[0]), stop=stop, rtol=rtol,
            solver=solver, saves=2,
        ),
        "it alone, ensemble": partial(bulk, alone, time, rtol, solver=solver),
        "all, ensemble": partial(bulk, members, time, rtol, solver=solver),
        "all, vmap": partial(
            bulk, members, time, rtol, solver=solver, strategy=Strategy.VMAP
        ),
    }  # fmt: skip
    steps = np.asarray(calls["all, ensemble"]().stats.num_steps)
    times = interleave_cpu(calls, 10.0)
    alone_s = times["it alone, ensemble"]
    rows = [
        {"run": name, "ratio": taken["min_s"] / alone_s["min_s"]}
        | {"cpu_ratio": taken["cpu_s"] / alone_s["cpu_s"]}
        | taken
        for name, taken in times.items()
    ]
    columns = {
        "run": lambda row: row["run"],
        "min": time_of("min_s"),
        "median": time_of("median_s"),
        "cpu": time_of("cpu_s"),
        "over it alone": number("ratio", ".2f"),
        "cpu over it": number("cpu_ratio", ".2f"),
    }
    others = float(np.mean(steps[1:]))
    show(
        f"(hard) one of {count} that takes {steps[0]} steps, the others {others:.1f}",
        columns, rows,
    )  # fmt: skip
    return rows


# (growth) Over members and over classes, each in a process of its own.


def one_size(num_classes: int, count: int) -> dict:
    """Returns the time and peak memory of one size, in this process."""
    jax.config.update("jax_enable_x64", True)
    members = draw(count, num_classes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    call = partial(bulk, members, rtol=RTOL, solver=SOLVERS["Dopri8"])
    with counted() as counts:
        first_s = seconds(lambda: call(time=1e-9).final)
        paths: list[ufm.Path] = []
        taken = seconds(lambda: paths.append(call(time=TIME)) or paths[0].final)
    steps = float(jnp.mean(paths[0].stats.num_steps))
    return {
        "K": num_classes,
        "members": count,
        "first_s": first_s,
        "min_s": taken / count,
        "steps": steps,
        "step_s": taken / count / steps,
        "computed": counts[-1],
        "mode_s": taken / count / steps / (num_classes * np.log2(num_classes)),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "before_mb": before / 1024,
    }


def growth() -> list[dict]:
    """Runs (growth)."""
    sizes = [(16, 1000), (16, 10_000), (16, 100_000), (16, 1_000_000)]
    sizes += [(4**k, max(4, 2**14 // 4**k)) for k in range(1, 9)]
    rows = []
    for num_classes, count in sizes:
        command = [sys.executable, __file__, str(num_classes), str(count)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    columns = {
        "K": number("K", ",d"),
        "members": number("members", ",d"),
        "steps": number("steps", ".1f"),
        "first": time_of("first_s"),
        "a member": time_of("min_s"),
        "a step": time_of("step_s"),
        "/(K log2 K)": time_of("mode_s"),
        "peak MB": number("peak_mb", ",.0f"),
        "of that before": number("before_mb", ",.0f"),
    }
    show(f"(growth) to t = {TIME:.0e}, Dopri8", columns, rows)
    large = [row for row in rows if row["K"] >= 256]
    fitted = np.polyfit(
        np.log([row["K"] * np.log2(row["K"]) for row in large]),
        np.log([row["step_s"] for row in large]), 1,
    )  # fmt: skip
    print(f"time of a step ~ (K log K)^{fitted[0]:.2f} from K = 256 on")
    return rows


# (widths) Lanes, and how often they are looked at.


def widths() -> list[dict]:
    """Runs (widths)."""
    members = draw(4000, 16)
    usual = _stream._CHECK_EVERY
    heads = [{"lanes": n, "check": usual} for n in (16, 32, 64, 96, 128, 256)]
    heads += [{"lanes": 96, "check": n} for n in (1, 2, 4, 8, 16) if n != usual]
    rows: list[dict] = []
    for name in ("Tsit5", "Dopri8"):
        own, calls = {}, {}
        for head in heads:
            label = f"{head['lanes']}, {head['check']}"
            # The step budget only keeps apart what is compiled.
            call = partial(
                bulk, members, TIME, RTOL, solver=SOLVERS[name],
                lanes=head["lanes"], max_steps=100_000 + head["check"],
            )  # fmt: skip
            with mock.patch.object(_stream, "_CHECK_EVERY", head["check"]):
                computed, needed = lane_steps(call)
            own[label] = {"solver": name} | head | {"waste": computed / needed}
            own[label]["computed"] = computed
            calls[label] = lambda call=call: call().final
        for label, taken in interleave_cpu(calls, 20.0).items():
            row = own[label] | taken
            row["step_cpu_s"] = row["cpu_s"] / row["computed"]
            for key in ("min_s", "median_s", "cpu_s"):
                row[key] /= members.count
            rows.append(row)
    columns = {
        "solver": lambda row: row["solver"],
        "lanes": number("lanes", "d"),
        "check every": number("check", "d"),
        "waste": number("waste", ".3f"),
        "cpu, lane-step": time_of("step_cpu_s"),
        "cpu, member": time_of("cpu_s"),
        "min, member": time_of("min_s"),
        "median": time_of("median_s"),
    }
    show(f"(widths) {members.count:,} members to t = {TIME:.0e}", columns, rows)
    return rows


# (strategies) Lanes, vmap, one after the other.


def strategies() -> list[dict]:
    """Runs (strategies)."""
    columns = {
        "strategy": lambda row: row["strategy"],
        "min, member": time_of("min_s"),
        "median": time_of("median_s"),
        "cpu": time_of("cpu_s"),
        "cpu over the best": number("ratio", ".2f"),
    }
    every: list[dict] = []
    for name, count, call, lanes in _flows():
        runs = {f"lanes {n}": partial(call, lanes=n) for n in lanes}
        runs["vmap"] = partial(call, strategy=Strategy.VMAP)
        runs["map"] = partial(call, strategy=Strategy.MAP)
        calls = {key: lambda run=run: run().final for key, run in runs.items()}
        times = interleave_cpu(calls, 10.0, least=2)
        best = min(taken["cpu_s"] for taken in times.values())
        rows = []
        for key, taken in times.items():
            row = {"flow": name, "strategy": key, "ratio": taken["cpu_s"] / best}
            row["repeats"] = taken["repeats"]
            for unit in ("min_s", "median_s", "cpu_s"):
                row[unit] = taken[unit] / count
            rows.append(row)
        show(f"(strategies) {name}, {count} members", columns, rows)
        every += rows
    return every


def _flows() -> Iterator[tuple[str, int, Callable[..., ufm.Path], tuple[int, ...]]]:
    """Yields name, members, what runs them, and the lanes to try."""
    explicit = draw(2000, 16)
    call = partial(bulk, explicit, TIME, RTOL, solver=SOLVERS["Dopri8"])
    yield "reduced, Dopri8", 2000, call, (1, 8, 32, 128, 512)
    stiff = draw(40, 16)
    call = partial(
        ensemble, flow_of(16), jnp.asarray(stiff.depths), jnp.asarray(stiff.log_a),
        clock=ufm.LogNorm(), stop=ufm.FinalNorm(1e3), solver=diffrax.Kvaerno5(),
        rtol=1e-6,
    )  # fmt: skip
    yield "reduced, Kvaerno5 to norm 1e3", 40, call, (1, 4, 16)
    count = 16
    models = draw_models(count, 3, 10, 5, 100)
    flow = ufm.GradientFlow(ufm.CrossEntropy(), 5)
    call = partial(ensemble, flow, None, models, stop=ufm.FinalTime(1e8))
    yield "full, d = 100, L = 3", count, call, (1, 2, 4, 8)
    models = draw_models(200, 3, 4, 2, 8)
    flow = ufm.GradientFlow(ufm.CrossEntropy(), 2)
    call = partial(ensemble, flow, None, models, stop=ufm.FinalTime(1e8))
    yield "full, K = 4, d = 8, L = 3", 200, call, (1, 4, 16, 64)


PARTS = {
    "hard": hard,
    "growth": growth,
    "widths": widths,
    "strategies": strategies,
}


if __name__ == "__main__":
    print(json.dumps(one_size(int(sys.argv[1]), int(sys.argv[2]))))
