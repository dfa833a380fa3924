"""The matrix flow from a Hadamard start is the reduced flow in other units (P1 D.3).

All matrix models here are padded to one depth, so that they share two compilations.
"""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from oracles import A_PRIME_OVER_A, FULL_FLOW, FULL_FLOW_START, T_PRIME_OVER_T

import deepufm as ufm
from deepufm import CrossEntropy, GradientFlow, Outcome


def test_the_factors_of_p1_d3():
    units = ufm.scale_map(4, 3, 2.0)
    np.testing.assert_allclose(jnp.exp(units.log_a_factor), A_PRIME_OVER_A, rtol=1e-15)
    np.testing.assert_allclose(
        jnp.exp(units.log_time_factor), T_PRIME_OVER_T, rtol=1e-15
    )
    a = jnp.asarray([1.5, 0.0, 1e-200])
    np.testing.assert_allclose(units.to_reduced(a), A_PRIME_OVER_A * a, rtol=1e-15)
    np.testing.assert_allclose(units.to_full(units.to_reduced(a)), a, rtol=1e-15)


def test_times_are_mapped_as_logarithms():
    units = ufm.scale_map(4, 3, 2.0)
    log_time = jnp.asarray([-jnp.inf, 0.0, 2.3e6])
    mapped = units.log_time_to_reduced(log_time)
    np.testing.assert_allclose(
        mapped[1:], log_time[1:] + math.log(T_PRIME_OVER_T), rtol=1e-15
    )
    assert mapped[0] == -jnp.inf
    np.testing.assert_allclose(units.log_time_to_full(mapped), log_time, rtol=1e-15)


def leak(model, per_class):
    """The part of Z outside the modes of the Hadamard family, relative to Z."""
    left, right = ufm.hadamard_bases(4, per_class)
    return float(ufm.off_diagonal_energy(model.logits(), left, right))


def modes(model, per_class):
    """The diagonal of UᵀZV, by hand."""
    phi = np.array([[(-1) ** (i & j).bit_count() for j in range(4)] for i in range(4)])
    means = np.asarray(model.logits()).reshape(4, 4, per_class).mean(axis=2)
    return np.diagonal(phi @ means @ phi)[1:] / 4 * math.sqrt(per_class)


def test_full_flow_reproduces_an_independent_integration(key):
    start = ufm.hadamard(
        key,
        jnp.asarray(FULL_FLOW_START),
        per_class=3,
        width=6,
        depth=2,
        pad_depth=5,
    )
    flow = GradientFlow(CrossEntropy(), 3, depth=2)
    for time, _, _, singular_values in FULL_FLOW:
        path = ufm.solve(flow, start, stop=ufm.FinalTime(time), saves=2, rtol=1e-10)
        assert path.outcome == Outcome.reached
        got = jnp.linalg.svd(path.final.logits(), compute_uv=False)
        np.testing.assert_allclose(got[:3], singular_values, rtol=1e-8)
        assert got[3] < 1e-13 * got[0]
        assert leak(path.final, 3) < 1e-14


def test_reduced_flow_reproduces_the_same_orbit():
    flow, units = ufm.HadamardFlow(4, 2.0), ufm.scale_map(4, 3, 2.0)
    start = jnp.log(units.to_reduced(jnp.asarray(FULL_FLOW_START)))
    for time, reduced_time, a, _ in FULL_FLOW:
        log_time = units.log_time_to_reduced(jnp.log(jnp.asarray(time)))
        np.testing.assert_allclose(log_time, math.log(reduced_time), rtol=1e-14)
        path = ufm.solve(flow, start, stop=ufm.FinalTime(log=log_time), saves=2)
        np.testing.assert_allclose(path.final, np.log(a), rtol=0, atol=1e-9)


@pytest.mark.parametrize("per_class", [1, 3])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_hadamard_starts_follow_the_reduced_flow(key, per_class, depth):
    a = jnp.asarray([0.9, 0.3, 0.6])
    start = ufm.hadamard(key, a, per_class=per_class, width=6, depth=depth, pad_depth=5)
    units = ufm.scale_map(4, per_class, float(depth))
    full_flow = GradientFlow(CrossEntropy(), per_class, depth=depth)
    for time in (3.0, 1e4):
        full = ufm.solve(
            full_flow, start, stop=ufm.FinalTime(time), saves=2, rtol=1e-10
        )
        reduced = ufm.solve(
            ufm.HadamardFlow(4, float(depth)),
            jnp.log(units.to_reduced(a)),
            stop=ufm.FinalTime(
                log=units.log_time_to_reduced(jnp.log(jnp.asarray(time)))
            ),
            saves=2,
        )
        want = units.to_full(jnp.exp(reduced.final))
        np.testing.assert_allclose(modes(full.final, per_class), want, rtol=1e-7)
        # Singular vectors are frozen, and classes stay collapsed.
        assert leak(full.final, per_class) < 1e-13
        columns = np.asarray(full.final.features).reshape(6, 4, per_class)
        spread = np.max(np.abs(columns - columns[:, :, :1]))
        assert spread < 1e-12 * np.max(np.abs(columns))


def test_only_the_off_diagonal_energy_sees_a_rotation_of_the_singular_vectors(key):
    a = jnp.asarray([0.9, 0.3, 0.6])
    model = ufm.hadamard(key, a, per_class=3, width=5, depth=2)
    logits = model.logits()
    left, right = ufm.hadamard_bases(4, 3)
    angle = 0.3
    plane = left[:, 1:3]
    turn = jnp.asarray(
        [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
    )
    rotated = logits + plane @ (turn - jnp.eye(2)) @ plane.T @ logits
    for z in (logits, rotated):
        assert ufm.residual_energy(z) < 1e-14
    assert ufm.off_diagonal_energy(logits, left, right) < 1e-14
    assert ufm.off_diagonal_energy(rotated, left, right) > 0.05
