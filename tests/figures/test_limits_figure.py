import numpy as np
import pytest
import xarray as xr

from deepufm.figures import limits_figure
from deepufm.sweep import AXES, STATUSES


def limits_of(ranks: np.ndarray, depths, **sizes) -> xr.Dataset:
    """Ranks by depth and seed, 0 where none is certified."""
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    shape = (*shape[:3], len(depths), shape[4], ranks.shape[1])
    ranks = np.broadcast_to(ranks[:, None, :], shape)
    certified, unsettled = (STATUSES.index(x) for x in ("certified", "unsettled"))
    dims = (*AXES, "seed")
    return xr.Dataset(
        {
            "status": (dims, np.where(ranks > 0, certified, unsettled)),
            "rank": (dims, np.where(ranks > 0, ranks, 3)),
            "logit_margin": (dims, 1 / (1.0 + ranks)),
        },
        coords={axis: 1 + np.arange(sizes.get(axis, 1)) for axis in AXES}
        | {"depth": depths, "seed": np.arange(ranks.shape[-1])},
    )


def test_bars_are_the_shares_of_ranks():
    ranks = np.asarray([[7, 7, 7, 7], [3, 3, 4, 0]])
    figure = limits_figure(limits_of(ranks, [1, 2]), title="a title")
    bars = figure.axes[0].containers
    assert [bar.get_label() for bar in bars] == ["3", "4", "7", "not certified"]
    heights = [[patch.get_height() for patch in bar] for bar in bars]
    np.testing.assert_allclose(heights, [[0, 0.5], [0, 0.25], [1, 0], [0, 0.25]])
    # Every certified limit has its margin on the right, and no other.
    dots = [line.get_xydata() for line in figure.axes[1].get_lines()]
    np.testing.assert_allclose(np.concatenate(dots)[:, 0], [1, 1, 1, 0, 0, 0, 0])
    assert figure.get_suptitle() == "a title; limits of 4 members each"


@pytest.mark.parametrize("depths", [[2], [1, 2]])
def test_nothing_certified_is_a_picture_too(depths, tmp_path):
    ranks = np.zeros((len(depths), 3), int)
    figure = limits_figure(limits_of(ranks, depths), tmp_path / "figure.png")
    assert [bar.get_label() for bar in figure.axes[0].containers] == ["not certified"]


def test_what_is_taken_together_is_said():
    figure = limits_figure(limits_of(np.asarray([[3], [3]]), [1, 2], num_classes=2))
    assert "all values of number of classes $K$ together" in figure.get_suptitle()
