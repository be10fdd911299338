"""Comparison: MaxSim of pairs, computed while the token matrices of their texts arrive."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from millpond.late_interaction.scoring.similarity import maxsim
from millpond.support.fork import computing
from millpond.tasks import ROLES, Role
from millpond.values.inputs import Pair
from millpond.vectors import matryoshka
from millpond.vectors.ragged import Ragged

Matrix = npt.NDArray[np.float32]  # [tokens, d]


class Comparison:
    """The scores of pairs whose queries and documents are two calls, run in the same batches.

    A batch's matrices are compared and forgotten: a query is kept until its last document was compared, and a document
    is kept only if its query is still to come. So a thousand documents of one query never are in memory together.
    The slots of either side are the slots of its :class:`~millpond.engine.schedule.call.Call`: its distinct texts.
    """

    def __init__(self, pairs: Sequence[Pair], *, width: int, normalize: bool, mean: bool) -> None:
        self._width, self._normalize, self._mean = width, normalize, mean
        index_of: dict[tuple[int, int], int] = {}
        sides = zip(_slots(pair.query for pair in pairs), _slots(pair.document for pair in pairs), strict=True)
        self._index = [index_of.setdefault(slots, len(index_of)) for slots in sides]  # [pairs] of the distinct pair
        self._slot_of: dict[Role, list[int]] = {
            role: [slots[side] for slots in index_of] for side, role in enumerate(ROLES)
        }
        self._scores = np.empty(len(index_of), dtype=np.float32)  # [distinct pairs]
        self._pairs_of: dict[Role, dict[int, list[int]]] = {role: {} for role in ROLES}  # by slot: its distinct pairs
        for role in ROLES:
            for index, slot in enumerate(self._slot_of[role]):
                self._pairs_of[role].setdefault(slot, []).append(index)
        # By slot: the number of its pairs that are still to be compared.
        self._left = {role: {slot: len(own) for slot, own in self._pairs_of[role].items()} for role in ROLES}
        self._kept: dict[Role, dict[int, Matrix]] = {role: {} for role in ROLES}
        self._over = False
        self._lock = threading.Lock()

    def take(self, role: Role, slots: Sequence[int], matrices: Sequence[Matrix]) -> None:
        """Compare matrices of one side, ``[tokens, width or more]`` by slot, with the other side's that are here.

        Runs in the thread that ran the batch.
        """
        rows = Ragged.from_matrices(matrices, width=self._width)  # a copy, since the batch's rows are shared
        cut = matryoshka.cut(rows.flat, self._width, normalize=self._normalize, own=True)
        arrived = Ragged(flat=cut, offsets=rows.offsets)
        for query, indices, documents in self._complete(role, dict(zip(slots, arrived, strict=True))):
            whole = role == "document" and len(documents) == len(arrived)  # then in the same order
            with computing():
                scores = maxsim(
                    Ragged.from_matrices([query], width=self._width),
                    arrived if whole else Ragged.from_matrices(documents, width=self._width),
                )[0]
            self._scores[indices] = scores / (len(query) if self._mean else 1)

    def scores(self) -> npt.NDArray[np.float32]:
        """The score of each pair, ``[pairs]``; both calls must be over."""
        return self._scores[self._index]

    def drop(self) -> None:
        """Forget the matrices: the calls are over, perhaps early."""
        with self._lock:
            self._over = True
            self._kept = {role: {} for role in ROLES}

    def _complete(self, role: Role, arrived: dict[int, Matrix]) -> list[tuple[Matrix, list[int], list[Matrix]]]:
        """For each query of pairs that are complete now: its matrix, the pairs' indices, and their documents."""
        other: Role = "document" if role == "query" else "query"
        complete: dict[int, tuple[Matrix, list[int], list[Matrix]]] = {}
        with self._lock:  # several threads bring matrices; one of two partners finds the other
            if self._over:
                return []
            for slot, matrix in arrived.items():
                for index in self._pairs_of[role][slot]:
                    partner_slot = self._slot_of[other][index]
                    partner = self._kept[other].get(partner_slot)
                    if partner is None:
                        continue
                    query, document = (matrix, partner) if role == "query" else (partner, matrix)
                    _, indices, documents = complete.setdefault(self._slot_of["query"][index], (query, [], []))
                    indices.append(index)
                    documents.append(document)
                    self._left[role][slot] -= 1
                    self._left[other][partner_slot] -= 1
                    if self._left[other][partner_slot] == 0:
                        del self._kept[other][partner_slot]
                if self._left[role][slot]:
                    self._kept[role][slot] = matrix.copy()  # alone: a view would keep the whole batch
        return list(complete.values())


def _slots(texts: Iterable[str]) -> list[int]:
    """Each text's number, counted in the order in which distinct texts first occur."""
    slot_of: dict[str, int] = {}
    return [slot_of.setdefault(text, len(slot_of)) for text in texts]
