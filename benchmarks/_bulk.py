"""Members of the reduced flow in bulk: their reference, tolerances and fair timing."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from _bulk_hosts import Processes
from _harness import interleave

# Tolerances are powers of two between these; the loosest that will do is timed.
_LOOSEST, _TIGHTEST = 2, 40


class Members(NamedTuple):
    """Depths, (members,), and starts log a(0), (members, K-1)."""

    depths: np.ndarray
    log_a: np.ndarray

    @property
    def count(self) -> int:
        """How many there are."""
        return self.depths.shape[0]

    def first(self, count: int) -> "Members":
        """Returns the first `count`; all are drawn alike."""
        return Members(self.depths[:count], self.log_a[:count])


def draw(count: int, num_classes: int, seed: int = 0) -> Members:
    """Draws depths from 1 to 8, and P1 Figure 4's starts: uniform, of 1-norm 1e-3."""
    rng = np.random.default_rng(seed)
    a = rng.uniform(size=(count, num_classes - 1))
    depths = rng.integers(1, 9, count).astype(float)
    return Members(depths, np.log(1e-3 * a / a.sum(1, keepdims=True)))


class Done(NamedTuple):
    """What an integrator returns."""

    states: Any  # log a at the end, (members, K-1)
    steps: Any = None  # tried, on average; None where nobody counts
    cpu_elsewhere: float = 0.0  # seconds, in other processes


@dataclass(frozen=True)
class Contender:
    """An integrator, and on how many members at most it is timed."""

    name: str
    family: str
    run: Callable[[Members, float, float], Done]  # (members, t, tolerance)
    most: int
    like: str | None = None  # whose tolerances it takes, its steps being the same


class Problem:
    """All members to one time: errors against the reference, and times."""

    def __init__(self, members: Members, time: float, reference: np.ndarray):
        self.members, self.time, self.reference = members, time, reference
        self._errors: dict[tuple[str, int], float] = {}

    def error(self, states) -> float:
        """Returns the 99th percentile over members of max |error of log a|."""
        known = self.reference.shape[0]
        errors = np.max(np.abs(np.asarray(states)[:known] - self.reference), axis=1)
        # A NaN is an error without bound; "higher" never averages one away.
        errors = np.where(np.isnan(errors), np.inf, errors)
        return float(np.quantile(errors, 0.99, method="higher"))

    def loosest(self, contender: Contender, target: float, count: int) -> float | None:
        """Returns the loosest power of two that meets `target`, by bisection.

        **Arguments:** `count`, how many members are integrated to find out, at least
        those whose reference is known.
        """

        def meets(k: int) -> bool:
            key = (contender.name, k)
            if key not in self._errors:
                done = contender.run(self.members.first(count), self.time, 2.0**-k)
                self._errors[key] = self.error(done.states)
            return self._errors[key] <= target

        # Outwards from the target itself: the tightest of all would take minutes.
        low = high = max(_LOOSEST, round(-np.log2(target)))
        stride = 2
        while not meets(high):
            if high == _TIGHTEST:
                return None
            low, high, stride = high, min(high + stride, _TIGHTEST), 2 * stride
        while low == high or (low >= _LOOSEST and meets(low)):
            low, high, stride = max(low - stride, _LOOSEST - 1), low, 2 * stride
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if meets(middle) else (middle, high)
        return 2.0**-high

    def race(
        self, runs: list[tuple[Contender, float]], count: int, budget: float, least: int
    ) -> list[dict]:
        """Times contenders, each at its tolerance, in turn; rows are per member."""
        last: dict[str, Done] = {}
        elsewhere: dict[str, list[float]] = {str(i): [] for i in range(len(runs))}
        sizes = [min(count, contender.most) for contender, _ in runs]

        def call(name: str, contender: Contender, tolerance: float, size: int):
            last[name] = contender.run(self.members.first(size), self.time, tolerance)
            elsewhere[name].append(last[name].cpu_elsewhere)
            return last[name].states

        calls = {
            str(i): partial(call, str(i), contender, tolerance, size)
            for i, ((contender, tolerance), size) in enumerate(zip(runs, sizes))
        }
        times = interleave_cpu(calls, budget, least=least, most=20)
        rows = []
        for i, ((contender, tolerance), size) in enumerate(zip(runs, sizes)):
            done, taken = last[str(i)], times[str(i)]
            rows.append(
                {
                    "contender": contender.name,
                    "family": contender.family,
                    "tolerance": tolerance,
                    "error": self.error(done.states),
                    "steps": None if done.steps is None else float(done.steps),
                    "members": size,
                    "min_s": taken["min_s"] / size,
                    "median_s": taken["median_s"] / size,
                    "cpu_s": (taken["cpu_s"] + min(elsewhere[str(i)])) / size,
                    "repeats": taken["repeats"],
                }
            )
        return rows


def interleave_cpu(calls: Mapping[str, Callable], budget: float, **bounds: int) -> dict:
    """Times calls as `interleave` does, and their CPU time: `cpu_s`, the least."""
    spent: dict[str, list[float]] = {name: [] for name in calls}

    def clocked(name: str):
        before = time.process_time()
        result = jax.block_until_ready(calls[name]())
        spent[name].append(time.process_time() - before)
        return result

    times = interleave(
        {name: partial(clocked, name) for name in calls}, budget, **bounds
    )
    for name, taken in times.items():
        # The first call compiles, or warms up.
        taken["cpu_s"] = min(spent[name][1:])
    return times


def reference(members: Members, time: float, processes: Processes) -> np.ndarray:
    """Returns log a at `time` by SciPy's DOP853 at 1e-12 a step."""
    end = float(np.log1p(time))
    return processes.run("DOP853", members.depths, members.log_a, end, 1e-12)[0]


def best_of(rows: list[dict], family: str) -> dict | None:
    """Returns the row of a family that takes least time."""
    own = [row for row in rows if row["family"] == family]
    return min(own, key=lambda row: row["min_s"], default=None)
