"""The controller's database under what befalls databases."""

import json
import os
import sqlite3
import subprocess
import time
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from click.testing import CliRunner
from sqlalchemy import create_engine, text

from controller.cli import main
from controller.ids import RequestId
from controller.request_manager.refusals import refusal_text
from controller.storage import sqlite as module
from controller.storage.base import Retention, StorageError
from controller.storage.repair import check_storage, repair_storage
from controller.storage.schema import METADATA, REVISION
from controller.storage.sqlite import SqliteStore
from controller.storage.sqlite_file import FILE_NAME, open_database
from tests.contract.test_store_contract import calibration, chosen, node
from tests.fakes.records import finished_record
from tests.fakes.small_disk import fill, remount, small_disk


def filled(folder: Path, requests: int = 200) -> None:
    store = SqliteStore(folder)
    store.save_node(node())
    store.save_calibrations([calibration()])
    for number in range(requests):
        store.save_finished(finished_record(f"r-{number}"))
    assert store.close(20.0)


def test_everything_survives_a_restart(tmp_path):
    filled(tmp_path)
    store = SqliteStore(tmp_path)
    assert store.load().nodes == (node(),)
    assert store.load().calibrations == (calibration(),)
    assert store.find(RequestId("r-7")).account == finished_record("r-7").account
    assert len(store.finished(1000)) == 200
    store.close(5.0)


def test_what_was_written_survives_a_kill(tmp_path):
    code = f"""
import os, signal
from pathlib import Path
from tests.integration.test_storage import finished_record, node
from controller.storage.sqlite import SqliteStore
store = SqliteStore(Path({str(tmp_path)!r}))
store.save_node(node())
for number in range(50):
    store.save_finished(finished_record(f"r-{{number}}"))
assert store.flush(20.0)
os.kill(os.getpid(), signal.SIGKILL)
"""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    subprocess.run(
        [os.sys.executable, "-c", code], cwd=root, env=environment, timeout=60, check=False
    )
    store = SqliteStore(tmp_path)
    assert len(store.finished(1000)) == 50
    assert store.load().nodes == (node(),)
    store.close(5.0)


def test_a_second_controller_on_the_same_folder_is_refused(tmp_path):
    store = SqliteStore(tmp_path)
    with pytest.raises(StorageError, match="in use by another controller"):
        SqliteStore(tmp_path)
    store.close(5.0)
    SqliteStore(tmp_path).close(5.0)


def damage(path: Path) -> None:
    """Overwrite pages in the middle, as a failing card does."""
    with path.open("r+b") as file:
        size = path.stat().st_size
        file.seek(size // 2 // 4096 * 4096)
        file.write(os.urandom(4096 * 3))


def test_a_damaged_database_is_told_and_repaired_with_what_can_be_read(tmp_path):
    filled(tmp_path)
    damage(tmp_path / FILE_NAME)
    with pytest.raises(StorageError, match=r"storage repair"):
        SqliteStore(tmp_path)
    checked = CliRunner().invoke(main, ["storage", "check", "--data-dir", str(tmp_path)])
    assert checked.exit_code == 1
    assert "storage repair" in checked.output
    done = repair_storage(tmp_path)
    assert done.set_aside.exists()
    assert done.rows["nodes"] == 1
    assert 0 < done.rows["requests"] < 200
    store = SqliteStore(tmp_path)
    assert store.load().nodes == (node(),)
    kept = {row.request_id for row in store.finished(1000)}
    assert {"r-0", "r-199"} <= kept, "what lies before the damage, and what lies behind it"
    assert len(store.finished(1000)) == done.rows["requests"]
    store.close(5.0)
    assert check_storage(tmp_path).problems == ()


def test_a_file_that_is_no_database_is_told_and_set_aside(tmp_path):
    (tmp_path / FILE_NAME).write_bytes(b"not a database at all, but long enough to be read" * 99)
    with pytest.raises(StorageError, match="storage repair"):
        SqliteStore(tmp_path)
    repaired = CliRunner().invoke(main, ["storage", "repair", "--data-dir", str(tmp_path)])
    assert repaired.exit_code == 0, repaired.output
    SqliteStore(tmp_path).close(5.0)


def test_a_newer_schema_is_refused_in_one_sentence(tmp_path):
    SqliteStore(tmp_path).close(5.0)
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    with pytest.raises(StorageError, match="newer version of Pointsman"):
        SqliteStore(tmp_path)


def test_migrations_lead_to_the_tables_that_the_code_expects(tmp_path):
    open_database(tmp_path / FILE_NAME).dispose()
    config = Config()
    folder = Path(module.__file__).parent / "migrations"
    config.set_main_option("script_location", str(folder))
    assert ScriptDirectory.from_config(config).get_current_head() == REVISION
    from alembic.autogenerate import compare_metadata

    engine = create_engine(f"sqlite:///{tmp_path / FILE_NAME}")
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), METADATA) == []
    engine.dispose()


OLDEST = Path(__file__).parents[1] / "fixtures" / "schema_0001"
"""What the first schema's code wrote into its documents."""


def of_the_first_schema(path: Path) -> None:
    """A database as the first schema has it: one node, one calibration and one request."""
    engine = create_engine(f"sqlite:///{path}")
    with engine.connect() as connection:
        config = Config()
        config.set_main_option("script_location", str(Path(module.__file__).parent / "migrations"))
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
        documents = {
            name: json.dumps(json.loads((OLDEST / f"{name}.json").read_text("utf-8")),
                             separators=(",", ":"))
            for name in ("hello", "calibration", "request")
        }  # fmt: skip
        for statement in (
            "INSERT INTO nodes VALUES ('pi-1', :hello, 1, 3, 1, 2, 'start-1', 17, 1.0)",
            "INSERT INTO calibrations VALUES "
            "('Raspberry Pi 5', 'abab', 'llama.cpp 1', '15W', :calibration, 1.0)",
            "INSERT INTO requests (request_id, finished_time, state, attempts, prompt_characters, "
            "document) VALUES ('r-1', 1e12, 'completed', 1, 14, CAST(:request AS BLOB))",
        ):
            connection.execute(text(statement), documents)
        connection.commit()
    engine.dispose()


def test_database_of_the_first_schema_opens_with_all_that_it_holds(tmp_path):
    of_the_first_schema(tmp_path / FILE_NAME)
    store = SqliteStore(tmp_path)
    try:
        remembered = store.load()
        (node,) = remembered.nodes
        assert (node.node_id, node.is_draining, node.acked_sequence) == ("pi-1", True, 17)
        assert [model.name for model in node.hello.models] == ["small"]
        (calibration,) = remembered.calibrations
        assert calibration.calibration.decode_tokens_per_second == 20.0
        found = store.find(RequestId("r-1"))
        assert found.account == finished_record().account
        (other,) = found.placement.others
        assert refusal_text(other) == "node is offline"
        assert store.load_choice() is None
        store.save_choice(chosen("memetic"))
        assert store.flush(10.0)
        assert store.load_choice() == chosen("memetic")
    finally:
        store.close(5.0)


def test_retention_by_number_drops_the_oldest(tmp_path, monkeypatch):
    filled(tmp_path)
    store = SqliteStore(tmp_path, Retention(max_requests=20))
    store.save_node(node())  # wakes the writer, which tidies first thing
    assert store.flush(10.0)
    assert store.close(10.0)
    store = SqliteStore(tmp_path)
    kept = [row.request_id for row in store.finished(1000)]
    assert kept == [f"r-{number}" for number in range(199, 179, -1)]
    store.close(5.0)


def test_retention_by_age_drops_what_is_too_old(tmp_path, monkeypatch):
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 86_400 * 5)
    filled(tmp_path, 3)
    monkeypatch.undo()
    store = SqliteStore(tmp_path, Retention(days=4.0))
    store.save_finished(finished_record("new"))
    assert store.close(10.0)
    store = SqliteStore(tmp_path, Retention(days=4.0))
    store.save_node(node(done=9))  # wakes the writer, which tidies first thing
    assert store.flush(10.0)
    assert store.close(10.0)
    store = SqliteStore(tmp_path)
    assert [row.request_id for row in store.finished(1000)] == ["new"]
    assert store.close(5.0)


def test_prompts_that_were_kept_are_gone_once_they_shall_not_be(tmp_path):
    store = SqliteStore(tmp_path, Retention(keep_prompts=True))
    store.save_finished(finished_record("r-1", prompt="Where is the sextant?"))
    assert store.close(10.0)
    assert b"sextant" in (tmp_path / FILE_NAME).read_bytes()
    store = SqliteStore(tmp_path, Retention(keep_prompts=False))
    store.save_node(node())
    assert store.flush(10.0)
    found = store.find(RequestId("r-1"))
    assert found is not None
    assert found.request.prompt == ""
    assert found.account == finished_record("r-1").account
    assert store.close(10.0)
    assert b"sextant" not in (tmp_path / FILE_NAME).read_bytes()


def test_retention_by_size_gives_the_space_back(tmp_path):
    filled(tmp_path, 3000)
    before = (tmp_path / FILE_NAME).stat().st_size
    store = SqliteStore(tmp_path, Retention(max_bytes=before // 4))
    store.save_node(node())
    assert store.flush(20.0)
    assert store.close(10.0)
    assert (tmp_path / FILE_NAME).stat().st_size <= before // 3


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "small", "600k") as folder:
        yield folder


@pytest.mark.privileged
def test_a_full_disk_is_shown_and_loses_nothing_once_there_is_space(disk):
    store = SqliteStore(disk)
    store.save_node(node())
    assert store.flush(10.0)
    ballast = fill(disk, 8192)
    for number in range(300):
        store.save_finished(finished_record(f"r-{number}"))
    deadline = time.monotonic() + 20.0
    while not store.state.issue and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "disk_full" in store.state.issue
    assert store.state.waiting >= 300
    assert store.find(RequestId("r-299")) is not None  # from what waits
    ballast.unlink()
    remount(disk, "size=20m")
    assert store.flush(40.0)
    assert store.state.issue == ""
    assert store.state.lost == 0
    assert len(store.finished(1000)) == 300
    assert store.close(10.0)


@pytest.mark.privileged
def test_a_read_only_file_is_told_at_the_start(disk):
    SqliteStore(disk).close(5.0)
    remount(disk, "ro")
    with pytest.raises(StorageError, match=r"(?i)read-only"):
        SqliteStore(disk)


def test_while_nothing_can_be_written_the_oldest_go_first_and_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MOST_WAITING", 10)
    store = SqliteStore(tmp_path)
    blocker = sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)
    blocker.execute("BEGIN EXCLUSIVE")
    for number in range(25):
        store.save_finished(finished_record(f"r-{number}"))
    assert store.state.lost >= 14  # one batch may be with the writer already
    blocker.execute("ROLLBACK")
    blocker.close()
    assert store.flush(40.0)
    assert store.finished(1)[0].request_id == "r-24"
    assert store.close(10.0)


def test_a_request_can_be_read_while_it_is_being_written(tmp_path):
    store = SqliteStore(tmp_path)
    blocker = sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    store.save_finished(finished_record("r-1"))
    for _ in range(30):  # longer than it gathers: the writer has it and waits for the file
        assert store.find(RequestId("r-1")) is not None
        time.sleep(0.01)
    assert store.state.waiting == 1
    blocker.execute("ROLLBACK")
    blocker.close()
    assert store.close(20.0)


def test_export_writes_every_finished_request(tmp_path):
    filled(tmp_path, 5)
    out = tmp_path / "requests.csv"
    run = CliRunner().invoke(
        main, ["storage", "export", "--data-dir", str(tmp_path), "--out", str(out)]
    )
    assert run.exit_code == 0, run.output
    lines = out.read_text().splitlines()
    assert len(lines) == 6
    assert lines[0].startswith("request_id,finished_time,state")
    assert "What is" not in out.read_text()
