"""Engines timed in common rounds, in each of several openings, and what may be concluded from that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tasks.scatter import Scatter, in_series
from tasks.stats import Interval
from tasks.timing import Opening, Timing, logs, over, unusable

AS_FAST = 1.05


@dataclass(frozen=True)
class Together:
    """The timings by name of each opening, if any; speed-ups hold with `confidence` for all pairs together.

    Where fewer pairs than all are of interest, `n_pairs` is their number.
    They allow for `reopen_sd`, or for what the two engines' openings scatter by (`scatter.in_series`) if that is more.
    """

    openings: Sequence[Mapping[str, Timing]] = ()
    confidence: float = 0.95
    reopen_sd: float = 0.0
    scatter: Scatter | None = None
    n_pairs: int | None = None

    @property
    def names(self) -> frozenset[str]:
        """The engines that were timed."""
        return frozenset(self.openings[0]) if self.openings else frozenset()

    @property
    def family(self) -> int:
        """How many pairs are judged together: all, if any of them may turn out the fastest."""
        return self.n_pairs or pairs(len(self.names))

    def unusable(self, name: str) -> str | None:
        """Why nothing may be concluded of a timed engine, or None: rounds disturbed or too few, or unsettled."""
        return unusable([timings[name] for timings in self.openings], self.confidence, self.family)

    def usable(self, *names: str) -> bool:
        """Whether all of these were timed, and the timings may be used."""
        return all(name in self.names and self.unusable(name) is None for name in names)

    def gain(self, name: str, versus: str) -> Interval:
        """How many times faster one is than another."""
        pair = self._pair(name, versus)
        allowed = in_series(self.scatter, [name, versus], logs(pair), self._series, self.confidence, self.family)
        return over(pair, self.confidence, self.family, self.reopen_sd, allowed)

    @cached_property
    def _series(self) -> dict[str, list[float]]:
        """By engine, the logarithms of its speed-up over the first, in each opening."""
        first, *others = self.openings[0]
        return {other: logs(self._pair(other, first)) for other in others}

    def _pair(self, name: str, versus: str) -> list[Opening]:
        return [Opening.of(timings, name, versus) for timings in self.openings]

    def typical_ms(self, name: str) -> float:
        """The geometric mean over the openings of the median round's median."""
        return float(np.exp(np.mean([np.log(np.median(timings[name].medians)) for timings in self.openings])))

    def tied(self, first: str, name: str) -> bool:
        """Whether one can't be told apart from the fastest, and isn't more than 5 % slower."""
        gain = self.gain(first, name)
        return first == name or (gain.low <= 1 and gain.value <= AS_FAST)


def pairs(n: int) -> int:
    """The number of pairs of `n` engines, at least 1."""
    return max(1, n * (n - 1) // 2)
