"""Making rare orders frequent: what one runs before a change to stream code is merged.

A *plan* (``plans``) says before which ops of which lanes to wait for how long. On a real GPU ``delays``
carries it out with ``torch.cuda._sleep``; of a recorded trace ``delayed`` makes the schedule that the same
plan would lead to. ``lanes`` gives lanes their roles, ``campaign`` keeps account of a long run.
"""

from __future__ import annotations

from crosscurrent.stress.delayed import Delayed, SeededReplays
from crosscurrent.stress.delays import Delays, delays
from crosscurrent.stress.plans import DelayConfig, How, Target

__all__ = ["DelayConfig", "Delayed", "Delays", "How", "SeededReplays", "Target", "delays"]
