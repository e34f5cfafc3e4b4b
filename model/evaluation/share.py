"""A share of successful trials with its confidence interval."""

import math
from dataclasses import dataclass

Z_95 = 1.959963984540054  # the normal distribution's 97.5 % point


@dataclass(frozen=True)
class Share:
    """So many of all, and where the true share lies with 95 % confidence."""

    count: int
    total: int

    @property
    def value(self) -> float:
        return self.count / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """The score interval of Wilson 1927."""
        share, z2 = self.value, Z_95**2 / self.total
        middle = share + z2 / 2
        half_width = math.sqrt(z2 * (share * (1 - share) + z2 / 4))
        return (middle - half_width) / (1 + z2), (middle + half_width) / (1 + z2)
