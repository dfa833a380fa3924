"""Discrete time: full-batch training by any optax rule, and its distance to the flow.

θ_{k+1} = θ_k + update(∇L(θ_k)), from the same models and the same analytic gradient as
`GradientFlow`; plain gradient descent with step η is the flow's explicit Euler method,
at time t = ηk, as long as η is below 2/(largest eigenvalue of the Hessian).

Whole runs are traced: a scan over chunks that end on the saved steps, with a loop of
updates inside. So they can be mapped over models, and differentiated forwards.
"""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Int, PyTree

from .._types import BoolScalar, IntScalar, RealLike, State
from ..models import AbstractActivation, AbstractLoss, ClassSizes, DeepUFM
from ._assemble import Observe
from ._gradient_flow import GradientFlow
from ._path import Outcome
from ._stop import AbstractStop, FinalTime

Progress = Callable[[int, int], None]


class Descent(eqx.Module):
    """A run of training: saved steps in order, and where it ended.

    Rows are steps 0, 1, ... of about equal ratios; those after an early end hold NaN.
    """

    step: Int[Array, "*batch saves"]
    observables: dict[str, Array]  # leading axis `saves`
    state: State | None  # leading axis `saves`, where states were kept
    num_saved: Int[Array, "*batch"]
    final: DeepUFM  # the last finite state looked at
    final_step: IntScalar
    outcome: Outcome  # reached, not_met (a stop that no step met) or non_finite


def descend(
    model: DeepUFM,
    loss: AbstractLoss,
    optimiser: optax.GradientTransformation,
    steps: int,
    *,
    per_class: ClassSizes,
    mean: bool = False,
    activation: AbstractActivation | None = None,
    depth: RealLike | None = None,
    stop: AbstractStop | None = None,
    saves: int | Sequence[int] = 100,
    observe: Observe | None = None,
    keep_states: bool = False,
    chunk: int = 10_000,
    progress: Progress | None = None,
) -> Descent:
    """Trains `model` on the full batch for `steps` updates.

    **Arguments:**

    - `model`: the start; `loss` as in `GradientFlow`.
    - `optimiser`: any optax rule; `optax.sgd(0.05)` is plain gradient descent. Weight
        decay and schedules are optax's: see `Training` for the papers' rules.
    - `per_class`, `activation`, `depth`: as in `GradientFlow`.
    - `mean`: descend the mean of the loss over examples, not the sum. A step η on the
        mean is a step η/(number of examples) on the sum, in whose time flows run.
    - `stop`: end early at a `FinalNorm` or `LogLossBelow`, looked for at the end of
        every chunk.
    - `saves`: about how many steps are saved, in equal ratios from the first to the
        last, step 0 included; or the steps themselves.
    - `observe`: `observe(flow, log_time, state) -> dict`, such as `ufm.metrics`;
        called with the log of the step number as its time.
    - `chunk`: the longest stretch between two looks at the stop and at NaNs.
    - `progress`: called as progress(step, steps) at the end of every chunk.

    **Returns:** a `Descent`. A run that diverges ends with outcome `non_finite`, its
    rows and its last finite state kept. Differentiable in forward mode (`jvp`) only.

    **Raises:** `ValueError` for a model that does not fit, counts below 1, or a stop
    at a time, which `steps` already is.

    !!! example
        run = ufm.descend(model, ufm.CrossEntropy(), optax.sgd(0.05), 1000, per_class=5)
    """
    flow = GradientFlow(loss, per_class, depth=depth, activation=activation)
    flow.check(model)
    for name, value in {"steps": steps, "chunk": chunk}.items():
        if not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(
                f"Argument `{name}` must be a whole number, at least 1, but is {value}."
            )
    if not isinstance(optimiser, optax.GradientTransformation):
        raise ValueError(
            "Argument `optimiser` must be an optax rule such as optax.sgd(0.05), but "
            f"is {optimiser!r}."
        )
    if isinstance(stop, FinalTime):
        raise ValueError(
            "Descent stops by `steps`, not by a time. Other stops are FinalNorm and "
            "LogLossBelow."
        )
    run = _Run(
        flow, optimiser, stop, observe, progress, _ends(steps, saves, chunk), mean,
        keep_states,
    )  # fmt: skip
    return _descend(run, model)


class _Run(eqx.Module):
    """What a run is, but its model."""

    flow: GradientFlow
    # An optax.GradientTransformation, whose types know no modules.
    optimiser: Any = eqx.field(static=True)
    stop: AbstractStop | None
    observe: Observe | None = eqx.field(static=True)
    progress: Progress | None = eqx.field(static=True)
    ends: tuple[tuple[int, bool], ...] = eqx.field(static=True)  # steps; saved or not
    mean: bool = eqx.field(static=True)
    keep_states: bool = eqx.field(static=True)


class _Carry(eqx.Module):
    model: DeepUFM
    memory: PyTree  # the optimiser's
    step: IntScalar
    outcome: Outcome
    over: BoolScalar


def _ends(
    steps: int, saves: int | Sequence[int], chunk: int
) -> tuple[tuple[int, bool], ...]:
    """Returns where chunks end, and whether that step is saved."""
    if not isinstance(saves, int | np.integer):
        whole = all(isinstance(step, int | np.integer) for step in saves)
        saved = {int(step) for step in saves}
        if not whole or not saved or min(saved) < 0 or max(saved) > steps:
            raise ValueError(
                f"Steps to save at must be whole numbers from 0 to {steps}, but are "
                f"{saves}."
            )
    elif saves < 2:
        raise ValueError(
            "Argument `saves` counts the start and the end: it must be at least 2, but "
            f"is {saves}."
        )
    else:
        spaced = np.geomspace(1, steps, saves - 1).round().astype(int)
        saved = {0, *spaced.tolist(), steps}
    looks = saved | {steps} | set(range(0, steps, chunk))
    return tuple((step, step in saved) for step in sorted(looks))


@eqx.filter_jit
def _descend(run: _Run, model: DeepUFM) -> Descent:
    ends = jnp.asarray([step for step, _ in run.ends])
    zero = jnp.zeros((), ends.dtype)
    start = _Carry(
        model=model,
        memory=run.optimiser.init(model),
        step=zero,
        outcome=Outcome.reached if run.stop is None else Outcome.not_met,
        over=jnp.asarray(False),
    )
    last, (reached, observed, states) = jax.lax.scan(
        lambda carry, end: _chunk(run, carry, end), start, ends
    )
    kept = np.flatnonzero([saved for _, saved in run.ends])
    written = reached[kept]

    def rows(leaf):
        leaf = leaf[kept]
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            leaf = leaf.astype(float)  # integers have no NaN
        mask = written.reshape(written.shape + (1,) * (leaf.ndim - 1))
        return jnp.where(mask, leaf, jnp.nan)

    return Descent(
        step=ends[kept],
        observables=jax.tree.map(rows, observed),
        state=jax.tree.map(rows, states),
        num_saved=jnp.sum(written),
        final=last.model,
        final_step=last.step,
        outcome=last.outcome,
    )


def _chunk(run: _Run, carry: _Carry, end: IntScalar):
    """Trains up to step `end`, unless it is over; looks at the result."""
    count = jnp.where(carry.over, 0, end - carry.step)
    model, memory = _advance(run, carry.model, carry.memory, count)
    finite = jax.tree.map(lambda leaf: jnp.all(jnp.isfinite(leaf)), model)
    finite = jax.tree.reduce(jnp.logical_and, finite)
    moved = finite & ~carry.over

    def take(new, old):
        return jax.tree.map(lambda a, b: jnp.where(moved, a, b), new, old)

    model, memory = take(model, carry.model), take(memory, carry.memory)
    outcome = Outcome.where(finite | carry.over, carry.outcome, Outcome.non_finite)
    over = carry.over | ~finite
    log_step = jnp.log(jnp.maximum(end, 1).astype(model.head.dtype))
    log_step = jnp.where(end == 0, -jnp.inf, log_step)
    if run.stop is not None:
        met = moved & (run.stop.excess(run.flow, log_step, model) >= 0)
        outcome = Outcome.where(met, Outcome.reached, outcome)
        over = over | met
    if run.progress is not None:
        jax.debug.callback(run.progress, end, run.ends[-1][0])
    observed = {} if run.observe is None else run.observe(run.flow, log_step, model)
    step = jnp.where(moved, end, carry.step)
    after = _Carry(model, memory, step, outcome, over)
    return after, (moved, observed, model if run.keep_states else None)


def _advance(run: _Run, model: DeepUFM, memory: PyTree, count: IntScalar):
    """Takes `count` updates."""
    examples = model.features.shape[1] if run.mean else 1

    def update(_, carry):
        model, memory = carry
        direction, log_speed = run.flow(model)
        size = -jnp.exp(log_speed) / examples
        gradient = jax.tree.map(lambda d: size * d, direction)
        change, memory = run.optimiser.update(gradient, memory, model)
        # Weight decay would shrink the identities of padded layers.
        hidden = run.flow.drop_frozen(change.hidden)
        change = eqx.tree_at(lambda c: c.hidden, change, hidden)
        return jax.tree.map(jnp.add, model, change), memory

    return jax.lax.fori_loop(0, count, update, (model, memory))
