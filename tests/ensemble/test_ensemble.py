"""Rows of `ensemble` equal single solves by value, whatever the strategy."""

import functools
import importlib
import math
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from independent import reduced_to_time

import deepufm as ufm
from deepufm import Outcome
from deepufm.ensemble import Members, Strategy, compiled, ensemble, make_share
from deepufm.ensemble._ensemble import _in_batches

# Two shares of 4 and 3, in two lanes each: every lane takes on another member.
LANES = 2
DEPTHS = [1.0, 2.0, 3.0, 1.5, math.inf, 8.0, 2.0]
OPTIONS: dict[str, Any] = dict(stop=ufm.FinalTime(1e6), solver=diffrax.Tsit5())


def flow_of(depth):
    return ufm.HadamardFlow(num_classes=4, depth=depth)


def starts():
    """Norm 1e-2, where the orbits differ most by depth; a zero mode in member 2."""
    a = np.random.default_rng(0).uniform(size=(len(DEPTHS), 3))
    a[2, 1] = 0
    return jax.vmap(ufm.log_modes)(jnp.asarray(1e-2 * a / a.sum(axis=1, keepdims=True)))


def row_of(path, i):
    return jax.tree.map(lambda leaf: leaf[i], path)


run = functools.partial(ensemble, flow_of, jnp.asarray(DEPTHS))


@pytest.fixture(scope="module")
def path():
    return run(starts(), saves=5, observe=ufm.metrics, lanes=LANES, **OPTIONS)


@pytest.fixture(scope="module")
def solved():
    return [
        ufm.solve(flow_of(depth), start, saves=5, observe=ufm.metrics, **OPTIONS)
        for depth, start in zip(DEPTHS, starts())
    ]


members = pytest.mark.parametrize("i", range(len(DEPTHS)))


@members
def test_a_row_is_the_solve_of_its_member(path, solved, i):
    got, want = row_of(path, i), solved[i]
    assert got.outcome == want.outcome == Outcome.reached
    assert got.num_saved == want.num_saved == 5
    assert_close = functools.partial(np.testing.assert_allclose, atol=1e-9)
    assert_close(got.state, want.state)
    assert_close(got.final, want.final)
    for name in ("reading", "log_time", "final_reading", "final_log_time"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=1e-14)
    assert abs(got.stats.num_steps - want.stats.num_steps) <= 2
    assert got.stats.num_steps == got.stats.num_accepted + got.stats.num_rejected


@members
def test_metrics_of_a_row_are_those_of_its_solve(path, solved, i):
    for name in ("observables", "final_observables"):
        got, want = getattr(row_of(path, i), name), getattr(solved[i], name)
        assert got.keys() == want.keys()
        for key in want:
            np.testing.assert_allclose(
                got[key], want[key], rtol=1e-8, atol=1e-9, err_msg=key
            )


def test_paths_are_printed_by_how_many_ended_how(path):
    steps = path.stats.num_steps
    assert str(path) == (
        f"7 paths: 7 reached; {np.mean(steps):.6g} steps on average, {np.max(steps)} "
        "at most"
    )


def test_rows_are_the_orbits_of_another_integrator(path):
    for i in (0, 2, 4):
        want = reduced_to_time(starts()[i], DEPTHS[i], path.log_time[i, 1:])
        np.testing.assert_allclose(path.state[i, 1:], want, atol=2e-7)
        np.testing.assert_array_equal(path.state[i, 0], starts()[i])


@pytest.mark.parametrize("strategy", [Strategy.VMAP, Strategy.MAP])
def test_strategies_agree_by_value(path, strategy):
    got = run(starts(), strategy=strategy, **OPTIONS)
    assert np.all(np.asarray(got.outcome == Outcome.reached))
    # Without saves to land on steps differ, and their errors.
    np.testing.assert_allclose(got.final, path.final, atol=2e-7)
    np.testing.assert_allclose(got.final_log_time, path.final_log_time, rtol=1e-14)
    assert got.state is None
    assert got.reading.shape == (len(DEPTHS), 0)
    # What compiles before the threads start integrates nothing.
    half = Members(jax.vmap(flow_of)(jnp.asarray(DEPTHS[:4])), starts()[:4])
    share = compiled(make_share(half, strategy=strategy, **OPTIONS), "cpu")
    none, _ = share(half, jnp.asarray(0))
    np.testing.assert_array_equal(none.stats.num_steps, 0)


def test_derivatives_by_the_start_pass_through_lanes():
    """Forward mode, under `jit`: one share, whatever the number of cores."""
    point, tangent = starts()[1:2], jnp.asarray([[0.3, -1.0, 0.5]])
    time, step = 20.0, 1e-4

    @jax.jit
    def derivative(start):
        def final(y0):
            path = ensemble(
                flow_of(DEPTHS[1]), None, y0, stop=ufm.FinalTime(time), lanes=1,
                solver=diffrax.Tsit5(),
            )  # fmt: skip
            return path.final

        return jax.jvp(final, (start,), (tangent,))

    value, slope = derivative(point)
    ahead, behind = (
        reduced_to_time((point + sign * step * tangent)[0], DEPTHS[1], np.log(time))
        for sign in (1, -1)
    )
    np.testing.assert_allclose(value, (ahead + behind) / 2, atol=1e-6)
    np.testing.assert_allclose(slope, (ahead - behind) / (2 * step), atol=1e-6)
    assert np.abs(slope).min() > 0.1


def test_derivative_by_the_time_is_the_velocity():
    """The stop alone is traced: no thread may see it."""
    flow, start = flow_of(DEPTHS[1]), starts()[1:2].repeat(2, axis=0)

    def final(log_time):
        stop = ufm.FinalTime(log=log_time)
        return ensemble(flow, None, start, stop=stop, solver=diffrax.Bosh3()).final

    log_time = jnp.log(20.0)
    value, slope = jax.jvp(final, (log_time,), (jnp.ones(()),))
    want = jax.vmap(lambda log_a: flow.velocity(log_a, log_time))(value)
    np.testing.assert_allclose(slope, want, rtol=1e-5)


@pytest.mark.parametrize(
    ("x64", "dtype"), [(False, "float32"), (True, "float32"), (True, "float64")]
)
def test_the_precision_of_a_with_block_holds_in_threads(path, x64, dtype, request):
    """Threads start with the global setting, which is another here."""
    request.addfinalizer(lambda: jax.config.update("jax_enable_x64", True))
    log_a = np.asarray(starts(), dtype)
    jax.config.update("jax_enable_x64", not x64)
    with jax.enable_x64(x64):
        got = ensemble(
            flow_of, jnp.asarray(np.asarray(DEPTHS, dtype)), jnp.asarray(log_a),
            lanes=LANES, stop=ufm.FinalTime(1e6), solver=diffrax.Bosh3(), rtol=1e-5,
        )  # fmt: skip
        assert got.final.dtype == got.final_log_time.dtype == dtype
        reached = np.asarray(got.outcome == Outcome.reached)
        final = np.asarray(got.final)
    assert np.all(reached)
    np.testing.assert_allclose(final, path.final, atol=3e-3)


def test_derivatives_past_an_event_are_refused():
    """The time of the event depends on the start; steps alone do not see that."""

    def final(y0):
        return ensemble(flow_of(2.0), None, y0, stop=ufm.FinalNorm(5.0), lanes=1).final

    start = starts()[:1]
    with pytest.raises(RuntimeError, match=r"no derivatives in lanes.*Strategy\.VMAP"):
        jax.jvp(final, (start,), (jnp.ones_like(start),))


def test_an_empty_list_of_devices_is_refused():
    with pytest.raises(ValueError, match="must name a device"):
        run(starts(), devices=[], **OPTIONS)


FEW = jnp.ones((3, 3))
BAD = {
    "numbers of members that differ": (
        flow_of, jnp.ones(2), FEW, {}, r"lead with one axis.*\(2,\), \(3, 3\)",
    ),
    "no members": (flow_of, jnp.ones(0), jnp.ones((0, 3)), {}, "at least one"),
    "a number for params": (flow_of, 2.0, FEW, {}, "lead with one axis.*a number"),
    "params with one flow": (flow_of(2.0), jnp.ones(3), FEW, {}, "must be None"),
    "no flow": (lambda depth: 2 * depth, jnp.ones(3), FEW, {}, "must return a flow"),
    "no lanes": (flow_of(2.0), None, FEW, {"lanes": 0}, "at least 1, but is 0"),
    "half a lane": (flow_of(2.0), None, FEW, {"lanes": 7.5}, "`lanes` .*whole number"),
    "lanes without lanes": (
        flow_of(2.0), None, FEW, {"lanes": 2, "strategy": Strategy.VMAP}, "no lanes",
    ),
    "a strategy by name": (
        flow_of(2.0), None, FEW, {"strategy": "vmap"}, r"one of Strategy\.LANES.*vmap",
    ),
    "one depth below 1": (
        flow_of, jnp.asarray([1.0, 2.0, 0.5]), FEW, {},
        "Member 2 of 3: .*`depth` must be at least 1",
    ),
    "a start of wrong shape": (
        flow_of(2.0), None, jnp.ones((3, 4)), {}, r"must have shape \(3,\)",
    ),
    "saves of an unknown end": (
        flow_of(2.0), None, FEW, {"stop": ufm.FinalNorm(9.0), "saves": 200},
        "Give `saves=SaveEvery",
    ),
    "an implicit solver of many unknowns": (
        ufm.HadamardFlow(8192, 2.0), None, jnp.ones((1, 8191)),
        {"solver": diffrax.Kvaerno3()}, "Use an explicit solver",
    ),
    "a budget of no step": (flow_of(2.0), None, FEW, {"max_steps": 0}, "`max_steps`"),
}  # fmt: skip


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused_before_compilation(case, monkeypatch):
    flow, params, y0, changes, message = BAD[case]
    # The name `deepufm.ensemble` is that of the function.
    module = importlib.import_module("deepufm.ensemble._ensemble")
    monkeypatch.setattr(module, "over_cores", None)
    with pytest.raises(ValueError, match=message):
        ensemble(flow, params, y0, **(OPTIONS | changes))


def test_rows_are_mapped_in_batches_with_empty_arrays_among_them():
    # Hidden layers at L = 1 are empty; `lax.map` in batches divides by zero there.
    rows = {"x": jnp.arange(7.0), "hidden": jnp.zeros((7, 0, 3, 3))}

    def double(row):
        return {"x": 2 * row["x"], "hidden": row["hidden"]}

    found = _in_batches(double, rows, 3)
    np.testing.assert_array_equal(found["x"], 2 * np.arange(7.0))
    assert found["hidden"].shape == (7, 0, 3, 3)
