"""Losses and gradient flows of linear networks in plain NumPy, to check Jacobians by.

Nothing here comes from the package: gradients by complex steps, Jacobians by central
differences.
"""

import numpy as np


def unflatten(flat, classes, width, depth):
    """Returns head, hidden layers, features of vectors in `ravel_pytree`'s order."""
    lead, ends = flat.shape[:-1], np.cumsum([classes * width, (depth - 1) * width**2])
    head, hidden, features = np.split(flat, ends, axis=-1)
    return (
        head.reshape(*lead, classes, width),
        hidden.reshape(*lead, depth - 1, width, width),
        features.reshape(*lead, width, -1),
    )


def logits(flat, classes, width, depth):
    head, hidden, outputs = unflatten(flat, classes, width, depth)
    for layer in range(depth - 1):
        outputs = hidden[..., layer, :, :] @ outputs
    return head @ outputs


def cross_entropy(z, labels):
    own = z[..., labels, np.arange(len(labels))]
    total = np.sum(np.exp(z - own[..., None, :]), axis=-2)
    return np.sum(np.log(total), axis=-1)


def squared_error(z, labels):
    return np.sum((np.eye(z.shape[-2])[:, labels] - z) ** 2, axis=(-2, -1)) / 2


def force(flat, loss, labels, sizes, decay=0.0):
    """Returns dθ/dt, minus the gradient, by complex steps."""
    step = 1e-30
    moved = flat + 1j * step * np.eye(len(flat))
    return -loss(logits(moved, *sizes), labels).imag / step - decay * flat


def differences(function, at, step=1e-4):
    """Returns the Jacobian by central differences of fourth order."""
    columns = []
    for i in range(len(at)):
        e = np.zeros(len(at))
        e[i] = step
        near = function(at + e) - function(at - e)
        far = function(at + 2 * e) - function(at - 2 * e)
        columns.append((8 * near - far) / (12 * step))
    return np.stack(columns, axis=1)


def gauge_tangents(flat, classes, width, depth, parity):
    """Returns d/dε of θ, with I + εX slipped in, for E_ij + parity·E_ji everywhere."""
    found = []
    for interface in range(depth):
        for i in range(width):
            for j in range(i + 1):
                x = np.zeros((width, width))
                x[i, j] += 1
                x[j, i] += parity
                head, hidden, features = unflatten(0 * flat, classes, width, depth)
                old_head, old, old_features = unflatten(flat, classes, width, depth)
                if interface == 0:
                    features += x @ old_features
                else:
                    hidden[interface - 1] += x @ old[interface - 1]
                if interface == depth - 1:
                    head -= old_head @ x
                else:
                    hidden[interface] -= old[interface] @ x
                parts = [head.ravel(), hidden.ravel(), features.ravel()]
                found.append(np.concatenate(parts))
    return np.stack(found, axis=1)


def complement(columns):
    """Returns an orthonormal basis of what is orthogonal to the columns."""
    basis, values, _ = np.linalg.svd(columns)
    rank = np.sum(values > 1e-9 * values[0])
    return basis[:, rank:]
