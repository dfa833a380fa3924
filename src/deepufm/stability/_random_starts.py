"""How well Gaussian starts align the logits with collapse, against width.

From entries ε·N(0, 1/d) the logits first move along (P1 eq. 56)

    dZ/dt(0) = sum_l A_{l+1} A_{l+1}ᵀ (Y - P) H_lᵀ H_l,
    A_{l+1} = W_L ... W_{l+1},  H_l = W_{l-1} ... W_1 H_1,  A_{L+1} = I, H_0 = I,

and tend to the simplex ETF T = S ⊗ 1_nᵀ as d -> ∞ and ε -> 0 (P1 Thm 4.5). The rate:
A Aᵀ of m Gaussian layers is a product of m independent Wishart matrices, each
I + Ω/√d with Ω symmetric, Gaussian, of variance 1 off the diagonal and 2 on it. In the
sum over l layer W_j stands j times on the left and L - j times on the right, so that

    dZ/dt(0) ~ (L+1) T + sqrt(σ²/d)·(Ω T + T Ω'),   σ² = L(L+1)(2L+1)/6,

up to 1/d, and what of this is orthogonal to T gives M = ‖Ẑ - T̂‖_F² (P1 eq. 61) as

    E M ~ c/d,   c = σ²/(L+1)²·[(n+1)K + 2 - 4/(K-1)].

M falls like 1/d: the distance, sqrt(M), is what falls like d^{-1/2}. Class means have
the same law with n = 1.

At L = 1 the logits that the flow of the origin grows for long (P2 Thm 8) are
S (XXᵀ/2d) T to leading order, X with entries N(0, 2): the noise lives on 1⊥ alone, and
c = (K-2)(K+1)/(K-1) whatever n.

After growth of ‖Z‖_F by g the random start is still 1/g of the logits, at any width.
With φ its cosine with T, M -> 2 - 2 sqrt(1 - (1 - φ²)/g²) as d -> ∞ (P1 Fig. 5,
middle), and φ² is 1/(nK²) on average, as of any random direction.
"""

import functools
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._types import Logits, PRNGKey, RealScalar, State
from ..analysis import class_means, etf_distance
from ..dynamics import (
    AbstractClock,
    AbstractFlow,
    AbstractStop,
    GradientFlow,
    Outcome,
    SaveEvery,
    solve,
    zeroth_order_solution,
)
from ..geometry import log_frobenius_norm
from ..models import CrossEntropy, DeepUFM, gaussian
from ._width_study import WidthStudy

# Numbers in the layers of the models that are measured side by side: 256 MB.
_SIDE_BY_SIDE = 2**25
# Up to this width padding costs less than compiling for every width.
_NARROW = 256


def logit_velocity(flow: GradientFlow, model: DeepUFM) -> tuple[Logits, RealScalar]:
    """Returns (V, log_speed) with dZ/dt = exp(log_speed)·V at a state (P1 eq. 56).

    **Arguments:** `flow`, of any loss, activation and padding; `model` one of its
    states.

    **Returns:** V (K, examples), which is small where the layers are, and the natural
    logarithm of what is left out of it.

    **Raises:** `ValueError` for a flow that is no `GradientFlow`.
    """
    if not isinstance(flow, GradientFlow):
        raise ValueError(
            "The logits' velocity is that of a `GradientFlow`, but the flow is a "
            f"{type(flow).__name__}. `LogitMatrixFlow` returns its own when called."
        )
    return _logit_velocity(flow, model)


# Compiled as a whole: a call outside `jit` is one program and not a dozen.
@eqx.filter_jit
def _logit_velocity(flow: GradientFlow, model: DeepUFM) -> tuple[Logits, RealScalar]:
    direction, log_speed = flow(model)
    _, velocity = jax.jvp(flow.logits, (model,), (direction,))
    return velocity, log_speed


def initial_alignment(
    widths: Sequence[int],
    *,
    num_classes: int = 10,
    per_class: int = 5,
    depth: int = 3,
    scale: float = 0.01,
    seeds: int = 5,
    seed: int = 0,
) -> WidthStudy:
    """Measures M of dZ/dt(0) at Gaussian starts against width (P1 Fig. 5, left).

    **Arguments:** `widths` d >= K, rising; `num_classes`, `per_class`, `depth` K, n and
    L; `scale` ε, entries ε·N(0, 1/d); `seeds` >= 2, independent starts of every width;
    `seed` of all of them. Defaults are P1's.

    **Returns:** a `WidthStudy`; its `leading` is that of ε -> 0.

    **Raises:** `ValueError` for widths, seeds or sizes out of range.

    !!! example
        study = ufm.initial_alignment([64, 128, 256, 512])
        study.mean, study.std, study.power_law()
    """
    sizes = num_classes, per_class, depth, scale
    d = _checked(widths, seeds, sizes)
    distances = _measured(_velocity, (per_class,), d, seeds, seed, sizes)
    leading, mean_leading = (_leading(num_classes, n, depth) for n in (per_class, 1))
    return WidthStudy(d, distances[0], distances[1], leading, mean_leading, 0.0)


def zeroth_order_alignment(
    widths: Sequence[int],
    *,
    num_classes: int = 4,
    per_class: int = 1,
    growth: float = 10.0,
    seeds: int = 10,
    seed: int = 0,
) -> WidthStudy:
    """Measures M of the logits that the flow of the origin grows (P2 Thm 8), L = 1.

    That flow is linear, so that the size of the start does not matter.

    **Arguments:** as `initial_alignment`; `growth` √n·t, positive: the layers have
    grown e^growth-fold, and what is not of leading order is e^-growth of the logits.

    **Returns:** a `WidthStudy`.

    **Raises:** `ValueError` as `initial_alignment`, and for a growth that is not
    positive and at most 300.
    """
    if not 0 < growth <= 300:
        raise ValueError(
            "Argument `growth`, the logarithm of the layers' growth, must be positive "
            f"and at most 300, but is {growth}."
        )
    sizes = num_classes, per_class, 1, 1.0
    d = _checked(widths, seeds, sizes)
    options = float(growth), per_class
    distances = _measured(_zeroth_order, options, d, seeds, seed, sizes)
    leading = (num_classes - 2) * (num_classes + 1) / (num_classes - 1)
    return WidthStudy(d, distances[0], distances[1], leading, leading, 0.0)


def grown_alignment(
    widths: Sequence[int],
    *,
    num_classes: int = 10,
    per_class: int = 5,
    depth: int = 3,
    scale: float = 0.01,
    growth: float = 10.0,
    seeds: int = 5,
    seed: int = 0,
    clock: AbstractClock | None = None,
    rtol: float | None = None,
) -> WidthStudy:
    """Measures M of Z when ‖Z‖_F has grown `growth`-fold (P1 Fig. 5, middle).

    **Arguments:** as `initial_alignment`; `growth` above 1; `clock`, `rtol` as in
    `solve`.

    **Returns:** a `WidthStudy` with a `floor`; a start that did not get so far has NaN.

    **Raises:** `ValueError` as `initial_alignment`, and for a growth out of range.
    """
    if not 1 < growth < np.inf:
        raise ValueError(
            "Argument `growth` of the logits' norm must be finite and above 1, but is "
            f"{growth}."
        )
    sizes = num_classes, per_class, depth, scale
    d = _checked(widths, seeds, sizes)
    flow = GradientFlow(CrossEntropy(), per_class)
    found = np.full((2, len(d), seeds), np.nan)
    for row, width in enumerate(d):
        for column, key in enumerate(_keys(seed, int(width), seeds)):
            model = gaussian(
                key, num_classes=num_classes, per_class=per_class, width=int(width),
                depth=depth, scale=scale,
            )  # fmt: skip
            goal = log_frobenius_norm(flow.logits(model)) + np.log(growth)
            path = solve(
                flow, model, stop=LogitNormAbove(goal), clock=clock, rtol=rtol,
                saves=SaveEvery(1.0, 1),
            )  # fmt: skip
            if path.outcome == Outcome.reached:
                found[:, row, column] = _distances(flow.logits(path.final), num_classes)
    sine_squared = (1 - 1 / (per_class * num_classes**2)) / growth**2
    # 2 - 2 sqrt(1 - x) without cancellation.
    floor = 2 * sine_squared / (1 + np.sqrt(1 - sine_squared))
    return WidthStudy(d, found[0], found[1], np.nan, np.nan, float(floor))


class LogitNormAbove(AbstractStop):
    """Stop when log ‖Z‖_F of a `GradientFlow` has risen to `log_norm`."""

    log_norm: RealScalar

    def excess(
        self, flow: AbstractFlow, log_time: RealScalar, state: State
    ) -> RealScalar:
        """Returns log ‖Z‖_F minus its goal."""
        del log_time
        assert isinstance(flow, GradientFlow)
        return log_frobenius_norm(flow.logits(state)) - self.log_norm

    def final_reading(
        self, flow: AbstractFlow, clock: AbstractClock, state: State
    ) -> RealScalar | None:
        """Returns `None`: no clock reads the logits' norm."""
        del flow, clock, state
        return None


def _leading(num_classes: int, per_class: int, depth: int) -> float:
    """Returns c of E M ~ c/d for dZ/dt(0)."""
    shape = (per_class + 1) * num_classes + 2 - 4 / (num_classes - 1)
    return depth * (2 * depth + 1) / (6 * (depth + 1)) * shape


def _velocity(model: DeepUFM, per_class: int) -> Logits:
    return logit_velocity(GradientFlow(CrossEntropy(), per_class), model)[0]


def _zeroth_order(model: DeepUFM, growth: float, per_class: int) -> Logits:
    time = growth / np.sqrt(per_class)
    return zeroth_order_solution(model, time, per_class).logits()


def _measured(
    measure: Callable, options: tuple, widths: np.ndarray, seeds, seed, sizes
) -> np.ndarray:
    """Returns both M of `measure(model, *options)`, (2, widths, seeds)."""
    num_classes, per_class, depth, scale = sizes
    # Narrow models are padded to one width, and share one program.
    narrow = int(np.max(widths[widths <= _NARROW], initial=0))
    rows = [
        _at_width(
            _keys(seed, int(width), seeds), jnp.asarray(width), scale, measure, options,
            max(int(width), narrow), num_classes, per_class, depth,
        )
        for width in widths
    ]  # fmt: skip
    return np.moveaxis(np.asarray(rows), 2, 0)


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6, 7, 8))
def _at_width(
    keys, width, scale, measure, options, rows, num_classes, per_class, depth
):
    """Returns both M of every seed, (seeds, 2), in arrays of `rows` >= d."""

    def one(key):
        model = gaussian(
            key, num_classes=num_classes, per_class=per_class, width=width,
            depth=depth, scale=scale, pad_width=rows,
        )  # fmt: skip
        return _distances(measure(model, *options), num_classes)

    numbers = rows * (rows * (depth - 1) + num_classes * (per_class + 1))
    together = max(1, min(len(keys), _SIDE_BY_SIDE // numbers))
    return jax.lax.map(one, keys, batch_size=together)


def _distances(logits: Logits, num_classes: int) -> jax.Array:
    """Returns M of all columns and that of the class means."""
    means = class_means(logits, num_classes)
    return jnp.stack([etf_distance(logits), etf_distance(means)])


def _keys(seed: int, width: int, seeds: int) -> PRNGKey:
    """Returns a key for each start; another width has others.

    A seed's draws at two widths are prefixes of each other, and would not be
    independent.
    """
    base = jax.random.fold_in(jax.random.key(seed), width)
    return jax.vmap(jax.random.fold_in, (None, 0))(base, jnp.arange(seeds))


def _checked(widths, seeds, sizes) -> np.ndarray:
    """Returns the widths as an array, after checking what no initialiser would."""
    num_classes, per_class, depth, scale = sizes
    array = np.asarray(widths)
    whole = (
        array.ndim == 1 and array.size > 0 and np.issubdtype(array.dtype, np.integer)
    )
    if not (whole and np.all(np.diff(array) > 0)):
        raise ValueError(
            f"Argument `widths` must be rising whole numbers, but is {widths}."
        )
    if num_classes < 2 or array[0] < num_classes:
        raise ValueError(
            "Collapse of K classes needs K >= 2 and widths d >= K, but K = "
            f"{num_classes} and the least width is {array[0]}."
        )
    if per_class < 1 or depth < 1 or not 0 < scale < np.inf:
        raise ValueError(
            "Arguments `per_class` and `depth` must be at least 1, `scale` positive "
            f"and finite, but are {per_class}, {depth} and {scale}."
        )
    if seeds < 2:
        raise ValueError(
            f"A spread over seeds needs `seeds` of 2 or more, but it is {seeds}."
        )
    return array
