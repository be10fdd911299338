"""KernelCheck: what a kernel gave for random numbers, beside a reference in float32."""

from __future__ import annotations

from dataclasses import dataclass

# An attention kernel is right from this similarity of every head on: the largest errors of thousands of rows are 0.0007
# in bfloat16 with a random bias, and a window that is wider by one is off by more than 0.01.
LEAST = 0.997


@dataclass(frozen=True, kw_only=True)
class KernelCheck:
    """One comparison."""

    kernel: str  # what was compared, by its name in `millpond env`
    call: str  # what it computed, for people
    similarity: float | None = None  # least over all rows; `None` if it gave no result. See :func:`similarity`.
    least: float = LEAST  # the similarity that it needs
    obstacle: str | None = None  # why there is no result: it cannot run here, or it raised
    raised: bool = False  # whether it raised
    seconds: float = 0.0  # time that it took, the first call's preparations included

    @property
    def wrong(self) -> bool:
        """Whether it raised, or its result is not the expected one."""
        return self.raised or (self.similarity is not None and not self.similarity >= self.least)

    @property
    def finding(self) -> str:
        """What was found, in words."""
        if self.raised:
            return f"raises here ({self.obstacle})"
        if self.similarity is None:
            return f"did not run ({self.obstacle})"
        if self.wrong:
            return f"gives other results here than float32 (similarity {self.similarity:.4f}, right from {self.least})"
        return f"agrees (similarity {self.similarity:.6f})"
