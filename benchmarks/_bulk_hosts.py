"""The reduced flow in NumPy, for SciPy in processes: light to import, no JAX.

d log a/ds on the clock s = log(1 + t), as in `_peers.reduced_rates`, with what one
member after another allows: work arrays that are used again, no logarithm, sums by dot
products. The tolerance is an absolute error of log a, which is what ours means.
"""

import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
from scipy.integrate import odeint, solve_ivp

Rates = Callable[[float, np.ndarray], np.ndarray]

# SciPy accepts no relative tolerance below 100 roundings; this one never decides.
_LEAST_RTOL = 3e-14
# exp of more overflows; trial steps that are far too long would.
_LARGEST = 700.0


def parity(num_classes: int) -> np.ndarray:
    """Returns the (K, K) matrix of 2 where i.j is odd and 0 where it is even."""
    index = np.arange(num_classes)
    return 2.0 * (np.bitwise_count(index[:, None] & index[None, :]) % 2)


def rates_of(num_classes: int, depth: float) -> Rates:
    """Returns d log a/ds of one member; every call returns a new array."""
    psi = np.ascontiguousarray(parity(num_classes)[1:, 1:])
    power = (depth - 1) / (depth + 1)
    a, margins, ones = np.empty((3, num_classes - 1))
    ones[:] = 1

    def rates(s, log_a):
        np.exp(log_a, out=a)
        np.dot(psi, a, out=margins)
        smallest = float(margins.min())
        np.subtract(smallest, margins, out=margins)
        weights = np.exp(margins, out=margins)
        partition = 1 + math.exp(-smallest) * float(np.dot(ones, weights))
        factor = math.exp(min(s - smallest, _LARGEST)) / partition
        b = np.dot(psi, weights)
        if power:
            np.multiply(log_a, power, out=a)
            np.exp(a, out=a)
            b *= a
        b *= factor
        return b

    return rates


def integrate(method: str, rates: Rates, start, end: float, tolerance: float):
    """Returns log a at s = `end` by `solve_ivp`, or by `odeint` (LSODA, all in C)."""
    # Trial steps that are far too long overflow, and are rejected for it.
    with np.errstate(over="ignore", invalid="ignore"):
        if method == "odeint":
            times = np.array([0.0, end])
            return odeint(
                rates, start, times, rtol=_LEAST_RTOL, atol=tolerance, tfirst=True,
                mxstep=100_000,
            )[-1]  # fmt: skip
        done = solve_ivp(
            rates, (0.0, end), start, method=method, rtol=_LEAST_RTOL, atol=tolerance
        )
    return done.y[:, -1] if done.success else np.full_like(start, np.nan)


def share(method: str, depths, starts, end: float, tolerance: float):
    """Integrates members one by one; returns their states and the CPU time taken."""
    began = time.process_time()
    num_classes = starts.shape[1] + 1
    states = [
        integrate(method, rates_of(num_classes, float(depth)), start, end, tolerance)
        for depth, start in zip(depths, starts)
    ]
    return np.array(states), time.process_time() - began


class Processes:
    """A process a core, which stay; members are dealt out in turn."""

    def __init__(self, cores: int):
        self.cores = cores
        self._pool: ProcessPoolExecutor | None = None

    def run(self, method: str, depths, starts, end: float, tolerance: float):
        """Returns the states of all members, and the CPU time of the processes."""
        if self.cores == 1:
            # In this process, whose own clock counts it.
            return share(method, depths, starts, end, tolerance)[0], 0.0
        if self._pool is None:
            # One thread each: BLAS would start as many again.
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
            self._pool = ProcessPoolExecutor(self.cores, get_context("spawn"))
        parts = [slice(i, None, self.cores) for i in range(self.cores)]
        jobs = [
            self._pool.submit(share, method, depths[p], starts[p], end, tolerance)
            for p in parts
        ]
        states = np.empty_like(starts)
        spent = 0.0
        for part, job in zip(parts, jobs):
            states[part], seconds = job.result()
            spent += seconds
        return states, spent

    def close(self) -> None:
        """Ends the processes."""
        if self._pool is not None:
            self._pool.shutdown()
