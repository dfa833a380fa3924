"""What a state is: its spectrum, its distance to collapse, its margins."""

from ._atlas import (
    AtlasEntry as AtlasEntry,
    atlas as atlas,
    descend as descend,
    span_rank as span_rank,
    spans as spans,
)
from ._classify import (
    Classification as Classification,
    classification_radius as classification_radius,
    classify as classify,
)
from ._collapse import (
    Balancedness as Balancedness,
    alignment as alignment,
    balancedness_defects as balancedness_defects,
    balancedness_matrices as balancedness_matrices,
    class_means as class_means,
    etf_distance as etf_distance,
    etf_distance_from_log as etf_distance_from_log,
    hadamard_bases as hadamard_bases,
    off_diagonal_energy as off_diagonal_energy,
    residual_energy as residual_energy,
)
from ._gram import angle_gaps as angle_gaps, gram_factor as gram_factor
from ._kkt_measures import (
    DualFit as DualFit,
    ParameterKKT as ParameterKKT,
    parameter_kkt as parameter_kkt,
)
from ._landscape import (
    norm_propagation as norm_propagation,
    schatten_objective as schatten_objective,
    structure_objective as structure_objective,
    structure_rank as structure_rank,
    tie_depth as tie_depth,
)
from ._margin import (
    logit_margin as logit_margin,
    logit_margin_from_log as logit_margin_from_log,
    margins as margins,
    parameter_margin as parameter_margin,
    smoothed_parameter_margin as smoothed_parameter_margin,
)
from ._matrix_kkt import MatrixKKT as MatrixKKT, matrix_kkt as matrix_kkt
from ._metrics import metrics as metrics
from ._mirror import (
    energy as energy,
    energy_gradient as energy_gradient,
    inverse_mirror_map as inverse_mirror_map,
    mirror_map as mirror_map,
    mirror_potential as mirror_potential,
    replicator as replicator,
)
from ._phase_diagram import (
    Optimum as Optimum,
    PhaseDiagram as PhaseDiagram,
    phase_diagram as phase_diagram,
)
from ._polish import Polished as Polished, polish as polish
from ._reduced_kkt import (
    ReducedKKT as ReducedKKT,
    Verdict as Verdict,
    reduced_kkt as reduced_kkt,
)
from ._reduced_vertices import group as group
from ._search import (
    SearchResult as SearchResult,
    best_structure as best_structure,
    pairs_and_singles as pairs_and_singles,
    search as search,
)
from ._spectrum import (
    effective_rank as effective_rank,
    effective_rank_from_log as effective_rank_from_log,
    kl_from_uniform as kl_from_uniform,
    log_ratio as log_ratio,
    log_relative_modes as log_relative_modes,
    normalised_modes as normalised_modes,
    nuclear_norm as nuclear_norm,
    numerical_rank as numerical_rank,
    reverse_kl_from_uniform as reverse_kl_from_uniform,
    singular_values as singular_values,
    uniform_distance as uniform_distance,
)
