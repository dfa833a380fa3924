"""Invariant rays, against the flow itself and an enumeration by hand."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ray_oracles import direction, psi

import deepufm as ufm
from deepufm.stability._rays import (
    is_ray_invariant,
    ray_invariant_structures,
    ray_support,
    structure_modes,
)

# Sizes of supports, and of their orbits under relabelling.
CATALOGUE = {
    2: [(1, 1)],
    4: [(1, 3), (2, 3), (3, 1)],
    8: [(1, 7), (2, 21), (3, 7), (3, 28), (4, 7), (6, 7), (7, 1)],
    16: [
        (1, 15), (2, 105), (3, 35), (3, 420), (4, 105), (4, 840), (5, 168), (6, 105),
        (6, 280), (6, 420), (7, 15), (7, 120), (8, 15), (9, 280), (10, 168), (12, 35),
        (14, 15), (15, 1),
    ],
}  # fmt: skip


def supports(num_classes):
    """All but the empty one."""
    rows = itertools.product([0.0, 1.0], repeat=num_classes - 1)
    return np.array([row for row in rows if any(row)])


@jax.jit
def flow_directions(log_a, depth):
    """One state a row."""
    flow = ufm.HadamardFlow(log_a.shape[1] + 1, depth)
    return jax.vmap(flow)(log_a)[0]


def keeps(directions, norm, depth):
    """Whether the flow's living modes grow at one rate, a row each."""
    alive = directions > 0
    with np.errstate(divide="ignore"):
        log_a = np.log(directions / directions.sum(axis=1, keepdims=True) * norm)
    rates = np.asarray(flow_directions(jnp.asarray(log_a), depth))
    most = np.max(np.where(alive, rates, 0), axis=1)
    return most - np.min(np.where(alive, rates, np.inf), axis=1) < 1e-12 * most


def orbit(support):
    """All supports that an invertible matrix over F_2 makes of one."""
    digits = (len(support) + 1).bit_length() - 1
    numbers = range(1, len(support) + 1)
    found = set()
    for images in itertools.product(numbers, repeat=digits):
        image = [0] * (len(support) + 1)
        for i in numbers:
            for digit in range(digits):
                image[i] ^= images[digit] * (i >> digit & 1)
        if all(image[1:]):
            found.add(tuple(sorted(image[i] for i in numbers if support[i - 1])))
    return found


@pytest.mark.parametrize("num_classes", CATALOGUE)
def test_the_catalogue_has_all_orbits(num_classes):
    entries = ray_invariant_structures(num_classes)
    assert [(e.size, e.orbit) for e in entries] == CATALOGUE[num_classes]
    assert [e.modes for e in entries if e.name == "simplex ETF"] == [
        tuple(range(1, num_classes))
    ]
    for entry in entries:
        assert is_ray_invariant(3 * entry.direction)
        margins = psi(num_classes) @ entry.direction
        np.testing.assert_array_equal(
            np.repeat(entry.margins, entry.margin_counts), np.sort(margins)
        )
        assert entry.spans == (np.min(margins) > 0)
        assert entry.spans == (2**entry.rank == num_classes)


@pytest.mark.parametrize("num_classes", [4, 8])
def test_the_flow_keeps_these_rays_and_no_others(num_classes):
    every = supports(num_classes)
    said = np.array([is_ray_invariant(row) for row in every])
    for depth in (1.0, 2.5):
        kept = [keeps(every, norm, depth) for norm in (1e-2, 1.0, 30.0)]
        np.testing.assert_array_equal(np.all(kept, axis=0), said)
    listed = {}
    for entry in ray_invariant_structures(num_classes):
        members = orbit(entry.direction)
        assert len(members) == entry.orbit
        # Lexicographically largest: the first modes alive, as far as can be.
        assert max(tuple(direction(num_classes, m)) for m in members) == tuple(
            entry.direction
        )
        listed |= dict.fromkeys(members)
    flags = [tuple((np.flatnonzero(row) + 1).tolist()) in listed for row in every]
    np.testing.assert_array_equal(flags, said)


def test_unequal_modes_keep_no_direction():
    rng = np.random.default_rng(0)
    rays = np.exp(0.1 * rng.normal(size=(20, 7))) * (rng.random((20, 7)) < 0.7)
    nearly = np.array([[1, 1, 1, 1, 1, 1, 1.0001]])
    rays = np.vstack([rays[np.sum(rays > 0, axis=1) > 1], nearly])
    assert not any(is_ray_invariant(ray) for ray in rays)
    # At L = 1 small norms do not tell, so that larger ones have to.
    for depth, norms in ((1.0, (0.3, 3.0)), (3.0, (1e-3,))):
        kept = np.all([keeps(rays, norm, depth) for norm in norms], axis=0)
        assert not np.any(kept)


def test_one_support_of_many_classes_can_be_asked_about():
    assert is_ray_invariant(structure_modes(ufm.Structure.CROSS_POLYTOPE, 256))
    assert not is_ray_invariant(direction(256, [1, 2, 3, 4]))
    # To rounding of what a limit comes with.
    assert is_ray_invariant(direction(256, [1, 2, 4]) * (1 + 1e-10) + 1e-12)


@pytest.mark.parametrize("num_classes", [2, 4, 16])
def test_named_structures_have_the_logits_of_their_modes(num_classes):
    phi = np.asarray(ufm.sylvester_hadamard(num_classes))
    structures = list(ufm.Structure)[: 3 if num_classes == 4 else 2]
    for structure in structures:
        modes = np.asarray(structure_modes(structure, num_classes))
        logits = phi @ np.diag([0, *modes]) @ phi
        wanted = np.asarray(structure.logits(num_classes))
        # The same inner products, in any order, for every class.
        for row, known in zip(logits / logits[0, 0], wanted / wanted[0, 0]):
            np.testing.assert_allclose(np.sort(row), np.sort(known), atol=1e-12)
    names = [e.name for e in ray_invariant_structures(num_classes)]
    assert names.count("cross-polytope") == (num_classes > 2)


def test_the_cross_polytope_is_in_the_catalogue():
    for num_classes in (4, 8, 16):
        modes = np.asarray(structure_modes(ufm.Structure.CROSS_POLYTOPE, num_classes))
        (entry,) = [
            e
            for e in ray_invariant_structures(num_classes)
            if e.name == "cross-polytope"
        ]
        margins = np.sort(psi(num_classes) @ modes)
        assert margins.tolist() == np.sort(psi(num_classes) @ entry.direction).tolist()
        assert entry.size == num_classes // 2


def test_what_is_no_structure_of_the_reduced_flow_is_refused():
    with pytest.raises(ValueError, match="two modes, which tell 4 classes apart"):
        structure_modes(ufm.Structure.POLYGON, 8)
    with pytest.raises(ValueError, match="power of two"):
        structure_modes(ufm.Structure.SIMPLEX_ETF, 6)
    with pytest.raises(ValueError, match="must be 2, 4, 8 or 16, but is 32"):
        ray_invariant_structures(32)


@pytest.mark.parametrize(
    ("ray", "message"),
    [
        ([1.0, 1, 1, 1], "K a power of two"),
        ([1.0, -1, 1], "none negative"),
        ([1.0, np.nan, 1], "finite"),
        ([0.0, 0, 0], "one positive"),
    ],
)
def test_what_is_no_direction_is_refused(ray, message):
    with pytest.raises(ValueError, match=message):
        is_ray_invariant(np.array(ray))


def test_a_direction_that_turns_is_refused_with_advice():
    with pytest.raises(ValueError, match=r"must be invariant.*\[1 2 3 4\].*`limit`"):
        ray_support(direction(8, [1, 2, 3, 4]))
    with pytest.raises(ValueError, match="is traced"):
        jax.jit(ray_support)(jnp.ones(3))
