"""Which structure mean logits form: collapse, a cross-polytope, a polygon, a code.

The distance of logits Zbar (K, K) to a structure S is

    min over permutations P and s > 0 of ‖Zbar/‖Zbar‖_F - s·P S P^T/‖S‖_F‖_F,

the sine of the angle between them, at the labelling of the classes that suits best (1
where the angle is 90 degrees or more). The best labelling of the cross-polytope is a
matching of classes to their opposites, found exactly; that of the polygon an order
round the circle, found from the angles of leading eigenvectors and by exchanges of two
classes.

Softmax codes (`softmax_code`) of one K and rank are many, so that no one matrix stands
for them. They are judged by what all have: Zbar is c·X^T X with unit columns of X, its
rank is r, and the largest inner product is the least known.

Where structures coincide, the first in `Structure` gives the name: the simplex ETF at
K = 2 and for the triangle, the cross-polytope for the square. So the ranks that go with
a name are K-1 and (K+1)//2 at every K, and a polygon is no other structure.
"""

import functools
import itertools
from dataclasses import dataclass

import numpy as np
import scipy.optimize
from jaxtyping import Float, Int

from .._types import Labels, Logits
from ..geometry import best_known_inner_product
from ..models import Structure

# Structures at angles nearer than this are one.
_SAME = 1e-6


@dataclass(frozen=True)
class Classification:
    """What mean logits are, and how far from the named structures.

    - `name`: for people, such as "simplex ETF" or "softmax code of rank 4".
    - `structure`: the named structure that it is or is near, else `None`.
    - `distance`: to the nearest named structure, even where that gives no name.
    - `distances`: to every named structure that exists for K.
    - `order`: the permutation of the nearest one, (K,): class `order[k]` stands where
        the structure has class k.
    - `rank`: how many singular values exceed the tolerance times the largest.
    - `code_misfit`: how far the logits are from a softmax code of that rank; NaN where
        no code of that rank is known.
    - `max_inner_product`: the largest cosine between two columns of X, Zbar ~ X^T X.
    """

    name: str
    structure: Structure | None
    distance: float
    distances: dict[Structure, float]
    order: np.ndarray
    rank: int
    code_misfit: float
    max_inner_product: float


def classify(
    logits: Logits | Float[np.ndarray, "classes examples"],
    labels: Labels | Int[np.ndarray, " examples"] | None = None,
    *,
    tolerance: float = 1e-4,
) -> Classification:
    """Says which structure logits form, up to their scale and the classes' labels.

    In this order, the name is that of

    1. the nearest named structure, within `tolerance`;
    2. a softmax code, where `code_misfit` is within `tolerance` and ten times smaller
       than the distance to the nearest named structure (or noise could make a code of
       an odd cross-polytope, which has rho = 0 like the codes of its rank);
    3. "near a ...", the nearest named structure, within `classification_radius`;
    4. none: "other (rank r)".

    A named structure plus noise of a relative Frobenius size below the radius is never
    taken for another one, whatever the noise, and is taken for none (at worst) where
    the noise hides the order round the circle, which random noise did in no trial.
    Softmax codes have no such radius, only `tolerance`; some are nearer than the radius
    to a named structure, which a noisy copy is then said to be near.

    **Arguments:**

    - `logits`: Z, (K, examples) for K >= 2; or class means, (K, K).
    - `labels`: the class of each column, every class once or more; if `None` the same
        number of examples for each class, classes in order.
    - `tolerance`: relative, of limits that are known well. States of a finite time are
        within 1/log t of their limits: give 1e-2, say.

    **Returns:** a `Classification`.

    **Raises:** `ValueError` for logits that are not finite or all zero, for fewer than
    two classes, or for labels of which a class has none.
    """
    means = _class_means(logits, labels)
    unit = means / np.linalg.norm(means)
    found = {s: _nearest(unit, s) for s in _structures(len(unit))}
    distances = {s: distance for s, (distance, _) in found.items()}
    least = min(distances.values())
    nearest = next(s for s, d in distances.items() if d <= least + _SAME * 1e-3)
    rank, misfit, largest = _as_code(unit, tolerance)

    structure, name = None, f"other (rank {rank})"
    if least <= tolerance:
        structure, name = nearest, _NAMES[nearest]
    elif misfit <= min(tolerance, least / 10):
        name = f"softmax code of rank {rank}"
    elif least < classification_radius(len(unit)):
        structure, name = nearest, f"near a {_NAMES[nearest]}"
    return Classification(
        name, structure, distances[nearest], distances, found[nearest][1], rank,
        misfit, largest,
    )  # fmt: skip


@functools.cache
def classification_radius(num_classes: int) -> float:
    """Returns the relative size of noise that no two named structures can share.

    The sine of half the least angle between two of them at this K, their classes
    permuted for the best: within it the nearest structure is the right one. It is 0.28
    to 0.35 up to K = 9 and tends to 0.38; at K = 2, with one structure, it is 0.71.

    **Raises:** `ValueError` for K < 2.
    """
    structures = _structures(num_classes)
    least = np.pi / 2
    for one, other in itertools.combinations(structures, 2):
        sine, _ = _nearest(_unit_logits(other, num_classes), one)
        if sine > _SAME:
            least = min(least, np.arcsin(sine))
    return float(np.sin(least / 2))


_NAMES = {
    Structure.SIMPLEX_ETF: "simplex ETF",
    Structure.CROSS_POLYTOPE: "cross-polytope",
    Structure.POLYGON: "regular polygon",
}


def _class_means(logits, labels) -> np.ndarray:
    values = np.asarray(logits, float)
    num_classes = values.shape[0]
    if not (np.all(np.isfinite(values)) and np.any(values != 0)):
        raise ValueError(
            "Argument `logits` must be finite and not all zero: a direction is needed."
        )
    values = values / np.max(np.abs(values))
    if labels is None:
        per_class, rest = divmod(values.shape[1], num_classes)
        if rest or not per_class:
            raise ValueError(
                "Without `labels` columns must be n examples of each class, classes in "
                f"order, but {values.shape[1]} columns are no multiple of "
                f"{num_classes} classes."
            )
        labels = np.repeat(np.arange(num_classes), per_class)
    own = np.asarray(labels)[:, None] == np.arange(num_classes)
    counts = np.sum(own, axis=0)
    if np.any(counts == 0) or not np.all(np.any(own, axis=1)):
        raise ValueError(
            f"Argument `labels` must be 0 to {num_classes - 1}, each at least once, "
            f"but the classes have {counts.tolist()} of {len(own)} examples."
        )
    return values @ own / counts


def _structures(num_classes: int) -> list[Structure]:
    """The structures that K classes can form, in the order of their names' claim."""
    if num_classes < 2:
        raise ValueError(
            f"There must be two or more classes (rows of the logits), but there is "
            f"{num_classes}: columns are examples."
        )
    return [s for s in Structure if num_classes > 2 or s is not Structure.POLYGON]


@functools.cache
def _unit_logits(structure: Structure, num_classes: int) -> np.ndarray:
    target = np.asarray(structure.logits(num_classes), float)
    return target / np.linalg.norm(target)


def _nearest(unit: np.ndarray, structure: Structure) -> tuple[float, np.ndarray]:
    """Returns the distance of a matrix of norm 1 to a structure, and its order."""
    target = _unit_logits(structure, len(unit))
    if structure is Structure.SIMPLEX_ETF:
        order = np.arange(len(unit))
    elif structure is Structure.CROSS_POLYTOPE:
        order = _matching(unit)
    else:
        order = _round_the_circle(unit, target)
    ordered = unit[np.ix_(order, order)]
    scale = max(0.0, float(np.sum(ordered * target)))
    return float(np.linalg.norm(ordered - scale * target)), order


def _matching(unit: np.ndarray) -> np.ndarray:
    """Returns the order that puts opposite classes side by side, the best of all.

    The inner product with the cross-polytope is the trace less the pairs' entries, so
    the pairs of least sum are wanted: a matching, as a linear program in whole numbers.
    """
    num_classes = len(unit)
    i, j = np.triu_indices(num_classes, 1)
    pair = np.arange(len(i))
    uses = np.zeros((num_classes, len(pair)))
    uses[i, pair] = uses[j, pair] = 1
    found = scipy.optimize.milp(
        (unit + unit.T)[i, j],
        integrality=np.ones(len(pair)),
        bounds=scipy.optimize.Bounds(0, 1),
        constraints=[
            scipy.optimize.LinearConstraint(uses, ub=1),
            scipy.optimize.LinearConstraint(
                np.ones_like(uses[:1]), num_classes // 2, num_classes // 2
            ),
        ],
        options={"mip_rel_gap": 0.0},
    )
    chosen = found.x > 0.5
    order = np.stack([i[chosen], j[chosen]], axis=1).ravel()
    return np.append(order, np.setdiff1d(np.arange(num_classes), order))


def _round_the_circle(unit: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Returns an order of the classes for the polygon, good but not proved the best.

    Its reading: by angle in planes of two leading eigenvectors, where a polygon plus
    noise shows its order, each improved until no exchange of two classes helps.
    """
    values, vectors = np.linalg.eigh(unit + unit.T)
    leading = np.argsort(-values)[:4]
    best, order = -np.inf, np.arange(len(unit))
    for a, b in itertools.combinations(leading, 2):
        start = np.argsort(np.arctan2(vectors[:, a], vectors[:, b]), kind="stable")
        value, candidate = _exchange(unit, target, start)
        if value > best:
            best, order = value, candidate
    return order


def _exchange(unit, target, order):
    """Exchanges pairs of classes, the best exchange each time, while that helps.

    The gains of all exchanges at once, for a symmetric target of constant diagonal t:
    with B the ordered symmetric part and M = B·target, exchanging i and j gains twice

        M_ij + M_ji - M_ii - M_jj - (t - target_ij)(2 B_ij - B_ii - B_jj).
    """
    symmetric = (unit + unit.T) / 2
    for _ in range(100 * len(order)):
        ordered = symmetric[np.ix_(order, order)]
        product = ordered @ target
        both = product + product.T
        own, held = np.diag(product), np.diag(ordered)
        gains = both - own[:, None] - own
        gains -= (target[0, 0] - target) * (2 * ordered - held[:, None] - held)
        i, j = np.unravel_index(np.argmax(gains), gains.shape)
        if gains[i, j] <= 1e-13:
            break
        order = order.copy()
        order[[i, j]] = order[[j, i]]
    return np.sum(symmetric[np.ix_(order, order)] * target), order


def _as_code(unit: np.ndarray, tolerance: float) -> tuple[int, float, float]:
    """Returns the numerical rank, the misfit as a softmax code, and the largest cosine.

    The misfit is the largest of: what a symmetric positive semidefinite matrix of that
    rank leaves, in Frobenius norm; the spread of the diagonal, relative to its mean;
    and the excess of the largest cosine over the least one known.
    """
    num_classes = len(unit)
    singular = np.linalg.svd(unit, compute_uv=False)
    rank = int(np.sum(singular > tolerance * singular[0]))
    values, vectors = np.linalg.eigh((unit + unit.T) / 2)
    factor = vectors[:, -rank:] * np.sqrt(np.maximum(values[-rank:], 0))
    gram = factor @ factor.T
    lengths = np.sqrt(np.diag(gram))
    if not np.all(lengths > 0):
        return rank, np.nan, np.nan
    cosines = gram / np.outer(lengths, lengths)
    largest = float(np.max(cosines[np.triu_indices(num_classes, 1)]))
    if not 2 <= rank < num_classes:
        return rank, np.nan, largest
    known = best_known_inner_product(num_classes, rank)
    spread = np.max(np.abs(lengths**2 / np.mean(lengths**2) - 1))
    misfits = [np.linalg.norm(unit - gram), spread, abs(largest - known)]
    return rank, float(np.max(np.asarray(misfits, float))), largest
