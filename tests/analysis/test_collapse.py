import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest

from deepufm.analysis import (
    Balancedness,
    alignment,
    balancedness_defects,
    balancedness_matrices,
    class_means,
    etf_distance,
    etf_distance_from_log,
    hadamard_bases,
    off_diagonal_energy,
    residual_energy,
)

SCALES = [1e-300, 1e-150, 1.0, 1e150, 1e300]

# P2's vectors at K = 8, L = 1: a, and (M̃, dM̃/dt) of P2 B.3.2 from mpmath, 60 digits.
P2_VECTORS = [
    (
        [1, 1, 1, 1.25, 0.01, 0.01, 0.01],
        (0.4853613729020407197208660, 0.004457750321342559649510587),
    ),
    (
        [1, 1, 1, 1, 0.001, 0.001, 0.001],
        (0.4870087819156638089312337, -0.0002024246702160890485165905),
    ),
    (
        [1.5, 1.5, 1.5, 2, 2**-10, 2**-10, 2**-10],
        (0.5007096559600464290211873, 0.002488346879828544449480744),
    ),
    (
        [1, 1, 1, 1.25, 2**-7, 2**-7, 2**-7],
        (0.4876643874023705531278222, 0.004777589262212624361104173),
    ),
]


def hadamard(num_classes):
    """Φ from the digits that i and j have in common."""
    index = np.arange(num_classes)
    return 1.0 - 2.0 * (np.bitwise_count(index[:, None] & index[None, :]) % 2)


def hadamard_logits(a):
    phi = hadamard(len(a) + 1)
    return phi @ np.diag(np.append(0.0, a)) @ phi.T


def off_ones(size, rng):
    """A random orthonormal basis of 1⊥."""
    columns = rng.standard_normal((size, size - 1))
    return np.linalg.qr(columns - columns.mean(axis=0))[0]


def every_distance(logits):
    """The metrics of (K, nK) logits; the alignment is that of their class means."""
    num_classes = logits.shape[0]
    rng = np.random.default_rng(1)
    left = np.linalg.qr(rng.standard_normal((num_classes, 3)))[0]
    right = np.linalg.qr(rng.standard_normal((logits.shape[1], 3)))[0]
    left, right = (jnp.array(basis, dtype=logits.dtype) for basis in (left, right))
    return jnp.stack(
        [
            etf_distance(logits),
            alignment(class_means(logits, num_classes)),
            residual_energy(logits),
            off_diagonal_energy(logits, left, right),
        ]
    )


# Compiled once for each shape.
distances = jax.jit(every_distance)
distance_gradients = jax.jit(jax.jacrev(every_distance))
log_distance_rates = jax.jit(
    lambda log_a, rate: jax.jvp(etf_distance_from_log, (log_a,), (rate,))
)


@pytest.fixture(scope="module")
def logits():
    """Generic logits, K = 6 and n = 3."""
    return np.random.default_rng(0).standard_normal((6, 18))


def test_class_means_average_consecutive_columns(logits):
    expected = [logits[:, 3 * k : 3 * k + 3].mean(axis=1) for k in range(6)]
    means = class_means(jnp.array(logits), 6)
    np.testing.assert_allclose(means, np.stack(expected, axis=1), rtol=1e-14)


def test_distances_agree_with_their_definitions(logits):
    target = np.kron(np.eye(6) - 1 / 6, np.ones((1, 3)))
    # 2 − 2·cos is the same number by another route.
    cosine = np.sum(logits * target) / np.linalg.norm(logits) / np.linalg.norm(target)
    means = np.stack([logits[:, 3 * k : 3 * k + 3].mean(1) for k in range(6)], axis=1)
    nuclear = np.trace(np.linalg.svd(means @ np.eye(6))[1] * np.eye(6))
    rng = np.random.default_rng(4)
    u, v = off_ones(6, rng), np.kron(off_ones(6, rng), np.ones((3, 1))) / 3**0.5
    outside = logits - u @ (u.T @ logits @ v) @ v.T
    rng = np.random.default_rng(1)
    left = np.linalg.qr(rng.standard_normal((6, 3)))[0]
    right = np.linalg.qr(rng.standard_normal((18, 3)))[0]
    core = left.T @ logits @ right
    expected = [
        2 - 2 * cosine,
        np.linalg.norm(means / nuclear - (np.eye(6) - 1 / 6) / 5),
        np.linalg.norm(outside) / np.linalg.norm(logits),
        np.linalg.norm(core - np.diag(np.diag(core))) / np.linalg.norm(logits),
    ]
    np.testing.assert_allclose(distances(logits), expected, rtol=1e-13)


@pytest.mark.parametrize("scale", SCALES)
def test_distances_and_gradients_ignore_scale(logits, scale):
    scaled = logits * scale
    np.testing.assert_allclose(distances(scaled), distances(logits), rtol=1e-13)
    np.testing.assert_allclose(
        distance_gradients(scaled) * scale,
        distance_gradients(logits),
        rtol=1e-11,
        atol=1e-15,
    )


def test_gradients_agree_with_finite_differences(logits):
    step = 1e-6 * np.random.default_rng(2).standard_normal(logits.shape)
    change = distances(logits + step) - distances(logits - step)
    expected = np.einsum("mij,ij->m", distance_gradients(logits), 2 * step)
    np.testing.assert_allclose(change, expected, rtol=1e-6)


def test_collapsed_logits_are_at_distance_zero_with_finite_gradients():
    logits = np.kron(np.eye(6) - 1 / 6, np.full((1, 3), 0.7))
    np.testing.assert_allclose(distances(logits)[:3], 0, atol=1e-15)
    assert np.all(np.isfinite(distance_gradients(logits)))
    np.testing.assert_allclose(distances(-logits)[0], 4, rtol=1e-14)


def test_zero_logits_give_the_documented_values():
    zero = np.zeros((6, 18))
    np.testing.assert_allclose(distances(zero), [1, 1 / 5**0.5, 0, 0], rtol=1e-15)
    assert np.all(np.isfinite(distance_gradients(zero)))


def test_nan_is_not_hidden(logits):
    assert np.all(np.isnan(distances(np.where(logits == logits[2, 5], np.nan, logits))))


@pytest.mark.parametrize("size", [1e-3, 1e-6, 1e-9])
def test_etf_distance_keeps_digits_near_zero(size):
    etf = np.kron(np.eye(6) - 1 / 6, np.ones((1, 3)))
    logits = etf + size * np.random.default_rng(7).standard_normal((6, 18))
    with mp.workdps(40):
        z = mp.matrix(logits.tolist())
        t = mp.matrix(6, 18)
        for i in range(6):
            for k in range(18):
                t[i, k] = mp.mpf(int(i == k // 3)) - mp.mpf(1) / 6
        exact = mp.norm(z / mp.norm(z) - t / mp.norm(t)) ** 2
    assert abs(float(distances(logits)[0]) / exact - 1) < 1e-15 / size


def test_residual_energy_misses_rotations_that_off_diagonal_energy_sees():
    left, right = (np.array(basis) for basis in hadamard_bases(8, 2))
    a = np.array([3.0, 1.0, 0.5, 2.0, 0.1, 1.5, 0.7])
    rotation = np.linalg.qr(np.random.default_rng(8).standard_normal((7, 7)))[0]
    aligned, rotated = left * a @ right.T, left @ rotation * a @ right.T
    off_diagonal = jax.jit(off_diagonal_energy)
    residual = jax.jit(residual_energy)
    assert off_diagonal(aligned, left, right) < 1e-15
    core = rotation * a
    expected = np.linalg.norm(core - np.diag(np.diag(core))) / np.linalg.norm(a)
    found = off_diagonal(rotated, left, right)
    np.testing.assert_allclose(found, expected, rtol=1e-13)
    assert residual(aligned) < 1e-15
    assert residual(rotated) < 1e-15


def test_residual_energy_counts_column_means_and_within_class_spread():
    signal = np.kron(np.eye(6) - 1 / 6, np.ones((1, 3)))  # squared norm 15
    level = np.full((6, 18), 0.5)  # squared norm 27
    spread = np.kron(np.eye(6)[:, :1] @ np.ones((1, 6)), [[1.0, 0.0, -1.0]])  # 12
    found = [distances(signal + part)[2] for part in (level, spread)]
    np.testing.assert_allclose(found, [(27 / 42) ** 0.5, (12 / 27) ** 0.5], rtol=1e-14)


@pytest.mark.parametrize("per_class", [1, 3])
def test_hadamard_bases_diagonalise_class_constant_hadamard_logits(per_class):
    a = np.array([3.0, 1.0, 0.5, 2.0, 0.1, 1.5, 0.7])
    logits = np.repeat(hadamard_logits(a), per_class, axis=1)
    left, right = hadamard_bases(8, per_class)
    np.testing.assert_allclose(left.T @ left, np.eye(7), atol=1e-15)
    np.testing.assert_allclose(right.T @ right, np.eye(7), atol=1e-15)
    # Singular values K√n·a (P1 Thm 4.2 in absorbed units).
    core = left.T @ logits @ right
    np.testing.assert_allclose(core, np.diag(8 * per_class**0.5 * a), atol=1e-13)


@pytest.mark.parametrize(("a", "expected"), P2_VECTORS)
def test_log_distance_agrees_with_60_digits_and_with_explicit_logits(a, expected):
    a = np.array(a, dtype=float)
    psi = 1.0 - hadamard(8)[1:, 1:]
    e = np.exp(-psi @ a)
    found = log_distance_rates(np.log(a), psi @ e / (1 + np.sum(e)))
    np.testing.assert_allclose(found, expected, rtol=2e-14)

    full = distances(hadamard_logits(a))
    np.testing.assert_allclose(full[0], found[0], rtol=1e-13)
    # P2 E.1 calls the alignment of Z "the square root of M"; with the ½ of M's eq. 12
    # it is the root of 2M.
    m = np.sum((a / np.sum(a) - 1 / 7) ** 2) / 2
    np.testing.assert_allclose(full[1], (2 * m) ** 0.5, rtol=1e-13)
    assert full[2] < 1e-15


@pytest.mark.parametrize("offset", [0.0, -700.0, 1e5])
@pytest.mark.parametrize("spread", [1e-10, 1e-5, 1.0, 1e3])
def test_log_distance_keeps_relative_accuracy(offset, spread):
    log_a = offset + spread * np.random.default_rng(3).standard_normal(7)
    with mp.workdps(60):
        a = [mp.exp(mp.mpf(float(u))) for u in log_a]
        norm = mp.sqrt(mp.fsum(x * x for x in a))
        exact = mp.fsum((x / norm - 1 / mp.sqrt(7)) ** 2 for x in a)
    value, rate = log_distance_rates(log_a, np.ones(7))
    assert abs(float(value) / exact - 1) < 5e-15
    assert abs(rate) < 1e-15  # a change of scale


def test_log_distance_with_dead_modes():
    log_a = np.array([0.5, -np.inf, 0.0, -np.inf, -2.0, 0.1, -np.inf])
    expected = np.linalg.norm(np.exp(log_a) / np.linalg.norm(np.exp(log_a)) - 7**-0.5)
    value, rate = log_distance_rates(log_a, np.arange(7.0))
    np.testing.assert_allclose(value, expected**2, rtol=1e-14)
    assert np.isfinite(rate)
    value, rate = log_distance_rates(np.full(7, -np.inf), np.arange(7.0))
    assert value == 1
    assert np.isfinite(rate)


def test_column_counts_that_are_no_multiple_of_the_classes_are_refused():
    for function in (etf_distance, residual_energy):
        with pytest.raises(ValueError, match="no multiple of 4 classes"):
            function(jnp.ones((4, 6)))
        with pytest.raises(ValueError, match="no multiple of 4 classes"):
            function(jnp.ones((4, 0)))
    with pytest.raises(ValueError, match="2 classes.* give `per_class`, one number"):
        class_means(jnp.ones((3, 5)), 2)


def test_sizes_that_do_not_fit_the_columns_are_refused(logits):
    for function in (etf_distance, residual_energy):
        with pytest.raises(
            ValueError, match="makes 17 examples of 6 classes, but .* 18"
        ):
            function(jnp.asarray(logits), (4, 1, 6, 2, 2, 2))
    with pytest.raises(ValueError, match="one for each of the 6 classes, but has 2"):
        class_means(jnp.asarray(logits), 6, (9, 9))


def test_float32_stays_float32(logits):
    found = distances(logits.astype(np.float32))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, distances(logits), rtol=2e-6)


# Balancedness: K = 4, d = 5, 6 examples, up to three hidden layers.


@pytest.fixture(scope="module")
def layers():
    rng = np.random.default_rng(11)
    shapes = [(4, 5), (3, 5, 5), (5, 6)]
    return [rng.standard_normal(shape) for shape in shapes]


jit_matrices = jax.jit(balancedness_matrices)
jit_defects = jax.jit(balancedness_defects)
defects_by_depth = jax.jit(jax.vmap(balancedness_defects, (None, None, None, 0)))
gradients = jax.jit(
    jax.grad(
        lambda *layers: sum(jax.tree.leaves(balancedness_defects(*layers))), (0, 1, 2)
    )
)


def by_hand(head, hidden, features, depth):
    weights = [features, *hidden[: depth - 1], head]
    matrices = [
        w.T @ w - v @ v.T for v, w in zip(weights[:-1], weights[1:], strict=True)
    ]
    directions = [w / np.linalg.norm(w) for w in weights]
    normalised = [
        w.T @ w - v @ v.T for v, w in zip(directions[:-1], directions[1:], strict=True)
    ]
    absolute = max(np.linalg.norm(m) for m in matrices)
    largest = max(np.sum(w**2) for w in weights)
    return matrices, (
        absolute,
        absolute / largest,
        max(np.linalg.norm(m) for m in normalised),
    )


def fields(defects):
    return np.array([defects.absolute, defects.relative, defects.normalised])


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_balancedness_agrees_with_a_loop_over_active_layers(layers, depth):
    head, hidden, features = layers
    expected, measures = by_hand(head, hidden, features, depth)
    found = jit_matrices(head, hidden, features, depth)
    np.testing.assert_allclose(found[:depth], expected, rtol=1e-13, atol=1e-14)
    assert np.all(found[depth:] == 0)
    defects = jit_defects(head, hidden, features, depth)
    assert isinstance(defects, Balancedness)
    np.testing.assert_allclose(fields(defects), measures, rtol=1e-13)


def test_padding_is_ignored_whatever_it_holds_and_depth_can_be_mapped_over(layers):
    head, hidden, features = layers
    defects = defects_by_depth(head, hidden, features, jnp.array([1, 2, 3, 4]))
    for k, depth in enumerate([1, 2, 3, 4]):
        frozen = hidden.copy()
        frozen[depth - 1 :] = 1e200
        alone = fields(jit_defects(head, frozen, features, depth))
        np.testing.assert_allclose(fields(defects)[:, k], alone, rtol=1e-14)
        for gradient in jax.tree.leaves(gradients(head, frozen, features, depth)):
            assert np.all(np.isfinite(gradient))


def test_unpadded_models_need_no_depth(layers):
    head, hidden, features = layers
    for depth in (1, 4):
        found = jit_defects(head, hidden[: depth - 1], features)
        _, measures = by_hand(head, hidden, features, depth)
        np.testing.assert_allclose(fields(found), measures, rtol=1e-13)


def test_a_depth_that_is_no_layer_is_refused_or_nan(layers):
    head, hidden, features = (jnp.array(x) for x in layers)
    for depth in (0, 5, 2.5):
        with pytest.raises(ValueError, match="whole number from 1 to 4"):
            balancedness_matrices(head, hidden, features, depth)
        with pytest.raises(ValueError, match="whole number from 1 to 4"):
            balancedness_defects(head, hidden, features, depth)
    depths = jnp.array([0, 5, 7, -1])
    assert np.all(np.isnan(fields(defects_by_depth(head, hidden, features, depths))))


def test_balanced_layers_have_no_defect_and_finite_gradients():
    # W_l = R_{l+1} diag(s) R_lᵀ with orthogonal R: every Gram matrix is R s² Rᵀ.
    rng = np.random.default_rng(12)
    rotations = [np.linalg.qr(rng.standard_normal((5, 5)))[0] for _ in range(5)]
    s = np.diag([2.0, 1.0, 0.5, 0.1, 0.0])
    weights = [rotations[i + 1] @ s @ rotations[i].T for i in range(4)]
    features = rotations[0] @ s @ np.eye(5, 6)
    head = np.eye(4, 5) @ s @ rotations[3].T
    layers = head, np.stack(weights[:3]), features
    np.testing.assert_allclose(fields(jit_defects(*layers, 4)), 0, atol=1e-14)

    zeros = [np.zeros_like(x) for x in layers]
    for head, hidden, features in (layers, zeros):
        for gradient in jax.tree.leaves(gradients(head, hidden, features, 4)):
            assert np.all(np.isfinite(gradient))
    assert np.all(fields(jit_defects(*zeros, 4)) == 0)


@pytest.mark.parametrize("scale", SCALES)
def test_relative_balancedness_ignores_scale(layers, scale):
    head, hidden, features = (x * scale for x in layers)
    defects = jit_defects(head, hidden, features, 3)
    expected = jit_defects(*layers, 3)
    np.testing.assert_allclose(defects.relative, expected.relative, rtol=1e-14)
    np.testing.assert_allclose(defects.normalised, expected.normalised, rtol=1e-13)
    if scale in (1e-150, 1e150):
        rescaled = defects.absolute / scale / scale
        np.testing.assert_allclose(rescaled, expected.absolute, rtol=1e-13)
