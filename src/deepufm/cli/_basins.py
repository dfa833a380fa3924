"""`deepufm basins`: what share of random starts goes to each structure."""

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ._build import read_numbers, whole_numbers
from ._options import MaybeWhole, Values
from ._output import check_outputs, draw, processes

if TYPE_CHECKING:
    from ..stability import BasinFractions

# Two processes take some 7 s to start.
_FEW = 1000


@dataclass(frozen=True)
class Basins:
    """Find what share of random starts goes to each structure, with intervals.

    Draws starts at each depth and scale until Wilson's 95 % interval of every share is
    as narrow as asked for, follows each to its certified limit, and counts. Starts
    without a certificate are a share of their own. The exit status is 1 where there are
    any, or where the starts did not do for the intervals.

    With --widths, of the full flow, from Gaussian models of these widths; that takes a
    second or more a start. Otherwise of the reduced flow, whose singular values start
    uniform on [0, 1] and are scaled to the 1-norm --scales (K a power of two).

    Prints the shares, and writes a table (pandas.read_csv) with a PNG beside it.

    For instance:
      deepufm basins --num-classes 8 --depths 2 --scales 1e-4 1e-3 .01 .1 1 10

      deepufm basins --num-classes 16 --depths 1:8 --half-width 0.05

      deepufm basins --num-classes 5 --depths 3 --widths 5 20 --scales 1 --starts 50
    """

    num_classes: int = 8
    """Number of classes K."""
    depths: Values = ("2",)
    """Depths L >= 1; real ones for the reduced flow."""
    scales: Values = ("1e-3",)
    """1-norms of the starts; with --widths, factors of N(0, 1/d)."""
    widths: Values = ()
    """Widths d >= K of the full flow; the reduced flow if there are none."""
    per_class: int = 1
    """Examples of each class n, of the full flow."""
    half_width: float = 0.02
    """Half the width that every interval should have."""
    starts: MaybeWhole = None
    """Draw just so many at each point instead. [default: as many as needed]"""
    max_starts: int = 100_000
    """At one point, however wide the intervals still are."""
    seed: int = 0
    """Seed of the starts."""
    out: Path = Path("deepufm-basins.csv")
    """Where to write, .csv; the picture goes beside it, with the suffix .png."""
    overwrite: bool = False
    """Replace an existing output."""
    workers: MaybeWhole = None
    """Processes at once. [default: one per core]"""


def run_basins_command(command: Basins) -> int:
    """Computes, prints, writes and draws shares."""
    from tqdm import tqdm

    depths = read_numbers("depths", command.depths)
    scales = read_numbers("scales", command.scales)
    widths = whole_numbers("widths", command.widths) or None
    _check(command, widths)
    picture = command.out.with_suffix(".png")
    check_outputs(command.out, picture, command.overwrite, (".csv",))
    from ..figures import basins_figure
    from ..stability import basin_fractions

    started = time.perf_counter()
    least = command.starts or command.max_starts
    tasks = 1 if command.workers is None and least < _FEW and not widths else least
    with (
        processes(command.workers, tasks) as executor,
        tqdm(unit="start", disable=not sys.stderr.isatty()) as bar,
    ):

        def progress(done: int, expected: int) -> None:
            bar.total = expected
            bar.update(done - bar.n)

        found = basin_fractions(
            command.num_classes,
            depths,
            scales,
            widths,
            half_width=command.half_width,
            starts=command.starts,
            max_starts=command.max_starts,
            per_class=command.per_class,
            seed=command.seed,
            executor=executor,
            progress=progress,
        )
    print(found)
    taken = time.perf_counter() - started
    total = found.batched + found.followed
    print(f"\n{total} starts in {taken:.1f} s, {1e3 * taken / total:.3g} ms each")
    _write(found, command.out)
    print(f"results  {command.out}  (pandas.read_csv)")
    flow = "full" if widths else "reduced"
    title = f"Basins of the {flow} flow, K = {command.num_classes}"
    draw(
        picture,
        lambda path: basins_figure(found, path, title=title),
        f"the shares are in {command.out}",
    )
    certain = all(row.certified or not row.count for row in found.rows)
    if not found.is_narrow:
        print(
            f"some intervals are wider than {2 * command.half_width:g}: raise "
            "--max-starts",
            file=sys.stderr,
        )
    return int(not (certain and found.is_narrow))


def _check(command: Basins, widths: tuple[int, ...] | None) -> None:
    """Says in options what would be said in Python."""
    k = command.num_classes
    if widths is None and (k < 2 or k & (k - 1)):
        raise ValueError(
            "--num-classes must be a power of two for the reduced flow, but is "
            f"{k}. The full flow takes any: give --widths."
        )
    if widths is None and command.per_class != 1:
        raise ValueError("--per-class is of the full flow: give --widths as well.")
    if widths is not None and min(widths) < k:
        raise ValueError(
            f"--widths must be at least --num-classes, {k}, but one is {min(widths)}."
        )
    if command.seed < 0:
        raise ValueError(f"--seed must be at least 0, but is {command.seed}.")


def _write(found: "BasinFractions", out: Path) -> None:
    import pandas as pd

    rows = []
    for row in found.rows:
        entry = row.entry
        modes = " ".join(map(str, entry.modes)) if entry is not None else ""
        rows.append({k: v for k, v in asdict(row).items() if k != "entry"})
        rows[-1]["modes"] = modes
    try:
        pd.DataFrame(rows).to_csv(out, index=False, float_format="%.16g")
    except OSError as error:
        raise ValueError(
            f"Output {out} cannot be written ({error.strerror or error})."
        ) from None
