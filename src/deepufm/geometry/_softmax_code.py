"""Softmax codes: K unit vectors in R^r, no two of them close.

Two definitions are in use, and they need not agree:

- one-versus-one, the spherical code or Tammes problem: the largest inner product

      rho = max_{i < j} x_i·x_j                                             (least)

  as small as it can be. `softmax_code` finds these.
- one-versus-rest, the softmax code of Jiang et al. (2023): the least distance of a
  vector to the convex hull of the others as large as it can be. Every code comes with
  that distance, `hull_distance`; nothing here maximises it.

Both are the polygon for r = 2 and the simplex for r >= K-1. Many codes may share the
least rho: for r+1 < K <= 2r, where it is 0, and where some vectors are loose. Of these
the one of least ‖X^T X‖_F is taken: its logits Z = X^T X have the greatest normalised
margin, (1 - rho)/‖Z‖_F. For K <= 2r it is exact: vectors of non-positive inner products
fall into orthogonal groups, K-r of them with as many vectors as dimensions plus one (or
more groups in fewer dimensions), and a group of m+1 vectors has a squared Gram norm of
at least (m+1)^2/m = m + 2 + 1/m, reached by the simplex alone. So K-r simplices in
dimensions as equal as possible are best. (Rankin (1955) has rho = 0.)

Method for the rest, NumPy on the host: descend the smoothed maximum of the inner
products, (1/beta) log sum exp(beta x_i·x_j), from many starts at once, then each alone
by `follow_path`, and the best by `finish`. Nothing proves that no better code exists,
or that a loose vector has no better place still: `hits` says how often the least rho
was found.
"""

from dataclasses import dataclass

import numpy as np
import scipy.linalg
import scipy.optimize

from ._code_path import finish, follow_path, pair_slopes

# Codes whose largest inner products differ by less are equally good; pairs nearer
# than this to the largest touch.
_TIE = 1e-9


@dataclass(frozen=True)
class SoftmaxCode:
    """K unit vectors in R^r, and how well they are spread.

    - `vectors`, (r, K): column k is the vector of class k.
    - `max_inner_product`: rho, the largest x_i·x_j over i < j.
    - `min_gap`: 1 - rho, the smallest gap of the logits X^T X.
    - `gram_norm`: ‖X^T X‖_F; `normalised_margin` is `min_gap` over it.
    - `hull_distance`: the least distance of a vector to the hull of the others.
    - `hits`: of how many starts ended within 1e-9 of rho, of `starts`.
    - `residual`: the largest |sum_j lambda_ij (x_j - (x_i·x_j) x_i)| over the vectors,
        for the best lambda >= 0 of sum 1 on the pairs that touch; 0 where no small
        movement can lower rho, to first order.
    - `certified`: `residual` <= 1e-10. This says stationary, not globally best.
    """

    vectors: np.ndarray
    max_inner_product: float
    min_gap: float
    gram_norm: float
    hull_distance: float
    hits: int
    starts: int
    residual: float
    certified: bool

    @property
    def normalised_margin(self) -> float:
        """The smallest gap of X^T X over its Frobenius norm."""
        return self.min_gap / self.gram_norm


def softmax_code(
    num_classes: int, rank: int, *, starts: int = 32, seed: int = 0
) -> SoftmaxCode:
    """Returns the best code found: least rho, then least ‖X^T X‖_F.

    Exact for r = 2 and for K <= 2r. At r >= K the last r-K+1 entries of every vector
    are 0.

    **Arguments:**

    - `num_classes`: K, 3 or more.
    - `rank`: r, 2 or more.
    - `starts`: how many random starts, where it is not exact. Up to K = 10 a third of
        them hit the best code known; at r = 3 and K = 25, 28 or 29 none in hundreds.
    - `seed`: of the starts.

    **Raises:** `ValueError` for fewer classes, a lower rank, or no start;
    `RuntimeError` where no start converges.

    **Reference:** Jiang et al. (2023); P1 Thm 3.2 and §3.3.
    """
    _check(num_classes, rank, starts)
    if rank == 2:
        angles = 2 * np.pi / num_classes * np.arange(num_classes)
        return _described(np.stack([np.cos(angles), np.sin(angles)]), starts, starts)
    if num_classes <= 2 * rank:
        return _described(_simplices(num_classes, rank), starts, starts)
    return _search(num_classes, rank, starts, seed)


def _simplices(num_classes, rank):
    """Returns simplices in orthogonal subspaces of (nearly) equal dimensions."""
    count = max(1, num_classes - rank)
    used = num_classes - count
    sizes = [used // count + (k < used % count) for k in range(count)]
    # The unit vectors' parts in the sum-zero subspace, in an orthonormal basis of it.
    blocks = [scipy.linalg.helmert(size + 1) for size in sizes]
    vectors = np.asarray(scipy.linalg.block_diag(*blocks))
    vectors /= np.linalg.norm(vectors, axis=0)
    return np.pad(vectors, ((0, rank - used), (0, 0)))


def _search(num_classes, rank, starts, seed) -> SoftmaxCode:
    points = _spread_starts(num_classes, rank, starts, seed)
    ends = [end for end in map(follow_path, points) if end is not None]
    if not ends:
        raise RuntimeError(
            f"None of {starts} starts converged for K = {num_classes} and rank {rank}. "
            "Raise `starts`."
        )
    least = min(end.rho for end in ends)
    best = [end for end in ends if end.rho <= least + _TIE]
    # Codes of equal rho need not be the same code.
    found = min(best, key=lambda end: float(np.linalg.norm(end.x @ end.x.T)))
    return _described(finish(found).T, len(best), starts)


def hull_distance(vectors: np.ndarray) -> float:
    """Returns the least distance of a column to the convex hull of the other columns.

    **Arguments:** `vectors` (r, K), K >= 2.
    """
    x = vectors.T
    nearest = np.inf
    for i in range(len(x)):
        others = np.delete(x, i, axis=0) - x[i]
        weights = _convex_weights(others.T)
        nearest = min(nearest, float(np.linalg.norm(others.T @ weights)))
    return nearest


def _check(num_classes, rank, starts):
    for name, value, least, why in (
        ("num_classes", num_classes, 3, "two classes are opposite, at any rank"),
        ("rank", rank, 2, "on a line only two unit vectors differ"),
        ("starts", starts, 1, "a search needs a start"),
    ):
        if value < least:
            raise ValueError(
                f"Argument `{name}` must be {least} or more, but is {value}: {why}."
            )


def _described(vectors, hits, starts) -> SoftmaxCode:
    x = vectors.T
    rho = _largest(x)
    residual = _stationarity(x, rho)
    return SoftmaxCode(
        vectors=vectors,
        max_inner_product=rho,
        min_gap=1 - rho,
        gram_norm=float(np.linalg.norm(x @ x.T)),
        hull_distance=hull_distance(vectors),
        hits=hits,
        starts=starts,
        residual=residual,
        certified=residual <= 1e-10,
    )


def _largest(x) -> float:
    return float(np.max((x @ x.T)[np.triu_indices(len(x), 1)]))


def _convex_weights(columns):
    """Returns w >= 0 of sum 1 that makes |columns @ w| least.

    Unscaled weights t·w cost |t columns w|² + (t-1)², least at a value that grows with
    |columns w|, so that least squares without the constraint on the sum find w.
    """
    rows = np.vstack([columns, np.ones(columns.shape[1])])
    right = np.zeros(len(rows))
    right[-1] = 1
    weights, _ = scipy.optimize.nnls(rows, right)
    return weights / np.sum(weights)


def _stationarity(x, rho) -> float:
    i, j = np.triu_indices(len(x), 1)
    gram = x @ x.T
    touching = gram[i, j] >= rho - _TIE
    i, j = i[touching], j[touching]
    slopes = pair_slopes(x, (i, j))
    duals = _convex_weights(slopes.reshape(len(i), -1).T)
    return float(np.max(np.linalg.norm(np.tensordot(duals, slopes, 1), axis=-1)))


def _spread_starts(num_classes, rank, starts, seed, steps=60):
    """Returns points (starts, K, r) after a short descent of the smoothed maximum."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(starts, num_classes, rank))
    x /= np.linalg.norm(x, axis=-1, keepdims=True)
    own = np.arange(num_classes)
    for beta in np.geomspace(2.0, 400.0, 10):
        for _ in range(steps):
            gram = x @ np.swapaxes(x, 1, 2)
            gram[:, own, own] = -np.inf
            gram -= np.max(gram, axis=(1, 2), keepdims=True)
            weights = np.exp(beta * gram)
            weights *= num_classes / np.sum(weights, axis=(1, 2), keepdims=True)
            x = x - weights @ x / beta
            x /= np.linalg.norm(x, axis=-1, keepdims=True)
    return x
