import dspy

from millpond import Engine
from millpond.compat.dspy import MillpondEmbedder, MillpondRetriever
from millpond.late_interaction import PlaidIndex

model = "sentence-transformers/all-MiniLM-L6-v2"
texts = ["Tides follow the moon.", "Bread rises because of yeast."]
search = dspy.retrievers.Embeddings(texts, MillpondEmbedder(model), k=1)
print("in memory:", search("What makes dough rise?").passages[0])

with PlaidIndex("index", Engine(model)) as index:
    index.add(["tides", "bread"], texts)
retrieve = MillpondRetriever("index", k=1)
print("from an index:", retrieve("What makes dough rise?").passages[0])
