"""`metrics`: the standard `observe`, every quantity the papers plot along an orbit.

Shared by all flows: `log_norm`, `log_loss`, `effective_rank`, `nuclear_norm`,
`singular_values`, `kl`, `reverse_kl`, `uniform_distance` (M of P2 eq. 12),
`etf_distance` (M of P1 eq. 61), `logit_margin`, `parameter_margin`,
`smoothed_parameter_margin`. `GradientFlow` adds `mean_effective_rank`,
`alignment_weights`, `alignment_features`, `alignment_logits`, `residual_energy`,
`balancedness_absolute`, `balancedness_relative`, `balancedness_normalised`, and for K a
power of two `off_diagonal_energy`.

Conventions. The reduced flows have K-1 singular values, in the papers' units and in the
order of the state. The full flow has K, in falling order: those of the logits with
every example replaced by its class mean (sqrt(n) times those of the K x K means), so
that they are `scale_map`'s and `hadamard`'s; its KL, reverse KL and uniform distance
are over the K-1 largest (P2 section 6). Those are computed numbers, resolved down to
K roundings of the largest; smaller ones count as that, so that KL is a lower bound once
modes have died. (The reduced flow resolves any size.)
`effective_rank` is that of Z itself (P1 Fig. 2), `mean_effective_rank` that of the
class means (P1 Figs 5, 9); they agree once features have collapsed. Losses are those of
the flow: summed over examples for `GradientFlow`, of one example for the reduced flows.
Parameter margins of the reduced flows are those of the matrix model with n = 1.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._types import Modes, RealScalar, State
from ..dynamics import AbstractFlow, GradientFlow, HadamardFlow, LogitFlow
from ..geometry import frobenius_norm, psi_matvec
from ..models import DeepUFM
from ._collapse import (
    alignment,
    balancedness_defects,
    class_means,
    etf_distance,
    etf_distance_from_log,
    hadamard_bases,
    off_diagonal_energy,
    residual_energy,
)
from ._margin import (
    logit_margin,
    logit_margin_from_log,
    margins,
    parameter_margin,
    smoothed_parameter_margin,
)
from ._spectrum import (
    effective_rank,
    effective_rank_from_log,
    kl_from_uniform,
    reverse_kl_from_uniform,
    singular_values,
    uniform_distance,
)


def metrics(flow: AbstractFlow, log_time: RealScalar, state: State) -> dict[str, Array]:
    """Returns the papers' observables at one state; see the module's table.

    **Arguments:** `flow` one of `HadamardFlow`, `LogitFlow`, `GradientFlow`; `log_time`
    is not used; `state` a state of that flow.

    **Raises:** `TypeError` for a flow of another kind.

    !!! example
        path = ufm.solve(flow, y0, stop=ufm.FinalTime(1e8), observe=ufm.metrics)
        path.observables["effective_rank"]
    """
    del log_time
    return _metrics(flow, state)


# Compiled as a whole, so that a call outside `jit` is one program and not a hundred.
@eqx.filter_jit
def _metrics(flow: AbstractFlow, state: State) -> dict[str, Array]:
    if isinstance(flow, HadamardFlow):
        return _hadamard_metrics(flow, state)
    if isinstance(flow, LogitFlow):
        return _logit_metrics(flow, state)
    if isinstance(flow, GradientFlow):
        return _full_metrics(flow, state)
    raise TypeError(
        "`metrics` knows HadamardFlow, LogitFlow and GradientFlow, but was given "
        f"{type(flow).__name__}. Pass an `observe` of your own."
    )


def _hadamard_metrics(flow: HadamardFlow, log_a: Modes) -> dict[str, Array]:
    smallest = jnp.min(psi_matvec(jnp.exp(log_a)))
    return _reduced_spectrum(log_a) | _losses_and_margins(
        flow,
        log_a,
        smallest,
        logit_margin_from_log(log_a),
        _log_parameter_norm(flow, log_a),
        flow.depth.astype(log_a.dtype),
        jnp.log(jnp.asarray(flow.num_classes, log_a.dtype)),
    )


def _logit_metrics(flow: LogitFlow, a: Modes) -> dict[str, Array]:
    moving = a != 0
    log_a = jnp.where(moving, jnp.log(jnp.abs(jnp.where(moving, a, 1))), -jnp.inf)
    norm = flow.num_classes * frobenius_norm(a)
    smallest = jnp.min(psi_matvec(a))
    at_zero = norm == 0
    return _reduced_spectrum(log_a) | _losses_and_margins(
        flow,
        a,
        smallest,
        jnp.where(at_zero, 0, smallest / jnp.where(at_zero, 1, norm)),
        jnp.where(at_zero, -jnp.inf, jnp.log(jnp.where(at_zero, 1, norm))),
        jnp.zeros((), a.dtype),
        jnp.log(jnp.asarray(flow.num_classes, a.dtype)),
    )


def _full_metrics(flow: GradientFlow, model: DeepUFM) -> dict[str, Array]:
    logits, labels = model.logits(), flow.labels(model)
    means = class_means(logits, model.num_classes)
    # Each column stands for n equal ones.
    values = singular_values(means) * jnp.sqrt(jnp.asarray(flow.per_class, means.dtype))
    feature_means = class_means(model.features, model.num_classes)
    balance = balancedness_defects(model.head, model.hidden, model.features, flow.depth)
    # Below this share of the largest a singular value is rounding: KL and its like are
    # then lower bounds, taken at the floor.
    floor = values.shape[0] * jnp.finfo(values.dtype).eps * values[0]
    observed = _spectrum(_log(jnp.maximum(values[:-1], floor))) | _losses_and_margins(
        flow,
        model,
        jnp.min(margins(logits, labels)),
        logit_margin(logits, labels),
        flow.log_norm(model),
        flow.true_depth(model),
        jnp.zeros((), logits.dtype),
    )
    observed |= {
        "effective_rank": effective_rank(singular_values(logits)),
        "mean_effective_rank": effective_rank(values),
        "nuclear_norm": jnp.sum(values),
        "singular_values": values,
        "etf_distance": etf_distance(logits),
        "alignment_weights": alignment(model.head @ model.head.T),
        "alignment_features": alignment(feature_means.T @ feature_means),
        "alignment_logits": alignment(means),
        "residual_energy": residual_energy(logits),
        "balancedness_absolute": balance.absolute,
        "balancedness_relative": balance.relative,
        "balancedness_normalised": balance.normalised,
    }
    if model.num_classes & (model.num_classes - 1) == 0:
        left, right = hadamard_bases(model.num_classes, flow.per_class)
        observed["off_diagonal_energy"] = off_diagonal_energy(
            logits, left.astype(logits.dtype), right.astype(logits.dtype)
        )
    return observed


def _reduced_spectrum(log_a: Modes) -> dict[str, Array]:
    a = jnp.exp(log_a)
    return _spectrum(log_a) | {
        "effective_rank": effective_rank_from_log(log_a),
        "nuclear_norm": jnp.sum(a),
        "singular_values": a,
        "etf_distance": etf_distance_from_log(log_a),
    }


def _spectrum(log_a: Modes) -> dict[str, Array]:
    return {
        "kl": kl_from_uniform(log_a),
        "reverse_kl": reverse_kl_from_uniform(log_a),
        "uniform_distance": uniform_distance(log_a),
    }


def _losses_and_margins(
    flow, state, smallest, relative, log_parameter_norm, depth, log_examples
) -> dict[str, Array]:
    """The loss of the flow, and the margins; `log_examples` turns it into the sum."""
    log_loss = flow.log_loss(state)
    return {
        "log_norm": flow.log_norm(state),
        "log_loss": log_loss,
        "logit_margin": relative,
        "parameter_margin": parameter_margin(smallest, log_parameter_norm, depth),
        "smoothed_parameter_margin": smoothed_parameter_margin(
            log_loss + log_examples, log_parameter_norm, depth
        ),
    }


def _log_parameter_norm(flow: HadamardFlow, log_a: Modes) -> RealScalar:
    """Returns log ‖θ‖ of the balanced matrix model with n = 1 (P1 D.3).

    Its L+1 layers share singular values (K a_i)^{1/(L+1)}; undefined at infinite depth.
    """
    layers = flow.depth.astype(log_a.dtype) + 1
    log_values = log_a + jnp.log(jnp.asarray(flow.num_classes, log_a.dtype))
    return 0.5 * (jnp.log(layers) + jax.nn.logsumexp(2 / layers * log_values))


def _log(x: Modes) -> Modes:
    positive = x > 0
    return jnp.where(positive, jnp.log(jnp.where(positive, x, 1)), -jnp.inf)
