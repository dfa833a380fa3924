"""Times one right-hand side of the flows beside the usual ways to write them.

Matrix flow: `GradientFlow` (left products, K rows everywhere) beside `jax.grad` of the
usual forward order, features propagated through every layer with nK columns, written as
a Python loop and as `lax.scan`. Reduced flow: `HadamardFlow` (smallest margin factored
out, Psi by size) beside a numpy evaluation of the same formula and a naive one in JAX,
exp(-Psi a) with no shift and a dense Psi, which underflows at margin 750.

Two times of each. `call`: one jitted call, dispatch included. `chained`: one pass of a
jitted loop, y <- y + 1e-9 dy/dt, less the same loop without the flow; as in a solver,
and the one to judge by. Values are checked against each other to 1e-12 first.

Then `GradientFlow` over L and K with both forms of its outer products, A^T G of every
layer: one batched product (`einsum`), and a sum of K outer products fused into one
pass (`fused`). `_MAX_FUSED_TERMS` should be the largest K at which `fused` wins.

    python benchmarks/bench_rhs.py [--tiny] [--out FILE.json]
"""

import importlib
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from _harness import compile_apart, interleave, number, options, show, time_of, write
from jax import Array, lax

import deepufm as ufm
from deepufm.geometry import psi_matrix

_gradient = importlib.import_module("deepufm.dynamics._gradient")

STEP = 1e-9
AGREEMENT = 1e-12
Velocity = Callable[..., object]


def velocity(flow, state):
    """Returns dy/dt of a deepufm flow."""
    direction, log_speed = flow(state)
    return jax.tree.map(lambda leaf: jnp.exp(log_speed) * leaf, direction)


def usual_gradient(per_class: int, unrolled: bool) -> Velocity:
    """Returns -grad of the loss, features propagated forward through every layer."""

    def loss(model: ufm.DeepUFM) -> Array:
        examples = model.features
        if unrolled:
            for layer in range(model.hidden.shape[0]):
                examples = model.hidden[layer] @ examples
        else:
            examples, _ = lax.scan(
                lambda h, layer: (layer @ h, None), examples, model.hidden
            )
        log_probabilities = jax.nn.log_softmax(model.head @ examples, axis=0)
        labels = np.repeat(np.arange(model.num_classes), per_class)
        return -jnp.sum(log_probabilities[labels, np.arange(labels.size)])

    return lambda model: jax.tree.map(jnp.negative, jax.grad(loss)(model))


def naive_rates(num_classes: int, depth: float) -> Velocity:
    """Returns d log a/dt of the reduced flow as P2 eq. 9 is printed."""
    psi = np.asarray(psi_matrix(num_classes), float)

    def rates(log_a):
        a = jnp.exp(log_a)
        weights = jnp.exp(-(psi @ a))
        power = (depth - 1) / (depth + 1)
        return (psi @ weights) / (1 + jnp.sum(weights)) * a**power

    return rates


def numpy_rates(num_classes: int, depth: float) -> Callable[[np.ndarray], np.ndarray]:
    """Returns d log a/dt in numpy, the smallest margin factored out."""
    psi = np.asarray(psi_matrix(num_classes), float)
    power = (depth - 1) / (depth + 1)

    def rates(log_a):
        margins = psi @ np.exp(log_a)
        smallest = margins.min()
        weights = np.exp(smallest - margins)
        log_partition = np.logaddexp(0, np.log(weights.sum()) - smallest)
        return np.exp(power * log_a - smallest - log_partition) * (psi @ weights)

    return rates


def check_agreement(name: str, got, want) -> float:
    """Returns the largest relative difference of a leaf; raises beyond `AGREEMENT`."""
    worst = 0.0
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        size = float(np.linalg.norm(np.ravel(np.asarray(y))))
        if size > 0:
            difference = np.ravel(np.asarray(x) - np.asarray(y))
            worst = max(worst, float(np.linalg.norm(difference)) / size)
    if not worst <= AGREEMENT:
        raise RuntimeError(f"{name} differs from its peers by {worst:.1e} (relative).")
    return worst


def measure(
    candidates: dict[str, Velocity], state, budget: float, hosts: Sequence[str] = ()
) -> list[dict]:
    """Times every candidate on `state`, as single calls and chained.

    The first candidate is what the values of the others are checked against; those
    named in `hosts` are numpy functions, and run as they are.
    """
    state = jax.device_put(state)
    on_host = np.array(state) if hosts else None
    single, chained, compile_s, values = {}, {}, {}, {}
    probe = 256 if sum(x.size for x in jax.tree.leaves(state)) < 5000 else 32
    nothing, _ = compile_apart(partial(_chain, None, probe), state)
    chained["nothing"] = partial(nothing, state)
    for name, function in candidates.items():
        if name in hosts:
            values[name] = function(on_host)
            single[name] = partial(function, on_host)
            continue
        compiled, compile_s[name] = compile_apart(function, state)
        values[name] = compiled(state)
        single[name] = partial(compiled, state)
        loop, _ = compile_apart(partial(_chain, function, probe), state)
        chained[name] = partial(loop, state)
    first = next(iter(candidates))
    differences = {
        name: check_agreement(name, value, values[first])
        for name, value in values.items()
    }
    calls = interleave(single, budget / 2, least=5)
    loops = interleave(chained, budget / 2, least=5)
    rows = []
    for name in candidates:
        row = {
            "form": name,
            "compile_s": compile_s.get(name),
            "call_min_s": calls[name]["min_s"],
            "call_median_s": calls[name]["median_s"],
            "difference": differences[name],
            "repeats": calls[name]["repeats"],
        }
        if name in loops:
            for key in ("min_s", "median_s"):
                spent = loops[name][key] - loops["nothing"][key]
                # On a busy machine a small difference may come out negative.
                row[f"chained_{key}"] = max(spent / probe, 1e-9)
        rows.append(row)
    return rows


def _chain(function: Velocity | None, length: int, state):
    """Returns `state` after `length` tiny Euler steps, or of a plain axpy."""

    def step(_, y):
        dy = y if function is None else function(y)
        return jax.tree.map(lambda a, b: a + STEP * b, y, dy)

    return lax.fori_loop(0, length, step, state)


@contextmanager
def outer_products(form: str):
    """Makes `GradientFlow` use one form of its outer products while it is traced."""
    limit = {"fused": 10**9, "einsum": 0}[form]
    with mock.patch.object(_gradient, "_MAX_FUSED_TERMS", limit):
        yield


def forced(form: str, flow: ufm.GradientFlow) -> Velocity:
    """Returns the flow's velocity with one form of its outer products."""

    def run(state):
        with outer_products(form):
            return velocity(flow, state)

    return run


def matrix_case(
    num_classes: int, per_class: int, width: int, depth: int, forms: bool, budget: float
) -> list[dict]:
    """Times the matrix flow at one size: beside its peers, or its two forms."""
    flow = ufm.GradientFlow(ufm.CrossEntropy(), per_class=per_class)
    state = ufm.gaussian(
        jax.random.key(0),
        num_classes=num_classes,
        per_class=per_class,
        width=width,
        depth=depth,
    )
    if forms:
        candidates = {name: forced(name, flow) for name in ("fused", "einsum")}
    else:
        candidates = {
            "deepufm": partial(velocity, flow),
            "jax.grad, unrolled": usual_gradient(per_class, True),
            "jax.grad, scan": usual_gradient(per_class, False),
        }
    size = {"K": num_classes, "n": per_class, "d": width, "L": depth}
    rows = [size | row for row in measure(candidates, state, budget)]
    best = rows[0]["chained_min_s"]
    return [row | {"ratio": row["chained_min_s"] / best} for row in rows]


def reduced_case(num_classes: int, budget: float) -> list[dict]:
    """Times the reduced flow at one K, depth 2, beside numpy and a naive form."""
    depth = 2.0
    flow = ufm.HadamardFlow(num_classes=num_classes, depth=depth)
    rng = np.random.default_rng(0)
    # Margins near 1, where the naive form still has all its digits.
    log_a = np.log(rng.uniform(size=num_classes - 1) / num_classes)
    candidates = {
        "deepufm": partial(velocity, flow),
        "naive": naive_rates(num_classes, depth),
        "numpy": numpy_rates(num_classes, depth),
    }
    rows = measure(candidates, log_a, budget, hosts=["numpy"])
    return [{"K": num_classes} | row for row in rows]


def fused_limit(rows: list[dict]) -> int:
    """Returns the largest K, in steps from the least, at which `fused` is no slower.

    Over the depths of one K the sum of log ratios decides.
    """
    ratios: dict[int, list[float]] = {}
    for row in rows:
        if row["form"] == "einsum" and row["L"] > 1:
            ratios.setdefault(row["K"], []).append(float(np.log(row["ratio"])))
    limit = 0
    for num_classes in sorted(ratios):
        if sum(ratios[num_classes]) < 0:
            break
        limit = num_classes
    return limit


_TIMES = {
    "call min": time_of("call_min_s"),
    "median": time_of("call_median_s"),
    "chained min": time_of("chained_min_s"),
    "chained median": time_of("chained_median_s"),
    "compile": time_of("compile_s"),
    "difference": number("difference", ".0e"),
}


def _cell(key: str):
    return lambda row: str(row[key])


def main(argv: Sequence[str] | None = None) -> dict:
    """Runs the benchmark and returns what it writes."""
    args = options("Times right-hand sides.", argv)
    tiny = args.tiny
    budget = 0.02 if tiny else 4.0
    n, d = (2, 8) if tiny else (5, 100)

    K, L = (4, 3) if tiny else (10, 8)
    usual = matrix_case(K, n, d, L, False, budget)
    sizes = {key: _cell(key) for key in ("K", "n", "d", "L")}
    ratio = {"ratio": number("ratio", ".2f")}
    show("GradientFlow", {"form": _cell("form")} | sizes | _TIMES | ratio, usual)
    speedup = min(row["ratio"] for row in usual[1:])
    print(f"deepufm's right-hand side costs {speedup:.2f}x less than the best peer")

    depths = (2,) if tiny else (1, 2, 4, 8, 16)
    classes = (4,) if tiny else (4, 10, 16, 32, 64, 100)
    forms = [
        row
        for num_classes in classes
        for depth in depths
        for row in matrix_case(num_classes, n, d, depth, True, budget / 4)
    ]
    show("Outer products", {"form": _cell("form")} | sizes | _TIMES | ratio, forms)
    limit, library = fused_limit(forms), _gradient._MAX_FUSED_TERMS
    print(f"fused is best up to K = {limit}; the library switches at {library}")

    reduced = [
        row
        for num_classes in ((4,) if tiny else (4, 16, 64, 256, 1024))
        for row in reduced_case(num_classes, budget / 4)
    ]
    show("HadamardFlow", {"form": _cell("form"), "K": _cell("K")} | _TIMES, reduced)

    result = {
        "gradient_flow": usual,
        "speedup": speedup,
        "outer_products": forms,
        "fused_limit": limit,
        "library_fused_limit": library,
        "hadamard_flow": reduced,
    }
    return write(args.out, "rhs", result)


if __name__ == "__main__":
    main()
