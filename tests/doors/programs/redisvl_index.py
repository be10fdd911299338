from millpond.compat.redisvl import MillpondReranker, MillpondVectorizer

model = "sentence-transformers/all-MiniLM-L6-v2"
vectorizer = MillpondVectorizer(model, dtype="float16")  # as SemanticCache(vectorizer=vectorizer) takes it
print(vectorizer.dims, "parts in", len(vectorizer.embed("Tides follow the moon.", as_buffer=True)), "bytes")

documents = [{"content": "Tides follow the moon."}, {"content": "Bread rises because of yeast."}]
found, scores = MillpondReranker(model, limit=1).rank("What makes dough rise?", documents)
print(found[0]["content"])
