"""`deepufm landscape`, run in the test's own process."""

import numpy as np
import pandas as pd
import pytest
import xarray as xr

from deepufm import cli
from deepufm.cli._output import processes

SMALL = "landscape --num-classes 4:5 --depths 1:3 --starts 1 --workers 1"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(line: str) -> int:
    return cli.main(line.split())


def test_landscape_prints_a_table_and_writes_results_and_picture(tmp_path, capsys):
    assert run(SMALL) == 0
    printed = capsys.readouterr()
    assert printed.err.splitlines() == ["K = 4 done", "K = 5 done"]
    lines = [line.split() for line in printed.out.splitlines()]
    assert lines[1:5] == [
        ["4", "1-2", "6", "to", "9", "3", "simplex", "ETF"],
        ["4", "3", "11.3137", "2", "cross-polytope"],
        ["5", "1-2", "8", "to", "12", "4", "simplex", "ETF"],
        ["5", "3", "15.0967", "3", "centred", "cross-polytope"],
    ]
    assert "6 optima in" in printed.out
    assert "deepufm-landscape.nc" in printed.out
    with xr.open_dataset("deepufm-landscape.nc") as dataset:
        want = [[6, 9, 8 * np.sqrt(2)], [8, 12, 8 * np.sqrt(2) + 4 * 0.8**0.25]]
        np.testing.assert_allclose(dataset.objective, want, rtol=1e-12)
        assert dataset.name.sel(num_classes=5, depth=3) == "centred cross-polytope"
    picture = tmp_path / "deepufm-landscape.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    # Nothing is replaced unless it is asked for, nothing of another kind at all.
    assert run(SMALL) == 2
    assert "exists already" in capsys.readouterr().err
    assert run("landscape --num-classes 4 --depths 2 --starts 0 --overwrite") == 0
    (tmp_path / "t.nc").mkdir()
    assert run(SMALL + " --out t.nc --overwrite") == 2
    assert "did not write" in capsys.readouterr().err


def test_a_structure_without_a_name_is_a_line_with_what_it_saves(capsys):
    assert run("landscape --num-classes 7 --depths 4 --out seven.csv") == 0
    # 1 - 23.0989/24.3959, the polygon's; the cross-polytope costs 24.6.
    shown = capsys.readouterr().out
    assert "other (rank 3: 3.239, 2.801 x2), up to 5.32% less than any named" in shown
    table = pd.read_csv("seven.csv")
    assert table.columns[:3].tolist() == ["num_classes", "depth", "objective"]
    assert float(table.objective[0]) == pytest.approx(23.09895, abs=1e-5)


def test_workers_are_as_many_as_there_is_work_for():
    with processes(4, 1) as executor:
        assert executor is None
    with processes(1, 9) as executor:
        assert executor is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--depht 3", "unknown option --depht. Did you mean --depths?"),
        ("--num-classes 2:4", "must be one or more numbers of at least 3"),
        ("--num-classes 4.5", "--num-classes takes whole numbers"),
        ("--depths .5", "finite numbers of at least 1"),
        ("--depths 3:1", "--depths takes numbers and ranges"),
        ("--starts -1", "`starts` must be at least 0"),
        ("--workers 0", "--workers must be at least 1"),
        ("--out l.zarr", "--out must end in .nc or .csv"),
        ("--out missing/file/l.nc", "missing/file, does not exist"),
    ],
)
def test_bad_input_is_one_line_before_computing(line, message, capsys, monkeypatch):
    monkeypatch.setattr("deepufm.analysis._phase_diagram.optima", None)
    assert run("landscape " + line) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert len(error.splitlines()) == 1


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as stopped:
        run("landscape --help")
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert "deepufm landscape --num-classes 4:8 --depths" in " ".join(text.split())
    for option in ("--starts", "--seed", "--out", "--overwrite", "--workers"):
        assert option in text
