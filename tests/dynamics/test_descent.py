"""`descend` against plain loops of gradient descent in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import deepufm as ufm
from deepufm import CrossEntropy, DeepUFM, Outcome

SIZES, STEPS = (3, 1, 2), 20
LABELS = np.repeat(np.arange(3), SIZES)
STEP, DECAY, MOMENTUM = 0.05, 0.02, 0.9
PLAIN = optax.sgd(STEP)
DECAYED = optax.chain(optax.add_decayed_weights(DECAY), optax.sgd(STEP))
HEAVY = optax.chain(
    optax.add_decayed_weights(DECAY), optax.sgd(STEP, momentum=MOMENTUM)
)


@pytest.fixture(scope="module")
def model(key):
    return ufm.gaussian(key, num_classes=3, per_class=SIZES, width=4, depth=2)


def gradient(layers):
    """dL/dW of features, hidden layer and head, and the loss."""
    features, hidden, head = layers
    logits = head @ hidden @ features
    shifted = logits - logits.max(0)
    weights = np.exp(shifted) / np.exp(shifted).sum(0)
    error = weights - np.eye(3)[:, LABELS]
    loss = -np.log(weights[LABELS, np.arange(6)]).sum()
    blocks = [
        hidden.T @ head.T @ error,
        head.T @ error @ features.T,
        error @ (hidden @ features).T,
    ]
    return blocks, loss


def loop(model: DeepUFM, steps=STEPS, examples=1, decay=0.0, momentum=0.0):
    """The layers after every step, and the losses."""
    layers = [np.asarray(x) for x in (model.features, model.hidden[0], model.head)]
    speeds = [np.zeros_like(x) for x in layers]
    states, losses = [layers], [gradient(layers)[1]]
    for _ in range(steps):
        pulls, _ = gradient(layers)
        pulls = [g / examples + decay * w for g, w in zip(pulls, layers)]
        speeds = [momentum * v + g for v, g in zip(speeds, pulls)]
        layers = [w - STEP * v for w, v in zip(layers, speeds)]
        states.append(layers)
        losses.append(gradient(layers)[1])
    return states, np.array(losses)


def assert_same(state: DeepUFM, layers, rtol=1e-13):
    found = state.features, state.hidden[0], state.head
    for got, want in zip(found, layers):
        assert np.linalg.norm(got - want) <= rtol * np.linalg.norm(want)


def row_of(tree, row):
    return jax.tree.map(lambda x: x[row], tree)


def scaled(model, scale):
    return jax.tree.map(lambda x: scale * x, model)


def observe(flow, log_time, state):
    return {"log_loss": flow.log_loss(state), "log_step": log_time}


def train(model, optimiser=PLAIN, **options):
    options.setdefault("per_class", SIZES)
    return ufm.descend(model, CrossEntropy(), optimiser, STEPS, **options)


def test_given_steps_are_saved_and_seen(model):
    saves = (0, 1, 7, 20)
    run = train(model, saves=saves, observe=observe, keep_states=True)
    states, losses = loop(model)
    assert run.outcome == Outcome.reached
    assert run.num_saved == 4
    assert run.final_step == STEPS
    assert run.state is not None
    np.testing.assert_array_equal(run.step, saves)
    for row, step in enumerate(saves):
        assert_same(row_of(run.state, row), states[step])
    assert_same(run.final, states[-1])
    log_losses = run.observables["log_loss"]
    np.testing.assert_allclose(log_losses, np.log(losses[list(saves)]), rtol=1e-13)
    log_steps = [-np.inf, 0, np.log(7), np.log(20)]
    np.testing.assert_allclose(run.observables["log_step"], log_steps, rtol=1e-15)


@pytest.mark.parametrize(
    ("optimiser", "mean", "decay", "momentum"),
    [(DECAYED, True, DECAY, 0.0), (HEAVY, False, DECAY, MOMENTUM)],
)
def test_weight_decay_momentum_and_the_mean(model, optimiser, mean, decay, momentum):
    run = train(model, optimiser, saves=2, mean=mean)
    states, _ = loop(model, STEPS, 6 if mean else 1, decay, momentum)
    np.testing.assert_array_equal(run.step, [0, 1, 20])
    assert run.state is None
    assert_same(run.final, states[-1])


seen = []


def record(step, steps):
    seen.append((int(step), int(steps)))


def stopped(model, log_loss):
    """Looks every 4 steps, and saves in equal ratios."""
    seen.clear()
    run = train(
        model, saves=5, chunk=4, stop=ufm.LogLossBelow(log_loss), observe=observe,
        progress=record, keep_states=True,
    )  # fmt: skip
    jax.effects_barrier()
    return run


LOOKS = [0, 1, 3, 4, 7, 8, 12, 16, 20]  # saves 0, 1, 3, 7, 20 and every fourth


def test_chunks_change_nothing_and_a_stop_never_met_is_said_to_be(model):
    run = stopped(model, -50.0)
    states, _ = loop(model)
    assert run.outcome == Outcome.not_met
    assert run.final_step == STEPS
    np.testing.assert_array_equal(run.step, [0, 1, 3, 7, 20])
    assert run.state is not None
    for row, step in enumerate(run.step):
        assert_same(row_of(run.state, row), states[int(step)])


def test_progress_is_called_at_the_end_of_every_chunk(model):
    stopped(model, -50.0)
    assert sorted(seen) == [(look, STEPS) for look in LOOKS]


def test_a_stop_ends_the_run_at_the_end_of_a_chunk(model):
    states, losses = loop(model)
    assert np.all(np.diff(losses) < 0)
    threshold = np.log(losses[9] + losses[10]) - np.log(2)  # met by step 10
    run = stopped(model, threshold)
    assert run.outcome == Outcome.reached
    assert run.final_step == 12
    assert run.num_saved == 4
    assert_same(run.final, states[12])
    assert np.isnan(run.observables["log_loss"][4])
    assert np.all(np.isfinite(run.observables["log_loss"][:4]))


def test_a_stop_that_holds_at_the_start_ends_there(model):
    run = stopped(model, 10.0)
    assert run.outcome == Outcome.reached
    assert (run.final_step, run.num_saved) == (0, 1)
    assert_same(run.final, loop(model, 0)[0][0], rtol=0)


def test_divergence_keeps_the_last_finite_state(model):
    """Layers of size 1e3 grow a thousandfold a step, until they overflow."""
    large = scaled(model, 1e3)
    with np.errstate(all="ignore"):
        states, _ = loop(large)
    finite = [all(np.all(np.isfinite(x)) for x in layers) for layers in states]
    last = max(look for look in LOOKS if finite[look])
    assert 1 <= last < STEPS
    run = stopped(large, -1e300)
    assert run.outcome == Outcome.non_finite
    assert run.final_step == last
    assert_same(run.final, states[last], rtol=1e-9)
    assert run.num_saved == sum(look <= last for look in (0, 1, 3, 7, 20))
    assert run.state is not None
    assert np.all(np.isnan(run.state.head[int(run.num_saved) :]))


def test_a_batch_of_padded_models_equals_single_ones(model):
    """With weight decay, which must leave the padding's identities alone."""
    scales = np.array([1.0, 0.5])

    @jax.jit
    @jax.vmap
    def padded(scale, depth):
        grown = DeepUFM(
            scale * jnp.pad(model.head, ((0, 0), (0, 1))),
            jnp.stack([scale * jnp.pad(model.hidden[0], (0, 1)), jnp.eye(5)]),
            scale * jnp.pad(model.features, ((0, 1), (0, 0))),
        )
        run = train(grown, HEAVY, depth=depth, saves=2, chunk=3)
        return run.final

    final = padded(scales, np.array([2, 2]))
    for row, scale in enumerate(scales):
        single = scaled(model, scale)
        layers = loop(single, STEPS, 1, DECAY, MOMENTUM)[0][-1]
        got = row_of(final, row)
        inner = DeepUFM(got.head[:, :4], got.hidden[:1, :4, :4], got.features[:4])
        assert_same(inner, layers)
        np.testing.assert_array_equal(got.hidden[1], np.eye(5))
        np.testing.assert_array_equal(got.features[4], 0)
        np.testing.assert_array_equal(got.hidden[0, 4], 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk": 0}, "`chunk` must be a whole number, at least 1, but is 0"),
        ({"saves": 1}, "`saves` counts the start and the end"),
        ({"saves": (0, 21)}, r"from 0 to 20, but are \(0, 21\)"),
        ({"saves": (-1, 3)}, "from 0 to 20"),
        ({"saves": ()}, "from 0 to 20"),
        ({"stop": ufm.FinalTime(1.0)}, "stops by `steps`, not by a time"),
        ({"per_class": 3}, "features must have shape"),
    ],
)
def test_bad_input_is_refused(model, options, message):
    with pytest.raises(ValueError, match=message):
        train(model, **options)


def test_no_steps_are_refused(model):
    with pytest.raises(
        ValueError, match="`steps` must be a whole number, at least 1, but is 0"
    ):
        ufm.descend(model, CrossEntropy(), PLAIN, 0, per_class=SIZES)
