import numpy as np
import pytest
from test_edges import saddle_ratio, threshold

from deepufm.stability._shock import (
    ShockStatus,
    critical_shock,
    structure_directions,
)


@pytest.mark.parametrize("norm", [5.0, 0.5])
def test_shock_of_four_classes_is_the_symmetric_threshold(norm):
    """Also at a norm below 3/2, where perturbations of collapse grow at first."""
    # Two modes up, one down: the boundary on that ray, by SciPy.
    ratio = np.exp(threshold(4, 3.0, norm))
    a = np.asarray([ratio, 1.0, ratio]) * 3 / (2 * ratio + 1)
    expected = float(np.linalg.norm(a - 1))
    shock = critical_shock(4, 3, norm, random=1, changes=4)
    assert shock.status is ShockStatus.FOUND
    assert shock.size == pytest.approx(expected, rel=2e-6)
    assert shock.size <= expected * (1 + 2e-6)
    assert shock.size * (1 - 2e-6) < shock.survived < shock.size
    assert shock.end is not None
    assert shock.end.rank == 2
    assert np.sum(shock.epsilon) == pytest.approx(0, abs=1e-12)
    assert shock.distance == pytest.approx(shock.size**2 / 18)


def test_shock_at_large_norms_is_the_saddle():
    a = np.asarray([saddle_ratio(4, 3), 1.0, saddle_ratio(4, 3)])
    expected = float(np.linalg.norm(3 * a / np.sum(a) - 1))
    shock = critical_shock(4, 3, 1e3, directions=a[None], random=0, changes=0)
    assert shock.size == pytest.approx(expected, rel=2e-6)


def test_there_is_none_at_depth_one():
    shallow = critical_shock(8, 1, 0.1)
    assert (shallow.size, shallow.status) == (np.inf, ShockStatus.NONE)


def test_directions_are_one_of_each_orbit():
    directions = structure_directions(4, 2)
    assert np.max(np.abs(np.sum(directions, axis=1))) < 1e-12
    assert np.min(np.linalg.norm(directions, axis=1)) > 0.1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((6, 2, 1.0), "power of two"),
        ((4, 0.5, 1.0), "depth"),
        ((4, 2, 0.0), "norm"),
        ((4, 2, 1e5), "norm"),
    ],
)
def test_what_has_no_collapse_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        critical_shock(*given)


def test_brackets_end_where_floats_do():
    with pytest.raises(ValueError, match="1e-12"):
        critical_shock(4, 2, 3.0, tolerance=1e-17)
    shock = critical_shock(4, 2, 3.0, random=0, changes=0, tolerance=1e-12)
    assert shock.survived < shock.size < shock.survived * (1 + 1e-11)
