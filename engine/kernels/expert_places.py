"""Where an expert may be, in the words that the compiled step and a cache of experts share."""

from __future__ import annotations

ABSENT, PRESENT, COMING = 0, 1, 2
"""Not in memory, in memory, or on its way."""
DISTANCES = 3
"""Number of following layers with experts whose choices are predicted."""
