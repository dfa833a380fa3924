"""What part of random starts goes to each structure, as narrowly as is asked for.

Shares come with Wilson's interval. Starts are drawn in rounds until the interval of
every share at a point of the grid is narrow enough: half its width at most h. A round
is as long as the share that needs most is expected to need: the half-width of Wilson's
interval,

    z/(1 + z²/n) · sqrt(p(1-p)/n + z²/(4n²)),

is solved for n at the share p seen so far, so that two to four looks are the rule.
Stopping by what is seen makes coverage a little less than the level: a look stops early
exactly where the shares happen to seem far from 1/2. With few looks at intervals this
narrow that is slight; a number fixed in advance (`starts`) has none of it.

Starts are numbered (`_starts`), so that a share does not depend on the rounds.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import scipy.optimize
import scipy.stats

from ..analysis import AtlasEntry, classify
from ..dynamics import HadamardFlow
from ..geometry import sylvester_hadamard
from ..limits import wilson
from ._ends import AbstractSource, End, ModelSource, ModeSource, tallies
from ._rays import is_ray_invariant, ray_name
from ._starts import Draw

# A pilot, then at least this much more at each look.
_PILOT = 200
_GROWTH = 1.1
# Compiling the batch's program takes as long as `limit` for this many starts.
_BATCH_FROM = 1000
# Starts a chunk: of batches, of `limit` alone, and of the full flow.
_CHUNKS = 1000, 100, 32
# Limits are known to ten digits: what is further from a structure only resembles it.
_EXACT = 1e-6


@dataclass(frozen=True)
class BasinFraction:
    """The share of the starts at one point of the grid that has one end.

    - `depth` L, `scale`, `width` d: the point; `width` None for the reduced flow.
    - `structure`: a name, or "not certified (why)".
    - `entry`: the atlas entry that it is, reduced flow of K <= 16; else None.
    - `rank`, `objective`: as `Limit` has them. 0 and NaN where not certified.
    - `count` of `starts`, as a `fraction`; `low`, `high`: Wilson's interval.
    """

    depth: float
    scale: float
    width: int | None
    structure: str
    entry: AtlasEntry | None
    rank: int
    objective: float
    count: int
    starts: int
    fraction: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the interval's width."""
        return (self.high - self.low) / 2

    @property
    def certified(self) -> bool:
        """Whether these starts' limits are known."""
        return self.rank > 0


@dataclass(frozen=True)
class BasinFractions:
    """Shares at all points of a grid.

    - `rows`: a `BasinFraction` for each point and end, points in order, the largest
        share of a point first, what is not certified last.
    - `num_classes` K, `confidence` of the intervals.
    - `half_width`: what was asked for; None for a fixed number of starts.
    - `batched`: starts read off in batches, under the conditions of `limit`'s
        certificate, but with the nearest minimum of the atlas for its own proposal;
        `followed`: starts judged by `limit` itself.
    - `looks`: after how many rounds each point was done.
    - `failures`: what went wrong with chunks of starts, if anything.
    """

    rows: tuple[BasinFraction, ...]
    num_classes: int
    confidence: float
    half_width: float | None
    batched: int
    followed: int
    looks: tuple[int, ...]
    failures: tuple[str, ...]

    @property
    def is_narrow(self) -> bool:
        """Whether every interval is as narrow as was asked for."""
        wanted = np.inf if self.half_width is None else self.half_width
        return all(row.half_width <= wanted for row in self.rows)

    def at(
        self, depth: float | int, scale: float | int, width: int | None = None
    ) -> tuple[BasinFraction, ...]:
        """Returns the rows of one point."""
        point = (depth, scale, width)
        return tuple(r for r in self.rows if (r.depth, r.scale, r.width) == point)

    def __str__(self) -> str:
        """Says what each point's shares are."""
        lines = []
        for point in dict.fromkeys((r.depth, r.scale, r.width) for r in self.rows):
            rows, (depth, scale, width) = self.at(*point), point
            sizes = "" if width is None else f", width {width}"
            lines.append(
                f"depth {depth:g}, scale {scale:g}{sizes}: {rows[0].starts} starts"
            )
            lines += [
                f"  {r.count:7d}  {r.fraction:7.2%} ({r.low:.2%} to {r.high:.2%})  "
                f"{r.structure}" + (f", objective {r.objective:.6g}" * r.certified)
                for r in rows
            ]
        return "\n".join([*lines, *self.failures])


def basin_fractions(
    num_classes: int,
    depths: Sequence[float | int],
    scales: Sequence[float | int],
    widths: Sequence[int] | None = None,
    *,
    half_width: float = 0.02,
    confidence: float = 0.95,
    starts: int | None = None,
    max_starts: int = 100_000,
    per_class: int = 1,
    draw: Draw | None = None,
    seed: int = 0,
    batched: bool | None = None,
    executor: Executor | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> BasinFractions:
    """Returns the share of starts that go to each structure, over a grid of points.

    Of the reduced flow (`widths` None) 100,000 starts take a few minutes; of the full
    flow each takes a second or more. What has no certified limit has a share of its
    own, which says why.

    **Arguments:**

    - `num_classes`: K; a power of two without `widths`.
    - `depths`: L >= 1, finite; whole numbers with `widths`.
    - `scales`: 1-norms of a at the start; with `widths`, Gaussian models of entries
        `scale`·N(0, 1/d).
    - `widths`: d >= K, for the full flow; `None` for the reduced one.
    - `half_width`: draw starts at each point until all intervals are as narrow as
        twice this; coverage is then slightly below `confidence`.
    - `confidence`: of Wilson's intervals.
    - `starts`: draw just so many at each point instead.
    - `max_starts`: at a point, however wide the intervals still are.
    - `per_class`: n, of the full flow.
    - `draw`: makes the direction of a start of the reduced flow, K-1 non-negative
        modes, from a NumPy generator; uniform on [0, 1] by default (P1 Fig. 4).
    - `seed`: start i is the same at every point, in whatever rounds it is drawn.
    - `batched`: whether starts of the reduced flow, K <= 16, are followed together and
        read off where `limit` would certify (module `_arrivals`); `None`: where many
        may be needed.
    - `executor`: runs `limit` on chunks of starts; in processes, which must not be
        forked once JAX has threads: use the "spawn" method.
    - `progress`: is called with the starts done and those now expected in all.

    **Returns:** a `BasinFractions`.

    **Raises:** `ValueError` for points that no flow has, levels or widths of intervals
    outside 0 to 1, and without float64.

    !!! example
        found = ufm.basin_fractions(8, [2], [1e-3, 10.0])
        print(found)
    """
    _check(depths, scales, widths, half_width, confidence, starts, max_starts)
    if widths is None:
        HadamardFlow(num_classes, 1)  # refuses K that is no power of two
    if batched is None:
        batched = num_classes <= 16 and (starts or max_starts) >= _BATCH_FROM
    chosen = [None] if widths is None else list(widths)
    points = list(itertools.product(map(float, depths), map(float, scales), chosen))
    sources: list[AbstractSource] = []
    for depth, scale, width in points:
        if width is None:
            batch = _CHUNKS[0] if batched else 0
            one = ModeSource(num_classes, float(depth), float(scale), seed, draw, batch)
        else:
            one = ModelSource(
                num_classes, int(depth), float(scale), width, seed, per_class
            )
        sources.append(one)
    chunk = _CHUNKS[2 if widths is not None else 0 if batched else 1]
    rounds = _Rounds(half_width, confidence, starts, max_starts, progress, len(points))
    states = [rounds.run(source, chunk, executor) for source in sources]
    rows, names = [], {}
    for point, source, state in zip(points, sources, states):
        rows += _rows(num_classes, point, source, state, confidence, names)
    batched_starts = sum(state.batched for state in states)
    return BasinFractions(
        tuple(rows),
        num_classes,
        confidence,
        half_width if starts is None else None,
        batched_starts,
        sum(state.done for state in states) - batched_starts,
        tuple(state.looks for state in states),
        tuple(failure for state in states for failure in state.failures),
    )


def starts_needed(share: float, half_width: float, confidence: float = 0.95) -> int:
    """Returns how many starts make Wilson's interval of a share so narrow."""
    z = float(scipy.stats.norm.ppf((1 + confidence) / 2))

    def excess(n):
        spread = math.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2)
        return z * spread / (1 + z * z / n) - half_width

    most = (z / half_width) ** 2  # where even a share of 1/2 has less
    if excess(1.0) <= 0:
        return 1
    return math.ceil(float(np.asarray(scipy.optimize.brentq(excess, 1.0, most))))


@dataclass
class _State:
    """What is known of one point."""

    ends: Counter[End]
    done: int = 0
    batched: int = 0
    looks: int = 0
    failures: tuple[str, ...] = ()


class _Rounds:
    """Draws starts at one point after another, until each is known well enough."""

    def __init__(self, half_width, confidence, starts, max_starts, progress, points):
        self.half_width, self.confidence = half_width, confidence
        self.starts, self.max_starts = starts, max_starts
        self.progress = progress
        self.done, self.left = 0, points

    def run(self, source: AbstractSource, chunk: int, executor) -> _State:
        """Returns the ends of one point's starts."""
        state = _State(Counter())
        goal = self.starts or min(_PILOT, self.max_starts)
        while goal > state.done:
            numbers = range(state.done, goal)
            for count, tally in tallies(source, numbers, chunk, executor):
                state.ends.update(tally.ends)
                state.done += count
                self.done += count
                state.batched += tally.batched
                if tally.failure:
                    state.failures += (tally.failure,)
                self._report(goal - state.done)
            state.looks += 1
            goal = self._next_goal(source, state)
        self.left -= 1
        return state

    def _next_goal(self, source: AbstractSource, state: _State) -> int:
        if self.starts is not None:
            return state.done
        counts = [*state.ends.values(), 0 if source.entries else state.done]
        widths = [wilson(c, state.done, self.confidence) for c in counts]
        if all(high - low <= 2 * self.half_width for low, high in widths):
            return state.done
        needed = max(
            starts_needed(c / state.done, self.half_width, self.confidence)
            for c in counts
        )
        more = math.ceil(_GROWTH * state.done)
        return min(max(needed, more), self.max_starts)

    def _report(self, here: int) -> None:
        if self.progress is None:
            return
        # Points to come are expected to need what those so far did.
        other = self.starts or min(_PILOT, self.max_starts)
        self.progress(self.done, self.done + here + (self.left - 1) * other)


def _rows(num_classes, point, source, state, confidence, names) -> list[BasinFraction]:
    """Returns one point's shares; minima of the atlas have one, be it 0."""
    ends = {
        End("", entry.rank, entry.objective, i): 0
        for i, entry in enumerate(source.entries)
    } | state.ends
    rows = []
    for end, count in ends.items():
        entry = source.entries[end.entry] if end.entry >= 0 else None
        structure = end.structure
        if entry is not None:
            key = num_classes, entry.rank, f"{entry.objective:.8g}", entry.depth
            if key not in names:
                names[key] = _name(num_classes, entry)
            structure = names[key]
        low, high = wilson(count, state.done, confidence)
        objective = end.objective if end.rank else np.nan
        if entry is not None:  # in units of a, whose logits are Phi diag(0, a) Phi
            objective *= num_classes ** (2 / (entry.depth + 1))
        rows.append(
            BasinFraction(
                depth=point[0],
                scale=point[1],
                width=point[2],
                structure=structure,
                entry=entry,
                rank=end.rank,
                objective=objective,
                count=count,
                starts=state.done,
                fraction=count / state.done,
                low=low,
                high=high,
            )
        )
    return sorted(rows, key=lambda row: (not row.certified, -row.count))


def _name(num_classes: int, entry: AtlasEntry) -> str:
    """Returns what `ray_invariant_structures` calls an entry, or else `limit`."""
    if is_ray_invariant(entry.a):
        return ray_name(entry.a > 0)
    phi = np.asarray(sylvester_hadamard(num_classes))
    found = classify((phi[:, 1:] * entry.a) @ phi[1:])
    if found.structure is not None and found.distance > _EXACT:
        return f"other (rank {found.rank})"
    return found.name


def _check(depths, scales, widths, half_width, confidence, starts, most) -> None:
    if not (len(depths) and len(scales) and (widths is None or len(widths))):
        raise ValueError("Arguments `depths`, `scales` and `widths` must not be empty.")
    if not all(1 <= depth < np.inf for depth in depths):
        raise ValueError(
            f"Argument `depths` must hold finite numbers, at least 1, but is {depths}."
        )
    if widths is not None and not all(float(d).is_integer() for d in depths):
        raise ValueError(
            "The full flow's depths must be whole numbers, but `depths` is "
            f"{depths}. Only the reduced flow (`widths` None) has real depths."
        )
    if not all(0 < scale < np.inf for scale in scales):
        raise ValueError(
            f"Argument `scales` must hold positive, finite numbers, but is {scales}."
        )
    if not (0 < half_width < 0.5 and 0 < confidence < 1):
        raise ValueError(
            "Arguments `half_width` and `confidence` must be between 0 and 0.5, and 0 "
            f"and 1, but are {half_width} and {confidence}."
        )
    if (starts is not None and starts < 1) or most < 1:
        raise ValueError(
            "Arguments `starts` and `max_starts` must be at least 1, but are "
            f"{starts} and {most}."
        )
    if jnp.zeros(()).dtype != jnp.float64:
        raise ValueError(
            "`basin_fractions` needs float64: set "
            '`jax.config.update("jax_enable_x64", True)`.'
        )
