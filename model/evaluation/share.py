"""Share of successful trials with its confidence interval."""

import math
from dataclasses import dataclass

Z_95 = 1.959963984540054  # 97.5 % quantile of the standard normal distribution


@dataclass(frozen=True)
class Share:
    """Number of successes among trials, and the 95 % confidence interval of the true share."""

    count: int
    total: int

    @property
    def value(self) -> float:
        return self.count / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson score interval (Wilson 1927), as shares between 0 and 1."""
        share, z2 = self.value, Z_95**2 / self.total
        middle = share + z2 / 2
        half_width = math.sqrt(z2 * (share * (1 - share) + z2 / 4))
        return (middle - half_width) / (1 + z2), (middle + half_width) / (1 + z2)

    @property
    def percent_interval(self) -> list[float]:
        """`interval` in percent, rounded for a report."""
        return [round(100 * end, 2) for end in self.interval]
