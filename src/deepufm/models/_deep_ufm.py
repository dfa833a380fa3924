"""The deep unconstrained features model: Z = W_L ... W_1 H_1 (P1 eq. 1).

Conventions a reader could get backwards: column k of `features` (and of the logits) is
one example; classes come in order, n examples each; `hidden[l-1]` is W_l, so
`hidden[0]` acts first and `hidden[-1]` feeds the head.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._types import Logits, RealScalar
from ._activations import AbstractActivation


class DeepUFM(eqx.Module):
    """Parameters of the deep unconstrained features model.

    The model holds no mask: one whose layers are padded (hidden layers by identities,
    width by zeros) computes the same logits, and the flow knows the true depth.
    """

    head: Float[Array, "classes width"]  # W_L
    hidden: Float[Array, "layers width width"]  # W_1 ... W_{L-1}; (0, d, d) at L = 1
    features: Float[Array, "width examples"]  # H_1

    def __check_init__(self):
        width = self.head.shape[-1]
        if self.hidden.shape[-2:] != (width, width) or self.features.shape[-2] != width:
            raise ValueError(
                "The layers of `DeepUFM` must share one width: head (K, d), hidden "
                f"(L-1, d, d), features (d, nK), but have {self.head.shape}, "
                f"{self.hidden.shape} and {self.features.shape}."
            )

    @property
    def num_classes(self) -> int:
        """K, the number of rows of the head."""
        return self.head.shape[-2]

    @property
    def width(self) -> int:
        """d, padding included."""
        return self.head.shape[-1]

    @property
    def depth(self) -> int:
        """L, the number of linear layers after the features, padding included."""
        return self.hidden.shape[-3] + 1

    def logits(
        self,
        activation: AbstractActivation | None = None,
        depth: RealScalar | None = None,
    ) -> Logits:
        """Returns Z, (K, examples).

        **Arguments:**

        - `activation`: what stands between the layers (P1 App. B: after W_1 ...
            W_{L-1}, not on the features); `None` for the linear model, which is
            multiplied from the left, so that every product has K rows.
        - `depth`: the true depth L of a padded model, whose padding is not activated.
            The linear model need not know it.
        """
        # Accelerators would else round float32 products to TF32 or bfloat16.
        with jax.default_matmul_precision("highest"):
            if activation is None:
                left, _ = jax.lax.scan(
                    lambda left, layer: (left @ layer, None),
                    self.head,
                    self.hidden,
                    reverse=True,
                )
                return left @ self.features
            last, _, _ = propagate(self, activation, depth)
            return self.head @ last


def propagate(
    model: DeepUFM, activation: AbstractActivation, depth: RealScalar | None
) -> tuple[
    Float[Array, "width examples"],
    Float[Array, "layers width examples"],
    Float[Array, "layers width examples"],
]:
    """Returns the head's input, the input H_l of every hidden layer, and its gates.

    Gates are the activation's derivatives; those of frozen layers are 1.
    """

    def forward(inputs, layer_and_index):
        layer, index = layer_and_index
        outputs = layer @ inputs
        gates = activation.gate(outputs)
        if depth is not None:
            gates = jnp.where(index < depth - 1, gates, 1)
        return gates * outputs, (inputs, gates)

    indices = jnp.arange(model.hidden.shape[0], dtype=model.head.dtype)
    last, (inputs, gates) = jax.lax.scan(
        forward, model.features, (model.hidden, indices)
    )
    return last, inputs, gates
