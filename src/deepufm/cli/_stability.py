"""`deepufm stability`: from what norm on each structure is stable, at every depth."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ._build import read_numbers
from ._options import Values
from ._output import check_outputs, draw, write_dataset

if TYPE_CHECKING:
    import numpy as np
    import xarray as xr

    from ..stability import RayStructure

# Columns that fit on a line.
_MOST_COLUMNS = 9
_POINTS = 240


@dataclass(frozen=True)
class Stability:
    """Find from what norm on each structure is stable, and at which depths.

    For every direction of the reduced flow that stays one at every norm, up to
    relabelling: the norm ||a||_1 above which small perturbations of it die out for
    good, at every depth (real depths are allowed); or the window of norms in which they
    do. "-" is never. Structures that do not tell all classes apart are left out.

    Prints the table, writes a dataset that xarray.open_dataset reads, and a PNG: the
    thresholds, and the largest exponent of one structure over norm and depth.

    For instance:
      deepufm stability

      deepufm stability --num-classes 8 --depths 1.5 2 3 5 10 --structure cross-polytope

      deepufm stability --num-classes 16 --structure 1 2 4 8
    """

    num_classes: int = 16
    """Number of classes K: 2, 4, 8 or 16."""
    depths: Values = ("1:8",)
    """Depths L, real ones >= 1."""
    structure: Values = ("simplex-etf",)
    """What the right half of the picture shows: simplex-etf, cross-polytope, or the
    numbers of the living modes."""
    out: Path = Path("deepufm-stability.nc")
    """Where to write, .nc or .csv; the picture goes beside it, with the suffix .png."""
    overwrite: bool = False
    """Replace an existing output."""


def run_stability_command(command: Stability) -> int:
    """Prints, writes and draws thresholds."""
    depths = read_numbers("depths", command.depths)
    if not all(1 <= depth < float("inf") for depth in depths):
        raise ValueError(
            "--depths takes finite numbers, at least 1, but got "
            f"{min(depths):g} to {max(depths):g}."
        )
    picture = command.out.with_suffix(".png")
    check_outputs(command.out, picture, command.overwrite)
    from ..figures import stability_figure
    from ..stability import ray_invariant_structures, stability_diagram

    structures = [s for s in ray_invariant_structures(command.num_classes) if s.spans]
    direction, name = _direction(command)
    table = _thresholds(structures, depths)
    _print_table(structures, depths, table)
    write_dataset(table, command.out)
    diagram = stability_diagram(direction, *_axes(table, depths))
    draw(
        picture,
        lambda path: stability_figure(
            table,
            diagram,
            path,
            name=name,
            title=f"Stability of the reduced flow's rays, K = {command.num_classes}",
        ),
        f"the thresholds are in {command.out}",
    )
    return 0


def _direction(command: Stability) -> tuple["np.ndarray", str]:
    """Returns the weights of the structure that is asked for, and its name."""
    import numpy as np

    from ..analysis import spans
    from ..models import Structure
    from ..stability import ray_support, structure_modes

    words = command.structure
    names = {structure.value: structure for structure in Structure}
    if len(words) == 1 and words[0] in names:
        modes = structure_modes(names[words[0]], command.num_classes)
        return np.asarray(modes), words[0].replace("simplex-etf", "simplex ETF")
    most = command.num_classes - 1
    if not all(word.isdigit() and 1 <= int(word) <= most for word in words):
        raise ValueError(
            f"--structure takes simplex-etf, cross-polytope or numbers of modes from 1 "
            f"to {most}, but got {' '.join(words)!r}."
        )
    direction = np.isin(np.arange(1, most + 1), [int(word) for word in words])
    ray_support(direction.astype(float))  # refuses what turns
    if not spans(direction):
        raise ValueError(
            f"--structure {' '.join(words)} does not tell all classes apart (the modes "
            "must span F_2^m): no norm makes it stable for good."
        )
    return direction.astype(float), f"modes {', '.join(words)}"


def _thresholds(
    structures: "list[RayStructure]", depths: tuple[float, ...]
) -> "xr.Dataset":
    import numpy as np
    import xarray as xr

    from ..stability import stability_threshold, stability_windows

    windows = [
        [stability_windows(s.direction, depth) for depth in depths] for s in structures
    ]
    first = [[w[0] if w else (np.nan, np.nan) for w in row] for row in windows]
    last = [
        [float(stability_threshold(s.direction, depth)) for depth in depths]
        for s in structures
    ]
    both = ("structure", "depth")
    window = {
        "long_name": "first interval of norms in which all exponents are negative"
    }
    named = {
        "name": ("structure", [s.name for s in structures]),
        "modes": ("structure", [" ".join(map(str, s.modes)) for s in structures]),
        "size": ("structure", [s.size for s in structures]),
        "orbit": ("structure", [s.orbit for s in structures]),
    }
    return xr.Dataset(
        {
            "threshold": (both, last, {"long_name": "stable above this norm"}),
            "window_low": (both, [[w[0] for w in row] for row in first], window),
            "window_high": (both, [[w[1] for w in row] for row in first], window),
        },
        {"depth": list(map(float, depths)), **named},
        {"num_classes": structures[0].num_classes},
    )


def _print_table(structures, depths, table: "xr.Dataset") -> None:
    shown = depths[:_MOST_COLUMNS]
    head = "".join(f"{f'L={depth:g}':>8}" for depth in shown)
    print(f"{'structure':<24}{'modes':>6}{'orbit':>7}{head}  for instance")
    for row, structure in enumerate(structures):
        cells = [_cell(table.isel(structure=row, depth=i)) for i in range(len(shown))]
        start = f"{structure.name:<24}{structure.size:6d}{structure.orbit:7d}"
        row_text = start + "".join(f"{cell:>8}" for cell in cells)
        print(f"{row_text}  {_modes(structure)}")
    marked = []
    for row, structure in enumerate(structures):
        for i, depth in enumerate(depths):
            found = table.isel(structure=row, depth=i)
            low, high = float(found.window_low), float(found.window_high)
            if _is_window(found):
                marked.append(
                    f"  {_modes(structure)}, L = {depth:g}: stable from {low:.4g} to "
                    f"{high:.4g} only"
                )
    if marked:
        print("\n* in a window of norms:")
        print("\n".join(marked))
    if len(depths) > len(shown):
        print(f"\n{len(depths) - len(shown)} more depths are in the dataset")


def _modes(structure: "RayStructure") -> str:
    """Returns numbers of modes, as --structure takes them."""
    if structure.size == structure.num_classes - 1:
        return "all modes"
    return " ".join(map(str, structure.modes))


def _is_window(found: "xr.Dataset") -> bool:
    import numpy as np

    bounded = bool(np.isfinite(float(found.window_high)))
    return bounded and not np.isfinite(float(found.threshold))


def _cell(found: "xr.Dataset") -> str:
    import numpy as np

    if np.isfinite(float(found.threshold)):
        return f"{float(found.threshold):.4g}"
    return "*" if _is_window(found) else "-"


def _axes(table: "xr.Dataset", depths) -> tuple["np.ndarray", "np.ndarray"]:
    """Returns norms and depths of the diagram: to beyond the largest threshold."""
    import numpy as np

    finite = table.threshold.values[np.isfinite(table.threshold.values)]
    highest = 1.5 * max(np.max(finite, initial=0.0), 0.1 * table.num_classes)
    low, high = min(depths), max(depths)
    return (
        np.linspace(0, highest, _POINTS),
        np.linspace(low, high if high > low else low + 1, _POINTS // 2),
    )
