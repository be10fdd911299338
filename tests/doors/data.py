"""A collection and pairs small enough to be embedded twice by a test, in the files of BEIR and of STS-B."""

from __future__ import annotations

import json
from pathlib import Path

_CORPUS = {
    "tides": ("Tides", "The tides of the sea follow the moon, twice a day."),
    "bread": ("Bread", "Dough rises because yeast gives off gas."),
    "mill": ("", "A mill grinds grain between two stones, driven by water."),
    "moon": ("The moon", "It circles the earth in a month and pulls at the sea."),
    "oven": ("Oven", "Bread bakes in a hot oven for forty minutes."),
    "pond": ("The pond", "Ducks swim on the pond beside the mill."),
    "river": ("", "The river turns the wheel of the mill all year."),
    "yeast": ("Yeast", "A fungus that ferments sugar, in beer as in dough."),
    "ships": ("Ships", "Ships wait for high water before they enter the harbour."),
    "wheat": ("", "Wheat is sown in autumn and cut in July."),
    "code": ("Code", "A compiler translates a program into machine code."),
    "music": ("Music", "The orchestra plays a symphony in four movements."),
}
_QUERIES = {
    "q1": "What makes dough rise?",
    "q2": "Why is there ebb and flow?",
    "q3": "How is flour made?",
    "q4": "what moves the wheel of a mill",
    "q5": "when is grain harvested",
    "unjudged": "Who wrote this?",
}
_GRADES = {
    "q1": {"bread": 2, "yeast": 1},
    "q2": {"tides": 2, "moon": 1, "ships": 1},
    "q3": {"mill": 2, "wheat": 1, "code": 0},
    "q4": {"river": 2, "mill": 1},
    "q5": {"wheat": 1},
}
_PAIRS = (
    (4.8, "A dog runs through the park.", "A dog is running in a park."),
    (0.2, "A dog runs through the park.", "The senate passed a bill."),
    (3.1, 'The "old" mill stands by the pond.', "There is a mill at the pond."),
    (1.4, "She bakes bread.", "He drinks beer."),
    (4.1, "Prices rose in May.", "In May, prices went up."),
    (2.3, "Two ships enter the harbour.", "A boat leaves the harbour."),
    (0.0, "The orchestra plays.", "Wheat is cut in July."),
    (2.9, "The moon is full tonight.", "Tonight one sees the whole moon and many stars."),
)


def write_beir(folder: Path) -> Path:
    """A folder of BEIR."""
    (folder / "qrels").mkdir(parents=True)
    corpus = [{"_id": id, "title": title, "text": text} for id, (title, text) in _CORPUS.items()]
    queries = [{"_id": id, "text": text} for id, text in _QUERIES.items()]
    for name, rows in (("corpus", corpus), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    judged = [f"{query}\t{id}\t{grade}\n" for query, grades in _GRADES.items() for id, grade in grades.items()]
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(judged), encoding="utf-8")
    return folder


def write_pairs(file: Path) -> Path:
    """A table of pairs, without quoting."""
    rows = ["\t".join(map(str, pair)) for pair in (("score", "sentence1", "sentence2"), *_PAIRS)]
    file.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return file
