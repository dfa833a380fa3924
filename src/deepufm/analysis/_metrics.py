"""`metrics`: the standard `observe`, every quantity the papers plot along an orbit.

| flow                    | observables                                              |
|-------------------------|----------------------------------------------------------|
| all                     | `log_norm`, `log_loss`, `effective_rank`,                |
|                         | `nuclear_norm`, `singular_values`, `kl`, `reverse_kl`,   |
|                         | `uniform_distance` (M of P2 eq. 12)                      |
| all but `SigmoidalFlow`,| `etf_distance` (M of P1 eq. 61), `logit_margin`,         |
| `LayerwiseMSEFlow`      | `parameter_margin`                                       |
| - with cross-entropy    | `smoothed_parameter_margin`                              |
| linear `GradientFlow`,  | `balancedness_absolute`, `balancedness_relative`,        |
| layerwise flows         | `balancedness_normalised`                                |
| `GradientFlow`,         | `mean_effective_rank`, `alignment_logits`,               |
| `LogitMatrixFlow`       | `residual_energy`; `off_diagonal_energy` where K is a    |
|                         | power of two and the classes are balanced                |
| `GradientFlow`          | `alignment_weights`, `alignment_features`                |

Conventions. Flows of modes have K-1 singular values (K for the squared error), in their
own units and in the order of the state. The matrix flows have K, in falling order:
those of the logits with every example replaced by its class mean (sqrt(n) times those
of the K x K means), so that they are `scale_map`'s and `hadamard`'s; KL, reverse KL and
uniform distance are over the K-1 largest (P2 section 6). Those are computed numbers,
resolved down to K roundings of the largest; smaller ones count as that, so that KL is a
lower bound once modes have died. (The reduced flow resolves any size.)
`effective_rank` is that of Z itself (P1 Fig. 2), `mean_effective_rank` that of the
class means (P1 Figs 5, 9); they agree once features have collapsed. Losses are those of
the flow: summed over examples, but of one example for `HadamardFlow` and `LogitFlow`;
weight decay is in none. Parameter margins of those two are the matrix model's, n = 1.
Balancedness is conserved by linear layers only, and not reported for activated ones.
"""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array

from .._types import Labels, Logits, RealScalar, State
from ..dynamics import (
    AbstractFlow,
    GradientFlow,
    HadamardFlow,
    LayerwiseHadamardFlow,
    LayerwiseMSEFlow,
    LogitFlow,
    LogitMatrixFlow,
    SigmoidalFlow,
)
from ..models import CrossEntropy, DeepUFM, class_sizes
from ._collapse import (
    alignment,
    balancedness_defects,
    class_means,
    etf_distance,
    hadamard_bases,
    off_diagonal_energy,
    residual_energy,
)
from ._margin import logit_margin, margins
from ._mode_metrics import (
    Observed,
    hadamard_metrics,
    layerwise_metrics,
    layerwise_mse_metrics,
    logit_metrics,
    losses_and_margins,
    safe_log,
    sigmoidal_metrics,
    spectral_distances,
)
from ._spectrum import effective_rank, singular_values


def metrics(flow: AbstractFlow, log_time: RealScalar, state: State) -> dict[str, Array]:
    """Returns the papers' observables at one state; see the module's table.

    **Arguments:** `flow` any flow of this package; `log_time` is not used; `state` a
    state of that flow.

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
    if isinstance(flow, GradientFlow):
        return _full_metrics(flow, state)
    if isinstance(flow, LogitMatrixFlow):
        depth = jnp.zeros((), state.dtype)
        return _matrix_metrics(flow, state, state, flow.labels(state), depth)
    of_modes = {
        HadamardFlow: hadamard_metrics,
        LogitFlow: logit_metrics,
        LayerwiseHadamardFlow: layerwise_metrics,
        LayerwiseMSEFlow: layerwise_mse_metrics,
        SigmoidalFlow: sigmoidal_metrics,
    }
    if type(flow) not in of_modes:
        raise TypeError(
            f"`metrics` does not know {type(flow).__name__}, a flow from elsewhere. "
            "Pass an `observe` of your own."
        )
    return of_modes[type(flow)](flow, state)


def _full_metrics(flow: GradientFlow, model: DeepUFM) -> Observed:
    logits, labels = flow.logits(model), flow.labels(model)
    observed = _matrix_metrics(flow, model, logits, labels, flow.true_depth(model))
    features = class_means(model.features, model.num_classes, flow.per_class)
    observed |= {
        "alignment_weights": alignment(model.head @ model.head.T),
        "alignment_features": alignment(features.T @ features),
    }
    if flow.activation is not None:
        return observed
    balance = balancedness_defects(model.head, model.hidden, model.features, flow.depth)
    return observed | {
        "balancedness_absolute": balance.absolute,
        "balancedness_relative": balance.relative,
        "balancedness_normalised": balance.normalised,
    }


def _matrix_metrics(
    flow: GradientFlow | LogitMatrixFlow,
    state: State,
    logits: Logits,
    labels: Labels,
    depth: RealScalar,
) -> Observed:
    """What the logit matrix shows, and the flow's norm and loss."""
    num_classes = logits.shape[0]
    sizes = class_sizes(num_classes, flow.per_class)
    means = class_means(logits, num_classes, sizes)
    # Each column stands for n_c equal ones.
    weights = jnp.sqrt(jnp.asarray(sizes, means.dtype))
    values = singular_values(means * weights[None, :])
    # Below this share of the largest a singular value is rounding: KL and its like are
    # then lower bounds, taken at the floor.
    floor = values.shape[0] * jnp.finfo(values.dtype).eps * values[0]
    observed = spectral_distances(safe_log(jnp.maximum(values[:-1], floor)))
    observed |= losses_and_margins(
        flow,
        state,
        jnp.min(margins(logits, labels)),
        logit_margin(logits, labels),
        flow.log_norm(state),
        depth,
        jnp.zeros((), logits.dtype),
    )
    if not isinstance(flow.loss, CrossEntropy):
        del observed["smoothed_parameter_margin"]
    observed |= {
        "effective_rank": effective_rank(singular_values(logits)),
        "mean_effective_rank": effective_rank(values),
        "nuclear_norm": jnp.sum(values),
        "singular_values": values,
        "etf_distance": etf_distance(logits, sizes),
        "alignment_logits": alignment(means),
        "residual_energy": residual_energy(logits, sizes),
    }
    balanced = len(set(sizes)) == 1
    if balanced and num_classes & (num_classes - 1) == 0:
        left, right = hadamard_bases(num_classes, sizes[0])
        observed["off_diagonal_energy"] = off_diagonal_energy(
            logits, left.astype(logits.dtype), right.astype(logits.dtype)
        )
    return observed
