"""Where a stop is crossed: bisection that always ends, at neighbouring floats.

optimistix's `Bisection` also asks for a residual below an absolute tolerance, which an
excess in units of log t = 1e6 never meets, and with `flip="detect"` raises where there
is no root. In a batch there may be none: diffrax then hands over, for members that end
without an event, the distance to the end of the last step, and expects the end.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import optimistix as optx

from .._types import BoolScalar, RealScalar


class _Interval(eqx.Module):
    before: RealScalar  # where the function is still positive
    after: RealScalar
    closed: BoolScalar  # whether no number lies between the two


class FallingCrossing(optx.AbstractRootFinder):
    """Root of a function that is positive at `lower` and falls through zero.

    Without a root the answer is `upper`.
    """

    rtol: float = 0.0
    atol: float = 0.0
    norm: ClassVar[Callable] = jnp.abs

    def init(self, fn, y, args, options: dict[str, Any], f_struct, aux_struct, tags):
        """Starts from the whole interval in `options`."""
        del fn, args, f_struct, aux_struct, tags
        dtype = jnp.result_type(y)
        lower = jnp.asarray(options["lower"], dtype)
        upper = jnp.asarray(options["upper"], dtype)
        return _Interval(lower, upper, jnp.asarray(False))

    def step(self, fn, y, args, options, state: _Interval, tags):
        """Keeps the half that ends with the crossing and returns its middle."""
        del options, tags
        value, aux = fn(y, args)
        ahead = value > 0
        before = jnp.where(ahead, y, state.before)
        after = jnp.where(ahead, state.after, y)
        middle = before + 0.5 * (after - before)
        closed = (middle <= before) | (middle >= after)
        return middle, _Interval(before, after, closed), aux

    def terminate(
        self, fn, y: RealScalar, args, options, state: _Interval, tags
    ) -> tuple[BoolScalar, optx.RESULTS]:
        """Ends where no number lies between the two ends."""
        del fn, y, args, options, tags
        return state.closed, optx.RESULTS.successful

    def postprocess(self, fn, y, aux, args, options, state: _Interval, tags, result):
        """Returns the first number at which the function is no longer positive."""
        del fn, y, args, options, tags, result
        return state.after, aux, {}
