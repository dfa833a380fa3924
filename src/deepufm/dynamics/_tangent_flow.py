"""A flow together with perturbations of its state, to first order.

    dy/dt = exp(c)·f,    dv/dt = exp(c)·(Df·v + f (∇c·v)),    c = log_speed,

for k vectors v at once. This is the variation at equal time. Growth and loss, and so
the pace of every clock, are those of y: a clock only says how far along the same orbit
a solve has got, and changes no v.

With `transverse` vectors are known up to multiples of f, and kept orthogonal to it:

    dv/dt = exp(c)·(Df·v - f (<Df·v, f> + <v, Df·f>)/<f, f>),    <v, f> = 0.

Whatever two nearby orbits are compared at (equal time, norm or clock reading), their
distance is v plus a multiple of f, which a projection along f at the end puts right:
the flow carries f into itself. In between a component along f would only grow over the
others and cost them digits. ∇c is not needed: speeds move nothing across the flow.
"""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from .._types import BoolScalar, RealScalar, State
from ..geometry import frobenius_norm
from ._flow import AbstractFlow, dead_level


class TangentState(eqx.Module):
    """A state and k perturbations of it, a leading axis k on every leaf."""

    state: State
    vectors: State

    def matrix(self) -> Float[Array, "vectors unknowns"]:
        """Returns the vectors, one a row."""
        return _rows(self.vectors)


class TangentFlow(AbstractFlow):
    """`flow` and k tangent vectors: state `TangentState`, built by `start`.

    The relative error is the larger of the flow's own and that of the vectors, each
    relative to its own length. Modes at zero (-inf of a logarithmic state) have no
    tangent: their entries of a vector never change.

    **Arguments:**

    - `flow`: any smooth flow.
    - `transverse`: whether vectors are kept orthogonal to the flow's direction, and
        mean perturbations up to multiples of it. Not for states at rest.

    **Raises:** `ValueError` for a flow with kinks, whose tangent jumps across them.

    !!! example
        tangent = TangentFlow(ufm.HadamardFlow(num_classes=8, depth=2))
        path = ufm.solve(tangent, tangent.start(log_a, jnp.eye(7)), stop=...)
    """

    flow: AbstractFlow
    transverse: bool = eqx.field(static=True)
    log_state: ClassVar[bool] = False  # `start` makes -inf finite
    # Not the flow's own: only `FinalNorm` asks, and then waits for it as an event.
    growth_is_exact: ClassVar[bool] = False
    is_smooth: ClassVar[bool] = True

    def __init__(self, flow: AbstractFlow, *, transverse: bool = False):
        if not flow.is_smooth:
            raise ValueError(
                f"`TangentFlow` needs a velocity with a derivative, but this "
                f"{type(flow).__name__} has kinks (ReLU), across which tangent vectors "
                "jump. Use a linear model."
            )
        self.flow = flow
        self.transverse = transverse

    @property
    def norm_diverges(self) -> bool:
        """Whether the norm of the flow itself does."""
        return self.flow.norm_diverges

    def start(self, state: State, vectors: State) -> TangentState:
        """Returns the state to integrate from: no -inf, vectors across the flow.

        **Arguments:** `vectors` of the structure of `state`, with a leading axis.
        """
        if self.flow.log_state:
            # The solver cannot interpolate infinities.
            level = dead_level(state.dtype)
            state = jnp.maximum(state, level)
        if not self.transverse:
            return TangentState(state, vectors)
        along, _ = self.flow(state)
        unit, size = _of_order_one(along)

        def across(vector):
            return _add(vector, -_dot(vector, unit) / size, unit)

        return TangentState(state, jax.vmap(across)(vectors))

    def __call__(self, state: TangentState) -> tuple[TangentState, RealScalar]:
        """Returns (d(y, v)/dt / exp(log_speed), log_speed)."""
        (along, log_speed), push = jax.linearize(self.flow, state.state)
        unit, size = _of_order_one(along)
        at_rest = jnp.isneginf(log_speed)
        # The derivative along the flow, at the pace of the unit.
        bend = push(unit)[0] if self.transverse else None

        def change(vector):
            turn, faster = push(vector)
            if bend is None:
                # At rest log_speed is -inf and has no derivative.
                return _add(turn, jnp.where(at_rest, 0, faster), along)
            # v·Df f/|f|² f does not depend on the size of f.
            pull = -(_dot(turn, unit) + _dot(vector, bend)) / size
            return _add(turn, pull, unit)

        return TangentState(along, jax.vmap(change)(state.vectors)), log_speed

    def log_norm(self, state: TangentState) -> RealScalar:
        """Returns the natural logarithm of the norm of y."""
        return self.flow.log_norm(state.state)

    def log_growth(self, state: TangentState, direction: TangentState) -> RealScalar:
        """Returns the flow's."""
        return self.flow.log_growth(state.state, direction.state)

    def log_length(self, state: TangentState, direction: TangentState) -> RealScalar:
        """Returns the flow's."""
        return self.flow.log_length(state.state, direction.state)

    def log_activity(self, state: TangentState, direction: TangentState) -> RealScalar:
        """Returns the flow's."""
        return self.flow.log_activity(state.state, direction.state)

    def log_loss(self, state: TangentState) -> RealScalar:
        """Returns the loss of y."""
        return self.flow.log_loss(state.state)

    def relative_error(
        self, error: TangentState, before: TangentState, after: TangentState
    ) -> RealScalar:
        """Returns the largest of y's error and of ‖error‖/‖v‖ over the vectors."""
        worst = self.flow.relative_error(error.state, before.state, after.state)
        errors, first, last = (
            frobenius_norm(tangent.matrix(), axis=1)
            for tangent in (error, before, after)
        )
        size = jnp.maximum(first, last)
        # Not `errors > 0`: a NaN must come out as one.
        still = errors == 0
        ratios = jnp.where(still, 0, errors / jnp.where(still, 1, size))
        return jnp.maximum(worst, jnp.max(ratios, initial=0))

    def crosses_kink(self, before: TangentState, after: TangentState) -> BoolScalar:
        """Returns no: there are none."""
        del before, after
        return jnp.asarray(False)

    def check(self, state: TangentState) -> None:
        """Checks y as the flow does, and that the vectors fit it."""
        if not isinstance(state, TangentState):
            raise ValueError(
                "The state of `TangentFlow` is what its `start(state, vectors)` "
                f"returns, but this is a {type(state).__name__}."
            )
        self.flow.check(state.state)
        wanted = [leaf.shape for leaf in jax.tree.leaves(state.state)]
        given = [leaf.shape for leaf in jax.tree.leaves(state.vectors)]
        counts = {shape[:1] for shape in given}
        if [shape[1:] for shape in given] != wanted or len(counts) != 1:
            raise ValueError(
                "Tangent vectors must have the shapes of the state, "
                f"{wanted}, with one leading axis more, but have {given}."
            )


def _rows(vectors: State) -> Float[Array, "vectors unknowns"]:
    return jax.vmap(lambda vector: ravel_pytree(vector)[0])(vectors)


def _of_order_one(along: State) -> tuple[State, RealScalar]:
    """Returns the direction over its largest entry, and its square; at rest 0 and 1."""
    largest = jnp.max(jnp.abs(ravel_pytree(along)[0]))
    unit = jax.tree.map(lambda x: x / jnp.where(largest > 0, largest, 1), along)
    size = _dot(unit, unit)
    return unit, jnp.where(largest > 0, size, 1)


def _dot(a: State, b: State) -> RealScalar:
    return jnp.dot(ravel_pytree(a)[0], ravel_pytree(b)[0])


def _add(a: State, factor: RealScalar, b: State) -> State:
    """Returns a + factor·b."""
    return jax.tree.map(lambda x, y: x + factor * y, a, b)
