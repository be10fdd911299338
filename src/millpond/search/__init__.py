"""Search: collections and indexes that were built before, asked again by the models that built them."""
