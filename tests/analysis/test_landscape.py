"""Objectives of structures, and the depths where they tie.

`OBJECTIVES` and `TIES` are from an independent computation (mpmath, 20 digits or more;
each objective again from the singular values of an explicit logit matrix, 6e-15).
"""

import math

import jax.numpy as jnp
import numpy as np
import pytest

import deepufm as ufm
from deepufm import Structure

ETF, PAIRS, POLYGON = Structure.SIMPLEX_ETF, Structure.CROSS_POLYTOPE, Structure.POLYGON

# K, L, then the sums (without the factor L+1) of ETF, cross-polytope, polygon.
OBJECTIVES = [
    (3, 1, 2.0, 3.0, 2.0),
    (3, 2, 2.0, 2.5874010519681994, 2.0),
    (3, 3, 2.0, 2.414213562373095, 2.0),
    (3, 5, 2.0, 2.259921049894873, 2.0),
    (3, 12, 2.0, 2.112531476096487, 2.0),
    (4, 1, 3.0, 4.0, 4.0),
    (4, 2, 3.0, 3.174802103936399, 3.174802103936399),
    (4, 3, 3.0, 2.8284271247461903, 2.8284271247461903),
    (4, 5, 3.0, 2.5198420997897464, 2.5198420997897464),
    (4, 12, 3.0, 2.2250629521929737, 2.2250629521929737),
    (5, 1, 4.0, 5.0, 7.23606797749979),
    (5, 2, 4.0, 4.174802103936399, 4.713517139371318),
    (5, 3, 4.0, 3.8284271247461903, 3.804226065180614),
    (5, 5, 4.0, 3.5198420997897464, 3.0703475827245743),
    (5, 12, 4.0, 3.2250629521929737, 2.437523793728196),
    (6, 1, 5.0, 6.0, 12.0),
    (6, 2, 5.0, 4.762203155904598, 6.6038544977892535),
    (6, 3, 5.0, 4.242640687119285, 4.898979485566356),
    (6, 5, 5.0, 3.7797631496846193, 3.6342411856642793),
    (6, 12, 5.0, 3.337594428289461, 2.634787368097451),
    (9, 1, 8.0, 9.0, 38.46884476685864),
    (9, 2, 8.0, 7.349604207872798, 14.35763014179027),
    (9, 3, 8.0, 6.656854249492381, 8.771413200489262),
    (9, 5, 8.0, 6.039684199579493, 5.358662172929036),
    (9, 12, 8.0, 5.450125904385947, 3.1519595392316084),
    (16, 1, 15.0, 16.0, 210.19313895270545),
    (16, 2, 15.0, 12.699208415745597, 44.54056164934077),
    (16, 3, 15.0, 11.313708498984761, 20.50332358193205),
    (16, 5, 15.0, 10.079368399158986, 9.43827967898184),
    (16, 12, 15.0, 8.900251808771895, 4.093017648175991),
]
# K, then L of cross-polytope and ETF, polygon and cross-polytope, polygon and ETF.
TIES = [
    (3, math.inf, math.inf, math.nan),
    (4, 2.4190225827029095, math.nan, 2.4190225827029095),
    (5, 2.4190225827029095, 2.9354671792876394, 2.710411922148597),
    (6, 1.7138308977134482, 4.41902258270291, 2.91089728816364),
    (7, 1.7138308977134482, 3.882502792028294, 3.058889813822858),
    (9, 1.4772252516933335, 4.212789485349784, 3.2656186005252983),
    (12, 1.2871019216390371, 4.659352982336817, 3.4603241546623655),
    (16, 1.2053376776478877, 4.715571767921365, 3.6204503038859985),
]


@pytest.mark.parametrize("row", OBJECTIVES, ids=lambda row: f"K{row[0]}-L{row[1]}")
def test_closed_forms_and_explicit_logits_agree_with_the_table(row):
    num_classes, depth, *wanted = row
    for structure, want in zip((ETF, PAIRS, POLYGON), wanted, strict=True):
        closed = ufm.structure_objective(structure, num_classes, depth)
        assert closed / (depth + 1) == pytest.approx(want, rel=2e-15)
        # Of three examples a class, turned, scaled and permuted: what counts is Z's
        # direction up to the classes' names.
        order = np.random.default_rng(num_classes).permutation(num_classes)
        means = 1e-30 * np.asarray(structure.logits(num_classes))[np.ix_(order, order)]
        got = ufm.schatten_objective(
            jnp.asarray(np.repeat(means, 3, axis=1)),
            jnp.repeat(jnp.arange(num_classes), 3),
            depth,
        )
        want = ufm.structure_objective(structure, num_classes, depth, per_class=3)
        assert float(got) == pytest.approx(want, rel=1e-13)


@pytest.mark.parametrize("row", TIES, ids=lambda row: f"K{row[0]}")
def test_ties_agree_with_the_table(row):
    num_classes, *wanted = row
    couples = ((PAIRS, ETF), (POLYGON, PAIRS), (POLYGON, ETF))
    for (first, second), want in zip(couples, wanted, strict=True):
        got = ufm.tie_depth(first, second, num_classes)
        assert got == pytest.approx(want, rel=1e-14, nan_ok=True)
        assert ufm.tie_depth(second, first, num_classes) == pytest.approx(
            want, rel=1e-14, nan_ok=True
        )
        if math.isfinite(want):
            for depth, better in ((want - 0.1, second), (want + 0.1, first)):
                values = {
                    s: ufm.structure_objective(s, num_classes, depth)
                    for s in (first, second)
                }
                assert min(values, key=lambda s: values[s]) is better


def test_the_simplex_is_beaten_where_theorem_3_1_says():
    """P1 Thm 3.1: L = 2 with K >= 6, L >= 3 with K >= 4, and nowhere else."""
    for num_classes in range(3, 33):
        for depth in range(1, 13):
            collapse = ufm.structure_objective(ETF, num_classes, depth)
            others = [
                ufm.structure_objective(s, num_classes, depth) for s in (PAIRS, POLYGON)
            ]
            beaten = min(others) < collapse * (1 - 1e-12)
            known = (depth == 2 and num_classes >= 6) or (
                depth >= 3 and num_classes >= 4
            )
            assert beaten == known, (num_classes, depth)


def test_the_polygon_is_least_at_infinite_depth():
    """P1 Thm 3.2: what counts in the limit is the rank."""
    ranks = [ufm.structure_rank(s, 9) for s in (ETF, PAIRS, POLYGON)]
    assert ranks == [8, 5, 2]
    assert math.isinf(ufm.structure_objective(POLYGON, 9, math.inf))
    deep = [ufm.structure_objective(s, 9, 1e6) / 1e6 for s in (ETF, PAIRS, POLYGON)]
    np.testing.assert_allclose(deep, ranks, rtol=1e-5)


def test_objective_is_the_norm_of_a_balanced_model():
    """Lemma D.7's bound is reached: singular values are shared out by the root."""
    logits = np.asarray(Structure.POLYGON.logits(5))
    left, values, right = np.linalg.svd(logits)
    gap = 1 - math.cos(2 * math.pi / 5)
    for depth in (1, 2, 4):
        each = (values[:2] / gap) ** (1 / (depth + 1))
        layers = [left[:, :2] * each, *[np.diag(each)] * (depth - 1)]
        layers.append(each[:, None] * right[:2])
        product = np.linalg.multi_dot([*layers, np.eye(5)])
        np.testing.assert_allclose(product, logits / gap, atol=1e-14)
        want = sum(np.sum(layer**2) for layer in layers)
        got = ufm.schatten_objective(jnp.asarray(logits), jnp.arange(5), depth)
        assert float(got) == pytest.approx(want, rel=1e-13)


def test_no_factorisation_is_below_the_bound():
    rng = np.random.default_rng(0)
    for _ in range(20):
        layers = [rng.normal(size=s) for s in ((4, 6), (6, 6), (6, 4))]
        logits = np.linalg.multi_dot(layers)
        logits += 100 * np.eye(4)  # classified right
        layers[0] = logits @ np.linalg.pinv(layers[1] @ layers[2])
        np.testing.assert_allclose(np.linalg.multi_dot(layers), logits, rtol=1e-9)
        labels = jnp.arange(4)
        gap = float(jnp.min(ufm.margins(jnp.asarray(logits), labels)))
        assert gap > 0
        norm = sum(np.sum(layer**2) for layer in layers) / gap ** (2 / 3)
        bound = float(ufm.schatten_objective(jnp.asarray(logits), labels, 2))
        assert bound <= norm


def test_misclassified_logits_have_no_objective():
    got = ufm.schatten_objective(-jnp.eye(3), jnp.arange(3), 2.0)
    assert jnp.isposinf(got)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((ETF, 1, 2.0), "must be 2 or more"),
        ((POLYGON, 2, 2.0), "must be 3 or more"),
        ((ETF, 4, 0.5), "`depth` must be at least 1"),
        ((ETF, 4, 2.0, 0), "`per_class` must be at least 1"),
    ],
)
def test_what_is_no_structure_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ufm.structure_objective(*arguments)


@pytest.mark.parametrize("depth", [1, 3, 10])
def test_low_ranks_propagate_norm(depth):
    # P1 section 3.2: r^{-L/2}, (K-1)^{-L/2} under collapse.
    values = jnp.asarray([[2.0, 2, 2, 2], [5.0, 5, 0, 0], [0.0, 0, 0, 0]])
    found = ufm.norm_propagation(values, depth)
    np.testing.assert_allclose(found, [4 ** (-depth / 2), 2 ** (-depth / 2), 0])
    # Against layers written out: singular values sigma^{1/(L+1)} in each.
    sigma = np.asarray([3.0, 1.0, 0.2])
    norm = np.sqrt(np.sum(sigma ** (2 / (depth + 1))))
    expected = np.linalg.norm(sigma) / norm ** (depth + 1)
    found = ufm.norm_propagation(jnp.asarray(1e-200 * sigma), depth)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
