"""Initial models: Gaussian, Hadamard (P1 Thm 4.2) and balanced (P1 Def. 2.1).

Random numbers: the key is folded with the layer, then with the row, and each row is a
prefix of one unbounded one-dimensional draw. A seed therefore gives the same numbers
alone, in a batch, padded in depth or width, and on any number of devices; larger n, d
or L extend the arrays and change none of their old entries (before scaling).

Balanced starts share singular values: W_l = R_{l+1} diag(alpha) R_l^T with
alpha_i = sigma_i(Z)^{1/(L+1)} and orthogonal R_l, so W_{l+1}^T W_{l+1} = W_l W_l^T.
"""

import functools
import numbers

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._types import Logits, Modes, PRNGKey, RealLike, Tracer
from ..geometry import sylvester_hadamard
from ._deep_ufm import DeepUFM

# Layer numbers for `fold_in`. The head's does not depend on the depth, so that padding
# or deepening a model changes none of its other layers.
_FEATURES, _HEAD, _FIRST_HIDDEN, _FIRST_ROTATION = 0, 1, 2, 2**16

_Size = int | Int[Array, ""] | np.integer


def gaussian(
    key: PRNGKey,
    *,
    num_classes: int,
    per_class: int,
    width: _Size,
    depth: _Size,
    scale: RealLike = 1.0,
    std: RealLike | None = None,
    pad_width: int | None = None,
    pad_depth: int | None = None,
    bottleneck: bool = False,
) -> DeepUFM:
    """Draws every entry from a centred normal distribution (P1 Thm 4.5, Figs 2 and 11).

    **Arguments:**

    - `num_classes`, `per_class`, `width`, `depth`: K, n, d and L.
    - `scale`: entries are `scale`·N(0, 1/d).
    - `std`: plain standard deviation of every entry instead of `scale`/√d.
    - `pad_width`, `pad_depth`: sizes of the arrays where they exceed d and L; rows and
        columns beyond d are zero, layers beyond L identities. `width` and `depth` may
        then be traced, for `vmap` over both. Pass the true depth to `GradientFlow`.
    - `bottleneck`: allow d < K, where neural collapse may be out of reach.

    **Raises:** `ValueError` for sizes below 1, d < K without `bottleneck`, a padding
    smaller than what it pads, and a scale or std that is zero, negative or not finite.
    """
    _check_sizes(num_classes, per_class, width, depth, pad_width, pad_depth, bottleneck)
    if std is not None and not (isinstance(scale, numbers.Real) and scale == 1.0):
        raise ValueError("Give either `scale` or `std`, not both.")
    _check_positive("scale", scale)
    if std is not None:
        _check_positive("std", std)
    rows = _static_size("width", width) if pad_width is None else pad_width
    layers = _static_size("depth", depth) if pad_depth is None else pad_depth
    spread = std if std is not None else scale / jnp.sqrt(jnp.asarray(width, float))
    return _gaussian(
        key,
        _within(jnp.asarray(spread, float), 0, jnp.inf, "scale or std"),
        _within(jnp.asarray(width), 1, rows, "width"),
        _within(jnp.asarray(depth), 1, layers, "depth"),
        num_classes,
        num_classes * per_class,
        rows,
        layers,
    )


# One program instead of a dozen small ones: a first call takes a third of the time.
@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7))
def _gaussian(key, spread, width, depth, num_classes, examples, rows, layers):
    """Draws a model into arrays of `rows` and `layers`; d, L, the spread may vary."""
    inside = jnp.arange(rows) < width

    def square(layer):
        drawn = _draw(key, _FIRST_HIDDEN + layer, rows, rows)
        drawn = jnp.where(inside[:, None] & inside[None, :], spread * drawn, 0)
        return jnp.where(layer < depth - 1, drawn, jnp.eye(rows))

    head = spread * _draw(key, _HEAD, num_classes, rows)
    features = spread * _draw(key, _FEATURES, rows, examples)
    return DeepUFM(
        head=jnp.where(inside[None, :], head, 0),
        hidden=jax.vmap(square)(jnp.arange(layers - 1)),
        features=jnp.where(inside[:, None], features, 0),
    )


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
    num_classes = a.shape[0] + 1
    _check_sizes(num_classes, per_class, width, depth, pad_width, pad_depth, False)
    check_modes("a", a)
    if not isinstance(a, Tracer) and not bool(jnp.any(a > 0)):
        raise ValueError(
            "At least one a_i must be positive: a = 0 is an equilibrium, from which no "
            "mode grows."
        )
    left = sylvester_hadamard(num_classes).astype(a.dtype)[:, 1:] / np.sqrt(num_classes)
    right = jnp.repeat(left, per_class, axis=0) / np.sqrt(per_class)
    return _balanced(key, left, a, right, width, depth, pad_width, pad_depth)


def balanced(
    key: PRNGKey,
    logits: Logits,
    *,
    width: int,
    depth: int,
    pad_width: int | None = None,
    pad_depth: int | None = None,
) -> DeepUFM:
    """Returns a balanced model with the given logit matrix (P1 Def. 2.1, eq. 42).

    **Arguments:** `logits` (K, N), any matrix; `width` d >= K; `depth` L; paddings as
    in `gaussian`.

    **Raises:** `ValueError` where d < K or the logits are not finite.
    """
    _check_sizes(logits.shape[0], 1, width, depth, pad_width, pad_depth, False)
    if not isinstance(logits, Tracer) and not bool(jnp.all(jnp.isfinite(logits))):
        raise ValueError("Argument `logits` must be finite, but holds NaN or inf.")
    left, values, right = jnp.linalg.svd(logits, full_matrices=False)
    return _balanced(key, left, values, right.T, width, depth, pad_width, pad_depth)


def check_modes(name: str, a: Float[Array, " modes"]) -> None:
    """Raises `ValueError` where a concrete `a` has a negative or non-finite entry."""
    if isinstance(a, Tracer):
        return
    values = np.asarray(a)
    wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if wrong.size:
        index = int(wrong[0])
        raise ValueError(
            f"Every entry of `{name}` must be finite and at least 0, but entry {index} "
            f"is {values[index]}. Singular values carry no sign: pass magnitudes."
        )


@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7))
def _balanced(key, left, values, right, width, depth, pad_width, pad_depth) -> DeepUFM:
    """Spreads left·diag(values)·rightᵀ evenly over the L + 1 layers."""
    rank = values.shape[0]
    positive = values > 0
    safe = jnp.where(positive, values, 1)
    alpha = jnp.where(positive, safe ** (1 / (depth + 1)), 0)
    rotations = [_rotation(key, layer, width)[:, :rank] for layer in range(depth)]
    rotations = [rotation.astype(values.dtype) for rotation in rotations]
    hidden = [
        (rotations[layer + 1] * alpha[None, :]) @ rotations[layer].T
        for layer in range(depth - 1)
    ]
    grow = 0 if pad_width is None else pad_width - width
    padding = 0 if pad_depth is None else pad_depth - depth
    full = width + grow
    square = jnp.zeros((0, full, full), values.dtype)
    if hidden:
        square = jnp.pad(jnp.stack(hidden), ((0, 0), (0, grow), (0, grow)))
    frozen = jnp.broadcast_to(jnp.eye(full, dtype=values.dtype), (padding, full, full))
    head = (left * alpha[None, :]) @ rotations[-1].T
    features = (rotations[0] * alpha[None, :]) @ right.T
    return DeepUFM(
        head=jnp.pad(head, ((0, 0), (0, grow))),
        hidden=jnp.concatenate([square, frozen]),
        features=jnp.pad(features, ((0, grow), (0, 0))),
    )


def _draw(key, layer, num_rows, num_columns) -> Float[Array, "rows columns"]:
    """Standard normal entries; row r is a prefix of the stream of (layer, r)."""
    layer_key = jax.random.fold_in(key, layer)

    def row(index):
        return jax.random.normal(jax.random.fold_in(layer_key, index), (num_columns,))

    return jax.vmap(row)(jnp.arange(num_rows))


def _rotation(key, layer, width) -> Float[Array, "width width"]:
    """A Haar-distributed orthogonal matrix (QR with the signs of R made positive)."""
    q, r = jnp.linalg.qr(_draw(key, _FIRST_ROTATION + layer, width, width))
    signs = jnp.where(jnp.diagonal(r) < 0, -1, 1).astype(q.dtype)
    return q * signs[None, :]


def _within(value, least, most, name: str):
    """Checks a traced value when it is known; concrete ones were checked before."""
    if not isinstance(value, Tracer):
        return value
    wrong = ~((value >= least) & (value <= most) & (value > 0))
    return eqx.error_if(
        value, wrong, f"`{name}` is outside its padding, or not positive"
    )


def _static_size(name: str, size: _Size) -> int:
    if isinstance(size, Tracer):
        raise ValueError(
            f"A traced `{name}` needs `pad_{name}`, the largest {name} of the batch."
        )
    return int(size)


def _check_positive(name: str, value) -> None:
    if isinstance(value, Tracer):
        return
    if not np.isfinite(value) or value <= 0:
        raise ValueError(
            f"Argument `{name}` must be positive and finite, but is {value}. At zero "
            "every layer vanishes, which is an equilibrium of the flow."
        )


def _check_sizes(
    num_classes, per_class, width, depth, pad_width, pad_depth, bottleneck
) -> None:
    smallest = {"num_classes": 2, "per_class": 1, "width": 1, "depth": 1}
    given = {
        "num_classes": num_classes,
        "per_class": per_class,
        "width": width,
        "depth": depth,
    }
    for name, least in smallest.items():
        size = given[name]
        if isinstance(size, Tracer):
            continue
        if size != int(size):
            raise ValueError(
                f"Argument `{name}` must be a whole number, but is {size}."
            )
        if size < least:
            raise ValueError(
                f"Argument `{name}` must be at least {least}, but is {size}."
            )
    if isinstance(width, Tracer) or isinstance(depth, Tracer):
        return
    if width < num_classes and not bottleneck:
        raise ValueError(
            f"Argument `width` must be at least num_classes = {num_classes}, but is "
            f"{width}. Use a wider model, or `bottleneck=True` with `gaussian`."
        )
    for name, size, pad in (("width", width, pad_width), ("depth", depth, pad_depth)):
        if pad is not None and pad < size:
            raise ValueError(
                f"Argument `pad_{name}` must be at least {name} = {size}, but is {pad}."
            )
