"""Alignment of random starts with collapse, against width: laws and constants."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import brentq

import deepufm as ufm
from deepufm.stability import _random_starts
from deepufm.stability._random_starts import (
    grown_alignment,
    initial_alignment,
    logit_velocity,
    zeroth_order_alignment,
)
from deepufm.stability._width_study import WidthStudy, fitted_power_law

K, N, L = 3, 2, 2


def velocity_by_products(layers, num_classes, per_class):
    """P1 eq. 56 in NumPy, layer by layer; `layers` are H_1, W_1, ..., W_L."""
    logits = layers[0]
    for layer in layers[1:]:
        logits = layer @ logits
    exponentials = np.exp(logits - logits.max(axis=0))
    residual = np.kron(np.eye(num_classes), np.ones(per_class))
    residual -= exponentials / exponentials.sum(axis=0)
    total = np.zeros_like(residual)
    for index in range(len(layers)):
        left, right = np.eye(num_classes), np.eye(num_classes * per_class)
        for layer in layers[:index:-1]:
            left = left @ layer
        for layer in layers[:index]:
            right = layer @ right
        total = total + left @ left.T @ residual @ right.T @ right
    return total


def distance(logits, num_classes, per_class):
    """P1 eq. 61 in NumPy."""
    etf = np.eye(num_classes) - 1 / num_classes
    target = np.kron(etf, np.ones(per_class))
    difference = logits / np.linalg.norm(logits) - target / np.linalg.norm(target)
    return np.sum(difference**2)


@pytest.fixture(scope="module")
def study():
    """Two widths, many seeds: shared, since each width is a program."""
    return initial_alignment(
        [32, 128], num_classes=K, per_class=N, depth=L, scale=1e-3, seeds=250
    )


@pytest.mark.parametrize("std", [1e-2, 2.0])
def test_velocity_is_the_sum_over_layers(std):
    """At a start of size one the softmax is far from uniform: P is in it as well."""
    rng = np.random.default_rng(0)
    shapes = [(5, K * N), (5, 5), (K, 5)]
    layers = [std * rng.normal(size=shape) for shape in shapes]
    model = ufm.DeepUFM(
        head=jnp.asarray(layers[2]),
        hidden=jnp.asarray(layers[1])[None],
        features=jnp.asarray(layers[0]),
    )
    velocity, log_speed = logit_velocity(ufm.GradientFlow(ufm.CrossEntropy(), N), model)
    np.testing.assert_allclose(
        np.exp(log_speed) * velocity,
        velocity_by_products(layers, K, N),
        rtol=1e-10,
        atol=1e-13 * std ** (2 * L),
    )


def test_distances_of_single_starts_are_those_of_the_products(study):
    """Of a key for each width, too: the points of the fit are independent."""
    for row, width in enumerate(study.widths):
        key = jax.random.fold_in(jax.random.key(0), int(width))
        model = ufm.gaussian(
            jax.random.fold_in(key, 7), num_classes=K, per_class=N, width=int(width),
            depth=L, scale=1e-3,
        )  # fmt: skip
        layers = [np.asarray(x) for x in (model.features, *model.hidden, model.head)]
        velocity = velocity_by_products(layers, K, N)
        assert study.distance[row, 7] == pytest.approx(
            distance(velocity, K, N), rel=1e-10
        )
        means = velocity.reshape(K, K, N).mean(axis=2)
        assert study.mean_distance[row, 7] == pytest.approx(
            distance(means, K, 1), rel=1e-10
        )


def test_leading_constant_is_that_of_wishart_products(study):
    """In closed form, and drawn: sampling and terms of 1/d² leave a few per cent."""
    # σ² = 5, (L+1)² = 9, (n+1)K = 9 and 6, 4/(K-1) = 2.
    assert study.leading == pytest.approx(5 / 9 * (9 + 2 - 2))
    assert study.mean_leading == pytest.approx(5 / 9 * (6 + 2 - 2))
    rng = np.random.default_rng(1)
    width, draws = 500, 1500
    total = 0.0
    for _ in range(draws):
        head, features = rng.normal(size=(K, width)), rng.normal(size=(width, K * N))
        left, right = head @ head.T / width, features.T @ features / width
        # The hidden layer multiplies either Gram matrix by a Wishart of its own.
        roots = [np.linalg.cholesky(x) for x in (left, right)]
        drawn = [rng.normal(size=(len(x), width)) for x in roots]
        both = [r @ x @ x.T @ r.T / width for r, x in zip(roots, drawn)]
        target = np.kron(np.eye(K) - 1 / K, np.ones(N))
        total += distance(
            both[0] @ target + left @ target @ right + target @ both[1], K, N
        )
    assert width * total / draws == pytest.approx(study.leading, rel=0.06)
    error = study.std[1] / np.sqrt(study.distance.shape[1])
    assert abs(study.mean[1] - study.leading / 128) < 4 * error + 0.06 * study.mean[1]


def test_distance_squared_falls_like_one_over_width(study):
    law = study.power_law()
    assert law.points == 500
    assert law.exponent_error < 0.05
    assert abs(law.exponent + 1) < 4 * law.exponent_error
    means = study.power_law(means=True)
    assert abs(means.exponent + 1) < 4 * means.exponent_error
    assert means.coefficient < law.coefficient


def test_power_law_and_its_errors_are_those_of_the_normal_equations():
    rng = np.random.default_rng(2)
    x = np.repeat([10, 20, 80, 320], 5)
    y = 7 * x**-1.5 * np.exp(0.1 * rng.normal(size=x.size))
    law = fitted_power_law(x, y)
    design = np.stack([np.log(x), np.ones(x.size)], axis=1)
    solution, (residual,), *_ = np.linalg.lstsq(design, np.log(y))
    covariance = residual / (x.size - 2) * np.linalg.inv(design.T @ design)
    assert law.exponent == pytest.approx(solution[0])
    assert law.coefficient == pytest.approx(np.exp(solution[1]))
    assert law.exponent_error == pytest.approx(np.sqrt(covariance[0, 0]))
    assert law.log_coefficient_error == pytest.approx(np.sqrt(covariance[1, 1]))


def test_zeroth_order_growth_aligns_by_the_same_law():
    """c = (K-2)(K+1)/(K-1), by the Wishart matrix on the K-1 dimensions of 1⊥."""
    study = zeroth_order_alignment([128], num_classes=4, per_class=2, seeds=400)
    assert study.leading == pytest.approx(10 / 3)
    error = study.std / np.sqrt(400)
    assert abs(study.mean - study.leading / 128) < 4 * error + 0.05 * study.mean
    rng = np.random.default_rng(3)
    etf = np.eye(4) - 1 / 4
    drawn = []
    for _ in range(1500):
        x = rng.normal(size=(4, 128))
        drawn.append(distance(etf @ x @ x.T @ etf, 4, 1))
    spread = np.hypot(np.std(drawn) / np.sqrt(1500), error)
    assert abs(study.mean - np.mean(drawn)) < 4 * spread
    # Class means and all columns agree once what is not class-constant has died.
    np.testing.assert_allclose(study.mean_distance, study.distance, rtol=1e-3)


def test_grown_logits_keep_the_random_start_in_them(monkeypatch):
    """Along the exact orbit near the origin, of which `solve` is spared the root."""

    def along_the_linear_flow(flow, model, *, stop, **options):
        del options

        def state(time):
            return ufm.zeroth_order_solution(model, time, 2)

        @jax.jit
        def excess(time):
            return stop.excess(flow, jnp.zeros(()), state(time))

        time = brentq(lambda time: float(excess(time)), 0.0, 10.0)
        return SimpleNamespace(outcome=ufm.Outcome.reached, final=state(time))

    monkeypatch.setattr(_random_starts, "solve", along_the_linear_flow)
    growth = 3.0
    study = grown_alignment(
        [4096], num_classes=3, per_class=2, depth=1, scale=1e-6, growth=growth, seeds=2
    )
    # What of the start is orthogonal to the target is its share of 1/3 of the logits.
    target = np.kron(np.eye(3) - 1 / 3, np.ones(2))
    base = jax.random.fold_in(jax.random.key(0), 4096)
    for index, found in enumerate(study.distance[0]):
        start = ufm.gaussian(
            jax.random.fold_in(base, index), num_classes=3, per_class=2, width=4096,
            depth=1, scale=1e-6,
        ).logits()  # fmt: skip
        cosine = np.sum(start * target) / np.linalg.norm(start) / 2
        sine = np.sqrt(1 - cosine**2) / growth
        assert found == pytest.approx(2 - 2 * np.cos(np.arcsin(sine)), rel=0.1)
    average = np.sqrt(1 - 1 / 18) / growth
    assert study.floor == pytest.approx(2 - 2 * np.cos(np.arcsin(average)), rel=1e-13)
    assert np.all(study.mean_distance < study.distance)
    assert np.isnan(study.leading)

    def nowhere(flow, model, **options):
        del flow, options
        return SimpleNamespace(outcome=ufm.Outcome.step_budget, final=model)

    monkeypatch.setattr(_random_starts, "solve", nowhere)
    lost = grown_alignment([64], num_classes=3, per_class=2, depth=1, seeds=2)
    assert np.all(np.isnan(lost.distance))


@pytest.mark.usefixtures("unhooked")
def test_wrong_arguments_are_refused():
    refused: list[Any] = [[], [8, 4], [4.5, 8.0], 8]
    for widths in refused:
        with pytest.raises(ValueError, match="rising whole numbers"):
            initial_alignment(widths)
    with pytest.raises(ValueError, match="widths d >= K"):
        initial_alignment([4, 8], num_classes=5)
    with pytest.raises(ValueError, match="`seeds` of 2 or more"):
        initial_alignment([16], seeds=1)
    with pytest.raises(ValueError, match="`scale` positive"):
        initial_alignment([16], scale=0.0)
    with pytest.raises(ValueError, match="positive and at most 300"):
        zeroth_order_alignment([16], growth=0.0)
    with pytest.raises(ValueError, match="finite and above 1"):
        grown_alignment([16], growth=1.0)
    one = WidthStudy(np.array([4]), np.ones((1, 2)), np.ones((1, 2)), 1.0, 1.0, 0.0)
    with pytest.raises(ValueError, match="two widths or more"):
        one.power_law()
    with pytest.raises(ValueError, match="must be positive and finite"):
        fitted_power_law(np.array([1, 2]), np.array([0.0, 1.0]))
    flow: Any = ufm.HadamardFlow(4, 1)
    model: Any = None
    with pytest.raises(ValueError, match="a `GradientFlow`"):
        logit_velocity(flow, model)
