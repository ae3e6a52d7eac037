"""How likely drafts are to be accepted: the head's card at first, then what was observed.

Two tables, each for greedy and for sampled requests. `rates[k]`: draft k is accepted where all before it were.
`lifts[j]`: how much oftener than that when the circuit's confidence falls into bin j. Both are counts of what happened
over counts of what was expected, begun with a few imagined observations of the card's rates and of no lift, and slowly
forgotten.

Only drafts that were verified are counted, and those behind the first rejected one tell nothing. Nothing here knows a
token that is not verified yet, so that a cut by these numbers leaves the output's distribution alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

GREEDY, SAMPLED = 0, 1
EDGES = np.array([0.03, 0.06, 0.12, 0.25, 0.5, 0.7, 0.85, 0.95])  # of confidence bins
IMAGINED = 12.0  # observations that the card and "no lift" are worth
KEPT = 0.998  # of all counts, per step: half is forgotten in 350 steps
ASSUMED = 0.5  # acceptance of a draft that nothing is known of

Floats = NDArray[np.float64]


def card_rates(measured: Mapping[str, Sequence[float]], num_drafts: int) -> Floats:
    """[2, K]: chance of draft k given those before it, from P(the first k drafts are all accepted) of the head's card.

    measured: by temperature, "t0" and "t1"; where one is absent the other stands in, and ASSUMED for what nobody
    measured.
    """
    known = {key: list(values)[:num_drafts] for key, values in measured.items() if values}
    rows = [known.get(key) or next(iter(known.values()), []) for key in ("t0", "t1")]
    rates = np.full((2, num_drafts), ASSUMED)
    for row, values in enumerate(rows):
        before = 1.0
        for k, value in enumerate(values):
            rates[row, k] = value / before if before > 0 else ASSUMED
            before = value
    return rates.clip(0.02, 0.98)


class Acceptance:
    """Estimates of one head on one server; arrays are float64 on the host."""

    def __init__(self, rates: Floats) -> None:
        self.rates = rates.copy()  # [2, K]
        self.lifts = np.ones((2, len(EDGES) + 1))
        self._card = rates
        self._seen = np.zeros((2, 2, rates.shape[1]))  # (accepted, expected at rate 1), class, position
        self._lifted = np.zeros((2, 2, len(EDGES) + 1))  # (accepted, expected at lift 1), class, bin

    def survival(self) -> Floats:
        """[2, K]: P(the first k drafts are all accepted) of a request nothing more is known of."""
        return self.rates.cumprod(axis=1)

    def survival_of(self, confidence: Floats, kind: NDArray[np.int64]) -> Floats:
        """[B, K]: the same for requests of class kind [B] with the circuit's confidence [B, K] in each draft."""
        lifts = self.lifts[kind[:, None], np.searchsorted(EDGES, confidence)]
        chances = self.rates[kind, : confidence.shape[1]] * lifts
        return np.minimum(chances, 0.995).cumprod(axis=1)

    def observe(
        self, kind: NDArray[np.int64], confidence: Floats, verified: NDArray[np.int64], accepted: NDArray[np.int64]
    ) -> None:
        """Count a step: of verified [B] drafts, accepted [B] were, with confidence [B, K] in them."""
        width = confidence.shape[1]
        position = np.arange(width)
        was_tried = position < np.minimum(verified, accepted + 1)[:, None]  # [B, K]
        rows, columns = np.nonzero(was_tried)
        if not len(rows):
            return
        hits = (columns < accepted[rows]).astype(np.float64)
        kinds, bins = kind[rows], np.searchsorted(EDGES, confidence[rows, columns])
        self._seen *= KEPT
        self._lifted *= KEPT
        np.add.at(self._seen, (0, kinds, columns), hits)
        np.add.at(self._seen, (1, kinds, columns), self.lifts[kinds, bins])
        np.add.at(self._lifted, (0, kinds, bins), hits)
        np.add.at(self._lifted, (1, kinds, bins), self.rates[kinds, columns])
        rates = (self._seen[0] + IMAGINED * self._card) / (self._seen[1] + IMAGINED)
        self.rates = rates.clip(0.02, 0.98)
        self.lifts = (self._lifted[0] + IMAGINED * ASSUMED) / (self._lifted[1] + IMAGINED * ASSUMED)
