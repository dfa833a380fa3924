"""Progress of a sweep: a bar on a terminal, a line a grid point when piped."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..sweep import Cell


class Progress:
    """A bar on a terminal; one line a grid point when piped."""

    def __init__(self, total: int, axes: list[str]):
        from tqdm import tqdm

        self._axes = axes  # those that tell grid points apart
        self._quiet = not sys.stderr.isatty()
        self._done, self._total = 0, total
        self._bar = tqdm(
            total=total, unit="member", disable=self._quiet, desc="compiling"
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception) -> None:
        self._bar.close()

    def update(self, cell: "Cell", members: int) -> None:
        self._done += members
        self._bar.set_description("integrating", refresh=False)
        self._bar.update(members)
        if self._quiet:
            where = ", ".join(f"{axis} {getattr(cell, axis):g}" for axis in self._axes)
            line = f"{self._done}/{self._total} members done  {where}"
            print(line.rstrip(), file=sys.stderr, flush=True)
