from millpond import Engine
from millpond.ingest import Record, ingest
from millpond_chroma import ChromaSink

engine = Engine("sentence-transformers/all-MiniLM-L6-v2")
records = [Record("tides", "Tides follow the moon."), Record("bread", "Bread rises because of yeast.", {"year": 2024})]
with ChromaSink("vectors", "docs") as sink:
    report = ingest(records, engine=engine, sink=sink, show_progress=False)
    print(report.written, "records written")
    print(sink.search(engine, "What makes dough rise?", k=1, filter={"year": {"gte": 2020}})[0].text)
