"""Descriptions: plain text, which changes with everything that changes results."""

import dataclasses
import pickle

import diffrax
import jax
import numpy as np
import pytest

import deepufm as ufm
from deepufm.sweep import (
    GaussianFamily,
    Grid,
    StructureFamily,
    SweepSpec,
    UniformModesFamily,
    describe,
)
from deepufm.sweep._describe import differences

SPEC = SweepSpec(
    grid=Grid(depth=(1, 2, 3, 4, 8), scale=(0.1, 1.0), seed=tuple(range(100)))
)

VERY_CHORD = diffrax.with_stepsize_controller_tols(diffrax.VeryChord)


def test_the_description_is_plain_text():
    assert describe(SPEC) == (
        "num classes          10\n"
        "per class            5\n"
        "width                100\n"
        "depth                1 to 4 8\n"
        "scale                0.1 1\n"
        "seed                 0 to 99\n"
        "family               GaussianFamily\n"
        "family loss          CrossEntropy\n"
        "family activation    none\n"
        "family weight decay  0\n"
        "family decay until   none\n"
        "family class sizes   none\n"
        "family bottleneck    no\n"
        "family plain std     no\n"
        "stop                 FinalTime\n"
        # log 1e8, to the last digit: 17 of them tell all floats apart.
        "stop log time        18.420680743952367\n"
        "clock                LogTime\n"
        "clock log t0         0\n"
        "solver               default\n"
        "rtol                 default\n"
        "max steps            100000\n"
        "saves                25\n"
        "precision            float64"
    )


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"grid": dataclasses.replace(SPEC.grid, depth=(1, 2, 3, 8, 4))}, ["depth"]),
        ({"grid": dataclasses.replace(SPEC.grid, seed=tuple(range(1, 101)))}, ["seed"]),
        ({"grid": dataclasses.replace(SPEC.grid, scale=(0.1, 1 + 2**-52))}, ["scale"]),
        ({"family": GaussianFamily(loss=ufm.MSE())}, ["family loss"]),
        ({"family": GaussianFamily(class_sizes=(5,) * 10)}, ["per class", "family c"]),
        ({"stop": ufm.FinalTime(log=18.42068074395237)}, ["stop log time"]),
        ({"stop": ufm.FinalNorm(2.0)}, ["stop", "stop log time", "stop log norm"]),
        ({"clock": ufm.LogTime(2.0)}, ["clock log t0"]),
        ({"rtol": 1e-7}, ["rtol"]),
        ({"max_steps": 100_001}, ["max steps"]),
        ({"saves": 26}, ["saves"]),
    ],
)
def test_what_changes_results_changes_its_own_lines_only(changes, names):
    other = dataclasses.replace(SPEC, **changes)
    found = differences(describe(SPEC), describe(other))
    assert len(found) == len(names)
    assert all(line.startswith(name) for line, name in zip(found, names))
    assert differences(describe(SPEC), describe(SPEC)) == []


def test_parts_of_parts_are_told_apart():
    """Fields of a solver, a step, a slope: what a `repr` left out."""

    def both(first, second, **options):
        specs = [SweepSpec(**{k: v[i] for k, v in options.items()}) for i in (0, 1)]
        return differences(*map(describe, specs)) == [f"{first} then, {second} now"]

    assert both(
        "saves step: 0.1", "0.2", saves=[ufm.SaveEvery(s, 9) for s in (0.1, 0.2)]
    )
    assert both(
        "family activation negative slope: 0",
        "0.1",
        family=[GaussianFamily(activation=ufm.ReLU(slope)) for slope in (0, 0.1)],
    )
    assert both(
        "solver root finder kappa: 0.01",
        "0.02",
        solver=[
            diffrax.Kvaerno5(root_finder=VERY_CHORD(kappa=kappa))
            for kappa in (0.01, 0.02)
        ],
    )
    assert both(
        "family structure: simplex_etf",
        "polygon",
        family=[StructureFamily(structure=s) for s in (
            ufm.Structure.SIMPLEX_ETF, ufm.Structure.POLYGON
        )],
    )  # fmt: skip


def test_precision_is_part_of_it():
    with jax.enable_x64(False):
        single = describe(SPEC)
    assert "precision: float64 then, float32 now" in differences(describe(SPEC), single)


def test_axes_that_are_not_read_are_said_to_be():
    spec = SweepSpec(grid=Grid(num_classes=4), family=UniformModesFamily())
    assert "(means nothing here)" in describe(spec).splitlines()[1]  # per class


@dataclasses.dataclass(frozen=True)
class _Odd(UniformModesFamily):
    """A family from elsewhere, with fields of every kind."""

    table: np.ndarray = dataclasses.field(default_factory=lambda: np.eye(2))
    rule: object = np.linalg.norm
    options: object = dataclasses.field(default_factory=lambda: {"a": (1, (2.5, "x"))})


def test_families_from_elsewhere_are_described_alike_in_every_process():
    spec = SweepSpec(grid=Grid(num_classes=4), family=_Odd())
    text = describe(spec)
    assert describe(pickle.loads(pickle.dumps(spec))) == text
    assert "0x" not in text  # an address, which no two processes share
    lines = {" ".join(line.split()) for line in text.splitlines()}
    assert lines >= {
        "family table 1 0 0 1 in shape 2 2",
        "family rule numpy.linalg.norm",
        "family options a 2 parts",
        "family options a 1 2.5 x",
    }


def test_values_of_the_same_size_read_alike():
    """1, 1.0 and numpy's 1 are one value: a sweep given the other way is the same."""
    grids = [
        Grid(depth=(1, 2.5), scale=1, seed=(0, 1)),
        Grid(depth=np.asarray([1.0, 2.5]), scale=1.0, seed=np.arange(2)),  # pyright: ignore[reportArgumentType]
    ]
    first, second = (
        describe(SweepSpec(grid=g, family=UniformModesFamily())) for g in grids
    )
    assert first == second
