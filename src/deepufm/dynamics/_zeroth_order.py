"""The flow of one hidden layer near the origin, in closed form (P2 Thm 8, App. D.6).

From entries of size ε the softmax stays uniform to zeroth order in ε, so that the
residual is the constant M = Y - 11ᵀ/K, and

    dW/dt = M Hᵀ,   dH/dt = Wᵀ M

is linear. With M = U diag(s) Vᵀ the exact solution is

    W(t)  = W(0)  + U (cosh(s t) - 1) Uᵀ W(0)  + U sinh(s t) Vᵀ H(0)ᵀ
    H(t)ᵀ = H(0)ᵀ + V (cosh(s t) - 1) Vᵀ H(0)ᵀ + V sinh(s t) Uᵀ W(0),

for any class sizes. Balanced classes have s = √n, K-1 times: P2's cosh(√n t) and
sinh(√n t)/√n, whose square roots the paper's extracted text has lost. As long as the
entries stay O(ε) the relative error is O(ε²).
"""

import jax.numpy as jnp

from .._types import RealLike
from ..models import ClassSizes, DeepUFM, class_labels, class_sizes


def zeroth_order_solution(
    model: DeepUFM, time: RealLike, per_class: ClassSizes
) -> DeepUFM:
    """Returns W(t), H(t) of the linear flow that cross-entropy has at the origin.

    **Arguments:** `model` the start, of depth 1; `time` t in the flow's own units, with
    exp(√n t)·‖model‖ still small; `per_class` n or the class sizes.

    **Raises:** `ValueError` for a deeper model, whose flow near the origin is not
    linear, or features that are not `per_class` columns a class.
    """
    if model.depth != 1:
        raise ValueError(
            f"The zeroth-order solution is that of depth 1, but the model has depth "
            f"{model.depth}. For balanced deeper layers see `SigmoidalFlow.linearised`."
        )
    num_classes = model.num_classes
    sizes = class_sizes(num_classes, per_class)
    if sum(sizes) != model.features.shape[1]:
        raise ValueError(
            f"Argument `per_class` = {per_class} makes {sum(sizes)} examples of "
            f"{num_classes} classes, but the features have {model.features.shape[1]}."
        )
    dtype = model.head.dtype
    one_hot = jnp.eye(num_classes, dtype=dtype)[:, class_labels(num_classes, sizes)]
    left, values, right = jnp.linalg.svd(one_hot - 1 / num_classes, full_matrices=False)
    angle = values * jnp.asarray(time, dtype)
    # cosh - 1 without cancellation
    cosh, sinh = 2 * jnp.sinh(angle / 2) ** 2, jnp.sinh(angle)
    head, features = left.T @ model.head, right @ model.features.T
    return DeepUFM(
        head=model.head + left @ (cosh[:, None] * head + sinh[:, None] * features),
        hidden=model.hidden,
        features=model.features
        + (right.T @ (cosh[:, None] * features + sinh[:, None] * head)).T,
    )
