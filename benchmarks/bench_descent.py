"""Gradient flow beside gradient descent: what a time costs, and how far apart they are.

Descent with step η is the flow's Euler method, so that k updates are the flow at
t = ηk; both take the loss summed over examples unless `mean` is said.

(a) Wall time to one state: P1's sizes (K = 10, n = 5, d = 100, L = 3), 200,000 updates
    of 0.05 from `gaussian`. `descend` (optax.sgd on our gradient) and the plain loop,
    jax.grad of the usual forward pass in a `fori_loop`, beside `solve` to the same
    time. `theta off` and `Z off` are relative distances from the state of `descend`,
    `flow error` that of the parameters from the flow at rtol 1e-11. Times of `solve`
    are whole calls, checks and dispatch included; its two rows share one program.
(b) The distance at equal time in P2 Fig. 2's setting, steps 0.01 and 0.005, and the
    order in the step that both show at one final time (1 where the step is small).
(c) What P1's step of 0.08 is a step of (L = 10, d = K, n = 5, weight decay 1e-3).
    Descent is stable while the largest eigenvalue of the summed loss's Hessian, its
    sharpness, stays below 2/0.08, or nK times that for a step on the mean. Sharpness is
    by Lanczos, its bound of error beside it; the maximum is over the run on the mean,
    which may pass above its limit for a while, and come back.
(d) `solve` of the sigmoidal flows against their exact solution, to twice the time at
    which the last mode is half way up: the largest error of a log singular value over
    20 saved points.

    python benchmarks/bench_descent.py [--tiny] [--only a|b|c|d] [--out FILE.json]
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
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
from _sharpness import check_sharpness, sharpness
from bench_rhs import usual_gradient
from jax import Array, lax
from jax.flatten_util import ravel_pytree

import deepufm as ufm

LOSS = ufm.CrossEntropy()


def _text(key: str) -> Callable[[dict], str]:
    return lambda row: str(row[key])


def distance(value, reference) -> float:
    """Returns ‖value - reference‖/‖reference‖ over all leaves."""
    vector, _ = ravel_pytree(reference)
    return float(jnp.linalg.norm(ravel_pytree(value)[0] - vector)) / float(
        jnp.linalg.norm(vector)
    )


def rank(model: ufm.DeepUFM) -> float:
    """Returns the effective rank of the logits."""
    values = jnp.linalg.svd(model.logits(), compute_uv=False)
    return float(ufm.effective_rank(values))


# (a) Wall time to one state.


def plain_loop(per_class: int, step: float, updates: int) -> Callable:
    """Returns the descent that one would write by hand."""
    velocity = usual_gradient(per_class, True)

    def update(_, model):
        return jax.tree.map(lambda w, v: w + step * v, model, velocity(model))

    return lambda model: lax.fori_loop(0, updates, update, model)


def our_loop(per_class: int, step: float, updates: int) -> Callable:
    """Returns the same descent by `descend`."""

    def run(model):
        rule = optax.sgd(step)
        return ufm.descend(
            model, LOSS, rule, updates, per_class=per_class, saves=2
        ).final

    return run


def wall_time(tiny: bool) -> dict:
    """Runs (a)."""
    K, n, d, L = (4, 5, 4, 4) if tiny else (10, 5, 100, 3)
    step, updates = (0.005, 500) if tiny else (0.05, 200_000)
    model = ufm.gaussian(
        jax.random.key(0), num_classes=K, per_class=n, width=d, depth=L
    )
    flow = ufm.GradientFlow(LOSS, n)
    solve = partial(ufm.solve, flow, model, stop=ufm.FinalTime(step * updates), saves=2)
    calls: dict[str, Callable] = {
        "flow, default": solve,
        "flow, rtol 1e-5": partial(solve, rtol=1e-5),
    }
    compile_s = {"flow, default": seconds(solve)}
    loops = {"descend": our_loop, "plain loop": plain_loop}
    for name, loop in loops.items():
        compiled, compile_s[name] = compile_apart(loop(n, step, updates), model)
        calls[name] = partial(compiled, model)
    # Descent takes too long to run once more for its state.
    results = {}

    def keep(name: str):
        results[name] = calls[name]()
        return results[name]

    times = interleave({name: partial(keep, name) for name in calls}, 0.0)
    first = compile_s["flow, default"] - times["flow, default"]["min_s"]
    compile_s["flow, default"] = max(0.0, first)
    exact = solve(rtol=1e-11).final
    goal = results["descend"]
    rows = []
    for name, result in results.items():
        ours = isinstance(result, ufm.Path)
        state = result.final if ours else result
        row = {"method": name, "compile_s": compile_s.get(name)} | times[name]
        row |= {
            "steps": int(result.stats.num_steps) if ours else updates,
            "ratio": times["descend"]["min_s"] / row["min_s"],
            "parameter_distance": distance(state, goal),
            "logit_distance": distance(state.logits(), goal.logits()),
            "flow_error": distance(state, exact),
            "log_loss": float(flow.log_loss(state)),
            "effective_rank": rank(state),
        }
        rows.append(row)
    ends = {"start": model, "end": goal}
    sharp = {name: float(sharpness(n, state)[0]) for name, state in ends.items()}
    size = {"K": K, "n": n, "d": d, "L": L, "step": step, "updates": updates}
    return _report_wall_time(size, rows, sharp | {"limit": 2 / step})


def _report_wall_time(size: dict, rows: list[dict], ends: dict) -> dict:
    columns = {
        "method": _text("method"),
        "min": time_of("min_s"),
        "median": time_of("median_s"),
        "compile": time_of("compile_s"),
        "steps": number("steps", "d"),
        "ratio": number("ratio", ".3g"),
        "theta off": number("parameter_distance", ".1e"),
        "Z off": number("logit_distance", ".1e"),
        "flow error": number("flow_error", ".1e"),
        "log loss": number("log_loss", ".5f"),
        "rank": number("effective_rank", ".5f"),
    }
    sizes = ", ".join(f"{key} = {value}" for key, value in size.items())
    show(f"(a) To one state, {sizes}", columns, rows)
    least = {row["method"]: row["min_s"] for row in rows}
    best = min(least["descend"], least["plain loop"])
    speedup = best / least["flow, default"]
    print(f"solve at its default tolerance is {speedup:.0f}x faster than the best peer")
    print(
        f"sharpness {ends['start']:.1f} at the start, {ends['end']:.1f} at the end; "
        f"descent is stable below {ends['limit']:.0f}"
    )
    return size | {"rows": rows, "speedup": speedup, "sharpness": ends}


# (b) The distance at equal time.


def equal_time(tiny: bool) -> dict:
    """Runs (b)."""
    model = ufm.small_gaussian(jax.random.key(0), num_classes=4)
    # Numbers of updates in one octave share one program.
    steps = (0.01, 0.007) if tiny else (0.01, 0.005)
    # On the way up, past the escape, and after 100,000 updates of 0.01.
    horizons = (3.5,) if tiny else (5.0, 40.0, 1000.0)
    rows, orders = [], []
    for horizon in horizons:
        ends = []
        for step in steps:
            gap = ufm.compare_with_flow(
                model, LOSS, step, round(horizon / step), per_class=1
            )
            here = _gap_rows(step, gap)
            ends.append(here[-1])
            if horizon == horizons[-1]:
                rows += here
        line = {"time": horizon}
        for key in ("parameter", "logit"):
            coarse, fine = (row[f"{key}_distance"] for row in ends)
            order = math.log(coarse / fine, steps[0] / steps[1])
            line |= {f"{key}_{steps[0]}": coarse, f"{key}_{steps[1]}": fine}
            line |= {f"{key}_order": order}
        orders.append(line)
    _show_equal_time(rows, orders, steps)
    return {"rows": rows, "orders": orders}


def _show_equal_time(rows: list[dict], orders: list[dict], steps) -> None:
    columns = {
        "step": number("step", "g"),
        "update": number("update", "d"),
        "time": number("time", "g"),
        "theta off": number("parameter_distance", ".2e"),
        "Z off": number("logit_distance", ".2e"),
        "log loss": number("log_loss", ".4f"),
    }
    show("(b) Distance at equal time, P2 Fig. 2 (K = d = 4, n = 1)", columns, rows)
    columns = {"time": number("time", "g")}
    for key, label in {"parameter": "theta", "logit": "Z"}.items():
        for step in steps:
            columns[f"{label}, {step}"] = number(f"{key}_{step}", ".2e")
        columns[f"order of {label}"] = number(f"{key}_order", ".3f")
    show("(b) Order in the step", columns, orders)


def _gap_rows(step: float, gap: ufm.FlowComparison) -> list[dict]:
    """Returns the comparison as rows, the loss being that of the flow."""
    flow = ufm.GradientFlow(LOSS, 1)
    losses = jax.vmap(lambda state: flow.log_loss(state))(gap.path.state)
    columns = {
        "update": gap.step,
        "time": step * np.asarray(gap.step),
        "parameter_distance": gap.parameter_distance,
        "logit_distance": gap.logit_distance,
        "log_loss": losses,
    }
    lines = zip(*(np.asarray(column).tolist() for column in columns.values()))
    return [{"step": step} | dict(zip(columns, line)) for line in lines]


# (c) What a step is a step of.


def stability(tiny: bool) -> dict:
    """Runs (c)."""
    depth, updates = (4, 500) if tiny else (10, 20_000)
    rows = [
        _stability_row(K, depth, 5, updates) for K in ((4,) if tiny else (4, 6, 8, 10))
    ]
    start = ufm.gaussian(
        jax.random.key(0), num_classes=4, per_class=5, width=4, depth=depth
    )
    difference = check_sharpness(5, start, rows[0]["sharpness_start"])

    def fate(run: str) -> Callable[[dict], str]:
        def cell(row: dict) -> str:
            if row[f"{run}_finite"]:
                return f"rank {row[f'{run}_rank']:.4f}"
            return f"finite to {row[f'{run}_last_step']}"

        return cell

    columns = {
        "K": number("K", "d"),
        "sharpness": number("sharpness_start", ".1f"),
        "maximum": number("sharpness_max", ".1f"),
        "at update": number("sharpness_max_update", "d"),
        "error": number("sharpness_error", ".0e"),
        "limit, sum": number("limit_sum", ".0f"),
        "limit, mean": number("limit_mean", ".0f"),
        "on the sum": fate("sum"),
        "on the mean": fate("mean"),
    }
    title = f"(c) P1's step of 0.08, L = {depth}, d = K, n = 5, {updates} updates"
    show(title, columns, rows)
    print(f"Lanczos against eigvalsh of the full Hessian: {difference:.0e}")
    return {"L": depth, "n": 5, "updates": updates, "rows": rows} | {
        "eigvalsh_difference": difference
    }


def _stability_row(K: int, depth: int, n: int, updates: int) -> dict:
    """Trains one start on the sum and on the mean; sharpness along the latter."""
    model = ufm.gaussian(
        jax.random.key(0), num_classes=K, per_class=n, width=K, depth=depth
    )
    # Every one of the first updates: a run on the sum lasts a few, and the peak of
    # sharpness on the mean is as short.
    dense = min(400, updates // 5)
    spaced = np.geomspace(dense, updates, 30).round().astype(int)
    saves = tuple(sorted({*range(dense), *spaced.tolist()}))
    step, decay = ufm.P1_FIGURE_3.step_size, ufm.P1_FIGURE_3.weight_decay[0]
    rule = optax.chain(optax.add_decayed_weights(decay), optax.sgd(step))
    runs = {
        name: ufm.descend(
            model, LOSS, rule, updates, per_class=n, mean=mean,
            saves=saves, keep_states=True,
        )
        for name, mean in {"sum": False, "mean": True}.items()
    }  # fmt: skip
    stable = runs["mean"]
    found = [
        sharpness(n, jax.tree.map(lambda leaf: leaf[i], stable.state))  # noqa: B023
        for i in range(int(stable.num_saved))
    ]
    values, errors = np.array(found).T
    row = {
        "K": K,
        "sharpness_start": float(values[0]),
        "sharpness_max": float(values.max()),
        "sharpness_max_update": int(stable.step[int(values.argmax())]),
        "sharpness_error": float((errors / values).max()),
        "limit_sum": 2 / step,
        "limit_mean": 2 / step * n * K,
    }
    for name, run in runs.items():
        finite = bool(run.outcome == ufm.Outcome.reached)
        row |= {
            f"{name}_finite": finite,
            f"{name}_last_step": int(run.final_step),
            f"{name}_rank": rank(run.final) if finite else None,
        }
    return row


# (d) Exactness.


@jax.jit
def _log_escape_time(flow: ufm.SigmoidalFlow, log_a: Array) -> Array:
    return flow.log_escape_time(log_a)


@jax.jit
def _solution(flow: ufm.SigmoidalFlow, log_a: Array, log_times: Array) -> Array:
    return jax.vmap(partial(flow.solution, log_a))(log_times)


def exactness(tiny: bool) -> dict:
    """Runs (d)."""
    K, n = 4, 5
    log_a = jnp.linspace(-7.0, -2.0, K)
    rows = []
    for depth in (1, 5) if tiny else (1, 2, 5):
        flows = {
            "MSE": ufm.SigmoidalFlow.mse(num_classes=K, per_class=n, depth=depth),
            # `linearised`, with one target a mode, so that both share one program.
            "linearised": ufm.SigmoidalFlow(depth, jnp.ones(K)),
        }
        for name, flow in flows.items():
            # Further on nothing moves, and explicit steps are limited by stability.
            time = 2 * float(jnp.exp(jnp.max(_log_escape_time(flow, log_a))))
            solve = partial(ufm.solve, flow, log_a, stop=ufm.FinalTime(time), saves=20)
            tolerances = {"default": None, "1e-11": 1e-11}
            calls = {key: partial(solve, rtol=rtol) for key, rtol in tolerances.items()}
            times = interleave(calls, 0.0 if tiny else 0.2)
            for key, call in calls.items():
                path = call()
                exact = _solution(flow, log_a, path.log_time)
                error = float(jnp.max(jnp.abs(path.state - exact)))
                rows.append(
                    {"flow": name, "L": depth, "time": time, "rtol": key}
                    | {"error": error}
                    | {"steps": int(path.stats.num_steps)}
                    | times[key]
                )
    columns = {
        "flow": _text("flow"),
        "L": number("L", "d"),
        "to t": number("time", ".4g"),
        "rtol": _text("rtol"),
        "error of log a": number("error", ".1e"),
        "steps": number("steps", "d"),
        "min": time_of("min_s"),
        "median": time_of("median_s"),
    }
    show("(d) Sigmoidal flows against the exact solution", columns, rows)
    return {"rows": rows}


_PARTS = {
    "a": ("wall_time", wall_time),
    "b": ("equal_time", equal_time),
    "c": ("stability", stability),
    "d": ("exactness", exactness),
}


def main(argv: Sequence[str] | None = None) -> dict:
    """Runs the benchmark and returns what it writes."""
    args = options("Times gradient flow beside gradient descent.", argv, list(_PARTS))
    chosen = list(_PARTS) if args.only is None else [args.only]
    parts = [_PARTS[letter] for letter in chosen]
    return write(args.out, "descent", {name: run(args.tiny) for name, run in parts})


if __name__ == "__main__":
    main()
