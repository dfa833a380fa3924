"""Step sizes: one relative tolerance for the flow's own measure of error, and landings.

diffrax's `PIDController` scales errors element by element and never shows them to its
norm together with the state. Here the flow judges the whole error at once
(`AbstractFlow.relative_error`: the largest error of a log singular value; the largest
ratio of Frobenius norms over layers), and control sees the one number that results. So
a tiny block is resolved relative to its own size, and padding dilutes nothing.

The control is predictive (Gustafsson 1994; Hairer & Wanner II, IV.8). An escape from a
saddle is a blow-up in log time: steps must shrink by a constant factor each, and what
looks at errors one by one rejects up to every second step there. With errors e_n over
the tolerance, order k, and e_n/h_n^k changing once more as it did last,

    h_{n+1}/h_n = 0.9 · e_n^{-1/k} · min(1, (h_n/h_{n-1}) · (e_{n-1}/e_n)^{1/k}),

from accepted steps alone; none grows after a rejection. At kinks errors have no trend:
the first factor stands alone there, and accepted steps never shrink. At equal error PI
control takes 1.25 to 1.46 times the steps (part `ablation` of
benchmarks/bench_ensemble.py).

Steps land on the save points instead of interpolating there: saved states are states of
the solver, as accurate as the tolerance says, also for implicit methods whose
interpolant is of low order. The step size before a landing is taken up again after it.

A stop whose reading no clock knows in advance is landed on as well: a step across it is
taken again, shorter, by the secant through the excess at its two ends, until it ends on
the stop to rounding. What is left for the event to interpolate is next to nothing.
"""

from collections.abc import Callable
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Float, PyTree

from .._types import BoolScalar, IntScalar, RealScalar

# The first step changes no part of the state by more than this fraction of its size.
_FIRST_CHANGE = 0.01


# When a step across the stop ends on it: within so many roundings. The secant takes two
# or three tries at usual steps; where the excess is too crooked for it (time against
# path length near a rest) the step is halved, down to neighbouring floats.
_CLOSE = 16
_MAX_SECANTS = 12
_MAX_TRIES = _MAX_SECANTS + 64
# The error ratio that a step let through at a kink counts as: the next grows by 1.08 at
# order 5.
_LET_THROUGH = 0.4
# Limits of h_{n+1}/h_n.
_SAFETY, _LEAST, _MOST = 0.9, 0.2, 10.0


class _History(eqx.Module):
    """What is remembered of the last accepted step."""

    step: RealScalar  # 0 where there is none, or its error tells nothing
    log_ratio: RealScalar  # log e
    retrying: BoolScalar  # whether a step was rejected since


class _ControllerState(eqx.Module):
    history: _History
    intended: RealScalar  # the step that was asked for, before any landing
    landed: BoolScalar  # whether the step under way was shortened for a landing
    excess: RealScalar | None  # of the stop, at the start of the step; not yet positive
    tries: IntScalar | None  # at landing on the stop


class RelativeController(diffrax.AbstractAdaptiveStepSizeController):
    """Accepts a step when `relative_error(error, before, after)` is below `tolerance`.

    Two ends are told apart in diffrax's results: `dt_min_reached` where a step no
    longer moves the clock, `internal_error` where it does not because every try gave a
    NaN or inf.
    """

    relative_error: Callable[[PyTree, PyTree, PyTree], RealScalar]
    tolerance: RealScalar
    landings: Float[Array, " saves"]  # ascending readings that steps must end on
    # Of (reading, state): rises through zero at a stop that must be landed on, too.
    excess: Callable[[Any, PyTree], RealScalar] | None
    # Of the states before and after a step: whether the velocity jumps between them.
    # Such steps are accepted unchecked that change the state by no more than this.
    crosses: Callable[[PyTree, PyTree], BoolScalar] | None
    unchecked: RealScalar
    # What diffrax's implicit solvers read off a controller for their stage equations.
    rtol: RealScalar
    atol: RealScalar
    norm: Callable[[PyTree], RealScalar] = eqx.field(static=True)

    def __init__(
        self,
        relative_error: Callable[[PyTree, PyTree, PyTree], RealScalar],
        tolerance: RealScalar,
        landings: Float[Array, " saves"],
        *,
        excess: Callable[[Any, PyTree], RealScalar] | None = None,
        crosses: Callable[[PyTree, PyTree], BoolScalar] | None = None,
    ):
        self.relative_error = relative_error
        self.tolerance = tolerance
        self.landings = landings
        self.excess = excess
        self.crosses = crosses
        self.unchecked = jnp.sqrt(tolerance)
        self.rtol = tolerance
        self.atol = tolerance
        self.norm = optx.max_norm

    def wrap(self, direction):
        """Returns the controller itself: all solves run forward."""
        del direction
        return self

    def init(self, terms, t0, t1, y0, dt0, args, func, error_order):
        """Chooses the first step from the speed at the start."""
        del dt0, error_order
        speed = func(terms, t0, y0, args)
        pace = self.relative_error(speed, y0, y0)
        # From a state of zero any step is infinitely large: look one unit ahead.
        ahead = jax.tree.map(jnp.add, y0, speed)
        pace = jnp.where(
            jnp.isfinite(pace), pace, self.relative_error(speed, y0, ahead)
        )
        # At rest nothing sets a pace; growing steps will find one.
        step = jnp.where(pace == 0, _FIRST_CHANGE, _FIRST_CHANGE / pace)
        # A non-finite pace gives a step of 0, which the first adaptation reports.
        step = jnp.where(jnp.isfinite(step), jnp.minimum(step, t1 - t0), 0)
        step = jax.lax.stop_gradient(step.astype(jnp.result_type(t0)))
        next_t1, landed = self._aim(t0, step)
        excess = tries = None
        if self.excess is not None:
            excess = jax.lax.stop_gradient(self.excess(t0, y0))
            tries = jnp.asarray(0)
        zero = jnp.zeros_like(step)
        history = _History(zero, zero, jnp.asarray(False))
        return next_t1, _ControllerState(history, step, landed, excess, tries)

    def adapt_step_size(
        self, t0, t1, y0, y1_candidate, args, y_error, error_order, controller_state
    ):
        """Accepts or rejects the step from t0 to t1 and proposes the next."""
        del args
        error = self.relative_error(y_error, y0, y1_candidate)
        ratio = jax.lax.stop_gradient(error / self.tolerance)
        ratio = jnp.where(jnp.isfinite(ratio), ratio, jnp.inf)
        change = None
        if self.crosses is not None:
            ratio, change = self._tolerate(ratio, y0, y1_candidate)
        keep = ratio < 1
        history = controller_state.history
        tried = jnp.asarray(t1 - t0)
        step, history = _next_step(
            ratio, keep, tried, history, float(error_order), smooth=change is None
        )
        next_t0 = jnp.where(keep, t1, t0)
        if change is not None:
            # Never below what may be accepted unchecked.
            least = 0.9 * (self.unchecked / change) * (t1 - t0)
            shrunk = ~keep & jnp.isfinite(ratio) & (change > self.unchecked)
            step = jnp.where(shrunk, jnp.maximum(step, least), step)
        # Shortened by more than growth makes up for.
        resume = keep & controller_state.landed & (step >= _MOST * tried)
        step = jnp.where(resume, jnp.maximum(step, controller_state.intended), step)
        next_t1, landed = self._aim(next_t0, step)
        # A rejected step of a few roundings may shrink to itself, for ever.
        stuck = (next_t1 <= next_t0) | (~keep & (next_t1 >= t1))
        results = diffrax.RESULTS
        why = results.where(
            jnp.isinf(ratio), results.internal_error, results.dt_min_reached
        )
        result = results.where(stuck, why, results.successful)
        state = _ControllerState(history, step, landed, None, None)
        if self.excess is None:
            return keep, next_t0, next_t1, False, state, result
        return self._land(
            controller_state, t0, t1, y1_candidate,
            (keep, next_t0, next_t1, False, state, result),
        )  # fmt: skip

    def _tolerate(self, ratio, y0, y1) -> tuple[RealScalar, RealScalar]:
        """Lowers the error of a small step across a kink; returns its change as well.

        Across a kink the error of a step falls no faster than its size, and an orbit
        that slides along one would stop the controller for good. The steps let through
        chatter about it, like gradient descent, and their mean slides.
        """
        assert self.crosses is not None
        step = jax.tree.map(jnp.subtract, y1, y0)
        change = jax.lax.stop_gradient(self.relative_error(step, y0, y1))
        small = jnp.isfinite(ratio) & (change <= self.unchecked)
        small = small & self.crosses(y0, y1)
        return jnp.where(small, jnp.minimum(ratio, _LET_THROUGH), ratio), change

    def _land(self, before: _ControllerState, t0, t1, y1, proposal):
        """Takes a step across the stop again, to end where the secant says it is."""
        keep, next_t0, next_t1, jump, state, result = proposal
        assert self.excess is not None
        assert before.excess is not None
        assert before.tries is not None
        excess = jax.lax.stop_gradient(self.excess(t1, y1))
        share = before.excess / (before.excess - excess)
        # -inf at t = 0: nothing to draw a secant through.
        secant = jnp.isfinite(share) & (before.tries < _MAX_SECANTS)
        share = jnp.where(secant, share, 0.5)
        # The start may lie short of the stop by less than the clock can show.
        close = _CLOSE * jnp.finfo(t1.dtype).eps * t1
        end = jnp.maximum(t0 + share * (t1 - t0), t0 + close)
        near = t1 - end <= close
        again = keep & (excess > 0) & ~near & (before.tries < _MAX_TRIES)

        def choose(retry, proposed):
            return jax.tree.map(lambda a, b: jnp.where(again, a, b), retry, proposed)

        state = _ControllerState(
            choose(before.history, state.history),
            choose(before.intended, state.intended),
            jnp.where(again, True, state.landed),
            jnp.where(keep & ~again, excess, before.excess),
            jnp.where(again, before.tries + 1, 0),
        )
        result = diffrax.RESULTS.where(again, diffrax.RESULTS.successful, result)
        next_t0, next_t1 = choose((t0, end), (next_t0, next_t1))
        return keep & ~again, next_t0, next_t1, jump, state, result

    def _aim(self, start, step) -> tuple[RealScalar, BoolScalar]:
        """Ends a step on the next landing where it would reach past, or near, it.

        A gap between one and two steps is halved: two even steps, not one and a sliver.
        """
        count = self.landings.shape[0]
        if count == 0:
            return start + step, jnp.asarray(False)
        if count == 2:
            # The lane stepper's: a comparison each, no search in every lane.
            near, far = self.landings
            later = jnp.where(start < far, far, jnp.inf)
            target = jnp.where(start < near, near, later)
        else:
            index = jnp.searchsorted(self.landings, start, side="right")
            ahead = self.landings[jnp.minimum(index, count - 1)]
            target = jnp.where(index < count, ahead, jnp.inf)
        gap = target - start
        reaches, nears = step >= gap, 2 * step > gap
        end = jnp.where(reaches, target, start + jnp.where(nears, gap / 2, step))
        return end, reaches | nears


def _next_step(
    ratio: RealScalar,
    keep: BoolScalar,
    step: RealScalar,
    last: _History,
    error_order: float,
    *,
    smooth: bool,
) -> tuple[RealScalar, _History]:
    """Returns the next step; `ratio` is e_n, inf where it is not a number.

    Without `smooth` errors jump at kinks and have no trend: it is left out, and no
    accepted step is followed by a shorter one.
    """
    regular = (ratio > 0) & jnp.isfinite(ratio)
    log_ratio = jnp.log(jnp.where(regular, ratio, 1))
    trend = jnp.exp((last.log_ratio - log_ratio) / error_order)
    known = keep & (last.step > 0)
    trend = jnp.where(known, trend * step / jnp.where(known, last.step, 1), 1)
    factor = _SAFETY * jnp.exp(-log_ratio / error_order)
    if smooth:
        factor = factor * jnp.minimum(1, trend)
    # An error of zero asks for the longest step; one that is no number tells nothing.
    factor = jnp.where(regular, factor, jnp.where(keep, _MOST, _LEAST))
    retried = last.retrying & smooth
    longest = jnp.where(keep, jnp.where(retried, 1, _MOST), _SAFETY)
    shortest = _LEAST if smooth else jnp.where(keep, 1, _LEAST)
    factor = jax.lax.stop_gradient(jnp.clip(factor, shortest, longest))
    history = _History(
        jnp.where(keep, jnp.where(regular, step, 0), last.step),
        jnp.where(keep, log_ratio, last.log_ratio),
        ~keep,
    )
    return step * factor.astype(step.dtype), jax.lax.stop_gradient(history)
