"""`deepufm landscape`: what costs least at infinity, by classes and depth."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ._build import read_numbers, whole_numbers
from ._options import MaybeWhole, Values
from ._output import check_outputs, draw, processes, write_dataset

if TYPE_CHECKING:
    from ..analysis import PhaseDiagram


@dataclass(frozen=True)
class Landscape:
    """Find which structure costs least at infinity, by number of classes and depth.

    The least sum of squares of all layers and features whose logits have gaps of 1: for
    every K and L the best of the simplex, the cross-polytope, the polygon, and what a
    search finds, with its certificate as a local minimum. That nothing is better is
    proved at L = 1 alone. Takes about two minutes on one core.

    Prints the structures, and writes a table that xarray.open_dataset reads (.csv:
    pandas.read_csv, without the logits), with a PNG beside it.

    For instance:
      deepufm landscape

      deepufm landscape --num-classes 4:8 --depths 1 1.5 2 3 5 10 --starts 32

      deepufm landscape --num-classes 10 --depths 1:20 --out ten.csv
    """

    num_classes: Values = ("4:16",)
    """Numbers of classes K, 3 or more."""
    depths: Values = ("1:12",)
    """Depths L, real ones >= 1."""
    starts: int = 4
    """Random starts for each K and rank from 3 to 8."""
    seed: int = 0
    """Seed of these."""
    out: Path = Path("deepufm-landscape.nc")
    """Where to write, .nc or .csv; the picture goes beside it, with the suffix .png."""
    overwrite: bool = False
    """Replace an existing output."""
    workers: MaybeWhole = None
    """Numbers of classes worked on at once, each in a process of its own. [default:
    one per core]"""


def run_landscape_command(command: Landscape) -> int:
    """Prints the diagram, writes and draws it; 1 where a cell is not certified."""
    classes = whole_numbers("num_classes", command.num_classes)
    depths = read_numbers("depths", command.depths)
    picture = command.out.with_suffix(".png")
    check_outputs(command.out, picture, command.overwrite)
    from ..analysis import phase_diagram
    from ..figures import landscape_figure

    started = time.perf_counter()
    with processes(command.workers, len(classes)) as executor:
        diagram = phase_diagram(
            classes,
            depths,
            starts=command.starts,
            seed=command.seed,
            progress=lambda k: print(f"K = {k} done", file=sys.stderr, flush=True),
            executor=executor,
        )
    _print_table(diagram)
    print(f"\n{len(classes) * len(depths)} optima in ", end="")
    print(f"{time.perf_counter() - started:.1f} s")
    write_dataset(diagram.to_dataset(), command.out, but=("row", "column", "mode"))
    title = "Least norm at infinity"
    draw(
        picture,
        lambda path: landscape_figure(diagram, path, title=title),
        f"the results are in {command.out}",
    )
    return int(not all(cell.certified for row in diagram.rows for cell in row))


def _print_table(diagram: "PhaseDiagram") -> None:
    """Prints one line for all neighbouring depths of one K that share a structure."""
    from ..models import Structure

    print(f"{'K':>3}  {'L':<9}{'objective':<22}{'rank':>4}  structure")
    for row in diagram.rows:
        runs = []
        for cell in row:
            if runs and runs[-1][0].name == cell.name:
                runs[-1].append(cell)
            else:
                runs.append([cell])
        for run in runs:
            ends = (run[0], run[-1])[: len(run)]
            depths = "-".join(f"{cell.depth:g}" for cell in ends)
            costs = " to ".join(f"{cell.objective:.6g}" for cell in ends)
            saved = ""
            if run[0].structure is None:
                least = max(
                    min(cell.saving(structure) for structure in Structure)
                    for cell in run
                )
                saved = f", up to {least:.2%} less than any named"
            doubts = sum(not cell.certified for cell in run)
            doubt = f", {doubts} not certified" if doubts else ""
            start = f"{run[0].num_classes:3d}  {depths:<9}{costs:<22}{run[0].rank:4d}  "
            print(start + run[0].name + saved + doubt)
