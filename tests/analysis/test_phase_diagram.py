"""The global optimum by classes and depth, against closed forms and SciPy's SLSQP."""

import math
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import scipy.optimize

from deepufm import Structure, Verdict, structure_objective
from deepufm.analysis import _phase_diagram
from deepufm.analysis._phase_diagram import optima, phase_diagram
from deepufm.analysis._search import pairs_and_singles

# Not in order.
DEPTHS = (4, 1, 2, 3, 6)


@pytest.fixture(scope="module")
def diagram():
    return phase_diagram((8, 3, 4, 5, 7), DEPTHS, starts=1)


def _at(diagram, num_classes, depth):
    row = diagram.rows[diagram.num_classes.index(num_classes)]
    return row[diagram.depths.index(depth)]


def _pairs(num_classes, depth):
    """The centred cross-polytope of odd K: K//2 values of 2 and (1 - 1/K)^(1/2)."""
    q = 2 / (depth + 1)
    single = (1 - 1 / num_classes) ** (q / 2)
    return (depth + 1) * (num_classes // 2 * 2**q + single)


def _antiprism(depth):
    """The square antiprism with the edges' gaps at 1: values 4, 4 and 8^(1/2)."""
    q = 2 / (depth + 1)
    return (depth + 1) * (2 * 4**q + 8 ** (q / 2))


@pytest.mark.parametrize(
    ("num_classes", "depth", "rank", "want"),
    [
        (3, 4, 2, 10.0),
        (4, 2, 3, 9.0),
        (4, 3, 2, 8 * math.sqrt(2)),
        (5, 2, 4, 12.0),
        (5, 3, 3, _pairs(5, 3)),
        (5, 4, 2, structure_objective(Structure.POLYGON, 5, 4)),
        (7, 2, 4, _pairs(7, 2)),
        (7, 6, 2, structure_objective(Structure.POLYGON, 7, 6)),
        (8, 2, 4, 12 * 2 ** (2 / 3)),
        (8, 3, 4, 16 * math.sqrt(2)),
        (8, 4, 3, _antiprism(4)),
        (8, 6, 2, structure_objective(Structure.POLYGON, 8, 6)),
    ],
)
def test_optima_of_closed_form(diagram, num_classes, depth, rank, want):
    got = _at(diagram, num_classes, depth)
    assert got.objective == pytest.approx(want, rel=1e-12)
    assert got.rank == rank
    assert (got.num_classes, got.depth) == (num_classes, depth)


def test_no_optimum_is_worse_than_a_named_structure(diagram):
    for row in diagram.rows:
        for cell in row:
            assert cell.certified
            assert cell.point.residual < 1e-12
            for structure in Structure:
                named = structure_objective(structure, cell.num_classes, cell.depth)
                assert cell.objective <= named * (1 + 1e-12)
                want = (named - cell.objective) / named
                assert cell.saving(structure) == pytest.approx(want, abs=1e-14)
            simplex = cell.structure is Structure.SIMPLEX_ETF
            assert simplex == (cell.depth == 1 or cell.rank == cell.num_classes - 1)


def test_seven_classes_in_three_dimensions_by_slsqp(diagram):
    """Seven have no structure of the papers at L = 3 and 4; SciPy finds none better."""
    found = _at(diagram, 7, 3)
    assert (found.rank, found.structure) == (3, None)
    assert found.name == "other (rank 3: 3.237, 2.802 x2)"
    named = [structure_objective(structure, 7, 3) for structure in Structure]
    assert found.objective < 0.99 * min(named)
    left, values, right = np.linalg.svd(found.point.logits)
    root = np.sqrt(values[:3])
    start = np.concatenate([left[:, :3] * root, right[:3].T * root])
    start = start + 0.03 * np.random.default_rng(0).normal(size=start.shape)
    off = ~np.eye(7, dtype=bool)

    def logits(factors):
        one, other = factors.reshape(2, 7, 3)
        return one @ other.T

    def cost(factors):
        return 4 * np.sum(np.linalg.svd(logits(factors), compute_uv=False)[:3] ** 0.5)

    def room(factors):
        z = logits(factors)
        return (np.diag(z) - z)[off] - 1

    ended = scipy.optimize.minimize(
        cost, start.ravel(), method="SLSQP", options={"ftol": 1e-12, "maxiter": 300},
        constraints={"type": "ineq", "fun": room},
    )  # fmt: skip
    assert np.min(room(ended.x)) > -1e-8
    assert found.objective == pytest.approx(ended.fun, rel=1e-7)


def test_minima_are_followed_to_depths_that_are_not_searched(monkeypatch):
    """Random starts at one depth only, and L = 1 knows the simplex alone."""
    searched, polished = [], []
    search, polish = _phase_diagram.search, _phase_diagram.polish
    monkeypatch.setattr(
        _phase_diagram,
        "search",
        lambda *a, **k: (searched.append(a), search(*a, **k))[1],
    )
    monkeypatch.setattr(
        _phase_diagram, "polish", lambda *a: (polished.append(a), polish(*a))[1]
    )
    row = optima(7, (1, 2, 4), starts=1, seed=0)
    assert {depth for _, depth, _ in searched} == {2}
    assert [cell.rank for cell in row] == [6, 4, 3]
    assert sum(a[1] == 1 for a in polished) == 1
    # Up from 2; down as well, from 3.
    assert optima(7, (2.95, 3), starts=0, seed=0)[0].rank == 3
    # Without starts and codes of rank 3 there is nothing but closed forms.
    monkeypatch.setattr(_phase_diagram, "_HIGHEST_RANK", 2)
    assert optima(7, (4,), starts=0, seed=0)[0].rank == 2


def test_an_executor_gets_rows_and_gives_them_in_order():
    seen = []
    with ThreadPoolExecutor(2) as executor:
        got = phase_diagram(
            (5, 4), (1, 2), starts=0, progress=seen.append, executor=executor
        )
    assert seen == [5, 4]
    assert [row[0].num_classes for row in got.rows] == [5, 4]
    # As processes need it.
    again = pickle.loads(pickle.dumps(got))
    assert again.rows[0][1].point.verdict is Verdict.MINIMUM
    np.testing.assert_array_equal(
        again.rows[0][1].point.logits, optima(5, (2,), 0, 0)[0].point.logits
    )


def test_the_dataset_holds_logits_that_cost_what_it_says(diagram):
    dataset = diagram.to_dataset()
    for k in diagram.num_classes:
        for depth in DEPTHS:
            cell = dataset.sel(num_classes=k, depth=depth)
            assert np.isnan(cell.logits[k:]).all()
            assert np.isnan(cell.logits[:, k:]).all()
            logits = cell.logits.values[:k, :k]
            gaps = np.diag(logits) - logits
            assert np.min(gaps[~np.eye(k, dtype=bool)]) == pytest.approx(1, rel=1e-9)
            values = np.linalg.svd(logits, compute_uv=False)[: int(cell["rank"])]
            np.testing.assert_allclose(
                cell.singular_values[: len(values)], values, rtol=1e-9
            )
            want = (depth + 1) * np.sum(values ** (2 / (depth + 1)))
            assert float(cell.objective) == pytest.approx(want, rel=1e-9)
            assert cell.verdict == "minimum"
    chosen = dataset.sel(num_classes=8)
    assert chosen.structure.sel(depth=3) == "cross-polytope"
    assert chosen.structure.sel(depth=4) == ""
    assert chosen.name.sel(depth=4) == "softmax code of rank 3"
    assert float(chosen.saving_over_polygon.sel(depth=6)) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("num_classes", "pairs", "name", "structure"),
    [
        (9, 3, "3 pairs and 3 singles", None),
        (9, 4, "centred cross-polytope", Structure.CROSS_POLYTOPE),
        (8, 4, "cross-polytope", Structure.CROSS_POLYTOPE),
        (8, 0, "simplex ETF", Structure.SIMPLEX_ETF),
    ],
)
def test_pairs_and_singles_are_named_in_any_order(num_classes, pairs, name, structure):
    order = np.random.default_rng(1).permutation(num_classes)
    logits = pairs_and_singles(num_classes, pairs)[np.ix_(order, order)]
    assert _phase_diagram._named(logits) == (name, structure)
    noisy = logits + 1e-4 * np.random.default_rng(2).normal(size=logits.shape)
    assert _phase_diagram._named(noisy)[1] is None


@pytest.mark.parametrize(
    ("num_classes", "depths", "starts", "message"),
    [
        ((2, 4), (1,), 1, "`num_classes` must be one or more numbers of at least 3"),
        ((), (1,), 1, "`num_classes` must be one or more"),
        ((4,), (), 1, "`depths` must be one or more finite numbers"),
        ((4,), (0.5, 2), 1, "of at least 1, but is"),
        ((4,), (math.inf,), 1, "`depths` must be"),
        ((4,), (math.nan,), 1, "`depths` must be"),
        ((4,), (2,), -1, "`starts` must be at least 0, but is -1"),
    ],
)
def test_bad_axes_are_refused(num_classes, depths, starts, message):
    with pytest.raises(ValueError, match=message):
        phase_diagram(num_classes, depths, starts=starts)
