"""The phase diagram, against eigenvalues one by one."""

import numpy as np
import pytest
from ray_oracles import brute_rates, direction

from deepufm.stability._stability_diagram import stability_diagram
from deepufm.stability._thresholds import critical_depth, stability_threshold


def test_cells_are_the_largest_eigenvalues():
    modes = (1, 2, 4, 8, 15)
    ray = direction(16, modes)
    norms, depths = np.array([0.3, 1.2, 4.0, 2.0]), np.array([1.5, 2.0, np.inf])
    found = stability_diagram(ray, norms, depths)
    assert (found.modes, found.leading.shape) == (modes, (3, 4))
    for row, p in enumerate([0.2, 1 / 3, 1.0]):
        for column, norm in enumerate(norms):
            least = np.min(brute_rates(16, modes, norm / 5))
            # A dead mode falls behind at 1.
            known = max(p - least, -1)
            assert found.leading[row, column] == pytest.approx(known, rel=1e-12)
            assert found.stable[row, column] == (known < 0)
            assert found.stable[row, column] == (norm > found.thresholds[row])
            if p < 1:
                below = depths[row] < found.critical_depths[column]
                assert found.stable[row, column] == below
    assert found.thresholds[1] == pytest.approx(float(stability_threshold(ray, 2.0)))
    assert found.critical_depths[0] == pytest.approx(float(critical_depth(ray, 0.3)))
    data = found.to_dataset()
    assert float(data.leading.sel(depth=2.0, norm=4.0)) == found.leading[1, 2]
    assert data.attrs["modes"] == list(modes)


@pytest.mark.parametrize(
    ("norms", "depths", "message"),
    [
        ([-1.0], [2.0], "`norms`.*finite and at least 0"),
        ([1.0], [0.5], "`depths`.*at least 1"),
        ([], [2.0], "not empty"),
    ],
)
def test_axes_out_of_range_are_refused(norms, depths, message):
    with pytest.raises(ValueError, match=message):
        stability_diagram(np.ones(3), np.array(norms), np.array(depths))
