"""How the speed-ups of a run scatter over the openings of its engines, engine by engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import digamma, fdtrc, ndtri, polygamma, stdtrit

from tasks.openings import CONFIDENCE, LEAST_ERROR, Openings, contrasts, of_record, spread

# How many degrees of freedom the other engines count for beside an engine's own, at most, and at most so many for each
# of its own. With more, simulations of engines that scatter to very different degrees gave a false verdict in up to one
# of ten trees.
PRIOR_AT_MOST, PRIOR_BY_OWN = 4.0, 2.0
# A series that scatters more than its record by an F test at this level is judged by its own openings. At 5 % an hour
# three times as restless as the record gave a false "faster" in 9 % of simulated series of three, at 20 % in 5 %.
RESTLESS = 0.2


@dataclass(frozen=True)
class Scatter:
    """At one batch: by engine, the standard deviation `sd` of the logarithm of one opening's speed-up, rounds included.

    Each is the engine's own variance, moderated by the others', with `free` degrees of freedom; `common` is that of all
    engines alike, with `common_free`. `openings` says how much of it isn't the rounds'; None for fewer than five
    differences.
    """

    sd: Mapping[str, float]
    free: float
    common: float
    common_free: int
    openings: Openings | None

    def allowance(self, names: Iterable[str], confidence: float, family: int = 1) -> float:
        """The standard deviation with which a normal interval holds one opening's ratio as often as it says.

        Of one name it is that of its speed-up over the baseline. Of several it is that of the ratio of any two: the
        two worst in quadrature, in which what the baseline does counts twice. It is larger than theirs by Student's t
        over the normal quantile, at the confidence of one of `family` intervals; an engine that is in no record is
        taken for as restless as the worst.
        """
        two, sure = self._two(names), 1 - (1 - confidence) / family / 2
        own, common = float(np.hypot.reduce(two)), self.common * len(two) ** 0.5
        wide = max(float(stdtrit(self.free, sure)) * own, float(stdtrit(self.common_free, sure)) * common)
        return wide / float(ndtri(sure))

    def explains(self, names: Iterable[str], logs: Sequence[float]) -> bool:
        """Whether ratios of these engines, as logarithms, scatter no more than this says, by an F test at 20 %."""
        expected = float(np.square(self._two(names)).sum())
        return float(fdtrc(len(logs) - 1, self.free, np.var(logs, ddof=1) / expected)) > RESTLESS

    def _two(self, names: Iterable[str]) -> list[float]:
        """The two largest deviations of these engines, or the only one."""
        worst = max(self.sd.values())
        return sorted((self.sd.get(name, worst) for name in names), reverse=True)[:2] or [worst]


def of_run(records: Mapping[str, Mapping[str, Any]]) -> dict[int, Scatter]:
    """What usable benchmark reports [engine] tell, by batch; nothing of those opened once, unstable or not finite.

    The ratio that one opening of an engine and the baseline gives differs from the next one's by what both openings
    change. What a machine drifts from one opening to the next isn't in it, since both share each one's rounds.
    """
    found: dict[int, dict[str, list[float]]] = {}
    pairs: dict[int, list[tuple[float, float]]] = {}
    for name, timed in records.items():
        for raw in (timed, *timed["also"]):
            if raw.get("again") and not raw["unstable"]:
                batch = raw["timing"]["batch"]
                plain = [opening.plain().speedup(CONFIDENCE) for opening in of_record(raw)]
                logs = [float(np.log(gain.value)) for gain in plain]
                if np.isfinite(logs).all():
                    found.setdefault(batch, {})[name] = logs
                    pairs.setdefault(batch, []).extend(contrasts(plain))
    return {
        batch: _scatter(logs, spread([r for r, _ in pairs[batch]], [e for _, e in pairs[batch]]))
        for batch, logs in found.items()
    }


def allowance(found: Scatter | None, names: Iterable[str], confidence: float, family: int = 1) -> float:
    """See `Scatter.allowance`; 0 where nothing was found."""
    return found.allowance(names, confidence, family) if found else 0.0


def in_series(
    found: Scatter | None,
    names: Sequence[str],
    logs: Sequence[float],
    series: Mapping[str, Sequence[float]],
    confidence: float,
    family: int = 1,
) -> float:
    """The allowance for a ratio that has a series of openings of its own, whose hour may be another than the record's.

    Its logarithms are `logs`, one an opening. Where they scatter by more than the record of `names` explains, or
    nothing was recorded, it is what the series itself tells of these names, if that is more: `series` holds the
    logarithms of the ratios of its engines to one of them, which is not in it.
    """
    recorded = allowance(found, names, confidence, family)
    if len(logs) < 2 or (found and found.explains(names, logs)):
        return recorded
    told = [name for name in names if name in series]
    return max(recorded, _scatter(series, None).allowance(told, confidence, family))


def moderated(variances: Sequence[float], free: Sequence[int]) -> tuple[list[float], float]:
    """Each of several variances, moderated by all of them, and the degrees of freedom of the least known.

    Empirical Bayes (Smyth 2004, Stat. Appl. Genet. Mol. Biol. 3:3): where variances differ more than their degrees of
    freedom `free` explain, each counts for more, and a t has fewer degrees of freedom. Unlike there, the others never
    count for more than `PRIOR_AT_MOST`, nor than `PRIOR_BY_OWN` times the least known one's own. A single one is left
    as it is.
    """
    own, d = np.maximum(variances, LEAST_ERROR**2), np.asarray(free, float)
    pooled = float((own * d).sum() / d.sum())
    if len(own) == 1:
        return [pooled], float(d[0])
    e = np.log(own) - digamma(d / 2) + np.log(d / 2)
    more = float(e.var(ddof=1) - polygamma(1, d / 2).mean())
    most = min(PRIOR_AT_MOST, PRIOR_BY_OWN * float(d.min()))
    prior, middle = most, pooled
    if more > float(polygamma(1, most / 2)):
        prior = 2 * float(brentq(lambda half: polygamma(1, half) - more, 1e-6, most / 2))
        middle = float(np.exp(e.mean() + digamma(prior / 2) - np.log(prior / 2)))
    return list((prior * middle + d * own) / (prior + d)), float(min(prior + d.min(), d.sum()))


def _scatter(logs: Mapping[str, Sequence[float]], told: Openings | None) -> Scatter:
    variances, free = [float(np.var(one, ddof=1)) for one in logs.values()], [len(one) - 1 for one in logs.values()]
    each, degrees = moderated(variances, free)
    common = float(np.sqrt(np.average(variances, weights=free)))
    return Scatter(dict(zip(logs, map(float, np.sqrt(each)), strict=True)), degrees, common, sum(free), told)
