"""Limits of the full flow, from late states that need no integration of the model."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepufm as ufm
from deepufm.limits import mean_logits
from deepufm.limits._full import BalancedRate, singular_growth


def layers(logits, depth, per_class):
    """Balanced layers of class means, written out (P1 Def. 2.1)."""
    left, values, right = np.linalg.svd(np.repeat(logits, per_class, axis=1))
    root = values ** (1 / (depth + 1))
    hidden = np.broadcast_to(np.diag(root), (depth - 1, len(root), len(root)))
    features = root[:, None] * right[: len(root)]
    return left * root, hidden, features


def late_models(structure, num_classes, depth, per_class=2, members=3):
    """Balanced models of a structure at a margin of 200, and noise in the logits."""
    rng = np.random.default_rng(4)
    base = np.asarray(structure.logits(num_classes))
    base = base / np.min(gaps(base))
    models = []
    for _ in range(members):
        noise = 0.1 * np.linalg.norm(base) * rng.normal(size=base.shape) / num_classes
        parts = layers(200 * (base + noise), depth, per_class)
        models.append(ufm.DeepUFM(*map(jnp.asarray, parts)))
    return jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *models)


def gaps(logits):
    off = ~np.eye(len(logits), dtype=bool)
    return (np.diag(logits) - logits)[off]


@pytest.mark.parametrize(
    ("structure", "num_classes", "depth", "name"),
    [
        (ufm.Structure.SIMPLEX_ETF, 5, 1, "simplex ETF"),
        (ufm.Structure.SIMPLEX_ETF, 5, 2, "simplex ETF"),
        (ufm.Structure.CROSS_POLYTOPE, 6, 3, "cross-polytope"),
        (ufm.Structure.POLYGON, 5, 6, "regular polygon"),
    ],
)
def test_structures_are_found_again(structure, num_classes, depth, name):
    models = late_models(structure, num_classes, depth)
    flow = ufm.GradientFlow(ufm.CrossEntropy(), 2)
    limits = ufm.limit(flow, models)
    assert np.all(limits.certified)
    assert list(limits.structure) == [name] * 3
    assert np.max(limits.kkt_residual) < 1e-10
    assert np.all(limits.angle < limits.start_angle)
    expected = ufm.structure_objective(structure, num_classes, depth) / (depth + 1)
    np.testing.assert_allclose(limits.objective, expected, rtol=1e-12)
    # The margin of the limit bounds that of the path (Lyu & Li 2019).
    state = jax.tree.map(lambda leaf: leaf[0], models)
    smoothed = ufm.smoothed_parameter_margin(
        flow.log_loss(state), flow.log_norm(state), depth
    )
    assert limits.parameter_margin[0] > float(smoothed)


def test_parameter_margin_is_that_of_a_balanced_model():
    models = late_models(ufm.Structure.SIMPLEX_ETF, 4, 2, members=1)
    limits = ufm.limit(ufm.GradientFlow(ufm.CrossEntropy(), 2), models)
    parts = layers(limits.direction[0], 2, 2)
    norm = np.sqrt(sum(np.sum(part**2) for part in parts))
    margin = np.min(gaps(limits.direction[0])) / norm**3
    np.testing.assert_allclose(limits.parameter_margin[0], margin, rtol=1e-10)


@pytest.mark.parametrize("depth", [1, 3])
def test_the_rate_of_class_means_is_that_of_balanced_layers(depth):
    rng = np.random.default_rng(5)
    num_classes = 4
    logits = rng.normal(size=(num_classes, num_classes)) + 6 * np.eye(num_classes)
    logits -= np.mean(logits, axis=0)
    model = ufm.DeepUFM(*map(jnp.asarray, layers(logits, depth, 1)))
    flow = ufm.GradientFlow(ufm.CrossEntropy(), 1)
    direction, _ = flow(model)
    _, change = jax.jvp(lambda m: flow.logits(m), (model,), (direction,))
    change = np.asarray(change)
    # Both as rates of log ‖Z‖_F.
    expected = change * np.sum(logits**2) / np.sum(logits * change)
    rate = BalancedRate(depth, num_classes - 1, is_held=False)
    found = rate(logits.ravel()).reshape(logits.shape)
    # P's denominator, left out, is 1 to e^{-margin}, and that is not late here.
    np.testing.assert_allclose(found, expected, atol=2e-2 * np.max(np.abs(expected)))
    held = BalancedRate(depth, num_classes - 1, is_held=True)(logits.ravel())
    assert abs(held @ logits.ravel()) < 1e-10 * np.sum(logits**2)
    left, values, right = np.linalg.svd(logits)
    moves = np.einsum("ki,kc,ic->i", left, found, right)[:-1] / values[:-1]
    growth = singular_growth(logits, depth)[:-1]
    np.testing.assert_allclose(growth / growth[0], moves / moves[0], rtol=1e-9)


def test_an_early_state_is_followed_by_its_own_flow():
    model = ufm.gaussian(
        jax.random.key(2), num_classes=3, per_class=1, width=4, depth=1, scale=0.3
    )
    found = ufm.limit(ufm.GradientFlow(ufm.CrossEntropy(), 1), model)
    assert found.certified
    assert found.structure == "simplex ETF"
    assert found.direction.shape == (3, 3)


@pytest.mark.usefixtures("unhooked")
def test_other_flows_are_refused():
    model = ufm.gaussian(
        jax.random.key(0), num_classes=3, per_class=1, width=4, depth=1
    )
    for flow in (
        ufm.GradientFlow(ufm.MSE(), 1),
        ufm.GradientFlow(ufm.CrossEntropy(), 1, weight_decay=1e-3),
        ufm.GradientFlow(ufm.CrossEntropy(), 1, activation=ufm.ReLU()),
        ufm.GradientFlow(ufm.CrossEntropy(), (1, 2, 1)),
    ):
        with pytest.raises(ValueError, match="linear `GradientFlow` of cross-entropy"):
            ufm.limit(flow, model)
    plain = ufm.GradientFlow(ufm.CrossEntropy(), 1)
    with pytest.raises(ValueError, match="must be a `DeepUFM`"):
        ufm.limit(plain, (jnp.zeros(3),))
    padded = ufm.GradientFlow(ufm.CrossEntropy(), 1, depth=1)
    with pytest.raises(ValueError, match="models without padding"):
        ufm.limit(padded, model)
    with pytest.raises(ValueError, match="must know its depth"):
        ufm.limit(plain, jnp.eye(3))
    with pytest.raises(ValueError, match=r"shape \(K, K\)"):
        ufm.limit(padded, jnp.zeros((2, 3)))
    with pytest.raises(ValueError, match="those of member 1 do not"):
        ufm.limit(padded, jnp.stack([jnp.eye(3), -jnp.eye(3)]))


def test_class_means_stand_for_the_model():
    models = late_models(ufm.Structure.CROSS_POLYTOPE, 6, 3, members=1)
    whole = ufm.limit(ufm.GradientFlow(ufm.CrossEntropy(), 2), models)[0]
    logits = models.head[0] @ models.hidden[0, 1] @ models.hidden[0, 0]
    means = ufm.class_means(logits @ models.features[0], 6)
    found = ufm.limit(ufm.GradientFlow(ufm.CrossEntropy(), 2, depth=3), means)
    assert found.certified
    np.testing.assert_allclose(found.direction, whole.direction, atol=1e-12)
    np.testing.assert_allclose(found.parameter_margin, whole.parameter_margin)


def test_a_bottleneck_keeps_the_softmax_code_of_its_width():
    # Jiang et al. 2023; P1 Fig. 3, right: L = 1 with d = r.
    models = late_models(ufm.Structure.CROSS_POLYTOPE, 6, 1, members=2)
    # The modes of `layers` come largest first: three are kept.
    narrow = eqx.tree_at(
        lambda m: (m.head, m.hidden, m.features),
        models,
        (models.head[..., :3], models.hidden[..., :3, :3], models.features[:, :3]),
    )
    limits = ufm.limit(ufm.GradientFlow(ufm.CrossEntropy(), 2), narrow)
    assert np.all(limits.certified)
    assert list(limits.structure) == ["cross-polytope"] * 2
    free = ufm.limit(ufm.GradientFlow(ufm.CrossEntropy(), 2), models)
    assert list(free.structure) == ["simplex ETF"] * 2


def test_a_model_of_zeros_never_trains():
    zeros = jax.tree.map(jnp.zeros_like, late_models(ufm.Structure.SIMPLEX_ETF, 3, 1))
    found = ufm.limit(ufm.GradientFlow(ufm.CrossEntropy(), 2), zeros)
    assert {status.name for status in found.status} == {"NOT_FOLLOWED"}
    assert np.all(np.isnan(found.objective))


def test_early_class_means_are_followed_and_not_certified():
    flow = ufm.GradientFlow(ufm.CrossEntropy(), 1, depth=2)
    means = np.asarray(ufm.simplex_etf(3)) + 0.01 * np.diag([1.0, 0, 0])
    found = ufm.limit(flow, np.stack([20 * means, 200 * means, 1e-8 * means]))
    assert [status.name for status in found.status] == [
        "EARLY", "CERTIFIED", "NOT_FOLLOWED",
    ]  # fmt: skip
    assert list(found.structure) == ["simplex ETF", "simplex ETF", ""]
    assert np.isnan(found.objective[2])


def test_mean_logits_are_those_of_the_model():
    rng = np.random.default_rng(6)
    head, hidden, features = (
        rng.normal(size=shape) for shape in [(2, 3, 4), (2, 2, 4, 4), (2, 4, 6)]
    )
    model = ufm.DeepUFM(*(jnp.asarray(x[0]) for x in (head, hidden, features)))
    stacked = eqx.tree_at(
        lambda m: (m.head, m.hidden, m.features), model, (head, hidden, features)
    )
    found = mean_logits(stacked, 2)
    for i in range(2):
        logits = head[i] @ hidden[i, 1] @ hidden[i, 0] @ features[i]
        expected = (logits[:, 0::2] + logits[:, 1::2]) / 2
        np.testing.assert_allclose(found[i], expected, rtol=1e-12)


def test_what_is_added_to_a_column_changes_nothing():
    flow = ufm.GradientFlow(ufm.CrossEntropy(), 1, depth=2)
    means = 200 * np.asarray(ufm.simplex_etf(4)) + np.diag([1.0, 2, 3, 4])
    shifted = means + np.asarray([3e3, -500.0, 0.0, 1e3])
    plain, moved = ufm.limit(flow, means), ufm.limit(flow, shifted)
    assert moved.certified
    np.testing.assert_allclose(moved.start_angle, plain.start_angle, rtol=1e-9)
    np.testing.assert_allclose(moved.direction, plain.direction, atol=1e-12)
