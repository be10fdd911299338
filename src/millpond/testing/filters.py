"""Rows of metadata and filters on them, with the rows that each finds: in every sink and every index the same."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

_BIG = 1 << 53

FACETED: Sequence[dict[str, Any]] = (
    {"lang": "de", "n": 1, "tags": ["x", "y"], "ok": True, "f": 1.5, "a b": "s", "a.b": "dot", "day": "2024-01-31"},
    {"lang": "en", "n": 1.0, "tags": "x", "ok": False, "f": 2, "a": {"b": "nested"}, "day": "2024-02-29T12:00:00"},
    {"lang": 'say "ä\\n"\n😀', "n": 2, "ok": True, "in": "word", "é": "e", "day": "unknown", "f": -0.25},
    {"n": "1", "lang": "it's", "f": [10, 20.5], "day": "2024-02-01T00:30:00+02:00", "a b": 7, "é": [5, "e"]},
    {"f": _BIG + 1, "n": True, "day": ["1999-12-31", "2024-03-01T00:00:00.5Z"], "a.b": 7, "it's": 7, 'q"\\': 7},
    {"f": "2", "n": None, "day": "2023-02-30", "a": {"b": 1.5}, "in": 7, "many": [0, 0, 0, 0, 0, 0, 9], "": 7},
)
"""Metadata of the rows 0 to 5."""

EQUALS: Sequence[tuple[dict[str, Any], str]] = (
    ({}, "012345"),
    ({"lang": "de"}, "0"),
    ({"lang": ["de", "en", "fr"]}, "01"),
    ({"lang": ['say "ä\\n"\n😀', "it's", "DE"]}, "23"),
    ({"n": 1}, "01"),
    ({"n": 1.0}, "01"),
    ({"n": "1"}, "3"),
    ({"n": True}, "4"),
    ({"n": [2, "1"]}, "23"),
    ({"f": [1.5, 2.0]}, "01"),
    ({"ok": True}, "02"),
    ({"tags": "x"}, "01"),
    ({"tags": ["y", "z"]}, "0"),
    ({"ok": True, "n": 2}, "2"),
    ({"ok": False, "n": 2}, ""),
    ({"a b": "s"}, "0"),
    ({"a.b": "dot"}, "0"),
    ({"in": "word"}, "2"),
    ({"é": "e"}, "23"),
    ({"day": date(2024, 1, 31)}, "0"),
    ({"missing": 1}, ""),
)
"""Filters of values, and the rows that they find."""

RANGES: Sequence[tuple[dict[str, Any], str]] = (
    ({"n": {"gte": 1}}, "012"),
    ({"n": {"gt": 1}}, "2"),
    ({"n": {"lt": 2}}, "01"),
    ({"n": {"lte": 1.0}}, "01"),
    ({"n": {"gte": 0.5, "lte": 1.5}}, "01"),
    ({"n": {"gt": 0, "lt": 1}}, ""),
    ({"f": {"gt": -1, "lt": 0}}, "2"),
    ({"f": {"gt": -0.5, "lt": 1.75}}, "02"),
    ({"f": {"gte": 15, "lt": 20.5}}, ""),
    ({"f": {"gt": 10, "lte": 20.5}}, "3"),
    ({"f": {"gt": _BIG}}, "4"),
    ({"f": {"gt": _BIG + 1}}, ""),
    ({"f": {"gte": _BIG + 1, "lte": _BIG + 1}}, "4"),
    ({"f": {"lt": _BIG + 1}}, "0123"),
    ({"f": {"gt": -1e300, "lt": 1e300}}, "01234"),
    ({"ok": {"gte": 0}}, ""),
    ({"lang": {"gte": 0}}, ""),
    ({"a": {"gte": 0}}, ""),
    ({"a b": {"gte": 7}}, "3"),
    ({"a.b": {"gte": 7}}, "4"),
    ({"in": {"gte": 7}}, "5"),
    ({"it's": {"lte": 7}}, "4"),
    ({"é": {"lt": 7}}, "3"),
    ({"many": {"gt": 1}}, "5"),
    ({"many": {"gt": 9}}, ""),
    ({"missing": {"gt": 1}}, ""),
    ({"lang": "de", "n": {"lte": 2}}, "0"),
    ({"f": {"gt": 1}, "n": {"lt": 5}}, "01"),
    ({"f": {"gt": 1}, "tags": ["y", "z"]}, "0"),
    ({"day": {"gte": "2024-01-31"}}, "0134"),
    ({"day": {"gt": "2024-01-31"}}, "134"),
    ({"day": {"lt": "2024-02-01"}}, "034"),
    ({"day": {"gte": date(2024, 1, 31), "lt": datetime(2024, 1, 31, 22, 30)}}, "0"),
    ({"day": {"gte": "2024-01-31T22:30:00Z", "lte": "2024-01-31T22:30:00Z"}}, "3"),
    ({"day": {"gt": datetime(2024, 2, 29, 11, tzinfo=UTC), "lte": "2024-02-29T12:00:00"}}, "1"),
    ({"day": {"gt": datetime(2024, 3, 1, tzinfo=UTC)}}, "4"),
    ({"day": {"lte": datetime(2000, 1, 1, tzinfo=timezone(timedelta(hours=24, minutes=-1)))}}, "4"),
    ({"day": {"gt": "0001-01-01", "lt": "9999-12-31"}}, "0134"),
    ({"n": {"gt": "2024-01-31"}}, ""),
)
"""Filters of ranges, and the rows that they find."""

REFUSED: Sequence[tuple[object, str]] = (
    ({}, "is an empty dict"),
    ({"from": 1}, "has the word 'from'; a range has gt, gte, lt and lte"),
    ({"gte": 1, 7: 2}, "has the word 7; a range has gt, gte, lt and lte"),
    ({"gt": 1, "gte": 2}, "has 'gt' and 'gte'; pass one of them"),
    ({"lt": 1, "lte": 2}, "has 'lt' and 'lte'; pass one of them"),
    ({"gte": 2, "lt": "2024-01-31"}, "has a number and a date"),
    ({"gte": 2, "lt": 2}, "has nothing between its bounds"),
    ({"gt": 2.5, "lte": 2}, "has nothing between its bounds"),
    ({"gt": "2024-01-31", "lt": "2024-01-30T23:59:59"}, "has nothing between its bounds"),
    ({"gt": True}, r"\['gt'\]=True is no bound; pass a number"),
    ({"gt": None}, r"\['gt'\]=None is no bound"),
    ({"gt": [1]}, r"\['gt'\]=\[1\] is no bound"),
    ({"gt": "soon"}, r"\['gt'\]='soon' is no bound"),
    ({"gt": "2023-02-30"}, r"\['gt'\]='2023-02-30' is no bound"),
    ({"gt": float("nan")}, r"\['gt'\]=nan"),
    ({"lt": float("inf")}, r"\['lt'\]=inf"),
    ([{"gt": 1}], "holds {'gt': 1}; pass a str, int, bool, float or a list of these, a range like"),
)
"""What is no condition, and words of the message."""
