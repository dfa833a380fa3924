"""Fixed matrices (Hadamard, and the logits of named structures) and safe norms."""

from ._angle import angle_between as angle_between, row_angles as row_angles
from ._code_table import best_known_inner_product as best_known_inner_product
from ._frames import (
    cross_polytope as cross_polytope,
    polygon_vectors as polygon_vectors,
    regular_polygon as regular_polygon,
    simplex_etf as simplex_etf,
)
from ._hadamard import (
    psi_and_sum as psi_and_sum,
    psi_lanes as psi_lanes,
    psi_matrix as psi_matrix,
    psi_matvec as psi_matvec,
    sylvester_hadamard as sylvester_hadamard,
)
from ._norms import (
    frobenius_norm as frobenius_norm,
    log_frobenius_norm as log_frobenius_norm,
    safe_scale as safe_scale,
)
from ._softmax_code import (
    SoftmaxCode as SoftmaxCode,
    hull_distance as hull_distance,
    softmax_code as softmax_code,
)
