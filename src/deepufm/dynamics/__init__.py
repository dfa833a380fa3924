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
from ._flow import AbstractFlow as AbstractFlow, Motion as Motion
from ._gradient_flow import GradientFlow as GradientFlow
from ._hadamard_flow import (
    HadamardFlow as HadamardFlow,
    LogitFlow as LogitFlow,
    log_modes as log_modes,
)
from ._path import Outcome as Outcome, Path as Path, SolveStats as SolveStats
from ._saves import SaveEvery as SaveEvery
from ._scale_map import ScaleMap as ScaleMap, scale_map as scale_map
from ._solve import solve as solve
from ._stop import (
    AbstractStop as AbstractStop,
    FinalNorm as FinalNorm,
    FinalTime as FinalTime,
    LogLossBelow as LogLossBelow,
)
