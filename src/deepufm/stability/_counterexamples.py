"""Search for states at which a Lyapunov function rises.

Gradient ascent from many random states u = log a at once, on

    alignment(u) = Σ parts/Σ |parts|,    dV/dt = Σ parts,    parts ~ c_ij (f_i - f_j):

1 where every pair of modes drives V up, -1 where every pair drives it down. Not on
dV/dt: at L = 1 that tends to 0 from below at collapse and for small norms, where its
ascent would end and find nothing; so would that of d log V/d log N, for small norms.
The alignment is -1 in the first order there, or at least bounded away from 0; and it
has the sign of dV/dt in any unit of V and of time.

A violation is a rate above a bound on its own rounding errors, added up with the rate
(`Parts.error`): a sign that the arithmetic bears out, at whatever size. That nothing
was found is no proof.
"""

from collections.abc import Callable
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.special
from jaxtyping import Array, Float

from .._types import Modes, RealScalar
from ..dynamics import HadamardFlow, LogitFlow
from ._lyapunov_functions import AbstractLyapunov, Parts, ReducedFlow, SmoothedMargin

Batch = Float[Array, "starts modes"]
# One object, so that a second search needs no second program.
_ADAM = optax.adam(0.05)


@dataclass(frozen=True)
class CounterexampleSearch:
    """Where the ascent came closest to a rising V, or furthest beyond.

    - `lyapunov`, `num_classes`, `depth`: what was searched.
    - `log_a`, (K-1,): the state of the largest alignment, natural log; as doubles.
    - `rate`: dV/d log(sum a) there.
    - `alignment`: from -1 to 1, the sign of dV/dt.
    - `rounding`: a bound on the error of `alignment`.
    - `violated`: whether V rises there: alignment > rounding, and the theorem, if any,
        speaks of the state (the smoothed margin: loss below log 2).
    - `num_violations` of `starts` ended in a violation.
    """

    lyapunov: AbstractLyapunov
    num_classes: int
    depth: float
    log_a: np.ndarray
    rate: float
    alignment: float
    rounding: float
    violated: bool
    num_violations: int
    starts: int

    @property
    def flow(self) -> ReducedFlow:
        """The flow that was searched; the state of `LogitFlow` is exp(log_a)."""
        return _flow(self.num_classes, self.depth)

    def __str__(self) -> str:
        name = type(self.lyapunov).__name__
        found = f"{self.num_violations} of {self.starts} starts end where it rises"
        return (
            f"{name}, K = {self.num_classes}, L = {self.depth:g}: {found}; best "
            f"alignment {self.alignment:.3g} (rounding {self.rounding:.1g}), rate "
            f"{self.rate:.3g} per unit of log norm"
        )


def find_counterexample(
    lyapunov: AbstractLyapunov,
    num_classes: int,
    depth: float | int,
    *,
    starts: int = 1000,
    seed: int = 0,
    steps: int = 200,
    norms: tuple[float | int, float | int] = (1e-3, 1e2),
    spreads: tuple[float | int, float | int] = (1e-2, 10.0),
    optimiser: optax.GradientTransformation | None = None,
    lanes: int = 1000,
) -> CounterexampleSearch:
    """Maximises the alignment of dV/dt over states, from random starts.

    A start has ‖a‖_1 log-uniform in `norms`, and log a normal with a standard deviation
    log-uniform in `spreads`: from nearly collapsed to a few modes alone. Start number i
    is the same whatever `starts` and `lanes` are.

    **Arguments:**

    - `lyapunov`: an `AbstractLyapunov`.
    - `num_classes`: K, a power of two.
    - `depth`: 0 (`LogitFlow`), or L >= 1, or inf.
    - `steps`: of ascent, each a gradient; 0 only looks at the starts.
    - `norms`, `spreads`: ranges; the ascent stays within these norms, and within three
        times the largest spread below the largest mode.
    - `optimiser`: an optax rule; `optax.adam(0.05)`, in log a, if `None`.
    - `lanes`: how many starts are moved together, which bounds the memory.

    **Returns:** a `CounterexampleSearch`.

    **Raises:** `ValueError` for a K or depth that is none of these, ranges that are not
    positive and rising, or counts below 1.

    !!! example
        found = find_counterexample(UniformDistance(), 8, 1)
        print(found, np.exp(found.log_a))
    """
    flow = _flow(num_classes, depth)
    if isinstance(lyapunov, SmoothedMargin) and not np.isfinite(depth):
        raise ValueError("The smoothed margin has no value at infinite depth.")
    _check(starts, steps, lanes, norms=norms, spreads=spreads)
    rule = _ADAM if optimiser is None else optimiser
    limits = jnp.log(jnp.asarray([norms, spreads], float))
    chunk = min(lanes, starts)
    # The last chunk is filled up, or it would be compiled for again.
    padded = -(-starts // chunk) * chunk
    drawn = _draw(padded, num_classes - 1, seed, norms, spreads)
    found = []
    for first in range(0, starts, chunk):
        log_a = jnp.asarray(drawn[first : first + chunk])
        ended = _ascend(lyapunov, flow, log_a, limits, rule.init, rule.update, steps)
        found.append([np.asarray(x) for x in ended])
    log_a, rate, alignment, rounding, violated = (
        np.concatenate(column)[:starts] for column in zip(*found)
    )
    # A violation first, in case the largest alignment is in doubt.
    best = int(np.lexsort((alignment, violated))[-1])
    return CounterexampleSearch(
        lyapunov=lyapunov,
        num_classes=num_classes,
        depth=float(depth),
        log_a=log_a[best],
        rate=float(rate[best]),
        alignment=float(alignment[best]),
        rounding=float(rounding[best]),
        violated=bool(violated[best]),
        num_violations=int(np.sum(violated)),
        starts=starts,
    )


def _flow(num_classes: int, depth: float | int) -> ReducedFlow:
    if depth == 0:
        return LogitFlow(num_classes)
    return HadamardFlow(num_classes, depth)


def _state(flow: ReducedFlow, log_a: Modes) -> Modes:
    return jnp.exp(log_a) if isinstance(flow, LogitFlow) else log_a


def _draw(starts: int, size: int, seed: int, norms, spreads) -> np.ndarray:
    """Returns log a, (starts, size); rows are the first of any longer draw."""
    streams = [np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(3)]
    log_norm = streams[0].uniform(*np.log(norms), size=starts)
    spread = np.exp(streams[1].uniform(*np.log(spreads), size=starts))
    log_a = spread[:, None] * streams[2].standard_normal((starts, size))
    shift = log_norm - scipy.special.logsumexp(log_a, axis=1)
    return log_a + shift[:, None]


def _confined(log_a: Modes, limits) -> Modes:
    """Returns log a with its norm and its spread brought into their ranges."""
    log_a = jnp.maximum(log_a, jnp.max(log_a) - 3 * jnp.exp(limits[1, 1]))
    log_norm = jax.nn.logsumexp(log_a)
    return log_a + (jnp.clip(log_norm, limits[0, 0], limits[0, 1]) - log_norm)


@eqx.filter_jit
def _ascend(
    lyapunov: AbstractLyapunov,
    flow: ReducedFlow,
    log_a: Batch,
    limits: Float[Array, "2 2"],
    init: Callable,
    update: Callable,
    steps: int,
):
    """Returns the best state of every lane, and what is known of it."""

    def parts(u: Modes) -> Parts:
        return lyapunov.parts(flow, _state(flow, u))

    def score(u: Modes) -> RealScalar:
        found = parts(u)
        return jnp.where(found.applies, found.alignment, -1)

    def step(carry, _):
        u, memory, best, best_score = carry
        reached, slope = jax.vmap(jax.value_and_grad(score))(u)
        better = reached > best_score
        best = jnp.where(better[:, None], u, best)
        # Where the best pair changes there may be no slope.
        slope = jnp.where(jnp.isfinite(slope), slope, 0)
        # optax mixes its counters with floats, which users may have forbidden.
        with jax.numpy_dtype_promotion("standard"):
            change, memory = update(-slope, memory, u)
        u = jax.vmap(lambda x: _confined(x, limits))(u + change)
        return (u, memory, best, jnp.where(better, reached, best_score)), None

    nothing = jnp.full(log_a.shape[:1], -jnp.inf, log_a.dtype)
    carry = log_a, init(log_a), log_a, nothing
    (_, _, best, _), _ = jax.lax.scan(step, carry, length=steps)

    def judge(u: Modes):
        found = parts(u)
        total = jnp.sum(jnp.abs(found.parts))
        rounding = found.error / jnp.where(total == 0, 1, total)
        rate = lyapunov.log_norm_rate(flow, _state(flow, u))
        violated = found.applies & (found.sum > found.error)
        return u, rate, found.alignment, rounding, violated

    return jax.vmap(judge)(best)


def _check(starts, steps, lanes, **ranges) -> None:
    if starts < 1 or lanes < 1 or steps < 0:
        raise ValueError(
            "Arguments `starts` and `lanes` must be at least 1 and `steps` at least 0, "
            f"but are {starts}, {lanes} and {steps}."
        )
    for name, (low, high) in ranges.items():
        if not 0 < low <= high < np.inf:
            raise ValueError(
                f"Argument `{name}` must be a range of positive numbers, (low, high), "
                f"but is {(low, high)}."
            )
