"""Names of structures: permuted, scaled and noisy copies, and what is none of them."""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from deepufm import Structure
from deepufm.analysis._classify import classification_radius, classify
from deepufm.geometry._softmax_code import softmax_code

ETF, PAIRS, POLYGON = Structure.SIMPLEX_ETF, Structure.CROSS_POLYTOPE, Structure.POLYGON
NAMES = {ETF: "simplex ETF", PAIRS: "cross-polytope", POLYGON: "regular polygon"}


def shuffled(matrix, rng):
    order = rng.permutation(len(matrix))
    return np.asarray(matrix)[np.ix_(order, order)]


def noisy(matrix, size, rng):
    """Plus noise of random direction and a size relative to the matrix's norm."""
    noise = rng.normal(size=matrix.shape)
    return matrix + size * np.linalg.norm(matrix) / np.linalg.norm(noise) * noise


def expected_name(structure, num_classes):
    if structure is POLYGON and num_classes < 5:
        return ETF if num_classes == 3 else PAIRS
    return structure


@pytest.mark.parametrize("num_classes", range(3, 11))
@pytest.mark.parametrize("structure", list(Structure))
def test_copies_keep_their_name_up_to_the_radius(structure, num_classes):
    rng = np.random.default_rng(num_classes)
    radius = classification_radius(num_classes)
    target = np.asarray(structure.logits(num_classes))
    for part in (0.0, 1e-4, 0.99):
        copy = noisy(shuffled(target, rng), part * radius, rng)
        got = classify(10 ** rng.uniform(-150, 150) * copy)
        wanted = expected_name(structure, num_classes)
        assert got.structure is wanted
        assert got.name == ("near a " if part > 0.01 else "") + NAMES[wanted]
        assert got.distance == got.distances[wanted]
        assert got.distance <= part * radius + 1e-15
        if part > 0 and num_classes > 4:
            assert got.distance > 0.5 * part * radius
        if part == 0:
            ordered = copy[np.ix_(got.order, got.order)]
            target = np.asarray(wanted.logits(num_classes))
            scale = ordered[0, 0] / target[0, 0]
            np.testing.assert_allclose(ordered, scale * target, atol=1e-15)
            assert got.rank == np.linalg.matrix_rank(target)


def sine_to_the_best_permutation(matrix, target):
    """Over all of them: the oracle for the matching and the order round the circle."""
    matrix, target = matrix / np.linalg.norm(matrix), target / np.linalg.norm(target)
    orders = np.asarray(list(itertools.permutations(range(len(matrix)))))
    permuted = matrix[orders[:, :, None], orders[:, None, :]]
    cosine = max(0.0, np.max(np.sum(permuted * target, axis=(1, 2))))
    return math.sqrt(1 - cosine**2)


@pytest.mark.parametrize("num_classes", [3, 4, 5, 6])
def test_distances_are_least_over_all_permutations(num_classes):
    rng = np.random.default_rng(1)
    for trial in range(4):
        matrix = rng.normal(size=(num_classes, num_classes))
        if trial % 2:
            matrix = matrix @ matrix.T
        got = classify(matrix)
        for structure, distance in got.distances.items():
            target = np.asarray(structure.logits(num_classes))
            wanted = sine_to_the_best_permutation(matrix, target)
            assert distance == pytest.approx(wanted, rel=1e-12)
        least = min(got.distances.values())
        assert got.distance == pytest.approx(least, rel=1e-14)


@pytest.mark.parametrize("num_classes", [3, 4, 5, 6, 7, 8, 10, 16, 33])
def test_the_radius_is_the_sine_of_half_the_least_angle(num_classes):
    """Closed forms: opposite vertices are paired; in odd polygons the farthest ones."""
    k, pairs = num_classes, num_classes // 2
    norm = math.sqrt(2 * k) if k % 2 == 0 else math.sqrt(2 * k - 1)
    cosines = [
        (k if k % 2 == 0 else k - 1 / k) / math.sqrt(k - 1) / norm,
        math.sqrt(2 / (k - 1)),
        (k + 2 * pairs * (1 if k % 2 == 0 else math.cos(math.pi / k)))
        / (k / math.sqrt(2) * norm),
    ]
    least = min(math.acos(c) for c in cosines if c < 1 - 1e-12)
    assert classification_radius(k) == pytest.approx(math.sin(least / 2), rel=1e-12)


@pytest.mark.parametrize("num_classes", [5, 8, 10])
def test_noise_towards_another_structure_shows_the_radius_is_the_largest(num_classes):
    """Along the straight line between the two nearest structures."""
    radius = classification_radius(num_classes)
    etf, pairs = (np.asarray(s.logits(num_classes)) for s in (ETF, PAIRS))
    if num_classes == 5:
        etf = etf - np.mean(etf)
    etf, pairs = etf / np.linalg.norm(etf), pairs / np.linalg.norm(pairs)
    angle = 2 * math.asin(radius)
    assert np.sum(etf * pairs) == pytest.approx(math.cos(angle), rel=1e-12)
    across = (pairs - math.cos(angle) * etf) / math.sin(angle)

    def at(turn):
        return classify(math.cos(turn) * etf + math.sin(turn) * across).name

    assert at(0.499 * angle) == "near a simplex ETF"
    assert at(0.501 * angle) == "near a cross-polytope"


def test_where_structures_coincide_one_name_is_used():
    assert classify(np.asarray(POLYGON.logits(3))).structure is ETF
    assert classify(np.asarray(POLYGON.logits(4))).structure is PAIRS
    pair = classify(np.asarray([[1.0, -1.0], [-1.0, 1.0]]))
    assert pair.structure is ETF
    assert set(pair.distances) == {ETF, PAIRS}
    assert set(classify(np.eye(3)).distances) == set(Structure)


def antiprism():
    """Eight points in R^3 with inner products of (2 sqrt 2 - 1)/7 at most."""
    height = math.sqrt((2 * math.sqrt(2) - 1) / 7)
    angles = np.pi / 4 * np.arange(8)
    heights = np.where(np.arange(8) % 2 == 0, height, -height)
    flat = math.sqrt(1 - height**2)
    return np.stack([flat * np.cos(angles), flat * np.sin(angles), heights])


CODES = [
    (antiprism(), 3),
    (softmax_code(5, 3).vectors, 3),
    (softmax_code(7, 4).vectors, 4),
    (softmax_code(10, 8).vectors, 8),  # nearer to the simplex than the radius
    (softmax_code(30, 20).vectors, 20),
]


@pytest.mark.parametrize(("vectors", "rank"), CODES)
def test_softmax_codes_are_named_by_their_rank(vectors, rank):
    rng = np.random.default_rng(2)
    logits = shuffled(vectors.T @ vectors, rng)
    got = classify(3e5 * logits)
    assert got.name == f"softmax code of rank {rank}"
    assert got.structure is None
    assert got.rank == rank
    assert got.code_misfit < 1e-12
    assert got.distance > 0.25
    close = classify(noisy(logits, 1e-6, rng))
    assert close.name == got.name
    assert 1e-7 < close.code_misfit < 1e-5


def test_optimal_codes_of_more_than_the_least_norm_are_codes_too():
    """Two opposite pairs and a vector, one pair bent away from that vector."""
    bent = np.asarray(PAIRS.logits(5))
    vectors = np.asarray([[1.0, -1, 0, 0, 0], [0, 0, 1, -0.8, 0], [0, 0, 0, -0.6, 1.0]])
    got = classify(vectors.T @ vectors)
    assert got.name == "softmax code of rank 3"
    assert got.max_inner_product == pytest.approx(0, abs=1e-15)
    assert classify(bent).name == "cross-polytope"


def test_noise_makes_no_code_of_an_odd_cross_polytope():
    """It has the largest inner product of a code of its rank, and a name of its own."""
    rng = np.random.default_rng(3)
    for size in np.linspace(1e-4, 2e-4, 24):
        got = classify(noisy(np.asarray(PAIRS.logits(5)), size, rng))
        assert got.structure is PAIRS


def test_what_is_no_structure_gets_no_name():
    cube = np.asarray(list(itertools.product([-1, 1], repeat=3))).T / 3**0.5
    got = classify(cube.T @ cube)
    assert (got.name, got.structure) == ("other (rank 3)", None)
    assert got.max_inner_product == pytest.approx(1 / 3, rel=1e-14)
    # Against the least, of the antiprism.
    assert got.code_misfit == pytest.approx(1 / 3 - (2 * 2**0.5 - 1) / 7, rel=1e-12)
    # The right angles between vectors, of lengths that differ.
    lengths = np.asarray([1.0, 1, 1, 1.2, 1.2, 1.2, 1.2])
    vectors = softmax_code(7, 4).vectors * lengths
    assert classify(vectors.T @ vectors).name == "other (rank 4)"
    # Not symmetric; not positive.
    vectors = softmax_code(7, 4).vectors
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(4, 4)))[0]
    assert classify(vectors.T @ turn @ vectors).name == "other (rank 4)"
    # Symmetric but for a little.
    core = np.eye(4)
    core[0, 1], core[1, 0] = 3e-3, -3e-3
    nearly = classify(vectors.T @ core @ vectors)
    assert nearly.rank == 4
    assert 1e-4 < nearly.code_misfit < 3e-3
    assert not nearly.name.startswith("softmax")
    against = classify(-np.asarray(ETF.logits(6)))
    assert against.name == "other (rank 5)"
    assert against.distances[ETF] == pytest.approx(1, rel=1e-15)


def test_tolerance_decides_how_near_is_near():
    rng = np.random.default_rng(4)
    vectors = softmax_code(7, 4).vectors
    logits = noisy(vectors.T @ vectors, 3e-3, rng)
    assert classify(logits).structure is not PAIRS
    assert classify(logits, tolerance=0.03).name == "softmax code of rank 4"


def test_labels_say_which_columns_are_averaged():
    rng = np.random.default_rng(5)
    means = shuffled(POLYGON.logits(7), rng)
    labels = rng.permutation(np.concatenate([np.arange(7), rng.integers(0, 7, 20)]))
    columns = means[:, labels]
    assert classify(columns, labels).structure is POLYGON
    # Noise that averages out within each class.
    noise = rng.normal(size=columns.shape)
    own = labels[:, None] == np.arange(7)
    noise -= (noise @ own / np.sum(own, axis=0))[:, labels]
    got = classify(jnp.asarray(columns + noise), jnp.asarray(labels))
    assert got.distance < 1e-14
    in_order = np.repeat(means, 3, axis=1)
    assert classify(in_order).distance < 1e-14


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        (np.zeros((3, 3)), None, "not all zero"),
        (np.asarray([[1.0, np.nan], [0.0, 1.0]]), None, "must be finite"),
        (np.eye(3), np.asarray([0, 1, 1]), r"each at least once, but .*\[1, 2, 0\]"),
        (np.eye(3), np.asarray([0, 1, 3]), "`labels` must be 0 to 2"),
        (np.ones((1, 4)), None, "two or more classes"),
        (np.ones((3, 4)), None, "no multiple of 3 classes"),
    ],
)
def test_what_has_no_direction_or_classes_is_refused(logits, labels, message):
    with pytest.raises(ValueError, match=message):
        classify(logits, labels)


def test_there_is_no_radius_for_one_class():
    with pytest.raises(ValueError, match="two or more classes"):
        classification_radius(1)
