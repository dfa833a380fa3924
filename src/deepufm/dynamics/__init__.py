"""Flows, clocks, stops and the solve that puts them together."""

from ._assemble import Observe as Observe, assemble as assemble
from ._check import check_solve as check_solve, default_solver as default_solver
from ._clock import (
    AbstractClock as AbstractClock,
    AbstractStateClock as AbstractStateClock,
    AbstractTimeClock as AbstractTimeClock,
    ArcLength as ArcLength,
    LogNorm as LogNorm,
    LogTime as LogTime,
    PhysicalTime as PhysicalTime,
)
from ._comparison import (
    FlowComparison as FlowComparison,
    compare_with_flow as compare_with_flow,
)
from ._crossing import FallingCrossing as FallingCrossing
from ._descent import Descent as Descent, descend as descend
from ._flow import (
    AbstractFlow as AbstractFlow,
    Motion as Motion,
    dead_level as dead_level,
    is_dead as is_dead,
)
from ._gradient_flow import GradientFlow as GradientFlow
from ._hadamard_flow import (
    HadamardFlow as HadamardFlow,
    check_num_classes as check_num_classes,
    checked_depth as checked_depth,
    depth_power as depth_power,
    log_modes as log_modes,
)
from ._layerwise_flow import (
    AbstractLayerwiseFlow as AbstractLayerwiseFlow,
    LayerwiseHadamardFlow as LayerwiseHadamardFlow,
    LayerwiseMSEFlow as LayerwiseMSEFlow,
    mse_targets as mse_targets,
)
from ._leg import Leg as Leg, follow as follow, one_leg as one_leg
from ._logit_flow import LogitFlow as LogitFlow, LogitMatrixFlow as LogitMatrixFlow
from ._path import Outcome as Outcome, Path as Path, SolveStats as SolveStats
from ._saves import (
    SaveAt as SaveAt,
    SaveEvery as SaveEvery,
    Saves as Saves,
    num_saves as num_saves,
)
from ._scale_map import ScaleMap as ScaleMap, scale_map as scale_map
from ._schedule import (
    PiecewiseConstant as PiecewiseConstant,
    schedule_of as schedule_of,
    with_value as with_value,
)
from ._segment import Method as Method, Point as Point, at_start as at_start
from ._sigmoidal_flow import SigmoidalFlow as SigmoidalFlow
from ._solve import make_method as make_method, solve as solve
from ._stepper import (
    Lane as Lane,
    advance as advance,
    attempt as attempt,
    attempt_lanes as attempt_lanes,
    begin as begin,
    finish as finish,
    here as here,
)
from ._stop import (
    AbstractStop as AbstractStop,
    FinalNorm as FinalNorm,
    FinalTime as FinalTime,
    LogLossBelow as LogLossBelow,
)
from ._tangent_flow import TangentFlow as TangentFlow, TangentState as TangentState
from ._training import (
    P1_FIGURE_3 as P1_FIGURE_3,
    P2_FIGURE_2 as P2_FIGURE_2,
    Training as Training,
)
from ._zeroth_order import zeroth_order_solution as zeroth_order_solution
