"""The full flow in bulk: K = 10, n = 5, d = 100, many seeds, L = 1 to 10, to t = 1e8.

(ensemble) Time a member with `ensemble` as it comes (rtol 1e-7), all seeds of a depth
    in one call, beside a loop over `solve`, compiled, one member at a time, on a few
    seeds. Compilation is left out. `cpu` is the time of all cores. `rhs share` is the
    part of it in right-hand sides: six a step, as (roofline) times them.
(descent) Plain gradient descent (`bench_rhs.usual_gradient` in a jitted loop, a member
    at a time) to an earlier time that it gets to, beside `ensemble` to the same time:
    how far apart their states are, what one is faster by, and what descent to 1e8 would
    take, *extrapolated*. (`bench_descent.py` has the argument: both follow one orbit.)
(roofline) What the right-hand side reaches of the peak of this machine, all cores: a
    thread a core runs it in a loop. Its flops are 6K·d²(L-1), for the two sweeps
    through the layers and the outer products, and 6K·d·nK at the ends; the peak is that
    of a big float64 matrix product. Each layer of d² numbers is read twice and its
    derivative written once, 24 bytes for 6K flops, 2.5 flops a byte at K = 10: `bound`
    is that times the bandwidth measured on arrays of the same size. Members cannot
    share the reads, each having layers of its own.

    python benchmarks/bench_full_ensemble.py [--tiny] [--only ensemble|descent|roofline]
        [--seeds 20] [--few 2] [--depths 10] [--updates 4000] [--out FILE.json]
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from _bulk_peers import cores
from _harness import (
    compile_apart,
    interleave,
    number,
    options,
    seconds,
    show,
    time_of,
    write,
)
from bench_descent import distance
from bench_rhs import STEP, usual_gradient, velocity
from jax import lax

import deepufm as ufm
from deepufm.ensemble import ensemble

STAGES = 6  # right-hand sides of a step of Tsit5
RATE = 0.05


def draw_models(
    seeds: int, depth: int, num_classes: int, per_class: int, width: int
) -> ufm.DeepUFM:
    """Draws models from entries N(0, 1/d), as `gaussian` does, with nothing to compile.

    Leaves lead with seeds.
    """
    rng = np.random.default_rng(0)

    def entries(*shape):
        return jnp.asarray(rng.normal(scale=width**-0.5, size=(seeds, *shape)))

    return jax.vmap(ufm.DeepUFM)(
        entries(num_classes, width),
        entries(depth - 1, width, width),
        entries(width, num_classes * per_class),
    )


class Case:
    """One depth: the flow and its members."""

    def __init__(self, size: dict, depth: int, seeds: int):
        self.size, self.depth, self.seeds = size, depth, seeds
        self.flow = ufm.GradientFlow(ufm.CrossEntropy(), size["per_class"])
        self.models = draw_models(seeds, depth, **size)

    def member(self, i: int) -> ufm.DeepUFM:
        """Returns the start of one seed."""
        return jax.tree.map(lambda leaf: leaf[i], self.models)

    def together(self, final_time: float) -> ufm.Path:
        """Runs all seeds at once."""
        stop = ufm.FinalTime(final_time)
        return ensemble(self.flow, None, self.models, stop=stop)

    def one_by_one(self, final_time: float, few: int) -> list[ufm.Path]:
        """Runs the first `few` seeds, one after the other."""
        stop = ufm.FinalTime(final_time)
        return [
            ufm.solve(self.flow, self.member(i), stop=stop, saves=2) for i in range(few)
        ]

    @property
    def flops(self) -> int:
        """Of a right-hand side: sweeps and outer products, and the ends."""
        K, n, d = (self.size[key] for key in ("num_classes", "per_class", "width"))
        return 6 * K * d * d * (self.depth - 1) + 6 * K * d * n * K

    @property
    def bytes(self) -> int:
        """Moved by a right-hand side at least: layers read twice, derivatives once."""
        K, n, d = (self.size[key] for key in ("num_classes", "per_class", "width"))
        return 24 * (d * d * (self.depth - 1) + d * K + d * n * K)


def timed(call: Callable) -> tuple[object, float, float]:
    """Returns the result of a call, its wall time and its CPU time."""
    cpu, wall = time.process_time(), time.perf_counter()
    result = jax.block_until_ready(call())
    return result, time.perf_counter() - wall, time.process_time() - cpu


# (ensemble) Time a member.


def per_member(case: Case, final_time: float, few: int) -> dict:
    """Returns a row of (ensemble); both are run before, a step long."""
    first_s = seconds(lambda: case.together(1e-6))
    case.one_by_one(1e-6, 1)
    path, wall, cpu = timed(lambda: case.together(final_time))
    paths, loop_wall, loop_cpu = timed(lambda: case.one_by_one(final_time, few))
    assert isinstance(path, ufm.Path)
    assert isinstance(paths, list)
    here = jax.tree.map(lambda leaf: leaf[0], path.final)
    return {
        "L": case.depth,
        "members": case.seeds,
        "first_s": first_s,
        "min_s": wall / case.seeds,
        "cpu_s": cpu / case.seeds,
        "steps": float(jnp.mean(path.stats.num_steps)),
        "most_steps": int(jnp.max(path.stats.num_steps)),
        "reached": int(jnp.sum(path.outcome == ufm.Outcome.reached)),
        "loop_members": few,
        "loop_s": loop_wall / few,
        "loop_cpu_s": loop_cpu / few,
        "ratio": loop_wall / few / (wall / case.seeds),
        "difference": distance(here, paths[0].final),
    }


def show_members(rows: list[dict]) -> None:
    """Prints (ensemble)."""
    columns = {
        "L": number("L", "d"),
        "members": number("members", "d"),
        "reached": number("reached", "d"),
        "steps": number("steps", ".0f"),
        "most": number("most_steps", "d"),
        "first call": time_of("first_s"),
        "ensemble": time_of("min_s"),
        "cpu": time_of("cpu_s"),
        "solve": time_of("loop_s"),
        "its cpu": time_of("loop_cpu_s"),
        "ratio": number("ratio", ".2f"),
        "difference": number("difference", ".0e"),
        "rhs share": number("rhs_share", ".2f"),
    }
    show("(ensemble) a member, to the final time", columns, rows)


# (descent) At equal state.


def descend(case: Case, rate: float, updates: int) -> tuple[ufm.DeepUFM, float, float]:
    """Returns the state of the first member after descent, and the times it took."""
    move = usual_gradient(case.size["per_class"], True)

    def run(model):
        def update(_, model):
            return jax.tree.map(lambda w, v: w + rate * v, model, move(model))

        return lax.fori_loop(0, updates, update, model)

    model = case.member(0)
    compiled, _ = compile_apart(run, model)
    end, wall, cpu = timed(lambda: compiled(model))
    assert isinstance(end, ufm.DeepUFM)
    return end, wall, cpu


def beside_descent(case: Case, updates: int, final_time: float, member_s) -> dict:
    """Returns a row of (descent): one member by descent, all by `ensemble`.

    Where descent diverges it takes twice as many steps of half the size.
    """
    reached, rate = RATE * updates, RATE
    end, wall, cpu = descend(case, rate, updates)
    while not bool(jnp.all(jnp.isfinite(end.head))):
        rate, updates = rate / 2, updates * 2
        end, wall, cpu = descend(case, rate, updates)
    case.together(1e-6)
    path, ours_wall, ours_cpu = timed(lambda: case.together(reached))
    assert isinstance(path, ufm.Path)
    here = jax.tree.map(lambda leaf: leaf[0], path.final)
    row = {
        "L": case.depth,
        "time": reached,
        "rate": rate,
        "updates": updates,
        "descent_s": wall,
        "descent_cpu_s": cpu,
        "min_s": ours_wall / case.seeds,
        "cpu_s": ours_cpu / case.seeds,
        "ratio": wall / (ours_wall / case.seeds),
        "distance": distance(end, here),
        "extrapolated_s": wall * final_time / reached,
    }
    if member_s is not None:
        row["extrapolated_ratio"] = row["extrapolated_s"] / member_s
    return row


def show_descent(rows: list[dict]) -> None:
    """Prints (descent)."""
    columns = {
        "L": number("L", "d"),
        "to t": number("time", "g"),
        "step": number("rate", "g"),
        "updates": number("updates", ",d"),
        "descent": time_of("descent_s"),
        "ensemble": time_of("min_s"),
        "ratio": number("ratio", ".0f"),
        "theta off": number("distance", ".1e"),
        "to the end ~": number("extrapolated_s", ".1e"),
        "ratio ~": number("extrapolated_ratio", ".1e"),
    }
    show("(descent) a member, to one state", columns, rows)


# (roofline) Flops and bytes.


def in_threads(call: Callable[[int], object]) -> Callable[[], None]:
    """Returns what runs call(i) in a thread a core."""
    pool = ThreadPoolExecutor(cores())

    def run() -> None:
        list(pool.map(lambda i: jax.block_until_ready(call(i)), range(cores())))

    return run


def big_product(tiny: bool) -> tuple[Callable[[], object], int]:
    """Returns a big float64 matrix product, all cores, and its flops."""
    size = 64 if tiny else 1536
    a = jax.random.normal(jax.random.key(1), (size, size))
    product, _ = compile_apart(jnp.matmul, a, a)
    return partial(product, a, a), 2 * size**3


def roofline(case: Case, product: Callable[[], object], tiny: bool) -> dict:
    """Returns a row of (roofline), and the time of `product` measured beside it."""
    length = 50 if tiny else 100
    model = case.member(0)

    def chain(model):
        def step(_, y):
            return jax.tree.map(lambda a, b: a + STEP * b, y, velocity(case.flow, y))

        return lax.fori_loop(0, length, step, model)

    def move(model):
        # The update of the chain, and no flow: two numbers read for each written.
        def step(_, y):
            return jax.tree.map(lambda a, b: a + STEP * b, y, model)

        return lax.fori_loop(0, length, step, model)

    calls: dict[str, Callable[[], object]] = {"product": product}
    for name, function in {"chain": chain, "move": move}.items():
        compiled, _ = compile_apart(function, model)
        calls[name] = in_threads(lambda _, c=compiled: c(model))
    times = interleave(calls, 0.0 if tiny else 4.0)
    each = {name: taken["min_s"] / length for name, taken in times.items()}
    # On a busy machine a small difference may come out negative.
    rhs_s = max(each["chain"] - each["move"], 1e-9)
    numbers = sum(leaf.size for leaf in jax.tree.leaves(model))
    bandwidth = 24 * numbers * cores() / each["move"]
    return {
        "L": case.depth,
        "min_s": rhs_s,
        "megaflops": case.flops / 1e6,
        "flops_per_s": case.flops * cores() / rhs_s,
        "bandwidth": bandwidth,
        "intensity": case.flops / case.bytes,
        "product_s": times["product"]["min_s"],
    }


def show_roofline(rows: list[dict], product_flops: int) -> float:
    """Prints (roofline); returns the peak, that of the best product beside any row."""
    peak = product_flops / min(row["product_s"] for row in rows)
    for row in rows:
        row["of_peak"] = row["flops_per_s"] / peak
        row["bound_of_peak"] = min(1.0, row["intensity"] * row["bandwidth"] / peak)
    columns = {
        "L": number("L", "d"),
        "Mflop": number("megaflops", ".2f"),
        "rhs": time_of("min_s"),
        "Gflop/s": lambda row: f"{row['flops_per_s'] / 1e9:.1f}",
        "of peak": number("of_peak", ".1%"),
        "flop/byte": number("intensity", ".1f"),
        "GB/s": lambda row: f"{row['bandwidth'] / 1e9:.0f}",
        "bound": number("bound_of_peak", ".1%"),
    }
    show(f"(roofline) a right-hand side in each of {cores()} threads", columns, rows)
    print(
        f"big matrix product: {peak / 1e9:.0f} Gflop/s. The right-hand side reads each "
        "layer twice and writes its derivative: `bound` is what the bandwidth allows."
    )
    return peak


_PARTS = ("ensemble", "descent", "roofline")


def main(argv: Sequence[str] | None = None) -> dict:
    """Runs the benchmark and returns what it writes."""
    sizes = {
        "seeds": (20, "members a depth"),
        "few": (2, "members a depth for the loop over solve"),
        "depths": (10, "the largest depth"),
        "updates": (4000, "of descent, in steps of 0.05"),
    }
    args = options("Times ensembles of the full flow.", argv, _PARTS, sizes)
    chosen = _PARTS if args.only is None else (args.only,)
    size = {"num_classes": 10, "per_class": 5, "width": 100}
    depths, seeds, few, updates = args.depths, args.seeds, args.few, args.updates
    final_time = 1e8
    if args.tiny:
        size = {"num_classes": 3, "per_class": 2, "width": 32}
        depths, seeds, few, updates, final_time = 2, 2, 1, 200, 1e2
    cases = [Case(size, L, seeds) for L in range(2 if args.tiny else 1, depths + 1)]
    product, product_flops = big_product(args.tiny)
    lines = [roofline(case, product, args.tiny) for case in cases]
    peak = show_roofline(lines, product_flops)
    result: dict[str, object] = {"peak_flops": peak, "roofline": lines}
    rows = []
    if "ensemble" in chosen:
        for case, line in zip(cases, lines):
            row = per_member(case, final_time, few)
            row["rhs_share"] = STAGES * row["steps"] * line["min_s"] / row["cpu_s"]
            rows.append(row)
        show_members(rows)
        total = sum(row["min_s"] * row["members"] for row in rows)
        print(f"{sum(r['members'] for r in rows)} members in {total:.3g} s")
        result["ensemble"] = rows
    if "descent" in chosen:
        known = {row["L"]: row["min_s"] for row in rows}
        lines = [
            beside_descent(case, updates, final_time, known.get(case.depth))
            for case in cases
        ]
        show_descent(lines)
        result["descent"] = lines
    return write(args.out, "full_ensemble", result)


if __name__ == "__main__":
    main()
