"""millpond's rankers for Haystack."""

from haystack_integrations.components.rankers.millpond.late_interaction import MillpondLateInteractionRanker
from haystack_integrations.components.rankers.millpond.similarity import MillpondSimilarityRanker

__all__ = ["MillpondLateInteractionRanker", "MillpondSimilarityRanker"]
