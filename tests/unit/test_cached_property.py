"""A cached property is computed on first use, and no thread waits for another object's."""

import threading

from millpond.support.cached_property import cached_property


class Batch:
    """Counts how often its property is computed, which may wait for a barrier."""

    def __init__(self, barrier: threading.Barrier | None = None) -> None:
        self.computed = 0
        self.barrier = barrier

    @cached_property
    def rows(self) -> list[int]:
        """Rows."""
        self.computed += 1
        if self.barrier is not None:
            self.barrier.wait()
        return []


def read_in_two_threads(first: Batch, second: Batch) -> list[list[int]]:
    rows: list[list[int]] = []
    threads = [threading.Thread(target=lambda batch=batch: rows.append(batch.rows)) for batch in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return rows


def test_the_value_is_computed_once_and_kept() -> None:
    batch = Batch()
    assert batch.rows is batch.rows
    assert batch.computed == 1
    assert Batch.rows.__doc__ == "Rows."


def test_two_objects_are_computed_at_once() -> None:
    """With a lock of the class, the second one is never begun: the barrier breaks."""
    barrier = threading.Barrier(2, timeout=30)
    first, second = Batch(barrier), Batch(barrier)
    assert len(read_in_two_threads(first, second)) == 2
    assert first.computed == second.computed == 1


def test_threads_that_compute_one_value_at_once_get_the_same_object() -> None:
    batch = Batch(threading.Barrier(2, timeout=30))
    first, second = read_in_two_threads(batch, batch)
    assert first is second
    assert batch.computed == 2
