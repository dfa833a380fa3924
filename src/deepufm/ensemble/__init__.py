"""Many members of one flow at once: lanes, devices, processes."""

from ._compiling import (
    compiled as compiled,
    compiler_options as compiler_options,
)
from ._ensemble import (
    Share as Share,
    Strategy as Strategy,
    ensemble as ensemble,
    make_share as make_share,
)
from ._processes import join_processes as join_processes
from ._spread import (
    available_cores as available_cores,
    may_run_together as may_run_together,
)
from ._stream import Members as Members
