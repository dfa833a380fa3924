"""The deep unconstrained features model, its losses and its initial states."""

from ._deep_ufm import DeepUFM as DeepUFM
from ._initialise import (
    balanced as balanced,
    check_modes as check_modes,
    gaussian as gaussian,
    hadamard as hadamard,
)
from ._losses import (
    AbstractLoss as AbstractLoss,
    CrossEntropy as CrossEntropy,
    log_softplus as log_softplus,
)
