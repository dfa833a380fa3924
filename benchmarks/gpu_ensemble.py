"""What one accelerator does with ensembles: run once on a GPU or TPU, keep the figures.

Members a second, in float64 and float32: of the reduced flow (K = 16, depths 1 to 8, to
t = 1e10), over the number of lanes and of members; of the full flow (K = 10, n = 5,
d = 100, L = 3, to t = 1e8), over lanes. `rtol` is the default: 1e-8 and 1e-7 in
float64, 1e-5 in float32. `first` holds compilation, `time` is the least of two calls
after it. Peak memory is that of the process so far, where the device tells.

Nothing is started that would, by what was seen before, end after `--seconds`; sizes
grow until then or until memory runs out. What was left out is written down.

    python benchmarks/gpu_ensemble.py [--tiny] [--seconds 280] [--out FILE.json]
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from _bulk import draw
from _bulk_peers import SOLVERS, flow_of
from _harness import number, options, seconds, show, time_of, write
from bench_full_ensemble import draw_models

import deepufm as ufm
from deepufm.ensemble import ensemble

# Before anything was compiled: a guess, in seconds.
_FIRST_GUESS = 30.0


class Budget:
    """The time that is left, and what a program is expected to take."""

    def __init__(self, allowed: float):
        self.allowed, self.began = allowed, time.monotonic()
        self.compile_s = _FIRST_GUESS
        self.left_out: list[str] = []

    @property
    def left(self) -> float:
        """Returns the seconds that are left."""
        return self.allowed - (time.monotonic() - self.began)

    def measure(self, head: dict, call: Callable, expected: float) -> dict | None:
        """Returns a row, or `None` where time or memory does not last.

        **Arguments:** `expected`, the seconds of one call, compiled.
        """
        label = ", ".join(f"{key} = {value}" for key, value in head.items())
        needed = self.compile_s + 3 * expected
        if needed > self.left:
            self._leave(f"{label}: needs {needed:.0f} s, {self.left:.0f} s are left")
            return None
        try:
            paths: list[ufm.Path] = []
            first_s, *taken = (
                seconds(lambda: paths.append(call()) or paths[-1].final)
                for _ in range(3)
            )
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            self._leave(f"{label}: out of memory")
            return None
        self.compile_s = max(1.0, first_s - min(taken))
        path = paths[-1]
        row = head | {
            "first_s": first_s,
            "min_s": min(taken),
            "members_per_s": head["members"] / min(taken),
            "steps": float(jnp.mean(path.stats.num_steps)),
            "reached": int(jnp.sum(path.outcome == ufm.Outcome.reached)),
            "peak_gb": peak_memory(),
        }
        print(f"{label}: {row['members_per_s']:.3g} members/s; {self.left:.0f} s left")
        return row

    def _leave(self, line: str) -> None:
        print(f"left out: {line}")
        self.left_out.append(line)


def peak_memory() -> float | None:
    """Returns the most memory in use so far, in GB; `None` where nobody knows."""
    statistics = jax.devices()[0].memory_stats() or {}
    peak = statistics.get("peak_bytes_in_use")
    return None if peak is None else peak / 1e9


def reduced(members: int, lanes: int | None, dtype) -> Callable[[], ufm.Path]:
    """Returns a run of the reduced flow, its starts on the device."""
    drawn = draw(members, 16)
    depths, log_a = jnp.asarray(drawn.depths), jnp.asarray(drawn.log_a, dtype)
    solver = SOLVERS["Tsit5" if members < 100 else "Dopri8"]
    return partial(
        ensemble, flow_of(16), depths, log_a,
        stop=ufm.FinalTime(1e10), lanes=lanes, solver=solver,
    )  # fmt: skip


def full(members: int, lanes: int | None, dtype, tiny: bool) -> Callable[[], ufm.Path]:
    """Returns a run of the full flow."""
    sizes = {"depth": 3, "num_classes": 10, "per_class": 5, "width": 100}
    if tiny:
        sizes = {"depth": 2, "num_classes": 3, "per_class": 2, "width": 32}
    models = draw_models(members, **sizes)
    models = jax.tree.map(lambda leaf: leaf.astype(dtype), models)
    flow = ufm.GradientFlow(ufm.CrossEntropy(), sizes["per_class"])
    stop = ufm.FinalTime(1e2 if tiny else 1e8)
    return partial(ensemble, flow, None, models, stop=stop, lanes=lanes)


def grow(budget: Budget, heads: list[dict], make: Callable) -> list[dict]:
    """Measures `heads` in order, each expected to scale with its members."""
    rows: list[dict] = []
    for head in heads:
        expected = 0.0
        if rows:
            ratio = head["members"] / rows[-1]["members"]
            # A part of the time, that of the last and of dispatch, does not grow.
            expected = rows[-1]["min_s"] * max(1.0, 0.7 * ratio)
        call = make(head["members"], head["lanes"], jnp.dtype(head["dtype"]))
        row = budget.measure(head, call, expected)
        if row is None:
            break
        rows.append(row)
    return rows


def best_lanes(rows: list[dict]) -> int | None:
    """Returns the number of lanes that was fastest."""
    best = max(rows, key=lambda row: row["members_per_s"], default=None)
    return None if best is None else best["lanes"]


def heads(dtype: str, pairs) -> list[dict]:
    """Returns the heads of rows for (members, lanes)."""
    return [{"dtype": dtype, "members": n, "lanes": lanes} for n, lanes in pairs]


def plan(tiny: bool, budget: Budget) -> dict:
    """Runs all parts, the most wanted first."""
    run_full = partial(full, tiny=tiny)
    if tiny:
        return {
            "reduced": grow(budget, heads("float64", [(4, None)]), reduced),
            "full": grow(budget, heads("float64", [(2, None)]), run_full),
        }
    lanes = [(100_000, count) for count in (16_384, 65_536, 4096, 1024)]
    result = {"lanes": grow(budget, heads("float64", lanes), reduced)}
    best = best_lanes(result["lanes"])
    many = [(n, best) for n in (1000, 10_000, 1_000_000, 10_000_000)]
    result["reduced"] = grow(budget, heads("float64", many), reduced)
    seeds = [(1024, 128), (4096, 1024)]
    result["full"] = grow(budget, heads("float64", seeds), run_full)
    single = [(100_000, best), (1_000_000, best), (10_000_000, best)]
    result["reduced"] += grow(budget, heads("float32", single), reduced)
    result["full"] += grow(budget, heads("float32", seeds[1:]), run_full)
    return result


def main(argv: Sequence[str] | None = None) -> dict:
    """Runs the benchmark and returns what it writes."""
    sizes = {"seconds": (280, "that all may take")}
    args = options("Ensembles on one accelerator.", argv, (), sizes)
    budget = Budget(args.seconds)
    print(f"{jax.devices()[0].device_kind}; {args.seconds} s are allowed")
    result = plan(args.tiny, budget)
    columns = {
        "dtype": lambda row: row["dtype"],
        "members": number("members", ","),
        "lanes": number("lanes", ","),
        "reached": number("reached", ","),
        "steps": number("steps", ".1f"),
        "first": time_of("first_s"),
        "time": time_of("min_s"),
        "members/s": number("members_per_s", ".3g"),
        "peak GB": number("peak_gb", ".2f"),
    }
    for name, rows in result.items():
        if rows:
            show(f"({name})", columns, rows)
    spent = args.seconds - budget.left
    print(f"\n{spent:.0f} s")
    result |= {"left_out": budget.left_out, "seconds": spent}
    return write(args.out, "gpu_ensemble", result)


if __name__ == "__main__":
    main()
