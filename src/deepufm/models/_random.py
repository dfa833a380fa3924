"""Random initial models: Gaussian (P1 Thm 4.5, P2 section 6) and orthogonal.

Random numbers: the key is folded with the layer, then with the row, and each row is a
prefix of one unbounded one-dimensional draw. A seed therefore gives the same numbers
alone, in a batch, padded in depth or width, and on any number of devices; larger n, d
or L extend the arrays and change none of their old entries (before scaling).
"""

import functools
import numbers

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._types import PRNGKey, RealLike
from ._class_sizes import ClassSizes, class_sizes
from ._deep_ufm import DeepUFM
from ._sizes import Size, check_positive, check_sizes, static_size, within

# Layer numbers for `fold_in`. The head's does not depend on the depth, so that padding
# or deepening a model changes none of its other layers.
_FEATURES, _HEAD, _FIRST_HIDDEN = 0, 1, 2


def gaussian(
    key: PRNGKey,
    *,
    num_classes: int,
    per_class: ClassSizes,
    width: Size,
    depth: Size,
    scale: RealLike = 1.0,
    std: RealLike | None = None,
    pad_width: int | None = None,
    pad_depth: int | None = None,
    bottleneck: bool = False,
) -> DeepUFM:
    """Draws every entry from a centred normal distribution (P1 Thm 4.5, Figs 2 and 11).

    **Arguments:**

    - `num_classes`, `width`, `depth`: K, d and L.
    - `per_class`: n, or the K class sizes (n_1, ..., n_K).
    - `scale`: entries are `scale`·N(0, 1/d).
    - `std`: plain standard deviation of every entry instead of `scale`/√d.
    - `pad_width`, `pad_depth`: sizes of the arrays where they exceed d and L; rows and
        columns beyond d are zero, layers beyond L identities. `width` and `depth` may
        then be traced, for `vmap` over both. Pass the true depth to `GradientFlow`.
    - `bottleneck`: allow d < K, where neural collapse may be out of reach.

    **Raises:** `ValueError` for sizes below 1, d < K without `bottleneck`, a padding
    smaller than what it pads, and a scale or std that is zero, negative or not finite.
    """
    check_sizes(num_classes, width, depth, pad_width, pad_depth, bottleneck)
    if std is not None and not (isinstance(scale, numbers.Real) and scale == 1.0):
        raise ValueError("Give either `scale` or `std`, not both.")
    check_positive("scale", scale)
    if std is not None:
        check_positive("std", std)
    spread = std if std is not None else scale / jnp.sqrt(jnp.asarray(width, float))
    return _gaussian(
        key,
        within(jnp.asarray(spread, float), 0, jnp.inf, "scale or std"),
        *_arrays(num_classes, per_class, width, depth, pad_width, pad_depth),
    )


# One program instead of a dozen small ones: a first call takes a third of the time.
@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7))
def _gaussian(key, spread, width, depth, num_classes, examples, rows, layers):
    """Draws a model into arrays of `rows` and `layers`; d, L, the spread may vary."""
    inside = jnp.arange(rows) < width

    def square(layer):
        drawn = draw(key, _FIRST_HIDDEN + layer, rows, rows)
        drawn = jnp.where(inside[:, None] & inside[None, :], spread * drawn, 0)
        return jnp.where(layer < depth - 1, drawn, jnp.eye(rows))

    head = spread * draw(key, _HEAD, num_classes, rows)
    features = spread * draw(key, _FEATURES, rows, examples)
    return DeepUFM(
        head=jnp.where(inside[None, :], head, 0),
        hidden=jax.vmap(square)(jnp.arange(layers - 1)),
        features=jnp.where(inside[:, None], features, 0),
    )


def small_gaussian(
    key: PRNGKey,
    *,
    num_classes: int,
    width: int | None = None,
    per_class: ClassSizes = 1,
    depth: int = 1,
    delta: RealLike = 6.0,
) -> DeepUFM:
    """Draws the random start of P2's experiments: entries N(0, 1/K), times e^{-delta}.

    The standard deviation is e^{-delta}/√K at every width: 1.24e-3 at K = 4 and
    delta = 6, the paper's "about 1e-3". (Its section 6 prints epsilon = e^{-6}/K, a
    square root lost, and means the 1/√K of the variance; E.3 has epsilon = e^{-6}
    beside the variance 1/K. The two agree only as read here.)

    **Arguments:** `num_classes` K; `width` d, K if `None`; `per_class`, `depth` as in
    `gaussian`; `delta` 6 for Fig. 2, 0 for the "standard scale" of Figs 6 and 7.

    **Raises:** `ValueError` as `gaussian`.
    """
    std = jnp.exp(-jnp.asarray(delta, float)) / np.sqrt(num_classes)
    return gaussian(
        key,
        num_classes=num_classes,
        per_class=per_class,
        width=num_classes if width is None else width,
        depth=depth,
        std=std,
    )


def orthogonal(
    key: PRNGKey,
    *,
    num_classes: int,
    per_class: ClassSizes,
    width: Size,
    depth: Size,
    scale: RealLike = 1.0,
    pad_width: int | None = None,
    pad_depth: int | None = None,
    bottleneck: bool = False,
) -> DeepUFM:
    """Draws every layer orthogonal: all its singular values are `scale`.

    Square layers are Haar distributed; the head and the features have orthonormal rows
    or columns, whichever are fewer (Saxe et al. 2014's random orthogonal start).

    **Arguments:** as `gaussian`; `width` and `depth` may be traced where padded.

    **Raises:** `ValueError` as `gaussian`.
    """
    check_sizes(num_classes, width, depth, pad_width, pad_depth, bottleneck)
    check_positive("scale", scale)
    return _orthogonal(
        key,
        within(jnp.asarray(scale, float), 0, jnp.inf, "scale"),
        *_arrays(num_classes, per_class, width, depth, pad_width, pad_depth),
    )


@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7))
def _orthogonal(key, scale, width, depth, num_classes, examples, rows, layers):
    def square(layer):
        drawn = rotation(key, _FIRST_HIDDEN + layer, rows, width)
        inside = jnp.arange(rows) < width
        drawn = jnp.where(inside[:, None] & inside[None, :], scale * drawn, 0)
        return jnp.where(layer < depth - 1, drawn, jnp.eye(rows))

    return DeepUFM(
        head=scale * _semi_orthogonal(key, _HEAD, num_classes, rows, width),
        hidden=jax.vmap(square)(jnp.arange(layers - 1)),
        features=scale * _semi_orthogonal(key, _FEATURES, examples, rows, width).T,
    )


def _semi_orthogonal(key, layer, count, rows, width) -> Float[Array, "count rows"]:
    """Returns `count` vectors of `width` entries, zero-padded to `rows`.

    Orthonormal where count <= width, else with orthonormal components over them.
    """
    inside = jnp.arange(rows) < width
    # Rows of a Haar matrix of size `width`; of size `count`, its first columns.
    tall = rotation(key, layer, count, count)
    tall = jnp.pad(tall, ((0, 0), (0, max(0, rows - count))))[:, :rows]
    wide = jnp.pad(
        rotation(key, layer, rows, width), ((0, max(0, count - rows)), (0, 0))
    )
    vectors = jnp.where(count <= width, wide[:count], tall)
    return jnp.where(inside[None, :], vectors, 0)


def _arrays(num_classes, per_class, width, depth, pad_width, pad_depth) -> tuple:
    """Returns d and L, which may be traced, then K, the examples and array sizes."""
    rows = static_size("width", width) if pad_width is None else pad_width
    layers = static_size("depth", depth) if pad_depth is None else pad_depth
    return (
        within(jnp.asarray(width), 1, rows, "width"),
        within(jnp.asarray(depth), 1, layers, "depth"),
        num_classes,
        sum(class_sizes(num_classes, per_class)),
        rows,
        layers,
    )


def draw(key, layer, num_rows, num_columns) -> Float[Array, "rows columns"]:
    """Standard normal entries; row r is a prefix of the stream of (layer, r)."""
    layer_key = jax.random.fold_in(key, layer)

    def row(index):
        return jax.random.normal(jax.random.fold_in(layer_key, index), (num_columns,))

    return jax.vmap(row)(jnp.arange(num_rows))


def rotation(key, layer, rows, width) -> Float[Array, "rows rows"]:
    """A Haar-distributed matrix of size `width` (traced or not), in a larger identity.

    QR with the signs of R made positive keeps the two blocks apart.
    """
    inside = jnp.arange(rows) < width
    drawn = draw(key, layer, rows, rows)
    drawn = jnp.where(inside[:, None] & inside[None, :], drawn, jnp.eye(rows))
    q, r = jnp.linalg.qr(drawn)
    signs = jnp.where(jnp.diagonal(r) < 0, -1, 1).astype(q.dtype)
    return q * signs[None, :]
