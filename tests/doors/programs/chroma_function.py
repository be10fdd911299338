import chromadb

from millpond_chroma import MillpondEmbeddingFunction, open_collection

client = chromadb.PersistentClient("chroma")
model = "sentence-transformers/all-MiniLM-L6-v2"
docs = open_collection(client, "docs", MillpondEmbeddingFunction(model))
docs.add(ids=["tides", "bread"], documents=["Tides follow the moon.", "Bread rises because of yeast."])

again = client.get_collection("docs")  # with the function that is stored with it
print(again.query(query_texts=["What makes dough rise?"], n_results=1)["documents"][0][0])
try:
    open_collection(client, "docs", MillpondEmbeddingFunction(model, pooling="cls"))
except ValueError as error:
    print(type(error).__name__)
