"""Progress of a sweep: a bar on a terminal, a line a grid point when piped."""

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..sweep import Cell


class Progress:
    """A bar on a terminal; one line a grid point when piped.

    Both show the members done, their rate and the time left, as far as members so far
    tell: those that take longest come first.
    """

    def __init__(self, total: int, axes: list[str]):
        from tqdm import tqdm

        self._axes = axes  # those that tell grid points apart
        self._quiet = not sys.stderr.isatty()
        self._done, self._total = 0, total
        self._started = time.perf_counter()
        self._bar = tqdm(
            total=total, unit="member", disable=self._quiet, desc="compiling"
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception) -> None:
        self._bar.close()

    def update(self, cell: "Cell", members: int) -> None:
        """Counts the members of a grid point that was written."""
        self._done += members
        self._bar.set_description("integrating", refresh=False)
        self._bar.update(members)
        if self._quiet:
            where = ", ".join(f"{axis} {getattr(cell, axis):g}" for axis in self._axes)
            line = f"{self._done}/{self._total} members done  {self._pace()}  {where}"
            print(line.rstrip(), file=sys.stderr, flush=True)

    def _pace(self) -> str:
        elapsed = max(time.perf_counter() - self._started, 1e-9)
        rate = self._done / elapsed
        left = (self._total - self._done) / rate
        return f"{rate:.3g}/s, {_duration(left)} left"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
