"""From a rough spherical code to a stationary one: interior points, then Newton.

Points are the K rows of x, (K, r); pairs p = (i, j), i < j; rho a bound on all inner
products G_p = x_i·x_j. With A the slopes of G_p on the spheres, rows
x_j - G_p x_i at i and x_i - G_p x_j at j, a code of least rho satisfies

    A^T lambda = 0,  sum lambda = 1,  lambda_p (rho - G_p) = 0,  lambda >= 0.

The interior-point path replaces the last 0 by mu, and the objective rho by rho + eps·g,
g = sum_p G_p^2, which picks among codes of equal rho the one of least Gram norm as
mu and eps tend to 0, eps slower. Steps are in ambient coordinates, with the radial
directions held at 0, and end on the spheres by scaling.
"""

from typing import NamedTuple

import numpy as np
import scipy.linalg

# The gap, summed over pairs, at which the path ends. Systems are then near to singular,
# and Newton's method on the touching pairs takes over.
_LAST_GAP = 1e-11
# A cap: forty steps are usual, eighty for K = 32.
_MOST_STEPS = 150
# Added to every matrix, whose entries are of order one.
_LEAST_SHIFT = 1e-7


class PathEnd(NamedTuple):
    """Points (K, r), their largest inner product; by pair, multipliers and slacks."""

    x: np.ndarray
    rho: float
    duals: np.ndarray
    slacks: np.ndarray


def follow_path(x: np.ndarray) -> PathEnd | None:
    """Returns a stationary code near `x`, its largest inner product right to 1e-10.

    **Arguments:** `x`, (K, r), rows of norm 1, rough.

    **Returns:** the end of the path; `None` where the cap of steps was reached.
    """
    pairs = np.triu_indices(len(x), 1)
    gram = _inner_products(x, pairs)
    rho = np.max(gram) + 0.3
    duals = 1 / (rho - gram)
    duals /= np.sum(duals)
    lower = 0.2
    for _ in range(_MOST_STEPS):
        slacks = rho - gram
        gap = float(duals @ slacks)
        barrier = max(lower * gap, 0.2 * _LAST_GAP) / len(duals)
        system = _Newton(x, pairs, slacks, duals, barrier)
        if gap < _LAST_GAP and system.residual < 1e-7:
            return PathEnd(x, float(np.max(gram)), duals, slacks)
        change = system.duals - duals
        # Points move by a third of a radian at most, and multipliers stay positive.
        size = min(1.0, 0.3 / max(1e-300, np.max(np.linalg.norm(system.step, axis=1))))
        size = min(size, 0.99 / max(1e-300, np.max(-change / duals)))
        found = _move(x, rho, gram, pairs, system, size)
        if found is None:
            return None
        x, rho, gram, size = found
        duals = duals + size * change
        # Near saddles, where the matrix is not definite or the step is short, a barrier
        # that falls no further, or rises, leaves room to leave them.
        convex = system.shift <= 1e3 * _LEAST_SHIFT
        lower = 0.2 if convex and size > 0.5 else 0.7 if size > 0.1 else 3.0
    return None


class _Newton:
    """A Newton step of the path: `step` of x, `lift` of rho, the `duals` after it.

    `residual` is how far its start is from stationary, without complementarity.
    """

    def __init__(self, x, pairs, slacks, duals, barrier):
        gram = _inner_products(x, pairs)
        weight = _eps(len(duals) * barrier)
        self.slopes = pair_slopes(x, pairs).reshape(len(gram), -1)
        self.stiffness = duals / slacks
        n = x.size
        matrix = np.empty((n + 1, n + 1))
        matrix[:n, :n] = curvature(x, pairs, duals + 2 * weight * gram)
        scaled = self.slopes.T * (self.stiffness + 2 * weight)
        matrix[:n, :n] += scaled @ self.slopes
        matrix[n, :n] = matrix[:n, n] = -self.stiffness @ self.slopes
        matrix[n, n] = np.sum(self.stiffness)
        self._factor, self.shift = _convexified(matrix)

        slope = (duals + 2 * weight * gram) @ self.slopes
        self.residual = max(np.max(np.abs(slope)), abs(np.sum(duals) - 1))
        pull = barrier / slacks
        right = np.append(-(pull + 2 * weight * gram) @ self.slopes, np.sum(pull) - 1)
        flat, self.lift = self._solved(right)
        self.step = flat.reshape(x.shape)
        self.growth = self.slopes @ flat  # of the inner products, to first order
        self.duals = pull + self.stiffness * (self.growth - self.lift)

    def correction(self, excess):
        """Returns steps of x and rho that undo an `excess` of the inner products."""
        load = self.stiffness * excess
        flat, lift = self._solved(np.append(-load @ self.slopes, np.sum(load)))
        return flat.reshape(self.step.shape), lift

    def _solved(self, right):
        solution = scipy.linalg.cho_solve(self._factor, right, check_finite=False)
        return solution[:-1], solution[-1]


def _move(x, rho, gram, pairs, system, size):
    """Steps, less far if need be, so that no slack falls to less than a hundredth.

    The spheres are curved: along a flat valley of codes the inner products grow by the
    square of the step, far more than the slacks late on. One correction for that.
    """
    least = 0.01 * (rho - gram)
    for attempt in range(40):
        moved = _on_spheres(x + size * system.step)
        new_rho, new_gram = rho + size * system.lift, _inner_products(moved, pairs)
        if np.all(new_rho - new_gram > least):
            return moved, new_rho, new_gram, size
        if attempt < 6:
            step, lift = system.correction(new_gram - gram - size * system.growth)
            moved = _on_spheres(x + size * system.step + step)
            new_rho, new_gram = new_rho + lift, _inner_products(moved, pairs)
            if np.all(new_rho - new_gram > least):
                return moved, new_rho, new_gram, size
        size /= 2
    return None


def _convexified(matrix):
    """Returns the Cholesky factor with a part of the identity added, and that part.

    Some always, as rotations of all points change nothing; where the matrix is not
    definite, the least of a geometric series that makes it so.
    """
    shift = _LEAST_SHIFT
    diagonal = np.arange(len(matrix) - 1)
    while True:
        shifted = matrix.copy()
        shifted[diagonal, diagonal] += shift
        try:
            return scipy.linalg.cho_factor(shifted, check_finite=False), shift
        except np.linalg.LinAlgError:
            shift *= 3


def _inner_products(x, pairs):
    return (x @ x.T)[pairs]


def _on_spheres(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def pair_slopes(x: np.ndarray, pairs) -> np.ndarray:
    """Returns the slopes of x_i·x_j on the spheres, (pairs, K, r)."""
    i, j = pairs
    gram = np.sum(x[i] * x[j], axis=1)[:, None]
    slopes = np.zeros((len(i), *x.shape))
    pair = np.arange(len(i))
    slopes[pair, i] = x[j] - gram * x[i]
    slopes[pair, j] = x[i] - gram * x[j]
    return slopes


def curvature(x: np.ndarray, pairs, weights: np.ndarray) -> np.ndarray:
    """Returns the Hessian of sum_p weights_p x_i·x_j on the spheres, (K·r, K·r).

    The identity stands in the radial directions.
    """
    count, rank = x.shape
    coefficients = np.zeros((count, count))
    coefficients[pairs] = weights
    coefficients += coefficients.T
    radial = x[:, :, None] * x[:, None, :]
    tangent = np.eye(rank) - radial
    blocks = np.einsum("iab,jbc->iajc", tangent, tangent)
    blocks *= coefficients[:, None, :, None]
    own = np.arange(count)
    pull = np.sum(coefficients * (x @ x.T), axis=1)
    blocks[own, :, own, :] = radial - pull[:, None, None] * tangent
    return blocks.reshape(count * rank, count * rank)


def finish(end: PathEnd) -> np.ndarray:
    """Returns the code at a path's end: least rho, then least Gram norm, to rounding.

    Newton's method, first on the conditions of least rho, then at that rho on those of
    least Gram norm. Steps are least-squares ones: there are more touching pairs than
    degrees of freedom in symmetric codes, and fewer where vectors are loose. Where the
    second does not converge, it is left out.
    """
    pairs = np.triu_indices(len(end.x), 1)
    # Multipliers are of order 1/pairs where rho is at stake, and of order eps where
    # only g is: loose vectors rest against others.
    pressed = end.duals > 1e-4 / len(end.duals)
    touching = pressed | (end.duals > _eps(_LAST_GAP) * end.slacks)

    touch = (pairs[0][pressed], pairs[1][pressed])
    x, level, duals = end.x, end.rho, end.duals[pressed]
    for _ in range(6):
        x, change, duals = _least_rho_step(x, touch, level, duals)
        level += change
    codes = [x, end.x]
    touch = (pairs[0][touching], pairs[1][touching])
    duals = np.zeros(len(touch[0]))
    for _ in range(8):
        x, duals = _least_gram_step(x, pairs, touch, level, duals)
    codes.insert(0, x)
    largest = [np.max(_inner_products(code, pairs)) for code in codes]
    return codes[int(np.argmax(np.asarray(largest) <= min(largest) + 1e-12))]


def _eps(gap):
    return 0.03 * np.sqrt(gap)


def _least_rho_step(x, touch, level, duals):
    slopes, misses = _slopes_and_misses(x, touch, level)
    n, m = slopes.shape[1], len(misses)
    matrix = np.zeros((n + m + 1, n + m + 1))
    matrix[:n, :n] = curvature(x, touch, duals)
    matrix[:n, n + 1 :] = slopes.T
    matrix[n, n + 1 :] = 1
    matrix[n + 1 :, :n] = slopes
    matrix[n + 1 :, n] = -1
    right = np.concatenate([slopes.T @ duals, [np.sum(duals) - 1], misses])
    step = _least_squares(matrix, -right)
    return _moved(x, step[:n]), step[n], duals + step[n + 1 :]


def _least_gram_step(x, pairs, touch, level, duals):
    slopes, misses = _slopes_and_misses(x, touch, level)
    n, m = slopes.shape[1], len(misses)
    all_slopes = pair_slopes(x, pairs).reshape(-1, n)
    gram = np.sum(x[pairs[0]] * x[pairs[1]], axis=1)
    matrix = np.zeros((n + m, n + m))
    matrix[:n, :n] = curvature(x, pairs, 2 * gram) + 2 * all_slopes.T @ all_slopes
    matrix[:n, :n] += curvature(x, touch, duals) - curvature(x, touch, 0 * duals)
    matrix[:n, n:] = slopes.T
    matrix[n:, :n] = slopes
    right = np.concatenate([2 * gram @ all_slopes + duals @ slopes, misses])
    step = _least_squares(matrix, -right)
    return _moved(x, step[:n]), duals + step[n:]


def _slopes_and_misses(x, touch, level):
    slopes = pair_slopes(x, touch).reshape(len(touch[0]), -1)
    return slopes, np.sum(x[touch[0]] * x[touch[1]], axis=1) - level


def _least_squares(matrix, right):
    # Singular values that are zero at the solution are as small as the error before it.
    return np.linalg.lstsq(matrix, right, rcond=1e-6)[0]


def _moved(x, step):
    return _on_spheres(x + step.reshape(x.shape))
