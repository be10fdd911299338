import daft
from daft.functions import embed_text

from millpond.compat.daft import MillpondProvider

model = "sentence-transformers/all-MiniLM-L6-v2"
daft.attach_provider(MillpondProvider())  # Daft knows it as "millpond"
facts = daft.from_pydict({"text": ["Tides follow the moon.", None, "Bread rises because of yeast."]})
facts = facts.with_column("vector", embed_text(facts["text"], provider="millpond", model=model))
print(facts.schema()["vector"].dtype)

asked = daft.from_pydict({"question": ["What makes dough rise?"]})
asked = asked.with_column("asked", embed_text(asked["question"], provider="millpond", model=model, role="query"))
pairs = facts.where(facts["vector"].not_null()).join(asked, how="cross")
best = pairs.with_column("distance", daft.functions.cosine_distance(pairs["vector"], pairs["asked"])).sort("distance")
print(best.to_pydict()["text"][0])
