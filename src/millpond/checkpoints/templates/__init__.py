"""Templates of LLM rerankers and chats: Jinja files, and what renders them."""
