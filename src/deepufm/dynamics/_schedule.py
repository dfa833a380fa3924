"""Parameters that change at given times: piecewise constant, exact at the switches.

`solve` integrates phase by phase, each with constants, so that no step straddles a
switch.
"""

import math
from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._types import RealLike, RealScalar, Tracer
from ._flow import AbstractFlow


class PiecewiseConstant(eqx.Module):
    """v_0 until the flow's time t_1, v_1 until t_2, and so on; v_m for ever.

    **Arguments:** `values` m+1 numbers; `switch_times` t_1 < ... < t_m, positive, in
    the flow's own time.

    **Raises:** `ValueError` for other counts or an order that is not rising.

    !!! example
        # Regularised at first, then not: P1 Fig. 3's training at K = 10, n = 5.
        decay = ufm.PiecewiseConstant((0.05, 0.0), (320.0,))
        flow = ufm.GradientFlow(ufm.CrossEntropy(), 5, decay)
    """

    values: Float[Array, " phases"]
    log_switches: Float[Array, " switches"]

    def __init__(
        self,
        values: Sequence[RealLike] | Float[Array, " phases"],
        switch_times: Sequence[RealLike] | Float[Array, " switches"],
    ):
        self.values = jnp.asarray(values, float)
        times = jnp.asarray(switch_times, float)
        if self.values.ndim != 1 or times.shape != (self.values.shape[0] - 1,):
            raise ValueError(
                "`PiecewiseConstant` needs one switch time fewer than values, but has "
                f"{self.values.size} values and {times.size} times."
            )
        if not isinstance(times, Tracer):
            listed = [0.0, *map(float, times), math.inf]
            if not all(a < b for a, b in zip(listed, listed[1:], strict=False)):
                raise ValueError(
                    "Switch times must be positive, finite and rising, but are "
                    f"{listed[1:-1]}."
                )
        self.log_switches = jnp.log(times)

    @property
    def log_ends(self) -> Float[Array, " phases"]:
        """Log t at which each phase ends, inf for the last."""
        infinity = jnp.full((1,), jnp.inf, self.log_switches.dtype)
        return jnp.concatenate([self.log_switches, infinity])

    def __call__(self, log_time: RealScalar) -> RealScalar:
        """Returns the value at log t; at a switch, that of the phase before."""
        # Within the rounding of a logarithm, which a clock's reading may add.
        rounding = 8 * jnp.finfo(self.values.dtype).eps * (1 + jnp.abs(log_time))
        past = self.log_switches < log_time - rounding
        return self.values[jnp.sum(past)]


def schedule_of(flow: AbstractFlow) -> PiecewiseConstant | None:
    """Returns what switches in a flow, `None` where nothing does."""
    decay = getattr(flow, "weight_decay", None)
    return decay if isinstance(decay, PiecewiseConstant) else None


def with_value(flow: AbstractFlow, value: RealScalar) -> AbstractFlow:
    """Returns the flow of one phase: `value` in the place of its schedule."""
    return eqx.tree_at(lambda f: f.weight_decay, flow, value)


def at_time(flow: AbstractFlow, log_time: RealScalar) -> AbstractFlow:
    """Returns the flow as it is at log t."""
    schedule = schedule_of(flow)
    return flow if schedule is None else with_value(flow, schedule(log_time))
