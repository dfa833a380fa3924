"""Jacobian spectra of the full flow: closed forms, differences of a plain network."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import plain_networks as plain
import pytest
from jax.flatten_util import ravel_pytree

import deepufm as ufm
from deepufm import DeepUFM
from deepufm.stability._jacobian import Stability, jacobian_spectrum, reactivity
from deepufm.stability._top_exponents import top_reactivity

CE = ufm.GradientFlow(ufm.CrossEntropy(), 1)
FIT = ufm.GradientFlow(ufm.MSE(), 1)
# Projector onto what sums to zero: exact in doubles, like its powers.
CENTRED = np.eye(4) - 0.25


def model_of(head, hidden, features):
    return DeepUFM(*(jnp.asarray(x, float) for x in (head, hidden, features)))


def flat(model):
    return np.asarray(ravel_pytree(model)[0])


def collapsed(depth, scale, width=4):
    """DNC of K = 4, all layers scale·(1 - 1 1^T/4), turned by nothing."""
    layer = np.zeros((width, width))
    layer[:4, :4] = scale * CENTRED
    hidden = np.broadcast_to(layer, (depth - 1, width, width))
    return model_of(layer[:4], hidden, layer[:, :4])


def scale_of(depth, mu):
    """The layers' scale at which DNC has mean mode mu: Z has gap K·mu."""
    return (4 * mu) ** (1 / (depth + 1))


@pytest.fixture(scope="module")
def dnc():
    """DNC at depth 3, K = 4, d = 5, mu = 1, of the package's own initialiser."""
    a = 4.0 * jnp.ones(3)
    return ufm.hadamard(jax.random.key(0), a, per_class=1, width=5, depth=3)


def scaled(model, mu):
    """A model of depth 3 and mu = 1 brought to another mu."""
    return jax.tree.map(lambda x: x * mu**0.25, model)


# The full flow against a plain network.


def oracle(model, loss, labels, decay=0.0):
    """Returns θ, F and J of a plain network, and J where no gauge direction is."""
    theta = flat(model)
    sizes = model.num_classes, model.width, model.depth

    def force(x):
        return plain.force(x, loss, labels, sizes, decay)

    jacobian = plain.differences(force, theta)
    gauge = np.concatenate(
        [plain.gauge_tangents(theta, *sizes, sign) for sign in (-1, 1)], axis=1
    )
    return theta, force, (jacobian + jacobian.T) / 2, gauge


@pytest.mark.parametrize(
    ("loss", "plain_loss", "decay"),
    [
        (ufm.CrossEntropy(), plain.cross_entropy, 0.1),
        (ufm.MSE(), plain.squared_error, 0.0),
    ],
)
def test_raw_spectrum_of_any_model(loss, plain_loss, decay):
    rng = np.random.default_rng(4)
    model = model_of(*(rng.normal(size=s) for s in [(3, 4), (1, 4, 4), (4, 4)]))
    flow = ufm.GradientFlow(loss, (2, 1, 1), decay)
    got = jacobian_spectrum(flow, model, normalised=False)
    theta, force, jacobian, gauge = oracle(
        model, plain_loss, np.asarray([0, 0, 1, 2]), decay
    )
    free = plain.complement(gauge)
    expected = np.linalg.eigvalsh(free.T @ jacobian @ free)[::-1]
    unit = np.exp(got.log_unit)
    np.testing.assert_allclose(got.exponents * unit, expected, rtol=1e-7, atol=1e-9)
    assert len(got.gauge) + len(got.balance) == 44 - free.shape[1]
    size = np.max(np.abs(expected)) * np.linalg.norm(theta)
    assert got.drift == pytest.approx(np.linalg.norm(force(theta)) / size, rel=1e-7)
    top = np.linalg.eigvalsh(jacobian)[-1]
    assert reactivity(flow, model, normalised=False) * unit == pytest.approx(
        top, rel=1e-8
    )


def test_normalised_spectrum_on_a_ray_is_that_of_the_flow_on_the_sphere(dnc):
    """All eigenvalues of differences of F/<θ-hat, F> - θ-hat, none left out."""
    model = scaled(dnc, 0.7)
    theta, force, _, _ = oracle_point(model)
    norm = np.linalg.norm(theta)

    def direction(unit):
        moved = force(norm * unit)
        return moved / (unit @ moved) - unit

    tangent = plain.complement(theta[:, None])
    whole = plain.differences(direction, theta / norm)
    expected = np.sort(np.linalg.eigvals(tangent.T @ whole @ tangent).real)[::-1]
    got = jacobian_spectrum(CE, model)
    found = np.concatenate([got.exponents, got.gauge, got.balance])
    np.testing.assert_allclose(np.sort(found)[::-1], expected, atol=1e-7)
    assert got.drift < 1e-13
    assert reactivity(CE, model) == pytest.approx(0, abs=1e-12)


def oracle_point(model):
    sizes = model.num_classes, model.width, model.depth
    labels = np.arange(4)

    def force(x):
        return plain.force(x, plain.cross_entropy, labels, sizes)

    return flat(model), force, sizes, labels


def test_off_a_ray_drift_and_reactivity_are_those_of_the_flow_on_the_sphere(dnc):
    rng = np.random.default_rng(5)
    model = jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape), dnc)
    theta, force, _, _ = oracle_point(model)
    norm = np.linalg.norm(theta)

    def direction(unit):
        moved = force(norm * unit)
        return moved / (unit @ moved) - unit

    tangent = plain.complement(theta[:, None])
    whole = plain.differences(direction, theta / norm)
    inside = tangent.T @ (whole + whole.T) @ tangent / 2
    top = np.linalg.eigvalsh(inside)[-1]
    got = jacobian_spectrum(CE, model)
    drift = np.linalg.norm(direction(theta / norm))
    assert got.drift == pytest.approx(drift, rel=1e-9)
    assert got.drift > 0.1
    assert reactivity(CE, model) == pytest.approx(top, rel=1e-7)
    assert top > got.exponents[0] + 0.1


# What the issue of gauge is about.


def test_a_fitted_balanced_model_is_stable_but_for_gauge():
    """Depth 3, squared error: 16 logits pull back, 48 directions leave them alone."""
    model = ufm.balanced(jax.random.key(1), jnp.eye(4), width=4, depth=3)
    got = jacobian_spectrum(FIT, model)
    assert not got.normalised
    assert got.log_unit == 0
    assert (got.n_unstable, got.n_stable, got.n_neutral) == (0, 16, 0)
    # Z = 1 by four layers, all orthogonal: J = -4 on what the logits see.
    np.testing.assert_allclose(got.exponents, -4, rtol=1e-13)
    assert (got.n_gauge, got.n_balance) == (18, 30)
    assert np.max(np.abs(np.concatenate([got.gauge, got.balance]))) < 1e-13
    assert got.drift < 1e-14
    assert got.verdict is Stability.STABLE
    assert "0 unstable, 16 stable, 0 neutral" in str(got)
    assert "rotations: 18" in str(got)


@pytest.mark.parametrize("ratio", [1e-4, 1e4])
def test_moving_norm_between_layers_changes_no_verdict(ratio):
    """Z the same, entries of one layer 1e8 times those of another."""
    layer = jnp.eye(4)
    hidden = jnp.stack([layer / ratio, layer])
    model = DeepUFM(layer * ratio, hidden, layer)
    got = jacobian_spectrum(FIT, model)
    assert (got.n_unstable, got.n_stable, got.n_neutral) == (0, 16, 0)
    assert len(got.gauge) + len(got.balance) == 48
    # J on the logits: the sum over layers of the others' products squared.
    others = ratio**2 + ratio**-2 + 2
    np.testing.assert_allclose(got.exponents, -others, rtol=1e-12)


def test_collapse_above_its_threshold_is_stable_but_for_gauge(dnc):
    got = jacobian_spectrum(CE, dnc)
    assert got.normalised
    # Each of 3 interfaces: 10 - 1 skew X of 5 units of which 3 are used, 15 - 3 more.
    assert (got.n_gauge, got.n_balance) == (27, 36)
    assert got.n_unstable == got.n_neutral == 0
    np.testing.assert_allclose(got.gauge, 0, atol=1e-13)
    np.testing.assert_allclose(got.balance, -2, rtol=1e-13)
    assert got.verdict is Stability.STABLE
    # The raw Jacobian has positive eigenvalues: as many as rotations, all of them g.
    theta, force, sizes, labels = oracle_point(dnc)
    growth = theta @ force(theta) / (theta @ theta)
    raw = plain.differences(force, theta)
    positive = np.linalg.eigvalsh((raw + raw.T) / 2)
    positive = positive[positive > 1e-6]
    np.testing.assert_allclose(positive, np.full(27, growth), rtol=1e-7)
    assert np.exp(got.log_unit) == pytest.approx(growth, rel=1e-12)
    apart = jacobian_spectrum(CE, dnc, normalised=False)
    rates = np.exp(apart.log_unit) * apart.gauge
    np.testing.assert_allclose(rates, np.full(27, growth), rtol=1e-12)
    assert apart.n_unstable == 0


@pytest.mark.parametrize("mu", [0.2, 1.3, 300.0])
def test_exponents_of_the_reduced_flow_are_in_the_full_one(dnc, mu):
    """(L+1) times as large: N ~ ‖θ‖^{L+1}; twice, as K - 2 = 2."""
    got = jacobian_spectrum(CE, scaled(dnc, mu)).exponents
    reduced = jacobian_spectrum(ufm.HadamardFlow(4, 3), jnp.log(mu * jnp.ones(3)))
    for exponent in 4 * reduced.exponents:
        assert np.sum(np.abs(got / exponent - 1) < 1e-9) >= 2
    # Weights between unused units: 4 in each of two hidden layers.
    assert np.sum(np.abs(got + 1) < 1e-9) >= 8
    assert np.any(got > 1e-6) == (mu < 0.5)


@pytest.mark.parametrize("depth", [1, 3])
def test_stable_rays_stay_stable_when_scaled_up(depth):
    """Margins of 10 to 1e12; what decays like 1/N is not lost beside them.

    The parameters grow 1e4- to 1e8-fold: past margins of 1e13 a double holds no ray.
    """
    factors = [1.0, 2.0**6, 2.0**12] if depth == 3 else [2.0**-7, 1.0, 2.0**20]
    base = {1: 2.0, 3: 2.0**-3 * 16}[depth]
    counts = set()
    for factor in factors:
        got = jacobian_spectrum(CE, collapsed(depth, base * factor))
        counts.add((got.n_unstable, got.n_stable, got.n_neutral, got.n_gauge))
        # The reduced flow's exponent, at μ = scale^{L+1}/K.
        mu = (base * factor) ** (depth + 1) / 4
        expected = (depth - 1) - (depth + 1) * mu
        # Rounded margins shift the softmax by as much.
        near = np.abs(got.exponents / expected - 1) < 1e-11 + 4e-15 * mu
        assert np.sum(near) >= 2
        if factor == max(factors):
            np.testing.assert_allclose(got.exponents[:5], -1, rtol=1e-3)
    assert len(counts) == 1
    assert next(iter(counts))[0] == 0


def test_weight_decay_at_rest():
    """DNC with λ = α^{L-1} r(α^{L+1}), r = K p_off: rotations 0, scalings -2λ."""
    scale = scale_of(3, 1.2)
    gap = scale**4
    off = np.exp(-gap) / (1 + 3 * np.exp(-gap))
    decay = scale**2 * 4 * off
    flow = ufm.GradientFlow(ufm.CrossEntropy(), 1, decay)
    got = jacobian_spectrum(flow, collapsed(3, scale))
    assert not got.normalised
    assert got.drift < 1e-14
    unit = np.exp(got.log_unit)
    np.testing.assert_allclose(unit * got.gauge, 0, atol=1e-14)
    np.testing.assert_allclose(unit * got.balance, -2 * decay, rtol=1e-12)
    # Along the ray: d(α^3 r - λα)/dα, with d log r/d gap = -1/(1 + 3 e^{-gap}).
    slope = decay * (2 - 4 * gap / (1 + 3 * np.exp(-gap)))
    assert np.min(np.abs(unit * got.exponents / slope - 1)) < 1e-11
    assert got.n_unstable == 0
    # Weights between units that are not used feel the decay alone.
    assert np.sum(np.abs(unit * got.exponents + decay) < 1e-12) >= 2


# Lanczos.


@pytest.mark.parametrize("normalised", [True, False])
def test_the_largest_exponents_without_a_matrix(dnc, normalised):
    """A multiple one as often as it is there, of which one run finds fewer copies."""
    model = scaled(dnc, 0.3)
    whole = jacobian_spectrum(CE, model, normalised=normalised)
    top = jacobian_spectrum(CE, model, normalised=normalised, top=16)
    np.testing.assert_allclose(
        top.exponents, whole.exponents[:16], rtol=1e-8, atol=1e-9
    )
    assert top.log_unit == pytest.approx(whole.log_unit, rel=1e-12)
    assert top.n_unstable == whole.n_unstable >= 2
    assert top.n_gauge is None
    assert not top.complete
    np.testing.assert_allclose(top.gauge, whole.gauge[0], atol=1e-12)
    np.testing.assert_allclose(top.balance, whole.balance[0], rtol=1e-12)
    if normalised:
        # Off the ray, through the same compiled functions.
        rng = np.random.default_rng(5)
        off = jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape), model)
        got = top_reactivity(CE, off, True)
        assert got == pytest.approx(reactivity(CE, off), rel=1e-9)


# Padding, errors.


def test_padding_in_depth_counts_nowhere():
    model = collapsed(2, 1.5)
    padded = DeepUFM(
        model.head, jnp.concatenate([model.hidden, jnp.eye(4)[None]]), model.features
    )
    flow = ufm.GradientFlow(ufm.CrossEntropy(), 1, depth=2)
    got, plain_one = jacobian_spectrum(flow, padded), jacobian_spectrum(CE, model)
    np.testing.assert_allclose(got.exponents, plain_one.exponents, atol=1e-13)
    assert got.n_gauge == plain_one.n_gauge
    with pytest.raises(ValueError, match="must be identities"):
        jacobian_spectrum(ufm.GradientFlow(ufm.CrossEntropy(), 1, depth=1), padded)


@pytest.mark.usefixtures("unhooked")
def test_what_has_no_spectrum_is_refused():
    model = collapsed(2, 1.0)
    cases = [
        (ufm.GradientFlow(ufm.CrossEntropy(), 1, activation=ufm.ReLU()), "kinks"),
        (ufm.LogitMatrixFlow(ufm.CrossEntropy(), 1), "LogitMatrixFlow"),
        (
            ufm.GradientFlow(
                ufm.CrossEntropy(), 1, ufm.PiecewiseConstant((0.1, 0.0), (1.0,))
            ),
            "changes with time",
        ),
        (ufm.GradientFlow(ufm.CrossEntropy(), 2), "features must have shape"),
    ]
    for flow, message in cases:
        with pytest.raises(ValueError, match=message):
            jacobian_spectrum(flow, model)
    with pytest.raises(ValueError, match="top=10"):
        jacobian_spectrum(CE, collapsed(2, 1.0, width=60))
    with pytest.raises(ValueError, match="`top`"):
        jacobian_spectrum(CE, model, top=0)
    with pytest.raises(ValueError, match="`tolerance`"):
        jacobian_spectrum(CE, model, tolerance=1.5)
    backwards = DeepUFM(-model.head, model.hidden, model.features)
    with pytest.raises(ValueError, match="normalised=False"):
        jacobian_spectrum(CE, backwards)


def turned(depth, width=5, mu=1.0):
    modes = jnp.full(3, 4.0 * mu)
    return ufm.hadamard(jax.random.key(0), modes, per_class=1, width=width, depth=depth)


def test_single_precision_models_have_the_same_counts():
    """Rounded to 1e-7 they are balanced, and their spectra known, to that."""
    model = turned(3)
    rounded = jax.tree.map(lambda x: x.astype(jnp.float32), model)
    found, want = jacobian_spectrum(CE, rounded), jacobian_spectrum(CE, model)
    assert (found.n_gauge, found.n_balance) == (want.n_gauge, want.n_balance)
    assert found.n_stable == want.n_stable
    np.testing.assert_allclose(found.exponents, want.exponents, rtol=1e-4)
    (top,) = jacobian_spectrum(CE, rounded, top=1).exponents
    assert top == pytest.approx(want.exponents[0], rel=1e-4)


def test_states_that_move_decide_on_nothing():
    model = turned(2)
    moved = eqx.tree_at(lambda m: m.head, model, model.head * 1.1 + 0.1)
    assert jacobian_spectrum(CE, moved).verdict is Stability.MOVING
    assert jacobian_spectrum(CE, model).verdict is Stability.STABLE


def test_margins_beyond_doubles_are_refused():
    large = jax.tree.map(lambda x: 1e6 * x, turned(2))
    with pytest.raises(ValueError, match="not resolved"):
        jacobian_spectrum(CE, large)


def test_where_the_loss_sees_nothing_rounding_decides_on_nothing():
    """The origin at L = 1: Z = W H is of second order, and gauge moves nothing."""
    origin = model_of(np.zeros((4, 6)), np.zeros((0, 6, 6)), np.zeros((6, 4)))
    found = jacobian_spectrum(CE, origin, normalised=False)
    # 1 - 1/K has eigenvalue 1 three times: W and H^T grow and decay together.
    counts = found.n_unstable, found.n_stable, found.n_neutral
    assert counts == (18, 18, 12)
    decaying = ufm.GradientFlow(ufm.CrossEntropy(), 1, weight_decay=1.0)
    found = jacobian_spectrum(decaying, origin)
    assert (found.n_unstable, found.n_neutral) == (0, 18)
    assert found.verdict is Stability.NEUTRAL


def test_traced_states_are_refused():
    with pytest.raises(ValueError, match="is traced"):
        jax.vmap(lambda u: jacobian_spectrum(ufm.HadamardFlow(4, 2), u).drift)(
            jnp.zeros((2, 3))
        )
