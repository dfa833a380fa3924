"""The matrix flow against automatic differentiation, mpmath, and its conserved laws."""

import functools
import math

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest

import deepufm as ufm
from deepufm import CrossEntropy, DeepUFM, GradientFlow, Outcome
from deepufm.dynamics._gradient import _MAX_FUSED_TERMS

# Sums of outer products up to this many classes, a batched product beyond.
MANY = _MAX_FUSED_TERMS + 1

LAYERS = ("head", "hidden", "features")


def forward_loss(model: DeepUFM, per_class: int):
    """-sum log softmax, features multiplied forward: the usual order."""
    signal = model.features
    for layer in model.hidden:
        signal = layer @ signal
    logits = model.head @ signal
    labels = np.repeat(np.arange(model.num_classes), per_class)
    return -jnp.sum(jax.nn.log_softmax(logits, axis=0)[labels, np.arange(len(labels))])


@eqx.filter_jit
def reference_and_flow(model, per_class):
    direction, log_speed = GradientFlow(CrossEntropy(), per_class)(model)
    gradient = jax.grad(forward_loss)(model, per_class)
    return gradient, direction, log_speed


call = eqx.filter_jit(lambda flow, model: flow(model))
log_loss = eqx.filter_jit(lambda flow, model: flow.log_loss(model))


@eqx.filter_jit
def sizes(flow, model):
    return flow.layer_norms(model), flow.log_norm(model), flow.log_loss(model)


@pytest.mark.parametrize(
    ("num_classes", "per_class", "width", "depth"),
    [(2, 1, 2, 1), (3, 2, 5, 2), (MANY, 1, MANY, 3)],
)
def test_flow_is_minus_the_gradient(key, num_classes, per_class, width, depth):
    model = ufm.gaussian(
        key, num_classes=num_classes, per_class=per_class, width=width, depth=depth
    )
    gradient, direction, log_speed = reference_and_flow(model, per_class)
    for name in LAYERS:
        want = -np.asarray(getattr(gradient, name))
        got = np.exp(log_speed) * np.asarray(getattr(direction, name))
        assert got.shape == want.shape
        assert np.linalg.norm(got - want) <= 1e-12 * np.linalg.norm(want)


def exact_flow(model: DeepUFM, log_unit: float):
    """dθ/dt e^{-log_unit} for n = 1 and L = 2 in 40 digits, by the plain formulas."""
    with mp.workdps(40 + int(abs(log_unit))):

        def exact(x):
            return mp.matrix(np.asarray(x).tolist())

        head, layer, features = map(
            exact, (model.head, model.hidden[0], model.features)
        )
        signal = layer * features
        logits = head * signal
        num_classes = logits.rows
        residual = mp.eye(num_classes)
        for j in range(num_classes):
            weights = [mp.e ** logits[i, j] for i in range(num_classes)]
            for i in range(num_classes):
                residual[i, j] -= weights[i] / mp.fsum(weights)
        residual = residual * mp.e ** (-mp.mpf(log_unit))
        rates = (
            residual * signal.T,
            head.T * residual * features.T,
            layer.T * head.T * residual,
        )
        return [np.array(rate.tolist(), dtype=float) for rate in rates]


def test_flow_keeps_all_digits_at_log_loss_minus_500(key):
    # Margins near 500: 1 - p_y = e^{-500} rounds to 0 in the plain formula.
    rest = ufm.gaussian(key, num_classes=3, per_class=1, width=4, depth=2, scale=0.2)
    large = 500**0.5 * jnp.eye(4)
    model = DeepUFM(
        head=rest.head + large[:3],
        hidden=rest.hidden + jnp.eye(4)[None],
        features=rest.features + large[:, :3],
    )
    flow = GradientFlow(CrossEntropy(), 1)
    direction, log_speed = call(flow, model)
    assert -700 < flow.log_loss(model) < -300
    got = (direction.head, direction.hidden[0], direction.features)
    for rate, want in zip(got, exact_flow(model, float(log_speed))):
        # The logits, near 500, carry roundings of 1e-13 into the exponent.
        assert np.linalg.norm(rate - want) < 1e-11 * np.linalg.norm(want)
    assert 1 < max(np.max(np.abs(rate)) for rate in got) < 1e4


def padded_pair(key, depth):
    options = {"num_classes": 3, "per_class": 2, "width": 4, "depth": depth}
    return (
        ufm.gaussian(key, **options),
        ufm.gaussian(key, **options, pad_width=6, pad_depth=4),
    )


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_padding_changes_nothing_and_never_moves(key, depth):
    plain, padded = padded_pair(key, depth)
    want, want_speed = call(GradientFlow(CrossEntropy(), 2), plain)
    flow = GradientFlow(CrossEntropy(), 2, depth=depth)
    got, speed = call(flow, padded)
    assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-13)
    assert_close(speed, want_speed)
    assert_close(got.head[:, :4], want.head)
    assert_close(got.features[:4], want.features)
    assert_close(got.hidden[: depth - 1, :4, :4], want.hidden)
    np.testing.assert_array_equal(got.head[:, 4:], 0)
    np.testing.assert_array_equal(got.features[4:], 0)
    np.testing.assert_array_equal(got.hidden[depth - 1 :], 0)
    np.testing.assert_array_equal(got.hidden[:, 4:], 0)
    np.testing.assert_array_equal(got.hidden[:, :, 4:], 0)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_padding_counts_in_no_norm_and_no_error(key, depth):
    plain, padded = padded_pair(key, depth)
    bare, flow = (
        GradientFlow(CrossEntropy(), 2),
        GradientFlow(CrossEntropy(), 2, depth=depth),
    )
    np.testing.assert_allclose(
        flow.layer_norms(padded)[np.r_[0:depth, -1]],
        bare.layer_norms(plain),
        rtol=1e-14,
    )
    np.testing.assert_allclose(flow.log_norm(padded), bare.log_norm(plain), rtol=1e-13)
    np.testing.assert_allclose(flow.log_loss(padded), bare.log_loss(plain), rtol=1e-13)
    # One part in a thousand of the head alone, next to anything in the frozen layers.
    error = jax.tree.map(jnp.zeros_like, padded)
    error = eqx.tree_at(lambda m: m.head, error, 1e-3 * padded.head)
    error = eqx.tree_at(
        lambda m: m.hidden, error, error.hidden.at[depth - 1 :].set(1e9)
    )
    got = flow.relative_error(error, padded, padded)
    np.testing.assert_allclose(got, 1e-3, rtol=1e-14)


def test_norm_growth_and_length_are_frobenius(key):
    model, _ = padded_pair(key, 2)
    flow = GradientFlow(CrossEntropy(), 2)
    direction, _ = call(flow, model)

    def norm(m):
        return math.sqrt(sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(m)))

    length = flow.log_length(model, direction)
    np.testing.assert_allclose(length, math.log(norm(direction)), rtol=1e-13)
    growth = math.log(norm(direction) / norm(model))
    np.testing.assert_allclose(flow.log_growth(model, direction), growth, rtol=1e-12)


def products(model: DeepUFM):
    """W_{l+1}ᵀW_{l+1} - W_l W_lᵀ for all neighbours, H_1 first."""
    layers = [np.asarray(x) for x in (model.features, *model.hidden, model.head)]
    return [b.T @ b - a @ a.T for a, b in zip(layers, layers[1:])]


def defect(before: DeepUFM, after: DeepUFM) -> float:
    """The largest change of a conserved matrix, relative to ‖W‖² at the end."""
    size = max(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(after))
    changes = [b - a for a, b in zip(products(before), products(after))]
    return max(float(np.linalg.norm(change)) for change in changes) / size


@pytest.mark.parametrize(
    ("solver", "rtol", "bound"),
    [(None, None, 1e-6), (diffrax.Dopri8(), 1e-8, 1e-8)],
    ids=["default", "Dopri8"],
)
def test_balancedness_is_conserved_and_loss_falls_to_log_time_40(
    key, solver, rtol, bound
):
    model = ufm.gaussian(key, num_classes=3, per_class=2, width=4, depth=2)
    flow, losses = GradientFlow(CrossEntropy(), 2), []
    for log_time in np.linspace(-5, 40, 46):
        path = ufm.solve(
            flow,
            model,
            stop=ufm.FinalTime(log=float(log_time)),
            saves=2,
            solver=solver,
            rtol=rtol,
        )
        assert path.outcome == Outcome.reached
        assert defect(model, path.final) < bound
        losses.append(float(log_loss(flow, path.final)))
    assert losses[0] < float(log_loss(flow, model))
    assert np.all(np.diff(losses) < 0)
    # Late the loss falls like 1/t, up to powers of log t.
    assert -50 < losses[-1] < -30


def small(**changes):
    arrays = {
        "head": jnp.ones((3, 4)),
        "hidden": jnp.ones((1, 4, 4)),
        "features": jnp.ones((4, 6)),
    }
    return DeepUFM(**(arrays | changes))


BAD_STATES = [
    (3, None, small(), r"per_class = 3 .*\(4, 9\), but have \(4, 6\)"),
    (2, 3.0, small(), "`depth` must be a whole number from 1 to .* 2, but is 3"),
    (2, 1.5, small(), "`depth` must be a whole number.*1.5"),
    (2, None, small(head=jnp.full((3, 4), jnp.nan)), "head must be finite"),
    (2, None, small(features=jnp.full((4, 6), jnp.inf)), "features must be finite"),
]


@pytest.mark.parametrize(("per_class", "depth", "state", "message"), BAD_STATES)
def test_bad_state_is_refused(per_class, depth, state, message):
    flow = GradientFlow(CrossEntropy(), per_class, depth=depth)
    with pytest.raises(ValueError, match=message) as error:
        ufm.solve(flow, state, stop=ufm.FinalTime(1.0))
    assert "\n" not in str(error.value)


def test_a_state_of_another_kind_is_refused(unhooked):
    del unhooked
    flow = GradientFlow(CrossEntropy(), 2)
    with pytest.raises(ValueError, match="must be a `DeepUFM`, but is a .*Array"):
        ufm.solve(flow, jnp.ones(3), stop=ufm.FinalTime(1.0))


def test_per_class_below_one_is_refused():
    with pytest.raises(ValueError, match="`per_class` must be at least 1, but is 0"):
        GradientFlow(CrossEntropy(), 0)


def test_a_float32_model_moves_alike_beside_float64(key):
    model = ufm.gaussian(key, num_classes=3, per_class=2, width=4, depth=2)
    single = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), model)
    direction, log_speed = jax.jit(GradientFlow(CrossEntropy(), 2))(single)
    reference, log_reference = jax.jit(GradientFlow(CrossEntropy(), 2))(model)
    assert log_speed.dtype == direction.head.dtype == jnp.float32
    np.testing.assert_allclose(log_speed, log_reference, rtol=1e-5)
    np.testing.assert_allclose(direction.head, reference.head, rtol=1e-4, atol=1e-6)
