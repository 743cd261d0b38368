"""The models folder: what counts as installed, what is checked when, what is removed."""

import hashlib
import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from edge_agent.errors import ModelError, ModelFileError
from edge_agent.models.catalog import CatalogEntry, Licence, LocalSource, Template, TemplateKind
from edge_agent.models.locks import held_now
from edge_agent.models.store import (
    Examined,
    FileFault,
    ModelPresence,
    ModelStore,
    examine,
    in_megabytes,
)
from tests.fakes.vanishing import leave_name_of_nothing, remove_when_listed

CONTENT = b"GGUF" + bytes(range(256)) * 8
SHA256 = hashlib.sha256(CONTENT).hexdigest()


def entry_of(
    content: bytes | None = CONTENT, file: str = "tiny.gguf", name: str = "tiny"
) -> CatalogEntry:
    return CatalogEntry(
        name=name,
        family="tiny",
        parameters_billions=0.001,
        quantisation="Q4_0",
        context_tokens=128,
        template=Template(TemplateKind.RAW),
        licence=Licence("Apache-2.0"),
        file=file,
        size_bytes=None if content is None else len(content),
        sha256=None if content is None else hashlib.sha256(content).hexdigest(),
        sources=(LocalSource("nowhere"),),
    )


ENTRY = entry_of()
DERIVED = entry_of(None, "made.gguf", "made")


@pytest.fixture
def store(tmp_path):
    store = ModelStore(tmp_path / "models")
    store.prepare()
    return store


def install(store: ModelStore, entry: CatalogEntry = ENTRY, content: bytes = CONTENT) -> Path:
    unfinished = store.unfinished_path(entry, "part")
    unfinished.write_bytes(content)
    found = examine(unfinished, entry.sha256, entry.size_bytes)
    assert isinstance(found, Examined)
    return store.install(entry, unfinished, found, "a test")


def tamper(path: Path) -> None:
    """Change one byte and nothing that a look from outside would see."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(100)
        file.write(b"\x00\xff")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_an_installed_file_is_whole_named_and_described(store):
    path = install(store)
    assert path == store.path_of(ENTRY)
    assert path.read_bytes() == CONTENT
    state = store.state_of(ENTRY)
    assert state.presence is ModelPresence.INSTALLED
    assert state.sidecar is not None
    assert (state.sidecar.sha256, state.sidecar.source) == (SHA256, "a test")
    assert sorted(item.name for item in store.folder.iterdir()) == ["tiny.gguf", "tiny.gguf.json"]


def test_first_use_reads_the_file_back_and_later_uses_only_look_at_it(store):
    """M6: what lost power left behind is found before an engine loads it."""
    path = install(store)
    tamper(path)
    with pytest.raises(ModelFileError, match=r"SHA-256.*instead of.*models pull tiny"):
        store.ensure_verified(ENTRY)

    install(store)
    assert store.ensure_verified(ENTRY) == path
    tamper(path)  # after a first use, size and time are trusted: that is the bargain
    assert store.ensure_verified(ENTRY) == path


def test_a_file_whose_time_changed_is_hashed_again(store):
    """M6."""
    path = install(store)
    store.ensure_verified(ENTRY)
    os.utime(path, ns=(1, 1))
    assert store.state_of(ENTRY).presence is ModelPresence.UNVERIFIED
    store.ensure_verified(ENTRY)
    assert store.state_of(ENTRY).presence is ModelPresence.INSTALLED
    tamper(path)
    os.utime(path, ns=(2, 2))
    with pytest.raises(ModelFileError, match="SHA-256"):
        store.ensure_verified(ENTRY)
    assert path.exists()


def test_a_file_put_there_by_hand_is_verified_on_first_use(store):
    """M6: how the deployment role brings model files."""
    store.path_of(ENTRY).write_bytes(CONTENT)
    assert store.state_of(ENTRY).presence is ModelPresence.UNVERIFIED
    store.ensure_verified(ENTRY)
    state = store.state_of(ENTRY)
    assert state.presence is ModelPresence.INSTALLED
    assert state.sidecar is not None
    assert state.sidecar.source == "found in the models folder"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (CONTENT[:-1], "has 2051 bytes instead of 2052"),
        (b"<!DOCTYPE html>".ljust(len(CONTENT)), r"is no GGUF file: it begins with b'<!DO'"),
        (b"GGUF" + CONTENT[4:][::-1], "has the SHA-256"),
        (b"", "has 0 bytes"),
    ],
)
def test_a_file_that_is_not_what_the_entry_says_is_refused(store, content, problem):
    """M4."""
    store.path_of(ENTRY).write_bytes(content)
    with pytest.raises(ModelFileError, match=problem):
        store.ensure_verified(ENTRY)
    found = examine(store.path_of(ENTRY), SHA256, len(CONTENT))
    assert isinstance(found, FileFault)


def test_a_missing_file_is_told_apart_and_the_text_says_how_to_get_it(store):
    assert store.state_of(ENTRY).presence is ModelPresence.ABSENT
    with pytest.raises(ModelFileError, match=r"not installed.*Run `edge-agent models pull tiny`"):
        store.ensure_verified(ENTRY)
    assert isinstance(examine(store.path_of(ENTRY), None, None), FileFault)


def test_an_unfinished_pull_counts_as_partial_and_one_of_another_digest_is_removed(store):
    kept = store.unfinished_path(ENTRY, "part")
    kept.write_bytes(b"GGUF123")
    stale = store.folder / ".tiny.gguf.000000000000.part"
    stale.write_bytes(b"old")
    parts = store.folder / ".tiny.gguf.000000000000.parts"
    parts.mkdir()
    (parts / "1").write_bytes(b"12345")
    state = store.state_of(ENTRY)
    assert (state.presence, state.size_bytes) == (ModelPresence.PARTIAL, 15)
    assert store.discard_unfinished(ENTRY, keep=ENTRY.sha256) == 8
    assert [item.name for item in store.folder.iterdir()] == [kept.name]


def test_the_files_of_a_longer_name_are_another_models(store):
    other = entry_of(file="tiny.gguf.gguf", name="other")
    unfinished = store.unfinished_path(other, "part")
    unfinished.write_bytes(b"GGUF")
    store.path_of(other).write_bytes(CONTENT)
    store.remove(ENTRY)
    assert store.path_of(other).exists()
    assert unfinished.exists()


def test_a_derived_file_is_checked_against_the_digest_of_its_making(store):
    path = install(store, DERIVED)
    assert store.state_of(DERIVED).presence is ModelPresence.INSTALLED
    store.ensure_verified(DERIVED)
    tamper(path)
    with pytest.raises(ModelFileError, match="SHA-256"):
        store.verify(DERIVED)


def test_a_derived_file_without_a_record_of_its_making_is_not_trusted(store):
    store.path_of(DERIVED).write_bytes(CONTENT)
    with pytest.raises(ModelFileError, match="no digest to check it against"):
        store.ensure_verified(DERIVED)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"sha256": 5}', "\x00"])
def test_an_unreadable_sidecar_only_means_hashing_again(store, text):
    path = install(store)
    sidecar = path.with_name("tiny.gguf.json")
    sidecar.write_text(text, encoding="utf-8")
    assert store.state_of(ENTRY).presence is ModelPresence.UNVERIFIED
    store.ensure_verified(ENTRY)
    assert json.loads(sidecar.read_text(encoding="utf-8"))["sha256"] == SHA256


def test_a_catalogue_that_now_says_another_digest_makes_the_file_unverified(store):
    install(store)
    changed = entry_of(b"GGUF" + CONTENT[4:][::-1])
    assert store.state_of(changed).presence is ModelPresence.UNVERIFIED
    with pytest.raises(ModelFileError, match="SHA-256"):
        store.ensure_verified(changed)


def test_remove_takes_the_file_its_sidecar_and_what_pulls_left(store):
    install(store)
    store.unfinished_path(ENTRY, "part").write_bytes(b"GGUF")
    assert store.remove(ENTRY) == len(CONTENT) + 4
    assert store.state_of(ENTRY).presence is ModelPresence.ABSENT
    assert store.remove(ENTRY) == 0
    assert ModelStore(store.folder / "never made").remove(ENTRY) == 0


def test_remove_waits_for_nobody_and_names_who_holds_the_files(store):
    """M1: the holder is known by its process."""
    install(store)
    with (
        held_now(store.lock_path(ENTRY), "the files of tiny"),
        pytest.raises(ModelError, match=f"process {os.getpid()} on .* holds the files of tiny"),
    ):
        store.remove(ENTRY)
    assert store.path_of(ENTRY).exists()
    store.remove(ENTRY)


def test_a_record_left_by_a_crash_holds_nothing(store):
    """M1: a lock file and an owner record without a process behind them."""
    lock = store.lock_path(ENTRY)
    lock.touch()
    lock.with_name(lock.name + ".owner").write_text('{"process_id": 1, "host": "gone"}')
    install(store)
    assert store.remove(ENTRY) == len(CONTENT)


def test_a_pull_that_would_eat_the_reserve_is_refused_with_the_amount(store, monkeypatch):
    """M5."""
    usage = shutil.disk_usage(store.folder)._replace(free=1_500_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    store.reserve_bytes = 500_000_000
    store.require_space(ENTRY, 1_000_000_000)
    with pytest.raises(ModelError, match=r"needs 1\.10 GB .* 500\.0 MB; 1\.50 GB .*Free 100\.0 MB"):
        store.require_space(ENTRY, 1_100_000_000)


def test_a_disk_that_does_not_tell_its_free_space_is_not_full(store, monkeypatch):
    """M5: unknown is not full."""

    def refuse(_):
        raise OSError("not supported")

    monkeypatch.setattr(shutil, "disk_usage", refuse)
    store.require_space(ENTRY, 10**15)


def test_a_folder_that_cannot_be_made_is_explained(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ModelError, match="Cannot make the models folder"):
        ModelStore(tmp_path / "file" / "models").prepare()


def test_examining_can_be_stopped_from_outside(tmp_path):
    path = tmp_path / "large.gguf"
    path.write_bytes(b"GGUF" + bytes(3 * 1024 * 1024))
    stop = threading.Event()
    stop.set()
    found = examine(path, None, None, stop)
    assert isinstance(found, Examined)
    assert found.sha256 != hashlib.sha256(path.read_bytes()).hexdigest()


def test_sizes_read_like_sizes():
    assert in_megabytes(98_362_432) == "98.4 MB"
    assert in_megabytes(2_019_377_696) == "2.02 GB"


def test_parts_that_a_pull_moves_while_somebody_asks_are_not_counted(store, monkeypatch):
    """`models list` and `status` look while another process pulls."""
    parts = store.unfinished_path(ENTRY, "parts")
    (parts / "scratch").mkdir(parents=True)
    (parts / "scratch" / "wheel").write_bytes(b"12345")
    (parts / "000-tiny.part").write_bytes(b"123")
    leave_name_of_nothing(parts / "000-tiny.new")
    remove_when_listed(monkeypatch, parts / "scratch")
    state = store.state_of(ENTRY)
    assert (state.presence, state.size_bytes) == (ModelPresence.PARTIAL, 3)
