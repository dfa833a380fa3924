"""The atlas, against an independent enumeration in 40 digits and closed forms."""

import itertools

import numpy as np
import pytest
from oracles import kkt_points

from deepufm import Verdict, reduced_kkt
from deepufm.analysis._atlas import _pairs, atlas, descend, span_rank, spans

# Orbit sizes by rising objective, of the enumeration that `kkt_points` comes from. At
# L = 1, K = 8, it also has a continuum on six modes, at objective 1, and 7 supports.
ORBITS = {
    (4, 1): [1, 3],
    (4, 2): [1, 3, 3],
    (4, 3): [3, 1, 3],
    (4, 5): [3, 1, 3],
    (8, 1): [1, 7, 28, 28],
    (8, 2): [7, 1, 7, 21, 7, 28, 21, 7, 84, 28, 84, 28, 28, 84, 84, 84, 84, 28, 28],
    (8, 3): [7, 28, 28, 28, 84, 84, 84, 21, 84, 7, 1, 84, 7, 21, 84, 7, 28, 28, 28],
    (8, 5): [28, 7, 28, 28, 84, 84, 84, 84, 21, 84, 7, 84, 28, 1, 7, 21, 7, 28, 28],
}


def psi(num_classes):
    """2 where the numbers i and j share an odd number of binary digits."""
    numbers = range(1, num_classes)
    return np.array([[2 * ((i & j).bit_count() % 2) for j in numbers] for i in numbers])


def relabelled(rng, a):
    """The modes under a random invertible matrix over F_2, built of row operations."""
    digits = len(a).bit_length()
    images = [1 << i for i in range(digits)]
    for _ in range(20):
        i, j = rng.choice(digits, 2, replace=False)
        images[i] ^= images[j]
    moved = np.zeros_like(a)
    for number in range(1, len(a) + 1):
        image = 0
        for i in range(digits):
            image ^= images[i] * (number >> i & 1)
        moved[image - 1] = a[number - 1]
    return moved


def random_start(rng, num_classes):
    """Log-normal modes of a random spread: from all alike to a few alive."""
    return np.exp(rng.uniform(0, 4) * rng.normal(size=num_classes - 1))


@pytest.mark.parametrize(("num_classes", "depth"), ORBITS)
def test_all_known_points_and_no_others(num_classes, depth):
    known = [
        point
        for point in kkt_points()
        if len(point["a"]) == num_classes - 1 and point["L"] == depth
    ]
    known.sort(key=lambda point: point["objective"])
    entries = atlas(num_classes, depth)
    found = [entry for entry in entries if entry.isolated]
    assert [entry.orbit for entry in found] == ORBITS[num_classes, depth]
    rng = np.random.default_rng(0)
    for entry, point in zip(found, known, strict=True):
        assert entry.objective == pytest.approx(point["objective"], rel=1e-13)
        assert (entry.verdict is Verdict.MINIMUM) == point["minimum"]
        a = np.asarray(point["a"])
        np.testing.assert_allclose(np.sort(entry.a), np.sort(a), rtol=1e-11)
        assert entry.rank == len(entry.modes) == np.sum(a > 0)
        assert len(entry.active) == len(point["active"])
        margins = psi(num_classes) @ entry.a
        np.testing.assert_allclose(margins[np.array(entry.active) - 1], 1, rtol=1e-12)
        # The known point itself, elsewhere in its orbit, and no other entry's.
        other = 2.5 * relabelled(rng, a)
        assert [e.matches(other) for e in found] == [e is entry for e in found]
        assert entry.matches(a * (1 + 1e-8))
        assert not entry.matches(a * np.linspace(1, 1.01, len(a)))


def test_every_pair_of_modes_and_margins_is_tried():
    """By what a relabelling keeps: the number of each one's partners in the other."""

    def kept(modes, margins):
        table = psi(8)[np.ix_(margins, modes)]
        return tuple(np.sort(table.sum(0))), tuple(np.sort(table.sum(1)))

    tried = [kept(*pair) for pair in _pairs(8)]
    rng = np.random.default_rng(0)
    for modes, margins in rng.integers(2, size=(1000, 2, 7)) > 0:
        if spans(modes):
            assert kept(modes, margins) in tried
    # By Burnside's lemma, K = 4: 4 supports of 8 span, with 8 sets of margins each.
    assert len(list(_pairs(4))) == (4 * 8 + 3 * 2 * 4 + 2 * 1 * 2) // 6


def test_the_continuum_of_depth_one():
    (entry,) = [entry for entry in atlas(8, 1) if not entry.isolated]
    assert (entry.rank, entry.orbit) == (6, 7)
    assert entry.objective == pytest.approx(1, rel=1e-12)
    assert entry.verdict is Verdict.SADDLE
    assert reduced_kkt(entry.a, 1).residual < 1e-12
    # Its corners are the four equal modes of the next entry, of which it holds three.
    corners = [
        np.where(np.isin(np.arange(1, 8), [*pair, *other]), 0.25, 0)
        for pair, other in itertools.combinations([(1, 6), (2, 5), (3, 4)], 2)
    ]
    rng = np.random.default_rng(0)
    inside = rng.dirichlet(np.ones(3)) @ corners
    assert entry.matches(3 * relabelled(rng, inside))
    assert not entry.matches(corners[0])
    assert not entry.matches(inside + [0.1, 0, 0, 0, 0, 0, 0])


def test_matches_is_false_of_what_is_no_direction():
    entry = atlas(4, 2)[0]
    for a in (
        [1.0, 1, 1, 1],
        [1.0, -1, 1],
        [1.0, 0, 0],
        [np.nan, 1, 1],
        [np.inf, 1, 1],
    ):
        assert not entry.matches(np.array(a))


@pytest.mark.parametrize("depth", [2, 5])
def test_descents_reach_every_minimum_of_eight_classes(depth):
    rng = np.random.default_rng(3)
    minima = {e.a.tobytes(): e for e in atlas(8, depth) if e.verdict is Verdict.MINIMUM}
    reached = set()
    for _ in range(40):
        start = random_start(rng, 8)
        found = descend(start, depth)
        assert found.verdict is Verdict.MINIMUM
        assert found.objective <= reduced_kkt(start, depth).objective
        (name,) = [name for name, e in minima.items() if e.matches(found.a)]
        reached.add(name)
    assert reached == set(minima)


def test_a_descent_leaves_saddles_and_stays_at_minima():
    for entry in atlas(8, 2):
        found = descend(entry.a, 2)
        assert found.verdict is Verdict.MINIMUM
        if entry.verdict is Verdict.MINIMUM:
            np.testing.assert_allclose(found.a, entry.a, rtol=1e-12)
        else:
            assert found.objective < entry.objective * (1 - 1e-3)
    near = np.array([0.5, 0.5 + 1.2e-9, 0])
    assert reduced_kkt(near, 2).verdict is Verdict.NOT_STATIONARY
    assert descend(near, 2).verdict is Verdict.MINIMUM
    start = np.array([0.9, 0.02, 0.4])
    np.testing.assert_allclose(descend(start, 1).a, 0.25, rtol=1e-12)
    with pytest.raises(ValueError, match="must classify every class"):
        descend(np.array([1.0, 0, 0]), 2)


def test_sixteen_classes():
    """Against the same walk with edges from singular vectors, and 1e5 random programs.

    Both found 15 orbits of vertices; at L = 2 one of them is not stationary.
    """
    entries = atlas(16, 2)
    assert [entry.verdict for entry in entries] == 14 * [Verdict.MINIMUM]
    best = entries[0]
    np.testing.assert_allclose(best.a[best.a > 0], 0.25, rtol=1e-12)
    assert (best.rank, len(best.active), best.orbit) == (5, 10, 168)
    assert best.objective == pytest.approx(5 * 0.25 ** (2 / 3), rel=1e-13)
    least = [entry for entry in entries if entry.rank == 4]
    assert [entry.orbit for entry in least] == [20160 // 24]  # bases, in any order
    np.testing.assert_allclose(least[0].a[least[0].a > 0], 0.5, rtol=1e-12)
    collapse = [entry for entry in entries if entry.rank == 15]
    assert [entry.orbit for entry in collapse] == [1]
    # No descent ends elsewhere.
    rng = np.random.default_rng(0)
    reached = set()
    for _ in range(40):
        found = descend(random_start(rng, 16), 2)
        (name,) = [i for i, entry in enumerate(entries) if entry.matches(found.a)]
        assert found.objective == pytest.approx(entries[name].objective, rel=1e-12)
        reached.add(name)
    assert reached >= {0, len(entries) - 1}


def test_the_number_of_points_is_the_same_at_any_depth_above_one():
    """At L = 1.2 a saddle's small mode is 2^{-11} of the others (K = 4)."""
    assert [entry.orbit for entry in atlas(4, 1.2)] == [1, 3, 3]
    assert np.min(atlas(4, 1.2)[2].a) / np.max(atlas(4, 1.2)[2].a) == pytest.approx(
        2**-11, rel=1e-9
    )
    assert len(atlas(8, 1.2)) == 19


def test_collapse_is_the_one_minimum_at_depth_one():
    entry, *others = atlas(16, 1)
    np.testing.assert_allclose(entry.a, 1 / 16, rtol=1e-12)
    assert (entry.orbit, entry.verdict) == (1, Verdict.MINIMUM)
    assert {other.verdict for other in others} == {Verdict.SADDLE}


def test_supports_classify_exactly_if_they_span():
    for num_classes in (2, 4, 8):
        matrix = psi(num_classes)
        smallest = num_classes
        for alive in itertools.product([False, True], repeat=num_classes - 1):
            support = np.array(alive)
            positive = np.min(matrix @ support) > 0
            assert spans(support) == positive
            smallest = min(smallest, np.sum(support)) if positive else smallest
        assert 2**smallest == num_classes
    dependent = np.isin(np.arange(1, 32), [1, 6, 7, 24, 31])  # 31 = 7 ^ 24, 7 = 1 ^ 6
    assert span_rank(dependent) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((32, 2), "must be 2, 4, 8 or 16"), ((4, 0.5), "finite and at least 1")],
)
def test_what_has_no_atlas_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        atlas(*arguments)
