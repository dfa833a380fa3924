"""Distances to deep neural collapse, to Hadamard singular vectors, and to balancedness.

Logits are K × nK: column k is one example, classes in order, n examples each (n = 1 for
mean logits). The target is S ⊗ 1_nᵀ, with S = I − 11ᵀ/K the simplex ETF. With classes
of unequal size, given as `per_class`, every column of S stands n_c times.

The first group sees the logits' direction only, so that any scale of Z, from 1e-300 to
1e300, gives the same value; a zero matrix counts as Z/‖Z‖ = 0. Distances are taken from
the difference of the normalised matrices, entry by entry: a distance d (not squared)
carries an absolute error of order 1e-16 and so keeps relative accuracy 1e-16/d.

Balancedness: gradient flow conserves each W_lᵀW_l − W_{l−1}W_{l−1}ᵀ, l = 1…L, with
W_0 = H_1 (P1 Def. 2.1, eq. 2). At a collapsed direction the normalised ones vanish.
"""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._types import Logits, Modes, RealLike, RealScalar, SquareMatrix
from ..geometry import simplex_etf, sylvester_hadamard
from ..models import ClassSizes, class_labels, class_sizes
from ._spectrum import log_relative_modes, nuclear_norm, rescaled, unit


def class_means(
    matrix: Float[Array, "rows examples"],
    num_classes: int,
    per_class: ClassSizes | None = None,
) -> Float[Array, "rows classes"]:
    """Returns the average of each class's columns, classes in order.

    **Arguments:** `per_class` n or (n_1, ..., n_K); read off the shape if `None`.

    **Raises:** `ValueError` unless the columns divide evenly among the classes, or as
    `per_class` says.
    """
    sizes = _sizes(matrix, num_classes, per_class)
    if len(set(sizes)) == 1:
        grouped = jnp.reshape(matrix, (matrix.shape[0], num_classes, sizes[0]))
        return jnp.mean(grouped, axis=-1)
    groups = jnp.split(matrix, np.cumsum(sizes)[:-1], axis=1)
    return jnp.stack([jnp.mean(group, axis=1) for group in groups], axis=1)


def etf_distance(logits: Logits, per_class: ClassSizes | None = None) -> RealScalar:
    """Returns M = ‖Z/‖Z‖_F − T/‖T‖_F‖_F² with T = S ⊗ 1_nᵀ.

    **Arguments:** `logits` Z, (K, examples); `per_class` as in `class_means`.

    **Returns:** a number from 0 (collapsed) over 2 (orthogonal) to 4; 1 for Z = 0.

    **Raises:** `ValueError` unless the columns divide evenly among the K classes.

    **Reference:** P1 eq. 61; M̃ of P2 B.3.2.
    """
    num_classes = logits.shape[0]
    sizes = _sizes(logits, num_classes, per_class)
    target = simplex_etf(num_classes)[:, class_labels(num_classes, sizes)]
    # Each column of S has squared norm (K-1)/K.
    norm = ((num_classes - 1) * (sum(sizes) / num_classes)) ** 0.5
    target = target.astype(logits.dtype) / norm
    return jnp.sum((unit(logits) - target) ** 2)


def etf_distance_from_log(log_a: Modes, signs: Modes | None = None) -> RealScalar:
    """Returns `etf_distance` of Z = Φ diag(0, a) Φᵀ, Σ(a_i/‖a‖₂ − 1/√(K−1))².

    **Arguments:** `log_a`, u = log |a|; −inf is a dead mode; `signs` of a, all positive
    if `None`.

    **Returns:** the distance, of full relative accuracy even where it is 1e-30; 1 if
    every mode is dead.
    """
    # a_i/‖a‖₂ = exp(δ_i/2)/√(K−1), δ = log(a²/mean(a²)).
    half = 0.5 * log_relative_modes(2 * log_a)
    if signs is None:
        return jnp.mean(jnp.expm1(half) ** 2)
    return jnp.mean(jnp.where(signs < 0, -jnp.exp(half) - 1, jnp.expm1(half)) ** 2)


def alignment(matrix: SquareMatrix) -> RealScalar:
    """Returns ‖X/‖X‖_* − S/(K−1)‖_F, with ‖·‖_* the nuclear norm; ‖S‖_* = K−1.

    For logits Z = Φ diag(0, a) Φᵀ this is √(2M), M the `uniform_distance` of log a.

    **Arguments:** `matrix` X, any (K, K) matrix that collapse makes a multiple of S:
    mean logits, W_L W_Lᵀ, or HᵀH of the `class_means` of the features.

    **Returns:** the distance, 0 when collapsed; 1/√(K−1) for X = 0.

    **Reference:** P2 E.1.
    """
    num_classes = matrix.shape[0]
    scaled, _ = rescaled(matrix, (-2, -1))
    norm = nuclear_norm(scaled)
    target = simplex_etf(num_classes).astype(matrix.dtype) / (num_classes - 1)
    return _root(jnp.sum((scaled / jnp.where(norm == 0, 1.0, norm) - target) ** 2))


def residual_energy(logits: Logits, per_class: ClassSizes | None = None) -> RealScalar:
    """Returns ‖Z − U(UᵀZV)Vᵀ‖_F/‖Z‖_F, the share of Z outside the signal subspace.

    U spans 1⊥, and V the class-constant vectors in 1⊥, in any bases: UUᵀ subtracts
    each column's mean, VVᵀ averages over each class and subtracts each row's mean.
    Rotated singular vectors inside these spaces do not count: `off_diagonal_energy`.

    **Arguments:** `logits` Z, (K, examples), any K; `per_class` as in `class_means`.

    **Returns:** a number from 0 to 1; 0 for Z = 0.

    **Raises:** `ValueError` unless the columns divide evenly among the K classes.

    **Reference:** P2 E.1.
    """
    num_classes = logits.shape[0]
    sizes = _sizes(logits, num_classes, per_class)
    direction = unit(logits)
    signal = class_means(direction, num_classes, sizes)
    signal = signal - jnp.mean(signal, axis=0, keepdims=True)
    columns = signal[:, class_labels(num_classes, sizes)]
    columns = columns - jnp.mean(columns, axis=1, keepdims=True)
    return _root(jnp.sum((direction - columns) ** 2))


def off_diagonal_energy(
    logits: Logits,
    left: Float[Array, "classes modes"],
    right: Float[Array, "examples modes"],
) -> RealScalar:
    """Returns the Frobenius norm of the off-diagonal part of UᵀZV, over ‖Z‖_F.

    Zero when the columns of U and V are singular vectors of Z; what Z has outside
    their spans is not counted (`residual_energy` is that for the Hadamard bases).

    **Arguments:** `logits` Z, (K, nK); `left` U and `right` V with orthonormal columns,
    for instance from `hadamard_bases`.

    **Returns:** a number from 0 to 1; 0 for Z = 0.
    """
    core = _product(_product(left.T, unit(logits)), right)
    on_diagonal = jnp.eye(core.shape[0], dtype=bool)
    return _root(jnp.sum(jnp.where(on_diagonal, 0.0, core) ** 2))


def hadamard_bases(
    num_classes: int, per_class: int
) -> tuple[Float[Array, "classes modes"], Float[Array, "examples modes"]]:
    """Returns the singular vectors (U, V) of logits under Hadamard initialisation.

    U holds columns u_i of Φ/√K without the constant one, V the columns u_i ⊗ 1_n/√n,
    which are class-constant: entry k belongs to example k. (P1 Thm 4.2 writes V = U⊗Q;
    for n > 1 its first K columns must be these u_i ⊗ q_1.)

    **Raises:** `ValueError` unless `num_classes` is a power of two.

    **Reference:** P1 Thm 4.2.
    """
    left = sylvester_hadamard(num_classes)[:, 1:] / num_classes**0.5
    return left, jnp.repeat(left, per_class, axis=0) / per_class**0.5


class Balancedness(eqx.Module):
    """Largest norm over l = 1…L of W_lᵀW_l − W_{l−1}W_{l−1}ᵀ, in three units."""

    absolute: RealScalar  # max_l ‖W_lᵀW_l − W_{l−1}W_{l−1}ᵀ‖_F
    relative: RealScalar  # the same over max_l ‖W_l‖_F², l = 0…L
    normalised: RealScalar  # with Ŵ_l = W_l/‖W_l‖_F for W_l: P1 eq. 2


def balancedness_defects(
    head: Float[Array, "classes width"],
    hidden: Float[Array, "hidden width width"],
    features: Float[Array, "width examples"],
    depth: RealLike | None = None,
) -> Balancedness:
    """Returns how far neighbouring layers are from balanced.

    `absolute` is bounded by its conserved value for all time; `relative` and
    `normalised` need no scale and tend to 0 as the norms grow.

    **Arguments:** as `balancedness_matrices`.

    **Returns:** a `Balancedness`. Zero layers count as balanced with zero layers. Only
    `absolute`, a square of the parameters' size, leaves the floating-point range when
    they are beyond 1e±150.

    **Raises:** `ValueError` as `balancedness_matrices`.
    """
    depth = _checked_depth(depth, hidden)
    hidden = _without_padding(hidden, depth)
    entries = [jnp.ravel(x) for x in (head, hidden, features)]
    _, scale = rescaled(jnp.concatenate(entries), (-1,))
    scale = jnp.squeeze(scale)
    head, hidden, features = head / scale, hidden / scale, features / scale
    largest = jnp.maximum(jnp.sum(head**2), jnp.sum(features**2))
    largest = jnp.max(jnp.sum(hidden**2, axis=(1, 2)), initial=largest)

    defect = _largest_norm(balancedness_matrices(head, hidden, features, depth))
    directions = unit(head), unit(hidden), unit(features)
    return Balancedness(
        absolute=defect * scale * scale,
        relative=defect / jnp.where(largest == 0, 1.0, largest),
        normalised=_largest_norm(balancedness_matrices(*directions, depth)),
    )


def balancedness_matrices(
    head: Float[Array, "classes width"],
    hidden: Float[Array, "hidden width width"],
    features: Float[Array, "width examples"],
    depth: RealLike | None = None,
) -> Float[Array, "layers width width"]:
    """Returns the conserved W_lᵀW_l − W_{l−1}W_{l−1}ᵀ, entry l−1 for l = 1…L.

    The error of an integration shows in their drift from the start.

    **Arguments:**

    - `head`: W_L, (K, d).
    - `hidden`: (Lmax−1, d, d), `hidden[l-1]` is W_l.
    - `features`: W_0 = H_1, (d, examples).
    - `depth`: L, at most Lmax and possibly traced, if less than Lmax: hidden layers
      l >= L are then padding, and the head's neighbour is W_{L−1}.

    **Returns:** (Lmax, d, d), zeros beyond entry L−1, which is the head's. All NaN if a
    traced `depth` is none of 1…Lmax.

    **Raises:** `ValueError` if a Python number `depth` is none of 1…Lmax.
    """
    depth = _checked_depth(depth, hidden)
    hidden = _without_padding(hidden, depth)
    transposed = jnp.swapaxes(hidden, -1, -2)
    gram_in = _product(transposed, hidden)  # W_lᵀW_l, l = 1…Lmax−1
    gram_out = _product(hidden, transposed)  # W_lW_lᵀ
    gram_head = _product(head.T, head)[None]
    gram_features = _product(features, features.T)[None]

    layer = jnp.arange(1, hidden.shape[0] + 2, dtype=head.dtype)[:, None, None]
    outer = jnp.concatenate([gram_in, gram_head])
    outer = jnp.where(layer == depth, gram_head, outer)
    inner = jnp.concatenate([gram_features, gram_out])
    difference = jnp.where(layer <= depth, outer - inner, 0.0)
    return jnp.where(jnp.any(layer == depth), difference, jnp.nan)


def _checked_depth(depth, hidden):
    """Returns `depth` as an array of the layers' type; Python numbers are checked."""
    deepest = hidden.shape[0] + 1
    if depth is None:
        depth = deepest
    if isinstance(depth, int | float) and depth not in range(1, deepest + 1):
        raise ValueError(
            f"Argument `depth` must be a whole number from 1 to {deepest}, one "
            f"more than the layers in `hidden`, but is {depth}."
        )
    return jnp.asarray(depth, dtype=hidden.dtype)


def _without_padding(hidden, depth):
    """Zeros in place of the hidden layers l >= depth, whatever they hold."""
    layer = jnp.arange(1, hidden.shape[0] + 1, dtype=hidden.dtype)
    return jnp.where((layer < depth)[:, None, None], hidden, 0.0)


def _largest_norm(matrices):
    return _root(jnp.max(jnp.sum(matrices**2, axis=(1, 2))))


def _sizes(matrix, num_classes, per_class) -> tuple[int, ...]:
    """Returns the class sizes that the columns of `matrix` have."""
    if per_class is not None:
        sizes = class_sizes(num_classes, per_class)
        if sum(sizes) != matrix.shape[1]:
            raise ValueError(
                f"Argument `per_class` = {per_class} makes {sum(sizes)} examples of "
                f"{num_classes} classes, but there are {matrix.shape[1]} columns."
            )
        return sizes
    per_class, rest = divmod(matrix.shape[1], num_classes)
    if rest or not per_class:
        raise ValueError(
            "Columns must be n examples of each class, classes in order, but "
            f"{matrix.shape[1]} columns are no multiple of {num_classes} classes. For "
            "classes of unequal size give `per_class`, one number a class."
        )
    return (per_class,) * num_classes


def _product(x, y):
    """Matrix product at full precision: accelerators would round the inputs."""
    return jnp.matmul(x, y, precision="highest")


def _root(x):
    """Square root with derivative 0, not infinity, at 0."""
    zero = x == 0
    return jnp.where(zero, 0.0, jnp.sqrt(jnp.where(zero, 1.0, x)))
