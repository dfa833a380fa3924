"""The phase diagram of the global optimum: what costs least, by classes and depth.

For every number of classes K and depth L the least

    (L+1)·sum_i sigma_i(Z)^q  subject to gaps Z_cc - Z_kc >= 1,   q = 2/(L+1),

(P1 eq. 24, n = 1; other class sizes only scale it) that many starts find, with the
certificate of `matrix_kkt`: that it is a local minimum. That nothing lies below is
proved nowhere but at L = 1, where the problem is convex and the simplex wins. The
papers compare the simplex, the cross-polytope and the polygon (P1 Thms 3.1, 3.2); that
other structures win in between is found here.

What is tried, for every K:

- the polygon and all of `pairs_and_singles`, the simplex and the cross-polytope among
  them, which are stationary at every depth and cost what their spectra say;
- at each rank from 3 to 8 the softmax code and random starts, `polish`ed at one depth.
  The best minima of each rank are then followed from depth to depth, up and down, where
  each start is the minimum next door, a few steps of Newton's iteration away. (At rank
  2 hundreds of random starts found nothing better than the polygon.)

NumPy and SciPy on the host, one core for a K; an executor of processes shares out Ks.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ..geometry import softmax_code
from ..models import Structure
from ._classify import classify
from ._fixed_rank import gaps_of, least_gap
from ._landscape import structure_objective
from ._matrix_kkt import MatrixKKT
from ._polish import polish
from ._reduced_kkt import Verdict
from ._search import pairs_and_singles, search

if TYPE_CHECKING:
    import xarray as xr

# The depth where starts are searched from: where ranks in between cost about the same.
_MIDDLE = 3.0
_LOWEST_RANK, _HIGHEST_RANK = 3, 8
# Minima of each rank that are followed: the order of two may change with the depth.
_FOLLOWED = 3
# Objectives this near are those of one structure; logits this near are it.
_SAME = 1e-9
_EXACT = 1e-6


@dataclass(frozen=True)
class Optimum:
    """The least that was found for one K and L.

    - `num_classes`, `depth`: K and L.
    - `objective`: (L+1)·sum sigma^q at a least gap of 1.
    - `point`: the logits with their certificate, a `MatrixKKT`.
    - `name`: "simplex ETF", "cross-polytope", "centred cross-polytope" (the better one
      for odd K), "regular polygon", "p pairs and s singles", "softmax code of rank r",
      or "other" with the singular values.
    - `structure`: the named structure that it is, the centred cross-polytope included,
      else `None`.
    - `starts`: how many frames were polished or compared.
    """

    num_classes: int
    depth: float | int
    objective: float
    point: MatrixKKT
    name: str
    structure: Structure | None
    starts: int

    @property
    def rank(self) -> int:
        """The rank of the logits."""
        return self.point.rank

    @property
    def certified(self) -> bool:
        """Whether it is a strict local minimum to second order."""
        return self.point.verdict is Verdict.MINIMUM

    def saving(self, structure: Structure) -> float:
        """Returns the part of a structure's objective that is saved; 0 where it won."""
        rival = structure_objective(structure, self.num_classes, self.depth)
        return 1 - self.objective / rival


@dataclass(frozen=True)
class PhaseDiagram:
    """Optima by number of classes and depth.

    - `num_classes`, `depths`: the two axes.
    - `rows`: `rows[i][j]` is the `Optimum` of the i-th K and the j-th L.
    """

    num_classes: tuple[int, ...]
    depths: tuple[float | int, ...]
    rows: tuple[tuple[Optimum, ...], ...]

    def to_dataset(self) -> "xr.Dataset":
        """Returns all of it over the dimensions `num_classes` and `depth`.

        `logits` and `singular_values` are padded with NaN to the largest K.
        """
        import xarray as xr

        largest = max(self.num_classes)
        read: dict[str, Callable[[Optimum], object]] = {
            "objective": lambda cell: cell.objective,
            "rank": lambda cell: cell.rank,
            "name": lambda cell: cell.name,
            "structure": lambda cell: cell.structure.value if cell.structure else "",
            "verdict": lambda cell: cell.point.verdict.name.lower(),
            "residual": lambda cell: cell.point.residual,
            "curvature": lambda cell: cell.point.curvature,
            "starts": lambda cell: cell.starts,
        }
        for structure in Structure:
            name = "saving_over_" + structure.value.replace("-", "_")
            read[name] = partial(Optimum.saving, structure=structure)
        over = ("num_classes", "depth")
        data = {
            name: (over, np.asarray([[of(cell) for cell in row] for row in self.rows]))
            for name, of in read.items()
        }
        for name, dims in {
            "singular_values": ("mode",),
            "logits": ("row", "column"),
        }.items():
            cells = [
                [_padded(getattr(cell.point, name), largest) for cell in row]
                for row in self.rows
            ]
            data[name] = ((*over, *dims), np.asarray(cells))
        axes = {"num_classes": list(self.num_classes), "depth": list(self.depths)}
        return xr.Dataset(data, axes)


def phase_diagram(
    num_classes: Sequence[int],
    depths: Sequence[float | int],
    *,
    starts: int = 4,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
    executor: Executor | None = None,
) -> PhaseDiagram:
    """Finds what costs least for every K and L.

    **Arguments:**

    - `num_classes`: Ks, 3 or more each.
    - `depths`: Ls, finite real numbers >= 1.
    - `starts`: random ones for each K and rank.
    - `seed`: of these.
    - `progress`: called with each K when its row is there, in order.
    - `executor`: where rows are computed, say a `ProcessPoolExecutor`; here if `None`.

    **Returns:** a `PhaseDiagram`. No objective in it is above that of a named
    structure.

    **Raises:** `ValueError` for no K or no L, a K below 3, a depth below 1 or not
    finite, or a negative number of starts.
    """
    classes, levels = tuple(num_classes), tuple(depths)
    _check(classes, levels, starts)
    work = partial(optima, depths=levels, starts=starts, seed=seed)
    rows = []
    for k, row in zip(classes, (executor.map if executor else map)(work, classes)):
        rows.append(row)
        if progress is not None:
            progress(k)
    return PhaseDiagram(classes, levels, tuple(rows))


def optima(
    num_classes: int, depths: Sequence[float | int], starts: int, seed: int
) -> tuple[Optimum, ...]:
    """Returns one row of `phase_diagram`: the optimum of one K at every depth."""
    levels = sorted({float(depth) for depth in depths})
    fixed = _at_every_depth(num_classes)
    followed, tried = _followed(num_classes, levels, starts, seed)
    found = {}
    for level in levels:
        frames = fixed + [point.logits for point in followed[level]]
        costs = np.asarray([_cost(frame, level) for frame in frames])
        # Of equals the first: closed forms go before what was polished.
        first = int(np.argmax(costs <= np.min(costs) * (1 + _SAME)))
        point = polish(frames[first], level).point
        name, structure = _named(point.logits)
        found[level] = Optimum(
            num_classes, level, (level + 1) * point.objective, point, name, structure,
            len(fixed) + tried,
        )  # fmt: skip
    return tuple(found[float(depth)] for depth in depths)


def _check(classes, depths, starts) -> None:
    if not classes or min(classes) < 3:
        raise ValueError(
            "Argument `num_classes` must be one or more numbers of at least 3, but is "
            f"{classes}: two classes know one structure only."
        )
    if not depths or not all(1 <= depth < math.inf for depth in depths):
        raise ValueError(
            "Argument `depths` must be one or more finite numbers of at least 1, but "
            f"is {depths}."
        )
    if starts < 0:
        raise ValueError(f"Argument `starts` must be at least 0, but is {starts}.")


def _at_every_depth(num_classes: int) -> list[np.ndarray]:
    """Returns the frames, of mean 0, that are stationary whatever the depth.

    One pair with singles is not, but for the triangle, and loses to none or two pairs.
    """
    pairs = [p for p in range(num_classes // 2 + 1) if p != 1 or num_classes == 3]
    angles = 2 * np.pi / num_classes * np.arange(num_classes)
    polygon = np.cos(angles[:, None] - angles)
    return [pairs_and_singles(num_classes, p) for p in pairs] + [polygon]


def _followed(num_classes, levels, starts, seed):
    """Returns the minima at each depth that were polished, and from how many starts."""
    pools: dict[float, list[MatrixKKT]] = {level: [] for level in levels}
    # At L = 1 the simplex is the optimum, and all else a saddle.
    deep = [level for level in levels if level > 1]
    if not deep:
        return pools, 0
    middle = min(range(len(deep)), key=lambda i: abs(deep[i] - _MIDDLE))
    tried = 0
    for rank in range(_LOWEST_RANK, min(_HIGHEST_RANK, num_classes - 2) + 1):
        code = softmax_code(num_classes, rank, starts=8 * (starts + 1), seed=seed)
        also = [code.vectors.T @ code.vectors]
        got = search(
            num_classes, deep[middle], rank, starts=starts, seed=seed, also=also
        )
        pools[deep[middle]] += got.minima
        tried += starts + 1
    pools[deep[middle]] = _best_of_each_rank(pools[deep[middle]])
    last = len(deep) - 1
    up, down = range(middle + 1, last + 1), range(last - 1, -1, -1)
    for here, there in [(i - 1, i) for i in up] + [(i + 1, i) for i in down]:
        moved = [polish(p.logits, deep[there], p.rank).point for p in pools[deep[here]]]
        pools[deep[there]] = _best_of_each_rank(pools[deep[there]] + moved)
    return pools, tried


def _best_of_each_rank(points: list[MatrixKKT]) -> list[MatrixKKT]:
    """Returns up to three of each rank, no two of one objective."""
    failed = (Verdict.NOT_STATIONARY, Verdict.INFEASIBLE)
    kept: list[MatrixKKT] = []
    for point in sorted(points, key=lambda point: point.objective):
        alike = [other for other in kept if other.rank == point.rank]
        new = all(point.objective > other.objective * (1 + _SAME) for other in alike)
        if point.verdict not in failed and new and len(alike) < _FOLLOWED:
            kept.append(point)
    return kept


def _cost(frame: np.ndarray, depth: float | int) -> float:
    """Returns sum sigma^q of a frame scaled to a least gap of 1."""
    values = np.linalg.svd(frame, compute_uv=False)
    values = values[values > 1e-9 * values[0]] / least_gap(frame)
    return float(np.sum(values ** (2 / (depth + 1))))


def _named(logits: np.ndarray) -> tuple[str, Structure | None]:
    """Returns what logits are, in words, and as a structure where they are one."""
    found = classify(logits, tolerance=_EXACT)
    if found.structure is not None and found.distance <= _EXACT:
        return found.name, found.structure
    if (pairs := _pairs(logits)) is not None:
        singles = len(logits) - 2 * pairs
        if singles == 1:
            return "centred cross-polytope", Structure.CROSS_POLYTOPE
        return f"{pairs} pairs and {singles} singles", None
    if found.name.startswith("softmax code"):
        return found.name, None
    return f"other (rank {found.rank}: {_spectrum(logits, found.rank)})", None


def _spectrum(logits: np.ndarray, rank: int) -> str:
    """Returns the singular values in words, falling, those alike as one."""
    values = np.linalg.svd(logits, compute_uv=False)[:rank] / least_gap(logits)
    words = []
    while len(values):
        alike = int(np.sum(values > values[0] * (1 - _EXACT)))
        words.append(f"{values[0]:.4g}" + (f" x{alike}" if alike > 1 else ""))
        values = values[alike:]
    return ", ".join(words)


def _pairs(logits: np.ndarray) -> int | None:
    """Returns how many pairs, where logits are some pairs and some singles.

    All gaps are then 1 but those within a pair, which are 2; and gaps and the columns'
    mean of 0 say all.
    """
    gaps = gaps_of(logits)
    within = gaps > 1.5
    wanted = 1.0 + within - np.eye(len(gaps))
    matched = np.array_equal(within, within.T) and np.max(np.sum(within, axis=0)) <= 1
    if matched and np.max(np.abs(gaps - wanted)) <= _EXACT:
        return int(np.sum(within)) // 2
    return None


def _padded(values: np.ndarray, size: int) -> np.ndarray:
    """Returns an array with NaN appended along each axis up to `size`."""
    widths = [(0, size - length) for length in values.shape]
    return np.pad(values, widths, constant_values=np.nan)
