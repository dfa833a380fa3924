"""deepufm: gradient-flow dynamics of the deep unconstrained features model.

!!! example
    import deepufm as ufm
    flow = ufm.HadamardFlow(num_classes=16, depth=2)
    path = ufm.solve(flow, jnp.log(a0), stop=ufm.FinalTime(1e10))

Double precision is the user's choice, as everywhere in JAX:
`jax.config.update("jax_enable_x64", True)` before the first array, or
`JAX_ENABLE_X64=1` in the environment. The command line sets it for itself.
"""

from .analysis import (
    Balancedness as Balancedness,
    alignment as alignment,
    balancedness_defects as balancedness_defects,
    balancedness_matrices as balancedness_matrices,
    class_means as class_means,
    effective_rank as effective_rank,
    effective_rank_from_log as effective_rank_from_log,
    etf_distance as etf_distance,
    etf_distance_from_log as etf_distance_from_log,
    hadamard_bases as hadamard_bases,
    kl_from_uniform as kl_from_uniform,
    log_ratio as log_ratio,
    logit_margin as logit_margin,
    logit_margin_from_log as logit_margin_from_log,
    margins as margins,
    metrics as metrics,
    normalised_modes as normalised_modes,
    nuclear_norm as nuclear_norm,
    numerical_rank as numerical_rank,
    off_diagonal_energy as off_diagonal_energy,
    parameter_margin as parameter_margin,
    residual_energy as residual_energy,
    reverse_kl_from_uniform as reverse_kl_from_uniform,
    singular_values as singular_values,
    smoothed_parameter_margin as smoothed_parameter_margin,
    uniform_distance as uniform_distance,
)
from .dynamics import (
    AbstractClock as AbstractClock,
    AbstractFlow as AbstractFlow,
    AbstractStop as AbstractStop,
    ArcLength as ArcLength,
    FinalNorm as FinalNorm,
    FinalTime as FinalTime,
    GradientFlow as GradientFlow,
    HadamardFlow as HadamardFlow,
    LayerwiseHadamardFlow as LayerwiseHadamardFlow,
    LayerwiseMSEFlow as LayerwiseMSEFlow,
    LogitFlow as LogitFlow,
    LogitMatrixFlow as LogitMatrixFlow,
    LogLossBelow as LogLossBelow,
    LogNorm as LogNorm,
    LogTime as LogTime,
    Motion as Motion,
    Outcome as Outcome,
    Path as Path,
    PhysicalTime as PhysicalTime,
    PiecewiseConstant as PiecewiseConstant,
    SaveEvery as SaveEvery,
    ScaleMap as ScaleMap,
    SigmoidalFlow as SigmoidalFlow,
    SolveStats as SolveStats,
    default_solver as default_solver,
    layer_modes as layer_modes,
    log_modes as log_modes,
    mse_targets as mse_targets,
    scale_map as scale_map,
    solve as solve,
)
from .geometry import (
    cross_polytope as cross_polytope,
    polygon_vectors as polygon_vectors,
    psi_matrix as psi_matrix,
    psi_matvec as psi_matvec,
    regular_polygon as regular_polygon,
    simplex_etf as simplex_etf,
    sylvester_hadamard as sylvester_hadamard,
)
from .models import (
    MSE as MSE,
    AbstractActivation as AbstractActivation,
    AbstractLoss as AbstractLoss,
    CrossEntropy as CrossEntropy,
    DeepUFM as DeepUFM,
    ReLU as ReLU,
    alternating_modes as alternating_modes,
    balanced as balanced,
    class_labels as class_labels,
    class_sizes as class_sizes,
    gaussian as gaussian,
    hadamard as hadamard,
    hadamard_layers as hadamard_layers,
    near_structure as near_structure,
    orthogonal as orthogonal,
    small_gaussian as small_gaussian,
    spectral_partner as spectral_partner,
)
