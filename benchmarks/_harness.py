"""What the benchmarks share: options, fair timing, tables and the JSON they leave.

Competitors are timed in turn, repeat by repeat, so that all see the same load of a
shared machine. Judge by the least time; the median shows how loaded the machine was.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import jax
import numpy as np

_PACKAGES = ("jax", "jaxlib", "diffrax", "equinox", "numpy", "scipy")


def options(
    description: str,
    argv: Sequence[str] | None,
    parts: Sequence[str] = (),
    sizes: Mapping[str, tuple[int, str]] | None = None,
) -> argparse.Namespace:
    """Reads the command line (`tiny`, `out`, `only`); switches JAX to float64.

    **Arguments:** `sizes`, more options, whole numbers: their defaults and help.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--tiny", action="store_true", help="small sizes, seconds")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--only", choices=parts, help="one part of the benchmark")
    for name, (default, words) in (sizes or {}).items():
        parser.add_argument(f"--{name}", type=int, default=default, help=words)
    jax.config.update("jax_enable_x64", True)
    return parser.parse_args(argv)


def environment() -> dict:
    """Returns versions and device, for the JSON."""
    device = jax.devices()[0]
    return {
        "versions": {"python": platform.python_version()}
        | {name: metadata.version(name) for name in _PACKAGES},
        "device": {
            "platform": device.platform,
            "kind": device.device_kind,
            "count": jax.device_count(),
            "cpus": os.cpu_count(),
        },
        "dtype": "float64",
    }


def write(out: Path | None, benchmark: str, result: dict) -> dict:
    """Returns `result` with the environment, written to `out` where one is given."""
    whole = {"benchmark": benchmark} | environment() | result
    if out is not None:
        out.write_text(json.dumps(whole, indent=1) + "\n")
    return whole


def compile_apart(function: Callable, *args) -> tuple[Callable, float]:
    """Returns `function` compiled for `args`, and the seconds that took."""
    start = time.perf_counter()
    compiled = jax.jit(function).lower(*args).compile()
    return compiled, time.perf_counter() - start


def seconds(call: Callable[[], object]) -> float:
    """Returns the wall time of one call, until its results are there."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def interleave(
    calls: Mapping[str, Callable[[], object]],
    budget: float,
    *,
    least: int = 3,
    most: int = 200,
) -> dict[str, dict]:
    """Times every call in turn, for about `budget` seconds after a warm-up of each.

    **Arguments:** `calls`, functions of nothing whose results JAX can wait for;
    `least` and `most`, bounds on the number of repeats.

    **Returns:** `min_s`, `median_s` and `repeats` by name.
    """
    warm = sum(seconds(call) for call in calls.values())
    repeats = min(most, max(least, int(budget / warm)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(seconds(call))
    return {
        name: {
            "min_s": min(taken),
            "median_s": float(np.median(taken)),
            "repeats": repeats,
        }
        for name, taken in times.items()
    }


def show(title: str, columns: Mapping[str, Callable[[dict], str]], rows: list[dict]):
    """Prints `rows` under `title`; each column is a name and how to write its cell."""
    cells = [[write_cell(row) for write_cell in columns.values()] for row in rows]
    widths = [
        max(len(name), *(len(line[i]) for line in cells))
        for i, name in enumerate(columns)
    ]
    print(f"\n{title}")
    for line in [list(columns), *cells]:
        first, *others = zip(line, widths)
        padded = [first[0].ljust(first[1]), *(c.rjust(w) for c, w in others)]
        print("  ".join(padded).rstrip())


def duration(value: float | None) -> str:
    """Writes seconds with three digits and a unit."""
    if value is None:
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def number(key: str, spec: str) -> Callable[[dict], str]:
    """Returns a column that writes `row[key]`, `-` where there is none."""

    def cell(row: dict) -> str:
        value = row.get(key)
        return "-" if value is None else format(value, spec)

    return cell


def time_of(key: str) -> Callable[[dict], str]:
    """Returns a column that writes `row[key]` as a duration."""
    return lambda row: duration(row.get(key))
