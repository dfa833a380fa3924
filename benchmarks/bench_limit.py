"""Limits at infinity: how many are certified, how well, and what one costs.

(reduced) P1 Fig. 4's starts at K = 16 to t = 1e10, then `limit`, one core. Beside it
    what one would do without: Kvaerno5 on `LogNorm` to a norm of 1e6, all cores, and
    the angle that is left there between its direction and the limit.
(full) P1 Fig. 2's setting (K = 10, n = 5, d = 100, entries N(0, 1/d)) to t = 1e30, then
    `limit`, one core. `angle` is what is left at t = 1e30, and `margin` the least ratio
    of a limit's parameter margin to the path's smoothed one, at least 1 by Lyu & Li.
(codes) P1 Fig. 3, right: normalised margins of the minima of rank r that `search` finds
    at L = 4, beside limits of L = 1 models with a bottleneck d = r, and the softmax
    code of K vectors in r dimensions (equal norms, least largest inner product).
(polygon) P1 Fig. 3, left and middle: ten layers of width K, weight decay 0.05 to
    t = 320 and none then, to t = 1e30, then `limit`: how many end at rank 2, and how
    far the angle gaps of their Gram factors are from 360°/K, in degrees.
(search) Best objective of `search` from random starts polished one by one on the host,
    beside as many seconds' worth screened together first on JAX's device.

    python benchmarks/bench_limit.py [--tiny]
        [--only reduced|full|codes|polygon|search]
        [--members 200] [--seeds 5] [--depths 10] [--out FILE.json]

BLAS should have one thread (OPENBLAS_NUM_THREADS=1): matrices are small.
"""

import time
from collections.abc import Sequence

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from _harness import number, options, show, time_of, write
from bench_full_ensemble import draw_models

import deepufm as ufm
from deepufm.geometry import row_angles

_PARTS = ("reduced", "full", "codes", "polygon", "search")


def reduced(depth: float, num_classes: int, members: int, norm: float) -> dict:
    """Returns a row of (reduced)."""
    rng = np.random.default_rng(0)
    a = rng.uniform(size=(members, num_classes - 1))
    start = jnp.log(1e-3 * a / a.sum(axis=1, keepdims=True))
    flow = ufm.HadamardFlow(num_classes, depth)
    path = ufm.ensemble(flow, None, start, stop=ufm.FinalTime(1e10))
    started = time.perf_counter()
    limits = ufm.limit(flow, path)
    ours = time.perf_counter() - started

    def further():
        return ufm.ensemble(
            flow, None, path.final, clock=ufm.LogNorm(), stop=ufm.FinalNorm(norm),
            solver=diffrax.Kvaerno5(), rtol=1e-4,
        )  # fmt: skip

    jax.block_until_ready(further())  # compiles
    started = time.perf_counter()
    late = jax.block_until_ready(further())
    theirs = time.perf_counter() - started
    left = row_angles(np.exp(np.asarray(late.final) - np.log(norm)), limits.direction)
    return row(limits, depth, ours) | {
        "continuation_s": theirs / members,
        "angle_left": float(np.median(left)),
        "most_left": float(np.max(left)),
    }


def full(depth: int, size: dict, seeds: int) -> dict:
    """Returns a row of (full)."""
    models = draw_models(seeds, depth, **size)
    flow = ufm.GradientFlow(ufm.CrossEntropy(), size["per_class"])
    path = ufm.ensemble(flow, None, models, stop=ufm.FinalTime(1e30))
    started = time.perf_counter()
    limits = ufm.limit(flow, path)
    ours = time.perf_counter() - started

    def smoothed(model):
        return ufm.smoothed_parameter_margin(
            flow.log_loss(model), flow.log_norm(model), depth
        )

    margins = np.asarray(jax.vmap(smoothed)(path.final))
    ratios = limits.parameter_margin[limits.certified] / margins[limits.certified]
    return row(limits, depth, ours) | {
        "angle_left": float(np.median(limits.start_angle)),
        "margin_ratio": float(np.min(ratios, initial=np.inf)),
    }


def codes(num_classes: int, rank: int, seeds: int) -> dict:
    """Returns a row of (codes)."""
    models = draw_models(seeds, 1, num_classes, 5, rank)
    flow = ufm.GradientFlow(ufm.CrossEntropy(), 5)
    narrow = ufm.limit(flow, ufm.ensemble(flow, None, models, stop=ufm.FinalTime(1e30)))
    minima = ufm.search(num_classes, 4, rank, starts=8).minima
    deep = [point for point in minima if point.rank == rank]
    margins = [1 / np.linalg.norm(point.logits) for point in deep]
    found = narrow.logit_margin[narrow.certified]
    return {
        "K": num_classes,
        "rank": rank,
        "code": ufm.softmax_code(num_classes, rank).normalised_margin,
        "narrow": float(np.max(found, initial=0.0)),
        "narrow_least": float(np.min(found, initial=np.inf)),
        "certified": int(np.sum(narrow.certified)),
        "members": seeds,
        "deep": margins[0] if margins else float("nan"),
        "deep_minima": len(margins),
    }


def polygon(num_classes: int, seeds: int, depth: int) -> dict:
    """Returns a row of (polygon)."""
    models = draw_models(seeds, depth, num_classes, 5, num_classes)
    until = ufm.PiecewiseConstant((0.05, 0.0), (320.0,))
    decaying = ufm.GradientFlow(ufm.CrossEntropy(), 5, weight_decay=until)
    path = ufm.ensemble(decaying, None, models, stop=ufm.FinalTime(1e30))
    limits = ufm.limit(ufm.GradientFlow(ufm.CrossEntropy(), 5), path.final)
    flat = limits[limits.certified & (limits.rank == 2)]
    gaps = [ufm.angle_gaps(ufm.gram_factor(z)) for z in flat.direction]
    misses = [np.max(np.abs(np.degrees(gap) - 360 / num_classes)) for gap in gaps]
    return {
        "K": num_classes,
        "members": seeds,
        "certified": int(np.sum(limits.certified)),
        "rank_2": len(misses),
        "ranks": sorted(set(limits.rank[limits.certified].tolist())),
        "miss": float(np.max(misses, initial=0.0)),
    }


def searched(num_classes: int, depth: float, rank: int, screened: int) -> dict:
    """Returns a row of (search)."""

    def best(**options):
        started = time.perf_counter()
        found = ufm.search(num_classes, depth, rank, **options)
        return found.best.objective, time.perf_counter() - started

    best(starts=0, screened=screened)  # compiles
    wide, seconds = best(starts=8, screened=screened)
    one = max((best(starts=4)[1] - best(starts=0)[1]) / 4, 1e-3)
    count = max(8, round(seconds / one))
    alone, plain_seconds = best(starts=count)
    return {
        "K": num_classes,
        "L": depth,
        "rank": rank,
        "screened": screened,
        "starts": count,
        "min_s": seconds,
        "plain_s": plain_seconds,
        "objective": wide,
        "plain": alone / wide - 1,
    }


def row(limits: ufm.Limit, depth: float, seconds: float) -> dict:
    """Returns what both parts report."""
    members = len(limits.status)
    certified = limits.kkt_residual[limits.certified]
    ranks = sorted(set(limits.rank[limits.certified].tolist()))
    print(f"\nL = {depth:g}: {limits}")
    return {
        "L": depth,
        "members": members,
        "certified": int(np.sum(limits.certified)),
        "residual": float(np.max(certified, initial=0.0)),
        "ranks": ranks,
        "min_s": seconds / members,
        "shares": [vars(share) for share in limits.shares()],
    }


def main(argv: Sequence[str] | None = None) -> dict:
    """Runs the benchmark and returns what it writes."""
    sizes = {
        "members": (200, "reduced members a depth"),
        "seeds": (5, "full members a depth"),
        "depths": (10, "the largest depth of the full flow"),
    }
    args = options("Times limits at infinity.", argv, _PARTS, sizes)
    chosen = _PARTS if args.only is None else (args.only,)
    result: dict[str, object] = {}
    common = {
        "L": number("L", "g"),
        "members": number("members", "d"),
        "certified": number("certified", "d"),
        "residual": number("residual", ".0e"),
        "limit": time_of("min_s"),
        "angle left": number("angle_left", ".3f"),
    }
    if "reduced" in chosen:
        depths, members, classes, norm = (1, 2, 3, 5, 8), args.members, 16, 1e6
        if args.tiny:
            depths, members, classes, norm = (2,), 4, 4, 1e2
        rows = [reduced(depth, classes, members, norm) for depth in depths]
        columns = common | {
            "at most": number("most_left", ".3f"),
            "Kvaerno5 to 1e6": time_of("continuation_s"),
        }
        show("(reduced) a member", columns, rows)
        result["reduced"] = rows
    if "full" in chosen:
        size = {"num_classes": 10, "per_class": 5, "width": 100}
        depths, seeds = range(1, args.depths + 1), args.seeds
        if args.tiny:
            size = {"num_classes": 3, "per_class": 2, "width": 8}
            depths, seeds = range(2, 3), 2
        rows = [full(depth, size, seeds) for depth in depths]
        columns = common | {"margin": number("margin_ratio", ".3g")}
        show("(full) a member", columns, rows)
        result["full"] = rows
    if "codes" in chosen:
        sizes = [(K, r) for K in range(5, 9) for r in range(2, K - 1)]
        seeds = args.seeds
        if args.tiny:
            sizes, seeds = [(4, 2)], 1
        rows = [codes(num_classes, rank, seeds) for num_classes, rank in sizes]
        columns = {
            "K": number("K", "d"),
            "r": number("rank", "d"),
            "L = 4": number("deep", ".6f"),
            "minima": number("deep_minima", "d"),
            "L = 1, d = r": number("narrow", ".6f"),
            "least": number("narrow_least", ".6f"),
            "certified": number("certified", "d"),
            "of": number("members", "d"),
            "code": number("code", ".6f"),
        }
        show("(codes) normalised margins of class means", columns, rows)
        result["codes"] = rows
    if "polygon" in chosen:
        classes, seeds, depth = range(3, 11), args.seeds, 10
        if args.tiny:
            classes, seeds, depth = [3], 1, 2
        rows = [polygon(num_classes, seeds, depth) for num_classes in classes]
        columns = {
            "K": number("K", "d"),
            "members": number("members", "d"),
            "certified": number("certified", "d"),
            "rank 2": number("rank_2", "d"),
            "ranks": lambda row: " ".join(map(str, row["ranks"])),
            "miss, degrees": number("miss", ".0e"),
        }
        show("(polygon) angle gaps of rank-2 limits", columns, rows)
        result["polygon"] = rows
    if "search" in chosen:
        cases, screened = [(12, 4.0, 4), (16, 2.0, 5), (20, 6.0, 3), (24, 6.0, 4)], 512
        if args.tiny:
            cases, screened = [(4, 2.0, 2)], 16
        rows = [searched(*case, screened) for case in cases]
        columns = {
            "K": number("K", "d"),
            "L": number("L", "g"),
            "r": number("rank", "d"),
            "screened": number("screened", "d"),
            "time": time_of("min_s"),
            "objective": number("objective", ".8f"),
            "one by one": number("starts", "d"),
            "time ": time_of("plain_s"),
            "worse by": number("plain", ".1e"),
        }
        show("(search) the best found", columns, rows)
        result["search"] = rows
    return write(args.out, "limit", result)


if __name__ == "__main__":
    main()
