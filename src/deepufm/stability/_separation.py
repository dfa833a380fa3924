"""From what time on the classes are separated, and every layer grows for good.

Lyu & Li (2019) start their clock at the first t0 at which the loss, summed over
examples, is below log 2. From then on every example is classified, since an example
that is not costs log 2 by itself, and every layer grows: for homogeneous layers

    d‖W_l‖²/dt = 2 <W_l, dW_l/dt> = -2 <dL/dZ, Z>
               = 2 sum_i sum_{c != y_i} p_ci (z_yi - z_ci),    l = 0, ..., L, W_0 = H_1,

the same number for every layer, positive where all margins z_y - z_c are. Before t0
they may have any sign, and from a Gaussian start layers do shrink.

`log_time` is the natural logarithm of the flow's own time. HadamardFlow and LogitFlow
report the loss of one example; all of their nK examples have the same.
"""

from dataclasses import dataclass
from typing import TypeAlias

import diffrax
import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._types import RealScalar, State
from ..analysis import margins
from ..dynamics import (
    AbstractClock,
    AbstractFlow,
    AbstractStop,
    GradientFlow,
    HadamardFlow,
    LayerwiseHadamardFlow,
    LogitFlow,
    LogitMatrixFlow,
    LogLossBelow,
    Outcome,
    SaveEvery,
    Saves,
    solve,
)
from ..models import CrossEntropy, DeepUFM

_LOG_LOG_2 = float(np.log(np.log(2.0)))
_Flow: TypeAlias = (
    GradientFlow | HadamardFlow | LayerwiseHadamardFlow | LogitFlow | LogitMatrixFlow
)


@dataclass(frozen=True)
class Separation:
    """Where the summed loss first falls below log 2.

    - `log_time`: log t0, -inf where the start is there already.
    - `state`: the state at t0.
    - `log_loss`: of all examples, there.
    - `reached`: whether it did; otherwise the others are those of the last state.
    - `outcome`: how the solve ended.
    """

    log_time: float
    state: State
    log_loss: float
    reached: bool
    outcome: Outcome


@dataclass(frozen=True)
class NormPath:
    """Norms of the layers along an orbit, and whether they ever fall.

    - `log_time`, (saves,): log t; counted from t = 0 if the start was a `Separation`.
    - `norms`, (saves, L+1): ‖H_1‖_F, ‖W_1‖_F, ..., ‖W_L‖_F.
    - `growth`, `log_scale`, (saves,): d‖W_l‖²/dt = exp(log_scale)·growth, exact.
    - `least_margin`, (saves,): the smallest z_y - z_c.
    - `monotone`: whether growth > 0 at every save, and no norm falls from one save to
        the next by more than the solve's tolerance.
    - `violation`: the first save where that fails; `None` where it never does.
    - `outcome`: how the solve ended.
    """

    log_time: np.ndarray
    norms: np.ndarray
    growth: np.ndarray
    log_scale: np.ndarray
    least_margin: np.ndarray
    monotone: bool
    violation: int | None
    outcome: Outcome


def separation_stop(flow: AbstractFlow, per_class: int = 1) -> LogLossBelow:
    """Returns the stop at which the loss summed over examples is log 2.

    **Arguments:** `flow`, of cross-entropy; `per_class` n, for `HadamardFlow` and
    `LogitFlow`, which do not know it.

    **Raises:** `ValueError` for a flow of another loss, with weight decay, or that
    knows its number of examples and is given another.

    !!! example
        stop = ufm.separation_stop(flow)
        ufm.ensemble(flow, None, models, stop=stop).final_log_time  # log t0 of each
    """
    _check_flow(flow)
    if per_class < 1:
        raise ValueError(
            f"Argument `per_class` must be at least 1, but is {per_class}."
        )
    if isinstance(flow, HadamardFlow | LogitFlow):
        return LogLossBelow(_LOG_LOG_2 - np.log(flow.num_classes * per_class))
    if per_class != 1:
        raise ValueError(
            "Argument `per_class` is for flows that report the loss of one example; a "
            f"{type(flow).__name__} knows its own."
        )
    return LogLossBelow(_LOG_LOG_2)


def separation_time(
    flow: AbstractFlow,
    start: State,
    *,
    per_class: int = 1,
    clock: AbstractClock | None = None,
    solver: diffrax.AbstractSolver | None = None,
    rtol: float | None = None,
    max_steps: int = 100_000,
) -> Separation:
    """Returns the first time t0 at which the summed loss is log 2 (P1 Lemma D.1).

    **Arguments:** `flow`, `per_class` as in `separation_stop`; `start` the state at
    t = 0; `clock`, `solver`, `rtol`, `max_steps` as in `solve`.

    **Returns:** a `Separation`. A flow that never gets there (a bottleneck, a resting
    start) is one that is not `reached`.

    **Raises:** `ValueError` as `separation_stop` and `solve`.

    !!! example
        t0 = ufm.separation_time(flow, model)
        ufm.norm_path(flow, t0, stop=ufm.FinalTime(1e6)).monotone  # True
    """
    stop = separation_stop(flow, per_class)
    flow.check(start)
    surplus = float(stop.threshold) - _LOG_LOG_2
    log_loss = float(flow.log_loss(start))
    if log_loss <= float(stop.threshold):
        return Separation(-np.inf, start, log_loss - surplus, True, Outcome.reached)
    path = solve(
        flow, start, stop=stop, clock=clock, saves=SaveEvery(1.0, 1),
        keep_states=False, solver=solver, rtol=rtol, max_steps=max_steps,
    )  # fmt: skip
    return Separation(
        log_time=float(path.final_log_time),
        state=path.final,
        log_loss=float(flow.log_loss(path.final)) - surplus,
        reached=bool(path.outcome == Outcome.reached),
        outcome=path.outcome,
    )


def norm_growth(flow: GradientFlow, model: DeepUFM) -> tuple[RealScalar, RealScalar]:
    """Returns (growth, log_scale), d‖W_l‖²/dt = exp(log_scale)·growth for every layer.

    Exact at any margin: the terms p_c (z_y - z_c) are of one sign once the classes are
    separated, and the largest p_c is in `log_scale`.

    **Arguments:** `flow` of cross-entropy, without weight decay, of linear or
    homogeneous layers; `model` one of its states.

    **Raises:** `ValueError` for another flow.
    """
    _check_layers(flow)
    return _norm_growth(flow, model)


# Compiled as a whole: a call outside `jit` is one program and not a dozen.
@eqx.filter_jit
def _norm_growth(flow: GradientFlow, model: DeepUFM) -> tuple[RealScalar, RealScalar]:
    logits, labels = flow.logits(model), flow.labels(model)
    residual, log_scale = flow.loss.residual(logits, labels)
    gaps = jnp.take_along_axis(logits, labels[None, :], axis=0) - logits
    return -2 * jnp.sum(residual * gaps), log_scale


def norm_path(
    flow: GradientFlow,
    start: DeepUFM | Separation,
    *,
    stop: AbstractStop,
    saves: Saves = 100,
    clock: AbstractClock | None = None,
    solver: diffrax.AbstractSolver | None = None,
    rtol: float = 1e-7,
    max_steps: int = 100_000,
) -> NormPath:
    """Follows ‖W_l‖ and says whether it is monotone: it is after `separation_time`.

    **Arguments:** `flow` as in `norm_growth`; `start` a model, or a `Separation` whose
    state to go on from; `stop` (its time counted from `start`), `saves`, `clock`,
    `solver`, `rtol`, `max_steps` as in `solve`.

    **Returns:** a `NormPath`; saves that were not reached are left out.

    **Raises:** `ValueError` as `norm_growth` and `solve`, and for a `Separation` that
    was not reached.
    """
    _check_layers(flow)
    log_start, model = -np.inf, start
    if isinstance(start, Separation):
        if not start.reached:
            raise ValueError(
                "The flow did not get to a loss of log 2: the separation's outcome is "
                f"{start.outcome}. Follow the norms from its `state` instead."
            )
        log_start, model = start.log_time, start.state
    assert isinstance(model, DeepUFM)
    path = solve(
        flow, model, stop=stop, clock=clock, saves=saves, observe=_norms_and_growth,
        keep_states=False, solver=solver, rtol=rtol, max_steps=max_steps,
    )  # fmt: skip
    count = int(path.num_saved)
    observed = {name: np.asarray(x)[:count] for name, x in path.observables.items()}
    # H_1, W_1 ... W_{L-1}, and W_L after whatever is padding.
    depth = int(flow.true_depth(model))
    observed["norms"] = observed["norms"][:, np.r_[:depth, model.depth]]
    violation = first_violation(observed["norms"], observed["growth"], rtol)
    return NormPath(
        log_time=np.logaddexp(log_start, np.asarray(path.log_time)[:count]),
        **observed,
        monotone=violation is None,
        violation=violation,
        outcome=path.outcome,
    )


def first_violation(norms: np.ndarray, growth: np.ndarray, rtol: float) -> int | None:
    """Returns the first row with growth <= 0 (or NaN), or a norm below the last one's.

    **Arguments:** `norms` (rows, layers); `growth` (rows,); `rtol`, the relative fall
    of a norm that counts as none.
    """
    fell = np.zeros(len(norms), bool)
    fell[1:] = np.any(~(norms[1:] >= norms[:-1] * (1 - rtol)), axis=1)
    wrong = np.flatnonzero(fell | ~(growth > 0))
    return int(wrong[0]) if wrong.size else None


def _norms_and_growth(
    flow: AbstractFlow, log_time: RealScalar, model: State
) -> dict[str, Array]:
    del log_time
    assert isinstance(flow, GradientFlow)
    growth, log_scale = norm_growth(flow, model)
    return {
        "norms": flow.layer_norms(model),
        "growth": growth,
        "log_scale": log_scale,
        "least_margin": jnp.min(margins(flow.logits(model), flow.labels(model))),
    }


def _check_flow(flow: AbstractFlow) -> None:
    if not isinstance(flow, _Flow):
        raise ValueError(
            "Separation is that of a flow of cross-entropy: GradientFlow, "
            "HadamardFlow, LayerwiseHadamardFlow, LogitFlow or LogitMatrixFlow, "
            "but the flow is a "
            f"{type(flow).__name__}."
        )
    if isinstance(flow, GradientFlow | LogitMatrixFlow) and not isinstance(
        flow.loss, CrossEntropy
    ):
        raise ValueError(
            "Separation at log 2 is that of cross-entropy, but the loss is "
            f"{type(flow.loss).__name__}."
        )
    if isinstance(flow, GradientFlow) and flow.weight_decay is not None:
        raise ValueError(
            "With weight decay norms need not grow, whatever the loss. Use a "
            "`GradientFlow` without."
        )


def _check_layers(flow: AbstractFlow) -> None:
    if not isinstance(flow, GradientFlow):
        raise ValueError(
            "Norms of layers are those of a `GradientFlow`, but the flow is a "
            f"{type(flow).__name__}. (Under `HadamardFlow` every mode always grows.)"
        )
    _check_flow(flow)
