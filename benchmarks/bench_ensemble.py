"""The reduced flow in bulk: `ensemble` beside its peers, and how it behaves.

K = 16, depths drawn from 1 to 8, starts as in P1 Figure 4.

(compare) Time a member at equal error: the 99th percentile over members of the largest
    |error of log a|, against SciPy's DOP853 at 1e-12 a step on the first 200 members.
    For every contender the loosest power of two that meets a target is found first,
    and timed at that; rows show the error that the timed run had. All get all cores:
    `ensemble` and the mapped solves threads, SciPy processes, numbalsoda threads. Slow
    peers are timed on fewer members, `members`. `cpu` is the time of all cores.
    `vmap of it` is `ensemble` with `Strategy.VMAP`: the same steps, until the slowest
    member is done. `vmap(diffeqsolve)` is what a user would write, PIDController
    included; `vmap(256) in turn` the same in chunks that fit the cache.
(waste) Lane-steps computed over the steps that members needed, private counts.
(hard) One member of 64 that needs some hundred times the steps of the others.
(growth) Time and peak memory over members and over classes.
(widths) Time of a lane-step over lanes, and over how often they are looked at.
(strategies) Lanes, vmap and one after the other, of several flows.
(ablation) What step control, written-out stages and options of the compiler are worth:
    each undone alone, and all of them, at equal error.

All parts take most of an hour on two cores; `--tiny` runs the first two.

    python benchmarks/bench_ensemble.py [--tiny] [--only PART] [--members 1000]
        [--large 100000] [--out FILE.json]
"""

from collections.abc import Sequence

import numpy as np
from _bulk import Contender, Problem, best_of, draw, reference
from _bulk_ablation import ablation
from _bulk_hosts import Processes
from _bulk_parts import PARTS, waste
from _bulk_peers import (
    MOST_VMAP,
    SOLVERS,
    bulk,
    cores,
    numbalsoda_peers,
    ours,
    plain,
    scipy_peers,
)
from _harness import number, options, show, time_of, write

from deepufm.ensemble import Strategy

TARGETS = (1e-4, 1e-5, 1e-6)
CHUNK = 256
FAMILIES = ("SciPy", "odeint", "vmap", "numbalsoda", "numbalsoda, C's exp")


def contenders(tiny: bool, large: int, processes: Processes) -> list[Contender]:
    """Returns all that are compared."""
    solvers = ["Tsit5"] if tiny else list(SOLVERS)
    chunks = [None] if tiny else [None, CHUNK]
    return [
        *(ours(solver, Strategy.LANES, large) for solver in solvers),
        *(ours(solver, Strategy.VMAP, MOST_VMAP) for solver in solvers if not tiny),
        *(plain(s, chunk, MOST_VMAP) for s in solvers for chunk in chunks),
        *scipy_peers(processes),
        *numbalsoda_peers(tiny),
    ]


def compare(tiny: bool, count: int, large: int) -> dict:
    """Runs the comparison for both times, all targets and two numbers of members."""
    known, times, targets = 200, (1e3, 1e10), TARGETS
    if tiny:
        known, times, targets, count, large = 4, (1e3,), TARGETS[:1], 4, 0
    processes = Processes(1 if tiny else cores())
    members = draw(max(count, large), 16)
    field = contenders(tiny, members.count, processes)
    tables = []
    for time in times:
        exact = reference(members.first(known), time, processes)
        problem = Problem(members, time, exact)
        tight = bulk(members.first(count), time, 1e-12, solver=SOLVERS[_TIGHT[tiny]])
        agreement = float(np.max(np.abs(np.asarray(tight.final)[:known] - exact)))
        print(f"\nt = {time:.0e}: reference and ensemble at 1e-12 agree to "
              f"{agreement:.0e}")  # fmt: skip
        for target in targets:
            runs = with_tolerances(problem, field, target, known, count)
            table = one_table(problem, runs, target, count, tiny)
            tables.append(table | {"reference_agreement": agreement})
            if large > count:
                few = [run for run in runs if is_best(run[0], table["rows"])]
                tables.append(one_table(problem, few, target, large, tiny))
    processes.close()
    return {"tables": tables}


# The one that is compiled anyway.
_TIGHT = {True: "Tsit5", False: "Dopri8"}


def with_tolerances(problem: Problem, field, target, known, count):
    """Returns contenders that meet the target, each with its tolerance."""
    found: dict[str, float | None] = {}
    for contender in field:
        if contender.like is not None:
            found[contender.name] = found[contender.like]
            continue
        # Compiled programs are for one number of members.
        size = known if contender.most < count else count
        found[contender.name] = problem.loosest(contender, target, size)
    runs = []
    for contender in field:
        tolerance = found[contender.name]
        if tolerance is None:
            print(f"{contender.name} does not reach {target:.0e}")
        else:
            runs.append((contender, tolerance))
    return runs


def is_best(contender: Contender, rows: list[dict]) -> bool:
    """Returns whether it was the fastest of its family in `rows`."""
    best = best_of(rows, contender.family)
    return best is not None and best["contender"] == contender.name


def least_cpu(rows: list[dict], family: str) -> float:
    """Returns the least CPU time of a family."""
    return min(row["cpu_s"] for row in rows if row["family"] == family)


def one_table(problem: Problem, runs, target: float, count: int, tiny: bool) -> dict:
    """Times `runs`, prints the table and the ratios to our best."""
    budget, least = (0.0, 1) if tiny else (20.0, 3 if count <= 10_000 else 2)
    rows = problem.race(runs, count, budget, least)
    mine = best_of(rows, "ours")
    assert mine is not None
    for row in rows:
        row["ratio"] = row["min_s"] / mine["min_s"]
        row["cpu_ratio"] = row["cpu_s"] / mine["cpu_s"]
    title = (
        f"(compare) to t = {problem.time:.0e}, error {target:.0e}, {count:,} members"
    )
    show(title, _COLUMNS, rows)
    ratios = {}
    for family in FAMILIES:
        best = best_of(rows, family)
        if best is not None:
            ratios[family] = best["ratio"]
            # By the time of all cores, which other work on the machine disturbs less.
            ratios[f"{family}, cpu"] = least_cpu(rows, family) / least_cpu(rows, "ours")
    print(
        "the best of each over the best of ours: "
        + "; ".join(f"{name} {value:.3g}" for name, value in ratios.items())
    )
    head = {"time": problem.time, "target": target, "members": count}
    return head | {"rows": rows, "ratios": ratios}


_COLUMNS = {
    "contender": lambda row: row["contender"],
    "tolerance": number("tolerance", ".1e"),
    "error": number("error", ".1e"),
    "steps": number("steps", ".1f"),
    "members": number("members", ","),
    "min": time_of("min_s"),
    "median": time_of("median_s"),
    "cpu": time_of("cpu_s"),
    "ratio": number("ratio", ".3g"),
    "cpu ratio": number("cpu_ratio", ".3g"),
}


def main(argv: Sequence[str] | None = None) -> dict:
    """Runs the benchmark and returns what it writes."""
    sizes = {
        "members": (1000, "how many, for all"),
        "large": (100_000, "how many, for the best of each"),
    }
    others = PARTS | {"ablation": ablation}
    parts = ["compare", "waste", *others]
    args = options("Times ensemble beside its peers.", argv, parts, sizes)
    chosen = parts[:2] if args.tiny else parts
    result: dict[str, object] = {}
    for name in chosen if args.only is None else [args.only]:
        if name == "compare":
            result[name] = compare(args.tiny, args.members, args.large)
        elif name == "waste":
            result[name] = waste(args.tiny)
        else:
            result[name] = others[name]()
    return write(args.out, "ensemble", result)


if __name__ == "__main__":
    main()
