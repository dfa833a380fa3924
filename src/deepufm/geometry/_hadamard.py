"""The Sylvester-Hadamard matrix Phi, its core Psi, and products with Psi.

Phi_ij = (-1)^(i.j), where i.j is the number of binary digits that the indices i and j,
counted from 0, have in common (P1 Def. 4.1 and Lemma D.6). Psi is the core of
1 1^T - Phi, that is without row 0 and column 0 (P1 Thm 4.2):

    Psi_ij = 1 - (-1)^(i.j), which is 2 where i.j is odd and 0 where it is even.

Entry k of a vector of K-1 modes is therefore mode k+1 of the papers, which count modes
from 1. Psi is symmetric, each row sums to K, and Psi^2 = K (I + 1 1^T).

The reduced flow applies Psi to non-negative vectors whose entries may differ by
hundreds of orders of magnitude, and a small entry of the result matters as much as a
large one. Both products here add non-negative numbers only, so every entry has full
relative accuracy. The familiar sum(v) - Phi v, by a fast Walsh-Hadamard transform, has
not: there the large terms must cancel.
"""

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from .._types import LaneRow, ModeLanes, Modes, SquareMatrix

# The dense product is used up to this K. From benchmarks/bench_psi.py, two Xeon cores,
# float64, microseconds a product inside a jitted chain, dense against parity transform:
#     K            16          32          64          128         256
#     one state    0.11/0.15   0.22/0.24   0.46/0.42   1.6/0.95    5.7/1.8
#     64 lanes     1.0/2.0     2.5/6.4     8.9/17.7    32/39       114/93
# A state alone would switch at 32, lanes at 128; 64 loses least over both.
_DENSE_UP_TO = 64


def sylvester_hadamard(num_classes: int) -> SquareMatrix:
    """Returns the Sylvester-Hadamard matrix Phi, with entries (-1)^(i.j).

    **Arguments:**

    - `num_classes`: the order K, a power of two, 1 or more.

    **Returns:** a (K, K) matrix of +1 and -1 in the default float type; symmetric, with
    Phi^2 = K I and a first row and column of ones.

    **Raises:** `ValueError` where K is not a power of two.

    Reference: P1 Def. 4.1.
    """
    _check_num_classes(num_classes, at_least=1)
    odd = _common_digits_odd(num_classes)
    return jnp.asarray(np.where(odd, -1, 1), dtype=float)


def psi_matrix(num_classes: int) -> SquareMatrix:
    """Returns Psi, the core of 1 1^T - Phi, with entries 0 and 2.

    Products with a vector are better left to `psi_matvec`.

    **Arguments:**

    - `num_classes`: K, a power of two, 2 or more.

    **Returns:** a (K-1, K-1) matrix in the default float type.

    **Raises:** `ValueError` where K is not such a power of two.

    Reference: P1 Thm 4.2.
    """
    _check_num_classes(num_classes, at_least=2)
    return jnp.asarray(_psi(num_classes), dtype=float)


def psi_matvec(v: Modes) -> Modes:
    """Returns Psi v; for v >= 0 every entry has full relative accuracy.

    The product is dense for small K, else the parity transform in O(K log K). For
    v >= 0 entry i has a relative error of at most K/2 roundings (dense) or log2 K
    roundings (parity), whatever the size of the other entries: `v` may span the normal
    range of its type, but for a factor K at its top.

    **Arguments:**

    - `v`: a vector of K-1 entries, K a power of two. A batch is for `jax.vmap`; lanes
      last, `vmap(psi_matvec, in_axes=-1, out_axes=-1)`, needs no transposition.

    **Returns:** a vector like `v`, in its type.

    **Raises:** `ValueError` where `v` is no such vector.

    Reference: P1 Thm 4.2.

    ```python
    margins = psi_matvec(a)
    b = psi_matvec(jnp.exp(-margins))
    ```
    """
    num_classes = v.shape[0] + 1 if v.ndim == 1 else 0
    if num_classes < 2 or num_classes & (num_classes - 1):
        raise ValueError(
            "Argument `v` must be one vector of K-1 entries, K a power of two, but has "
            f"shape {v.shape}. Use jax.vmap for a batch, GradientFlow for general K."
        )
    return psi_lanes(v)


def psi_lanes(v: ModeLanes) -> ModeLanes:
    """Returns Psi v for one vector or for many, (K-1, lanes); no checks."""
    return psi_and_sum(v)[0]


def psi_and_sum(v: ModeLanes) -> tuple[ModeLanes, LaneRow]:
    """Returns Psi v and the sum of v, which comes with it; no checks."""
    dense = v.shape[0] + 1 <= _DENSE_UP_TO
    sums = _sums_dense(v) if dense else _sums_by_parity(v)
    return sums[1:], sums[:1]


def _sums_dense(v: ModeLanes) -> Float[Array, "modes+1 *lanes"]:
    """Returns the sum of v, then Psi v."""
    # The products with 0 add exact zeros, so large entries cannot reach the rows they
    # are not in. A full-precision dot: GPUs and TPUs would otherwise shorten float32.
    # jnp.sum(psi * v, axis=1) took 4 times as long at K = 64, and 8 times in lanes.
    sums = _sum_and_psi(v.shape[0] + 1).astype(v.dtype)
    return jnp.dot(sums, v, precision=lax.Precision.HIGHEST)


def _sums_by_parity(v: ModeLanes) -> Float[Array, "modes+1 *lanes"]:
    """The sum of v, then Psi v, by the parity transform: additions only.

    `even` and `odd` hold, for each i, the sums of v_j over those j for which i.j is
    even and odd. Before any digit is looked at no j is odd: even = v, odd = 0. A binary
    digit takes the two halves of j, (E0, O0) with digit 0 and (E1, O1) with digit 1, to

        digit 0 of i: (E0 + E1, O0 + O1),    digit 1 of i: (E0 + O1, O0 + E1),

    as a common 1 turns the parity. After log2 K digits Psi v = 2 odd, and nothing is
    odd for i = 0: the sum is even there.
    """
    # Index 0 is the mode that Psi leaves out.
    even = jnp.concatenate([jnp.zeros_like(v[:1]), v])
    odd = jnp.zeros_like(even)
    num_classes = even.shape[0]
    for _ in range(num_classes.bit_length() - 1):
        # j's leading digit goes and i's digit comes in last (Stockham's order): the
        # halves stay contiguous, and after all digits i reads in its natural order.
        (e0, e1), (o0, o1) = jnp.split(even, 2), jnp.split(odd, 2)
        even = jnp.stack([e0 + e1, e0 + o1], axis=1).reshape(even.shape)
        odd = jnp.stack([o0 + o1, o0 + e1], axis=1).reshape(odd.shape)
    return jnp.concatenate([even[:1], 2 * odd[1:]])


# The matrices are kept as NumPy arrays: a traced function takes them up as literals of
# its own type, and a cached JAX array could be a tracer of a trace long finished.
@functools.lru_cache(maxsize=32)
def _common_digits_odd(num_classes: int) -> np.ndarray:
    """Returns the (K, K) booleans "i and j have an odd number of common digits"."""
    index = np.arange(num_classes)
    odd = np.bitwise_count(index[:, None] & index[None, :]) % 2 == 1
    odd.flags.writeable = False
    return odd


def _psi(num_classes: int) -> np.ndarray:
    return np.where(_common_digits_odd(num_classes)[1:, 1:], 2, 0)


def _sum_and_psi(num_classes: int) -> np.ndarray:
    """Returns a row of ones above Psi, (K, K-1)."""
    ones = np.ones((1, num_classes - 1), int)
    return np.concatenate([ones, _psi(num_classes)])


def _check_num_classes(num_classes: int, at_least: int) -> None:
    if num_classes < at_least or num_classes & (num_classes - 1):
        raise ValueError(
            f"Argument `num_classes` must be a power of two, {at_least} or more, for "
            f"Hadamard initialisation, but is {num_classes}. "
            "Use GradientFlow for general K."
        )
