"""The reduced flow in the time s = log ‖a‖_1, one state at a time, on the host.

    d log a_i/ds = (b_i a_i^p)/sum_j a-hat_j b_j a_j^p,  b = Psi exp(-Psi a)  (P1 eq. 6)

SciPy's LSODA through `odeint`, whose loop is not in Python, and a rate in a dozen NumPy
calls: a member takes a few milliseconds to a norm of 1e4.

From some norm on the norm in the exponentials can be *held*, and the direction moved as
if it grew: see `_reduced`.
"""

import warnings

import numpy as np
import scipy.integrate

# The norm that is held.
HELD_FROM = 1e4
# From tiny norms, where the rate is all but constant, LSODA would step to where a
# overflows, and take the NaN there for converged.
_LONGEST = 0.2
_MAX_STEPS = 100_000  # some seconds; a decade takes a hundred


def followed(
    log_a: np.ndarray,
    depth: float,
    length: float,
    psi: np.ndarray,
    *,
    rtol: float,
    is_held: bool = False,
) -> np.ndarray | None:
    """Returns log a after `length` of the time log ‖a‖_1, None where that failed.

    **Arguments:** `log_a`, (K-1,), -inf for dead modes; `psi`, Psi; `rtol`, the error
    of log a in a step; `is_held`: keep the norm, and move the direction as if it grew.
    """
    alive = log_a > -np.inf
    columns, power = psi[:, alive], (depth - 1) / (depth + 1)
    norm = float(np.sum(np.exp(log_a[alive])))

    def rate(now, _):
        largest = now.max()
        below = now - largest
        share = np.exp(below)
        scale = norm / share.sum() if is_held else np.exp(largest)
        margins = columns @ (share * scale)
        # Not by a itself, which may be below the smallest float: a^p need not be.
        rates = (np.exp(margins.min() - margins) @ columns) * np.exp(power * below)
        growth = rates * (share.sum() / (share @ rates))
        return growth - 1 if is_held else growth

    # What goes wrong is seen in what comes out.
    with (
        warnings.catch_warnings(),
        np.errstate(all="ignore"),
    ):
        warnings.simplefilter("ignore", scipy.integrate.ODEintWarning)
        found, report = scipy.integrate.odeint(
            rate, log_a[alive], (0.0, length), rtol=rtol, atol=rtol,
            hmax=0.0 if is_held else _LONGEST, mxstep=_MAX_STEPS, full_output=True,
        )  # fmt: skip
    if report["message"] != "Integration successful." or not np.all(np.isfinite(found)):
        return None
    end = np.full_like(log_a, -np.inf)
    end[alive] = found[-1]
    return end


def at_norm(log_a: np.ndarray, norm: float) -> np.ndarray:
    """Returns log a rescaled to a 1-norm."""
    return log_a + (np.log(norm) - np.logaddexp.reduce(log_a))


def growth_exponents(log_a: np.ndarray, depth: float, psi: np.ndarray) -> np.ndarray:
    """Returns d log a_i/d log ‖a‖_1 of modes, 0 where they are dead.

    **Arguments:** `log_a`, (*members, modes); `psi`, the modes' columns of Psi, (K-1,
    modes).
    """
    largest = np.max(log_a, axis=-1, keepdims=True)
    power = (depth - 1) / (depth + 1)
    with np.errstate(all="ignore"):  # seen in what comes out
        margins = np.exp(log_a) @ psi.T
        least = np.min(margins, axis=-1, keepdims=True)
        b = np.exp(least - margins) @ psi  # Psi is symmetric
        alive = log_a > -np.inf
        below = np.where(alive, log_a - largest, 0)
        rates = np.where(alive, b * np.exp(power * below), 0)
        share = np.where(alive, np.exp(below), 0)
        growth = np.sum(share * rates, axis=-1, keepdims=True)
        return rates * np.sum(share, axis=-1, keepdims=True) / growth
