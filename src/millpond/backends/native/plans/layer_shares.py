"""LayerShares: the mean of several layers' states as the result of a plan, in either backend."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence


class LayerShares:
    """The part of a plan's builder that a family tells where its layers end."""

    def __init__(self, shares: Sequence[float]) -> None:
        """The result is the sum of so much of each layer's states, the embeddings first; empty: the last layer's."""
        self._shares, self._ended = shares, 0

    def end_layer(self) -> None:
        """Here the states are those of a layer: of the embeddings at first, then of one layer after the other."""
        layer, self._ended = self._ended, self._ended + 1
        begins, ends = not any(self._shares[:layer]), layer == len(self._shares) - 1
        if layer < len(self._shares) and (self._shares[layer] or ends) and not (begins and ends):
            self.blend(self._shares[layer], begins=begins, ends=ends)

    @abstractmethod
    def blend(self, share: float, *, begins: bool = False, ends: bool = False) -> None:
        """``branch += share * states``, or ``=`` if it ``begins`` so; where it ``ends`` the states take the branch."""
