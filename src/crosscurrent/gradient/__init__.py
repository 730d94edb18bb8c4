"""The gradient of a transformer over sequences far longer than its KV caches.

See `long_context` for how it is used, `accumulator` and `windows` for how it works, and `transfer` for
what moves when.
"""

from crosscurrent.gradient.args import GradientArgs
from crosscurrent.gradient.long_context import CheckpointsGoneError, LongContextGradientModel
from crosscurrent.gradient.store import PinnedBudget

__all__ = ["CheckpointsGoneError", "GradientArgs", "LongContextGradientModel", "PinnedBudget"]
