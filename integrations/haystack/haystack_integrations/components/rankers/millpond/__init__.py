"""millpond's rankers for Haystack."""

from haystack_integrations.components.rankers.millpond.rankers import (
    MillpondLateInteractionRanker,
    MillpondSimilarityRanker,
)

__all__ = ["MillpondLateInteractionRanker", "MillpondSimilarityRanker"]
