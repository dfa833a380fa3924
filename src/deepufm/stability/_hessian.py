"""Second derivatives of a linear model's loss, block by block, without autodiff.

With left products A_l = W_L ... W_{l+1}, right ones B_l = W_{l-1} ... W_1 H_1 and
M_lm = W_{l-1} ... W_{m+1} between (all empty products are identities; W_0 is H_1), a
change δ of the parameters changes the logits by

    sum_l A_l δ_l B_l + sum_{l>m} A_l δ_l M_lm δ_m B_m + ...

so that Q = dZ/dθ has the blocks A_l[k,i] B_l[j,n] and, with the residual R held, Q^T R
the derivative blocks C_lm[i,q] M_lm[j,p], C_lm = A_l^T R B_m^T, between W_l[i,j] and
W_m[p,q]. NumPy, for a few thousand parameters: compiling costs more than these sums.
"""

import numpy as np

from ..models import DeepUFM


def layers_of(model: DeepUFM) -> list[np.ndarray]:
    """Returns H_1, W_1, ..., W_L as NumPy arrays of doubles."""
    arrays = [model.features, *model.hidden, model.head]
    return [np.asarray(x, float) for x in arrays]


class LinearHessian:
    """Q, and the derivative of Q^T R with R held, at one model.

    Parameters are flattened as `jax.flatten_util.ravel_pytree` does: head, hidden
    layers, features, each row by row.
    """

    def __init__(self, layers: list[np.ndarray]):
        depth = len(layers) - 1
        self.layers = layers
        self.lefts: list[np.ndarray] = [np.eye(layers[-1].shape[0])]
        for layer in layers[:0:-1]:
            self.lefts.insert(0, self.lefts[0] @ layer)
        self.rights: list[np.ndarray] = [np.eye(layers[0].shape[1])]
        for layer in layers[:-1]:
            self.rights.append(layer @ self.rights[-1])
        order = [depth, *range(1, depth), 0]
        ends = np.cumsum([layers[i].size for i in order])
        self.slices = {
            i: slice(end - layers[i].size, end)
            for i, end in zip(order, ends, strict=True)
        }
        self.size = int(ends[-1])

    @property
    def logits(self) -> np.ndarray:
        """Z, (K, N)."""
        return self.lefts[0] @ self.layers[0]

    def flat(self, blocks: list[np.ndarray]) -> np.ndarray:
        """Returns one vector of H_1, W_1, ..., W_L."""
        vector = np.empty(self.size)
        for i, block in enumerate(blocks):
            vector[self.slices[i]] = block.ravel()
        return vector

    def pulled(self, residual: np.ndarray) -> np.ndarray:
        """Returns Q^T residual, (P,)."""
        return self.flat(
            [a.T @ residual @ b.T for a, b in zip(self.lefts, self.rights, strict=True)]
        )

    def seen(self) -> np.ndarray:
        """Returns Q, (K, N, P)."""
        rows, examples = self.logits.shape
        seen = np.empty((rows, examples, self.size))
        for index, (a, b) in enumerate(zip(self.lefts, self.rights, strict=True)):
            block = np.einsum("ki,jn->knij", a, b)
            seen[:, :, self.slices[index]] = block.reshape(rows, examples, -1)
        return seen

    def held(self, residual: np.ndarray) -> np.ndarray:
        """Returns the derivative of Q^T R, R held, (P, P)."""
        matrix = np.zeros((self.size, self.size))
        for low in range(len(self.layers)):
            between = np.eye(self.layers[low].shape[0])
            for high in range(low + 1, len(self.layers)):
                corner = self.lefts[high].T @ residual @ self.rights[low].T
                block = np.einsum("iq,jp->ijpq", corner, between)
                block = block.reshape(self.layers[high].size, self.layers[low].size)
                matrix[self.slices[high], self.slices[low]] = block
                matrix[self.slices[low], self.slices[high]] = block.T
                between = self.layers[high] @ between
        return matrix
