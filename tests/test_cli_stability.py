"""`deepufm stability` and `deepufm basins`, run in the test's own process."""

import numpy as np
import pandas as pd
import pytest
import xarray as xr

from deepufm import cli


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(line: str) -> int:
    return cli.main(line.split())


def test_stability_prints_thresholds_and_writes_results_and_picture(tmp_path, capsys):
    assert run("stability --num-classes 8 --depths 1 2 --structure 1 3 5 7") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["structure", "modes", "orbit", "L=1", "L=2", "for", "instance"]
    # P1 Thm 4.3: (L-1)/(L+1)·(K-1); oracle F for the structure c: 1.10987.
    assert ["simplex", "ETF", "7", "1", "0", "2.333", "all", "modes"] in lines
    assert ["cross-polytope", "4", "7", "-", "1.11"] in [line[:5] for line in lines]
    # h rises to 0.278 only, below p = 1/3: on six modes nothing is stable at L = 2.
    assert "6 modes of rank 3 6 7 - - 1 2" in [" ".join(x[:11]) for x in lines]
    with xr.open_dataset("deepufm-stability.nc") as dataset:
        named = dict(zip(dataset.name.values, dataset.threshold.values))
        np.testing.assert_allclose(named["simplex ETF"], [0, 7 / 3], rtol=1e-14)
        assert named["cross-polytope"][0] == np.inf
        assert named["cross-polytope"][1] == pytest.approx(1.109867539203, rel=1e-12)
    picture = tmp_path / "deepufm-stability.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert run("stability --num-classes 8") == 2
    assert "exists already" in capsys.readouterr().err


def test_windows_of_stability_are_named(capsys):
    assert run("stability --num-classes 8 --depths 1.5 --out windows.csv") == 0
    shown = capsys.readouterr().out
    (line,) = [x for x in shown.splitlines() if "stable from" in x]
    low, high = float(line.split()[-4]), float(line.split()[-2])
    table = pd.read_csv("windows.csv")
    found = table[np.isfinite(table.window_high)]
    assert found.window_low.item() == pytest.approx(low, rel=1e-3)
    assert found.window_high.item() == pytest.approx(high, rel=1e-3)
    assert 0 < low < high


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("stability --depths 0.5", "at least 1"),
        ("stability --depths two", "takes numbers"),
        ("stability --num-classes 12", "2, 4, 8 or 16"),
        ("stability --num-classes 8 --structure 9", "numbers of modes from 1 to 7"),
        ("stability --num-classes 8 --structure 1 2 3 4", "must be invariant"),
        ("stability --out st.txt", "must end in .nc or .csv"),
        ("stability --structure polygon", "no modes in the Hadamard basis"),
        ("basins --depths 0.5", "at least 1"),
        ("basins --num-classes 6", "give --widths"),
        ("basins --num-classes 6 --widths 5", "--widths must be at least"),
        ("basins --per-class 2", "give --widths"),
        ("basins --seed -1", "--seed must be at least 0"),
        ("basins --out none/b.csv", "none, does not exist"),
        ("stability --num-classes 8 --structure 1 2 3", "tell all classes apart"),
        ("basins --scales 0", "positive"),
        ("basins --half-width 0", "between 0 and 0.5"),
        ("basins --out b.nc", "must end in .csv"),
        ("basins --workers 0", "--workers must be at least 1"),
    ],
)
def test_bad_input_is_one_line(line, message, capsys):
    assert run(line) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert len(shown.err.splitlines()) == 1
    assert not shown.out


def test_basins_prints_shares_and_writes_results_and_picture(tmp_path, capsys):
    line = "basins --num-classes 4 --depths 2 --scales 0.1 5 --starts 30 --workers 1"
    assert run(line) == 0
    shown = capsys.readouterr().out
    assert "depth 2, scale 0.1: 30 starts" in shown
    assert "60 starts in" in shown
    table = pd.read_csv("deepufm-basins.csv")
    counts = np.asarray(table["count"])
    assert [counts[table.scale == scale].sum() for scale in (0.1, 5)] == [30, 30]
    assert set(table.structure) == {"simplex ETF", "cross-polytope"}
    np.testing.assert_allclose(table.fraction, table["count"] / 30)
    assert (tmp_path / "deepufm-basins.png").read_bytes().startswith(b"\x89PNG")


def test_too_few_starts_for_the_intervals_are_a_failure(capsys):
    line = "basins --num-classes 4 --max-starts 20 --half-width 0.01 --workers 1"
    assert run(line) == 1
    assert "raise --max-starts" in capsys.readouterr().err
