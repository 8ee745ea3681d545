"""What a prefill step will cost the device, learnt from those that have run. Pure Python, no clock.

    ms = fixed + per crop * crops + per token * tokens

Each measured step moves the three half of the way to values that would have predicted it, the first one, and the
first one with crops, all the way, and none below 0. So a wrong first value (kernels that were compiled in it) is
forgotten after some steps, and a mix of steps tells pictures and prompts apart. Price: noise of one step moves the next
prediction by half of it.
"""

from __future__ import annotations

SCALES = (0.3, 1.0, 0.01)  # of a step, a crop, a token: how an error is shared out; about what they cost relatively


class PrefillCost:
    def __init__(self) -> None:
        self._costs = [0.0, 0.0, 0.0]  # ms of a step, a crop, a token
        self._measured = self._measured_crops = False

    def predict(self, crops: int, tokens: int) -> float:
        """Milliseconds; infinite as long as no step was measured, or none with crops if there are any."""
        if not self._measured or (crops and not self._measured_crops):
            return float("inf")
        return sum(cost * amount for cost, amount in zip(self._costs, (1, crops, tokens), strict=True))

    def observe(self, crops: int, tokens: int, ms: float) -> None:
        """A step has run and took the device so long."""
        amounts = (1, crops, tokens)
        error = ms - sum(cost * amount for cost, amount in zip(self._costs, amounts, strict=True))
        shares = [scale * scale * amount for scale, amount in zip(SCALES, amounts, strict=True)]
        known = self._measured and (self._measured_crops or not crops)
        move = (0.5 if known else 1.0) * error / sum(s * a for s, a in zip(shares, amounts, strict=True))
        self._costs = [max(0.0, cost + move * share) for cost, share in zip(self._costs, shares, strict=True)]
        self._measured = True
        self._measured_crops = self._measured_crops or crops > 0
