"""What one device does: run once on a GPU or TPU, and keep the figures.

Four parts, each beside the same on the CPU of that machine: one right-hand side of
`GradientFlow`; one full solve; `vmap` over seeds of the full flow; `vmap` over starts
of the reduced flow. Results are compared with those of the CPU. Two to four minutes.

    python benchmarks/bench_device.py [--tiny] [--out FILE.json]
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from _harness import compile_apart, interleave, number, options, show, time_of, write

import deepufm as ufm


def full_member(seed, *, classes: int, per_class: int, width: int, depth: int):
    """Returns (flow, model) of P1 Figure 2's setting."""
    model = ufm.gaussian(
        jax.random.key(seed),
        num_classes=classes,
        per_class=per_class,
        width=width,
        depth=depth,
    )
    return ufm.GradientFlow(ufm.CrossEntropy(), per_class), model


def programs(tiny: bool) -> dict:
    """Returns name -> (function, argument, number of members); results are vectors."""
    sizes = {"classes": 10, "per_class": 5, "width": 100, "depth": 8}
    if tiny:
        sizes = {"classes": 3, "per_class": 2, "width": 4, "depth": 2}
    stop = ufm.FinalTime(1e2 if tiny else 1e8)
    seeds, starts = (2, 4) if tiny else (32, 4096)
    num_modes = 3 if tiny else 15

    def right_hand_side(seed):
        flow, model = full_member(seed, **sizes)
        direction, log_speed = flow(model)
        return jnp.stack([log_speed, jnp.sum(direction.head**2)])

    def full_solve(seed):
        flow, model = full_member(seed, **sizes)
        path = ufm.solve(flow, model, stop=stop, saves=2)
        observed = ufm.metrics(flow, path.final_log_time, path.final)
        return jnp.stack([observed["effective_rank"], observed["log_loss"]])

    def reduced_solve(log_a):
        flow = ufm.HadamardFlow(num_modes + 1, 2.0)
        path = ufm.solve(flow, log_a, stop=ufm.FinalTime(1e10), saves=2)
        return path.final

    a = np.random.default_rng(0).uniform(size=(starts, num_modes))
    log_a = np.log(1e-3 * a / a.sum(1, keepdims=True))
    return {
        "right-hand side": (right_hand_side, np.asarray(0), 1),
        "full solve": (full_solve, np.asarray(0), 1),
        f"full solve, vmap over {seeds} seeds": (
            jax.vmap(full_solve),
            np.arange(seeds),
            seeds,
        ),
        f"reduced solve, vmap over {starts} starts": (
            jax.vmap(reduced_solve),
            log_a,
            starts,
        ),
    }


def measure(name, function, argument, members, device) -> dict:
    """Returns times and results of one program on one device."""
    with jax.default_device(device):
        placed = jax.device_put(argument, device)
        compiled, compile_s = compile_apart(function, placed)
        times = interleave({name: lambda: compiled(placed)}, 10.0, most=50)[name]
        result = np.asarray(compiled(placed))
    return {
        "program": name,
        "device": f"{device.platform} {device.device_kind}",
        "compile_s": compile_s,
        "per_member_s": times["min_s"] / members,
        **times,
        "result": result.tolist(),
    }


def main(argv: Sequence[str] | None = None) -> dict:
    """Runs the benchmark; returns what it writes."""
    given = options(__doc__ or "", argv)
    devices = [jax.devices()[0]]
    if devices[0].platform != "cpu":
        devices.append(jax.devices("cpu")[0])
    rows = []
    for name, (function, argument, members) in programs(given.tiny).items():
        ours = [measure(name, function, argument, members, d) for d in devices]
        for row in ours:
            difference = np.abs(np.asarray(row["result"]) - ours[-1]["result"])
            row["difference"] = float(difference.max())
        rows += ours
    show(
        "One device (least time; difference from the CPU, absolute, in log a or rank)",
        {
            "program": lambda row: row["program"],
            "device": lambda row: row["device"],
            "compile": time_of("compile_s"),
            "time": time_of("min_s"),
            "median": time_of("median_s"),
            "per member": time_of("per_member_s"),
            "difference": number("difference", ".1e"),
        },
        rows,
    )
    return write(given.out, "device", {"rows": rows})


if __name__ == "__main__":
    main()
