from haystack import Document, Pipeline
from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
from haystack.document_stores.in_memory import InMemoryDocumentStore

from haystack_integrations.components.embedders.millpond import MillpondDocumentEmbedder, MillpondTextEmbedder
from haystack_integrations.components.rankers.millpond import MillpondLateInteractionRanker

model = "sentence-transformers/all-MiniLM-L6-v2"
documents = [Document(content="Tides follow the moon."), Document(content="Bread rises because of yeast.")]
store = InMemoryDocumentStore()
store.write_documents(MillpondDocumentEmbedder(model).run(documents)["documents"])

pipeline = Pipeline()
pipeline.add_component("embedder", MillpondTextEmbedder(model))
pipeline.add_component("retriever", InMemoryEmbeddingRetriever(store))
pipeline.add_component("ranker", MillpondLateInteractionRanker(model, top_k=1))
pipeline.connect("embedder.embedding", "retriever.query_embedding")
pipeline.connect("retriever.documents", "ranker.documents")

question = "What makes dough rise?"
found = Pipeline.loads(pipeline.dumps()).get_component("ranker").run(question, documents)
print("alone:", found["documents"][0].content)
answer = pipeline.run({"embedder": {"text": question}, "ranker": {"query": question}})
print("in a pipeline:", answer["ranker"]["documents"][0].content)
