"""The deep unconstrained features model, its losses and its initial states."""

from ._activations import AbstractActivation as AbstractActivation, ReLU as ReLU
from ._class_sizes import (
    ClassSizes as ClassSizes,
    checked_sizes as checked_sizes,
    class_labels as class_labels,
    class_sizes as class_sizes,
)
from ._deep_ufm import DeepUFM as DeepUFM, propagate as propagate
from ._losses import (
    MSE as MSE,
    AbstractLoss as AbstractLoss,
    CrossEntropy as CrossEntropy,
    log_softplus as log_softplus,
)
from ._random import (
    gaussian as gaussian,
    orthogonal as orthogonal,
    small_gaussian as small_gaussian,
)
from ._sizes import check_modes as check_modes
from ._spectral import (
    alternating_modes as alternating_modes,
    balanced as balanced,
    hadamard as hadamard,
    hadamard_layers as hadamard_layers,
    layer_modes as layer_modes,
    near_structure as near_structure,
    spectral_partner as spectral_partner,
)
from ._structures import Structure as Structure
