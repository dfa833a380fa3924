"""The reduced flow in numba, for numbalsoda, where both are installed.

The same formula as ours (`_hadamard_flow`): e = exp(m_0 - m), three exponentials a
mode, one or two for the scale, no logarithm. Psi v = sum(v) - Phi v by a fast
Walsh-Hadamard transform, which took four fifths of the time of the product with the
matrix (K = 16). It cancels where ours does not, by a rounding of the largest rate:
nothing at errors of 1e-6. `exp` in numba calls the C library one number at a time;
`_exp` vectorises, in half the time, and numbalsoda is timed with both.

numbalsoda is built from its source package: gfortran, cmake, scikit-build, numba, and

    CMAKE_ARGS=-DCMAKE_POLICY_VERSION_MINIMUM=3.5 \
        pip install --no-build-isolation --no-deps numbalsoda
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numba
import numpy as np
from numbalsoda import dop853, lsoda, lsoda_sig

SOLVERS = {"dop853": dop853, "lsoda": lsoda}

_LEAST_RTOL = 3e-14
_MAX_STEPS = 100_000

# exp x = 2^k exp r, r = x - k log 2, |r| <= log(2)/2: Taylor to order 12 is exact to a
# rounding. Adding 1.5·2^52 rounds to a whole k, and leaves it in the low bits.
_LOG2_E = 1.4426950408889634
_LOG_2_HIGH, _LOG_2_LOW = 6.93145751953125e-1, 1.42860682030941723212e-6
_ROUND = 6755399441055744.0
_C3, _C4, _C5, _C6, _C7, _C8, _C9, _C10, _C11, _C12 = (
    1 / math.factorial(k) for k in range(3, 13)
)


@numba.njit(inline="always")
def _exp(x, out, power):
    """Writes exp(x) to `out`; `power` is room for as many."""
    bits = power.view(np.int64)
    for i in range(x.shape[0]):
        z = x[i]
        z = z if z > -700.0 else -700.0
        z = z if z < 700.0 else 700.0
        shifted = z * _LOG2_E + _ROUND
        power[i] = shifted
        k = shifted - _ROUND
        r = z - k * _LOG_2_HIGH
        r = r - k * _LOG_2_LOW
        q = _C12 * r + _C11
        q = (q * r + _C10) * r + _C9
        q = (q * r + _C8) * r + _C7
        q = (q * r + _C6) * r + _C5
        q = (q * r + _C4) * r + _C3
        out[i] = ((q * r + 0.5) * r + 1.0) * r + 1.0
    for i in range(x.shape[0]):
        bits[i] = (bits[i] + 1023) << 52
    for i in range(x.shape[0]):
        out[i] *= power[i]


@numba.njit(inline="always")
def _library_exp(x, out, power):  # noqa: ARG001
    for i in range(x.shape[0]):
        out[i] = math.exp(x[i])


@numba.njit(inline="always")
def _psi(x, out, halves):
    """Writes sum(x) - Phi x to `out`, and Phi x to x."""
    for half in halves:
        for i in range(0, x.shape[0], 2 * half):
            for j in range(i, i + half):
                u, v = x[j], x[j + half]
                x[j] = u + v
                x[j + half] = u - v
    for i in range(x.shape[0]):
        out[i] = x[0] - x[i]


@lru_cache
def rates_of(num_classes: int, vectorised: bool):
    """Returns d log a/ds as numbalsoda takes it; its data are p = (L-1)/(L+1)."""
    K, modes = num_classes, num_classes - 1
    halves = tuple(2**k for k in range(K.bit_length() - 1))
    exp = _exp if vectorised else _library_exp

    @numba.cfunc(lsoda_sig)
    def rates(s, log_a_, out_, data_):
        log_a, out = numba.carray(log_a_, (modes,)), numba.carray(out_, (modes,))
        power = numba.carray(data_, (1,))[0]
        work = np.empty((5, K))
        x, e, m, growth, room = work[0], work[1], work[2], work[3], work[4]
        x[0] = 0.0  # the mode that Psi leaves out
        for i in range(modes):
            x[i + 1] = log_a[i]
        for i in range(K):
            growth[i] = power * x[i]
        exp(x, e, room)
        exp(growth, growth, room)
        e[0] = 0.0
        _psi(e, m, halves)
        smallest = m[1]
        for i in range(2, K):
            smallest = min(smallest, m[i])
        for i in range(K):
            x[i] = smallest - m[i]
        exp(x, e, room)
        e[0] = 0.0
        _psi(e, m, halves)
        # e now holds its transform, whose first entry is the sum.
        partition = 1.0 + math.exp(-smallest) * e[0]
        factor = math.exp(s - smallest) / partition
        for i in range(modes):
            out[i] = m[i + 1] * (factor * growth[i + 1])

    return rates


@lru_cache
def _loop(solver: str):
    """Returns the loop over members, compiled, which lets go of Python's lock."""
    integrate = SOLVERS[solver]

    @numba.njit(nogil=True)
    def loop(address, powers, starts, times, tolerance, out):
        data = np.empty(1)
        for i in range(starts.shape[0]):
            data[0] = powers[i]
            states, success = integrate(
                address, starts[i], times, data, _LEAST_RTOL, tolerance, _MAX_STEPS
            )
            out[i] = states[-1]
            if not success:
                out[i] = np.nan

    return loop


def runner(solver: str, vectorised: bool, cores: int) -> Callable:
    """Returns (depths, starts, end, tolerance) -> states, in a thread a core."""
    loop = _loop(solver)

    def run(depths, starts, end, tolerance):
        address = rates_of(starts.shape[1] + 1, vectorised).address
        powers = (depths - 1) / (depths + 1)
        times = np.array([0.0, end])
        out = np.empty_like(starts)
        parts = [slice(i, None, cores) for i in range(cores)]
        copies = [np.ascontiguousarray(starts[part]) for part in parts]
        ends = [np.empty_like(copy) for copy in copies]

        def share(i: int) -> None:
            own = np.ascontiguousarray(powers[parts[i]])
            loop(address, own, copies[i], times, tolerance, ends[i])

        with ThreadPoolExecutor(cores) as pool:
            list(pool.map(share, range(cores)))
        for part, end_states in zip(parts, ends):
            out[part] = end_states
        return out

    return run
