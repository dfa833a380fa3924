"""Class sizes and labels, written out by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

import deepufm as ufm


@pytest.mark.parametrize("per_class", [3, np.int64(3), (3, 3, 3, 3)])
def test_one_number_stands_for_every_class(per_class):
    sizes = ufm.class_sizes(4, per_class)
    assert sizes == (3, 3, 3, 3)
    assert all(type(size) is int for size in sizes)


def test_class_sizes_keep_their_order():
    assert ufm.class_sizes(3, (5, 1, 2)) == (5, 1, 2)


@pytest.mark.parametrize(
    ("num_classes", "per_class", "labels"),
    [
        (4, 3, [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]),
        (3, 1, [0, 1, 2]),
        (3, (1, 3, 2), [0, 1, 1, 1, 2, 2]),
    ],
)
def test_class_labels_are_in_order(num_classes, per_class, labels):
    found = ufm.class_labels(num_classes, per_class)
    assert jnp.issubdtype(found.dtype, jnp.integer)
    assert found.tolist() == labels


@pytest.mark.parametrize("function", [ufm.class_sizes, ufm.class_labels])
@pytest.mark.parametrize(
    ("per_class", "message"),
    [
        (0, "`per_class` must be at least 1, but is 0.*leave it out"),
        (-2, "`per_class` must be at least 1, but is -2"),
        ((2, 0, 1), r"`per_class` must be at least 1, but is \(2, 0, 1\)"),
        ((2, 1), r"one for each of the 3 classes, but has 2: \(2, 1\)"),
        ((2, 1, 1, 1), "one for each of the 3 classes, but has 4"),
        ((), "one for each of the 3 classes, but has 0"),
    ],
)
def test_bad_class_sizes_are_refused(function, per_class, message):
    with pytest.raises(ValueError, match=message) as error:
        function(3, per_class)
    assert "\n" not in str(error.value)


def test_labels_pick_the_columns_of_class_means():
    """Column c of the means, once for every example of class c."""
    means = np.arange(9.0).reshape(3, 3)
    columns = means[:, np.asarray(ufm.class_labels(3, (1, 3, 2)))]
    np.testing.assert_array_equal(columns, np.repeat(means, [1, 3, 2], axis=1))
