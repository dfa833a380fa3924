"""Grids of runs, and the stores they are written to."""

from ._family import Family as Family, Shape as Shape
from ._matrix_families import (
    GaussianFamily as GaussianFamily,
    LogitMatrixFamily as LogitMatrixFamily,
    MatrixFamily as MatrixFamily,
    OrthogonalFamily as OrthogonalFamily,
    PartnerFamily as PartnerFamily,
    StructureFamily as StructureFamily,
)
from ._mode_families import (
    LayerwiseFamily as LayerwiseFamily,
    LogitModesFamily as LogitModesFamily,
    MSEModesFamily as MSEModesFamily,
    UniformModesFamily as UniformModesFamily,
)
from ._run import (
    Failure as Failure,
    check_spec as check_spec,
    run_cell as run_cell,
    run_sweep as run_sweep,
    sweep as sweep,
)
from ._spec import AXES as AXES, Cell as Cell, Grid as Grid, SweepSpec as SweepSpec
from ._store import (
    OUTCOMES as OUTCOMES,
    SweepStore as SweepStore,
    check_output as check_output,
    open_sweep as open_sweep,
    outcome_code as outcome_code,
    quantities as quantities,
    write_path as write_path,
)
from ._summary import summarise as summarise
