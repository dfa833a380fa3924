"""Observables of flows whose state is singular values: one entry a mode.

The tables of `_metrics` say what each is; units are those of the flow.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._types import Modes, RealScalar
from ..dynamics import (
    AbstractLayerwiseFlow,
    HadamardFlow,
    LayerwiseHadamardFlow,
    LayerwiseMSEFlow,
    LogitFlow,
    SigmoidalFlow,
)
from ..geometry import frobenius_norm, psi_matvec
from ._collapse import balancedness_defects, etf_distance_from_log
from ._margin import (
    logit_margin_from_log,
    parameter_margin,
    smoothed_parameter_margin,
)
from ._spectrum import (
    effective_rank_from_log,
    kl_from_uniform,
    reverse_kl_from_uniform,
    uniform_distance,
)

Observed = dict[str, Array]


def hadamard_metrics(flow: HadamardFlow, log_a: Modes) -> Observed:
    """Returns spectrum, distances and margins of the reduced flow."""
    smallest = jnp.min(psi_matvec(jnp.exp(log_a)))
    observed = mode_spectrum(log_a)
    observed["etf_distance"] = etf_distance_from_log(log_a)
    return observed | losses_and_margins(
        flow,
        log_a,
        smallest,
        logit_margin_from_log(log_a),
        _log_parameter_norm(flow, log_a),
        flow.depth.astype(log_a.dtype),
        jnp.log(jnp.asarray(flow.num_classes, log_a.dtype)),
    )


def logit_metrics(flow: LogitFlow, a: Modes) -> Observed:
    """Returns the same for modes of the logits, of either sign."""
    norm = flow.num_classes * frobenius_norm(a)
    smallest = jnp.min(psi_matvec(a))
    return _signed_spectrum(a) | losses_and_margins(
        flow,
        a,
        smallest,
        _over(smallest, norm),
        safe_log(norm),
        jnp.zeros((), a.dtype),
        jnp.log(jnp.asarray(flow.num_classes, a.dtype)),
    )


def layerwise_metrics(flow: LayerwiseHadamardFlow, alpha: Array) -> Observed:
    """Returns the same of all layers, in the matrix flow's units, and balancedness."""
    a = flow.logit_modes(alpha)
    smallest = jnp.min(psi_matvec(flow.relative_modes(a)))
    depth = flow.depth
    if depth is None:
        depth = jnp.asarray(alpha.shape[0] - 1)
    observed = _signed_spectrum(a) | losses_and_margins(
        flow,
        alpha,
        smallest,
        _over(smallest, frobenius_norm(a)),
        flow.log_norm(alpha),
        depth.astype(alpha.dtype),
        jnp.zeros((), alpha.dtype),
    )
    return observed | _layer_balance(flow, alpha)


def layerwise_mse_metrics(flow: LayerwiseMSEFlow, alpha: Array) -> Observed:
    """Returns the spectrum, loss and norm, and balancedness."""
    observed = mode_spectrum(safe_log(jnp.abs(flow.logit_modes(alpha))))
    observed |= {"log_norm": flow.log_norm(alpha), "log_loss": flow.log_loss(alpha)}
    return observed | _layer_balance(flow, alpha)


def sigmoidal_metrics(flow: SigmoidalFlow, log_a: Modes) -> Observed:
    """Returns the spectrum, loss and norm; the singular vectors are not known."""
    observed = mode_spectrum(log_a)
    return observed | {
        "log_norm": flow.log_norm(log_a),
        "log_loss": flow.log_loss(log_a),
    }


def mode_spectrum(log_a: Modes) -> Observed:
    """Returns what depends on log |a| alone."""
    a = jnp.exp(log_a)
    return spectral_distances(log_a) | {
        "effective_rank": effective_rank_from_log(log_a),
        "nuclear_norm": jnp.sum(a),
        "singular_values": a,
    }


def spectral_distances(log_a: Modes) -> Observed:
    """Returns the distances of the normalised modes from the uniform ones."""
    return {
        "kl": kl_from_uniform(log_a),
        "reverse_kl": reverse_kl_from_uniform(log_a),
        "uniform_distance": uniform_distance(log_a),
    }


def losses_and_margins(
    flow, state, smallest, relative, log_parameter_norm, depth, log_examples
) -> Observed:
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


def safe_log(x: Array) -> Array:
    """Returns log x, -inf (and no infinite derivative) at zero and below."""
    positive = x > 0
    return jnp.where(positive, jnp.log(jnp.where(positive, x, 1)), -jnp.inf)


def _signed_spectrum(a: Modes) -> Observed:
    log_a = safe_log(jnp.abs(a))
    return mode_spectrum(log_a) | {
        "etf_distance": etf_distance_from_log(log_a, jnp.sign(a))
    }


def _layer_balance(flow: AbstractLayerwiseFlow, alpha: Array) -> Observed:
    """Layers that share singular vectors are as good as diagonal ones."""
    layers = jax.vmap(jnp.diag)(alpha)
    balance = balancedness_defects(layers[-1], layers[1:-1], layers[0], flow.depth)
    return {
        "balancedness_absolute": balance.absolute,
        "balancedness_relative": balance.relative,
        "balancedness_normalised": balance.normalised,
    }


def _log_parameter_norm(flow: HadamardFlow, log_a: Modes) -> RealScalar:
    """Returns log ‖θ‖ of the balanced matrix model with n = 1 (P1 D.3).

    Its L+1 layers share singular values (K a_i)^{1/(L+1)}; undefined at infinite depth.
    """
    layers = flow.depth.astype(log_a.dtype) + 1
    log_values = log_a + jnp.log(jnp.asarray(flow.num_classes, log_a.dtype))
    return 0.5 * (jnp.log(layers) + jax.nn.logsumexp(2 / layers * log_values))


def _over(value: RealScalar, norm: RealScalar) -> RealScalar:
    zero = norm == 0
    return jnp.where(zero, 0, value / jnp.where(zero, 1, norm))
