"""The quality store's journal as bytes: one frame a record, each with its length and checksum."""

import json
import struct
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from controller.quality.store import QualityRecord

_FRAME: Final = struct.Struct("<4sII")
_MAGIC: Final = b"PQR1"
_LONGEST_FRAME_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class JournalContents:
    """What can be read of a journal.

    Attributes:
        records: each with when it came, seconds since 1970.
        good_bytes: of the file that they take.
        cut_bytes: behind them, of a last write that was cut short; 0 when the file is damaged.
        is_damaged: something cannot be read that has frames behind it.
    """

    records: tuple[tuple[QualityRecord, float], ...]
    good_bytes: int
    cut_bytes: int
    is_damaged: bool


def frame(record: QualityRecord, seen_time: float) -> bytes:
    """A record as it is appended."""
    head = json.dumps(
        {
            "digest": record.prompt_digest.hex(),
            "destination": record.destination,
            "model": record.model,
            "score": record.score,
            "output_tokens": record.output_tokens,
            "was_cut": record.was_cut,
            "seen_time": seen_time,
        }
    ).encode()
    body = struct.pack("<I", len(head)) + head
    body += np.asarray(record.embedding, dtype="<f4").tobytes()
    return _FRAME.pack(_MAGIC, len(body), zlib.crc32(body)) + body


def read_journal(path: Path) -> JournalContents:
    """Everything up to the first frame that is not whole; a file that is not there is empty.

    Raises:
        OSError: it cannot be read.
    """
    if not path.exists():
        return JournalContents((), 0, 0, False)
    records: list[tuple[QualityRecord, float]] = []
    good = 0
    with path.open("rb") as file:
        while (body := _next_body(file)) is not None:
            records.append(_record(body))
            good = file.tell()
        file.seek(good)
        rest = file.read()
    # A crash cuts the last frame short, or leaves pages of it unwritten. Where frames follow, some
    # of them may have been acknowledged: that is damage, whatever the broken frame's length says.
    is_damaged = not _MAGIC.startswith(rest[: len(_MAGIC)]) or _MAGIC in rest[len(_MAGIC) :]
    return JournalContents(tuple(records), good, 0 if is_damaged else len(rest), is_damaged)


def _next_body(file: BinaryIO) -> bytes | None:
    """The next frame's content; None when there is none that is whole."""
    start = file.read(_FRAME.size)
    if len(start) < _FRAME.size:
        return None
    magic, length, checksum = _FRAME.unpack(start)
    if magic != _MAGIC or length > _LONGEST_FRAME_BYTES:
        return None
    body = file.read(length)
    return body if len(body) == length and zlib.crc32(body) == checksum else None


def _record(body: bytes) -> tuple[QualityRecord, float]:
    (length,) = struct.unpack_from("<I", body)
    head = json.loads(body[4 : 4 + length])
    record = QualityRecord(
        prompt_digest=bytes.fromhex(head["digest"]),
        embedding=np.frombuffer(body, dtype="<f4", offset=4 + length),
        destination=head["destination"],
        model=head["model"],
        score=head["score"],
        output_tokens=head["output_tokens"],
        was_cut=head.get("was_cut", False),  # journals of before did not keep such answers
    )
    return record, head.get("seen_time", time.time())  # nor when they came
