"""Exponents of invariant rays, against tables, differences in 50 digits and limits."""

import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest
from ray_oracles import (
    C_MU,
    C_TRANSVERSE,
    C_WITHIN,
    C_WITHIN_32,
    DNC_EXPONENTS,
    DNC_MU,
    brute_rates,
    difference_exponents,
    direction,
    log_norm_field,
)

import deepufm as ufm
from deepufm.stability._exponents import StabilityExponents, stability_exponents
from deepufm.stability._ray_spectrum import ray_spectrum
from deepufm.stability._rays import (
    is_ray_invariant,
    ray_invariant_structures,
    structure_modes,
)

C = ufm.Structure.CROSS_POLYTOPE
# 36 of 64 - 1 modes, an orbit of a group found by random search.
NO_COMMON_EIGENVECTORS = [
    1, 2, 4, 5, 6, 8, 11, 12, 13, 14, 15, 18, 19, 20, 24, 26, 27, 30, 32, 33, 34, 35,
    38, 40, 41, 43, 44, 48, 51, 52, 53, 54, 57, 58, 61, 63,
]  # fmt: skip


def mapped(ray, norms, depth) -> StabilityExponents:
    """Of many norms."""
    return jax.vmap(lambda norm: stability_exponents(ray, norm, depth))(
        jnp.asarray(norms, float)
    )


@pytest.mark.parametrize("num_classes", [4, 8, 16])
def test_neural_collapse(num_classes):
    for depth, known in DNC_EXPONENTS:
        norms = np.array(DNC_MU) * (num_classes - 1)
        found = mapped(jnp.ones(num_classes - 1), norms, depth)
        assert found.within.shape == (5, num_classes - 2)
        assert found.transverse.shape == (5, 0)
        np.testing.assert_allclose(
            found.within, np.array(known)[:, None] + np.zeros((1, num_classes - 2)),
            rtol=1e-14, atol=1e-16,
        )  # fmt: skip
        np.testing.assert_array_equal(found.leading, found.within[:, 0])


@pytest.mark.parametrize(("num_classes", "depth", "known"), C_WITHIN)
def test_the_cross_polytope(num_classes, depth, known):
    ray = structure_modes(C, num_classes)
    found = mapped(ray, np.array(C_MU) * num_classes / 2, depth)
    assert found.within.shape == (4, num_classes // 2 - 1)
    for exponents in found.within.T:
        np.testing.assert_allclose(exponents, known, rtol=1e-14)
    if depth > 1:
        np.testing.assert_array_equal(found.transverse, -1)
        np.testing.assert_array_equal(found.stable, np.array(known) < 0)
        return
    (grows,) = [row for k, row in C_TRANSVERSE if k == num_classes]
    assert found.dead_modes == tuple(range(2, num_classes, 2))
    for exponents in found.transverse.T:
        np.testing.assert_allclose(exponents, grows, rtol=1e-13)
    np.testing.assert_allclose(found.leading, grows, rtol=1e-13)
    assert not np.any(found.stable)


@pytest.mark.parametrize(("depth", "known"), C_WITHIN_32)
def test_the_cross_polytope_of_32_classes(depth, known):
    found = stability_exponents(structure_modes(C, 32), 0.3 * 16, depth)
    np.testing.assert_allclose(found.within, known, rtol=1e-14)


@pytest.mark.parametrize(
    ("num_classes", "modes", "mu", "depth"),
    [
        (8, (1, 2, 4), 0.37, 2.5),
        (8, (1, 2, 3, 4, 5, 6), 1.3, 1.0),
        (16, (1, 2, 4, 8, 15), 0.21, 3.0),
        (16, (1, 2, 4, 7, 8, 11), 0.6, 1.5),
    ],
)
def test_other_rays_have_the_eigenvalues_of_the_exact_jacobian(
    num_classes, modes, mu, depth
):
    ray = direction(num_classes, modes)
    found = stability_exponents(ray, mu * len(modes), depth)
    assert (found.modes, found.size) == (modes, len(modes))
    known = difference_exponents(num_classes, modes, mu, depth)
    np.testing.assert_allclose(np.sort(found.within), known, rtol=1e-11, atol=1e-13)


def test_every_ray_of_the_catalogue_at_small_and_large_norms():
    for entry in ray_invariant_structures(16):
        spectrum = ray_spectrum(entry.direction > 0)
        for mu in (1e-6, 0.4, 3.0, 50.0):
            decay = np.exp(-mu * (spectrum.margins - spectrum.margins[0]))
            found = mu * (spectrum.shares @ decay) / (spectrum.counts @ decay)
            found = np.sort(found[spectrum.branches])
            known = brute_rates(16, entry.modes, mu)
            tiny = float(1e-13 * np.max(known, initial=0))
            np.testing.assert_allclose(found, known, rtol=1e-12, atol=tiny)


@pytest.mark.parametrize("mu", [1e-9, 0.1, 2.0, 400.0])
def test_dead_modes_at_depth_one(mu):
    """Three modes of rank 2 misclassify: dead ones grow like e^{4 mu}."""
    for num_classes, modes in ((8, (1, 2, 3)), (8, (1, 2, 4)), (16, (1, 2, 4, 8, 15))):
        found = stability_exponents(direction(num_classes, modes), mu * len(modes), 1)
        with mp.workdps(60):
            log_a = [
                mp.log(mp.mpf(mu)) if i in modes else mp.mpf(-4000)
                for i in range(1, num_classes)
            ]
            rates = log_norm_field(log_a, mp.mpf(0))
            known = [rates[i - 1] - 1 for i in found.dead_modes]
            logs = np.array([mp.log(rates[i - 1]) for i in found.dead_modes], float)
        np.testing.assert_allclose(found.log_rate_ratio, logs, rtol=1e-12)
        # Beyond floats it says so.
        finite = logs < 700
        np.testing.assert_allclose(
            found.transverse[finite], np.array(known, float)[finite], rtol=1e-12
        )
        assert np.all(np.asarray(found.transverse)[~finite] == np.inf)
        # What sum_i (a'_i - a_i) b_i > 0 says: something invades.
        assert float(found.leading) > 0
        assert float(jnp.max(found.log_rate_ratio)) > 0
        np.testing.assert_array_equal(
            found.log_invasion_ratio, np.where(logs > 0, -np.inf, np.inf)
        )


def test_a_dead_mode_shrinks_below_the_invasion_ratio_and_grows_above():
    mu, depth = 1.2, 1.05
    found = stability_exponents(structure_modes(C, 8), 4 * mu, depth)
    ratio = np.exp(float(found.log_invasion_ratio[1]))
    assert 1e-7 < ratio < 1e-4  # small enough not to move the margins
    for factor in (0.9, 1.1):
        log_a = [np.log(mu) if i % 2 else -2000.0 for i in range(1, 8)]
        log_a[3] = np.log(mu * ratio * factor)
        rates = log_norm_field(
            [mp.mpf(x) for x in log_a], mp.mpf((depth - 1) / (depth + 1))
        )
        assert (rates[3] > rates[0]) == (factor > 1)
        # Far below it the exponent is the limit's.
    log_a[3] = -1500.0
    rates = log_norm_field(
        [mp.mpf(x) for x in log_a], mp.mpf((depth - 1) / (depth + 1))
    )
    assert float(rates[3] - 1) == pytest.approx(float(found.transverse[1]), rel=1e-12)


@pytest.mark.parametrize("num_classes", [4, 16])
@pytest.mark.parametrize("depth", [1 + 1e-9, 2.0, np.inf])
def test_the_invasion_ratio_of_c_tends_to_that_of_p1(num_classes, depth):
    found = stability_exponents(structure_modes(C, num_classes), 1e4, depth)
    power = 1.0 if np.isinf(depth) else (depth - 1) / (depth + 1)
    np.testing.assert_allclose(
        found.log_invasion_ratio, np.log((num_classes - 2) / num_classes) / power, 1e-12
    )
    # And before that to (K-2+2x)/K, x = e^{-K mu/2}.
    norm = 0.3 * num_classes / 2
    found = stability_exponents(structure_modes(C, num_classes), norm, depth)
    x = np.exp(-num_classes * 0.3 / 2)
    log_ratio = np.log1p(-2 * (1 - x) / num_classes) / power
    np.testing.assert_allclose(found.log_invasion_ratio, log_ratio, rtol=1e-12)


def test_batches_and_derivatives():
    ray = direction(16, [1, 2, 4, 8, 15])
    norms, depths = np.array([0.5, 4.0]), np.array([1.0, 2.0])
    batch = jax.jit(jax.vmap(lambda n, d: stability_exponents(ray, n, d)))(
        jnp.asarray(norms), jnp.asarray(depths)
    )
    assert batch.leading.shape == (2,)
    assert batch.stable.tolist() == [False, True]
    for row, (norm, depth) in enumerate(zip(norms, depths)):
        one = stability_exponents(ray, norm, depth)
        for name in ("within", "transverse", "log_rate_ratio", "log_invasion_ratio"):
            np.testing.assert_allclose(
                getattr(batch, name)[row], getattr(one, name), rtol=1e-14
            )

    @jax.jit
    def both(norm, depth):
        found = stability_exponents(ray, norm, depth)
        return jnp.stack([found.within[0], found.log_invasion_ratio[0]])

    derivatives = jax.jit(jax.jacfwd(both, argnums=(0, 1)))
    slopes = derivatives(1.3, 2.0)
    step = 1e-5
    ahead = (both(1.3 + step, 2.0) - both(1.3 - step, 2.0)) / (2 * step)
    np.testing.assert_allclose(slopes[0], ahead, rtol=1e-8)
    ahead = (both(1.3, 2.0 + step) - both(1.3, 2.0 - step)) / (2 * step)
    np.testing.assert_allclose(slopes[1], ahead, rtol=1e-8)
    # At L = 1, and at norm 0, nothing is NaN.
    np.testing.assert_allclose(derivatives(1.3, 1.0)[1], [0.5, 0], rtol=1e-14)
    still = stability_exponents(ray, 0, 2)
    np.testing.assert_allclose(still.within, 1 / 3, rtol=1e-15)
    np.testing.assert_array_equal(still.log_rate_ratio, 0)


def test_two_classes_have_no_perturbations():
    found = stability_exponents(jnp.ones(1), 2.0, 3.0)
    assert found.within.shape == found.transverse.shape == (0,)
    assert float(found.leading) == -np.inf
    assert bool(found.stable)


def test_a_ray_without_common_eigenvectors_is_refused():
    ray = direction(64, NO_COMMON_EIGENVECTORS)
    assert is_ray_invariant(ray)
    with pytest.raises(ValueError, match="36 modes of 63, have no closed form"):
        stability_exponents(ray, 1.0, 2.0)


def test_constants_sum_to_the_number_of_classes():
    for entry in ray_invariant_structures(16):
        found = ray_spectrum(entry.direction > 0)
        assert np.sum(found.counts) == 16
        assert np.all(np.sum(found.shares, axis=1) == 16)
        assert np.all(np.sum(found.dead_counts, axis=1) == 16)
        assert len(found.branches) == entry.size - 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1.0, 2.0), "`norm`.*finite and at least 0, but is -1"),
        ((np.inf, 2.0), "finite"),
        ((1.0, 0.5), "`depth` must be at least 1"),
    ],
)
def test_wrong_norms_and_depths_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        stability_exponents(jnp.ones(3), *arguments)
    with pytest.raises(ValueError, match="must be invariant"):
        stability_exponents(direction(8, [1, 2, 3, 4]), 1.0, 2.0)
