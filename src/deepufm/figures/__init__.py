"""Pictures of what was computed."""

from ._basins import basins_figure as basins_figure
from ._landscape import landscape_figure as landscape_figure
from ._limits import limits_figure as limits_figure
from ._orbit import orbit_figure as orbit_figure
from ._stability import stability_figure as stability_figure
from ._sweep import sweep_figure as sweep_figure
