"""Critical shocks: the smallest perturbation that neural collapse does not survive.

At the norm N of a, collapse (DNC) is a = μ·1, μ = N/(K-1), and a shock of the same norm

    a_i = μ (1 + ε_i),   Σ ε_i = 0,                               (P2 after eq. 12)

of size ‖ε‖₂, or M = ‖ε‖²/(2(K-1)²) as P2 eq. 12 counts. A shock is survived if the flow
from it goes back to DNC, by `limit`'s certificate.

The least size that is not survived is sought over directions of ε: those to and from
every structure of the atlas, then random ones, then small changes of the best. It is an
*upper bound* of the critical shock, like every number that such a search can find: the
shock returned is fatal, and smaller ones in untried directions may be. Along a ray only
the sizes looked at count as survived; basins need not be star-shaped.

Below the norm N* = (K-1)(L-1)/(L+1) perturbations of DNC grow, but only by the factor
(N*/N)^p e^{-(N*-N)/(K-1)} until the norm has passed N*: the critical shock is positive
at every norm, small where N is. At L = 1 DNC attracts every start with all a_i > 0 (P2
Thm 3), and there is none; P2 Thm 7's bound on M, within which M itself falls, is then
no bound on a basin.
"""

import enum
from dataclasses import dataclass

import numpy as np

from ..analysis import atlas
from ..geometry import angle_between
from ..limits import HELD_FROM
from ._destinations import Destination, destinations

_DISTINCT = 1e-6
# A shock kills no mode outright: this much is left of it.
_LEFT = 1e-6
# What another direction must gain, for one judgement to rule it out.
_GAIN = 1e-3
# Sizes looked at on the first rays, as parts of the largest.
_SCAN = (0.125, 0.25, 0.5, 0.75, 1.0)
# Of the local search: changes of a unit vector, and how they grow and shrink. Near the
# best direction sizes differ by the square of what directions differ by.
_SPREAD, _LEAST_SPREAD, _GROW, _SHRINK = 0.3, 0.01, 1.5, 0.85


class ShockStatus(enum.Enum):
    """What is known of the critical shock."""

    FOUND = "A fatal shock was found: its size is an upper bound of the critical one."
    NONE = "Collapse attracts every start whose modes are all positive (L = 1)."
    NOT_FOUND = "Every shock that was tried was survived."


@dataclass(frozen=True)
class CriticalShock:
    """The smallest fatal shock that was found.

    - `size`: ‖ε‖₂; inf where none was found.
    - `distance`: M of P2 eq. 12, ‖ε‖²/(2(K-1)²).
    - `survived`: the largest size known to be survived in its direction.
    - `epsilon`: (K-1,), of sum 0; NaN where there is none.
    - `end`: where it leads, a certified `Destination`, or `None`.
    - `tried`: how many directions were.
    - `status`: a `ShockStatus`.
    """

    size: float
    distance: float
    survived: float
    epsilon: np.ndarray
    end: Destination | None
    tried: int
    status: ShockStatus


def critical_shock(
    num_classes: int,
    depth: float | int,
    norm: float,
    *,
    directions: np.ndarray | None = None,
    random: int = 16,
    changes: int = 150,
    tolerance: float = 1e-6,
    seed: int = 0,
) -> CriticalShock:
    """Returns the smallest perturbation found that takes DNC out of its basin.

    **Arguments:**

    - `num_classes`: K, a power of two, at least 4.
    - `depth`: L >= 1, finite.
    - `norm`: ‖a‖_1, at most 1e4.
    - `directions`: of ε, (directions, K-1), tried first, with both signs; by default
        those between DNC and the structures of the atlas (K <= 16), and single modes.
    - `random`: how many random directions are tried next.
    - `changes`: how many small changes of the best are tried last.
    - `tolerance`: the relative width of the bracket that `survived` and `size` are.

    **Returns:** a `CriticalShock`: an upper bound.

    **Raises:** `ValueError` for a depth, norm or directions that are none.

    **Reference:** Halekotte & Feudel 2020, Minimal fatal shocks in multistable complex
    networks.

    !!! example
        shock = ufm.critical_shock(8, depth=2, norm=5.0)
        shock.size, shock.end.rank
    """
    _check(num_classes, depth, norm, directions, tolerance)
    modes = num_classes - 1
    nothing = np.full(modes, np.nan)
    if depth == 1:
        return CriticalShock(np.inf, np.inf, np.inf, nothing, None, 0, ShockStatus.NONE)
    rng = np.random.default_rng(seed)
    search = _Search(num_classes, float(depth), norm)
    if directions is None:
        given = structure_directions(num_classes, depth)
    else:
        given = np.asarray(directions, float)
        given = given - np.mean(given, axis=1, keepdims=True)
    for direction in (*given, *rng.normal(size=(random, modes))):
        search.try_direction(direction)
        search.try_direction(-direction)
    spread = _SPREAD
    for _ in range(changes if search.best is not None else 0):
        change = spread * rng.normal(size=modes) / np.sqrt(modes)
        gain = min(0.1 * spread**2, _GAIN)
        better = search.try_direction(search.best + change, gain)
        spread = spread * (_GROW if better else _SHRINK)
        spread = min(max(spread, _LEAST_SPREAD), _SPREAD)
    return search.sharpened(tolerance)


def structure_directions(num_classes: int, depth: float | int) -> np.ndarray:
    """Returns directions of ε from DNC to other structures, (directions, K-1).

    One of each orbit of the atlas, since relabellings leave DNC as it is, and one mode.
    """
    modes = num_classes - 1
    single = np.eye(modes)[0] - 1 / modes
    entries = atlas(num_classes, depth) if num_classes <= 16 else ()
    offsets = [entry.a / np.mean(entry.a) - 1 for entry in entries]
    return np.stack([single, *(x for x in offsets if np.max(np.abs(x)) > _DISTINCT)])


class _Search:
    """The best direction so far, and how far along it shocks are fatal."""

    def __init__(self, num_classes: int, depth: float, norm: float):
        self.num_classes, self.depth, self.norm = num_classes, depth, norm
        self.modes = num_classes - 1
        self.best: np.ndarray | None = None
        self.survived, self.fatal = 0.0, np.inf
        self.tried = 0

    def end(self, epsilon: np.ndarray, rtol: float) -> Destination:
        """Returns where a shock leads."""
        log_a = np.log(self.norm / self.modes) + np.log1p(epsilon)
        (end,) = destinations(self.num_classes, self.depth, log_a[None], rtol=rtol)
        return end

    def is_fatal(self, epsilon: np.ndarray, rtol: float = 1e-8) -> bool | None:
        """Returns whether a shock is, None where its limit is not certified."""
        end = self.end(epsilon, rtol)
        if not end.certified:
            return None
        return angle_between(end.direction, np.ones(self.modes)) > _DISTINCT

    def try_direction(self, direction: np.ndarray, gain: float = _GAIN) -> bool:
        """Returns whether shocks in this direction are fatal at a smaller size.

        Smaller by the part `gain`, which one judgement tells for most directions.
        """
        direction = direction - np.mean(direction)
        length = np.linalg.norm(direction)
        if not length > 0:
            return False
        self.tried += 1
        unit = direction / length
        largest = float((1 - _LEFT) / -np.min(unit))
        if self.best is None:
            sizes = [part * largest for part in _SCAN]
        else:
            sizes = [min((1 - gain) * self.fatal, largest)]
        survived = 0.0
        for size in sizes:
            fatal = self.is_fatal(size * unit)
            if fatal:
                self.best = unit
                # Much finer than the gain, or the search would drift on its errors.
                found = self._bracket(unit, survived, size, 0.01 * gain)
                self.survived, self.fatal = found
                return True
            if fatal is not None:
                survived = size
        return False

    def _bracket(self, unit, survived, fatal, tolerance, rtol=1e-8):
        """Returns sizes next to each other, survived and fatal."""
        while fatal - survived > tolerance * fatal:
            middle = float(0.5 * (survived + fatal))
            if not survived < middle < fatal:
                break
            is_fatal = self.is_fatal(middle * unit, rtol)
            if is_fatal is None:
                break  # as good as on the boundary
            survived, fatal = (survived, middle) if is_fatal else (middle, fatal)
        return survived, fatal

    def sharpened(self, tolerance: float) -> CriticalShock:
        """Returns the best, bracketed anew with the least errors."""
        nothing = np.full(self.modes, np.nan)
        missing = CriticalShock(
            np.inf, np.inf, np.inf, nothing, None, self.tried, ShockStatus.NOT_FOUND
        )
        if self.best is None:
            return missing
        survived, fatal = self.survived, self.fatal
        largest = float((1 - _LEFT) / -np.min(self.best))
        # Judged more precisely they may be on the other side.
        step = tolerance * fatal
        while survived > 0 and self.is_fatal(survived * self.best, 1e-12) is not False:
            survived, step = max(survived - step, 0.0), 2 * step
        step = tolerance * fatal
        while self.is_fatal(fatal * self.best, 1e-12) is not True:
            if fatal >= largest:
                return missing
            fatal, step = min(fatal + step, largest), 2 * step
        survived, fatal = self._bracket(self.best, survived, fatal, tolerance, 1e-12)
        epsilon = fatal * self.best
        return CriticalShock(
            fatal,
            float(np.sum(epsilon**2)) / (2 * self.modes**2),
            survived,
            epsilon,
            self.end(epsilon, 1e-12),
            self.tried,
            ShockStatus.FOUND,
        )


def _check(num_classes, depth, norm, directions, tolerance) -> None:
    if num_classes < 4 or num_classes & (num_classes - 1):
        raise ValueError(
            "Argument `num_classes` must be a power of two, at least 4 (at 2 there is "
            f"one mode, and nothing to perturb), but is {num_classes}."
        )
    if not 1 <= depth < np.inf:
        raise ValueError(
            f"Argument `depth` must be finite and at least 1, but is {depth}."
        )
    if not 0 < norm <= HELD_FROM:
        raise ValueError(
            f"Argument `norm` must be positive and at most 1e4, but is {norm}."
        )
    if directions is not None:
        given = np.asarray(directions, float)
        if given.ndim != 2 or given.shape[1] != num_classes - 1:
            raise ValueError(
                f"Argument `directions` must have shape (directions, {num_classes - 1}"
                f"), but has {given.shape}."
            )
    if not 1e-12 <= tolerance < 1:
        raise ValueError(
            f"Argument `tolerance` must be from 1e-12 to below 1, but is {tolerance}."
        )
