"""Sweeps: members are those of single solves, and one bad cell spoils no other."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr

import deepufm as ufm
from deepufm._types import Tracer
from deepufm.sweep import (
    AXES,
    OUTCOMES,
    STATUSES,
    GaussianFamily,
    Grid,
    SweepSpec,
    SweepStore,
    UniformModesFamily,
    batches,
    check_spec,
    open_sweep,
    run_batch,
    run_sweep,
    summarise,
    summarise_limits,
    sweep_limits,
)

FULL = SweepSpec(
    grid=Grid(
        num_classes=(3,), per_class=(2,), width=(3, 5), depth=(1, 3), seed=(0, 7)
    ),
    stop=ufm.FinalTime(1e3),
    saves=3,
)
REDUCED = SweepSpec(
    grid=Grid(
        num_classes=(4, 8),
        per_class=(1,),
        width=(1,),
        depth=(1, 2.5),
        scale=(1e-2,),
        seed=(0, 1, 2),
    ),
    family=UniformModesFamily(),
    stop=ufm.FinalTime(1e3),
    saves=3,
)


@pytest.fixture(scope="module")
def full_sweep(tmp_path_factory):
    path = tmp_path_factory.mktemp("full") / "sweep.zarr"
    finished = []
    failures = run_sweep(
        FULL,
        SweepStore.create(path, FULL),
        progress=lambda cell, members: finished.append((cell.index, members)),
    )
    assert failures == []
    return open_sweep(path).load(), finished


@pytest.fixture(scope="module")
def reduced_sweep(tmp_path_factory):
    path = tmp_path_factory.mktemp("reduced") / "sweep.zarr"
    assert run_sweep(REDUCED, SweepStore.create(path, REDUCED)) == []
    return open_sweep(path).load()


def test_padded_members_equal_single_unpadded_solves(full_sweep):
    dataset, _ = full_sweep
    flow = ufm.GradientFlow(ufm.CrossEntropy(), per_class=2)
    for seed in (0, 7):
        model = ufm.gaussian(
            jax.random.key(seed), num_classes=3, per_class=2, width=3, depth=1
        )
        path = ufm.solve(
            flow, model, stop=ufm.FinalTime(1e3), saves=3, observe=ufm.metrics
        )
        member = dataset.sel(width=3, depth=1, seed=seed).squeeze()
        for name in ("effective_rank", "log_loss", "logit_margin", "log_norm"):
            # Step sequences agree up to rounding in norms, so states agree to rtol.
            np.testing.assert_allclose(
                member[name], path.observables[name], rtol=2e-7, err_msg=name
            )
            np.testing.assert_allclose(
                member[f"final_{name}"], path.final_observables[name], rtol=2e-7
            )


def test_reduced_members_equal_single_solves(reduced_sweep):
    a = np.asarray(jax.random.uniform(jax.random.key(1), (7,)))
    flow = ufm.HadamardFlow(8, 2.5)
    start = jnp.log(a * 1e-2 / a.sum())
    path = ufm.solve(flow, start, stop=ufm.FinalTime(1e3), saves=3, observe=ufm.metrics)
    member = reduced_sweep.sel(num_classes=8, depth=2.5, seed=1).squeeze()
    np.testing.assert_allclose(
        member.final_singular_values, jnp.exp(path.final), rtol=1e-10
    )


def test_singular_values_of_fewer_classes_are_padded_with_nan(reduced_sweep):
    values = reduced_sweep.final_singular_values.sel(num_classes=4).values
    assert values.shape[-1] == 7
    assert np.isfinite(values[..., :3]).all()
    assert np.isnan(values[..., 3:]).all()


def test_states_are_kept_for_limits(full_sweep, reduced_sweep):
    kept = reduced_sweep.final_log_modes
    assert kept.dims[-1] == "mode"
    np.testing.assert_allclose(
        np.exp(kept), reduced_sweep.final_singular_values, rtol=1e-14
    )
    dataset, _ = full_sweep
    means = dataset.final_class_means
    assert means.dims[-2:] == ("logit", "class")
    # The members' metrics come from their own logits, padding and all.
    values = np.linalg.svd(means.values, compute_uv=False)
    share = values / values.sum(axis=-1, keepdims=True)
    entropy = -np.sum(share * np.log(np.maximum(share, 1e-300)), axis=-1)
    np.testing.assert_allclose(
        np.exp(entropy), dataset.final_mean_effective_rank, rtol=1e-10
    )


def test_limits_of_a_sweep(reduced_sweep):
    damaged = reduced_sweep.copy(deep=True)
    damaged.outcome[{"num_classes": 1, "depth": 0, "seed": 2}] = 2
    counts = []
    limits = sweep_limits(damaged, progress=counts.append)
    assert sum(counts) == 11
    names = limits.structure.attrs["flag_names"]
    one = limits.sel(num_classes=8, depth=1).squeeze()
    assert [STATUSES[code] for code in one.status.values] == [
        "certified", "certified", "none",
    ]  # fmt: skip
    assert names[int(one.structure[0])] == "simplex ETF"
    assert np.isnan(one.direction[2]).all()
    four = limits.direction.sel(num_classes=4).values
    np.testing.assert_allclose(np.nansum(four, axis=-1), 1, rtol=1e-12)
    assert np.isnan(four[..., 3:]).all()
    table = summarise_limits(limits)
    assert table.members.sum() == 12
    assert set(table.status) == {"certified", "none"}


def test_members_that_never_got_there_have_none(reduced_sweep):
    failed = reduced_sweep.assign(outcome=xr.full_like(reduced_sweep.outcome, 2))
    limits = sweep_limits(failed)
    assert (limits.status == STATUSES.index("none")).all()
    assert np.isnan(limits.objective).all()
    assert list(summarise_limits(limits).status.unique()) == ["none"]
    infinite = reduced_sweep.assign_coords(depth=[1.0, np.inf])
    status = sweep_limits(infinite).status.squeeze()
    assert (status.sel(depth=np.inf) == STATUSES.index("none")).all()
    assert (status.sel(depth=1) == STATUSES.index("certified")).all()


@pytest.mark.usefixtures("unhooked")
def test_a_sweep_without_states_has_no_limits(reduced_sweep):
    nothing = reduced_sweep.assign(outcome=xr.zeros_like(reduced_sweep.outcome))
    with pytest.raises(ValueError, match="No member of this sweep is done yet"):
        sweep_limits(nothing)
    with pytest.raises(ValueError, match="keeps no states"):
        sweep_limits(reduced_sweep.drop_vars("final_log_modes"))


def test_every_member_reached_and_was_reported(full_sweep):
    dataset, finished = full_sweep
    assert (dataset.outcome == OUTCOMES.index("reached")).all()
    assert sorted(index for index, _ in finished) == sorted(
        cell.index for cell in FULL.grid.cells()
    )
    assert {members for _, members in finished} == {2}
    np.testing.assert_allclose(dataset.final_log_time, np.log(1e3), rtol=1e-12)


def test_store_is_self_describing(full_sweep):
    dataset, _ = full_sweep
    assert dataset.final_effective_rank.dims == (*AXES, "seed")
    assert dataset.kl.dims == (*AXES, "seed", "save")
    assert dataset.singular_values.dims == (*AXES, "seed", "save", "mode")
    assert dataset.outcome.attrs["flag_meanings"].split() == list(OUTCOMES)
    assert "FinalTime" in dataset.attrs["spec"]
    assert "6.907755" in dataset.attrs["spec"]  # log 1e3: values, not just shapes


def test_summary_matches_numpy(full_sweep):
    dataset, _ = full_sweep
    table = summarise(dataset)
    assert list(table.columns[:2]) == ["width", "depth"]
    row = table[(table.width == 5) & (table.depth == 3)].iloc[0]
    ranks = dataset.final_effective_rank.sel(width=5, depth=3).values.ravel()
    assert row["effective rank"] == pytest.approx(ranks.mean(), rel=1e-13)
    assert row["sd"] == pytest.approx(ranks.std(ddof=1), rel=1e-10)
    assert row["outcomes"] == "2 reached"


def test_a_pickled_spec_gives_the_same_numbers():
    batch = batches(REDUCED)[0]
    sent = pickle.loads(pickle.dumps((REDUCED, batch)))
    first, second = run_batch(REDUCED, batch), run_batch(*sent)
    assert list(first) == list(second) == list(batch.cells)
    for cell in first:
        assert all(
            np.array_equal(first[cell][name], second[cell][name], equal_nan=True)
            for name in first[cell]
        )


@dataclass(frozen=True)
class _BreaksAtDepthTwo(UniformModesFamily):
    def member(self, shape, key, depth, width, scale):
        flow, start = super().member(shape, key, depth, width, scale)
        return flow, jnp.where(depth == 2, jnp.nan, start)


@dataclass(frozen=True)
class _RaisesAtEightClasses(UniformModesFamily):
    def member(self, shape, key, depth, width, scale):
        if shape.num_classes == 8 and isinstance(depth, Tracer):
            raise RuntimeError("out of memory, say\nand a second line")
        return super().member(shape, key, depth, width, scale)

    def check(self, num_classes, width, depth):
        pass


def test_a_member_that_turns_nan_is_stored_as_such(tmp_path):
    spec = SweepSpec(
        grid=Grid((4,), (1,), (1,), (1, 2), (1e-2,), (0, 1)),
        family=_BreaksAtDepthTwo(),
        stop=ufm.FinalTime(1e3),
        saves=3,
    )
    store = SweepStore.create(tmp_path / "s.zarr", spec)
    assert run_sweep(spec, store) == []
    dataset = open_sweep(tmp_path / "s.zarr").load()
    assert (dataset.outcome.sel(depth=2) == OUTCOMES.index("non_finite")).all()
    assert (dataset.outcome.sel(depth=1) == OUTCOMES.index("reached")).all()
    table = summarise(dataset).set_index("depth")
    assert table.outcomes[2] == "2 non_finite"
    assert np.isnan(table["effective rank"][2])


def test_a_cell_that_raises_keeps_the_others(tmp_path, monkeypatch):
    spec = SweepSpec(
        grid=Grid((4, 8), (1,), (1,), (1,), (1e-2,), (0,)),
        family=_RaisesAtEightClasses(),
        stop=ufm.FinalTime(1e3),
        saves=3,
    )
    monkeypatch.setattr("deepufm.sweep._run.check_spec", lambda _: None)
    store = SweepStore.create(tmp_path / "s.zarr", spec)
    with ThreadPoolExecutor(2) as executor:
        (failure,) = run_sweep(spec, store, executor=executor)
    assert failure.cell.num_classes == 8
    assert str(failure).endswith("out of memory, say")
    dataset = open_sweep(tmp_path / "s.zarr").load()
    assert dataset.outcome.values.ravel().tolist() == [1, OUTCOMES.index("missing")]
    assert np.isnan(dataset.final_kl.sel(num_classes=8)).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grid": Grid(width=(9, 100))}, "`width` must be at least num_classes = 10"),
        ({"grid": Grid(depth=(1.5,))}, "`depth` must be a whole number"),
        ({"family": UniformModesFamily()}, "`num_classes` must be a power of two"),
        ({"stop": ufm.FinalNorm(1e-3), "saves": ufm.SaveEvery(1.0, 9)}, "before the"),
        ({"stop": ufm.FinalNorm(1e3)}, "SaveEvery"),
        ({"rtol": 1e-30}, "`rtol` must lie between"),
        ({"max_steps": 0}, "`max_steps` must be at least 1"),
    ],
)
def test_a_spec_that_cannot_run_is_refused_before_compiling(
    changes, message, monkeypatch
):
    def no_compiling(*arguments):
        raise AssertionError(f"compiled {arguments}")

    monkeypatch.setattr("deepufm.sweep._run._compile", no_compiling)
    options = {"grid": Grid(depth=(2,), seed=(0,)), **changes}
    with pytest.raises(ValueError, match=message):
        check_spec(SweepSpec(**options))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"depth": ()}, "`depth` must have at least one value"),
        ({"depth": (1, 1)}, "`depth` must name each value once"),
        ({"scale": (0.0,)}, "`scale` must be positive"),
        ({"scale": (float("nan"),)}, "`scale` must be positive"),
        ({"num_classes": (1,)}, "`num_classes` must be at least 2"),
        ({"seed": (-1,)}, "`seed` must be at least 0"),
    ],
)
def test_bad_grids_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Grid(**values)


def test_the_default_is_figure_2_of_the_paper():
    """P1 App. E.1: K = 10, n = 5, d = 100, five seeds; entries N(0, 1/d)."""
    spec = SweepSpec()
    grid = spec.grid
    assert (grid.values("num_classes"), grid.per_class, grid.values("width")) == (
        (10,),
        (5,),
        (100,),
    )
    assert grid.values("depth") == tuple(range(1, 11))
    assert len(grid.values("seed")) == 5
    assert grid.scale == (1.0,)
    assert spec.family == GaussianFamily(plain_std=False)
    assert eqx.tree_equal(spec.stop, ufm.FinalTime(1e8))
