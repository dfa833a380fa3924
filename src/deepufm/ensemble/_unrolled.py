"""Explicit Runge-Kutta methods with their stages written out, for lanes.

diffrax scans over the stages of a tableau, and copies all of them at each. Written out,
each combination of stages is one pass over a state (part `ablation` of
benchmarks/bench_ensemble.py). The price is a copy of the vector field a stage in the
program, which only one as small as a reduced flow's can pay. For CPUs: what keeps XLA
from taking stages apart again is cheap there alone.
"""

from collections.abc import Callable
from typing import ClassVar

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree


class Unrolled(diffrax.AbstractSolver):
    """The explicit method of a diffrax solver; its interpolant is left behind.

    The solver's state is the velocity at the start of a step. Times are at least 0.

    **Arguments:** `solver`, one of diffrax's explicit solvers with one tableau.
    """

    solver: diffrax.AbstractERK
    term_structure: ClassVar = diffrax.AbstractTerm
    interpolation_cls: ClassVar[Callable] = diffrax.LocalLinearInterpolation

    def order(self, terms) -> int | None:
        """Returns the order of the method."""
        return self.solver.order(terms)

    def func(self, terms, t0, y0, args) -> PyTree[Array]:
        """Returns the velocity."""
        return terms.vf(t0, y0, args)

    def init(self, terms, t0, t1, y0, args) -> PyTree[Array]:
        """Returns the velocity at the start."""
        del t1
        return self.func(terms, t0, y0, args)

    def step(self, terms, t0, t1, y0, args, solver_state, made_jump):
        """Takes a step: the state after it, its error, none, the velocity, success."""
        del made_jump
        tableau = self.solver.tableau
        assert isinstance(tableau, diffrax.ButcherTableau)
        stages = [solver_state]
        step = t1 - t0

        # True (of NaN as well), but XLA cannot know: what a branch returns it must
        # store. It would fuse a stage into all that use it, and take its exponentials
        # again in each.
        begun = ~jnp.all(t0 < 0)

        def stored(function: Callable[[], PyTree[Array]]) -> PyTree[Array]:
            zeros = jax.tree.map(jnp.zeros_like, y0)
            return jax.lax.cond(begun, function, lambda: zeros)

        def velocity(t, y) -> PyTree[Array]:
            return stored(lambda: terms.vf(t, y, args))

        def after(weights) -> PyTree[Array]:
            change = _combined(weights, stages)
            return jax.tree.map(lambda y, k: y + step * k, y0, change)

        y1 = y0
        for weights, node in zip(tableau.a_lower, tableau.c):
            y1 = after(weights)
            stages.append(velocity(t0 + float(node) * step, y1))
        # The last stage may be the step itself, and its velocity the next one's first.
        if not tableau.ssal:
            y1 = after(tableau.b_sol)
        error = stored(
            lambda: jax.tree.map(lambda k: step * k, _combined(tableau.b_error, stages))
        )
        last = stages[-1] if tableau.fsal else velocity(t1, y1)
        return y1, error, {"y0": y0, "y1": y1}, last, diffrax.RESULTS.successful


def _combined(weights: np.ndarray, stages: list[PyTree[Array]]) -> PyTree[Array]:
    """Returns the sum of the stages so weighted."""
    used = [(float(w), k) for w, k in zip(weights, stages) if w != 0]

    def combine(*leaves):
        return sum(w * leaf for (w, _), leaf in zip(used, leaves))

    return jax.tree.map(combine, *(k for _, k in used))
