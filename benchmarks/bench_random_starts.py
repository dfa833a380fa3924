"""Random starts: alignment with collapse against width, separation, their partners.

(velocity) P1 Fig. 5, left (K = 10, n = 5, L = 3, entries 0.01·N(0, 1/d)): M of
    dZ/dt(0), its law M = c·d^p fitted, and the leading c/d of theory.
(grown) P1 Fig. 5, middle: M of Z when its norm has grown tenfold.
(zeroth) P2 Thm 8: M of the logits that the flow of the origin grows, L = 1.
(separation) Gaussian starts of P1 Fig. 2's setting: log t0, at which the summed loss is
    log 2, and whether layers ever shrink before it and after it.
(partners) P2 section 6 and E.2: the L1 distance of a random start's spectrum from its
    spectral partner's, and from those of other seeds.

    python benchmarks/bench_random_starts.py [--tiny] [--only PART] [--seeds 5]
        [--width 2560] [--out FILE.json]
"""

import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
from _harness import number, options, show, time_of, write

import deepufm as ufm

_PARTS = ("velocity", "grown", "zeroth", "separation", "partners")


def widths(first: int, last: int) -> list[int]:
    """Returns the first width and its doublings up to the last."""
    count = int(np.log2(last / first)) + 1
    return [first * 2**index for index in range(count)]


def against_width(study_of: Callable[[list[int]], ufm.WidthStudy], sizes: list[int]):
    """Returns a row for each width, with the seconds it took, and the fitted law."""
    started = time.perf_counter()
    study = study_of(sizes)
    taken = (time.perf_counter() - started) / len(sizes)
    rows = [
        {
            "d": int(width),
            "mean": float(mean),
            "std": float(std),
            "values": distances.tolist(),
            "mean_distance": float(np.mean(means)),
            "min_s": taken,
        }
        for width, mean, std, distances, means in zip(
            study.widths, study.mean, study.std, study.distance, study.mean_distance
        )
    ]
    if np.isnan(study.leading):
        return {"rows": rows, "floor": study.floor}
    for row in rows:
        row["leading"] = study.leading / row["d"]
    # Narrow models bend away from the law.
    first = sizes[-4:][0]
    law = study.power_law(first)
    print(
        f"\nM = c·d^p from d = {first} on: p = {law.exponent:.3f} "
        f"± {law.exponent_error:.3f}, c = {law.coefficient:.4g} (theory "
        f"{study.leading:.4g}/d)"
    )
    return {"rows": rows, "leading": study.leading, "law": vars(law)}


def separation(depth: int, size: dict, seeds: int) -> dict:
    """Returns a row of (separation)."""
    flow = ufm.GradientFlow(ufm.CrossEntropy(), size["per_class"])
    times, shrunk, grew, falls = [], 0, 0, []
    started = time.perf_counter()
    for seed in range(seeds):
        model = ufm.gaussian(jax.random.key(seed), depth=depth, **size)
        found = ufm.separation_time(flow, model)
        times.append(found.log_time)
        before = ufm.norm_path(flow, model, stop=ufm.FinalTime(log=found.log_time))
        shrunk += not before.monotone
        falls.append(1 - np.min(before.norms / before.norms[0]))
        grew += ufm.norm_path(flow, found, stop=ufm.FinalTime(1e6)).monotone
    return {
        "L": depth,
        "seeds": seeds,
        "log_time": float(np.mean(times)),
        "log_time_std": float(np.std(times, ddof=1)),
        "shrunk": int(shrunk),
        "largest_fall": float(np.max(falls)),
        "grew": int(grew),
        "min_s": (time.perf_counter() - started) / seeds,
    }


def partners(num_classes: int, depth: int, width: int, seeds: int, **given) -> dict:
    """Returns a row of (partners)."""
    started = time.perf_counter()
    study = ufm.spectral_prediction(
        num_classes, depth, width=width, seeds=seeds, **given
    )
    taken = time.perf_counter() - started
    row = {"K": num_classes, "L": depth, "d": width, "seeds": seeds, "min_s": taken}
    row["reached"] = int(np.sum(study.reached))
    measures = {
        "sup": study.sup,
        "final": study.final,
        "mismatched": study.mismatched[:, -1],
        "random_rank": study.random_rank[:, -1],
        "partner_rank": study.partner_rank[:, -1],
        "random_kl": study.random_kl[:, -1],
        "partner_kl": study.partner_kl[:, -1],
    }
    for name, values in measures.items():
        row[name] = float(np.mean(values))
        row[f"{name}_std"] = float(np.std(values, ddof=1))
        row[f"{name}_values"] = values.tolist()
    # The first save may be at t = 0, whose logarithm JSON does not have.
    row["log_time"] = study.log_time[1:].tolist()
    row["distance"] = np.mean(study.distance, axis=0).tolist()
    return row


def spread(key: str, spec: str = ".3f") -> Callable[[dict], str]:
    """Returns a column that writes mean ± standard deviation."""
    return lambda row: f"{row[key]:{spec}} ± {row[key + '_std']:{spec}}"


def main(argv: Sequence[str] | None = None) -> dict:
    """Runs the benchmark and returns what it writes."""
    numbers = {
        "seeds": (5, "starts a row"),
        "width": (2560, "the largest width of (velocity)"),
    }
    args = options("Measures random starts.", argv, _PARTS, numbers)
    chosen = _PARTS if args.only is None else (args.only,)
    seeds = 2 if args.tiny else args.seeds
    size = {"num_classes": 3, "per_class": 1} if args.tiny else {}
    result: dict[str, object] = {}
    columns = {
        "d": number("d", "d"),
        "M": number("mean", ".4g"),
        "sd": number("std", ".2g"),
        "c/d": number("leading", ".4g"),
        "class means": number("mean_distance", ".4g"),
        "time": time_of("min_s"),
    }
    studies = {
        "velocity": (ufm.initial_alignment, widths(10, args.width), size),
        "grown": (ufm.grown_alignment, widths(10, min(args.width, 320)), size),
        "zeroth": (ufm.zeroth_order_alignment, widths(4, args.width), size),
    }
    for part, (measure, sizes, given) in studies.items():
        if part not in chosen:
            continue
        if args.tiny:
            sizes = [8] if part == "grown" else [8, 16]

        def study_of(sizes, measure=measure, given=given):
            return measure(sizes, seeds=seeds, **given)

        table = result[part] = against_width(study_of, sizes)
        show(f"({part}) over {seeds} seeds", columns, table["rows"])
    if "separation" in chosen:
        size = {"num_classes": 10, "per_class": 5, "width": 100}
        if args.tiny:
            size = {"num_classes": 3, "per_class": 2, "width": 3}
        depths = (1,) if args.tiny else (1, 2, 3, 5)
        rows = [separation(depth, size, seeds) for depth in depths]
        columns = {
            "L": number("L", "d"),
            "log t0": spread("log_time"),
            "shrink before": number("shrunk", "d"),
            "by at most": number("largest_fall", ".2g"),
            "only grow after": number("grew", "d"),
            "of": number("seeds", "d"),
            "time": time_of("min_s"),
        }
        show("(separation)", columns, rows)
        result["separation"] = rows
    if "partners" in chosen:
        settings = [(K, L, w * K) for L in (1, 2) for w in (1, 5) for K in (4, 8, 16)]
        given = {}
        if args.tiny:
            settings, given = [(4, 1, 4)], {"log_time": 3.0, "saves": 5}
        rows = [partners(*setting, seeds, **given) for setting in settings]
        columns = {
            "K": number("K", "d"),
            "L": number("L", "d"),
            "d": number("d", "d"),
            "reached": number("reached", "d"),
            "largest": spread("sup"),
            "at the end": spread("final"),
            "other seeds": number("mismatched", ".3f"),
            "rank": spread("random_rank", ".2f"),
            "predicted": spread("partner_rank", ".2f"),
            "KL": number("random_kl", ".2g"),
            "predicted KL": number("partner_kl", ".2g"),
            "time": time_of("min_s"),
        }
        show(f"(partners) over {seeds} seeds", columns, rows)
        result["partners"] = rows
    return write(args.out, "random_starts", result)


if __name__ == "__main__":
    main()
