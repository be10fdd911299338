import lancedb
from lancedb.embeddings import get_registry
from lancedb.index import FTS
from lancedb.pydantic import LanceModel, Vector

from millpond_lancedb import MillpondReranker  # the import registers "millpond", too

name = "sentence-transformers/all-MiniLM-L6-v2"
model = get_registry().get("millpond").create(name=name)


class Passage(LanceModel):
    text: str = model.SourceField()
    vector: Vector(model.ndims()) = model.VectorField()


table = lancedb.connect("lancedb").create_table("passages", schema=Passage)
table.add([{"text": "Tides follow the moon."}, {"text": "Bread rises because of yeast."}])
table.create_index("text", config=FTS())

again = lancedb.connect("lancedb").open_table("passages")  # with the model that is stored with it
print(again.search("What makes dough rise?").limit(1).to_list()[0]["text"])
both = again.search("Does the moon move the tides?", query_type="hybrid").rerank(MillpondReranker(name)).limit(1)
print(both.to_list()[0]["text"])
