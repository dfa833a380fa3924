"""Gradient descent beside its flow, at equal times.

On the clock t = η(e^s - 1) the readings s = j log 2 are the steps k = 2^j - 1: whole
numbers, so that both are compared where they are, without interpolation.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from ..geometry import log_frobenius_norm
from ..models import AbstractActivation, AbstractLoss, ClassSizes, DeepUFM
from ._clock import LogTime
from ._descent import Descent, descend
from ._gradient_flow import GradientFlow
from ._path import Path
from ._saves import SaveEvery
from ._solve import solve
from ._stop import FinalTime

Rows = Float[Array, " rows"]


class FlowComparison(eqx.Module):
    """Descent with step η against the flow at t = ηk; all rows relative to the flow."""

    step: Int[Array, " rows"]  # 0, 1, 3, 7, ..., and the last
    log_time: Float[Array, " rows"]
    parameter_distance: Float[Array, " rows"]  # ‖θ_k - θ(ηk)‖_F/‖θ(ηk)‖_F
    logit_distance: Float[Array, " rows"]  # the same of Z
    descent: Descent
    path: Path


def compare_with_flow(
    model: DeepUFM,
    loss: AbstractLoss,
    step_size: float,
    steps: int,
    *,
    per_class: ClassSizes,
    activation: AbstractActivation | None = None,
    rtol: float | None = None,
) -> FlowComparison:
    """Runs plain gradient descent and the flow from one start, to the same time.

    Before the run diverges the distances are O(step_size): descent is the flow's Euler
    method.

    **Arguments:** as `descend`, with `step_size` η on the summed loss and `steps` the
    number of updates; `rtol` of the flow's integration, 1e-10 if `None` (`solve`'s own
    default in float32 and with an activation).

    **Returns:** a `FlowComparison`. Rows that either run did not reach are NaN: see
    `path.outcome` and `descent.outcome`.

    **Raises:** `ValueError` as `descend` and `solve`.

    !!! example
        gap = ufm.compare_with_flow(model, ufm.CrossEntropy(), 0.01, 1000, per_class=1)
        gap.step, gap.logit_distance
    """
    doublings = int(math.log2(steps + 1))
    rows = [2**j - 1 for j in range(doublings + 1)]
    if rows[-1] < steps:
        rows.append(steps)
    run = descend(
        model, loss, optax.sgd(step_size), steps, per_class=per_class,
        activation=activation, saves=tuple(rows), keep_states=True,
    )  # fmt: skip
    flow = GradientFlow(loss, per_class, activation=activation)
    if rtol is None and flow.is_smooth and model.head.dtype == jnp.float64:
        rtol = 1e-10
    path = solve(
        flow,
        model,
        stop=FinalTime(step_size * steps),
        clock=LogTime(step_size),
        saves=SaveEvery(math.log(2.0), len(rows)),
        keep_states=True,
        rtol=rtol,
    )
    parameters, logits = _distances(flow, run.state, path.state)
    return FlowComparison(
        step=run.step,
        log_time=path.log_time,
        parameter_distance=parameters,
        logit_distance=logits,
        descent=run,
        path=path,
    )


@eqx.filter_jit
def _distances(flow, discrete, continuous) -> tuple[Rows, Rows]:
    def relative(state, reference):
        error = jax.tree.map(jnp.subtract, state, reference)
        return jnp.exp(flow.log_norm(error) - flow.log_norm(reference))

    def relative_logits(state, reference):
        at_flow = flow.logits(reference)
        error = log_frobenius_norm(flow.logits(state) - at_flow)
        return jnp.exp(error - log_frobenius_norm(at_flow))

    return (
        jax.vmap(relative)(discrete, continuous),
        jax.vmap(relative_logits)(discrete, continuous),
    )
