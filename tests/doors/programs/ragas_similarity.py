from ragas.metrics.collections import SemanticSimilarity

from millpond.compat.ragas import MillpondEmbeddings

embeddings = MillpondEmbeddings("sentence-transformers/all-MiniLM-L6-v2", dtype="float32")
metric = SemanticSimilarity(embeddings=embeddings)
reference = "Bread rises because yeast gives off gas."
for response in ("Yeast makes the dough rise.", "Tides follow the moon."):
    print(f"{metric.score(reference=reference, response=response).value:.2f} {response}")
