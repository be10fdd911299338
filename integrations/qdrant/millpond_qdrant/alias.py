"""Aliases: names that another collection may take over in one step."""

from __future__ import annotations

from qdrant_client import QdrantClient, models


def aliased(client: QdrantClient, alias: str) -> str | None:
    """The collection that an alias names; ``None`` if there is no such alias."""
    return next(
        (known.collection_name for known in client.get_aliases().aliases if known.alias_name == alias),
        None,
    )


def point_alias(client: QdrantClient, alias: str, collection: str) -> str | None:
    """Let an alias name a collection, in one step for every reader.

    Returns:
        The collection that it named before.
    """
    former = aliased(client, alias)
    create = models.CreateAliasOperation(
        create_alias=models.CreateAlias(collection_name=collection, alias_name=alias),
    )
    delete = models.DeleteAliasOperation(delete_alias=models.DeleteAlias(alias_name=alias))
    client.update_collection_aliases([create] if former is None else [delete, create])
    return former
