"""Directions in which the parameters of a linear model move, and its logits do not.

Between W_l and W_{l+1} any invertible matrix may be slipped in. At the l-th of these
L interfaces (W_0 is the features H_1, W_L the head) a matrix X, (d, d), moves

    δW_{l+1} = -W_{l+1} X,    δW_l = X W_l,

and Z = W_L ... W_1 H_1 stays. Of all X the skew ones turn the hidden units: the norm
stays as well, and with it everything that the flow does. Symmetric ones move norm from
layer to layer, and change the imbalance W_{l+1}^T W_{l+1} - W_l W_l^T, which gradient
flow conserves. In a balanced model both kinds are orthogonal to each other.

With r singular values that are not zero in every layer of a balanced model, those X
act that are not zero on both sides of all of them: of each interface

    d(d-1)/2 - (d-r)(d-r-1)/2 skew ones,    d(d+1)/2 - (d-r)(d-r+1)/2 symmetric ones.

X is an array (L, d, d), interface l at index l.
"""

from dataclasses import dataclass

import numpy as np

from ..models import DeepUFM


@dataclass(frozen=True)
class GaugeDirections:
    """Orthonormal gauge directions at a model, as columns, (parameters, directions).

    Parameters are flattened as `jax.flatten_util.ravel_pytree` does: head, hidden
    layers, features, each row by row.

    - `rotations`: those of skew X.
    - `scalings`: what symmetric X add to them.
    """

    rotations: np.ndarray
    scalings: np.ndarray

    @property
    def all(self) -> np.ndarray:
        """Both, an orthonormal basis of the tangent space of the fibre."""
        return np.concatenate([self.rotations, self.scalings], axis=1)


def gauge_action(layers, generators):
    """Returns (δhead, δhidden, δfeatures) of X.

    **Arguments:** `layers` (head, hidden, features); `generators` X, (L, d, d), with
    any leading axes.
    """
    head, hidden, features = layers
    first, last = generators[..., 0, :, :], generators[..., -1, :, :]
    moved = generators[..., 1:, :, :] @ hidden - hidden @ generators[..., :-1, :, :]
    return -(head @ last), moved, first @ features


def gauge_directions(
    model: DeepUFM, *, rank_tolerance: float = 1e-10
) -> GaugeDirections:
    """Returns orthonormal bases of the directions that leave the logits alone.

    **Arguments:**

    - `model`: linear, with no padding in depth; P parameters.
    - `rank_tolerance`: directions that unit X move by less than this, relative to the
        largest, are taken for none.

    **Returns:** a `GaugeDirections`, found by singular value decompositions of
    matrices (P, L·d(d±1)/2).

    !!! example
        directions = gauge_directions(model)
        directions.rotations.shape[1], directions.scalings.shape[1]
    """
    arrays = (model.head, model.hidden, model.features)
    layers = [np.asarray(x, float) for x in arrays]
    skew, symmetric = _matrices(model.width)
    rotations = _span(_tangents(layers, skew), None, rank_tolerance)
    scalings = _span(_tangents(layers, symmetric), rotations, rank_tolerance)
    return GaugeDirections(rotations, scalings)


def _matrices(width: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns orthonormal bases of skew and of symmetric matrices, (count, d, d)."""
    rows, columns = np.triu_indices(width, 1)
    count = np.arange(len(rows))
    skew = np.zeros((len(rows), width, width))
    skew[count, rows, columns] = np.sqrt(0.5)
    symmetric = np.concatenate([skew + skew.swapaxes(1, 2), np.zeros((width,) * 3)])
    diagonal = np.arange(width)
    symmetric[len(rows) + diagonal, diagonal, diagonal] = 1
    return skew - skew.swapaxes(1, 2), symmetric


def _tangents(layers, matrices) -> np.ndarray:
    """Returns what each matrix moves at each interface, (parameters, tangents)."""
    columns, depth = [], len(layers[1]) + 1
    for interface in range(depth):
        generators = np.zeros((len(matrices), depth, *matrices.shape[1:]))
        generators[:, interface] = matrices
        moved = gauge_action(layers, generators)
        columns.append(np.concatenate([x.reshape(len(x), -1) for x in moved], axis=1))
    return np.concatenate(columns).T


def _span(tangents, without, rank_tolerance) -> np.ndarray:
    """Returns an orthonormal basis of the columns' span, orthogonal to `without`."""
    if tangents.shape[1] == 0:
        return tangents
    # Of the tangents themselves: what is left of them may be rounding alone.
    largest = np.linalg.norm(tangents, 2)
    if without is not None:
        for _ in range(2):  # once more, to be orthogonal to the last digit
            tangents = tangents - without @ (without.T @ tangents)
    basis, values, _ = np.linalg.svd(tangents, full_matrices=False)
    return basis[:, values > rank_tolerance * largest]
