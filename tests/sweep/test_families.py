"""Families build the flows and starts they name; nothing is integrated here."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepufm as ufm
from deepufm.sweep import (
    GaussianFamily,
    Grid,
    LayerwiseFamily,
    LogitMatrixFamily,
    LogitModesFamily,
    MSEModesFamily,
    OrthogonalFamily,
    PartnerFamily,
    Shape,
    StructureFamily,
    SweepSpec,
    UniformModesFamily,
    check_spec,
)

FAMILIES = {
    "gaussian": GaussianFamily(activation=ufm.ReLU(), class_sizes=(3, 2, 2, 1)),
    "decayed": GaussianFamily(weight_decay=0.1, decay_until=3.0, loss=ufm.MSE()),
    "orthogonal": OrthogonalFamily(),
    "partner": PartnerFamily(),
    "structure": StructureFamily(
        structure=ufm.Structure.CROSS_POLYTOPE, perturbation=0.1
    ),
    "logits": LogitMatrixFamily(class_sizes=(3, 2, 2, 1)),
    "uniform": UniformModesFamily(0.5, 1.0),
    "linearised": UniformModesFamily(linearised=True),
    "mse modes": MSEModesFamily(),
    "layerwise": LayerwiseFamily(),
    "layerwise mse": LayerwiseFamily(squared_error=True),
    "logit modes": LogitModesFamily(),
}
KEY = jax.random.key(3)


def member(family, *, padded: int = 0, depth=2, width=5, scale=0.2):
    """Builds a member of K = 4, n = 2 in arrays that are `padded` too large."""
    sized = (*family.padded, *family.exact)
    shape = Shape(
        num_classes=4,
        per_class=2,
        width=width + padded if "width" in sized else 1,
        depth=depth + padded if "depth" in sized else 1,
    )
    build = eqx.filter_jit(functools.partial(family.member, shape))
    return build(KEY, jnp.asarray(float(depth)), jnp.asarray(float(width)), scale)


# Starts of the plain full flow, whose metrics are those of "decayed".
PLAIN = ("orthogonal", "partner", "structure")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_member_fits_its_flow_and_is_known_to_metrics(name):
    flow, start = member(FAMILIES[name])
    flow.check(start)
    if name in PLAIN:
        return
    observed = ufm.metrics(ufm_at_start(flow), jnp.asarray(-jnp.inf), start)
    assert all(bool(jnp.all(jnp.isfinite(v))) for v in observed.values())


def ufm_at_start(flow):
    return flow.at(jnp.asarray(-jnp.inf)) if hasattr(flow, "at") else flow


@pytest.mark.parametrize("name", FAMILIES)
def test_a_sweep_of_every_family_passes_the_check(name):
    """Shapes, stops and clocks fit each other, before anything is compiled."""
    family = FAMILIES[name]
    values = {"per_class": (2, 3), "width": (4, 6), "depth": (1, 2)}
    read = {axis: v for axis, v in values.items() if axis in family.axes}
    unread = {axis: (1,) for axis in values if axis not in family.axes}
    grid = Grid(num_classes=4, scale=(0.1, 1.0), seed=(0,), **read, **unread)
    check_spec(SweepSpec(grid=grid, family=family, stop=ufm.FinalTime(10.0)))


@pytest.mark.parametrize("name", ["layerwise"])
def test_padding_changes_no_member(name):
    """The vector field of the larger arrays is that of the smaller, and zero beyond."""
    (flow, start), (wide_flow, wide) = (
        member(FAMILIES[name], padded=p) for p in (0, 2)
    )
    assert float(wide_flow.log_loss(wide)) == pytest.approx(
        float(flow.log_loss(start)), rel=1e-13
    )
    speeds = [float(_log_velocity(f, y)) for f, y in [(flow, start), (wide_flow, wide)]]
    assert speeds[1] == pytest.approx(speeds[0], rel=1e-12)


@eqx.filter_jit
def _log_velocity(flow, state):
    direction, log_speed = flow(state)
    return log_speed + flow.log_norm(direction)


@pytest.mark.parametrize("name", ["uniform", "linearised", "mse modes"])
def test_the_scale_of_modes_is_the_sum_of_a(name):
    _, log_a = member(FAMILIES[name])
    assert float(jnp.sum(jnp.exp(log_a))) == pytest.approx(0.2, rel=1e-14)


@pytest.mark.parametrize(("name", "modes"), [("layerwise", 3), ("layerwise mse", 4)])
def test_the_scale_of_layers_is_the_sum_of_their_products(name, modes):
    flow, alpha = member(FAMILIES[name], padded=1, depth=3)
    assert alpha.shape == (5, modes)
    assert float(jnp.sum(flow.logit_modes(alpha))) == pytest.approx(0.2, rel=1e-14)
    assert np.all(np.asarray(alpha[3]) == 1)  # the padding, before the head
    moving = np.asarray(alpha)[[0, 1, 2, 4]]
    assert np.ptp(moving, axis=0).min() > 1e-3  # unbalanced


def test_a_structure_has_the_norm_that_the_scale_says():
    family = StructureFamily(structure=ufm.Structure.POLYGON, bottleneck=True)
    flow, model = member(family, width=2, scale=7.0)
    assert float(jnp.linalg.norm(flow.logits(model))) == pytest.approx(7.0, rel=1e-13)
    values = ufm.singular_values(flow.logits(model))
    assert ufm.numerical_rank(values, rtol=1e-10) == 2


def test_a_partner_has_the_singular_values_of_the_gaussian_start():
    _, partner = member(PartnerFamily())
    _, model = member(GaussianFamily())
    values = jnp.linalg.svd(model.logits(), compute_uv=False)[:3]
    kept = jnp.linalg.svd(partner.logits(), compute_uv=False)[:3]
    np.testing.assert_allclose(kept, values, rtol=1e-12)


def test_weight_decay_ends_when_the_family_says():
    flow, _ = member(FAMILIES["decayed"])
    rates = [float(flow.at(jnp.log(t)).weight_decay) for t in (1.0, 2.9, 3.1)]
    assert rates == [0.1, 0.1, 0.0]


def test_exact_families_get_a_shape_for_each_size_and_padded_ones_share_it():
    grid = Grid(num_classes=4, width=(4, 6), depth=(1, 3), seed=(0,))
    for family, count in [(PartnerFamily(), 4), (GaussianFamily(), 1)]:
        spec = SweepSpec(grid=grid, family=family)
        assert len({spec.shape_of(cell) for cell in grid.cells()}) == count


@pytest.mark.parametrize(
    ("family", "sizes", "message"),
    [
        (GaussianFamily(), (4, 3, 1), "bottleneck"),
        (GaussianFamily(), (4, 5, 1.5), "whole number"),
        (GaussianFamily(class_sizes=(2, 1)), (4, 5, 1), "one for each of the 4"),
        (GaussianFamily(decay_until=1.0), (4, 5, 1), "needs a `weight_decay`"),
        (PartnerFamily(), (6, 6, 1), "power of two"),
        (PartnerFamily(class_sizes=(3, 1, 1, 3)), (4, 4, 1), "classes of one size"),
        (StructureFamily(bottleneck=True), (6, 2, 1), "rank 2 at most"),
        (StructureFamily(activation=ufm.ReLU()), (4, 4, 1), "linear layers"),
        (LayerwiseFamily(), (6, 1, 1), "power of two"),
        (LayerwiseFamily(squared_error=True), (6, 1, 1.5), "whole number"),
        (MSEModesFamily(), (6, 1, 0.5), "at least 1"),
        (LogitMatrixFamily(class_sizes=(2, 1)), (4, 1, 1), "one for each of the 4"),
    ],
)
def test_sizes_that_no_member_has_are_refused(family, sizes, message):
    with pytest.raises(ValueError, match=message):
        family.check(*sizes)
