"""The Jacobian of the reduced flow, in a symmetric form where there is one.

With f_i = d log a_i/dt = (b_i/D) a_i^p and H the Hessian of log D, the covariance of
the rows of Psi under softmax, the flow linearised in a is

    J = diag((1+p) f) - A H,    A = diag(a^{1+p}),

and G^{-1} J G = S = diag((1+p) f) - G H G with G = A^{1/2}: symmetric at any state, so
that its exponents are real. (In log a, J is diag(p f) - diag(a^p) H diag(a); equal
exponents only at rest.)

Normalised: a-hat = a/N moves in log-norm time as F/(N g) - a-hat, with F = da/dt and
g = d log N/dt. At fixed N, on perturbations that keep the sum,

    M = Π (S - g)/g,    Π = 1 - v w^T/(w·v),    w = G 1,  v = G b/D,

in the coordinates G^{-1}δa. Where all living modes share b_i (every ray that is
invariant at all norms) v is parallel to w and M is symmetric; elsewhere exponents may
be complex. A mode that is zero is regular in these coordinates, and has the exponent
b_i/(D g) - 1 of an invasion at L = 1, and -1 beyond.

f_i - g comes from differences that are exact (`_fitness`), so that an exponent of 1e-30
keeps its digits.
"""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg

from .._types import Modes
from ..dynamics import HadamardFlow
from ..geometry import psi_matrix, psi_matvec
from ._exponents import stability_exponents
from ._fitness import fitness
from ._rays import is_ray_invariant

# Exponents are of order one: with more rounding than this they say nothing.
_RESOLVED = 0.1


@dataclass(frozen=True)
class ReducedLinear:
    """What the Jacobian is made of at one state; rates in units of exp(log_speed).

    - `alive`, (K-1,): which modes are not zero; `share` a-hat; `norm` N.
    - `f`, `factor`: f = b·factor in these units.
    - `deviation`: f - g; `b_deviation`: b less its mean over a-hat.
    - `covariance`: H, in units such that a·factor·H has those of f.
    - `error`: bounds the rounding of f - g.
    """

    power: float
    log_speed: float
    norm: float
    alive: np.ndarray
    share: np.ndarray
    f: np.ndarray
    factor: np.ndarray
    deviation: np.ndarray
    b_deviation: np.ndarray
    covariance: np.ndarray
    error: float

    @property
    def growth(self) -> float:
        """Returns g = d log N/dt."""
        return float(np.sum(self.share * self.f))

    @property
    def drift(self) -> float:
        """The 1-norm of d a-hat/d log N."""
        return float(np.sum(self.share * np.abs(self.deviation)) / self.growth)


def reduced_linear(flow: HadamardFlow, state: Modes) -> ReducedLinear:
    """Returns the parts of the Jacobian at log a, modes of -inf included."""
    flow.check(state)
    if not np.isfinite(norm := float(jnp.exp(flow.log_norm(state)))):
        raise ValueError(
            "The norm of the modes must be below the largest float, but its logarithm "
            f"is {float(flow.log_norm(state))}."
        )
    fit, bent, log_partition = jax.tree.map(np.asarray, _parts(flow, state))
    power, num_classes = float(fit.power), flow.num_classes
    psi = np.asarray(psi_matrix(num_classes), float)
    # b = Psi π with π = weight where b is direct, weight + 1/K where it is near K.
    near = fit.b[0] - bent[0] > 0.5
    chances = fit.weight + (1 / num_classes if near else 0.0)
    log_unit = fit.log_speed - power * np.max(state)  # of b, relative to b/D
    centred = psi - fit.b * np.exp(log_unit)
    own = np.exp(log_unit - log_partition) * np.outer(fit.b, fit.b)
    # At L = 1 rates do not depend on a mode itself: those of zero modes count too.
    flat = power == 0
    factor = np.ones_like(fit.factor) if flat else fit.factor
    deviation = bent if flat else fit.deviation
    f = fit.b * factor
    mean = np.sum(fit.share * deviation)
    growth = np.sum(fit.share * f)
    alive = np.isfinite(np.asarray(state))
    roundings = np.max(fit.deviation_error)
    if flat:
        roundings = np.max(psi @ fit.weight_error)
    return ReducedLinear(
        power=power,
        log_speed=float(fit.log_speed),
        norm=norm,
        alive=alive,
        share=fit.share,
        f=f,
        factor=factor,
        deviation=np.where(alive | flat, deviation - mean, -growth),
        b_deviation=bent - np.sum(fit.share * bent),
        covariance=(centred.T * chances) @ centred + own,
        error=float(roundings),
    )


def ray_exponents(
    flow: HadamardFlow, state: Modes, tolerance: float
) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns (exponents, thresholds) of a state on an invariant ray, else None.

    In closed form, normalised: at large norms all others would drown in the largest.
    """
    log_a = np.asarray(state)
    living = log_a[np.isfinite(log_a)]
    equal = np.ptp(living) <= 4 * np.finfo(float).eps * np.max(np.abs(living))
    support = np.isfinite(log_a).astype(float)
    # Up to here the matrices of all rays commute.
    if not (equal and flow.num_classes <= 16 and is_ray_invariant(support)):
        return None
    norm = float(jnp.exp(flow.log_norm(state)))
    found = stability_exponents(support, norm, flow.depth)
    power = float(flow.power(state.dtype))
    within, across = np.asarray(found.within), np.asarray(found.transverse)
    scales = np.concatenate([power + np.abs(power - within), np.abs(across)])
    return np.concatenate([within, across]), tolerance * scales


@eqx.filter_jit
def _parts(flow, state):
    fit = fitness(flow, state)
    log_partition = jax.nn.softplus(jax.nn.logsumexp(-psi_matvec(jnp.exp(state))))
    return fit, psi_matvec(fit.weight), log_partition


def reduced_exponents(
    linear: ReducedLinear, normalised: bool, tolerance: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (exponents, thresholds), in no order.

    An exponent counts as zero up to its threshold: the tolerance times the largest of
    its block (living modes; each zero mode by itself), or its rounding error.
    """
    alive = linear.alive
    root = np.sqrt(linear.share * linear.factor)[alive]
    curved = linear.covariance[np.ix_(alive, alive)] * np.outer(root, root)
    curved = linear.norm * curved
    if not normalised:
        diagonal = (1 + linear.power) * linear.f
        living = _graded_eigenvalues(np.diag(diagonal[alive]) - curved)
        # Zero modes grow at L = 1 only.
        exponents = np.concatenate([living, diagonal[~alive]])
        largest = np.max(np.abs(exponents))
        return exponents, np.full_like(exponents, tolerance * largest)
    growth = linear.growth
    diagonal = (linear.power * linear.f + linear.deviation) / growth
    matrix = np.diag(diagonal[alive]) - curved / growth
    living = _tangent_exponents(linear, root, matrix)
    largest = np.full(len(living), np.max(np.abs(living), initial=0))
    exponents = np.concatenate([living, diagonal[~alive]])
    scale = np.concatenate([largest, np.abs(diagonal[~alive])])
    terms = linear.power * np.max(linear.f) + np.max(curved)
    floor = 4 * (linear.error + 4 * np.finfo(float).eps * terms) / growth
    if not floor <= _RESOLVED:
        raise ValueError(
            f"Off the invariant rays, exponents at a norm of {linear.norm:.1e} are "
            f"differences of numbers whose rounding alone is {floor:.1e}. Take a state "
            "of smaller norm, or `limit`, which follows it to larger ones."
        )
    return exponents, np.maximum(tolerance * scale, floor)


def _tangent_exponents(linear, root, matrix) -> np.ndarray:
    """Returns the eigenvalues of Π matrix where w·y = 0."""
    alive = linear.alive
    basis = tangent_basis(root)
    inside = basis.T @ matrix @ basis
    tilt = basis.T @ (root * linear.b_deviation[alive])
    skewed = np.outer(tilt, root @ matrix @ basis) / linear.growth
    if np.linalg.norm(skewed) <= 64 * np.finfo(float).eps * np.linalg.norm(inside):
        return np.linalg.eigvalsh(inside)
    return np.linalg.eigvals(inside - skewed)


def reduced_reactivity(linear: ReducedLinear, normalised: bool) -> float:
    """Returns the numerical abscissa in log a of the living modes."""
    alive = linear.alive
    f, share = linear.f[alive], linear.share[alive]
    curved = linear.covariance[np.ix_(alive, alive)] * np.outer(
        linear.factor[alive], linear.norm * share
    )
    matrix = linear.power * np.diag(f) - curved
    if not normalised:
        return float(np.linalg.eigvalsh((matrix + matrix.T) / 2)[-1])
    growth = linear.growth
    deviation = linear.deviation[alive] / growth
    relative = 1 + deviation
    matrix = matrix / growth
    matrix = matrix - np.outer(relative, share @ matrix + share * deviation)
    basis = tangent_basis(share)
    inside = basis.T @ matrix @ basis
    if not inside.size:
        return -np.inf
    return float(np.linalg.eigvalsh((inside + inside.T) / 2)[-1])


def tangent_basis(normal: np.ndarray) -> np.ndarray:
    """Returns an orthonormal basis, as columns, of what is orthogonal to a vector."""
    full, _ = np.linalg.qr(normal[:, None] / np.linalg.norm(normal), mode="complete")
    return full[:, 1:]


def _graded_eigenvalues(matrix) -> np.ndarray:
    """Returns the eigenvalues of a symmetric matrix with rows of very unlike sizes.

    Jacobi rotations (LAPACK's gejsv) keep the digits of one of 1e-300 beside one of 1,
    which the usual algorithm may lose. They give singular values: the sign is whether
    left and right vectors agree.
    """
    (jacobi,) = scipy.linalg.get_lapack_funcs(("gejsv",), (matrix,))
    values, left, right, work, _, info = jacobi(matrix, joba=3, jobr=0, jobp=0)
    agreement = np.sum(left * right, axis=0)
    # Two eigenvalues of opposite sign and equal size share their vectors.
    if info != 0 or np.any(np.abs(agreement) < 0.9):
        return np.linalg.eigvalsh(matrix)
    return np.sign(agreement) * values * (work[0] / work[1])
