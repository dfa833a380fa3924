"""Every benchmark runs at tiny sizes, and what it reports is sane."""

import gc
import importlib.util
import json
import math
import multiprocessing
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from compiling import QUICK_FLAGS

_FOLDER = Path(__file__).parents[2] / "benchmarks"
_NAMES = sorted(path.stem for path in _FOLDER.glob("bench_*.py"))


def _load(name: str):
    spec = importlib.util.spec_from_file_location(name, _FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run(name: str, out: Path) -> dict:
    """Runs a benchmark in the process for them; returns what it returns."""
    gc.set_threshold(100_000, 50, 50)  # as in `conftest.py`
    warnings.simplefilter("error")
    return _load(name).main(["--tiny", "--out", str(out)])


def _hurry(seconds: float) -> tuple[dict | None, int]:
    """Returns what is measured, and left out, of what does not fit in `seconds`."""
    budget = _load("gpu_ensemble").Budget(seconds)
    head = {"dtype": "float64", "members": 12, "lanes": None}
    row = budget.measure(head, lambda: pytest.fail("was started"), 0.0)
    return row, len(budget.left_out)


@pytest.fixture(scope="module")
def process():
    """A process for the benchmarks.

    Programs compile in half the time there, and take somewhat longer to run; and
    nothing checks shapes.
    """
    # Begun anew, not forked: JAX has threads here.
    context = multiprocessing.get_context("spawn")
    with pytest.MonkeyPatch.context() as patch, ProcessPoolExecutor(1, context) as pool:
        patch.syspath_prepend(str(_FOLDER))
        patch.setenv("XLA_FLAGS", QUICK_FLAGS)
        yield pool


@pytest.fixture(scope="module")
def outcome(process, tmp_path_factory):
    """Runs a benchmark once a session and returns what it wrote."""
    written: dict[str, dict] = {}

    def run(name: str) -> dict:
        if name not in written:
            out = tmp_path_factory.mktemp(name) / "out.json"
            returned = process.submit(_run, name, out).result()
            written[name] = json.loads(out.read_text())
            assert written[name] == json.loads(json.dumps(returned))
        return written[name]

    return run


@pytest.mark.parametrize("name", _NAMES)
def test_says_what_it_ran_on(outcome, name):
    result = outcome(name)
    assert f"bench_{result['benchmark']}" == name
    assert {"python", "jax", "diffrax", "scipy"} <= set(result["versions"])
    assert result["device"]["count"] >= 1


@pytest.mark.parametrize("name", _NAMES)
def test_numbers_are_finite_and_times_positive(outcome, name):
    numbers = list(_numbers(outcome(name)))
    assert numbers
    assert all(math.isfinite(value) for _, value in numbers)
    times = [v for key, v in numbers if key in ("min_s", "call_min_s", "min_ns")]
    assert times
    assert min(times) > 0


def test_solve_error_falls_with_the_tolerance(outcome):
    for problem in outcome("bench_solve")["problems"]:
        assert problem["reference_error"] < 1e-11
        assert problem["cheapest"]["1e-06"] is not None
        by_solver: dict[str, list[dict]] = {}
        for row in problem["rows"]:
            assert row["steps"] > 0
            assert row["rhs"] >= row["steps"]
            by_solver.setdefault(row["solver"], []).append(row)
        for rows in by_solver.values():
            rows.sort(key=lambda row: row.get("rtol", 1))
            errors = [row["error"] for row in rows]
            assert errors == sorted(errors)
        ours = by_solver["Tsit5"]
        assert all(row["reached"] for row in ours)
        assert ours[0]["error"] < 1e-7
        assert ours[0]["steps"] > ours[-1]["steps"]


def test_right_hand_sides_agree_with_their_peers(outcome):
    result = outcome("bench_rhs")
    rows = [
        row
        for part in ("gradient_flow", "outer_products", "hadamard_flow")
        for row in result[part]
    ]
    assert {row["form"] for row in rows} >= {"deepufm", "numpy", "naive", "einsum"}
    assert all(row["difference"] <= 1e-12 for row in rows)


def test_flow_and_descent_meet_at_equal_time(outcome):
    result = outcome("bench_descent")
    assert set(result) >= {"wall_time", "equal_time", "stability", "exactness"}
    rows = {row["method"]: row for row in result["wall_time"]["rows"]}
    assert rows["plain loop"]["parameter_distance"] < 1e-12
    assert rows["flow, default"]["flow_error"] < 1e-7
    assert rows["flow, default"]["flow_error"] < rows["flow, rtol 1e-5"]["flow_error"]
    assert rows["flow, default"]["steps"] < rows["descend"]["steps"]
    # Euler's method is of order one, and both distances are those of its error.
    (end,) = result["equal_time"]["orders"]
    assert end["parameter_order"] == pytest.approx(1, abs=0.05)
    assert end["logit_order"] == pytest.approx(1, abs=0.05)


def test_step_of_008_is_stable_on_the_mean_only(outcome):
    stability = outcome("bench_descent")["stability"]
    assert stability["eigvalsh_difference"] < 1e-12
    for row in stability["rows"]:
        assert row["limit_sum"] < row["sharpness_max"] < row["limit_mean"]
        assert row["mean_finite"]
        assert not row["sum_finite"]
        assert row["sum_last_step"] < 100


def test_layers_shrink_before_the_classes_are_separated_and_never_after(outcome):
    rows = outcome("bench_random_starts")["separation"]
    assert all(row["shrunk"] > 0 and row["grew"] == row["seeds"] for row in rows)


def test_functions_rise_only_where_no_theorem_forbids_it(outcome):
    result = outcome("bench_stability")
    four, eight = result["search"]
    assert four["theorem"]
    assert four["violations"] == 0
    assert not eight["theorem"]
    assert eight["violations"] > 0
    for row in result["basins"]:
        assert sum(row["shares"].values()) + row["uncertified"] == pytest.approx(1)


def test_solve_is_exact_on_sigmoids(outcome):
    rows = outcome("bench_descent")["exactness"]["rows"]
    assert {row["flow"] for row in rows} == {"MSE", "linearised"}
    for row in rows:
        assert row["error"] < {"default": 1e-7, "1e-11": 2e-11}[row["rtol"]]


def test_bulk_contenders_meet_the_error_they_are_timed_at(outcome):
    result = outcome("bench_ensemble")
    (table,) = result["compare"]["tables"]
    assert table["reference_agreement"] < 1e-9
    families = {row["family"] for row in table["rows"]}
    assert families >= {"ours", "vmap", "SciPy", "odeint"}
    for row in table["rows"]:
        # The loosest tolerance that will do, so not far below the target.
        assert table["target"] / 30 < row["error"] <= table["target"]
        assert row["cpu_s"] > 0
    assert table["ratios"]["SciPy"] == pytest.approx(
        min(r["min_s"] for r in table["rows"] if r["family"] == "SciPy")
        / min(r["min_s"] for r in table["rows"] if r["family"] == "ours")
    )
    (waste,) = result["waste"]
    assert waste["computed"] >= waste["needed"] > 0


def test_full_ensemble_agrees_with_solve_and_descent(outcome):
    result = outcome("bench_full_ensemble")
    (row,) = result["ensemble"]
    assert row["reached"] == row["members"]
    assert row["difference"] < 1e-6
    (row,) = result["descent"]
    # Euler's error of steps of 0.05.
    assert 1e-6 < row["distance"] < 0.05
    (row,) = result["roofline"]
    assert row["megaflops"] == pytest.approx((6 * 3 * 32**2 + 36 * 3 * 32) / 1e6)


def test_accelerator_script_keeps_to_its_time(outcome, process):
    # After those whose compiled programs it uses again.
    outcome("bench_ensemble")
    outcome("bench_full_ensemble")
    result = outcome("gpu_ensemble")
    assert result["left_out"] == []
    for part in ("reduced", "full"):
        (row,) = result[part]
        assert row["reached"] == row["members"]
        assert row["members_per_s"] > 0
    assert process.submit(_hurry, 5.0).result() == (None, 1)


def test_loosest_tolerance_is_found_from_either_side():
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(_FOLDER))
    bulk = _load("_bulk")
    patch.undo()
    members = bulk.draw(2, 4)
    problem = bulk.Problem(members, 1.0, np.zeros((2, 3)))

    def contender(factor):
        def run(members, time, tolerance):
            del members, time
            return bulk.Done(np.full((2, 3), factor * tolerance))

        return bulk.Contender(str(factor), "ours", run, 2)

    assert problem.loosest(contender(1.0), 1e-4, 2) == 2.0**-14
    assert problem.loosest(contender(1e-3), 1e-4, 2) == 2.0**-4
    assert problem.loosest(contender(1e-6), 1e-4, 2) == 0.25
    assert problem.loosest(contender(1e6), 1e-4, 2) == 2.0**-34
    assert problem.loosest(contender(1e9), 1e-4, 2) is None
    assert problem.loosest(contender(np.nan), 1e-4, 2) is None


def test_solver_that_misses_the_target_is_not_called_cheapest():
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(_FOLDER))
    cheapest = _load("_work_precision").cheapest
    patch.undo()

    def row(solver, error, min_s, reached=True):
        return {"solver": solver, "error": error, "min_s": min_s, "reached": reached}

    rows = [
        row("fast and loose", 1e-3, 1e-6),
        row("stopped early", 1e-9, 1e-6, reached=False),
        row("both", 1e-2, 1e-3),
        row("both", 1e-6, 1e-1),
        row("SciPy LSODA", 1e-7, 5e-3),
    ]
    best = cheapest(rows, 1e-4)
    assert best["solver"] == "SciPy LSODA"
    assert best["ours"] == "both"
    # Half way between 1e-2 and 1e-6 in logarithms.
    assert best["ours_seconds"] == pytest.approx(1e-2)
    assert cheapest(rows, 1e-8) is None


def _numbers(value, key=""):
    if isinstance(value, dict):
        for name, child in value.items():
            yield from _numbers(child, name)
    elif isinstance(value, list):
        for child in value:
            yield from _numbers(child, key)
    elif isinstance(value, float):
        yield key, value
