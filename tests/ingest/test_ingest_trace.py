"""RunTrace: stages, the time series, the samples; from several threads, and in constant memory."""

import threading

import numpy as np
import pytest

from millpond.ingest import RunTrace


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_a_stage_sums_its_calls_and_counts_one_that_raises():
    clock = Clock()
    trace = RunTrace(clock=clock)
    for seconds in (1.0, 2.0, 4.0):
        with trace.stage("write", rows=10):
            clock.now += seconds
    with pytest.raises(ValueError, match="refused"):
        _refused_write(trace, clock)
    trace.note_stage("read", 0.5, 7)
    write = trace.stages["write"]
    assert list(trace.stages) == ["write", "read"]
    assert (write.calls, write.rows, write.seconds, write.longest) == (4, 33, 15.0, 8.0)
    assert write.p50 == pytest.approx(2, rel=0.05) and write.p99 == 8.0
    assert write.rows_per_call == pytest.approx(10, rel=0.05)


def _refused_write(trace, clock):
    with trace.stage("write") as call:
        call.rows = 3
        clock.now += 8.0
        raise ValueError("refused")


def test_samples_are_thinned_and_span_the_whole_night():
    clock = Clock()
    trace = RunTrace(clock=clock)
    for step in range(100_000):  # 10,000 s
        trace.sample({"read": step}, {"write": step % 3})
        clock.now += 0.1
    trace.sample({"read": 100_000}, last=True)
    samples = trace.samples
    seconds = np.array([one.seconds for one in samples])
    assert 900 <= len(samples) <= 2001
    assert seconds[0] == 0 and seconds[-1] == pytest.approx(10_000) and (np.diff(seconds) > 0).all()
    assert np.diff(seconds[:-1]).max() < 60
    assert all(one.counts["read"] == round(one.seconds * 10) for one in samples)


def test_the_sample_of_vectors_is_uniform_over_the_run_and_repeats_with_its_seed():
    means = []
    for seed in range(20):
        trace = RunTrace(vectors=50, seed=seed)
        again = RunTrace(vectors=50, seed=seed)
        for start in range(0, 5000, 250):
            rows = np.arange(start, start + 250, dtype=np.float32)[:, None] * np.ones((1, 3), np.float32)
            trace.note_vectors(rows)
            again.note_vectors(rows)
        kept = trace.vectors
        assert kept.shape == (50, 3) and len(set(kept[:, 0].tolist())) == 50
        np.testing.assert_array_equal(kept, again.vectors)
        means.append(kept[:, 0].mean())
    # Mean 2499.5; the standard error over 40 runs of 50 is 32.
    assert abs(np.mean(means) - 2499.5) < 180


def test_reasons_and_failures_are_bounded():
    trace = RunTrace()
    for number in range(100):
        trace.note_retry(f"reason {number}")
        trace.note_retry("reason 0")
        trace.note_failure(f"record {number}", "x" * 100_000)
    assert sum(trace.retries.values()) == 200 and trace.retries["reason 0"] == 101
    assert len(trace.retries) == 21 and trace.retries["other reasons"] == 80
    assert [where for where, _ in trace.failures] == [f"record {number}" for number in range(20)]
    assert all(len(reason) < 600 for _, reason in trace.failures)


def test_threads_lose_no_count():
    trace = RunTrace(vectors=64)

    def work():
        for _ in range(100):
            with trace.stage("write", rows=2):
                pass
            trace.note_texts([3, 4])
            trace.note_vectors(np.ones((4, 2), np.float32))
            trace.note_retry("503")
            trace.sample({"read": 1})

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (trace.stages["write"].calls, trace.stages["write"].rows) == (800, 1600)
    assert trace.chars.count == 1600 and trace.chars.total == 5600
    assert trace.retries == {"503": 800} and trace.vectors.shape == (64, 2)
