"""The largest exponents of the full flow, by Lanczos, with no matrix formed.

One compiled function multiplies by J (the derivative of the gradient in a direction),
another projects gauge directions out: the projector 1 - T (T^T T)^+ T^T, T the action
of all generators X (and θ-hat as one more column where the norm is divided out), is
applied by conjugate gradients. What is projected out is moved to three times the
spectral radius below zero.

Exponents below 1e-10 of the largest lose their digits, which those of a small model,
all found at once, do not.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse.linalg
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from .._types import RealScalar
from ..dynamics import GradientFlow
from ..models import DeepUFM
from ._full_jacobian import Base, ScaledLoss, Spectrum, base_point, scaled_loss
from ._gauge import gauge_action

Flat = Float[Array, " parameters"]
_SAMPLES = 4
_PROJECTION_TOLERANCE = 1e-13
_PROJECTION_STEPS = 1000


class Linearised(eqx.Module):
    """J/g - shift at a model, and the projector, as functions of flat vectors."""

    loss: ScaledLoss
    model: DeepUFM
    growth: RealScalar
    ray: Flat | None  # θ-hat, where it is projected out

    @property
    def layers(self):
        """Head, hidden layers, features."""
        return self.model.head, self.model.hidden, self.model.features

    def force(self, theta: Flat) -> Flat:
        """Returns F = Q^T R - λθ in the loss's unit."""
        _, unravel = ravel_pytree(self.model)

        def logits_of(flat):
            return unravel(flat).logits()

        with jax.default_matmul_precision("highest"):
            logits, pull = jax.vjp(logits_of, theta)
            (force,) = pull(self.loss.residual(logits))
        return force - self.loss.decay * theta

    @eqx.filter_jit
    def point(self) -> tuple[Flat, Flat]:
        """Returns θ and F."""
        theta, _ = ravel_pytree(self.model)
        return theta, self.force(theta)

    @eqx.filter_jit
    def times(self, vector: Flat) -> Flat:
        """Returns J vector/g, less the vector where the norm is divided out."""
        theta, _ = ravel_pytree(self.model)
        _, moved = jax.jvp(self.force, (theta,), (vector,))
        return moved / self.growth - (0 if self.ray is None else vector)

    @eqx.filter_jit
    def free(self, vector: Flat) -> Flat:
        """Returns what of a vector is no gauge direction, and not along the ray."""
        generators, along = self._generators()
        _, transpose = jax.vjp(self._tangent, generators, along)
        # Absolute, since a vector that is free already leaves a right-hand side of
        # rounding, for which the singular equations have no solution.
        layers = (self.model.head, *self.model.hidden, self.model.features)
        size = jnp.max(jnp.stack([jnp.linalg.norm(x) for x in layers]))
        weights, _ = jax.scipy.sparse.linalg.cg(
            lambda x: transpose(self._tangent(*x)),
            transpose(vector),
            tol=0,
            atol=_PROJECTION_TOLERANCE * size * jnp.linalg.norm(vector),
            maxiter=_PROJECTION_STEPS,
        )
        return vector - self._tangent(*weights)

    def _generators(self):
        width, depth = self.model.width, self.model.depth
        dtype = self.model.head.dtype
        return jnp.zeros((depth, width, width), dtype), jnp.zeros((), dtype)

    def _tangent(self, generators, along) -> Flat:
        moved = gauge_action(self.layers, generators)
        flat = jnp.concatenate([x.ravel() for x in moved])
        if self.ray is None:
            return flat
        # A column of the size of the others.
        return flat + along * jnp.linalg.norm(self.model.head) * self.ray

    @eqx.filter_jit
    def tangents(self, generators: Float[Array, "count interfaces width width"]):
        """Returns the directions of several generators, (parameters, count)."""
        moved = gauge_action(self.layers, generators)
        return jnp.concatenate([x.reshape(len(x), -1) for x in moved], axis=1).T


def top_spectrum(
    flow: GradientFlow, state: DeepUFM, normalised: bool, tolerance: float, top: int
) -> Spectrum:
    """Returns the `top` largest exponents, gauge and balance of a few samples."""
    operator, base = _linearised(flow, state, normalised)
    count = len(base.theta)
    if not 1 <= top < count:
        raise ValueError(
            f"Argument `top` must be from 1 to {count - 1}, fewer than the "
            f"{count} parameters, but is {top}."
        )

    def free(vector):
        return operator.free(jnp.asarray(vector))

    def inside(vector):
        return np.asarray(operator.free(operator.times(free(vector))))

    exponents, radius = _largest(inside, free, count, top)
    gauge, balance = (_sampled(operator, sign) for sign in (-1, 1))
    log_unit = float(operator.loss.log_unit) + float(np.log(base.growth))
    scale = max(radius, float(normalised))
    return Spectrum(
        exponents,
        np.full(len(exponents), tolerance * scale),
        gauge,
        balance,
        log_unit,
        base.measured_drift(radius),
    )


def top_reactivity(flow: GradientFlow, state: DeepUFM, normalised: bool) -> float:
    """Returns the top eigenvalue of the symmetric part of the Jacobian."""
    operator, base = _linearised(flow, state, normalised)
    if not normalised:
        (value,), _ = _largest(
            lambda v: np.asarray(operator.times(jnp.asarray(v))),
            None,
            len(base.theta),
            1,
        )
        return float(value)
    ray = base.ray[:, 0]
    tilt = base.drift
    # J θ-hat/g: `times` has taken θ-hat itself off.
    slope = np.asarray(operator.times(jnp.asarray(ray))) + ray + tilt

    def free(vector):
        return vector - ray * (ray @ vector)

    def inside(vector):
        vector = free(vector)
        bent = tilt * (slope @ vector) + slope * (tilt @ vector)
        return free(np.asarray(operator.times(jnp.asarray(vector))) - bent / 2)

    (value,), _ = _largest(inside, free, len(ray), 1)
    return float(value)


def _linearised(flow, state, normalised) -> tuple[Linearised, Base]:
    loss, model = scaled_loss(flow, state)
    one = jnp.ones((), model.head.dtype)
    operator = Linearised(loss, model, one, None)
    theta, force = (np.asarray(x, float) for x in operator.point())
    base = base_point(theta, force, normalised, float(loss.log_unit))
    ray = jnp.asarray(base.ray[:, 0], one.dtype) if normalised else None
    return Linearised(loss, model, one * base.growth, ray), base


def _largest(inside, free, count, top) -> tuple[np.ndarray, float]:
    """Returns the largest eigenvalues where `free` does nothing, and the radius.

    One run of Lanczos may miss copies of a multiple eigenvalue. So what is found is
    moved away as well, until another run finds nothing above the least that is kept.
    """
    start = np.random.default_rng(0).normal(size=count)
    if not np.any(inside(start)):  # of which ARPACK makes nothing
        return np.zeros(top), 0.0
    radius = abs(_eigenpairs(inside, 1, "LM", start, 1e-2)[0][0])
    values, vectors = np.zeros(0), np.zeros((count, 0))

    def pushed(vector):
        gone = vectors @ (vectors.T @ vector)
        if free is not None:
            gone = gone + vector - np.asarray(free(vector))
        return inside(vector) - 3 * radius * gone

    for _ in range(top + 1):
        more, ways = _eigenpairs(pushed, top, "LA", start, 1e-11)
        least = np.min(values) if len(values) == top else -np.inf
        is_new = (more > least + 1e-9 * radius) & (more >= -1.5 * radius)
        if not np.any(is_new):
            break
        values = np.concatenate([values, more[is_new]])
        vectors = np.concatenate([vectors, ways[:, is_new]], axis=1)
        best = np.argsort(-values)[:top]
        values, vectors = values[best], vectors[:, best]
    return values, float(radius)


def _eigenpairs(product, count, which, start, tolerance):
    size = len(start)
    operator = scipy.sparse.linalg.LinearOperator(
        (size, size),
        product,
        dtype=float,  # pyright: ignore[reportCallIssue]
    )
    try:
        return scipy.sparse.linalg.eigsh(
            operator, count, which=which, v0=start, tol=tolerance
        )
    except scipy.sparse.linalg.ArpackNoConvergence as error:
        raise ValueError(
            f"Lanczos found {len(error.eigenvalues)} of {count} exponents: the others "
            "differ by too little, compared with the largest. Ask for fewer, or, in a "
            "small model, for all (top=None)."
        ) from None


def _sampled(operator: Linearised, sign: int) -> np.ndarray:
    """Returns exponents of a few random gauge directions, X^T = sign·X."""
    width, depth = operator.model.width, operator.model.depth
    shape = (_SAMPLES, depth, width, width)
    draws = np.random.default_rng(1).normal(size=shape)
    generators = jnp.asarray(draws + sign * draws.swapaxes(-1, -2))
    tangents = np.asarray(operator.tangents(generators.astype(operator.growth.dtype)))
    basis, values, _ = np.linalg.svd(tangents, full_matrices=False)
    basis = basis[:, values > 1e-10 * np.max(values, initial=0)]
    images = [np.asarray(operator.times(jnp.asarray(u))) for u in basis.T]
    if not images:
        return np.zeros(0)
    return np.linalg.eigvalsh(basis.T @ np.stack(images, axis=1))
