"""The papers' structures by name, as class-mean logits to start near."""

import enum

from .._types import SquareMatrix
from ..geometry import cross_polytope, regular_polygon, simplex_etf


class Structure(enum.Enum):
    """A structure that a start can be near to."""

    SIMPLEX_ETF = "simplex-etf"
    CROSS_POLYTOPE = "cross-polytope"
    POLYGON = "polygon"

    def logits(self, num_classes: int) -> SquareMatrix:
        """Returns its class-mean logits, (K, K).

        **Raises:** `ValueError` where there is none for K.
        """
        build = {
            Structure.SIMPLEX_ETF: simplex_etf,
            Structure.CROSS_POLYTOPE: cross_polytope,
            Structure.POLYGON: regular_polygon,
        }
        return build[self](num_classes)
