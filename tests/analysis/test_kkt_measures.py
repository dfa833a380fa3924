"""How near parameters are to a KKT point, against closed forms and a dense Jacobian."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
import scipy.optimize

import deepufm as ufm
from deepufm import Structure
from deepufm.analysis._kkt_measures import parameter_kkt

FIELDS = ("head", "hidden", "features")


def flow(per_class, **options):
    return ufm.GradientFlow(ufm.CrossEntropy(), per_class, **options)


def exact(structure, num_classes, per_class, depth, norm):
    """A structure's logits of some norm in balanced layers."""
    logits = np.asarray(structure.logits(num_classes), float)
    logits = np.repeat(logits, per_class, axis=1)
    logits *= norm / np.linalg.norm(logits)
    return balanced(logits, ufm.structure_rank(structure, num_classes), depth)


def balanced(logits, rank, depth):
    """Layers with room for no dead mode, whose rounding would show in its root."""
    rng = np.random.default_rng(0)
    left, values, right = np.linalg.svd(logits)
    share = np.diag(values[:rank] ** (1 / (depth + 1)))
    turns = [np.linalg.qr(rng.normal(size=(rank, rank)))[0] for _ in range(depth)]
    hidden = [turns[i + 1] @ share @ turns[i].T for i in range(depth - 1)]
    return {
        "head": left[:, :rank] @ share @ turns[-1].T,
        "hidden": np.array(hidden).reshape(-1, rank, rank),
        "features": turns[0] @ share @ right[:rank],
    }


def model_of(arrays):
    return ufm.DeepUFM(*(jnp.asarray(arrays[name]) for name in FIELDS))


def trained(seed, per_class):
    """Layers that classify every example, and noise."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(3), per_class)
    one_hot = np.eye(5)[:, labels] + 0.1
    arrays = {
        "head": np.eye(3, 5),
        "hidden": np.eye(5)[None].repeat(2, axis=0),
        "features": one_hot,
    }
    return {
        name: 1.7 * (value + 0.1 * rng.normal(size=value.shape))
        for name, value in arrays.items()
    }


def logits_of(arrays, relu):
    column = arrays["features"]
    for layer in arrays["hidden"]:
        column = layer @ column
        column = np.maximum(column, 0) if relu else column
    return arrays["head"] @ column


def gaps_of(arrays, labels, relu):
    logits = logits_of(arrays, relu)
    own = logits[labels, np.arange(len(labels))]
    wrong = np.arange(len(logits))[:, None] != labels
    return (own - logits)[wrong]


def jacobian(arrays, labels, relu, step=1e-6):
    """Central differences: between kinks a gap is affine in every single parameter."""
    columns = []
    for name in FIELDS:
        for index in np.ndindex(arrays[name].shape):
            ends = []
            for sign in (1, -1):
                moved = {key: value.copy() for key, value in arrays.items()}
                moved[name][index] += sign * step
                ends.append(gaps_of(moved, labels, relu))
            columns.append((ends[0] - ends[1]) / (2 * step))
    return np.array(columns)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("per_class", [2, (3, 1, 2)])
def test_both_fits_agree_with_a_dense_jacobian(relu, per_class):
    sizes = (2, 2, 2) if per_class == 2 else per_class
    labels = np.repeat(np.arange(3), sizes)
    arrays = trained(0, sizes)
    got = parameter_kkt(
        flow(per_class, activation=ufm.ReLU() if relu else None), model_of(arrays)
    )
    logits = logits_of(arrays, relu)
    wrong = np.arange(3)[:, None] != labels
    least = np.min(gaps_of(arrays, labels, relu))
    assert least > 0
    unit = {name: value * least**-0.25 for name, value in arrays.items()}
    theta = np.concatenate([unit[name].ravel() for name in FIELDS])
    size = np.linalg.norm(theta)
    gaps = gaps_of(unit, labels, relu)
    dense = jacobian(unit, labels, relu)
    np.testing.assert_allclose(theta @ dense, 4 * gaps, rtol=1e-8)
    assert got.norm == pytest.approx(size, rel=1e-13)
    np.testing.assert_allclose(got.gaps[wrong], gaps, rtol=1e-12)

    duals = (np.exp(logits) / np.sum(np.exp(logits), axis=0))[wrong]
    duals *= size / np.linalg.norm(dense @ duals)
    np.testing.assert_allclose(got.softmax.duals[wrong], duals, rtol=1e-8)
    misfit = np.linalg.norm(theta - dense @ duals) / size
    assert got.softmax.epsilon == pytest.approx(misfit, rel=1e-8)
    delta = np.max(duals * (gaps - 1)) * 4 / size**2
    assert got.softmax.delta == pytest.approx(delta, rel=1e-8)

    # One program for both: x = 4 λ/size², the misfit above the slack.
    rows = np.vstack([dense * size / 4, np.diag(gaps - 1)])
    target = np.concatenate([theta / size, np.zeros(len(gaps))])
    best, left = scipy.optimize.nnls(rows, target)
    total = got.best.epsilon**2
    total += np.sum((got.best.duals[wrong] * (gaps - 1) * 4 / size**2) ** 2)
    assert np.sqrt(total) == pytest.approx(left, rel=1e-8)
    assert got.best.epsilon == pytest.approx(
        np.linalg.norm((rows @ best - target)[: len(theta)]), rel=1e-7
    )
    assert got.best.delta == pytest.approx(np.max(best * (gaps - 1)), rel=1e-6)
    assert got.best.epsilon < got.softmax.epsilon
    assert np.all(got.best.duals >= 0)
    assert np.all(got.best.duals[~wrong] == 0)


@pytest.mark.parametrize("norm", [3.0, 1e5])
@pytest.mark.parametrize(("depth", "per_class"), [(1, 1), (3, 2)])
@pytest.mark.parametrize(
    ("structure", "num_classes"),
    [
        (Structure.SIMPLEX_ETF, 4),
        (Structure.CROSS_POLYTOPE, 6),
        (Structure.POLYGON, 5),
    ],
)
def test_structures_are_kkt_points(structure, num_classes, depth, per_class, norm):
    arrays = exact(structure, num_classes, per_class, depth, norm)
    got = parameter_kkt(flow(per_class), model_of(arrays))
    assert got.best.epsilon < 1e-12
    assert got.best.delta < 1e-12
    total = np.sum(got.best.duals) * (depth + 1)
    assert total == pytest.approx(got.norm**2, rel=1e-11)


def test_the_price_of_the_far_gap_of_a_cross_polytope_is_its_softmax():
    """With K-2 gaps m and one 2m: by symmetry ε = 0, and δ follows from e^{-m}."""
    for margin in (1.0, 4.0, 20.0, 1e5):
        arrays = exact(Structure.CROSS_POLYTOPE, 6, 1, 2, norm=margin * 12**0.5)
        got = parameter_kkt(flow(1), model_of(arrays))
        far = np.exp(-margin)
        # The rounding of margins is that of the logarithms of multipliers.
        assert got.softmax.epsilon < 1e-12 + 1e-15 * margin
        want = far / (6 * (4 + 2 * far))
        assert got.softmax.delta == pytest.approx(want, rel=1e-9, abs=1e-16)


def test_unbalanced_layers_are_no_kkt_point():
    """W doubled and H halved: gradients halve and double. All prices stay alike."""
    arrays = exact(Structure.SIMPLEX_ETF, 4, 1, 1, norm=5.0)
    arrays = arrays | {"head": 2 * arrays["head"], "features": arrays["features"] / 2}
    got = parameter_kkt(flow(1), model_of(arrays))
    cosine = 2 / (4 + 1 / 4)
    assert got.softmax.epsilon == pytest.approx(np.sqrt(2 - 2 * cosine), rel=1e-12)
    assert got.best.epsilon == pytest.approx(np.sqrt(1 - cosine**2), rel=1e-12)


def test_a_direction_has_one_best_fit_whatever_its_length():
    arrays = trained(1, (2, 2, 2))
    got, far = (
        parameter_kkt(flow(2), model_of({k: c * v for k, v in arrays.items()}))
        for c in (1.0, 30.0)  # margins of some 1e6
    )
    assert far.norm == pytest.approx(got.norm, rel=1e-13)
    for name in ("epsilon", "delta"):
        want = getattr(got.best, name)
        assert getattr(far.best, name) == pytest.approx(want, rel=1e-8)
        assert 0 <= getattr(far.softmax, name) != getattr(got.softmax, name)


def test_epsilon_and_delta_fall_along_the_flow():
    """Modes of the reduced flow by SciPy, over the logarithm of their norm (K = 4).

    In the layers mode i is a_i^{1/(L+1)} and its gradient (Psi p)_i a_i^{L/(L+1)}.
    """
    signs = np.array([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])
    psi, depth = 1 - signs[1:, 1:], 2

    def softmax(a):
        margins = psi @ a
        return np.exp(np.min(margins) - margins)

    def rate(_, log_a):
        a = np.exp(log_a)
        speed = (psi @ softmax(a)) * a ** ((depth - 1) / (depth + 1))
        return speed * np.sum(a) / (a @ speed)

    readings = np.log([3.0, 5.0, 9.0, 20.0])
    path = scipy.integrate.solve_ivp(
        rate, readings[[0, -1]], np.log([1.2, 1.0, 0.8]), "Radau", t_eval=readings,
        rtol=1e-8, atol=1e-8,
    )  # fmt: skip
    values = []
    for log_a in path.y.T:
        a = np.exp(log_a)
        logits = signs @ np.diag([0, *a]) @ signs
        got = parameter_kkt(flow(1), model_of(balanced(logits, 3, depth)))
        layers, slopes = np.cbrt(a), (psi @ softmax(a)) * np.cbrt(a) ** 2
        cosine = layers @ slopes / np.linalg.norm(layers) / np.linalg.norm(slopes)
        want = np.sqrt(2 - 2 * cosine)
        assert got.softmax.epsilon == pytest.approx(want, rel=1e-9)
        values.append([got.best.epsilon, got.best.delta, got.softmax.delta])
    assert np.all(np.diff(values, axis=0) < 0)
    assert np.all(np.array(values[-1]) < 0.1 * np.array(values[0]))


def test_padding_counts_for_nothing():
    arrays = trained(2, (1, 1, 1))
    want = parameter_kkt(flow(1, activation=ufm.ReLU()), model_of(arrays))
    padded = {
        "head": np.pad(arrays["head"], ((0, 0), (0, 2))),
        "hidden": np.concatenate(
            [np.pad(arrays["hidden"], ((0, 0), (0, 2), (0, 2))), np.eye(7)[None]]
        ),
        "features": np.pad(arrays["features"], ((0, 2), (0, 0))),
    }
    deep = flow(1, activation=ufm.ReLU(), depth=3)
    got = parameter_kkt(deep, model_of(padded))
    assert got.norm == pytest.approx(want.norm, rel=1e-14)
    assert got.softmax.epsilon == pytest.approx(want.softmax.epsilon, rel=1e-12)
    assert got.best.epsilon == pytest.approx(want.best.epsilon, rel=1e-9)


def test_a_misclassified_example_leaves_nan():
    arrays = trained(3, (1, 1, 1))
    arrays["features"] = arrays["features"][:, ::-1].copy()
    got = parameter_kkt(flow(1), model_of(arrays))
    assert np.isnan(got.norm)
    assert np.isnan(got.softmax.epsilon)
    assert np.isnan(got.best.delta)


def test_too_many_gaps_are_not_fitted():
    got = parameter_kkt(flow(2), model_of(trained(4, (2, 2, 2))), most=11)
    assert np.isnan(got.best.epsilon)
    assert np.isfinite(got.softmax.epsilon)


def test_another_loss_is_refused():
    squares = ufm.GradientFlow(ufm.MSE(), 1)
    with pytest.raises(ValueError, match="must descend a `CrossEntropy`"):
        parameter_kkt(squares, model_of(trained(5, (1, 1, 1))))
