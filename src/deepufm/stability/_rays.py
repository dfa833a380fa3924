"""Directions that the reduced flow keeps at every norm.

With a = N v/sum(v) and f_i = d log a_i/dt = (b_i/D) a_i^p, a ray stays a ray exactly if
f_i is the same for all modes of its support S. It is so at every norm N only where the
modes of S are equal:

- p > 0: as N -> 0, b_i -> K for every i, and a_i^p has to be the same.
- p = 0: b_i = sum_m c_i(m) e^{-N m}, c_i(m) the sum of Psi_ij over the j of margin m.
  The same at every N means the same c_i(m), and then the same sum_m c_i(m) m, which is
  (Psi Psi v)_i = K (v_i + sum v).

With equal modes the margins are those of 1_S, w = Psi 1_S, and b_i is the same at every
norm exactly if the numbers {w_j : Psi_ij > 0}, with how often each occurs, are the same
for every i of S. Depth does not enter: a ray is invariant at all depths or at none.

Mode i is a vector of F_2^m, the binary digits of i = 1 ... K-1, K = 2^m. An invertible
matrix over F_2 relabels modes and margins, and takes rays to rays: supports come in
orbits of GL(m, 2), and any support on which a subgroup acts transitively is invariant.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jaxtyping import Bool, Float, Int
from scipy.sparse.csgraph import connected_components

from .._types import Modes, Tracer
from ..analysis import span_rank, spans
from ..geometry import psi_matrix
from ..models import Structure

# Modes below this part of the largest are dead; by less than this part they may differ.
_DEAD = 1e-9
_EQUAL = 1e-8


@dataclass(frozen=True)
class RayStructure:
    """An orbit of invariant rays under relabelling, by one of its supports.

    - `num_classes`: K.
    - `modes`: numbers i >= 1 of the living modes, equal on the ray; of the orbit's
        supports the lexicographically largest.
    - `orbit`: the number of supports.
    - `rank`: over F_2, at most m = log2 K; the living modes tell 2^rank classes apart.
    - `spans`: whether all classes are told apart, that is, all margins are positive
        (P1 Prop. C.1).
    - `margins`, `margin_counts`: the distinct margins Psi 1_S, rising, and how many of
        the K-1 have each.
    - `name`: of the structure where it has one, else what its modes are.
    """

    num_classes: int
    modes: tuple[int, ...]
    orbit: int
    rank: int
    spans: bool
    margins: tuple[int, ...]
    margin_counts: tuple[int, ...]
    name: str

    @property
    def size(self) -> int:
        """The number of living modes: the rank of the logits."""
        return len(self.modes)

    @property
    def direction(self) -> np.ndarray:
        """The ray, (K-1,): 1 for living modes, 0 for dead ones."""
        return np.isin(np.arange(1, self.num_classes), self.modes).astype(float)


def is_ray_invariant(direction: Modes | Float[np.ndarray, " modes"]) -> bool:
    """Says whether the reduced flow keeps a direction, at every norm and depth.

    Weights below 1e-9 of the largest count as dead, those within 1e-8 as equal.

    **Arguments:** `direction`, (K-1,), mode weights of any scale, K a power of two.

    **Raises:** `ValueError` for another length, traced values, or weights that are
    negative, not finite, or all zero.
    """
    weights = _checked(direction)
    support = weights > _DEAD
    equal = np.min(weights[support]) >= 1 - _EQUAL
    return bool(equal and _is_invariant(support[None])[0])


def ray_support(
    direction: Modes | Float[np.ndarray, " modes"],
) -> Bool[np.ndarray, " modes"]:
    """Returns which modes live on an invariant ray, (K-1,).

    **Raises:** `ValueError` as `is_ray_invariant`, and where it is False.
    """
    if not is_ray_invariant(direction):
        raise ValueError(
            "Argument `direction` must be invariant: living modes equal, and each of "
            "them with the same margins among those that it enters, so that all grow "
            "at one rate at every norm. This one, with living modes "
            f"{np.flatnonzero(_checked(direction) > _DEAD) + 1}, turns as its norm "
            "grows. `ray_invariant_structures` lists those that do not, `limit` "
            "follows a direction to infinity, and Jacobian spectra speak of one state."
        )
    return _checked(direction) > _DEAD


@functools.cache
def ray_invariant_structures(num_classes: int) -> tuple[RayStructure, ...]:
    """Returns every ray that the reduced flow keeps, one of each orbit of GL(m, 2).

    1, 3, 7 and 18 orbits for K = 2, 4, 8 and 16.

    **Arguments:** `num_classes`: K: 2, 4, 8 or 16.

    **Returns:** `RayStructure`s by number of modes, then rank, then orbit.

    **Raises:** `ValueError` for another K.

    !!! example
        directions = [s.direction for s in ray_invariant_structures(16) if s.spans]
    """
    if num_classes not in (2, 4, 8, 16):
        raise ValueError(
            f"Argument `num_classes` must be 2, 4, 8 or 16, but is {num_classes}: the "
            "supports of more are too many to list. `is_ray_invariant` decides on one."
        )
    supports, orbits = _supports_and_orbits(num_classes)
    invariant = _is_invariant(supports) & np.any(supports, axis=1)
    _, inverse, sizes = np.unique(orbits, return_inverse=True, return_counts=True)
    found = {}
    for row in np.flatnonzero(invariant):  # rising, so that the largest stays
        found[inverse[row]] = _structure(supports[row], int(sizes[inverse[row]]))
    return tuple(sorted(found.values(), key=lambda s: (s.size, s.rank, s.orbit)))


def structure_modes(structure: Structure, num_classes: int) -> Modes:
    """Returns the direction of a named structure in the reduced flow, (K-1,).

    Ones for the simplex ETF; the odd numbers for the cross-polytope, P1's structure c.
    With four classes the polygon is the square, a cross-polytope; with more it has no
    Hadamard form: its two modes would tell 4 classes apart (P1 Prop. C.1).

    **Raises:** `ValueError` for K not a power of two, and a polygon of K other than 4.
    """
    host_psi(num_classes)  # refuses other K
    if structure is Structure.POLYGON and num_classes != 4:
        raise ValueError(
            f"The polygon of {num_classes} classes has no modes in the Hadamard basis: "
            "its two singular values would be two modes, which tell 4 classes apart. "
            "Use the matrix flow, `GradientFlow`, for it."
        )
    numbers = np.arange(1, num_classes)
    whole = structure is Structure.SIMPLEX_ETF
    with jax.ensure_compile_time_eval():  # values inside of jit as well
        return jnp.asarray(np.where(whole, 1, numbers % 2), float)


@functools.cache
def host_psi(num_classes: int) -> Int[np.ndarray, "modes modes"]:
    """Returns Psi, (K-1, K-1), for NumPy, inside of jit as well."""
    with jax.ensure_compile_time_eval():
        return np.asarray(psi_matrix(num_classes), int)


def _checked(direction) -> np.ndarray:
    """Returns weights scaled to a largest of 1."""
    if isinstance(direction, Tracer):
        raise ValueError(
            "Argument `direction` must hold values, but is traced: which exponents a "
            "ray has depends on them. Make it outside of jit or with NumPy, map over "
            "norm and depth, and loop over rays."
        )
    weights = np.asarray(direction, float)
    if weights.ndim != 1 or weights.size == 0 or weights.size & (weights.size + 1):
        raise ValueError(
            "Argument `direction` must hold K-1 weights, K a power of two, but has "
            f"shape {weights.shape}."
        )
    if not (np.all((weights >= 0) & (weights < np.inf)) and np.any(weights > 0)):
        raise ValueError(
            "Argument `direction` must hold finite weights, none negative and one "
            f"positive, but is {weights}."
        )
    return weights / np.max(weights)


def _is_invariant(
    supports: Bool[np.ndarray, "rows modes"],
) -> Bool[np.ndarray, " rows"]:
    """Returns for each row whether its living modes see the same margins."""
    psi = host_psi(supports.shape[1] + 1)
    margins = supports @ psi
    same = np.ones(len(supports), bool)
    for value in np.unique(margins):
        counts = (margins == value) @ psi
        most = np.max(np.where(supports, counts, 0), axis=1)
        same &= np.all(~supports | (counts == most[:, None]), axis=1)
    return same


def _supports_and_orbits(
    num_classes: int,
) -> tuple[Bool[np.ndarray, "supports modes"], Int[np.ndarray, " supports"]]:
    """Returns all supports, lexicographically rising, and the label of their orbits.

    GL(m, 2) is generated by the cyclic shift of the digits and by adding the first to
    the second: shifts turn that addition into one of each digit to the next, and these
    give all others.
    """
    digits, numbers = num_classes.bit_length() - 1, np.arange(1, num_classes)
    places = 1 << np.arange(num_classes - 2, -1, -1)
    names = np.arange(2 ** (num_classes - 1))
    supports = names[:, None] & places != 0
    shifted = numbers << 1 & num_classes - 1 | numbers >> digits - 1
    added = numbers ^ ((numbers & 1) << 1 & num_classes - 1)
    edges = [(names, supports @ places[moved - 1]) for moved in (shifted, added)]
    rows, columns = np.hstack(edges)
    graph = scipy.sparse.coo_array(
        (np.ones(len(rows), bool), (rows, columns)), shape=(len(names), len(names))
    )
    return supports, connected_components(graph)[1]


def ray_name(support: Bool[np.ndarray, " modes"]) -> str:
    """Returns the name of a structure of equal modes, else how many modes it has."""
    size, rank = int(np.sum(support)), span_rank(support)
    num_classes = len(support) + 1
    if size == num_classes - 1:
        return "simplex ETF"
    largest = np.max(host_psi(num_classes) @ support)
    if 2 * size == num_classes and largest == num_classes:
        # All modes have a digit sum in common: the complement of a hyperplane.
        return "cross-polytope"
    if size == 1:
        return "single mode"
    if size == rank:
        return f"{size} independent modes"
    return f"{size} modes of rank {rank}"


def _structure(support: Bool[np.ndarray, " modes"], orbit: int) -> RayStructure:
    num_classes, rank = len(support) + 1, span_rank(support)
    margins, counts = np.unique(host_psi(num_classes) @ support, return_counts=True)
    return RayStructure(
        num_classes, tuple(int(i) for i in np.flatnonzero(support) + 1), orbit, rank,
        spans(support), tuple(margins.tolist()), tuple(counts.tolist()),
        ray_name(support),
    )  # fmt: skip
