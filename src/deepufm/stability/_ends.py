"""The ends of numbered starts, chunk by chunk: what each one's limit is, or why none.

The integration of many members runs here, on all cores; `limit`, one member after the
other on the host, goes to an executor if there is one. A chunk that fails there is an
end of its own for its starts, and takes nothing else with it.
"""

import abc
import concurrent.futures
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import jax
import numpy as np

from ..analysis import AtlasEntry
from ..dynamics import FinalTime, GradientFlow, HadamardFlow
from ..ensemble import ensemble
from ..limits import LimitStatus, least_gaps, limit, mean_logits
from ..models import CrossEntropy
from ._arrivals import READINGS, Minima, all_minima, follow_together, read_off
from ._destinations import destinations
from ._starts import Draw, mode_starts, model_starts

# As `limit` follows early states of the full flow.
_LATE_LOG_TIME = 70.0
_LATE_MAX_STEPS = 200_000
# K for which the atlas lists all minima.
_IN_ATLAS = (2, 4, 8, 16)


@dataclass(frozen=True)
class End:
    """Where a start goes.

    - `structure`: its name, or why there is none.
    - `rank`, `objective` (to 8 digits): 0 and 0 where there is none.
    - `entry`: the number of the atlas entry, or -1.
    """

    structure: str
    rank: int = 0
    objective: float = 0.0
    entry: int = -1


@dataclass
class Tally:
    """What became of a chunk's starts."""

    ends: Counter[End] = field(default_factory=Counter)
    batched: int = 0
    failure: str | None = None


class AbstractSource(abc.ABC):
    """Numbered starts of one flow, and how they are followed."""

    entries: tuple[AtlasEntry, ...] = ()  # where all possible limits are listed

    @abc.abstractmethod
    def begin(
        self, numbers: range, executor: concurrent.futures.Executor | None
    ) -> tuple[Tally, concurrent.futures.Future | None]:
        """Returns what is known of a chunk, and what its other ends come from."""

    @abc.abstractmethod
    def end_of(self, row: tuple) -> End:
        """Returns the end that one row of `limits_of_modes` or `..._means` is."""


@dataclass(frozen=True)
class ModeSource(AbstractSource):
    """Starts of the reduced flow, some followed together first."""

    num_classes: int
    depth: float
    scale: float
    seed: int
    draw: Draw | None
    batch: int  # how many are followed together; 0: none

    @property
    def minima(self) -> Minima | None:
        """All minima, where the atlas has them."""
        if self.num_classes not in _IN_ATLAS:
            return None
        return all_minima(self.num_classes, self.depth)

    @property
    def entries(self) -> tuple[AtlasEntry, ...]:
        """The minima's entries."""
        return () if self.minima is None else self.minima.entries

    def begin(self, numbers, executor):
        """Reads off what can be read off; the rest is `limit`'s."""
        log_a = mode_starts(
            self.num_classes, self.scale, numbers, seed=self.seed, draw=self.draw
        )
        tally = Tally()
        if self.batch and self.minima is not None and self.scale < READINGS[0]:
            early, late = follow_together(
                self.num_classes, self.depth, log_a, self.batch
            )
            found = read_off(self.minima, self.depth, early, late)
            tally.batched = int(np.sum(found >= 0))
            for number in found[found >= 0].tolist():
                tally.ends[_of_entry(self.entries, number)] += 1
            late = np.where(np.any(np.isnan(late), axis=1)[:, None], log_a, late)
            log_a = late[found < 0]
        if not len(log_a):
            return tally, None
        work = limits_of_modes, self.num_classes, self.depth, log_a, bool(self.entries)
        return tally, submitted(executor, *work)

    def end_of(self, row):
        """Returns the entry, or what `Limit.shares` goes by."""
        status, structure, rank, objective, direction = row
        if status != LimitStatus.CERTIFIED.name:
            return End(f"not certified ({status.lower()})")
        if self.minima is not None:
            number = int(self.minima.find(direction[None])[0])
            if number < 0:
                return End("not certified (not in the atlas)")
            return _of_entry(self.entries, number)
        return End(structure, rank, float(f"{objective:.8g}"))


@dataclass(frozen=True)
class ModelSource(AbstractSource):
    """Gaussian starts of the full flow, followed to late class means first."""

    num_classes: int
    depth: int
    scale: float
    width: int
    seed: int
    per_class: int

    def begin(self, numbers, executor):
        """Follows the chunk by the flow itself; `limit` goes on from its means."""
        models = model_starts(
            self.num_classes, self.depth, self.width, self.scale, numbers,
            per_class=self.per_class, seed=self.seed,
        )  # fmt: skip
        path = ensemble(
            GradientFlow(CrossEntropy(), self.per_class), None, models,
            stop=FinalTime(log=_LATE_LOG_TIME), max_steps=_LATE_MAX_STEPS,
        )  # fmt: skip
        means = mean_logits(path.final, self.per_class)
        right = np.all(np.isfinite(means), axis=(1, 2))
        right &= least_gaps(np.where(right[:, None, None], means, 0)) > 0
        tally, lost = Tally(), int(np.sum(~right))
        if lost:
            tally.ends[End("not certified (not_followed)")] += lost
        if lost == len(means):
            return tally, None
        work = limits_of_means, self.depth, self.per_class, means[right]
        return tally, submitted(executor, *work)

    def end_of(self, row):
        """Returns what `Limit.shares` goes by."""
        status, structure, rank, objective, _ = row
        if status != LimitStatus.CERTIFIED.name:
            return End(f"not certified ({status.lower()})")
        return End(structure, rank, float(f"{objective:.8g}"))


def _of_entry(entries: tuple[AtlasEntry, ...], number: int) -> End:
    # Named once, by who reports it.
    return End("", entries[number].rank, entries[number].objective, number)


def limits_of_modes(
    num_classes: int, depth: float, log_a: np.ndarray, is_listed: bool
) -> list[tuple]:
    """Returns (status, structure, rank, objective, direction) of each start.

    Work for an executor, whose processes have JAX's settings of their own. Where the
    atlas lists the limits they need no name, and are judged faster.
    """
    if is_listed:
        return [
            (end.status.name, "", end.rank, end.objective, end.direction)
            for end in destinations(num_classes, depth, log_a)
        ]
    with jax.enable_x64(True):
        return _rows(limit(HadamardFlow(num_classes, depth), log_a))


def limits_of_means(depth: int, per_class: int, means: np.ndarray) -> list[tuple]:
    """Returns the same of late class means of the full flow."""
    with jax.enable_x64(True):
        flow = GradientFlow(CrossEntropy(), per_class, depth=depth)
        return _rows(limit(flow, means))


def _rows(found) -> list[tuple]:
    return [
        (status.name, str(structure), int(rank), float(objective), direction)
        for status, structure, rank, objective, direction in zip(
            found.status, found.structure, found.rank, found.objective, found.direction
        )
    ]


def submitted(executor, function, *args) -> concurrent.futures.Future:
    """Returns the future of a call, made at once where there is no executor."""
    if executor is not None:
        return executor.submit(function, *args)
    future = concurrent.futures.Future()
    try:
        future.set_result(function(*args))
    except Exception as error:
        future.set_exception(error)
    return future


def tallies(
    source: AbstractSource,
    numbers: range,
    chunk: int,
    executor: concurrent.futures.Executor | None,
) -> Iterator[tuple[int, Tally]]:
    """Yields the number of starts and the ends of each chunk, as they are done.

    A chunk's starts whose work failed end in "failed (...)".
    """
    waiting: dict[concurrent.futures.Future, tuple[Tally, range]] = {}
    for first in range(numbers.start, numbers.stop, chunk):
        part = range(first, min(first + chunk, numbers.stop))
        try:
            tally, future = source.begin(part, executor)
        except ValueError:
            raise  # starts or options that are wrong are so in every chunk
        except Exception as error:
            yield len(part), _failed(Tally(), len(part), part, error)
            continue
        if future is None:
            yield len(part), tally
            continue
        waiting[future] = tally, part
        for done in [f for f in waiting if f.done()]:
            yield _finished(source, done, *waiting.pop(done))
    for done in concurrent.futures.as_completed(list(waiting)):
        yield _finished(source, done, *waiting.pop(done))


def _finished(source, future, tally, part) -> tuple[int, Tally]:
    error, count = future.exception(), len(part)
    if error is not None:
        left = count - sum(tally.ends.values())
        return count, _failed(tally, left, part, error)
    for row in future.result():
        tally.ends[source.end_of(row)] += 1
    return count, tally


def _failed(tally: Tally, count: int, part: range, error: BaseException) -> Tally:
    reason = type(error).__name__
    tally.ends[End(f"not certified (failed: {reason})")] += count
    tally.failure = f"{count} starts of {part.start} to {part.stop - 1}: {error!r}"
    return tally
