"""Pictures of what was computed."""

from ._orbit import orbit_figure as orbit_figure
from ._sweep import sweep_figure as sweep_figure
