"""Array aliases shared by every module, and the table of symbols.

| paper        | here          | meaning                                               |
|--------------|---------------|-------------------------------------------------------|
| K            | `num_classes` | classes                                               |
| n            | `per_class`   | examples of each class                                |
| d            | `width`       | embedding dimension of every layer                    |
| L            | `depth`       | linear layers after the features, W_1 ... W_L         |
| W_L          | `head`        | last layer, (K, d)                                    |
| W_{L-1}..W_1 | `hidden`      | (L-1, d, d), `hidden[l-1]` is W_l                     |
| H_1          | `features`    | free features, (d, nK); classes in order, n each      |
| Z            | `logits`      | W_L ... W_1 H_1, (K, nK); column k is one example     |
| P, Y         | -             | softmax of Z by column; one-hot labels                |
| a            | `a`, `modes`  | the K-1 logit singular values of the reduced flow     |
| u            | `log_a`       | log a, the state of the reduced flow                  |
| a-hat        | -             | a / sum(a)                                            |
| Phi, U       | -             | Sylvester-Hadamard matrix; Phi / sqrt(K)              |
| Psi          | -             | core of 1 1^T - Phi, entries 0 and 2, (K-1, K-1)      |
| m            | `margins`     | Psi a; for n = 1 all logit gaps of every example      |
| b, D         | -             | Psi exp(-m); 1 + sum exp(-m)                          |
| p            | `power`       | (L-1)/(L+1), so that d log a/dt = (b/D) a^p           |
| t            | `log_time`    | the flow's own time, as a natural logarithm           |
| s            | `reading`     | what the clock shows; t = t(s)                        |

All logarithms are natural. P1 is "The Implicit Bias of Depth: From Neural Collapse to
Softmax Codes" (arXiv:2605.23087); P2 is Garrod, Keating & Thrampoulidis, "Diagonalizing
the Softmax: Hadamard Initialization for Tractable Cross-Entropy Dynamics".
"""

from typing import Any, TypeAlias

import jax
import numpy as np
from jax.core import Tracer as Tracer
from jaxtyping import Array, Bool, Float, Int, PyTree

RealScalar: TypeAlias = Float[Array, ""]
# What users may pass for a real number.
RealLike: TypeAlias = (
    float | int | np.floating | np.integer | Float[Array, ""] | Int[Array, ""]
)
BoolScalar: TypeAlias = Bool[Array, ""]
IntScalar: TypeAlias = Int[Array, ""]
Modes: TypeAlias = Float[Array, " modes"]
# For what is written once for one member and for many, members last.
ModeLanes: TypeAlias = Float[Array, "modes *lanes"]
Lanes: TypeAlias = Float[Array, "*lanes"]
LaneRow: TypeAlias = Float[Array, "1 *lanes"]
Logits: TypeAlias = Float[Array, "classes examples"]
SquareMatrix: TypeAlias = Float[Array, "classes classes"]
Labels: TypeAlias = Int[Array, " examples"]
State: TypeAlias = PyTree[Float[Array, "..."]]
PRNGKey: TypeAlias = jax.Array
Device: TypeAlias = Any  # a jax.Device, which type checkers take for a variable
