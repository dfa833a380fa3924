"""Jacobian spectra of both flows at a state: what grows, and what is only gauge.

Two kinds of state ask two questions.

*Rest* (squared error fitted, or weight decay): exponents are eigenvalues of the
Jacobian J itself, in the flow's own time. The fibre of equal logits gives exact zeros.

*Moving for ever* (cross-entropy): nothing is at rest but the direction, so that what
counts is θ/‖θ‖ in the time s = log ‖θ‖ (a/‖a‖_1 and log ‖a‖_1 in the reduced flow),
whose exponents are those of J/g - 1 across θ, g = d log ‖θ‖/dt. The raw J misleads:
where F = gθ, turning the hidden units has the eigenvalue +g. Turned, the model grows as
before; the difference of two copies grows with them. On an invariant ray

    rotations (skew X, `_gauge`)   raw +g,   normalised 0 exactly,
    scalings (symmetric X)         raw -g,   normalised -2: the imbalance that they
                                   make is conserved, while ‖θ‖² grows.

Both are projected out, measured, and listed apart; *physical* exponents are the rest.
With weight decay λ, at rest, they are 0 and -2λ.

Exponents of a reduced ray reappear in the full flow times L+1: N ~ ‖θ‖^{L+1}, so that
d log N = (L+1) d log ‖θ‖, and the layers' a_i^{1/(L+1)} deviate as a_i does, but for a
factor. DNC: (L+1)((L-1)/(L+1) - μ). What else the full flow has are turned singular
vectors, and, for L >= 2 and d > K - 1, weights of one hidden layer between units that
neither neighbour uses: nothing drives these, so that they stay as the norm grows and
have exactly -1 (0 at rest, where they count as neutral: flat to this order).

Exponents decide on stability only where the direction (or, at rest, the state) stays;
elsewhere they are those of one instant, and the verdict is that the state moves.

Scale: exponents are ratios, and the verdict compares each with the largest of its kind,
so that units, and moving norm between layers, change nothing. Scaling θ itself is no
symmetry of cross-entropy: DNC of L > 1 *is* unstable at small norms. Near margins of
1e14 and beyond, doubles no longer hold the state: a last digit of θ changes the softmax
by a factor. Such states are refused, but for those of the reduced flow on invariant
rays, whose exponents are in closed form.
"""

import enum
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from .._types import State, Tracer
from ..dynamics import AbstractFlow, GradientFlow, HadamardFlow
from ..models import CrossEntropy, DeepUFM
from ._full_jacobian import MOST_DENSE, Spectrum, full_reactivity, full_spectrum
from ._reduced_jacobian import (
    ray_exponents,
    reduced_exponents,
    reduced_linear,
    reduced_reactivity,
)
from ._top_exponents import top_reactivity, top_spectrum

# What drifts less than this stays where it is.
_STILL = 1e-3
# What gauge directions move that they do not: more than the state's rounding.
_DOUBLE_RANK, _SINGLE_RANK = 1e-10, 1e-5
# Logits of which the last digit changes the softmax by this part are not resolved.
_RESOLVED = 0.02


class Stability(enum.Enum):
    """What the physical exponents of a state say."""

    UNSTABLE = "unstable: some perturbation grows"
    STABLE = "stable: all perturbations decay, but for gauge"
    NEUTRAL = "not decided to first order: some neither grow nor decay"
    MOVING = "moving: exponents are those of an instant, and decide on nothing"


@dataclass(frozen=True)
class JacobianSpectrum:
    """The exponents of a state.

    - `exponents`: the physical ones, largest (real part) first; complex only where
        some are.
    - `thresholds`: up to what size each counts as zero.
    - `gauge`, `balance`: as measured, of rotations and scalings of the hidden units.
        Both are empty for the reduced flow. With `top`, those of a few random ones.
    - `normalised`: whether they are those of θ/‖θ‖ per unit of log ‖θ‖.
    - `log_unit`: exponent·exp(log_unit) is a rate in the flow's own time; natural log.
    - `drift`: how far the state is from where exponents mean most. Normalised, the
        speed of θ/‖θ‖ (2-norm; that of a/‖a‖_1 in the 1-norm) per unit of log norm,
        0 on a ray; else ‖F‖/(‖θ‖·largest exponent), 0 at rest.
    - `complete`: whether these are all exponents.
    """

    exponents: np.ndarray
    thresholds: np.ndarray
    gauge: np.ndarray
    balance: np.ndarray
    normalised: bool
    log_unit: float
    drift: float
    complete: bool

    @property
    def n_unstable(self) -> int:
        """The number of physical exponents above zero."""
        return int(np.sum(np.real(self.exponents) > self.thresholds))

    @property
    def n_stable(self) -> int:
        """The number of physical exponents below zero (found, if not all are)."""
        return int(np.sum(np.real(self.exponents) < -self.thresholds))

    @property
    def n_neutral(self) -> int:
        """The number of physical exponents that are zero up to their thresholds."""
        return len(self.exponents) - self.n_unstable - self.n_stable

    @property
    def n_gauge(self) -> int | None:
        """The number of rotations that act; `None` where only some were tried."""
        return len(self.gauge) if self.complete else None

    @property
    def n_balance(self) -> int | None:
        """The number of scalings that act; `None` where only some were tried."""
        return len(self.balance) if self.complete else None

    @property
    def verdict(self) -> Stability:
        """What the physical exponents say; nothing where `drift` is above 1e-3."""
        if not self.drift <= _STILL:
            return Stability.MOVING
        if self.n_unstable:
            return Stability.UNSTABLE
        return Stability.NEUTRAL if self.n_neutral else Stability.STABLE

    def __str__(self) -> str:
        time = "log-norm time" if self.normalised else f"e^{-self.log_unit:.4g} of time"
        found = "" if self.complete else f" of the largest {len(self.exponents)}"
        return (
            f"{self.verdict.value}\n"
            f"exponents per {time}{found}: {self.n_unstable} unstable, {self.n_stable} "
            f"stable, {self.n_neutral} neutral; {_range(np.real(self.exponents))}\n"
            f"rotations: {len(self.gauge)}, {_range(self.gauge)}; scalings: "
            f"{len(self.balance)}, {_range(self.balance)}\n"
            f"drift {self.drift:.3g}"
        )


def jacobian_spectrum(
    flow: AbstractFlow,
    state: State,
    *,
    normalised: bool | None = None,
    top: int | None = None,
    tolerance: float = 1e-10,
) -> JacobianSpectrum:
    """Returns the exponents of a flow at a state, gauge and balance modes apart.

    They are those of the linearised flow there. On an invariant ray (normalised) or at
    rest (not) they do not depend on coordinates, and decide on stability; elsewhere
    they are those in a (reduced flow) or θ (full flow) of a field frozen at this
    norm, and `drift` says how far the state is off. For the full flow normalised,
    terms of the order of the drift, which would break the symmetry, are left out.

    **Arguments:**

    - `flow`: a `HadamardFlow`, or a `GradientFlow` of linear layers.
    - `state`: log a, (K-1,), modes of -inf included; or a `DeepUFM`, padding in depth
        dropped; not traced: spectra are computed on the host, in double precision.
        (Padding in width counts as width: nothing tells it from weights that
        are zero.)
    - `normalised`: whether to divide by the norm and count its logarithm as time;
        `None` for yes where the flow's norm diverges.
    - `top`: how many of the largest exponents to find, by Lanczos, without a matrix;
        `None` for all, at most 3000 parameters.
    - `tolerance`: exponents count as zero up to this part of the largest in their
        block (living modes, each zero mode; stiff and soft directions where they are
        far apart), or up to their rounding errors.

    **Returns:** a `JacobianSpectrum`.

    **Raises:** `ValueError` for another flow, an activation, a weight decay that
    changes with time, a normalised state whose norm does not grow, too many parameters,
    options out of range, exponents that Lanczos cannot tell apart, margins that
    doubles do not resolve, and without float64.

    !!! example
        spectrum = jacobian_spectrum(flow, model)
        print(spectrum)
        spectrum.n_unstable, spectrum.n_gauge
    """
    _check_options(top, tolerance)
    normalised = _default(flow, normalised)
    single = jnp.finfo(jnp.result_type(*jax.tree.leaves(state))).bits < 64
    state = _in_double(state)
    if isinstance(flow, HadamardFlow):
        linear = reduced_linear(flow, state)
        on_ray = ray_exponents(flow, state, tolerance) if normalised else None
        values, thresholds = on_ray or reduced_exponents(linear, normalised, tolerance)
        log_unit, drift = linear.log_speed, linear.drift
        if normalised:
            log_unit += float(np.log(linear.growth))
        else:
            drift = _raw_drift(linear, values)
        none = np.zeros(0)
        found = Spectrum(values, thresholds, none, none, log_unit, drift)
    else:
        assert isinstance(flow, GradientFlow)
        if top is None:
            ranks = _SINGLE_RANK if single else _DOUBLE_RANK
            found = full_spectrum(flow, state, normalised, tolerance, ranks)
        else:
            found = top_spectrum(flow, state, normalised, tolerance, top)
        _check_resolution(flow, state, found.drift)
    order = np.argsort(-np.real(found.exponents), kind="stable")[:top]
    reduced = isinstance(flow, HadamardFlow)
    return JacobianSpectrum(
        exponents=found.exponents[order],
        thresholds=found.thresholds[order],
        gauge=found.gauge,
        balance=found.balance,
        normalised=normalised,
        log_unit=found.log_unit,
        drift=found.drift,
        complete=top is None or (reduced and len(order) == len(found.exponents)),
    )


def reactivity(
    flow: AbstractFlow, state: State, *, normalised: bool | None = None
) -> float:
    """Returns the fastest growth of any perturbation at this instant.

    The numerical abscissa: the top eigenvalue of the symmetric part of the Jacobian,
    per unit of the time that `jacobian_spectrum` uses. It is that of δθ in the 2-norm
    for the full flow, gauge directions included (0 on a stable ray), and exact off the
    ray; for the reduced flow that of δ log a_i over the living modes, where J is not
    symmetric unless these are equal. A stable state with a positive reactivity
    amplifies some perturbations before they decay.

    **Arguments:** as `jacobian_spectrum`. Lanczos serves above 3000 parameters.

    **Returns:** d log |δ|/ds, largest over δ; -inf where there is no perturbation.

    **Raises:** `ValueError` as `jacobian_spectrum`.
    """
    normalised = _default(flow, normalised)
    state = _in_double(state)
    if isinstance(flow, HadamardFlow):
        return reduced_reactivity(reduced_linear(flow, state), normalised)
    assert isinstance(flow, GradientFlow)
    flow.check(state)
    count = state.head.size + state.hidden.size + state.features.size
    return (full_reactivity if count <= MOST_DENSE else top_reactivity)(
        flow, state, normalised
    )


def _default(flow, normalised) -> bool:
    """Returns whether to divide by the norm, after checking the flow."""
    if not isinstance(flow, HadamardFlow | GradientFlow):
        raise ValueError(
            "Jacobian spectra are those of `HadamardFlow` and `GradientFlow`, but the "
            f"flow is a {type(flow).__name__}."
        )
    return flow.norm_diverges if normalised is None else normalised


def _in_double(state: State) -> State:
    """Returns the state in float64, after checking that it holds values."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(state)):
        raise ValueError(
            "Jacobian spectra are computed on the host, but the state is traced. Call "
            "them outside of jit and vmap, one state at a time."
        )
    if jnp.zeros(()).dtype != jnp.float64:
        raise ValueError(
            "Jacobian spectra need float64: rounding must be far below exponents. Set "
            '`jax.config.update("jax_enable_x64", True)`.'
        )
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), state)


def _check_resolution(flow: GradientFlow, state: DeepUFM, drift: float) -> None:
    """Refuses models that drift since their softmax is a matter of rounding."""
    if drift <= _STILL or not isinstance(flow.loss, CrossEntropy):
        return
    largest = float(jnp.max(jnp.abs(flow.logits(state))))
    if not largest * np.finfo(float).eps <= _RESOLVED:
        raise ValueError(
            f"Logits of {largest:.1e} are not resolved: a last digit of the parameters "
            "changes the softmax by a factor. Take an earlier state, or, on a ray of "
            "the reduced flow, `stability_exponents`."
        )


def _check_options(top, tolerance) -> None:
    if top is not None and not (isinstance(top, int) and top >= 1):
        raise ValueError(
            f"Argument `top` must be a whole number of at least 1, but is {top}."
        )
    if not 0 <= tolerance < 1:
        raise ValueError(
            f"Argument `tolerance` must be at least 0 and below 1, but is {tolerance}."
        )


def _raw_drift(linear, exponents) -> float:
    """Returns ‖da/dt‖_1/(‖a‖_1·largest exponent)."""
    largest = np.max(np.abs(exponents))
    return float(linear.growth / largest) if largest > 0 else np.inf


def _range(values: np.ndarray) -> str:
    if not values.size:
        return "none"
    return f"from {np.min(values):.6g} to {np.max(values):.6g}"
