"""The tests' own gate in front of work notices a blocked event loop."""

from __future__ import annotations

import asyncio

from tests.gates import LoopGate


async def test_work_beside_the_loop_passes():
    gate = LoopGate()
    work = gate.hold(lambda number: number + 1)
    assert await gate.run(asyncio.to_thread(work, 1)) == 2
    assert (len(gate.calls), gate.blocked) == (1, False)


async def test_work_on_the_loop_is_noticed():
    gate = LoopGate(seconds=0.05)
    work = gate.hold(lambda number: number + 1)

    async def call() -> int:
        return work(1)

    assert await gate.run(call()) == 2
    assert (len(gate.calls), gate.blocked) == (1, True)
