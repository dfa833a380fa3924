"""Which structures are stable, from what norm and depth on, and who goes there."""

from ._basin_fractions import (
    BasinFraction as BasinFraction,
    BasinFractions as BasinFractions,
    basin_fractions as basin_fractions,
    starts_needed as starts_needed,
)
from ._convergence import (
    ConvergencePace as ConvergencePace,
    ConvergenceTime as ConvergenceTime,
    FiniteTimeBasin as FiniteTimeBasin,
    convergence_pace as convergence_pace,
    convergence_time as convergence_time,
    finite_time_basin as finite_time_basin,
    return_time as return_time,
)
from ._counterexamples import (
    CounterexampleSearch as CounterexampleSearch,
    find_counterexample as find_counterexample,
)
from ._destinations import (
    Destination as Destination,
    destinations as destinations,
)
from ._edges import (
    Bracket as Bracket,
    EdgeState as EdgeState,
    EdgeStatus as EdgeStatus,
    boundary_bracket as boundary_bracket,
    edge_state as edge_state,
)
from ._exponents import (
    StabilityExponents as StabilityExponents,
    stability_exponents as stability_exponents,
)
from ._gauge import (
    GaugeDirections as GaugeDirections,
    gauge_directions as gauge_directions,
)
from ._jacobian import (
    JacobianSpectrum as JacobianSpectrum,
    Stability as Stability,
    jacobian_spectrum as jacobian_spectrum,
    reactivity as reactivity,
)
from ._linearised import (
    LinearisedComparison as LinearisedComparison,
    LinearisedExit as LinearisedExit,
    compare_with_linearised as compare_with_linearised,
    linearised_exit as linearised_exit,
    ratio_growth as ratio_growth,
    rich_get_richer_exponent as rich_get_richer_exponent,
)
from ._lyapunov_exponents import (
    LyapunovExponents as LyapunovExponents,
    lyapunov_exponents as lyapunov_exponents,
)
from ._lyapunov_functions import (
    AbstractLyapunov as AbstractLyapunov,
    ETFDistance as ETFDistance,
    KLDivergence as KLDivergence,
    LogLoss as LogLoss,
    LogRatio as LogRatio,
    ReverseKLDivergence as ReverseKLDivergence,
    SmoothedMargin as SmoothedMargin,
    UniformDistance as UniformDistance,
    theorem as theorem,
)
from ._monotonicity import (
    Monotonicity as Monotonicity,
    collapse_basin_bound as collapse_basin_bound,
    log_ratio_threshold as log_ratio_threshold,
    monotone_along as monotone_along,
    ratio_threshold as ratio_threshold,
)
from ._random_starts import (
    LogitNormAbove as LogitNormAbove,
    grown_alignment as grown_alignment,
    initial_alignment as initial_alignment,
    logit_velocity as logit_velocity,
    zeroth_order_alignment as zeroth_order_alignment,
)
from ._rays import (
    RayStructure as RayStructure,
    is_ray_invariant as is_ray_invariant,
    ray_invariant_structures as ray_invariant_structures,
    ray_support as ray_support,
    structure_modes as structure_modes,
)
from ._separation import (
    NormPath as NormPath,
    Separation as Separation,
    norm_growth as norm_growth,
    norm_path as norm_path,
    separation_stop as separation_stop,
    separation_time as separation_time,
)
from ._shock import (
    CriticalShock as CriticalShock,
    ShockStatus as ShockStatus,
    critical_shock as critical_shock,
    structure_directions as structure_directions,
)
from ._spectral_prediction import (
    SpectralPrediction as SpectralPrediction,
    spectral_prediction as spectral_prediction,
)
from ._stability_diagram import (
    StabilityDiagram as StabilityDiagram,
    stability_diagram as stability_diagram,
)
from ._starts import (
    mode_starts as mode_starts,
    model_starts as model_starts,
)
from ._stretching import (
    Stretching as Stretching,
    finite_time_stretching as finite_time_stretching,
)
from ._thresholds import (
    critical_depth as critical_depth,
    stability_threshold as stability_threshold,
    stability_windows as stability_windows,
)
from ._width_study import (
    PowerLaw as PowerLaw,
    WidthStudy as WidthStudy,
    fitted_power_law as fitted_power_law,
)
