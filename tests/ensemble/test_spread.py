"""Shares on several devices, in one subprocess that has four."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from compiling import QUICK_FLAGS
from four_devices import COUNT, DEVICES

SCRIPT = Path(__file__).parent / "four_devices.py"
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective", "reduce-scatter")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("devices") / "found.npz"
    flags = f"--xla_force_host_platform_device_count=4 {QUICK_FLAGS}"
    subprocess.run(
        [sys.executable, SCRIPT, path],
        env=os.environ | {"XLA_FLAGS": flags},
        check=True,
        timeout=600,
    )
    with np.load(path) as file:
        return dict(file)


@pytest.mark.parametrize("number", DEVICES)
def test_members_end_the_same_on_any_number_of_devices(found, number):
    """Seven of them: three devices and four get uneven shares."""
    assert found[f"reached {number}"].tolist() == COUNT * [True]
    for name in ("final", "log_time"):
        got, want = found[f"{name} {number}"], found[f"{name} 0"]
        np.testing.assert_allclose(got, want, rtol=1e-12)
    np.testing.assert_array_equal(found[f"steps {number}"], found["steps 0"])


def test_devices_do_not_communicate(found):
    texts = json.loads(str(found["texts"]))
    assert len(texts) == len(DEVICES)
    for text, number in zip(texts, DEVICES):
        assert "while(" in text
        assert f"num_partitions={number}" in text or number == 1
        assert not [word for word in COLLECTIVES if word in text]


def test_a_seed_draws_the_same_bits_in_a_batch_on_another_device(found):
    drawn = [name for name in found if name.startswith("alone ")]
    assert len(drawn) == 4
    for name in drawn:
        np.testing.assert_array_equal(
            found[name.replace("alone", "batch")], found[name]
        )
