"""What a certified limit has to satisfy; basins and edges ask for the same."""

from ._log_norm_time import HELD_FROM

# A direction further than this from a stationary point (radians) has not arrived: of 24
# full flows followed on, one of those certified at 0.3 was wrong, none at 0.1.
NEAR = 0.1
# Below this an angle need not shrink: ties at a held norm are sharp to its inverse.
RESOLUTION = 10 / HELD_FROM
# Points further than this (radians) are not where the flow is.
IN_SIGHT = 0.3
# Growth exponents between dying and living, the likeliest first.
LIVING = (0.5, 0.7, 0.9, 0.3)
# A mode that a limit lacks has a growth exponent below this.
INVADING_GROWTH = 0.9
# Margins above the least by this part of it cannot be active.
LARGEST_TIE = 0.2
# The largest KKT residual of a certified limit.
RESIDUAL = 1e-10
