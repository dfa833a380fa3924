"""Grids of runs, and the stores they are written to."""

from ._batches import Batch as Batch, batches as batches
from ._describe import describe as describe
from ._family import Family as Family, Shape as Shape
from ._files import check_output as check_output
from ._guard import StoreError as StoreError
from ._integrity import (
    Fault as Fault,
    Inspection as Inspection,
    inspect_sweep as inspect_sweep,
    locate as locate,
)
from ._layout import (
    OUTCOMES as OUTCOMES,
    outcome_code as outcome_code,
    quantities as quantities,
)
from ._limits import (
    STATUSES as STATUSES,
    summarise_limits as summarise_limits,
    sweep_limits as sweep_limits,
    write_limits as write_limits,
)
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
    run_batch as run_batch,
    run_sweep as run_sweep,
    sweep as sweep,
)
from ._spec import AXES as AXES, Cell as Cell, Grid as Grid, SweepSpec as SweepSpec
from ._store import (
    SweepStore as SweepStore,
    open_sweep as open_sweep,
    write_path as write_path,
)
from ._summary import summarise as summarise
