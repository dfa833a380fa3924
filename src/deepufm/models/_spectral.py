"""Initial models with given logits: Hadamard, balanced, partners, near a structure.

Balanced starts share singular values (P1 Def. 2.1, eq. 42): W_l = R_{l+1} diag(alpha)
R_l^T with alpha_i = sigma_i(Z)^{1/(L+1)} and random orthogonal R_l, so that
W_{l+1}^T W_{l+1} = W_l W_l^T. Hadamard starts (P1 Thm 4.2) take the singular vectors of
Z from the Hadamard matrix; the flow keeps them, and moves singular values alone.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._types import Logits, Modes, PRNGKey, RealLike, SquareMatrix, Tracer
from ..geometry import frobenius_norm, sylvester_hadamard
from ._class_sizes import ClassSizes, class_labels, class_sizes
from ._deep_ufm import DeepUFM
from ._random import draw, rotation
from ._sizes import check_modes, check_positive, check_sizes

_FIRST_ROTATION, _PERTURBATION = 2**16, 2**17


def hadamard(
    key: PRNGKey,
    a: Modes,
    *,
    per_class: int,
    width: int,
    depth: int,
    pad_width: int | None = None,
    pad_depth: int | None = None,
) -> DeepUFM:
    """Hadamard initialisation with logit singular values `a` (P1 Thm 4.2).

    Z = Φ diag(0, a) Φᵀ/(K√n) ⊗ 1ᵀ: the logit matrix has left singular vectors the
    columns of Φ/√K, right ones u_i ⊗ 1_n/√n, and singular values `a`. (P1 writes
    V = U ⊗ Q; its first K columns must be u_i ⊗ q_1, so the columns are shuffled.)
    The flow keeps these vectors and moves `a` alone; `scale_map` gives the matching
    start and time of `HadamardFlow`.

    **Arguments:** `a` (K-1,), non-negative singular values of Z in the full flow's own
    units; `per_class`, `width`, `depth` n, d, L; paddings as in `gaussian`.

    **Raises:** `ValueError` where K is no power of two, d < K, or an `a_i` is negative
    or not finite.
    """
    check_sizes(a.shape[0] + 1, width, depth, pad_width, pad_depth)
    check_modes("a", a)
    if not isinstance(a, Tracer) and not bool(jnp.any(a > 0)):
        raise ValueError(
            "At least one a_i must be positive: a = 0 is an equilibrium, from which no "
            "mode grows."
        )
    alpha = layer_modes(a, depth)
    left, right = _hadamard_vectors(a, per_class)
    return _build(key, left, alpha, right, width, pad_width, pad_depth)


def hadamard_layers(
    key: PRNGKey,
    alpha: Float[Array, "matrices modes"],
    *,
    per_class: int,
    width: int,
) -> DeepUFM:
    """Hadamard initialisation with singular values of every layer, unbalanced or not.

    `LayerwiseHadamardFlow` moves these alone (P1 eq. 41; P2 Thm 2's α and β).

    **Arguments:** `alpha` (L+1, K-1): those of H_1, W_1, ..., W_L in this order, of
    either sign; `per_class` n; `width` d >= K.

    **Raises:** `ValueError` for fewer than two layers, K no power of two, d < K, or an
    entry that is not finite.
    """
    if alpha.ndim != 2 or alpha.shape[0] < 2:
        raise ValueError(
            "Argument `alpha` must hold one row a matrix, H_1, W_1, ..., W_L, with K-1 "
            f"values each: its shape must be (L+1, K-1), but is {alpha.shape}."
        )
    check_sizes(alpha.shape[1] + 1, width, alpha.shape[0] - 1)
    if not isinstance(alpha, Tracer) and not bool(jnp.all(jnp.isfinite(alpha))):
        raise ValueError("Argument `alpha` must be finite, but holds NaN or inf.")
    left, right = _hadamard_vectors(alpha, per_class)
    return _build(key, left, alpha, right, width, None, None)


def _hadamard_vectors(a, per_class):
    """Returns the left and right singular vectors of Hadamard logits, a column each."""
    num_classes = a.shape[-1] + 1
    class_sizes(num_classes, per_class)
    left = sylvester_hadamard(num_classes).astype(a.dtype)[:, 1:] / np.sqrt(num_classes)
    return left, jnp.repeat(left, per_class, axis=0) / np.sqrt(per_class)


def balanced(
    key: PRNGKey,
    logits: Logits,
    *,
    width: int,
    depth: int,
    pad_width: int | None = None,
    pad_depth: int | None = None,
    bottleneck: bool = False,
) -> DeepUFM:
    """Returns a balanced model with the given logit matrix (P1 Def. 2.1, eq. 42).

    **Arguments:** `logits` (K, N), any matrix; `width` d; `depth` L; paddings as in
    `gaussian`; `bottleneck` to allow d < K, for logits of rank d at most.

    **Raises:** `ValueError` where d < K without `bottleneck`, the logits' rank exceeds
    d, or they are not finite.
    """
    check_sizes(logits.shape[0], width, depth, pad_width, pad_depth, bottleneck)
    if not isinstance(logits, Tracer) and not bool(jnp.all(jnp.isfinite(logits))):
        raise ValueError("Argument `logits` must be finite, but holds NaN or inf.")
    left, values, right = jnp.linalg.svd(logits, full_matrices=False)
    rank = min(width, *logits.shape)
    # What a bottleneck drops must be rounding.
    rounding = 16 * max(logits.shape) * jnp.finfo(values.dtype).eps
    lost = jnp.any(values[rank:] > rounding * values[0])
    if isinstance(lost, Tracer):
        message = "The rank of the logits exceeds the width."
        values = eqx.error_if(values, lost, message)
    elif bool(lost):
        raise ValueError(
            f"Logits through a width of {width} have rank {width} at most, but "
            f"{logits.shape[0]} x {logits.shape[1]} ones with singular values "
            f"{np.asarray(values)} were given."
        )
    alpha = layer_modes(values[:rank], depth)
    return _build(
        key, left[:, :rank], alpha, right[:rank].T, width, pad_width, pad_depth
    )


def spectral_partner(key: PRNGKey, model: DeepUFM) -> DeepUFM:
    """Returns the Hadamard start that P2 compares a random one with (P2 section 6).

    Balanced, with the K-1 largest singular values of the random model's logits, the
    largest as mode 1: only the singular vectors differ.

    **Arguments:** `key` for the orthogonal R_l; `model`, linear, with classes of one
    size (which its arrays do not show) and no padding in depth.

    **Raises:** `ValueError` where K is no power of two, d < K, or the examples are no
    multiple of K.
    """
    num_classes = model.num_classes
    per_class, rest = divmod(model.features.shape[1], num_classes)
    if rest:
        raise ValueError(
            "Hadamard initialisation needs classes of one size, but "
            f"{model.features.shape[1]} examples are no multiple of {num_classes}."
        )
    values = jnp.linalg.svd(model.logits(), compute_uv=False)[: num_classes - 1]
    return hadamard(
        key, values, per_class=per_class, width=model.width, depth=model.depth
    )


def near_structure(
    key: PRNGKey,
    structure: SquareMatrix,
    *,
    per_class: ClassSizes,
    width: int,
    depth: int,
    norm: RealLike,
    perturbation: RealLike = 0.0,
    bottleneck: bool = False,
) -> DeepUFM:
    """Returns a balanced model whose logits are a structure, then perturbs its layers.

    Z = `norm`·S/‖S‖_F with S the structure, each column once for every example of its
    class. Every layer then gets a Gaussian matrix of `perturbation` times its norm.

    **Arguments:** `structure` (K, K) class-mean logits, such as `simplex_etf`,
    `cross_polytope` or `regular_polygon`; `norm` ‖Z‖_F; `perturbation` >= 0, relative;
    `per_class`, `width`, `depth`, `bottleneck` as in `gaussian`.

    **Raises:** `ValueError` as `balanced`, and for a norm or perturbation out of range.

    !!! example
        near_structure(key, cross_polytope(8), per_class=1, width=8, depth=3, norm=50.0)
    """
    check_positive("norm", norm)
    if not isinstance(perturbation, Tracer) and not 0 <= perturbation < np.inf:
        raise ValueError(
            f"Argument `perturbation` must be finite and at least 0, but is "
            f"{perturbation}."
        )
    columns = structure[:, class_labels(structure.shape[0], per_class)]
    logits = norm * columns / frobenius_norm(columns)
    model = balanced(key, logits, width=width, depth=depth, bottleneck=bottleneck)

    def perturb(layer, number):
        noise = draw(key, _PERTURBATION + number, *layer.shape)
        size = perturbation * frobenius_norm(layer) / frobenius_norm(noise)
        return layer + size * noise

    hidden = [perturb(layer, 2 + index) for index, layer in enumerate(model.hidden)]
    return DeepUFM(
        head=perturb(model.head, 1),
        hidden=jnp.stack(hidden) if hidden else model.hidden,
        features=perturb(model.features, 0),
    )


def alternating_modes(num_classes: int, gamma: RealLike, delta: RealLike) -> Modes:
    """Returns a = (γ, δ, γ, ..., δ, γ), K/2 times γ and K/2 - 1 times δ (P1 eq. 49).

    δ = γ is neural collapse, δ = 0 the cross-polytope. From a ratio γ/δ above
    (K/(K-2))^{(L+1)/(L-1)} on it grows for ever, and the KL divergence with it (P1
    Fig. 10).

    **Arguments:** `num_classes` K, even; `gamma`, `delta` >= 0.

    **Raises:** `ValueError` for an odd K, or a value that is negative or not finite.

    !!! example
        start = log_modes(alternating_modes(16, gamma=0.2, delta=0.1))
    """
    if num_classes < 2 or num_classes % 2:
        raise ValueError(f"Argument `num_classes` must be even, but is {num_classes}.")
    pair = jnp.asarray([gamma, delta], float)
    check_modes("(gamma, delta)", pair)
    return jnp.tile(pair, num_classes // 2)[: num_classes - 1]


def layer_modes(a: Modes, depth: int) -> Float[Array, "matrices modes"]:
    """Returns the balanced alpha^(l) = a^{1/(L+1)}, (L+1, modes) (P1 eq. 42).

    The state of `LayerwiseHadamardFlow` that follows `HadamardFlow`. The derivative at
    a_i = 0, infinite, counts as 0.

    **Arguments:** `a` >= 0 in the matrix flow's units; `depth` L.

    **Raises:** `ValueError` for a depth that is no whole number >= 1, or an entry of
    `a` that is negative or not finite.
    """
    if depth != int(depth) or depth < 1:
        raise ValueError(
            f"Argument `depth` must be a whole number, at least 1, but is {depth}."
        )
    check_modes("a", a)
    positive = a > 0
    root = jnp.where(positive, a, 1) ** (1 / (depth + 1))
    return jnp.broadcast_to(jnp.where(positive, root, 0), (int(depth) + 1, *a.shape))


@functools.partial(jax.jit, static_argnums=(4, 5, 6))
def _build(key, left, alpha, right, width, pad_width, pad_depth) -> DeepUFM:
    """Returns the model W_l = R_{l+1} diag(alpha_l) R_lᵀ between the given vectors."""
    depth, rank = alpha.shape[0] - 1, alpha.shape[1]
    dtype = alpha.dtype
    rotations = [
        rotation(key, _FIRST_ROTATION + layer, width, width)[:, :rank].astype(dtype)
        for layer in range(depth)
    ]
    hidden = [
        (rotations[layer + 1] * alpha[layer + 1][None, :]) @ rotations[layer].T
        for layer in range(depth - 1)
    ]
    grow = 0 if pad_width is None else pad_width - width
    padding = 0 if pad_depth is None else pad_depth - depth
    full = width + grow
    square = jnp.zeros((0, full, full), dtype)
    if hidden:
        square = jnp.pad(jnp.stack(hidden), ((0, 0), (0, grow), (0, grow)))
    frozen = jnp.broadcast_to(jnp.eye(full, dtype=dtype), (padding, full, full))
    head = (left * alpha[depth][None, :]) @ rotations[-1].T
    features = (rotations[0] * alpha[0][None, :]) @ right.T
    return DeepUFM(
        head=jnp.pad(head, ((0, 0), (0, grow))),
        hidden=jnp.concatenate([square, frozen]),
        features=jnp.pad(features, ((0, grow), (0, 0))),
    )
