"""The command `limit`: what the members of a finished sweep tend to."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ._options import MaybeWhole
from ._output import draw, processes

# Fewer members than this are done before other processes have started: 12 ms and 1 s
# each, against some 7 s to start two.
_FEW = {"final_log_modes": 1000, "final_class_means": 20}


@dataclass(frozen=True)
class Limit:
    """Add to a sweep what its members tend to as t goes to infinity, with certificates.

    Follows every member that reached its stop to norms where its direction settles,
    solves for the stationary point there, and says whether it is a strict local
    minimum that the flow approaches (the exit status is 1 where one is not). Writes the
    group "limits" of the store (xarray.open_zarr(store, group="limits")) and a picture
    beside it.

    For sweeps of the reduced flow, and of the linear full flow of cross-entropy. The
    latter should go to late times, where layers are balanced and the examples of a
    class agree; sweep --final-time 1e30 costs little more than 1e8.

    For instance:
      deepufm sweep --flow reduced --num-classes 16 --depth 1:8 --scale 1e-3 --seeds 50

      deepufm limit deepufm-sweep.zarr
    """

    store: Annotated[Path, tyro.conf.Positional]
    """A store that `deepufm sweep` wrote."""
    tolerance: float = 1e-10
    """The largest KKT residual of a certified limit."""
    picture: Path | None = None
    """Where to draw; None is beside the store, with the suffix -limits.png."""
    workers: MaybeWhole = None
    """Processes at once. [default: one per core]"""


def run_limit_command(command: Limit) -> int:
    """Computes, writes, prints and draws limits; 1 where some are not certified."""
    from tqdm import tqdm

    from ..figures import limits_figure
    from ..sweep import (
        OUTCOMES,
        STATUSES,
        open_sweep,
        summarise_limits,
        sweep_limits,
        write_limits,
    )

    dataset = open_sweep(command.store).load()
    if not 0 < command.tolerance < 1:
        raise ValueError(
            f"--tolerance must be between 0 and 1, but is {command.tolerance}."
        )
    total = int((dataset.outcome == OUTCOMES.index("reached")).sum())
    started = time.perf_counter()
    few = next((count for name, count in _FEW.items() if name in dataset), 0)
    # No other processes for few members, unless they are asked for.
    tasks = 1 if command.workers is None and total < few else total
    with (
        processes(command.workers, tasks) as executor,
        tqdm(total=total, unit="member", disable=not sys.stderr.isatty()) as bar,
    ):
        limits = sweep_limits(
            dataset,
            tolerance=command.tolerance,
            executor=executor,
            progress=bar.update,
        )
    write_limits(command.store, limits)
    table = summarise_limits(limits)
    print(table.to_string(index=False, float_format="%.4g", na_rep="-"))
    taken = time.perf_counter() - started
    early = int((limits.status == STATUSES.index("early")).sum())
    if early:
        print(
            f"{early} members were too early (a least gap below 50) for a certificate: "
            "sweep to a later time, such as --final-time 1e30",
            file=sys.stderr,
        )
    done = int((limits.status == STATUSES.index("certified")).sum())
    print(f"\n{done} of {dataset.outcome.size} certified, in {taken:.1f} s")
    print(f'results  {command.store}  (xarray.open_zarr, group="limits")')
    name = command.store.name.removesuffix(".zarr") + "-limits.png"
    picture = command.picture or command.store.with_name(name)
    title = dataset.attrs.get("title", "")
    draw(
        picture,
        lambda path: limits_figure(limits, path, title=title),
        "the limits are in the store",
    )
    return int(done < dataset.outcome.size)
