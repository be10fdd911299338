"""Bodies of requests and responses, as OpenAPI shows them."""
