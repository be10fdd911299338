"""From texts to the rows of an index: markers, projection, pooling of tokens."""
