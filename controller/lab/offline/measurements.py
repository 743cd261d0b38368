"""Profiling data: one row for each answered question and destination, as Parquet or CSV.

docs/profiling-data.md describes the columns for people; `Measurement` is their definition. The
columns are only ever added to; a change of meaning raises `SCHEMA_VERSION`.
"""

import contextlib
import csv
import dataclasses
import gzip
import importlib
import itertools
import math
import os
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Literal

SCHEMA_VERSION: Final = 1
FORMATS: Final = ("parquet", "csv")
MeasurementFormat = Literal["parquet", "csv"]

_ROWS_AT_ONCE: Final = 10_000
_METADATA_KEY: Final = b"pointsman.measurements.schema_version"
_VERSION_COLUMN: Final = "schema_version"


class MeasurementsError(Exception):
    """Profiling data could not be read or written; the text says where, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one question brought at one destination: query, model, node, answer, and its costs.

    None is unknown, never 0. A text is empty when it is unknown or does not apply. Seconds are
    durations; those of the node (queue, prefill, decode) by its clock, all others by the
    controller's.

    Attributes:
        run_id: which profiling run measured it.
        kind: "profiled" when the destination was pinned and every destination got the question;
            "routed" when the policy in force chose it.
        measured_time: when the answer was complete, Unix seconds of the profiling machine.
        workload: name of the question set: "gsm8k", "mmlu", "mmlu-pro", "truthfulqa",
            "commonsenseqa", or a file's name.
        question_id: unique in its workload, stable over runs.
        question_class: topic that the workload gives: MMLU's subject, TruthfulQA's category;
            the workload's name where it gives none.
        query_class: what the controller's classifier said of the prompt. Empty: not classified.
        prompt: what was sent, without the model's chat template; turns are joined by line ends.
        prompt_digest: blake2b-128 of `prompt`, hexadecimal.
        prompt_characters: length of `prompt`.
        prompt_words: runs of word characters in it.
        prompt_sentences: pieces that end in ".", "!", "?" or a line end, at least 1.
        prompt_lexical_diversity_ratio: different words, ignoring case, over all words; 0 without.
        node_id: the node that answered.
        model: catalogue name of the model that answered.
        node_kind: "edge", "cloud", or empty.
        hardware: what the node says it is, for people: "Raspberry Pi 5 Model B Rev 1.0".
        cpu_cores: of the node; 0 when it did not say.
        memory_bytes: of the node, all of it; 0 when it did not say.
        operating_system: of the node.
        agent_version: of the node.
        engine_version: engine and build that decoded, such as "llama-cpp-python 0.3.36".
        power_mode: of the board, such as nvpmodel's "15W". Empty: it has none.
        has_gpu: whether the node reports the utilisation of a graphics processor.
        model_family: "llama", "gemma3", ...
        model_parameters_billions: its scale; 0 when unknown.
        model_quantisation: "Q4_K_M", ...
        model_digest: sha256 of the model's file, hexadecimal.
        model_context_tokens: longest prompt and answer together.
        model_slots: sequences that this destination decodes at once.
        model_is_base: True for a model that only continues text.
        calibrated_prefill_tokens_per_second: the node's calibration when it was asked; None before.
        calibrated_decode_tokens_per_second: one sequence alone; None before calibration.
        calibrated_saturated_tokens_per_second: all slots together; None before calibration.
        max_tokens: greatest length of the answer that was allowed.
        seed: of the sampling, which was greedy.
        policy: that decided; a pinned destination has no choice.
        batch_id: requests with the same one were decided together.
        batch_requests: how many those were; None when the record was gone.
        attempts: dispatches until it was answered, at least 1.
        inflight_requests: other requests of this profiling run at this destination when this one
            was sent; for routed ones, of the whole run.
        prompt_tokens: by the model's own tokenizer, template included.
        completion_tokens: length of the answer.
        cached_prompt_tokens: of the prompt, not read again.
        finish_reason: "stop", or "length" when max_tokens or the context cut the answer off.
        window_seconds: from admission to the decision.
        network_seconds: transfer and relaying: what is left of measured_finish_seconds without
            queue, prefill and decode; at least 0.
        queue_seconds: from arrival at the node to the first prompt token decoded.
        prefill_seconds: reading the prompt.
        decode_seconds: writing the answer.
        first_token_seconds: from admission to the first text at the controller.
        total_seconds: from admission to the end.
        predicted_finish_seconds: foreseen by the decision, from the close of the window.
        measured_finish_seconds: what it was.
        round_trip_seconds: of the node's link when it was asked; None before it was measured.
        energy_joules: of this request, as the node accounts it; None when it cannot tell.
        energy_source: "none", "estimate", or the name of the sensor, such as "rapl".
        prefill_joules: the part of reading; None when unknown.
        decode_joules: the part of writing; None when unknown.
        cost_usd: by the destination's prices.
        cpu_utilisation_ratio: the node's last sample before the end, 0 to 1; None without one.
        gpu_utilisation_ratio: the same; None without a graphics processor.
        memory_utilisation_ratio: the same, of the node's memory.
        power_watts: the same, of the whole board.
        temperature_celsius: the same.
        is_throttled: the same; None where the board cannot tell.
        answer: the whole text.
        extracted_answer: what the grader read out of it. Empty: nothing it could credit.
        expected_answer: what is right; several are separated by line ends.
        grader: that scored: "gsm8k", "choice", "truthfulqa", "exact", "normalised", "numeric",
            "regex", or "none".
        score_ratio: 0 wrong to 1 right; None when there is nothing to grade by.
        predicted_energy_joules: foreseen by the decision, with the node's link; None in data from
            before it was kept.
    """

    run_id: str
    kind: str
    measured_time: float
    workload: str
    question_id: str
    question_class: str
    query_class: str
    prompt: str
    prompt_digest: str
    prompt_characters: int
    prompt_words: int
    prompt_sentences: int
    prompt_lexical_diversity_ratio: float
    node_id: str
    model: str
    node_kind: str
    hardware: str
    cpu_cores: int
    memory_bytes: int
    operating_system: str
    agent_version: str
    engine_version: str
    power_mode: str
    has_gpu: bool
    model_family: str
    model_parameters_billions: float
    model_quantisation: str
    model_digest: str
    model_context_tokens: int
    model_slots: int
    model_is_base: bool
    calibrated_prefill_tokens_per_second: float | None
    calibrated_decode_tokens_per_second: float | None
    calibrated_saturated_tokens_per_second: float | None
    max_tokens: int
    seed: int
    policy: str
    batch_id: str
    batch_requests: int | None
    attempts: int
    inflight_requests: int
    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int
    finish_reason: str
    window_seconds: float
    network_seconds: float
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    first_token_seconds: float
    total_seconds: float
    predicted_finish_seconds: float
    measured_finish_seconds: float
    round_trip_seconds: float | None
    energy_joules: float | None
    energy_source: str
    prefill_joules: float | None
    decode_joules: float | None
    cost_usd: float
    cpu_utilisation_ratio: float | None
    gpu_utilisation_ratio: float | None
    memory_utilisation_ratio: float | None
    power_watts: float | None
    temperature_celsius: float | None
    is_throttled: bool | None
    answer: str
    extracted_answer: str
    expected_answer: str
    grader: str
    score_ratio: float | None
    predicted_energy_joules: float | None = None


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the data.

    Attributes:
        type: str, int, float or bool.
        is_optional: whether None is allowed.
    """

    name: str
    type: type
    is_optional: bool


def _columns() -> tuple[Column, ...]:
    hints = typing.get_type_hints(Measurement)
    found = []
    for field in dataclasses.fields(Measurement):
        hint = hints[field.name]
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        found.append(Column(field.name, options[0] if options else hint, bool(options)))
    return tuple(found)


COLUMNS: Final = _columns()
"""In the order of the files, after `schema_version`."""


_LATER: Final = frozenset({"predicted_energy_joules"})
"""Columns that earlier data lack; each has a default."""


def measurement_as_dict(row: Measurement) -> dict[str, Any]:
    """A row as column name -> value."""
    return {column.name: getattr(row, column.name) for column in COLUMNS}


def measurement_from_dict(values: Mapping[str, Any]) -> Measurement:
    """A row from column name -> value; columns that we do not know are ignored.

    Raises:
        MeasurementsError: a column is missing or has a wrong type.
    """
    found = {}
    for column in COLUMNS:
        if column.name not in values:
            if column.name in _LATER:
                continue
            raise MeasurementsError(f"column {column.name} is missing")
        found[column.name] = _checked(column, values[column.name])
    return Measurement(**found)


def _checked(column: Column, value: Any) -> Any:
    if value is None:
        if column.is_optional:
            return None
        raise MeasurementsError(f"column {column.name} is empty")
    if column.type is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, column.type) or (column.type is int and isinstance(value, bool)):
        raise MeasurementsError(
            f"column {column.name} is {value!r}, which is no {column.type.__name__}"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise MeasurementsError(f"column {column.name} is {value}, which is not finite")
    return value


def read_measurements(path: Path) -> list[Measurement]:
    """The rows of a file that `write_measurements` made, or of a folder with such a file.

    Args:
        path: a .parquet, .csv or .csv.gz file; of a folder, measurements.parquet or else
            measurements.csv.

    Raises:
        MeasurementsError: there is no such file, it is damaged, or it is of a newer schema.
    """
    if path.is_dir():
        for name in ("measurements.parquet", "measurements.csv"):
            if (path / name).exists():
                return read_measurements(path / name)
        raise MeasurementsError(
            f"{path}: no measurements.parquet and no measurements.csv; make one with "
            f"`edge-controller lab profile export {path} --format csv`"
        )
    try:
        if path.suffix == ".parquet":
            return _read_parquet(path)
        if path.suffixes[-1:] == [".csv"] or path.suffixes[-2:] == [".csv", ".gz"]:
            return _read_csv(path)
    except OSError as error:
        raise MeasurementsError(f"{path}: {error.strerror or error}") from error
    raise MeasurementsError(f"{path}: not a .parquet, .csv or .csv.gz file")


def write_measurements(
    path: Path, rows: Iterable[Measurement], format: MeasurementFormat = "parquet"
) -> int:
    """Write all rows to one file, which appears whole or not at all; how many they were.

    Raises:
        MeasurementsError: the folder cannot be written, or pyarrow is missing.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        write = _write_parquet if format == "parquet" else _write_csv
        count = write(partial, rows)
        os.replace(partial, path)
    except OSError as error:
        raise MeasurementsError(f"{path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
    return count


# -- CSV ------------------------------------------------------------------------------------------


def _write_csv(path: Path, rows: Iterable[Measurement]) -> int:
    count = 0
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([_VERSION_COLUMN, *(column.name for column in COLUMNS)])
        for row in rows:
            values = (_to_text(getattr(row, column.name)) for column in COLUMNS)
            writer.writerow([str(SCHEMA_VERSION), *values])
            count += 1
        file.flush()
        os.fsync(file.fileno())
    return count


def _to_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)
    # Readers of Python 3.10 refuse the character NUL.
    return str(value).replace("\0", "\ufffd")


def _read_csv(path: Path) -> list[Measurement]:
    with _open_text(path) as file, _wide_fields():
        reader = csv.reader(file)
        try:
            header = next(reader, None)
            if header is None:
                raise MeasurementsError(f"{path}: empty")
            rows = []
            for values in reader:
                where = f"{path}, line {reader.line_num}"
                if len(values) != len(header):
                    raise MeasurementsError(
                        f"{where}: {len(values)} columns instead of {len(header)}; is the file "
                        "cut off?"
                    )
                rows.append(_row_from_text(dict(zip(header, values, strict=True)), where))
        except (csv.Error, EOFError, UnicodeDecodeError) as error:
            raise MeasurementsError(f"{path}, line {reader.line_num}: {error}") from error
    return rows


def _open_text(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


@contextlib.contextmanager
def _wide_fields() -> Iterator[None]:
    """Let a field be longer than the 128 KiB that the csv module takes by default."""
    before = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _row_from_text(values: Mapping[str, str], where: str) -> Measurement:
    _check_version(values.get(_VERSION_COLUMN, ""), where)
    found: dict[str, Any] = {}
    try:
        for column in COLUMNS:
            if column.name in values:
                found[column.name] = _from_text(column, values[column.name])
        return measurement_from_dict(found)
    except MeasurementsError as error:
        raise MeasurementsError(f"{where}: {error}") from error


def _from_text(column: Column, text: str) -> Any:
    if column.type is str:
        return text
    if text == "":
        return None
    if column.type is bool:
        known = {"true": True, "false": False}
        if text.lower() not in known:
            raise MeasurementsError(f"column {column.name} is {text!r}, not true or false")
        return known[text.lower()]
    try:
        return column.type(text)
    except ValueError as error:
        raise MeasurementsError(
            f"column {column.name} is {text!r}, which is no {column.type.__name__}"
        ) from error


def _check_version(text: str, where: str) -> None:
    if not text.isdigit():
        raise MeasurementsError(
            f"{where}: no {_VERSION_COLUMN}; `edge-controller lab profile export` did not write it"
        )
    if int(text) > SCHEMA_VERSION:
        raise MeasurementsError(
            f"{where}: schema version {text} is newer than {SCHEMA_VERSION}; update Pointsman"
        )


# -- Parquet --------------------------------------------------------------------------------------


def _pyarrow() -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise MeasurementsError(
            "Parquet needs pyarrow: install the extra with `pip install 'pointsman[profile]'`, or "
            "use CSV (--format csv)"
        ) from error


def _write_parquet(path: Path, rows: Iterable[Measurement]) -> int:
    arrow, parquet = _pyarrow()
    types = {str: arrow.string(), int: arrow.int64(), float: arrow.float64(), bool: arrow.bool_()}
    schema = arrow.schema(
        [arrow.field(c.name, types[c.type], nullable=c.is_optional) for c in COLUMNS],
        metadata={_METADATA_KEY: str(SCHEMA_VERSION).encode()},
    )
    count = 0
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for group in _groups(rows):
            columns = {c.name: [getattr(row, c.name) for row in group] for c in COLUMNS}
            writer.write_table(arrow.table(columns, schema=schema))
            count += len(group)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return count


def _groups(rows: Iterable[Measurement]) -> Iterator[list[Measurement]]:
    """Rows some at a time, so that a large run needs no memory for all of them."""
    remaining = iter(rows)
    while group := list(itertools.islice(remaining, _ROWS_AT_ONCE)):
        yield group


def _read_parquet(path: Path) -> list[Measurement]:
    arrow, parquet = _pyarrow()
    if not path.exists():
        raise MeasurementsError(f"{path}: there is no such file")
    try:
        table = parquet.read_table(path)
    except arrow.ArrowException as error:
        raise MeasurementsError(f"{path}: damaged or no Parquet file ({error})") from error
    metadata = table.schema.metadata or {}
    _check_version(metadata.get(_METADATA_KEY, b"").decode("ascii", "replace"), str(path))
    rows = []
    for number, values in enumerate(table.to_pylist(), 1):
        try:
            rows.append(measurement_from_dict(values))
        except MeasurementsError as error:
            raise MeasurementsError(f"{path}, row {number}: {error}") from error
    return rows
