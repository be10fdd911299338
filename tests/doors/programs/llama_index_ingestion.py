from llama_index.core import Document, VectorStoreIndex
from llama_index.core.ingestion import IngestionPipeline

from llama_index.embeddings.millpond import MillpondTransform
from llama_index.postprocessor.millpond_rerank import MillpondRerank
from millpond.ingest import read

model = "sentence-transformers/all-MiniLM-L6-v2"
texts = ["Tides follow the moon.", "Bread rises because of yeast.", "too long " * 300]
documents = [Document(text=text, doc_id=f"d{number}") for number, text in enumerate(texts)]
transform = MillpondTransform(model, cache="vectors.cache", dead_letters="dead.jsonl", truncate="error")
nodes = IngestionPipeline(transformations=[transform]).run(documents=documents)
print(len(nodes), "nodes, and", len(list(read("dead.jsonl"))), "dead letter")

index = VectorStoreIndex(nodes, embed_model=transform)
hits = index.as_retriever(similarity_top_k=2).retrieve("What makes dough rise?")
best = MillpondRerank(model, top_n=1).postprocess_nodes(hits, query_str="What makes dough rise?")
print(best[0].get_content())
