"""A collection is kept equal to a folder that changes, and only what changed is embedded."""

import os
import shutil
import threading
import urllib.error
import urllib.request

import pytest
from tests.ingest.crashes import CrashingSink, Words, memory
from tests.ingest.watching import folder_source, watching

from millpond.errors import JournalError, SinkError, SinkUnavailableError

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no inotify on this system")


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "f"
    (root / "sub").mkdir(parents=True)
    for name in ("a.txt", "b.txt", "sub/c.txt", "sub/d.txt"):
        (root / name).write_text(f"text of {name}")
    (root / "m.md").write_text("# One\none\n\n# Two\ntwo\n")
    return root


def texts(root):
    """What the collection should hold."""
    from millpond.ingest import Record, read

    return {record.id: record.text for record in read(root) if isinstance(record, Record) and record.text.strip()}


def test_what_is_saved_changed_and_removed_is_followed(folder, engine, tmp_path):
    with watching(folder, engine, tmp_path / "j") as watcher:
        watcher.until_texts(texts(folder))
        before = len(watcher.written)
        (folder / "a.txt").write_text("another text")
        (folder / "new.txt").write_text("a new one")
        (folder / "m.md").write_text("# One\none\n\n# Two\nchanged\n")
        watcher.until_texts(texts(folder))
        assert sorted(watcher.written[before:]) == ["a.txt", "m.md#Two", "new.txt"]
        (folder / "b.txt").unlink()
        (folder / "m.md").write_text("# One\none\n")
        watcher.until_texts(texts(folder))
        watcher.until_idle()
        assert "m.md#Two" not in watcher.texts and len(watcher.written) == before + 3
        assert watcher.state.now()["deleted"] == 2
    assert watcher.report.written == 9 and watcher.report.deleted == 2


def test_folders_that_come_and_go_are_followed(folder, engine, tmp_path):
    with watching(folder, engine, tmp_path / "j") as watcher:
        os.rename(folder / "sub", folder / "moved")
        watcher.until_texts(texts(folder))
        assert "moved/c.txt" in watcher.texts and "sub/c.txt" not in watcher.texts
        (folder / "moved" / "deep" / "er").mkdir(parents=True)
        (folder / "moved" / "deep" / "er" / "e.txt").write_text("deep")
        watcher.until_texts(texts(folder))
        shutil.move(folder / "moved", tmp_path / "outside")
        watcher.until_texts(texts(folder))
        shutil.move(tmp_path / "outside", folder / "back")
        watcher.until_texts(texts(folder))
        assert "back/deep/er/e.txt" in watcher.texts


def test_what_is_back_within_the_grace_is_neither_deleted_nor_written_again(folder, engine, tmp_path):
    with watching(folder, engine, tmp_path / "j", grace=2.0) as watcher:
        before, every = len(watcher.written), texts(folder)
        for name in ("a.txt", "sub"):  # as git checkout, and an editor that writes another file and renames it
            os.rename(folder / name, tmp_path / "away")
            watcher.until(lambda: watcher.state.waiting > 0)
            os.rename(tmp_path / "away", folder / name)
            watcher.until(lambda: watcher.state.waiting == 0)
        (folder / "a.txt").write_text("")  # truncated, and not yet written
        watcher.until(lambda: watcher.state.waiting == 1)
        (folder / "a.txt").write_text(every["a.txt"])
        watcher.until(lambda: watcher.state.waiting == 0)
        (folder / "a.txt~").write_text(every["a.txt"])
        os.replace(folder / "a.txt~", folder / "a.txt")
        watcher.until_idle()
        assert watcher.texts == every and len(watcher.written) == before and watcher.state.now()["deleted"] == 0


def test_a_file_that_is_being_written_is_read_when_it_rests(folder, engine, tmp_path, monkeypatch):
    monkeypatch.setattr(folder_source, "QUIET_SECONDS", 1.0)
    with watching(folder, engine, tmp_path / "j") as watcher:
        before, pause = len(watcher.written), threading.Event()
        with (folder / "slow.txt").open("w") as file:
            for number in range(15):
                file.write(f"line {number}\n")
                file.flush()
                pause.wait(0.1)
        watcher.until_texts(texts(folder))
        assert watcher.written[before:] == ["slow.txt"]
        for number in range(50):
            (folder / "a.txt").write_text(f"rewritten {number}")
        watcher.until_texts(texts(folder))
        assert watcher.written[before + 1 :] == ["a.txt"]


@pytest.mark.parametrize("poll", [None, 0.1], ids=["notices", "poll"])
def test_a_name_that_is_no_utf8_does_not_make_the_watcher_deaf(poll, folder, engine, tmp_path):
    bad = os.fsencode(folder) + b"/bad\xff.txt"
    with watching(folder, engine, tmp_path / "j", poll=poll) as watcher:
        for number in range(2):
            with open(bad, "w") as file:
                file.write(f"nobody can name it {number}")
            watcher.until(lambda count=number + 1: watcher.state.now()["failed"] >= count)
            (folder / "a.txt").write_text(f"seen after it {number}")
            watcher.until_texts(texts(folder))
        os.unlink(bad)
        (folder / "b.txt").write_text("seen when it is gone")
        watcher.until_texts(texts(folder))


def test_notices_that_were_lost_are_made_up_for_by_a_look(folder, engine, tmp_path, monkeypatch):
    monkeypatch.setattr(folder_source, "_SETTLE_SECONDS", 0.5)
    lost = folder_source.FolderSource._note

    def note(self, paths):
        lost(self, [path for path in paths if not path.endswith("lost.txt")])

    monkeypatch.setattr(folder_source.FolderSource, "_note", note)
    with watching(folder, engine, tmp_path / "j") as watcher:
        (folder / "lost.txt").write_text("nobody said so")
        (folder / "a.txt").write_text("seen")
        watcher.until_texts(texts(folder))
        assert watcher.texts["lost.txt"] == "nobody said so"


@pytest.mark.parametrize("poll", [None, 0.2], ids=["notices", "poll"])
def test_a_gitignore_that_changes_is_followed(folder, engine, tmp_path, poll):
    with watching(folder, engine, tmp_path / "j", poll=poll) as watcher:
        (folder / ".gitignore").write_text("sub/\n")
        watcher.until_texts(texts(folder))
        assert "sub/c.txt" not in watcher.texts
        (folder / ".gitignore").unlink()
        watcher.until_texts(texts(folder))
        assert "sub/c.txt" in watcher.texts


def test_a_file_that_cannot_be_read_keeps_its_row_and_is_told(folder, engine, tmp_path):
    with watching(folder, engine, tmp_path / "j", grace=2.0) as watcher:
        every = texts(folder)
        (folder / "a.txt").write_bytes(b"caf\xe9")
        watcher.until(lambda: watcher.state.now()["failed"] == 1)
        watcher.until_idle()
        assert watcher.texts == every and "not UTF-8" in watcher.state.last_error
        assert "a.txt" in (tmp_path / "j.dead.jsonl").read_text()
        (folder / "m.md").unlink()
        watcher.until(lambda: watcher.state.waiting == 2)
        (folder / "m.md").write_bytes(b"# caf\xe9\n")  # back, and broken
        watcher.until(lambda: watcher.state.waiting == 0)
        assert watcher.texts == every
        (folder / "a.txt").write_text("mended")
        watcher.until_texts({**every, "a.txt": "mended"})


def test_an_outage_is_waited_for(folder, engine, tmp_path):
    client, down = memory(), threading.Event()

    class Sink(CrashingSink):
        def _upsert(self, batch):
            if down.is_set():
                raise SinkUnavailableError("Memory does not answer")
            super()._upsert(batch)

        def _delete(self, which, manifest):
            if down.is_set():
                raise SinkUnavailableError("Memory does not answer")
            super()._delete(which, manifest)

    with watching(folder, engine, tmp_path / "j", client, open_sink=lambda: Sink(client)) as w:
        down.set()
        (folder / "a.txt").write_text("during the outage")
        w.until(lambda: w.state.now()["retried"] > 3)
        assert w.state.unanswered and w.state.age() > 0 and "does not answer" in w.state.last_error
        (folder / "b.txt").unlink()
        (folder / "later.txt").write_text("later")
        down.clear()
        w.until_texts(texts(folder))
        w.until_idle()
        assert not w.state.unanswered


def test_too_many_deletions_are_held_and_go_with_a_larger_share(folder, engine, tmp_path, caplog):
    client = memory()
    with watching(folder, engine, tmp_path / "j", client, sync_max=0.5) as watcher:
        every = texts(folder)
        for name in ("a.txt", "b.txt", "m.md", "sub/c.txt"):
            (folder / name).unlink()
        watcher.until(lambda: bool(watcher.state.held))
        assert watcher.texts == every and "5 of 6 rows would be deleted" in watcher.state.held
        (folder / "a.txt").write_text(every["a.txt"])
        (folder / "m.md").write_text("# One\none\n\n# Two\ntwo\n")
        watcher.until_texts(texts(folder))
        watcher.until(lambda: not watcher.state.held)
    for name in ("a.txt", "m.md"):
        (folder / name).unlink()
    with pytest.raises(SinkError, match="sync_max"), watching(folder, engine, tmp_path / "j", client, sync_max=0.5):
        pass
    with watching(folder, engine, tmp_path / "j", client, sync_max=1.0) as watcher:
        assert watcher.texts == texts(folder)


def test_a_folder_that_is_away_loses_no_row(folder, engine, tmp_path):
    with watching(folder, engine, tmp_path / "j") as watcher:
        every = texts(folder)
        os.rename(folder, tmp_path / "away")
        pause = threading.Event()
        pause.wait(1.5)
        assert watcher.texts == every
        (tmp_path / "away" / "a.txt").write_text("changed elsewhere")
        os.rename(tmp_path / "away", folder)
        watcher.until_texts({**every, "a.txt": "changed elsewhere"})
        (folder / "a.txt").write_text("changed again")
        watcher.until_texts({**every, "a.txt": "changed again"})


def test_there_is_one_watcher_of_a_collection(folder, engine, tmp_path):
    with (
        watching(folder, engine, tmp_path / "j"),
        pytest.raises(JournalError, match="another process watches .* with the journal"),
        watching(folder, engine, tmp_path / "j"),
    ):
        pass
    with watching(folder, engine, tmp_path / "j"):
        pass


def test_the_next_watcher_writes_only_what_changed_meanwhile(folder, engine, tmp_path):
    client = memory()
    with watching(folder, engine, tmp_path / "j", client):
        pass
    (folder / "a.txt").write_text("meanwhile")
    (folder / "b.txt").unlink()
    with watching(folder, engine, tmp_path / "j", client) as watcher:
        watcher.until_texts(texts(folder))
        assert watcher.written == ["a.txt"]


def test_chunks_of_a_file_that_shrinks_or_goes_are_deleted(folder, engine, tmp_path):
    client = memory()
    (folder / "long.txt").write_text(" ".join(f"word{number}" for number in range(20)))
    with watching(folder, engine, tmp_path / "j", client, chunking=Words(3)) as watcher:
        assert sum(record.id == "long.txt" for record, _ in client["docs"][1].values()) == 7
        (folder / "long.txt").write_text("one two three four")
        watcher.until(lambda: sum(record.id == "long.txt" for record, _ in list(client["docs"][1].values())) == 2)
        (folder / "long.txt").unlink()
        watcher.until(lambda: "long.txt" not in watcher.texts)
        assert all(record.id != "long.txt" for record, _ in client["docs"][1].values())


def test_the_collection_is_opened_again_after_many_passes_and_after_an_outage_then(
    folder, engine, tmp_path, monkeypatch
):
    monkeypatch.setattr("millpond.ingest.watch.collection._PASSES_PER_SINK", 1)
    monkeypatch.setattr("millpond.ingest.watch.watcher._FIRST_WAIT", 0.05)
    client, opened = memory(), []

    def open_sink():
        opened.append(True)
        if len(opened) in (3, 4):
            raise SinkUnavailableError("Memory does not answer a connection")
        return CrashingSink(client)

    with watching(folder, engine, tmp_path / "j", client, open_sink=open_sink) as watcher:
        for number in range(4):
            (folder / "a.txt").write_text(f"change {number}")
            watcher.until_texts(texts(folder))
        watcher.until(lambda: len(opened) >= 5)
        (folder / "b.txt").unlink()
        watcher.until_texts(texts(folder))
        assert "does not answer a connection" in watcher.state.last_error


def test_metrics_are_those_of_prometheus(folder, engine, tmp_path):
    parser = pytest.importorskip("prometheus_client.parser")
    from millpond.ingest.watch import metrics

    ports = []
    real = metrics.ThreadingHTTPServer

    class Server(real):
        def __init__(self, *given):
            super().__init__(*given)
            ports.append(self.server_port)

    metrics.ThreadingHTTPServer = Server
    try:
        with watching(folder, engine, tmp_path / "j", metrics=("127.0.0.1", 0)) as watcher:
            watcher.until_idle()
            (folder / "b.txt").unlink()
            watcher.until(lambda: watcher.state.now()["deleted"] == 1)

            def get(path):
                with urllib.request.urlopen(f"http://127.0.0.1:{ports[0]}{path}", timeout=10) as answer:
                    return answer.read().decode()

            families = {each.name: each for each in parser.text_string_to_metric_families(get("/metrics"))}
            values = {name: each.samples[0].value for name, each in families.items()}
            assert values["millpond_watch_rows_written"] == 6 and values["millpond_watch_rows_deleted"] == 1
            assert values["millpond_watch_oldest_pending_seconds"] == 0
            assert {each.type for each in families.values()} == {"counter", "gauge"}
            assert '"status": "ok"' in get("/health")
            watcher.state.held = "too many"
            with pytest.raises(urllib.error.HTTPError, match="503"):
                get("/health")
            watcher.state.held = ""
    finally:
        metrics.ThreadingHTTPServer = real
