"""Figures: the right numbers on labelled axes, whatever the grid's shape."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr

from deepufm.figures import orbit_figure, sweep_figure
from deepufm.figures._style import canvas, log10_time
from deepufm.sweep import AXES, OUTCOMES


def _dataset(seeds=4, **sizes):
    """Effective ranks 10 - depth + noise; the last seed of the first depth failed."""
    shape = tuple(sizes.get(axis, 1) for axis in AXES) + (seeds,)
    dims = (*AXES, "seed")
    rng = np.random.default_rng(0)
    depth = np.arange(shape[3])[:, None, None]
    rank = 10 - depth + 0.1 * rng.standard_normal(shape)
    outcome = np.full(shape, OUTCOMES.index("reached"), np.int8)
    outcome[:, :, :, 0, :, -1] = OUTCOMES.index("step_budget")
    rank[:, :, :, 0, :, -1] = 1e6
    return xr.Dataset(
        {
            "final_effective_rank": (dims, rank),
            "final_logit_margin": (dims, rank / 100),
            "outcome": (dims, outcome),
        },
        coords={
            **{axis: 1 + np.arange(sizes.get(axis, 1)) for axis in AXES},
            "seed": np.arange(seeds),
        },
    )


@pytest.fixture
def drawn(monkeypatch):
    """Keeps the figure that a plot saves."""
    figures = []
    for module in ("_sweep", "_orbit"):
        monkeypatch.setattr(
            f"deepufm.figures.{module}.save",
            lambda figure, _: figures.append(
                [
                    (
                        axes.get_xlabel(),
                        axes.get_ylabel(),
                        [c.lines[0].get_ydata() for c in axes.containers],
                        [line.get_xydata() for line in axes.get_lines()],
                    )
                    for axes in figure.axes
                ]
            ),
        )
    return figures


def test_sweep_figure_plots_means_of_members_that_reached(drawn):
    dataset = _dataset(depth=3)
    sweep_figure(dataset, "unused.png")
    (rank, margin), ranks = drawn[0], dataset.final_effective_rank.values.squeeze()
    assert rank[:2] == ("depth $L$", "effective rank")
    assert margin[0] == "depth $L$"
    (means,) = rank[2]
    expected = [ranks[0, :-1].mean(), ranks[1].mean(), ranks[2].mean()]
    np.testing.assert_allclose(means, expected, rtol=1e-13)


@pytest.mark.parametrize(
    ("sizes", "lines", "label"),
    [
        ({"depth": 3, "width": 2}, 2, "depth $L$"),
        ({"scale": 4}, 1, "initialisation scale"),
        ({}, 1, "depth $L$"),
        ({"depth": 2, "width": 3, "num_classes": 4}, 7, "depth $L$"),
    ],
)
def test_sweep_figure_of_any_grid(sizes, lines, label, drawn):
    sweep_figure(_dataset(**sizes), "unused.png")
    for panel in drawn[0]:
        assert panel[0] == label
        assert len(panel[2]) == lines


@pytest.mark.parametrize("depths", [[2.0, np.inf], [np.inf]])
def test_infinite_depth_has_a_place(depths, drawn, tmp_path):
    dataset = _dataset(depth=len(depths)).assign_coords(depth=depths)
    sweep_figure(dataset, "unused.png")
    assert np.isfinite(drawn[0][0][3][0]).all()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepufm.figures._sweep.save", lambda figure, _: figure)
        figure = sweep_figure(dataset)
    assert figure.axes[0].get_xticklabels()[-1].get_text() == "∞"
    figure.savefig(tmp_path / "figure.png")


def test_one_seed_has_no_spread(drawn):
    sweep_figure(_dataset(seeds=1, depth=3).isel(depth=slice(1, None)), "x.png")
    assert np.isfinite(drawn[0][0][2][0]).all()


def test_orbit_figure_draws_every_mode(drawn):
    class _Orbit:
        num_saved = 3
        log_time = np.array([-np.inf, 0.0, np.log(1e5), np.nan])
        observables = {  # noqa: RUF012
            "singular_values": np.array([[1, 1, 2.0], [1, 2, 4], [1, 3, 9], [0, 0, 0]]),
            "nuclear_norm": np.array([4.0, 7, 13, 0]),
            "kl": np.array([0.1, 0.2, 0.3, 9]),
        }

    orbit: Any = _Orbit()
    orbit_figure(orbit, "unused.png")
    spectrum, norm, kl = drawn[0]
    assert len(spectrum[3]) == 4  # three modes and the level of collapse
    assert spectrum[0].startswith(r"$\log_{10} t$")
    np.testing.assert_allclose(norm[3][0][1:, 0], [0, 5])
    np.testing.assert_allclose(kl[3][0][:, 1], [0.1, 0.2, 0.3])
    np.testing.assert_allclose(spectrum[3][0][-1, 1], 9 / 13)  # largest mode first


def test_orbit_far_beyond_the_clock_of_time_is_drawn_against_the_norm(drawn):
    class _Orbit:
        num_saved = 3
        log_time = np.array([-np.inf, np.log(10.0), 1e5])
        observables = {  # noqa: RUF012
            "singular_values": np.array([[1, 1, 2.0], [1, 2, 4], [1, 3, 9]]),
            "nuclear_norm": np.array([4.0, 7, 13]),
            "kl": np.array([0.1, 0.2, 0.3]),
        }

    orbit: Any = _Orbit()
    orbit_figure(orbit, "unused.png")
    spectrum, time, kl = drawn[0]
    assert {panel[0] for panel in drawn[0]} == {r"sum of singular values $\|a\|_1$"}
    for panel in (spectrum, kl):
        np.testing.assert_array_equal(panel[3][0][:, 0], [4, 7, 13])
    np.testing.assert_allclose(time[3][0][1:, 1], [1, 1e5 / np.log(10)])


def test_log10_time_of_the_start_is_blank():
    times = log10_time(np.array([-np.inf, np.log(1000.0), 2.3e5]))
    assert np.isnan(times[0])
    np.testing.assert_allclose(times[1:], [3, 2.3e5 / np.log(10)])


def test_figures_leave_global_settings_alone(tmp_path):
    before, size = plt.rcParams["axes.grid"], plt.rcParams["font.size"]
    with canvas(1, 1, (2.0, 2.0)) as (figure, _):
        figure.savefig(tmp_path / "x.png")
    assert (plt.rcParams["axes.grid"], plt.rcParams["font.size"]) == (before, size)
    assert not plt.get_fignums()
