"""The commands: check, compute, write, draw, and say where it is."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ._build import (
    check_comparison,
    compare,
    make_clock,
    make_saves,
    make_solver,
    make_stop,
    sweep_spec,
)
from ._families import default_time, describe_model, one_member
from ._options import Show, Solve, Status, Sweep
from ._output import draw
from ._progress import Progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..sweep import Failure, Fault, SweepSpec, SweepStore

# Damaged grid points that are named, one a line.
_MOST_FAULTS = 5


def run_sweep_command(command: Sweep) -> int:
    picture = _picture(command.out)
    if command.resume and command.overwrite:
        raise ValueError("Give either --resume or --overwrite, not both.")
    if not command.resume:
        _check_outputs(command.out, picture, command.overwrite)
    from ..sweep import AXES, SweepStore, check_spec, open_sweep, run_sweep

    spec = sweep_spec(command)
    check_spec(spec)
    if command.resume:
        store = _resume(command.out, spec)
    else:
        store = SweepStore.create(
            command.out,
            spec,
            overwrite=command.overwrite,
            title=describe_model(command.model),
        )
    seeds = len(spec.grid.values("seed"))
    total = len(store.pending()) * seeds
    before = len(list(spec.grid.cells())) * seeds - total
    if before:
        print(f"{before} members were done before", file=sys.stderr)
    started = time.perf_counter()
    varying = [axis for axis in AXES if len(getattr(spec.grid, axis)) > 1]
    with Progress(total, varying) as progress, _executor(command.workers) as executor:
        failures = run_sweep(spec, store, executor=executor, progress=progress.update)
    _report_failures(failures)
    if not before and len(failures) * seeds == total:
        return 1
    dataset = _to_show(open_sweep(command.out))
    _print_table(dataset)
    print(f"\n{total} members in {time.perf_counter() - started:.1f} s")
    print(f"results  {command.out}  (xarray.open_zarr)")
    _draw(dataset, picture)
    return int(bool(failures) or bool((dataset.outcome != 1).any()))


def run_status_command(command: Status) -> int:
    """Prints what a sweep is and how far it has come; 1 where members are missing."""
    from ..sweep import OUTCOMES, inspect_sweep

    found = inspect_sweep(command.store)
    about = found.attributes
    print("\n\n".join(filter(None, [about["title"], about["spec"]])))
    # Damaged grid points are not among the codes: they will be computed again.
    codes = [OUTCOMES[code] for cell in found.codes.values() for code in cell if code]
    print(f"\n{len(codes)} of {about['members']} members done")
    counts = {name: codes.count(name) for name in OUTCOMES}
    counts["missing"] = about["members"] - len(codes)
    for name, count in counts.items():
        if count:
            print(f"  {count:6d} {name}")
    _print_faults(command.store, found.faults)
    return int(bool(counts["missing"] or found.faults))


def run_show_command(command: Show) -> int:
    """Prints the table of a sweep and draws it again."""
    from ..sweep import open_sweep

    dataset = _to_show(open_sweep(command.store))
    if "final_effective_rank" not in dataset:
        raise ValueError(f"No member of the sweep at {command.store} is done yet.")
    _print_table(dataset)
    _draw(dataset, command.picture or _picture(command.store))
    return 0


def _resume(out: Path, spec: "SweepSpec") -> "SweepStore":
    """Opens a store to go on with; says what is damaged, and was written elsewhere."""
    import warnings

    from ..sweep import SweepStore

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        store = SweepStore.resume(out, spec)
    for warning in caught:
        print(f"warning: {warning.message}", file=sys.stderr)
    _print_faults(out, tuple(store.faults.values()))
    return store


def _print_faults(out: Path, faults: "Sequence[Fault]") -> None:
    """Names the first few damaged grid points."""
    from ..sweep import locate

    for fault in faults[:_MOST_FAULTS]:
        print(f"damaged  {locate(out, fault)}", file=sys.stderr)
    if faults:
        more = len(faults) - _MOST_FAULTS
        rest = f"and {more} more; " if more > 0 else ""
        print(f"         {rest}--resume computes them again", file=sys.stderr)


def _to_show(dataset):
    """Loads what the table and the picture need: all of a large sweep takes minutes."""
    names = ("effective_rank", "logit_margin", "log_loss")
    wanted = ["outcome", *(f"final_{name}" for name in names)]
    return dataset[[name for name in wanted if name in dataset]].load()


def _print_table(dataset) -> None:
    from ..sweep import summarise

    print(summarise(dataset).to_string(index=False, float_format="%.4g", na_rep="-"))


def _draw(dataset, picture: Path) -> None:
    from ..figures import sweep_figure

    title = dataset.attrs.get("title", "")
    kept = "the store is whole, and `deepufm show` draws it again"
    draw(picture, lambda path: sweep_figure(dataset, path, title=title), kept)


def run_solve_command(command: Solve) -> int:
    picture = _picture(command.out)
    _check_outputs(command.out, picture, command.overwrite)
    import jax
    import numpy as np

    from ..analysis import metrics
    from ..dynamics import solve
    from ..figures import orbit_figure
    from ..sweep import write_path

    flow, start, what = one_member(command)
    check_comparison(command, flow)
    options = command.integration
    path = jax.block_until_ready(
        solve(
            flow,
            start,
            stop=make_stop(options, default_time(command.model, 1e10)),
            clock=make_clock(options.clock),
            saves=make_saves(options, command.saves),
            observe=metrics,
            keep_states=False,
            solver=make_solver(options.solver),
            rtol=options.rtol,
            max_steps=options.max_steps,
        )
    )
    write_path(command.out, path, what, overwrite=command.overwrite)
    outcome = _outcome_name(path.outcome)
    title = what if outcome == "reached" else f"{what}  ({outcome})"
    squared = command.model.loss == "mse"
    orbit_figure(path, picture, squared_error=squared, title=title)
    print(what)
    print(f"outcome         {outcome}")
    print(f"log10 t         {float(path.final_log_time) / np.log(10):.6g}")
    shown = {
        "effective rank": "effective_rank",
        "KL": "kl",
        "logit margin": "logit_margin",
        "log-loss": "log_loss",
    }
    for label, name in shown.items():
        if name in path.final_observables:  # modes alone have no margin
            print(f"{label:15} {float(path.final_observables[name]):.6g}")
    print(f"steps           {int(path.stats.num_steps)}")
    failed = outcome != "reached"
    if command.descent_step is not None:
        gap = compare(command, flow, start)
        print(f"\n{gap.to_string(index=False, float_format='%.4g', na_rep='-')}\n")
        if gap.isna().to_numpy().any():
            failed = True
            print("descent diverged, or the flow did not get there", file=sys.stderr)
    print(f"results  {command.out}  (xarray.open_zarr)\npicture  {picture}")
    return int(failed)


def _picture(out: Path) -> Path:
    """Returns where the picture goes: beside the store, `.zarr` replaced by `.png`."""
    return out.with_name(out.name.removesuffix(".zarr") + ".png")


def _check_outputs(out: Path, picture: Path, overwrite: bool) -> None:
    """Refuses outputs before anything heavy is imported or compiled."""
    from ..sweep import check_output

    if out.suffix == ".png":
        raise ValueError(f"--out names the store, not the picture: {out} ends in .png.")
    check_output(out, overwrite=overwrite)
    check_output(picture, overwrite=overwrite)


def _outcome_name(outcome) -> str:
    from ..sweep import OUTCOMES, outcome_code

    return OUTCOMES[int(outcome_code(outcome))]


def _report_failures(failures: "list[Failure]") -> None:
    for failure in failures:
        print(f"failed   {failure}", file=sys.stderr)


def _executor(workers: int | None):
    from concurrent.futures import ThreadPoolExecutor

    from ..ensemble import available_cores

    if workers is not None and workers < 1:
        raise ValueError(f"--workers must be at least 1, but is {workers}.")
    return ThreadPoolExecutor(workers or available_cores())
