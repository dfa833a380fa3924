"""Stability in numbers: counterexamples, basins, critical shocks, and what they cost.

(search) Does a Lyapunov function ever rise? Ascent from random starts: how many end
    where it does, beside what the theorems say (P2 Thms 3, 4 and B.3). 10^5 starts
    where none should be found.
(basins) K = 8, L = 2, by scale of the start: shares of the four minima, all intervals
    within 0.02 of their middle; then as many starts at one scale as --members says.
(shock) The smallest perturbation found of collapse that does not come back, by norm,
    beside P2 Thm 7's bound on M, which is proved at L = 1 alone.

    python benchmarks/bench_stability.py [--tiny] [--only search|basins|shock]
        [--members 100000] [--out FILE.json]
"""

import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context

from _harness import number, options, show, time_of, write

import deepufm as ufm
from deepufm.ensemble import available_cores
from deepufm.stability import theorem

_PARTS = ("search", "basins", "shock")
# Function, K, L, starts.
_SEARCHES = (
    (ufm.UniformDistance(), 2, 1, 100_000),
    (ufm.UniformDistance(), 4, 1, 100_000),
    (ufm.UniformDistance(), 8, 1, 10_000),
    (ufm.UniformDistance(), 16, 1, 10_000),
    (ufm.LogRatio(), 8, 1, 100_000),
    (ufm.LogRatio(), 16, 1, 10_000),
    (ufm.ReverseKLDivergence(), 8, 1, 10_000),
    (ufm.KLDivergence(), 4, 1, 100_000),
    (ufm.KLDivergence(), 8, 1, 20_000),
    (ufm.KLDivergence(), 16, 1, 20_000),
    (ufm.KLDivergence(), 8, 2, 10_000),
    (ufm.SmoothedMargin(), 8, 2, 10_000),
)


def searched(lyapunov, num_classes: int, depth: float, starts: int) -> dict:
    """Returns a row of (search)."""
    started = time.perf_counter()
    found = ufm.find_counterexample(lyapunov, num_classes, depth, starts=starts)
    return {
        "function": type(lyapunov).__name__,
        "K": num_classes,
        "L": depth,
        "starts": starts,
        "violations": found.num_violations,
        "alignment": found.alignment,
        "rounding": found.rounding,
        "theorem": theorem(lyapunov, num_classes, depth),
        "min_s": time.perf_counter() - started,
    }


def basins(scale: float, num_classes: int, executor, **given) -> dict:
    """Returns a row of (basins)."""
    started = time.perf_counter()
    found = ufm.basin_fractions(num_classes, [2], [scale], executor=executor, **given)
    seconds = time.perf_counter() - started
    shares = {
        f"{row.structure}, {row.objective:.4f}": row.fraction
        for row in sorted(found.rows, key=lambda row: row.objective)
        if row.certified
    }
    starts = found.rows[0].starts
    return {
        "scale": scale,
        "starts": starts,
        "shares": shares,
        "uncertified": 1 - sum(shares.values()),
        "widest": max(row.half_width for row in found.rows),
        "batched": found.batched / starts,
        "seconds": seconds,
        "min_s": seconds / starts,
    }


def shock(num_classes: int, norm: float, **given) -> dict:
    """Returns a row of (shock)."""
    started = time.perf_counter()
    found = ufm.critical_shock(num_classes, 2, norm, **given)
    return {
        "K": num_classes,
        "norm": norm,
        "size": found.size,
        "M": found.distance,
        "bound": ufm.collapse_basin_bound(num_classes, norm),
        "tried": found.tried,
        "min_s": time.perf_counter() - started,
    }


def main(argv: Sequence[str] | None = None) -> dict:
    """Runs the benchmark and returns what it writes."""
    sizes = {"members": (100_000, "starts of the last row of (basins)")}
    args = options("Counterexamples, basins and shocks.", argv, _PARTS, sizes)
    chosen = _PARTS if args.only is None else (args.only,)
    result: dict[str, object] = {}
    if "search" in chosen:
        cases = _SEARCHES
        if args.tiny:
            cases = ((*_SEARCHES[1][:3], 50), (*_SEARCHES[2][:3], 50))
        rows = [searched(*case) for case in cases]
        columns = {
            "function": lambda row: row["function"],
            "K": number("K", "d"),
            "L": number("L", "g"),
            "starts": number("starts", "d"),
            "rising": number("violations", "d"),
            "best": number("alignment", ".3g"),
            "proved": lambda row: "never rises" if row["theorem"] else "-",
            "time": time_of("min_s"),
        }
        show("(search) Lyapunov functions", columns, rows)
        result["search"] = rows
    if "basins" in chosen:
        scales, classes, given = (1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0), 8, {}
        members = args.members
        pool = nullcontext()
        if args.tiny:
            scales, classes, members = (0.1,), 4, 30
            given = {"max_starts": 60, "batched": False}
        else:
            pool = ProcessPoolExecutor(
                available_cores(), mp_context=get_context("spawn")
            )
        with pool as executor:
            rows = [basins(scale, classes, executor, **given) for scale in scales]
            last = {"starts": members} | given
            rows.append(basins(1e-3, classes, executor, **last))
        columns = {
            "scale": number("scale", "g"),
            "starts": number("starts", "d"),
            "shares, by rising objective": lambda row: " ".join(
                f"{share:7.2%}" for share in row["shares"].values()
            ),
            "uncertified": number("uncertified", ".1%"),
            "half-width": number("widest", ".4f"),
            "batched": number("batched", ".0%"),
            "time": time_of("seconds"),
            "a start": time_of("min_s"),
        }
        show("(basins) " + "; ".join(rows[0]["shares"]), columns, rows)
        result["basins"] = rows
    if "shock" in chosen:
        cases, given = [(4, 1.5), (4, 5.0), (8, 3.0), (8, 10.0), (8, 100.0)], {}
        if args.tiny:
            cases, given = [(4, 3.0)], {"random": 1, "changes": 5}
        rows = [shock(*case, **given) for case in cases]
        columns = {
            "K": number("K", "d"),
            "norm": number("norm", "g"),
            "size": number("size", ".6f"),
            "M": number("M", ".6f"),
            "M of P2 Thm 7": number("bound", ".1e"),
            "directions": number("tried", "d"),
            "time": time_of("min_s"),
        }
        show("(shock) of collapse at L = 2", columns, rows)
        result["shock"] = rows
    return write(args.out, "stability", result)


if __name__ == "__main__":
    main()
