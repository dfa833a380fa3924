"""Pictures of stability and of basins show the numbers they are given."""

import numpy as np
import xarray as xr

from deepufm.figures import basins_figure, stability_figure
from deepufm.stability import BasinFraction, BasinFractions, stability_diagram


def share(scale, structure, rank, count, *, starts=10):
    part, objective = count / starts, float(rank) if rank else np.nan
    return BasinFraction(
        2.0, scale, None, structure, None, rank, objective, count, starts, part,
        max(part - 0.1, 0.0), part + 0.1,
    )  # fmt: skip


def test_shares_are_stacked_and_have_their_intervals():
    rows = (
        share(0.1, "square", 2, 7), share(0.1, "simplex ETF", 3, 2),
        share(0.1, "not certified (early)", 0, 1),
        share(1.0, "simplex ETF", 3, 10), share(1.0, "square", 2, 0),
    )  # fmt: skip
    found = BasinFractions(rows, 4, 0.95, None, 0, 20, (1, 1), ())
    figure = basins_figure(found, title="here")
    left, right = figure.axes
    heights = [[bar.get_height() for bar in bars] for bars in left.containers]
    np.testing.assert_allclose(heights, [[0.7, 0], [0.2, 1], [0.1, 0]], atol=1e-12)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "square, rank 2 (2)", "simplex ETF, rank 3 (3)", "not certified",
    ]  # fmt: skip
    assert [x.get_text() for x in left.get_xticklabels()] == ["0.1", "1"]
    assert left.get_xlabel() == "scale of the start"
    assert len(right.containers) == 4  # an interval each


def test_thresholds_are_curves_and_where_the_exponent_is_zero_is_a_line():
    table = xr.Dataset(
        {"threshold": (("structure", "depth"), [[0.0, 1.0], [np.inf, np.inf]])},
        {"depth": [1.0, 2.0], "name": ("structure", ["simplex ETF", "never"])},
    )
    diagram = stability_diagram(
        np.ones(3), np.linspace(0, 3, 7), np.asarray([2.0, 3.0])
    )
    figure = stability_figure(table, diagram, name="simplex ETF")
    left, right = figure.axes[:2]
    (curve,) = left.get_lines()
    np.testing.assert_array_equal(curve.get_ydata(), [0, 1])
    assert left.get_xlabel() == "depth $L$"
    # The line of zero: N = (K-1)(L-1)/(L+1).
    (contour,) = [c for c in right.collections if type(c).__name__ == "QuadContourSet"]
    path = np.asarray(contour.get_paths()[0].vertices, float)
    at_two = path[np.isclose(path[:, 1], 2.0), 0]
    np.testing.assert_allclose(at_two, 1.0, rtol=1e-12)
