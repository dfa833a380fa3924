"""The command line: `sweep`, `solve`, what follows them, and what needs no sweep.

`status`, `show` and `limit` read a sweep; `landscape`, `stability` and `basins` do not.

Only this package turns words into objects, sets JAX's precision, prints, and draws a
progress bar. Plotting and storage are imported when a command runs, not for `--help`.
"""

import difflib
import importlib.metadata
import os
import sys
from dataclasses import fields
from pathlib import Path

import tyro

from ._basins import Basins, run_basins_command
from ._commands import (
    run_show_command,
    run_solve_command,
    run_status_command,
    run_sweep_command,
)
from ._landscape import Landscape, run_landscape_command
from ._limits import Limit, run_limit_command
from ._options import Integration, Model, Show, Solve, Status, Sweep
from ._stability import Stability, run_stability_command

Command = Sweep | Solve | Status | Show | Limit | Landscape | Stability | Basins


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status.

    0: done, every member reached its stop. 1: done, but some did not. 2: bad input, or
    a store that cannot be written, or read.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments == ["--version"]:
        print(f"deepufm {importlib.metadata.version('deepufm')}")
        return 0
    command, unknown = tyro.cli(
        Command,
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
        return _run(command)
    except ValueError as error:
        print(f"deepufm {name}: {_in_options(str(error))}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        from ..sweep import StoreError

        if not isinstance(error, StoreError):
            raise
        print(f"deepufm {name}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader left, as `| head` does; results are on disk by then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        kept = ""
        if isinstance(command, Sweep):
            kept = (
                f"; finished grid points stay in {command.out}. The same command with "
                "--resume goes on with the others"
            )
        print(f"deepufm {name}: interrupted{kept}.", file=sys.stderr, flush=True)
        # Threads that compile or integrate cannot be stopped; nobody waits for them.
        os._exit(130)


def _run(command: Command) -> int:
    if isinstance(command, Status):
        return run_status_command(command)
    if isinstance(command, Show):
        return run_show_command(command)
    if isinstance(command, Landscape):
        return run_landscape_command(command)
    if isinstance(command, Limit | Stability | Basins):
        _set_precision("float64")
        if isinstance(command, Limit):
            return run_limit_command(command)
        if isinstance(command, Basins):
            return run_basins_command(command)
        return run_stability_command(command)
    _set_precision(command.integration.dtype)
    if isinstance(command, Sweep):
        _keep_programs(command.compilation_cache)
        return run_sweep_command(command)
    return run_solve_command(command)


def _set_precision(dtype: str) -> None:
    import jax

    jax.config.update("jax_enable_x64", dtype == "float64")


def _keep_programs(folder: Path | None) -> None:
    if folder is None:
        return
    import jax

    jax.config.update("jax_compilation_cache_dir", str(folder.absolute()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def _unknown_option(word: str, command: type) -> str:
    """One line, with the nearest option there is."""
    nested = ("model", "integration")
    known = [f.name for f in fields(command) if f.name not in nested]
    if command in (Sweep, Solve):
        known += [f.name for part in (Model, Integration) for f in fields(part)]
    options = ["--" + name.replace("_", "-") for name in known]
    near = difflib.get_close_matches(word.split("=")[0], options, n=1, cutoff=0.7)
    hint = f"Did you mean {near[0]}? " if near else ""
    name = command.__name__.lower()
    return f"unknown option {word}. {hint}See `deepufm {name} --help`."


def _in_options(message: str) -> str:
    """Says in options what the library's messages say in Python."""
    for python, option in {
        "`saves=SaveEvery(step, capacity)`": "--save-every",
        "`FinalTime(log=...)`, the natural logarithm": "--log-final-time",
        "Use GradientFlow for general K": "Use --flow full for general K",
        "`bottleneck=True`": "--bottleneck",
        "Argument `per_class` must be one number, or one for each": (
            "--class-sizes needs one number for each"
        ),
    }.items():
        message = message.replace(python, option)
    return message
