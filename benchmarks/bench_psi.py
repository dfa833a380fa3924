"""Times products with Psi: dense, elementwise and by the parity transform.

Each time is that of one product inside a jitted loop of 100 that feed each other,
x <- Psi x / K (which keeps x of ordinary size), as inside an ODE right-hand side;
`empty` is the same loop without Psi. Once for a single state, once for 64 lanes, lanes
last. The error is the largest relative one of any entry, against exact integers, for
random input between 1e-300 and 1e300, in units of the rounding unit 2^-53.

The implied switch point is the K up to which the dense product must be used, and the
parity transform beyond, for the least sum of log times over all K, single and in lanes.

    python benchmarks/bench_psi.py [--tiny] [--out FILE.json]
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from _harness import compile_apart, interleave, options, write
from jax import Array, lax

from deepufm.geometry import psi_matrix
from deepufm.geometry._hadamard import (
    _DENSE_UP_TO,
    _sums_by_parity,
    _sums_dense,
)

CHAIN = 100
LANES = 64
# Beyond, one repeat in lanes takes seconds.
ELEMENTWISE_UP_TO = 128


def products(num_classes: int) -> dict[str, Callable[[Array], Array]]:
    """Returns the candidates by name."""
    psi = np.asarray(psi_matrix(num_classes))
    candidates = {
        "empty": lambda v: v,
        "dense": lambda v: _sums_dense(v)[1:],
        "parity": lambda v: _sums_by_parity(v)[1:],
    }
    if num_classes <= ELEMENTWISE_UP_TO:
        candidates["elementwise"] = lambda v: jnp.sum(psi * v[None, :], axis=1)
    return candidates


def compile_chain(product, v: Array) -> tuple[Callable[[Array], Array], float]:
    """Returns the compiled loop for input like `v` and the seconds it took."""
    lanes_last = jax.vmap(product, in_axes=-1, out_axes=-1) if v.ndim == 2 else product
    scale = 1 / (v.shape[0] + 1)

    def chain(v):
        return lax.fori_loop(0, CHAIN, lambda _, x: lanes_last(x) * scale, v)

    return compile_apart(chain, v)


def relative_error(product, num_classes: int) -> float:
    """Returns the worst relative error of an entry, in units of 2^-53."""
    exponents = np.random.default_rng(1).uniform(-300, 300, num_classes - 1)
    v = 10.0**exponents

    def exact(x: float) -> int:
        # Every double is a whole multiple of 2^-1074.
        numerator, denominator = float(x).as_integer_ratio()
        return numerator * (2**1074 // denominator)

    terms = [exact(x) for x in v]
    worst = 0.0
    for i, got in enumerate(np.asarray(jax.jit(product)(jnp.asarray(v))), start=1):
        odd = (t for j, t in enumerate(terms, start=1) if (i & j).bit_count() % 2)
        want = 2 * sum(odd)
        worst = max(worst, abs(exact(got) - want) * 2**53 / want)
    return worst


def measure(num_classes: int, lanes: int | None, budget: float) -> list[dict]:
    """Times the candidates in turn, repeat by repeat, so that all see the same load."""
    shape = (num_classes - 1,) if lanes is None else (num_classes - 1, lanes)
    v = jax.device_put(np.random.default_rng(0).uniform(size=shape))
    candidates = products(num_classes)
    chains = {name: compile_chain(f, v) for name, f in candidates.items()}
    calls = {name: partial(chain, v) for name, (chain, _) in chains.items()}
    times = interleave(calls, budget, least=5)
    return [
        {
            "num_classes": num_classes,
            "lanes": lanes or 1,
            "product": name,
            "min_ns": 1e9 * times[name]["min_s"] / CHAIN,
            "median_ns": 1e9 * times[name]["median_s"] / CHAIN,
            "repeats": times[name]["repeats"],
            "compile_s": chains[name][1],
            "error_roundings": None
            if name == "empty"
            else relative_error(product, num_classes),
        }
        for name, product in candidates.items()
    ]


def switch_point(rows: list[dict]) -> int:
    """Returns the K up to which dense is best; see the module's docstring."""
    # The least time, not the median: the cores may be shared.
    log_time = {
        (r["num_classes"], r["lanes"], r["product"]): math.log(r["min_ns"])
        for r in rows
    }
    cases = {(num_classes, lanes) for num_classes, lanes, _ in log_time}

    def total(switch: int) -> float:
        return sum(
            log_time[k, lanes, "dense" if k <= switch else "parity"]
            for k, lanes in cases
        )

    return min(sorted({k for k, _ in cases}), key=total)


def show(rows: list[dict]) -> None:
    """Prints one line for each K and lane count: min/median ns, then the errors."""
    names = ("empty", "dense", "elementwise", "parity")
    print(f"{'K':>5}{'lanes':>6}", *(f"{n + ' ns':>19}" for n in names), end="")
    print("   error: dense parity   compile s: dense parity")
    cases: dict[tuple[int, int], dict[str, dict]] = {}
    for r in rows:
        cases.setdefault((r["num_classes"], r["lanes"]), {})[r["product"]] = r
    for (k, lanes), row in cases.items():
        cells = [
            f"{row[n]['min_ns']:,.0f}/{row[n]['median_ns']:,.0f}" if n in row else "-"
            for n in names
        ]
        both = [row["dense"], row["parity"]]
        print(f"{k:>5}{lanes:>6}", *(f"{cell:>19}" for cell in cells), end="")
        print(f"{'':10}", *(f"{r['error_roundings']:6.2f}" for r in both), end="")
        print(f"{'':13}", *(f"{r['compile_s']:6.2f}" for r in both))


def main(argv: Sequence[str] | None = None) -> dict:
    """Runs the benchmark and returns what it writes."""
    args = options("Times products with Psi.", argv)
    sizes = [4, 8] if args.tiny else [2**m for m in range(1, 11)]
    budget = 0.02 if args.tiny else 1.0
    rows = [
        row
        for lanes in (None, LANES)
        for num_classes in sizes
        for row in measure(num_classes, lanes, budget)
    ]
    show(rows)
    switch = switch_point(rows)
    print(f"best: dense up to K = {switch}; the library switches at {_DENSE_UP_TO}")
    result = {
        "chain": CHAIN,
        "switch_point": switch,
        "library_switch_point": _DENSE_UP_TO,
        "rows": rows,
    }
    return write(args.out, "psi", result)


if __name__ == "__main__":
    main()
