"""The command line, run in the test's own process on small problems."""

from importlib.metadata import version

import equinox as eqx
import numpy as np
import pytest
import tyro
import xarray as xr

from deepufm import cli
from deepufm.cli._build import read_numbers, sweep_spec
from deepufm.cli._options import Sweep
from deepufm.sweep import OUTCOMES, SweepSpec, SweepStore, check_spec

TINY = (
    "sweep --flow reduced --num-classes 4 --depth 1 2 --scale 0.01 --seeds 2 "
    "--final-time 1e3 --saves 3"
)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def no_compiling(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError(f"compiled for {arguments}, {options}")

    monkeypatch.setattr("deepufm.sweep._run._compile", refuse)
    monkeypatch.setattr("deepufm.dynamics._solve._solve", refuse)


def run(line: str) -> int:
    return cli.main(line.split())


def test_sweep_prints_a_table_and_writes_store_and_picture(tmp_path, capsys):
    assert run(TINY + " --out s.zarr") == 0
    printed = capsys.readouterr()
    header, first, second = printed.out.splitlines()[:3]
    assert header.split() == (
        ["depth", "effective", "rank", "sd", "logit", "margin", "log-loss", "outcomes"]
    )
    assert first.split()[0] == "1"
    assert second.endswith("2 reached")
    assert "s.zarr" in printed.out
    assert "s.png" in printed.out
    with xr.open_zarr(tmp_path / "s.zarr", consolidated=False) as dataset:
        assert (dataset.outcome == OUTCOMES.index("reached")).all()
        mean = float(dataset.final_effective_rank.sel(depth=2).mean())
    assert float(second.split()[1]) == pytest.approx(mean, rel=1e-3)
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    # Piped, progress is one line a grid point and no bar.
    lines = printed.err.splitlines()
    assert [line.split()[0] for line in lines] == ["2/4", "4/4"]
    assert "\r" not in printed.err
    # Twice: the second time in place of the first.
    assert run("limit s.zarr") == run("limit s.zarr") == 0
    printed = capsys.readouterr()
    assert printed.out.count("4 of 4 certified") == 2
    assert printed.err == ""
    assert (tmp_path / "s-limits.png").read_bytes().startswith(b"\x89PNG")
    with xr.open_zarr(tmp_path / "s.zarr", group="limits") as limits:
        assert (limits.kkt_residual < 1e-10).all()
        assert set(limits["rank"].sel(depth=1).values.ravel()) == {3}
    assert run("status s.zarr") == 0


def test_an_interrupted_sweep_is_resumed_shown_and_told_apart(
    tmp_path, capsys, monkeypatch
):
    def interrupt(*_):
        raise KeyboardInterrupt

    written, write = [], SweepStore.write
    monkeypatch.setattr("os._exit", lambda code: code)
    with monkeypatch.context() as after_one_cell:
        after_one_cell.setattr("deepufm.cli._progress.Progress.update", interrupt)
        assert run(TINY + " --workers 1 --out s.zarr") is None  # for want of an exit
    line = TINY + " --workers 1 --out s.zarr"
    assert "with --resume goes on" in capsys.readouterr().err
    assert run("status s.zarr") == 1
    assert "2 of 4 members done" in capsys.readouterr().out
    monkeypatch.setattr(
        SweepStore, "write", lambda *a: (written.append(a), write(*a))[1]
    )
    assert run(line + " --resume --rtol 1e-6") == 2
    assert "rtol: default then, 1e-06 now" in capsys.readouterr().err
    assert run(line + " --resume") == 0
    assert len(written) == 1  # the cell that was finished is left alone
    table = capsys.readouterr().out.split("\n\n")[0]
    (tmp_path / "s.png").unlink()
    assert run("show s.zarr") == 0
    assert capsys.readouterr().out.startswith(table)
    assert (tmp_path / "s.png").exists()
    assert run("status s.zarr") == 0
    whole = capsys.readouterr().out
    assert "4 of 4 members done" in whole
    assert "4 reached" in whole


@pytest.mark.usefixtures("no_compiling")
def test_stores_that_are_not_there_are_said_to_be(capsys):
    for line in (
        "status s.zarr",
        "show s.zarr",
        "limit s.zarr",
        TINY + " --out s.zarr --resume",
    ):
        assert run(line) == 2
        assert "no deepufm sweep at s.zarr" in capsys.readouterr().err


def test_sweep_of_the_full_flow(tmp_path, capsys):
    line = "sweep --num-classes 3 --per-class 2 --width 4 --depth 1:2 --seeds 1"
    assert run(line + " --final-time 1e30 --saves 2 --out s.zarr") == 0
    with xr.open_zarr(tmp_path / "s.zarr", consolidated=False) as dataset:
        assert dataset.final_balancedness_relative.shape == (1, 1, 1, 2, 1, 1)
    assert run("limit s.zarr") == 0
    assert capsys.readouterr().err.count("too early") == 0
    store = xr.open_zarr(tmp_path / "s.zarr", consolidated=False).load()
    early = store.assign(final_class_means=store.final_class_means / 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepufm.sweep.open_sweep", lambda _: early)
        assert run("limit s.zarr") == 1
    assert "2 members were too early" in capsys.readouterr().err


def test_members_that_do_not_reach_their_stop_are_counted(tmp_path, capsys):
    assert run(TINY + " --max-steps 3 --out s.zarr") == 1
    assert "2 step_budget" in capsys.readouterr().out
    assert (tmp_path / "s.png").exists()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("solve --flow reduced --num-classes 4 --final-time 1e3", "K = 4, L = 2"),
        (
            "solve --flow reduced --num-classes 4 --alternating 1 .1 --final-time 1e3",
            "given start",
        ),
        (
            "solve --start 1 .5 .1 --per-class 2 --width 5 --depth 2 --final-time 10 "
            "--descent-step 0.1",
            "full flow, K = 4, n = 2, d = 5, L = 2, given start",
        ),
        (
            "solve --flow layerwise --loss mse --start .1 .2 .3 --per-class 4 "
            "--final-time 50",
            "layerwise flow (mse), K = 3, n = 4, L = 2, given start",
        ),
        (
            "solve --class-sizes 3 1 --width 3 --depth 2 --activation relu "
            "--weight-decay .1 --decay-until 2 --final-time 4",
            "full flow, sizes 3 1, relu, λ = 0.1 to t = 2, K = 2, d = 3, L = 2, std",
        ),
        (
            "solve --flow reduced --num-classes 4 --log-loss -20 --save-every 1",
            "log-loss        -20\n",
        ),
    ],
)
def test_solve(line, expected, tmp_path, capsys):
    assert run(line + " --saves 30 --out p.zarr") == 0
    assert expected in capsys.readouterr().out
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    with xr.open_zarr(tmp_path / "p.zarr", consolidated=False) as dataset:
        saved = int(dataset.num_saved)
        assert dataset.kl.dims == ("save",)
        assert np.isfinite(dataset.kl[:saved]).all()
        assert np.isnan(dataset.kl[saved:]).all()


@pytest.mark.usefixtures("no_compiling")
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("sweep --depht 3", "unknown option --depht. Did you mean --depth?"),
        ("solve --frobnicate", "unknown option --frobnicate. See `deepufm solve"),
        ("sweep --width 5", "`width` must be at least num_classes = 10"),
        ("sweep --width abc", "--width takes numbers and ranges"),
        ("sweep --width 10.5", "--width takes whole numbers"),
        ("sweep --depth 3:1", "--depth takes numbers and ranges"),
        ("sweep --depth 0", "`depth` must be at least 1"),
        ("sweep --scale 0", "`scale` must be positive"),
        ("sweep --scale nan", "`scale` must be positive"),
        ("sweep --seeds 0", "--seeds must be at least 1"),
        ("sweep --workers 0", "--workers must be at least 1"),
        ("sweep --final-time -1", "must be after the start"),
        ("sweep --final-time inf", "give --log-final-time"),
        ("sweep --final-time 1 --log-loss -3", "one stop, not --final-time and"),
        ("sweep --final-norm 1e3", "Give --save-every"),
        ("sweep --rtol 0", "`rtol` must lie between"),
        ("sweep --flow reduced", "`num_classes` must be a power of two"),
        ("sweep --flow reduced --num-classes 8 --depth .5", "must be at least 1"),
        ("sweep --flow reduced --num-classes 8 --uniform 1 0", "0 <= low < high"),
        ("sweep --flow reduced --num-classes 8 --width 50", "--width means nothing"),
        ("sweep --uniform 0 2", "--uniform means nothing with --flow full"),
        ("solve --flow reduced --width 50", "--width means nothing"),
        ("solve --start 1 1 1 --scale 2", "Give either --start or --scale"),
        (
            "solve --start 1 1 1 --num-classes 8",
            "--num-classes says 8 and --start says 4",
        ),
        ("solve --depth inf", "must be a whole number"),
        ("sweep --flow reduced", "Use --flow full"),
        ("sweep --out s.png", "names the store, not the picture"),
        ("solve --width 5", "`width` must be at least num_classes = 10"),
        ("solve --depth 1.5", "must be a whole number"),
        ("solve --scale 0", "--scale must be positive"),
        ("solve --solver kvaerno5", "implicit solver factors a dense Jacobian"),
        ("solve --flow reduced --scale -1", "--scale must be positive"),
        ("solve --flow reduced --start 1 -1 1", "at least 0, but entry 1 is -1"),
        ("solve --flow reduced --start 1 nan 1", "entry 1 is nan"),
        ("solve --flow reduced --start 0 0 0", "a = 0 is an equilibrium"),
        ("solve --flow reduced --start 1 1", "must be a power of two"),
        ("sweep --flow logits --depth 3", "--depth means nothing with --flow logits"),
        ("sweep --flow logits --loss linearised", "--loss linearised means nothing"),
        ("sweep --class-sizes 3 1 --num-classes 3", "number for each of the 3 classes"),
        ("sweep --class-sizes 3 1 --per-class 2", "with --class-sizes"),
        ("sweep --flow layerwise --activation relu", "--activation means nothing"),
        ("sweep --init polygon --plain-std", "--plain-std means nothing with --init"),
        ("sweep --perturbation 0.1", "--perturbation means nothing with --init gauss"),
        ("sweep --init partner --num-classes 6", "must be a power of two"),
        ("sweep --decay-until 3", "--decay-until needs a positive --weight-decay"),
        ("sweep --weight-decay -1", "--weight-decay must be finite and at least 0"),
        (
            "sweep --weight-decay 0.1 --clock log-norm --final-norm 9 --save-every 1",
            "`LogNorm` needs a norm that grows for ever",
        ),
        ("sweep --width 5", "or --bottleneck"),
        ("solve --flow logits --start 1 1 1", "--start gives the singular values"),
        ("solve --descent-step 0.1", "needs a --final-time of at least one step"),
        ("solve --flow reduced --descent-step 1 --final-time 9", "compares the full"),
        ("solve --alternating 1 .1 --start 1 1 1", "either --start or --alternating"),
        ("solve --negative-slope .1", "nothing without --activation relu"),
        ("solve --flow logits --loss mse", "say when to stop, with --final-time"),
        ("sweep --weight-decay .1", "say when to stop, with --final-time"),
        ("sweep --init polygon --activation relu", "logits of linear layers"),
        ("solve --init partner --class-sizes 3 1 1 3", "classes of one size"),
        ("sweep --init simplex-etf --bottleneck --width 2", "rank 2 at most"),
        ("solve --class-sizes 3 1 --num-classes 3", "--class-sizes says 2"),
        ("solve --flow layerwise --depth 1.5", "must be a whole number"),
    ],
)
def test_bad_input_is_one_line_before_compiling(line, message, capsys):
    assert run(line) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert len(error.splitlines()) == 1


def test_a_descent_that_diverges_is_no_success(capsys):
    line = (
        "solve --num-classes 2 --per-class 1 --width 2 --depth 1 --scale 3 --loss mse"
    )
    assert run(line + " --final-time 90 --descent-step 3 --saves 2 --out p.zarr") == 1
    assert "descent diverged" in capsys.readouterr().err


@pytest.mark.usefixtures("no_compiling")
def test_existing_outputs_are_refused(tmp_path, capsys):
    (tmp_path / "s.png").write_bytes(b"")
    assert run(TINY + " --out s.zarr") == 2
    assert "s.png exists already" in capsys.readouterr().err
    (tmp_path / "t.zarr").mkdir()
    assert run(TINY + " --out t.zarr --overwrite") == 2
    assert "did not write" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert run(TINY + " --out file/s.zarr") == 2
    assert "cannot be written" in capsys.readouterr().err


def test_the_command_without_options_is_the_papers_setting():
    spec, default = sweep_spec(Sweep()), SweepSpec()
    assert spec.grid == default.grid
    assert spec.family == default.family
    assert eqx.tree_equal(spec.stop, default.stop)
    assert (spec.saves, spec.rtol, spec.solver) == (25, None, None)


@pytest.mark.parametrize(
    ("words", "family"),
    [
        ("", "GaussianFamily"),
        ("--init orthogonal --loss mse --final-time 9", "OrthogonalFamily"),
        ("--init partner --num-classes 8", "PartnerFamily"),
        ("--init polygon --perturbation .1", "StructureFamily"),
        ("--flow logits --class-sizes 1 2 3 4 5 6 7 8 9 9", "LogitMatrixFamily"),
        ("--flow reduced --num-classes 8", "UniformModesFamily"),
        (
            "--flow reduced --num-classes 8 --loss linearised --final-time 9",
            "UniformModesFamily",
        ),
        ("--flow reduced --loss mse --final-time 9", "MSEModesFamily"),
        ("--flow layerwise --num-classes 8 --uniform .5 1", "LayerwiseFamily"),
        ("--flow reduced-logits --num-classes 8", "LogitModesFamily"),
    ],
)
def test_every_model_is_reached_by_options(words, family):
    command, unknown = tyro.cli(
        Sweep,
        args=words.split(),
        return_unknown_args=True,
        config=(tyro.conf.OmitArgPrefixes,),
    )
    assert not unknown
    spec = sweep_spec(command)
    assert type(spec.family).__name__ == family
    check_spec(spec)


@pytest.mark.parametrize("command", ["sweep", "solve"])
def test_help_teaches(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(f"{command} --help")
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert f"deepufm {command} --flow reduced --" in " ".join(text.split())
    for option in ("--final-time", "--clock", "--rtol", "--dtype", "--out", "--solver"):
        assert option in text


def test_version_is_the_packages(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.split() == ["deepufm", version("deepufm")]


def test_ranges_are_inclusive():
    assert read_numbers("depth", ("1:3", "7", "9:5:-2")) == (1, 2, 3, 7, 9, 7, 5)
    assert read_numbers("scale", ("0.1", "1e-3")) == (0.1, 1e-3)
