from qdrant_client import models

from millpond_qdrant import MillpondQdrantClient

client = MillpondQdrantClient(":memory:")  # or "http://localhost:6333"
name = "sentence-transformers/all-MiniLM-L6-v2"
size = client.get_embedding_size(name)
client.create_collection("notes", models.VectorParams(size=size, distance=models.Distance.COSINE))

texts = ["Tides follow the moon.", "Bread rises because of yeast."]
client.upsert(
    "notes",
    [
        models.PointStruct(id=n, vector=models.Document(text=text, model=name), payload={"text": text})
        for n, text in enumerate(texts)
    ],
)
question = models.Document(text="What makes dough rise?", model=name)
print(client.query_points("notes", question, limit=1).points[0].payload["text"])
like = models.RecommendQuery(recommend=models.RecommendInput(positive=[models.Document(text="the sea", model=name)]))
print(client.query_points("notes", like, limit=1).points[0].payload["text"])
