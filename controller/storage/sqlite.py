"""The controller's state in one SQLite file, written by one thread.

Write-ahead logging lets readers go on while it writes; a commit takes what has gathered since the
last one, so thousands of events a second are a few dozen transactions.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import structlog
from sqlalchemy import Connection, delete, func, select, text
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.exc import DBAPIError

from controller.domain.known_calibration import KnownCalibration
from controller.domain.policy_choice import KeptChoice
from controller.domain.request_record import Account, RequestRecord, RequestState
from controller.ids import NodeId, RequestId
from controller.storage.base import (
    FinishedRow,
    KnownNode,
    Remembered,
    Retention,
    StorageError,
    StoreState,
    Unkept,
)
from controller.storage.documents import (
    CALIBRATION,
    CHOICE,
    HELLO,
    RECORD,
    finished_columns,
    finished_row,
    kept_calibration,
    kept_hello,
    kept_record,
    record_document,
)
from controller.storage.schema import CALIBRATIONS, CHOICES, NODES, REQUESTS
from controller.storage.sqlite_file import FILE_NAME, explained, locked, open_database

log = structlog.get_logger()

_GATHER_SECONDS: Final = 0.1
"""A commit costs a flush of the disk; what comes within this time shares one."""

_MOST_WAITING: Final = 50_000
"""Finished requests that wait at most while the disk takes nothing."""

_FIRST_RETRY_SECONDS: Final = 1.0
_LAST_RETRY_SECONDS: Final = 30.0

_TIDY_SECONDS: Final = 600.0
_POLICY: Final = "policy"
"""The row of the chosen policy."""

_FORGET_PROMPTS: Final = """
    UPDATE requests SET prompt = NULL, document = CAST(
        json_set(CAST(document AS TEXT), '$.request.prompt', '') AS BLOB
    ) WHERE prompt IS NOT NULL
"""

_VACUUM_PAGES: Final = 20_000
"""Free pages that one tidying gives back to the file system."""


class SqliteStore:
    """`ControllerStore` over a file that one process at a time may open.

    Args:
        folder: made when absent; the file is `controller.db` in it.
        retention: what bounds its size.

    Raises:
        StorageError: the file is damaged, of a newer version, in use, or cannot be written.
    """

    def __init__(self, folder: Path, retention: Retention | None = None) -> None:
        self._path = folder / FILE_NAME
        self._retention = retention or Retention()
        self._lock_file = locked(folder)
        try:
            self._engine = open_database(self._path)
        except BaseException:
            self._lock_file.close()
            raise
        self._told: Callable[[Sequence[KnownNode]], None] = lambda nodes: None
        self._unkept = Unkept()
        self._taken = Unkept()
        self._lost = 0
        self._told_lost = 0
        self._issue = ""
        self._condition = threading.Condition()
        self._writer: Connection | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._write_on, name="storage", daemon=True)
        self._thread.start()

    # -- giving -----------------------------------------------------------------------------------

    def tell_kept(self, told: Callable[[Sequence[KnownNode]], None]) -> None:
        """Have this called, in the writer's thread, after each commit."""
        self._told = told

    def save_node(self, node: KnownNode) -> None:
        """Keep a node as it is now."""
        with self._condition:
            self._unkept.nodes[node.node_id] = node
            self._condition.notify_all()

    def forget_node(self, node_id: NodeId) -> None:
        """Drop a node."""
        with self._condition:
            self._unkept.nodes[node_id] = None
            self._condition.notify_all()

    def save_calibrations(self, calibrations: Sequence[KnownCalibration]) -> None:
        """Keep what is believed of these."""
        with self._condition:
            self._unkept.calibrations.update({one.key: one for one in calibrations})
            self._condition.notify_all()

    def save_choice(self, choice: KeptChoice | None) -> None:
        """Keep the policy that an operator has chosen."""
        with self._condition:
            self._unkept.choices = [choice]
            self._condition.notify_all()

    def save_finished(self, record: RequestRecord) -> None:
        """Keep the story of a request that has ended."""
        with self._condition:
            self._unkept.finished.append(record)
            self._drop_the_oldest()
            self._condition.notify_all()

    def _drop_the_oldest(self) -> None:
        excess = len(self._unkept.finished) - _MOST_WAITING
        if excess > 0:
            del self._unkept.finished[:excess]
            self._lost += excess

    @property
    def state(self) -> StoreState:
        """How the keeping goes."""
        with self._condition:
            lost = f"; {self._lost} finished requests are lost" if self._lost else ""
            issue = f"{self._issue}{lost}" if self._issue else ""
            return StoreState(len(self._unkept) + len(self._taken), self._lost, issue)

    def flush(self, seconds: float) -> bool:
        """Wait until everything given is kept."""
        with self._condition:
            return self._condition.wait_for(
                lambda: not len(self._unkept) and not len(self._taken), seconds
            )

    def close(self, seconds: float) -> bool:
        """Keep what waits, for at most this long, and end."""
        with self._condition:
            if self._is_closing:
                return True
            self._is_closing = True
            self._condition.notify_all()
        self._thread.join(seconds)
        with self._condition:
            unkept = len(self._unkept) + len(self._taken)
        if unkept:
            log.error("storage.not_kept", values=unkept, issue=self._issue)
        else:
            with contextlib.suppress(DBAPIError), self._engine.connect() as connection:
                connection.execute(text("PRAGMA wal_checkpoint(TRUNCATE)"))
        self._engine.dispose()
        self._lock_file.close()
        return not unkept

    # -- reading ----------------------------------------------------------------------------------

    def load(self) -> Remembered:
        """What an earlier controller has kept; a document that no longer fits is left out."""
        with self._reading() as connection:
            nodes = [_node(row) for row in connection.execute(select(NODES))]
            calibrations = [
                _document(kept_calibration, row.document, f"calibration of {row.hardware}")
                for row in connection.execute(
                    select(CALIBRATIONS).order_by(CALIBRATIONS.c.saved_time)
                )
            ]
        return Remembered(
            tuple(node for node in nodes if node is not None),
            tuple(one for one in calibrations if one is not None),
        )

    def load_choice(self) -> KeptChoice | None:
        """The policy that an operator has chosen."""
        with self._reading() as connection:
            document = connection.execute(
                select(CHOICES.c.document).where(CHOICES.c.name == _POLICY)
            ).scalar()
        found: KeptChoice | None = (
            None
            if document is None
            else _document(CHOICE.validate_json, document, "the chosen policy")
        )
        return found

    def find(self, request_id: RequestId) -> RequestRecord | None:
        """The story of a finished request."""
        with self._condition:
            given = (*self._taken.finished, *self._unkept.finished)
        waiting = [record for record in given if record.request.request_id == request_id]
        if waiting:
            return waiting[-1]
        with self._reading() as connection:
            document = connection.execute(
                select(REQUESTS.c.document).where(REQUESTS.c.request_id == request_id)
            ).scalar()
        found: RequestRecord | None = (
            None if document is None else _document(kept_record, document, f"request {request_id}")
        )
        return found

    def accounts(self, limit: int) -> list[Account]:
        """Of the latest answered requests, newest first."""
        with self._condition:
            given = (*self._taken.finished, *self._unkept.finished)
        waiting = {
            record.request.request_id: record.account
            for record in given
            if record.state is RequestState.COMPLETED
        }
        answered = (
            select(REQUESTS.c.request_id, REQUESTS.c.document)
            .where(REQUESTS.c.state == RequestState.COMPLETED.value)
            .order_by(REQUESTS.c.number.desc())
            .limit(limit)
        )
        with self._reading() as connection:
            kept = [
                _document(RECORD.validate_json, row.document, f"request {row.request_id}")
                for row in connection.execute(answered)
                if row.request_id not in waiting
            ]
        found = [
            *reversed(waiting.values()),
            *(record.account for record in kept if record is not None),
        ]
        return [account for account in found if account is not None][:limit]

    def finished(self, limit: int) -> list[FinishedRow]:
        """The latest finished requests, newest first."""
        columns = [column for column in REQUESTS.c if column.name not in ("number", "document")]
        with self._reading() as connection:
            rows = connection.execute(
                select(*columns).order_by(REQUESTS.c.number.desc()).limit(limit)
            )
            return [FinishedRow(**row._mapping) for row in rows]

    @contextlib.contextmanager
    def _reading(self) -> Iterator[Connection]:
        try:
            with self._engine.connect() as connection:
                yield connection
        except DBAPIError as error:
            raise StorageError(explained(self._path, error)) from error

    # -- the writer -------------------------------------------------------------------------------

    def _write_on(self) -> None:
        try:
            self._write_until_closed()
        finally:
            self._disconnect()

    def _write_until_closed(self) -> None:
        wait, tidied_at = _FIRST_RETRY_SECONDS, -_TIDY_SECONDS
        while True:
            with self._condition:
                self._condition.wait_for(lambda: len(self._unkept) or self._is_closing, 60.0)
                is_last = self._is_closing
            if not is_last:
                time.sleep(_GATHER_SECONDS)
            with self._condition:
                taken, self._unkept = self._unkept, Unkept()
                self._taken = taken
            try:
                if len(taken):
                    self._write(taken)
            except Exception as error:
                # Whatever it was, the values are still here; only their growth is bounded.
                self._failed(taken, error)
                if is_last:
                    return
                with self._condition:
                    self._condition.wait_for(lambda: self._is_closing, wait)
                wait = min(2.0 * wait, _LAST_RETRY_SECONDS)
                continue
            self._told([node for node in taken.nodes.values() if node is not None])
            wait = _FIRST_RETRY_SECONDS
            if not is_last and time.monotonic() - tidied_at > _TIDY_SECONDS:
                tidied_at = time.monotonic()
                try:
                    self._tidy()
                except DBAPIError as error:
                    log.error("storage.not_tidied", issue=explained(self._path, error))
            with self._condition:
                self._taken = Unkept()
                if self._issue:
                    log.info("storage.mended", issue=self._issue)
                    self._issue = ""
                if self._lost > self._told_lost:
                    log.error("storage.lost", finished_requests=self._lost - self._told_lost)
                    self._told_lost = self._lost
                self._condition.notify_all()
                if is_last and not len(self._unkept):
                    return

    def _disconnect(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(DBAPIError):
                writer.close()

    def _failed(self, taken: Unkept, error: Exception) -> None:
        self._disconnect()
        issue = (
            explained(self._path, error)
            if isinstance(error, DBAPIError)
            else f"{self._path}: {type(error).__name__}: {error}"
        )
        if not isinstance(error, DBAPIError):
            log.exception("storage.failed")
        with self._condition:
            self._unkept.prepend(taken)
            self._drop_the_oldest()
            self._taken = Unkept()
            if issue != self._issue:
                log.error("storage.not_written", issue=issue, waiting=len(self._unkept))
            self._issue = issue

    def _write(self, taken: Unkept) -> None:
        now = time.time()
        keep = self._retention.keep_prompts
        kept = [node for node in taken.nodes.values() if node is not None]
        gone = [node_id for node_id, node in taken.nodes.items() if node is None]
        if self._writer is None:
            # Held open: whoever closes the last connection copies the whole log into the file.
            self._writer = self._engine.connect()
        connection = self._writer
        with connection.begin():
            if gone:
                connection.execute(delete(NODES).where(NODES.c.node_id.in_(gone)))
            if kept:
                _put(connection, NODES, [_node_row(node, now) for node in kept])
            if taken.calibrations:
                rows = [_calibration_row(one, now) for one in taken.calibrations.values()]
                _put(connection, CALIBRATIONS, rows)
            for choice in taken.choices:
                connection.execute(delete(CHOICES).where(CHOICES.c.name == _POLICY))
                if choice is not None:
                    document = CHOICE.dump_json(choice).decode()
                    row = {"name": _POLICY, "document": document, "saved_time": now}
                    _put(connection, CHOICES, [row])
            if taken.finished:
                latest = {record.request.request_id: record for record in taken.finished}
                connection.execute(
                    insert(REQUESTS).prefix_with("OR REPLACE"),
                    [
                        {
                            **finished_columns(finished_row(record, now, keep)),
                            "document": record_document(record, keep),
                        }
                        for record in latest.values()
                    ],
                )

    def _tidy(self) -> None:
        """Drop what the retention no longer allows, oldest first."""
        retention = self._retention
        with self._engine.begin() as connection:
            # What is dropped is overwritten, since it may be what somebody wants forgotten.
            connection.execute(text("PRAGMA secure_delete = ON"))
            oldest = time.time() - 86_400 * retention.days
            connection.execute(delete(REQUESTS).where(REQUESTS.c.finished_time < oldest))
            count = connection.execute(select(func.count()).select_from(REQUESTS)).scalar_one()
            excess = count - retention.max_requests
            pages, free, size = (
                connection.execute(text(f"PRAGMA {name}")).scalar_one()
                for name in ("page_count", "freelist_count", "page_size")
            )
            used = (pages - free) * size
            if used > retention.max_bytes and count:
                excess = max(excess, int(count * (1.0 - 0.9 * retention.max_bytes / used)) + 1)
            if excess > 0:
                doomed = select(REQUESTS.c.number).order_by(REQUESTS.c.number).limit(excess)
                connection.execute(delete(REQUESTS).where(REQUESTS.c.number.in_(doomed)))
            if not retention.keep_prompts:
                connection.execute(text(_FORGET_PROMPTS))
        with self._engine.connect() as connection:
            # Each step frees a page, and only a script steps through what has no columns.
            driver: Any = connection.connection.driver_connection
            driver.executescript(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})")


# -- rows -----------------------------------------------------------------------------------------


def _put(connection: Connection, table: Any, rows: list[dict[str, object]]) -> None:
    connection.execute(insert(table).prefix_with("OR REPLACE"), rows)


def _node_row(node: KnownNode, now: float) -> dict[str, object]:
    return {
        "node_id": node.node_id,
        "hello": HELLO.dump_json(node.hello).decode(),
        "is_draining": int(node.is_draining),
        "completed_requests": node.completed_requests,
        "failed_requests": node.failed_requests,
        "cancelled_requests": node.cancelled_requests,
        "instance_id": node.instance_id,
        "acked_sequence": node.acked_sequence,
        "saved_time": now,
    }


def _node(row: Any) -> KnownNode | None:
    hello = _document(kept_hello, row.hello, f"node {row.node_id}")
    if hello is None:
        return None
    return KnownNode(
        hello,
        bool(row.is_draining),
        row.completed_requests,
        row.failed_requests,
        row.cancelled_requests,
        row.instance_id,
        row.acked_sequence,
    )


def _calibration_row(one: KnownCalibration, now: float) -> dict[str, object]:
    return {
        "hardware": one.key.hardware,
        "digest": one.key.digest,
        "engine_version": one.key.engine_version,
        "power_mode": one.key.power_mode,
        "document": CALIBRATION.dump_json(one).decode(),
        "saved_time": now,
    }


def _document(read: Callable[..., Any], document: str | bytes, what: str) -> Any:
    try:
        return read(document)
    except ValueError as error:
        # A later version's value, or a bit that fell: the rest is still good.
        log.error("storage.unreadable", what=what, error=str(error).splitlines()[0])
        return None
