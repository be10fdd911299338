import json
from pathlib import Path

import mteb

from millpond.mteb import MillpondEncoder, beir_task

texts = {"bread": "Bread rises because of yeast.", "tides": "Tides follow the moon.", "mill": "A mill grinds grain."}
questions = {"q1": "What makes dough rise?", "q2": "Why is there ebb and flow?"}
for name, rows in (("corpus", texts), ("queries", questions)):
    Path("bakery/qrels").mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"_id": id, "text": text}) for id, text in rows.items()]
    Path(f"bakery/{name}.jsonl").write_text("\n".join(lines))
Path("bakery/qrels/test.tsv").write_text("q1\tbread\t2\nq1\tmill\t1\nq2\ttides\t1\n")

model = MillpondEncoder("sentence-transformers/all-MiniLM-L6-v2", dtype="float32")
results = mteb.evaluate(model, beir_task("bakery"), cache=None, show_progress_bar=False)
for result in results.task_results:
    print(result.task_name, "nDCG@10", round(result.get_score(), 2))
