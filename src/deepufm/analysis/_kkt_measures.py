"""How near parameters are to a Karush-Kuhn-Tucker point of the problem at infinity.

    min ‖θ‖²/2  subject to  s_ki = Z_yi - Z_ki >= 1 for every example i of class y and
    every other class k                                                     (P1 eq. 3)

A direction is judged at θ̂ = θ/s_min^{1/(L+1)}, whose least gap is 1: Z is homogeneous
of degree L+1, so that Σλ = ‖θ̂‖²/(L+1) at a KKT point. An (ε, δ)-KKT point (Lyu & Li
2019, App. C) has multipliers λ >= 0 with

    ‖θ̂ - Σ λ_ki ∇s_ki(θ̂)‖ <= ε  and  λ_ki (s_ki(θ̂) - 1) <= δ.

Here both are relative: ε in units of ‖θ̂‖, δ in units of ‖θ̂‖²/(L+1). Lyu & Li take the
multipliers that the loss itself has: in proportion to its residual, the softmax of the
wrong classes, and as long as θ̂, so that ε² = 2 (1 - cos) of the angle between θ and
-∇L. Those that fit best leave less, and do not ask how far the loss has come. Neither
falls all the way to the limit: both are small beside saddles, too.

The gradient of a gap in layer l is an outer product: of what flows back from its
logits, and of the layer's input from its example. Inner products of gradients are
therefore sums over layers of products of two inner products, and no Jacobian is formed.

NumPy and SciPy on the host, in double precision.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from ..dynamics import GradientFlow
from ..models import CrossEntropy, DeepUFM
from ._matrix_kkt import nonnegative_fit

# Eigenvalues of the normal matrix below this part of the largest are rounding.
_ROUNDING = 1e-14


@dataclass(frozen=True)
class DualFit:
    """Multipliers of the gaps, and what they leave over.

    - `duals`, (K, examples): λ at [k, i], zero at each example's own class.
    - `epsilon`: ‖θ̂ - Σ λ ∇s‖/‖θ̂‖.
    - `delta`: the largest λ (s - 1), over ‖θ̂‖²/(L+1).
    """

    duals: np.ndarray
    epsilon: float
    delta: float


@dataclass(frozen=True)
class ParameterKKT:
    """How nearly parameters are a KKT point of P1 eq. 3.

    - `norm`: ‖θ̂‖; to the power -(L+1) it is the normalised margin. Times it,
        `epsilon` is Lyu & Li's; times its square over L+1, so is `delta`.
    - `gaps`, (K, examples): s_ki(θ̂) at [k, i], least 1; zero at the own class.
    - `softmax`: the `DualFit` of Lyu & Li, by the loss's own residual.
    - `best`: that of least ε² + Σ (λ (s - 1))², in the relative units.
    """

    norm: float
    gaps: np.ndarray
    softmax: DualFit
    best: DualFit


def parameter_kkt(
    flow: GradientFlow, model: DeepUFM, *, most: int = 1000
) -> ParameterKKT:
    """Measures how nearly a state is a KKT point of the problem at infinity (P1 eq. 3).

    Works at any loss: weights are e^{-(s - s_min)}, so margins of 1e5 are fine. Weight
    decay, if there is any, is ignored. A dead singular value counts by its size in the
    layers: the rounding of Z, 1e-16, is 1e-4 in ε at L = 3. What the class means alone
    say, with the layers balanced, is `matrix_kkt(means, depth, tie=...).residual`,
    which is computed for any state that classifies every class, stationary or not.

    **Arguments:**

    - `flow`: of the cross-entropy, linear or with an activation; it knows the labels.
    - `model`: the state. At a kink of the activation the flow's own derivative is used.
    - `most`: with more gaps than this, examples·(K-1), no best fit is made, as its cost
        grows with their cube: its numbers are then NaN.

    **Returns:** a `ParameterKKT`; all NaN where an example is misclassified.

    **Raises:** `ValueError` for a flow of another loss, or a state that it refuses.

    Reference: Lyu & Li 2019, "Gradient descent maximizes the margin of homogeneous
    neural networks", App. C and, for several classes, App. G.
    """
    if not isinstance(flow.loss, CrossEntropy):
        raise ValueError(
            "The flow of `parameter_kkt` must descend a `CrossEntropy`, but descends a "
            f"{type(flow.loss).__name__}, whose parameters do not grow for ever."
        )
    flow.check(model)
    chain = _Chain.of(flow, model)
    least = np.min(chain.gaps)
    if not least > 0:
        nothing = np.full_like(chain.logits, np.nan)
        fit = DualFit(nothing, np.nan, np.nan)
        return ParameterKKT(np.nan, nothing, fit, fit)
    unit = _Chain.of(flow, model, least ** (-1 / chain.degree))
    # The softmax of the wrong classes, times e^least.
    total = 1 + np.sum(chain.spread(np.exp(-chain.gaps)), axis=0)
    weights = np.exp(least - chain.gaps) / total[chain.examples]
    size = np.sqrt(_square(unit.pulled(weights)))
    shares = weights / size * unit.degree / unit.norm
    best = unit.fit(_best_shares(unit) if len(weights) <= most else weights * np.nan)
    return ParameterKKT(unit.norm, unit.spread(unit.gaps), unit.fit(shares), best)


def _best_shares(unit: "_Chain") -> np.ndarray:
    """Returns the x >= 0 of least ‖θ̂/‖θ̂‖ - Σ x g‖² + Σ (x (s-1))².

    Here λ = x ‖θ̂‖²/(L+1), and g = ‖θ̂‖/(L+1) ∇s. By homogeneity <θ̂/‖θ̂‖, g> = s.
    """
    slack = unit.gaps - 1
    matrix = unit.gram() + np.diag(slack**2)
    values, vectors = np.linalg.eigh(matrix)
    kept = values > _ROUNDING * values[-1]
    roots = np.sqrt(values[kept])
    target = (vectors[:, kept].T @ unit.gaps) / roots
    return nonnegative_fit((vectors[:, kept] * roots).T, target)


@dataclass(frozen=True)
class _Chain:
    """The layers that move, first to last, and all gaps' gradients in factors.

    Gap c is `differences[c]`, e_y - e_k, times column `examples[c]` of the logits. Its
    gradient in layer l is the outer product of `back[l][c]` with that column of
    `inputs[l]`, where the features' input are the unit vectors (and not stored).
    """

    layers: list[np.ndarray]
    inputs: list[np.ndarray]
    back: list[np.ndarray]
    logits: np.ndarray
    rivals: np.ndarray
    examples: np.ndarray
    differences: np.ndarray

    @classmethod
    def of(cls, flow: GradientFlow, model: DeepUFM, scale: float = 1.0) -> "_Chain":
        """Runs a model, all of its layers times `scale`, forwards and backwards."""
        moving = round(float(flow.true_depth(model))) - 1
        head = scale * np.asarray(model.head, float)
        features = scale * np.asarray(model.features, float)
        # Those after are padding, identities for good.
        hidden = list(scale * np.asarray(model.hidden, float)[:moving])
        inputs, gates = _forward(hidden, features, flow.activation)
        labels = np.asarray(flow.labels(model))
        wrong = np.arange(len(head))[:, None] != labels
        rivals, examples = np.nonzero(wrong)
        pairs = np.arange(len(rivals))
        differences = np.zeros((len(rivals), len(head)))
        differences[pairs, labels[examples]] = 1
        differences[pairs, rivals] = -1
        back = [differences]
        flowing = differences @ head
        for layer, gate in zip(hidden[::-1], gates[::-1], strict=True):
            flowing = flowing * gate.T[examples]
            back.append(flowing)
            flowing = flowing @ layer
        return cls(
            [features, *hidden, head],
            inputs,
            [flowing, *back[::-1]],
            head @ inputs[-1],
            rivals,
            examples,
            differences,
        )

    @property
    def degree(self) -> int:
        """L+1, the number of matrices."""
        return len(self.layers)

    @property
    def norm(self) -> float:
        """‖θ‖ over all matrices."""
        return float(np.sqrt(_square(self.layers)))

    @property
    def gaps(self) -> np.ndarray:
        """s, one a constraint."""
        return np.sum(self.differences * self.logits.T[self.examples], axis=1)

    def spread(self, values: np.ndarray) -> np.ndarray:
        """Returns values of constraints where their logits stand, (K, examples)."""
        matrix = np.zeros_like(self.logits)
        matrix[self.rivals, self.examples] = values
        return matrix

    def gram(self) -> np.ndarray:
        """Returns all <g, g'>, g = ‖θ‖/(L+1) ∇s."""
        i = self.examples
        total = (self.back[0] @ self.back[0].T) * (i[:, None] == i)
        for back, inputs in zip(self.back[1:], self.inputs, strict=True):
            total += (back @ back.T) * (inputs.T @ inputs)[np.ix_(i, i)]
        return total * (self.norm / self.degree) ** 2

    def pulled(self, weights: np.ndarray) -> list[np.ndarray]:
        """Returns Σ weight ∇s, one block a layer."""
        blocks = [
            (back * weights[:, None]).T @ inputs.T[self.examples]
            for back, inputs in zip(self.back[1:], self.inputs, strict=True)
        ]
        features = np.zeros_like(self.layers[0])
        np.add.at(features.T, self.examples, self.back[0] * weights[:, None])
        return [features, *blocks]

    def misfit(self, shares: np.ndarray) -> list[np.ndarray]:
        """Returns θ/‖θ‖ - Σ x g."""
        pulled = self.pulled(shares * self.norm / self.degree)
        return [
            layer / self.norm - block
            for layer, block in zip(self.layers, pulled, strict=True)
        ]

    def fit(self, shares: np.ndarray) -> DualFit:
        """Returns what multipliers λ = x ‖θ‖²/(L+1) leave over."""
        return DualFit(
            self.spread(shares * self.norm**2 / self.degree),
            float(np.sqrt(_square(self.misfit(shares)))),
            float(np.max(shares * (self.gaps - 1))),
        )


def _forward(hidden, features, activation):
    """Returns the input of every layer after the features, and the hidden gates."""
    inputs, gates = [features], []
    for layer in hidden:
        column = layer @ inputs[-1]
        gate = np.ones_like(column)
        if activation is not None:
            gate = np.asarray(activation.gate(jnp.asarray(column)), float)
        gates.append(gate)
        inputs.append(gate * column)
    return inputs, gates


def _square(blocks: list[np.ndarray]) -> float:
    return sum(float(np.sum(block**2)) for block in blocks)
