"""Which logits cost least at infinity, as far as many starts can tell.

The local minima of `matrix_kkt`'s problem among matrices of rank r or less, by `polish`
from random frames and from structures that are known. No bound from below comes with
the best of them, but for L = 1, where the problem is convex and the simplex is the
optimum.

A random start is X^T Y for unit vectors x_c and y_c near x_c: then every class is its
own best, with gaps from 0 to 2. Nothing keeps a start symmetric. Where minima are many,
thousands of starts can be screened first, in one program on JAX's default device
(`_screen`), and the best of them polished.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..models import Structure
from ._landscape import structure_rank
from ._matrix_kkt import MatrixKKT
from ._polish import polish
from ._reduced_kkt import Verdict
from ._screen import rough_cost, screen

# Objectives that agree to this are those of one structure.
_SAME = 1e-8
# Rough minima that agree to this are taken for one.
_ROUGHLY = 1e-4


@dataclass(frozen=True)
class SearchResult:
    """Stationary points by rising objective, no two alike.

    - `minima`: `MatrixKKT`s that differ in rank, or in the objective by more than 1e-8
      of it; saddles and points flat to second order may be among them: see `verdict`.
    - `counts`: from how many starts each was reached.
    - `starts`: how many there were.
    """

    minima: tuple[MatrixKKT, ...]
    counts: tuple[int, ...]
    starts: int

    @property
    def best(self) -> MatrixKKT:
        """The one of least objective."""
        return self.minima[0]

    @property
    def hits(self) -> int:
        """From how many starts the best was reached."""
        return self.counts[0]

    def of_rank(self, rank: int) -> MatrixKKT | None:
        """Returns the best of exactly this rank, or None where none was found."""
        return next((found for found in self.minima if found.rank == rank), None)


def search(
    num_classes: int,
    depth: float | int,
    rank: int,
    *,
    starts: int = 32,
    screened: int = 0,
    seed: int = 0,
    also: Sequence[np.ndarray] = (),
) -> SearchResult:
    """Looks for the logits of rank `rank` or less that cost least.

    The simplex, the cross-polytope, the polygon and `pairs_and_singles` are tried as
    well where their rank allows, so that the best is never worse than they are.

    **Arguments:**

    - `num_classes`: K, 3 or more.
    - `depth`: L >= 1, any finite real number.
    - `rank`: from 2 to K-1.
    - `starts`: how many random ones are polished.
    - `screened`: if not 0, how many random ones descend together first, on JAX's
        default device, of which the best `starts` are polished, no two alike.
    - `seed`: of these.
    - `also`: further class means to start from, (K, K) each; cut to the rank.

    **Returns:** a `SearchResult`.

    **Raises:** `ValueError` for K below 3, a rank outside 2..K-1, a depth below 1 or
    not finite, fewer screened than `starts`, or class means that `polish` refuses.
    """
    if starts < 0:
        raise ValueError(f"Argument `starts` must be at least 0, but is {starts}.")
    if screened and screened < starts:
        raise ValueError(
            f"Argument `screened` must be 0 or at least `starts`, {starts}, but is "
            f"{screened}."
        )
    if not 1 <= depth < np.inf:
        raise ValueError(
            f"Argument `depth` must be finite and at least 1, but is {depth}."
        )
    if not 2 <= rank < num_classes:
        raise ValueError(
            f"Argument `rank` must be from 2 to K-1 for K >= 3 classes, but is {rank} "
            f"for {num_classes}."
        )
    frames = _named(num_classes, rank) + list(also)
    if screened:
        rough = screen(num_classes, depth, rank, screened, seed)
        frames += _unlike(rough, depth, rank)[:starts]
    else:
        rng = np.random.default_rng([seed, num_classes, rank])
        frames += [_random_logits(rng, num_classes, rank) for _ in range(starts)]
    return _gathered([polish(frame, depth, rank).point for frame in frames])


def best_structure(
    num_classes: int,
    depth: float | int,
    *,
    starts: int = 32,
    screened: int = 0,
    seed: int = 0,
) -> SearchResult:
    """Returns what `search` finds over all ranks, the best first.

    **Arguments:** as for `search`; `starts` and `screened` are the numbers for each
    rank, each of which compiles its own program to screen.

    **Raises:** `ValueError` as `search` does.
    """
    ranks = range(2, max(num_classes, 3))
    found = [
        search(num_classes, depth, rank, starts=starts, screened=screened, seed=seed)
        for rank in ranks
    ]
    return _gathered(
        [point for result in found for point in result.minima],
        [count for result in found for count in result.counts],
    )


def pairs_and_singles(num_classes: int, pairs: int) -> np.ndarray:
    """Returns the class means of opposite pairs and of simplex-like single classes.

    Singular values 2, once a pair; with s = K - 2p singles also 1, s-1 times, and
    (1 - s/K)^{1/2}: rank K - p. All gaps are 1, but 2 within a pair. No pair is the
    simplex, no single the cross-polytope of even K; one single is that of odd K with
    the last column centred, which P1 leaves at a singular value of 1.

    **Arguments:** K; `pairs`, p: from 0 to K/2.

    **Returns:** (K, K), columns of mean 0; the pairs come first.

    **Raises:** `ValueError` for another number of pairs.
    """
    if not 0 <= 2 * pairs <= num_classes:
        raise ValueError(
            f"Argument `pairs` must be from 0 to K/2 for K = {num_classes}, but is "
            f"{pairs}."
        )
    logits = np.eye(num_classes)
    first = np.arange(0, 2 * pairs, 2)
    logits[first, first + 1] = logits[first + 1, first] = -1
    return logits - np.mean(logits, axis=0)


def _named(num_classes: int, rank: int) -> list[np.ndarray]:
    """Returns the structures of that rank or less, one pair with singles left out.

    That one is not stationary.
    """
    pairs = [p for p in range(2, num_classes // 2 + 1) if num_classes - p <= rank]
    return [
        np.asarray(structure.logits(num_classes), float)
        for structure in Structure
        if structure_rank(structure, num_classes) <= rank
    ] + [pairs_and_singles(num_classes, p) for p in pairs]


def _random_logits(rng, num_classes: int, rank: int) -> np.ndarray:
    """Returns X^T Y, x_c uniform on the sphere and y_c up to about a radian away."""
    frame = _units(rng.normal(size=(rank, num_classes)))
    away = rng.normal(size=frame.shape) * rng.uniform(0, 1) / np.sqrt(rank)
    while True:
        logits = frame.T @ _units(frame + away)
        # Where y_c is too far from its x_c, all come nearer.
        if np.all(np.argmax(logits, axis=0) == np.arange(num_classes)):
            return logits
        away = away / 2


def _unlike(rough: np.ndarray, depth: float | int, rank: int) -> list[np.ndarray]:
    """Returns those whose cost differs from that of all before them, which rise."""
    kept: list[np.ndarray] = []
    last = 0.0
    for logits in rough:
        cost = rough_cost(logits, depth, rank)
        if cost > last * (1 + _ROUGHLY):
            kept.append(logits)
            last = cost
    return kept


def _units(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=0)


def _gathered(points, counts=None) -> SearchResult:
    """Returns the stationary ones, those alike as one."""
    counts = counts or [1] * len(points)
    failed = (Verdict.NOT_STATIONARY, Verdict.INFEASIBLE)
    order = sorted(
        (i for i, point in enumerate(points) if point.verdict not in failed),
        key=lambda i: points[i].objective,
    )
    kept, times = [], []
    for i in order:
        for j, other in enumerate(kept):
            near = abs(points[i].objective / other.objective - 1) < _SAME
            if near and points[i].rank == other.rank:
                times[j] += counts[i]
                break
        else:
            kept.append(points[i])
            times.append(counts[i])
    return SearchResult(tuple(kept), tuple(times), sum(counts))
