"""The papers' training rules: gradient descent, its step, and weight decay in phases.

Neither paper says whether its step is one on the sum of the loss over examples, as the
loss is written, or on the mean. Stability decides for P1's Fig. 3 (step 0.08, L = 10,
d = K, n = 5, entries N(0, 1/d)): descent is stable below 2/sharpness. The sum's is 27
at the start already for K = 4, and 142 for K = 10, against 2/0.08 = 25, and descent on
it overflows within 30 updates for K = 3 to 10. On the mean the limit is 25·nK; the same
runs pass it for a moment at most, recover, and settle at rank 2 for K = 4 to 10, as the
paper's do (at K = 3 the weight decay wins). So that step is one on the mean
(`benchmarks/bench_descent.py`). P2's
burn-in of under 1000 updates (step 0.01) is the sum's, 670 from its ε; the mean would
take four times as many.
"""

import itertools
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import optax

from ..models import AbstractActivation, AbstractLoss, ClassSizes, class_sizes
from ._gradient_flow import GradientFlow
from ._schedule import PiecewiseConstant
from ._stop import FinalTime


@dataclass(frozen=True)
class Training:
    """Full-batch gradient descent with a fixed step, and weight decay by phases.

    **Arguments:** `step_size` η; `epochs` updates of each phase; `weight_decay` λ of
    each phase, added to the gradient as λθ; `mean`: the gradient is that of the mean of
    the loss over examples, not of the sum.

    **Raises:** `ValueError` for a step that is not positive, or phases that do not
    match.

    !!! example
        rule = ufm.P1_FIGURE_3
        run = ufm.descend(
            model, loss, rule.optimiser(), rule.steps, per_class=5, mean=rule.mean
        )
        path = ufm.solve(rule.flow(loss, 10, 5), model, stop=rule.stop(10, 5))
    """

    step_size: float
    epochs: tuple[int, ...]
    weight_decay: tuple[float, ...]
    mean: bool = False

    def __post_init__(self):
        if not self.step_size > 0:
            raise ValueError(
                f"Argument `step_size` must be positive, but is {self.step_size}."
            )
        if not self.epochs or len(self.epochs) != len(self.weight_decay):
            raise ValueError(
                "`Training` needs one weight decay a phase, but has epochs "
                f"{self.epochs} and weight decays {self.weight_decay}."
            )
        if min(self.epochs) < 1 or min(self.weight_decay) < 0:
            raise ValueError(
                "Epochs must be at least 1 and weight decays at least 0, but are "
                f"{self.epochs} and {self.weight_decay}."
            )

    @property
    def steps(self) -> int:
        """The number of updates of all phases."""
        return sum(self.epochs)

    def optimiser(self) -> optax.GradientTransformation:
        """Returns the rule for `descend`."""
        if not any(self.weight_decay):
            return optax.sgd(self.step_size)
        switches = np.cumsum(self.epochs)[:-1]
        values = jnp.asarray(self.weight_decay, float)

        def decay(count):
            return values[jnp.sum(jnp.asarray(switches, count.dtype) <= count)]

        return optax.chain(optax.add_decayed_weights(decay), optax.sgd(self.step_size))

    def flow(
        self,
        loss: AbstractLoss,
        num_classes: int,
        per_class: ClassSizes,
        *,
        activation: AbstractActivation | None = None,
    ) -> GradientFlow:
        """Returns the gradient flow that this rule discretises, phases included.

        Flows descend the sum. A rule on the mean of N examples is one with a step of
        η/N and a weight decay of λN there.
        """
        examples = self._examples(num_classes, per_class)
        decays = [examples * decay for decay in self.weight_decay]
        decay: float | PiecewiseConstant = decays[0]
        if len(decays) > 1:
            ends = itertools.accumulate(self.epochs[:-1])
            step = self.step_size / examples
            decay = PiecewiseConstant(decays, [step * end for end in ends])
        return GradientFlow(loss, per_class, decay, activation=activation)

    def stop(self, num_classes: int, per_class: ClassSizes) -> FinalTime:
        """Returns the flow's time at the last update."""
        examples = self._examples(num_classes, per_class)
        return FinalTime(self.step_size / examples * self.steps)

    def _examples(self, num_classes: int, per_class: ClassSizes) -> int:
        return sum(class_sizes(num_classes, per_class)) if self.mean else 1


# P1 App. E.1, Fig. 3: L = 10 (left, middle) and L = 4 (right), d = K and wider, n = 5.
P1_FIGURE_3 = Training(0.08, (200_000, 100_000), (1e-3, 0.0), mean=True)
# P2 section 6, Fig. 2: K = d = 4, n = 1. The number of updates is not stated.
P2_FIGURE_2 = Training(0.01, (100_000,), (0.0,))
