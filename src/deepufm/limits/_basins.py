"""How large basins of the reduced flow are: where random starts end in the atlas."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..analysis import AtlasEntry, Verdict, atlas
from ..dynamics import HadamardFlow
from ._limit import limit
from ._result import wilson


@dataclass(frozen=True)
class Basin:
    """An orbit of limits, and the share of starts that go to any of its points.

    - `entry`: the `AtlasEntry`; `None` for starts whose limit is not certified, or in
        no entry.
    - `count` of the starts, as a `fraction`; `low`, `high`: Wilson's 95 % interval.
    """

    entry: AtlasEntry | None
    count: int
    fraction: float
    low: float
    high: float


def basins(
    num_classes: int,
    depth: float | int,
    *,
    starts: int = 200,
    scale: float = 1e-3,
    draw: Callable[[np.random.Generator], np.ndarray] | None = None,
    seed: int = 0,
) -> tuple[Basin, ...]:
    """Returns the share of random starts that each minimum of the atlas attracts.

    **Arguments:**

    - `num_classes`: K, 4, 8 or 16.
    - `depth`: L >= 1, finite.
    - `starts`: how many are drawn.
    - `scale`: their 1-norm.
    - `draw`: makes the direction of one start, K-1 non-negative modes, from a NumPy
        generator; uniform on [0, 1] by default (P1 Fig. 4).

    **Returns:** all minima of `atlas`, the largest basin first, those of none included;
    last, if there are any, the starts with no certified limit.

    **Raises:** `ValueError` as `atlas` and `limit`, and for starts that are no modes.

    !!! example
        largest, *others = ufm.basins(8, 2)
        print(largest.entry, largest.fraction)
    """
    if starts < 1 or not 0 < scale < np.inf:
        raise ValueError(
            "Arguments `starts` and `scale` must be at least 1, and positive and "
            f"finite, but are {starts} and {scale}."
        )
    entries = [e for e in atlas(num_classes, depth) if e.verdict is Verdict.MINIMUM]
    rng = np.random.default_rng(seed)
    modes = num_classes - 1
    one = (lambda rng: rng.uniform(size=modes)) if draw is None else draw
    a = np.asarray([one(rng) for _ in range(starts)], float)
    if a.shape != (starts, modes) or not (np.all(a >= 0) and np.all(np.any(a, axis=1))):
        raise ValueError(
            f"Argument `draw` must return {modes} non-negative modes, not all zero."
        )
    a *= scale / np.sum(a, axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        found = limit(HadamardFlow(num_classes, depth), np.log(a), name=lambda _: "")
    counts = [0] * len(entries)
    for direction in found.direction[found.certified]:
        matching = [i for i, e in enumerate(entries) if e.matches(direction)]
        # The atlas has all minima: none, if it were so, is counted with the others.
        if matching:
            counts[matching[0]] += 1
    ends: list[tuple[AtlasEntry | None, int]] = list(zip(entries, counts))
    ends.sort(key=lambda end: -end[1])
    if sum(counts) < starts:
        ends.append((None, starts - sum(counts)))
    return tuple(_basin(entry, count, starts) for entry, count in ends)


def _basin(entry: AtlasEntry | None, count: int, starts: int) -> Basin:
    low, high = wilson(count, starts)
    return Basin(entry, count, count / starts, low, high)
