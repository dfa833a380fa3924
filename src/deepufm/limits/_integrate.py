"""Stiff integration of small systems on the host."""

from collections.abc import Callable

import numpy as np
import scipy.integrate


class _TooSlow(Exception):
    """Raised out of SciPy's solver, which knows no step budget."""


class Counted:
    """A rate of change of an array that gives up after a number of calls."""

    def __init__(self, rate: Callable[[np.ndarray], np.ndarray], most: int):
        self.rate, self.most = rate, most
        self.calls = 0

    def __call__(self, _, state: np.ndarray) -> np.ndarray:
        self.calls += 1
        if self.calls > self.most:
            raise _TooSlow
        return self.rate(state)

    def integrate(
        self, start: np.ndarray, length: float, rtol: float, atol: float
    ) -> np.ndarray | None:
        """Returns the state after `length`, by LSODA; None where that failed."""
        try:
            found = scipy.integrate.solve_ivp(
                self, (0, length), start, "LSODA", rtol=rtol, atol=atol
            )
        except _TooSlow:
            return None
        end = found.y[:, -1]
        return end if found.status == 0 and np.all(np.isfinite(end)) else None
