"""Pictures of what was computed."""

from ._landscape import landscape_figure as landscape_figure
from ._limits import limits_figure as limits_figure
from ._orbit import orbit_figure as orbit_figure
from ._sweep import sweep_figure as sweep_figure
