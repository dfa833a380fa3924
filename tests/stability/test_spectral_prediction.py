"""Random starts beside their spectral partners."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import solve_ivp

import deepufm as ufm
from deepufm.stability._spectral_prediction import (
    SpectralPrediction,
    _spectrum,
    spectral_prediction,
)

K, N, D, SEEDS, SAVES = 4, 2, 5, 3, 12
LOG_TIME = np.log(1e3)


@pytest.fixture(scope="module")
def study():
    return spectral_prediction(
        K, 2, width=D, per_class=N, delta=2.0, seeds=SEEDS, seed=5,
        log_time=LOG_TIME, saves=SAVES, rtol=1e-8,
    )  # fmt: skip


def start(index):
    key = jax.random.fold_in(jax.random.key(5), index)
    return key, ufm.small_gaussian(
        key, num_classes=K, width=D, per_class=N, depth=2, delta=2.0
    )


def spectrum_of(state):
    """Normalised singular values of the logits in NumPy, the K-1 largest."""
    sizes = [D * K * N, D * D]
    features, hidden, head = np.split(state, np.cumsum(sizes))
    logits = head.reshape(K, D) @ hidden.reshape(D, D) @ features.reshape(D, K * N)
    values = np.linalg.svd(logits, compute_uv=False)[:-1]
    return values / values.sum()


def rates(_, state):
    """The full flow in NumPy, layer by layer."""
    features, hidden, head = np.split(state, np.cumsum([D * K * N, D * D]))
    features, hidden = features.reshape(D, K * N), hidden.reshape(D, D)
    head = head.reshape(K, D)
    logits = head @ hidden @ features
    exponentials = np.exp(logits - logits.max(axis=0))
    residual = np.kron(np.eye(K), np.ones(N)) - exponentials / exponentials.sum(axis=0)
    return np.concatenate(
        [
            np.ravel(hidden.T @ head.T @ residual),
            np.ravel(head.T @ residual @ features.T),
            np.ravel(residual @ (hidden @ features).T),
        ]
    )


def test_both_are_the_same_at_the_start_and_apart_later(study):
    assert np.all(study.reached)
    assert study.random.shape == (SEEDS, SAVES, K - 1)
    np.testing.assert_allclose(study.random.sum(axis=-1), 1, rtol=1e-14)
    np.testing.assert_allclose(study.partner.sum(axis=-1), 1, rtol=1e-14)
    np.testing.assert_allclose(study.distance[:, 0], 0, atol=1e-13)
    np.testing.assert_allclose(
        study.random_log_norm[:, 0], study.partner_log_norm[:, 0], rtol=1e-13
    )
    np.testing.assert_allclose(study.random_kl[:, 0], study.partner_kl[:, 0], rtol=1e-9)
    assert np.all(study.sup > 0.1)
    assert np.all(study.sup >= study.final)
    assert np.all(np.diff(study.partner, axis=-1) <= 0)


def test_random_curves_are_those_of_an_independent_integration(study):
    _, model = start(1)
    leaves = (model.features, model.hidden, model.head)
    state = np.concatenate([np.ravel(leaf) for leaf in leaves])
    times = np.exp(study.log_time)
    assert times[0] == 0
    assert study.log_time[-1] == pytest.approx(LOG_TIME)
    solution = solve_ivp(
        rates, (0.0, times[-1]), state, method="DOP853", t_eval=times[1:-1],
        rtol=1e-11, atol=1e-13,
    )  # fmt: skip
    exact = [spectrum_of(column) for column in solution.y.T]
    np.testing.assert_allclose(study.random[1, 1:-1], exact, atol=1e-6)


def test_partner_curves_are_those_of_the_hadamard_start(study):
    """P2's check of its ODE: the full flow from `spectral_partner` has this spectrum.

    At the same times: units of a and of t are both tested.
    """
    models = [ufm.spectral_partner(*start(index)) for index in range(SEEDS)]
    models = jax.tree.map(lambda *leaves: jnp.stack(leaves), *models)
    # The options of the study, and so its program.
    path = ufm.ensemble(
        ufm.GradientFlow(ufm.CrossEntropy(), N), None, models,
        stop=ufm.FinalTime(log=LOG_TIME), saves=SAVES, observe=_spectrum,
        keep_states=False, rtol=1e-8,
    )  # fmt: skip
    values = np.asarray(path.observables["values"])
    sums = values.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(study.partner, values / sums, atol=1e-6)
    np.testing.assert_allclose(study.partner_log_norm, np.log(sums[..., 0]), rtol=1e-6)
    np.testing.assert_allclose(
        study.partner_kl, ufm.kl_from_uniform(jnp.log(values)), rtol=1e-4
    )
    np.testing.assert_allclose(
        study.partner_rank, ufm.effective_rank(jnp.asarray(values)), rtol=1e-5
    )


def test_mismatched_partners_give_the_scale():
    """By hand, three seeds: each random spectrum beside the other two's partners."""
    random = np.array([[[0.7, 0.3]], [[0.6, 0.4]], [[0.9, 0.1]]])
    partner = np.array([[[0.6, 0.4]], [[0.6, 0.4]], [[0.8, 0.2]]])
    nothing = np.zeros((3, 1))
    study = SpectralPrediction(
        log_time=np.zeros(1), random=random, partner=partner, random_log_norm=nothing,
        partner_log_norm=nothing, random_kl=nothing, partner_kl=nothing,
        random_rank=nothing, partner_rank=nothing, reached=np.ones(3, bool),
        outcome=ufm.Outcome.reached,
    )  # fmt: skip
    np.testing.assert_allclose(study.distance[:, 0], [0.2, 0.0, 0.2])
    np.testing.assert_allclose(study.mismatched[:, 0], [0.2, 0.2, 0.6])
    np.testing.assert_allclose(study.final, study.sup)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="`seeds` and `saves` must be at least 2"):
        spectral_prediction(4, seeds=1)
    with pytest.raises(ValueError, match="a power of two"):
        spectral_prediction(6)
    with pytest.raises(ValueError, match="`width` must be at least num_classes"):
        spectral_prediction(4, width=3)
