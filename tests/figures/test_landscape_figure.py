"""The picture of the phase diagram: the right letter, colour and line in each place."""

import dataclasses
import math

import numpy as np
import pytest

from deepufm import Verdict
from deepufm.analysis import phase_diagram
from deepufm.figures import landscape_figure


@pytest.fixture(scope="module")
def diagram():
    return phase_diagram((5, 4), (4, 1, 3), starts=0)


def test_cells_hold_structures_by_rising_class_and_depth(diagram, tmp_path):
    figure = landscape_figure(diagram, tmp_path / "p.png", title="what costs least")
    panel, bar = figure.axes
    letters = {text.get_position(): text.get_text() for text in panel.texts}
    assert letters == {
        (0, 0): "S", (0, 1): "X", (0, 2): "X", (1, 0): "S", (1, 1): "X", (1, 2): "P",
    }  # fmt: skip
    # Ranks 2, 3, 4 are numbered 0, 1, 2.
    np.testing.assert_array_equal(panel.images[0].get_array(), [[1, 2], [0, 1], [0, 0]])
    assert [tick.get_text() for tick in bar.get_yticklabels()] == ["2", "3", "4"]
    assert [tick.get_text() for tick in panel.get_yticklabels()] == ["1", "3", "4"]
    assert [tick.get_text() for tick in panel.get_xticklabels()] == ["4", "5"]
    assert panel.get_xlabel() == "number of classes $K$"
    assert panel.get_ylabel() == "depth $L$"
    assert panel.get_title() == "what costs least"
    assert len(figure.legends) == 1
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_the_line_is_theorem_31(diagram):
    """2 log 2/log(2(K-1)/K) - 1 at K = 4, 2.419, lies between rows 1 and 3."""
    panel = landscape_figure(diagram).axes[0]
    line = next(line for line in panel.get_lines() if line.get_marker() == "o")
    want = 2 * math.log(2) / math.log(1.5) - 1
    assert np.asarray(line.get_ydata())[0] == pytest.approx((want - 1) / 2, rel=1e-12)


def test_what_is_not_certified_or_named_is_marked(diagram):
    first, *others = diagram.rows[0]
    doubtful = dataclasses.replace(
        first, point=dataclasses.replace(first.point, verdict=Verdict.FLAT)
    )
    nameless = dataclasses.replace(others[0], structure=None)
    row = (doubtful, nameless, others[1])
    changed = dataclasses.replace(diagram, num_classes=(5,), rows=(row,))
    panel = landscape_figure(changed).axes[0]
    letters = {text.get_position(): text.get_text() for text in panel.texts}
    assert letters == {(0, 2): "P?", (0, 0): "4", (0, 1): "X"}
