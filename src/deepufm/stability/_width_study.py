"""Distances from collapse against width, and the power law fitted to them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.stats


@dataclass(frozen=True)
class PowerLaw:
    """y = coefficient·x^exponent, by least squares on the logarithms.

    - `exponent`, with its standard error `exponent_error`.
    - `coefficient`, with the standard error `log_coefficient_error` of its logarithm.
    - `points`: how many were fitted.
    """

    exponent: float
    exponent_error: float
    coefficient: float
    log_coefficient_error: float
    points: int


@dataclass(frozen=True)
class WidthStudy:
    """M, the squared distance of a logit matrix from collapse, against width.

    - `widths`, (widths,): d.
    - `distance`, (widths, seeds): M over all columns, P1 eq. 61.
    - `mean_distance`, (widths, seeds): M of the class means.
    - `leading`, `mean_leading`: c where E M ~ c/d; NaN where M tends to `floor` > 0.
    - `floor`: what is left of M as d -> ∞, for a start of average direction.
    """

    widths: np.ndarray
    distance: np.ndarray
    mean_distance: np.ndarray
    leading: float
    mean_leading: float
    floor: float

    @property
    def mean(self) -> np.ndarray:
        """Mean of `distance` over seeds, (widths,)."""
        return np.mean(self.distance, axis=1)

    @property
    def std(self) -> np.ndarray:
        """Sample standard deviation of `distance` over seeds, (widths,)."""
        return np.std(self.distance, axis=1, ddof=1)

    def power_law(self, least_width: int = 1, *, means: bool = False) -> PowerLaw:
        """Fits M = c·d^p to every seed of every width from `least_width` on.

        Draws of different widths are independent, so that the standard errors count
        them as such. Widths of a few K bend away from the law.

        **Arguments:** `means` to fit `mean_distance`.

        **Raises:** `ValueError` for fewer than two widths, or an M of zero.
        """
        chosen = self.widths >= least_width
        values = (self.mean_distance if means else self.distance)[chosen]
        if np.sum(chosen) < 2:
            raise ValueError(
                "A power law needs two widths or more, but of "
                f"{self.widths.tolist()} only {int(np.sum(chosen))} are at least "
                f"least_width = {least_width}."
            )
        return fitted_power_law(np.repeat(self.widths[chosen], values.shape[1]), values)


def fitted_power_law(x: np.ndarray, y: np.ndarray) -> PowerLaw:
    """Returns the least-squares line through (log x, log y).

    **Raises:** `ValueError` for values that are not positive and finite.
    """
    x, y = np.ravel(x), np.ravel(y)
    if not np.all(np.isfinite(x) & np.isfinite(y) & (x > 0) & (y > 0)):
        raise ValueError(
            "A power law is fitted to logarithms: all values must be positive and "
            f"finite, but the least are {np.min(x)} and {np.min(y)}."
        )
    line: Any = scipy.stats.linregress(np.log(x), np.log(y))
    return PowerLaw(
        exponent=float(line.slope),
        exponent_error=float(line.stderr),
        coefficient=float(np.exp(line.intercept)),
        log_coefficient_error=float(line.intercept_stderr),
        points=x.size,
    )
