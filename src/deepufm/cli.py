"""The command line: `deepufm sweep` and `deepufm solve`.

Only this module turns words into objects, sets JAX's precision, prints, and draws a
progress bar. Heavy imports wait until a command runs, so `--help` answers at once.
"""

import difflib
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

if TYPE_CHECKING:
    from .dynamics import SaveEvery
    from .sweep import Cell, Failure, SweepSpec

_Clock = Literal["log-time", "physical-time", "arc-length", "log-norm"]
_Values = Annotated[tuple[str, ...], tyro.conf.arg(metavar="VALUE [VALUE ...]")]
_Solver = Literal["auto", "tsit5", "dopri5", "dopri8", "kvaerno3", "kvaerno5"]


# P1 App. E.4: entries of the random start that Figure 11 shows.
_FIGURE_11_STD = 0.03


@dataclass(frozen=True)
class Integration:
    """How members are integrated, and when they are done."""

    final_time: float | None = None
    """Stop at this time t of the flow. [default: 1e8, unless another stop is given]"""
    log_final_time: float | None = None
    """Stop at this natural logarithm of t, for times no float holds (2.3e5: 10^1e5)."""
    final_norm: float | None = None
    """Stop at this norm: of all parameters (full flow), sum of modes (reduced flow)."""
    log_loss: float | None = None
    """Stop when the natural logarithm of the loss has fallen to this."""
    clock: _Clock = "log-time"
    """What steps are taken in. log-time reaches any t; log-norm nears the limit."""
    solver: _Solver = "auto"
    """ODE solver; auto takes the one that the benchmarks found best for the clock."""
    rtol: float | None = None
    """Relative error allowed in a step. [default: 1e-8 in float64, 1e-5 in float32]"""
    max_steps: int = 100_000
    """Steps after which a member is given up (outcome step_budget)."""
    save_every: float | None = None
    """Save at this step of the clock, where its end is not known in advance: any stop
    but a time on log-time and physical-time, or a norm on log-norm (reduced flow)."""
    dtype: Literal["float64", "float32"] = "float64"
    """Precision. float32 is for GPUs and quick looks."""


@dataclass(frozen=True)
class Sweep:
    """Run a grid of deep unconstrained features models to the end, and plot the result.

    Without options: Figure 2 of "The Implicit Bias of Depth" at full size. K = 10
    classes, n = 5 examples each, width 100, depths 1 to 10, five seeds, entries
    N(0, 1/d), gradient flow to t = 1e8; takes about half a minute on two cores.

    Every axis takes several values, and whole numbers also ranges (1:10 is 1 to 10,
    1:9:2 the odd ones). All combinations are run, and written to one Zarr store that
    xarray.open_zarr reads, with a PNG beside it.

    Examples:
      deepufm sweep

      deepufm sweep --depth 1:8 --width 50 100 200 --seeds 10 --out widths.zarr

      deepufm sweep --flow reduced --num-classes 16 --depth 1:8 --scale 1e-3 --seeds 100

      deepufm sweep --depth 3 --scale 0.1 0.3 1 --log-final-time 700
    """

    num_classes: _Values = ("10",)
    """Numbers of classes K. The reduced flow needs powers of two."""
    per_class: _Values = ("5",)
    """Examples per class n (full flow)."""
    width: _Values = ("100",)
    """Widths d >= K of every layer (full flow)."""
    depth: _Values = ("1:10",)
    """Depths L; the reduced flow takes real ones >= 1."""
    scale: _Values = ("1",)
    """Scales: entries are scale*N(0, 1/d) (full), or the 1-norm of a(0) (reduced)."""
    seeds: int = 5
    """Number of seeds a grid point."""
    first_seed: int = 0
    """The first of them; the others follow."""
    flow: Literal["full", "reduced"] = "full"
    """full: all matrices from Gaussian entries. reduced: K-1 singular values under
    Hadamard initialisation, from uniform values."""
    plain_std: bool = False
    """Take the scale as the standard deviation of every entry itself (full flow)."""
    uniform: tuple[float, float] = (0.0, 1.0)
    """Interval that singular values are drawn from before scaling (reduced flow)."""
    integration: Annotated[Integration, tyro.conf.arg(name="")] = field(
        default_factory=Integration
    )
    saves: int = 25
    """Points saved along every orbit, equal steps of the clock, start and end included
    (with --save-every: at most this many)."""
    out: Path = Path("deepufm-sweep.zarr")
    """Where to write; the picture goes beside it, with the suffix .png."""
    overwrite: bool = False
    """Replace an existing output."""
    workers: int | None = None
    """Grid points run at once. [default: one a core]"""


@dataclass(frozen=True)
class Solve:
    """Integrate one model, and plot singular values, norm and KL against log t.

    Without options: the setting of Figure 11 of "The Implicit Bias of Depth" (K = 10,
    n = 5, d = 100, L = 3, entries of standard deviation 0.03) to t = 1e10. With
    --flow reduced, that of Figure 4 (K = 16, L = 2, ‖a(0)‖_1 = 1e-3).

    Examples:
      deepufm solve

      deepufm solve --flow reduced

      deepufm solve --flow reduced --depth 1 --start 1 1 1 1 .001 .001 .001

      deepufm solve --flow reduced --clock log-norm --final-norm 1e6
    """

    flow: Literal["full", "reduced"] = "full"
    """full: all matrices. reduced: K-1 singular values, Hadamard initialisation."""
    num_classes: int | None = None
    """Classes K. [default: 10 (full), 16 (reduced)]"""
    per_class: int = 5
    """Examples per class n (full flow)."""
    width: int = 100
    """Width d >= K (full flow)."""
    depth: float | None = None
    """Depth L. [default: 3 (full), 2 (reduced)]"""
    scale: float | None = None
    """Entries are scale*N(0, 1/d) (full) [default: entries of standard deviation 0.03];
    1-norm of a(0) (reduced) [default: 1e-3]."""
    start: tuple[float, ...] = ()
    """The K-1 initial singular values themselves instead of random ones: a(0) of the
    reduced flow, or the logit singular values of a Hadamard start of the full flow."""
    seed: int = 0
    """Seed of the random start."""
    integration: Annotated[Integration, tyro.conf.arg(name="")] = field(
        default_factory=Integration
    )
    saves: int = 200
    """Points saved, equal steps of the clock (with --save-every: at most this many)."""
    out: Path = Path("deepufm-solve.zarr")
    """Where to write the orbit; the picture goes beside it, with the suffix .png."""
    overwrite: bool = False
    """Replace an existing output."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status.

    0: done, every member reached its stop. 1: done, but some did not. 2: bad input.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    command, unknown = tyro.cli(
        Sweep | Solve,
        prog="deepufm",
        description="Gradient-flow dynamics of the deep unconstrained features model.",
        args=arguments or ["--help"],
        return_unknown_args=True,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )
    name = type(command).__name__.lower()
    try:
        if unknown:
            raise ValueError(_unknown_option(unknown[0], type(command)))
        _set_precision(command.integration.dtype)
        return _sweep(command) if isinstance(command, Sweep) else _solve(command)
    except ValueError as error:
        print(f"deepufm {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"deepufm {name}: interrupted; what was written stays.", file=sys.stderr)
        return 130


def _sweep(command: Sweep) -> int:
    picture = command.out.with_suffix(".png")
    _check_outputs(command.out, picture, command.overwrite)
    from .figures import sweep_figure
    from .sweep import (
        AXES,
        SweepStore,
        check_spec,
        open_sweep,
        run_sweep,
        summarise,
    )

    spec = _sweep_spec(command)
    check_spec(spec)
    store = SweepStore.create(command.out, spec, overwrite=command.overwrite)
    total = len(list(spec.grid.cells())) * len(spec.grid.seed)
    started = time.perf_counter()
    varying = [axis for axis in AXES if len(getattr(spec.grid, axis)) > 1]
    with _Progress(total, varying) as progress, _executor(command.workers) as executor:
        failures = run_sweep(spec, store, executor=executor, progress=progress.update)
    dataset = open_sweep(command.out).load()
    print(summarise(dataset).to_string(index=False, float_format="%.4g", na_rep="-"))
    print(f"\n{total} members in {time.perf_counter() - started:.1f} s")
    print(f"results  {command.out}  (xarray.open_zarr)")
    if len(failures) * len(spec.grid.seed) < total:
        sweep_figure(dataset, picture)
        print(f"picture  {picture}")
    _report_failures(failures)
    return int(bool(failures) or bool((dataset.outcome != 1).any()))


def _solve(command: Solve) -> int:
    picture = command.out.with_suffix(".png")
    _check_outputs(command.out, picture, command.overwrite)
    import jax
    import numpy as np

    from .analysis import metrics
    from .dynamics import solve
    from .figures import orbit_figure
    from .sweep import write_path

    reduced = command.flow == "reduced"
    classes = command.num_classes or (16 if reduced else 10)
    if command.start:
        classes = len(command.start) + 1
    flow, start, what = _one_member(command, classes)
    options = command.integration
    path = jax.block_until_ready(
        solve(
            flow,
            start,
            stop=_stop(options, default_time=1e10),
            clock=_clock(options.clock),
            saves=_saves(options, command.saves),
            observe=metrics,
            keep_states=False,
            solver=_solver(options.solver),
            rtol=options.rtol,
            max_steps=options.max_steps,
        )
    )
    write_path(command.out, path, what, overwrite=command.overwrite)
    orbit_figure(path, picture, num_classes=classes, title=what)
    final = {name: np.asarray(v) for name, v in path.final_observables.items()}
    print(what)
    print(f"outcome         {_outcome_name(path.outcome)}")
    print(f"log10 t         {float(path.final_log_time) / np.log(10):.6g}")
    print(f"effective rank  {float(final['effective_rank']):.6g}")
    print(f"KL              {float(final['kl']):.6g}")
    print(f"logit margin    {float(final['logit_margin']):.6g}")
    print(f"log-loss        {float(final['log_loss']):.6g}")
    print(f"steps           {int(path.stats.num_steps)}")
    print(f"results  {command.out}  (xarray.open_zarr)\npicture  {picture}")
    return int(_outcome_name(path.outcome) != "reached")


def _one_member(command: Solve, classes: int):
    """Returns the flow, the start, and a line that says what they are."""
    import jax
    import jax.numpy as jnp

    from .dynamics import GradientFlow, HadamardFlow, log_modes
    from .models import CrossEntropy, gaussian, hadamard
    from .sweep import Shape, UniformModesFamily

    key = jax.random.key(command.seed)
    given = jnp.asarray(command.start, float) if command.start else None
    if command.flow == "reduced":
        depth = 2.0 if command.depth is None else command.depth
        flow = HadamardFlow(classes, depth)
        what = f"reduced flow, K = {classes}, L = {depth:g}"
        if given is not None:
            return flow, log_modes(given), f"{what}, given start"
        scale = 1e-3 if command.scale is None else command.scale
        if not 0 < scale < float("inf"):
            raise ValueError(f"--scale must be positive and finite, but is {scale}.")
        shape = Shape(classes, 1, 1, 1)
        sizes = (jnp.asarray(depth), jnp.asarray(1.0), jnp.asarray(scale))
        _, start = UniformModesFamily().member(shape, key, *sizes)
        return flow, start, f"{what}, ‖a(0)‖₁ = {scale:g}, seed {command.seed}"
    depth = 3 if command.depth is None else command.depth
    if depth != int(depth):
        raise ValueError(
            f"--depth must be a whole number for the full flow, but is {depth}. Only "
            "--flow reduced has real depths."
        )
    depth, n, width = int(depth), command.per_class, command.width
    what = f"full flow, K = {classes}, n = {n}, d = {width}, L = {depth}"
    flow = GradientFlow(CrossEntropy(), n)
    if given is not None:
        model = hadamard(key, given, per_class=n, width=width, depth=depth)
        return flow, model, f"{what}, Hadamard start"
    scale, plain = command.scale, command.scale is None
    model = gaussian(
        key,
        num_classes=classes,
        per_class=n,
        width=width,
        depth=depth,
        scale=1.0 if scale is None else scale,
        std=_FIGURE_11_STD if plain else None,
    )
    shown = f"std {_FIGURE_11_STD:g}" if plain else f"scale {scale:g}"
    return flow, model, f"{what}, {shown}, seed {command.seed}"


def _sweep_spec(command: Sweep) -> "SweepSpec":
    from .sweep import GaussianFamily, Grid, SweepSpec, UniformModesFamily

    reduced = command.flow == "reduced"
    options = command.integration
    if command.seeds < 1:
        raise ValueError(f"--seeds must be at least 1, but is {command.seeds}.")
    first = command.first_seed
    grid = Grid(
        num_classes=_whole("num-classes", command.num_classes),
        # The reduced flow has no width, and n is absorbed in its units.
        per_class=(1,) if reduced else _whole("per-class", command.per_class),
        width=(1,) if reduced else _whole("width", command.width),
        depth=_numbers("depth", command.depth),
        scale=_numbers("scale", command.scale),
        seed=tuple(range(first, first + command.seeds)),
    )
    uniform = UniformModesFamily(*command.uniform)
    return SweepSpec(
        grid=grid,
        family=uniform if reduced else GaussianFamily(plain_std=command.plain_std),
        stop=_stop(options, default_time=1e8),
        clock=_clock(options.clock),
        solver=_solver(options.solver),
        rtol=options.rtol,
        max_steps=options.max_steps,
        saves=_saves(options, command.saves),
    )


def _stop(options: Integration, default_time: float):
    from .dynamics import FinalNorm, FinalTime, LogLossBelow

    given = [
        name
        for name in ("final_time", "log_final_time", "final_norm", "log_loss")
        if getattr(options, name) is not None
    ]
    if len(given) > 1:
        shown = " and ".join("--" + name.replace("_", "-") for name in given)
        raise ValueError(f"Give one stop, not {shown}.")
    if options.log_final_time is not None:
        return FinalTime(log=options.log_final_time)
    if options.final_norm is not None:
        return FinalNorm(options.final_norm)
    if options.log_loss is not None:
        return LogLossBelow(options.log_loss)
    return FinalTime(default_time if options.final_time is None else options.final_time)


def _clock(name: _Clock):
    from . import dynamics

    return {
        "log-time": dynamics.LogTime,
        "physical-time": dynamics.PhysicalTime,
        "arc-length": dynamics.ArcLength,
        "log-norm": dynamics.LogNorm,
    }[name]()


def _solver(name: _Solver):
    if name == "auto":
        return None
    import diffrax

    return getattr(diffrax, name.capitalize())()


def _saves(options: Integration, count: int) -> "int | SaveEvery":
    from .dynamics import SaveEvery

    if options.save_every is None:
        return count
    return SaveEvery(options.save_every, count)


def _whole(name: str, words: tuple[str, ...]) -> tuple[int, ...]:
    numbers = _numbers(name, words)
    for number in numbers:
        if not float(number).is_integer():
            raise ValueError(f"--{name} takes whole numbers, but got {number:g}.")
    return tuple(int(number) for number in numbers)


def _numbers(name: str, words: tuple[str, ...]) -> tuple[float, ...]:
    """Reads numbers and inclusive ranges first:last[:step] of whole numbers."""
    numbers: list[float] = []
    for word in words:
        parts = word.split(":")
        try:
            if len(parts) == 1:
                value = float(word)
                numbers.append(int(value) if value.is_integer() else value)
            else:
                first, last, *step = map(int, parts)
                (step,) = step or [1]
                numbers += range(first, last + (1 if step > 0 else -1), step)
        except (ValueError, OverflowError):
            raise ValueError(
                f"--{name} takes numbers and ranges such as 1:10 or 1:9:2, but got "
                f"{word!r}."
            ) from None
    return tuple(numbers)


def _check_outputs(out: Path, picture: Path, overwrite: bool) -> None:
    """Refuses outputs before anything heavy is imported or compiled."""
    from .sweep import check_output

    if picture == out:
        raise ValueError(f"--out names the store, not the picture: {out} ends in .png.")
    check_output(out, overwrite=overwrite)
    check_output(picture, overwrite=overwrite)


def _set_precision(dtype: str) -> None:
    import jax

    jax.config.update("jax_enable_x64", dtype == "float64")


def _outcome_name(outcome) -> str:
    from .sweep import OUTCOMES, outcome_code

    return OUTCOMES[int(outcome_code(outcome))]


def _unknown_option(word: str, command: type) -> str:
    """One line, with the nearest option there is."""
    from dataclasses import fields

    known = [f.name for f in fields(command) if f.name != "integration"]
    known += [f.name for f in fields(Integration)]
    options = ["--" + name.replace("_", "-") for name in known]
    near = difflib.get_close_matches(word.split("=")[0], options, n=1)
    hint = f"Did you mean {near[0]}? " if near else ""
    name = command.__name__.lower()
    return f"unknown option {word}. {hint}See `deepufm {name} --help`."


def _report_failures(failures: "list[Failure]") -> None:
    for failure in failures:
        print(f"failed   {failure}", file=sys.stderr)


def _executor(workers: int | None):
    import os
    from concurrent.futures import ThreadPoolExecutor

    if workers is not None and workers < 1:
        raise ValueError(f"--workers must be at least 1, but is {workers}.")
    return ThreadPoolExecutor(workers or os.cpu_count() or 1)


class _Progress:
    """A bar on a terminal; one line a grid point when piped."""

    def __init__(self, total: int, axes: list[str]):
        from tqdm import tqdm

        self._axes = axes  # those that tell grid points apart
        self._quiet = not sys.stderr.isatty()
        self._done, self._total = 0, total
        self._bar = tqdm(
            total=total, unit="member", disable=self._quiet, desc="compiling"
        )

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *exception) -> None:
        self._bar.close()

    def update(self, cell: "Cell", members: int) -> None:
        self._done += members
        self._bar.set_description("integrating", refresh=False)
        self._bar.update(members)
        if self._quiet:
            where = ", ".join(f"{axis} {getattr(cell, axis):g}" for axis in self._axes)
            line = f"{self._done}/{self._total} members done  {where}"
            print(line.rstrip(), file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
