"""Cores that engines share, and the quota of a control group."""

import threading

import pytest

from millpond.engine.execute.cores import Cores, process_cores, usable


def test_a_core_is_claimed_once():
    cores = Cores(2)
    assert [cores.claim(wait=False) for _ in range(3)] == [True, True, False]
    cores.release()
    assert cores.free == 1
    assert cores.claim(wait=False)


def test_widening_takes_what_is_free():
    cores = Cores(4)
    cores.claim()
    assert cores.widen(2) == 2
    assert cores.widen(2) == 1
    assert cores.widen(-1) == 0
    cores.release(4)
    assert cores.free == 4


def test_a_claim_waits_for_a_release():
    cores = Cores(1)
    cores.claim()
    got = []
    thread = threading.Thread(target=lambda: got.append(cores.claim()))
    thread.start()
    assert not got
    cores.release()
    thread.join(60)
    assert got == [True]
    assert cores.free == 0


def test_a_process_has_one_count():
    assert process_cores() is process_cores()
    assert process_cores().count == usable()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "max 100000"}, 64),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
        ({"cpu.max": "nonsense"}, 64),
        ({}, 64),
    ],
)
def test_a_quota_limits_the_cores(files, expected, tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)), raising=False)
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert usable(tmp_path, tmp_path / "none") == expected


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/jobs/mine", {"jobs/mine/cpu.max": "200000 100000", "cpu.max": "max 100000"}, 2),
        ("0::/jobs/mine", {"jobs/mine/cpu.max": "max 100000", "jobs/cpu.max": "300000 100000"}, 3),
        ("0::/jobs/mine", {"jobs/mine/cpu.max": "400000 100000", "jobs/cpu.max": "300000 100000"}, 3),
        ("0::/jobs/mine", {"jobs/other/cpu.max": "100000 100000"}, 64),
        ("0::/../../elsewhere", {"cpu.max": "500000 100000"}, 5),
        (
            "4:memory:/m\n3:cpu,cpuacct:/jobs",
            {"cpu/jobs/cpu.cfs_quota_us": "200000", "cpu/jobs/cpu.cfs_period_us": "100000"},
            2,
        ),
    ],
)
def test_the_limits_of_the_groups_above_hold_as_well(own, files, expected, tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)), raising=False)
    for name, content in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(content)
    (tmp_path / "own").write_text(own + "\n")
    assert usable(tmp_path / "root", tmp_path / "own") == expected
