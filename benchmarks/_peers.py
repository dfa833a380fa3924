"""The peers of `bench_solve.py`: the flows in numpy for SciPy, and gradient descent.

The peers get their best form: log a as the state of the reduced flow, the clock
s = log(1 + t) or s = log ‖a‖_1, residuals without cancellation, left products with K
rows. SciPy's tolerances are set to mean what ours do: an absolute error of log a, and
an error of an entry relative to the root mean square of all.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import scipy.integrate
from jax import lax

import deepufm as ufm
from deepufm.geometry import psi_matrix

HostRates = Callable[[float, np.ndarray], np.ndarray]

# SciPy accepts no relative tolerance below 100 roundings; this one never decides.
_LEAST_RTOL = 3e-14


def reduced_rates(num_classes: int, depth: float, *, log_norm: bool) -> HostRates:
    """Returns d log a/ds of the reduced flow, s = log ‖a‖_1 or log(1 + t)."""
    psi = np.asarray(psi_matrix(num_classes), float)
    power = (depth - 1) / (depth + 1)

    def rates(s, log_a):
        a = np.exp(log_a)
        margins = psi @ a
        smallest = margins.min()
        weights = np.exp(smallest - margins)
        b = psi @ weights
        if log_norm:
            direction = b * np.exp(power * (log_a - log_a.max()))
            return direction * (a.sum() / (a @ direction))
        log_partition = np.logaddexp(0, np.log(weights.sum()) - smallest)
        return b * np.exp(power * log_a + (s - smallest - log_partition))

    return rates


def matrix_rates(model: ufm.DeepUFM) -> HostRates:
    """Returns dθ/ds of the matrix flow at s = log(1 + t), θ as one vector."""
    examples = model.features.shape[1]
    labels = np.repeat(np.arange(model.num_classes), examples // model.num_classes)
    columns = np.arange(examples)

    def rates(s, vector):
        head, hidden, features = unpack(model, vector)
        lefts = [head]
        for layer in hidden[::-1]:
            lefts.append(lefts[-1] @ layer)
        logits = lefts[-1] @ features
        residual = np.exp(logits - logits.max(axis=0))
        residual /= -residual.sum(axis=0)
        residual[labels, columns] = 0
        residual[labels, columns] = -residual.sum(axis=0)
        out = np.empty_like(vector)
        d_head, d_hidden, d_features = unpack(model, out)
        d_features[:] = lefts[-1].T @ residual
        gradient = residual @ features.T
        for layer, left, target in zip(hidden, lefts[-2::-1], d_hidden):
            np.matmul(left.T, gradient, out=target)
            gradient = gradient @ layer.T
        d_head[:] = gradient
        out *= np.exp(s)
        return out

    return rates


def pack(model: ufm.DeepUFM) -> np.ndarray:
    """Returns all parameters as one vector."""
    leaves = (model.head, model.hidden, model.features)
    return np.concatenate([np.ravel(np.asarray(leaf)) for leaf in leaves])


def unpack(model: ufm.DeepUFM, vector: np.ndarray) -> list[np.ndarray]:
    """Returns views of `vector` in the shapes of head, hidden and features."""
    leaves = (model.head, model.hidden, model.features)
    ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
    parts = np.split(vector, ends)
    return [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves)]


def as_model(model: ufm.DeepUFM, vector: np.ndarray) -> ufm.DeepUFM:
    """Returns the `DeepUFM` shaped like `model` that `vector` holds."""
    return ufm.DeepUFM(*(jnp.asarray(part) for part in unpack(model, vector)))


def integrate(
    method: Callable[..., scipy.integrate.OdeSolver],
    rates: HostRates,
    start: np.ndarray,
    end: float,
    tolerance: float,
    *,
    first: float = 0.0,
    relative: bool = False,
) -> tuple[np.ndarray, int, int]:
    """Runs a SciPy solver from s = `first` to `end`, keeping the last state alone.

    **Arguments:** `tolerance` bounds absolute errors; with `relative` it is relative to
    the root mean square of `start`, or the entry where that is larger.

    **Returns:** the state, accepted steps, and right-hand sides.
    """
    rtol, atol = _LEAST_RTOL, tolerance
    if relative:
        rms = float(np.sqrt(np.mean(start**2)))
        rtol, atol = max(tolerance, _LEAST_RTOL), tolerance * rms
    solver = method(rates, first, start, end, rtol=rtol, atol=atol)
    steps = 0
    while solver.status == "running":
        # Trial steps that are far too long overflow, and are rejected for it.
        with np.errstate(over="ignore", invalid="ignore"):
            message = solver.step()
        steps += 1
        if solver.status == "failed":
            raise RuntimeError(f"{type(solver).__name__} failed: {message}")
    return solver.y, steps, solver.nfev


def descend_modes(
    num_classes: int, depth: int, rate: float, steps: int
) -> Callable[[jax.Array], jax.Array]:
    """Returns gradient descent on the layers of a balanced Hadamard network.

    Every layer has the singular values alpha = a^{1/(L+1)}, and the flow's
    d alpha/dt = alpha·(d log a/dt)/(L+1) is, in the flow's time unit, their gradient.
    The function maps log a to log a.
    """
    flow = ufm.HadamardFlow(num_classes=num_classes, depth=float(depth))

    def step(_, alpha):
        direction, log_speed = flow((depth + 1) * jnp.log(alpha))
        return alpha + rate / (depth + 1) * jnp.exp(log_speed) * alpha * direction

    def run(log_a):
        alpha = lax.fori_loop(0, steps, step, jnp.exp(log_a / (depth + 1)))
        return (depth + 1) * jnp.log(alpha)

    return run


def descend_model(
    flow: ufm.GradientFlow, rate: float, steps: int
) -> Callable[[ufm.DeepUFM], ufm.DeepUFM]:
    """Returns full-batch gradient descent on a `DeepUFM` with our right-hand side."""

    def step(_, model):
        direction, log_speed = flow(model)
        size = rate * jnp.exp(log_speed)
        return jax.tree.map(lambda w, v: w + size * v, model, direction)

    return lambda model: lax.fori_loop(0, steps, step, model)
