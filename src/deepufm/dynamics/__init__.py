"""Flows, clocks, stops and the solve that puts them together."""

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
from ._descent import Descent as Descent, descend as descend
from ._flow import AbstractFlow as AbstractFlow, Motion as Motion
from ._gradient_flow import GradientFlow as GradientFlow
from ._hadamard_flow import (
    HadamardFlow as HadamardFlow,
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
from ._logit_flow import LogitFlow as LogitFlow, LogitMatrixFlow as LogitMatrixFlow
from ._path import Outcome as Outcome, Path as Path, SolveStats as SolveStats
from ._saves import SaveEvery as SaveEvery
from ._scale_map import ScaleMap as ScaleMap, scale_map as scale_map
from ._schedule import PiecewiseConstant as PiecewiseConstant
from ._sigmoidal_flow import SigmoidalFlow as SigmoidalFlow
from ._solve import solve as solve
from ._stop import (
    AbstractStop as AbstractStop,
    FinalNorm as FinalNorm,
    FinalTime as FinalTime,
    LogLossBelow as LogLossBelow,
)
from ._training import (
    P1_FIGURE_3 as P1_FIGURE_3,
    P2_FIGURE_2 as P2_FIGURE_2,
    Training as Training,
)
from ._zeroth_order import zeroth_order_solution as zeroth_order_solution
