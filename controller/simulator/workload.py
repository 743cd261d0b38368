"""When requests arrive, and which."""

import csv
import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TextIO

import numpy as np

from controller.routing.problem import FloatArray, IntArray


class WorkloadError(ValueError):
    """A workload cannot be made; the text says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """R requests in order of arrival.

    Attributes:
        arrivals: float64[R]; seconds, rising.
        query: int64[R]; index among the scenario's queries.
        luck: float64[R]; standard normal deviate of the log service time. Fixed with the workload,
            so that every policy meets the same.
    """

    arrivals: FloatArray
    query: IntArray
    luck: FloatArray


def workload_of(arrivals: FloatArray, queries: int, rng: np.random.Generator) -> Workload:
    """Requests at these times, each asking one of `queries` drawn evenly.

    Raises:
        WorkloadError: there is no arrival, they are not in order, or there is no query.
    """
    if arrivals.size == 0 or queries < 1:
        raise WorkloadError("a workload needs at least one arrival and one query")
    if arrivals[0] < 0.0 or (np.diff(arrivals) < 0.0).any():
        raise WorkloadError("arrivals must be in order of time and not before 0")
    query = rng.integers(0, queries, arrivals.size)
    return Workload(arrivals, query, rng.standard_normal(arrivals.size))


def poisson(requests: int, rate: float, rng: np.random.Generator) -> FloatArray:
    """Arrival times with independent exponential gaps of mean 1 / rate; float64[requests]."""
    _check(requests, rate)
    return np.asarray(np.cumsum(rng.exponential(1.0 / rate, requests)))


def bursts(
    requests: int,
    rate: float,
    rng: np.random.Generator,
    on_seconds: float = 5.0,
    off_seconds: float = 15.0,
) -> FloatArray:
    """Arrival times that come in bursts, `rate` a second over the long run; float64[requests].

    Times on and off are exponential with the given means; while on, arrivals are Poisson of rate
    (on + off) / on times the long-run one, while off there is none.
    """
    _check(requests, rate)
    if on_seconds <= 0.0 or off_seconds < 0.0:
        raise WorkloadError("bursts need on_seconds above 0 and off_seconds of at least 0")
    inside = np.cumsum(
        rng.exponential(on_seconds / (rate * (on_seconds + off_seconds)), requests)
    )  # on the clock that stands still while off
    found = np.empty(requests)
    paused, end = 0.0, rng.exponential(on_seconds)
    for index, moment in enumerate(inside):
        while moment > end:
            paused += rng.exponential(off_seconds) if off_seconds else 0.0
            end += rng.exponential(on_seconds)
        found[index] = moment + paused
    return found


def replay(path: Path, requests: int, rate: float | None = None) -> FloatArray:
    """The first arrival times of a recorded trace, from 0; float64[requests].

    Args:
        path: CSV, also gzipped, with a column TIMESTAMP as in the Azure LLM inference traces.
        requests: how many to take.
        rate: mean arrivals a second that the taken part is stretched or pressed to; None keeps
            its pace.

    Raises:
        WorkloadError: the file cannot be read, is no such trace, or is too short.
    """
    _check(requests, 1.0 if rate is None else rate)
    try:
        with _opened(path) as file:
            seconds = _stamps(path, file, requests)
    except OSError as error:
        raise WorkloadError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, EOFError) as error:
        raise WorkloadError(f"{path}: neither a CSV nor a whole gzipped one") from error
    if seconds.size < requests:
        raise WorkloadError(f"{path}: has {seconds.size} arrivals; {requests} were asked for")
    times = np.sort(seconds) - seconds.min()
    if rate is not None and times[-1] > 0.0:
        times = times * ((requests - 1) / rate / times[-1])
    return np.asarray(times)


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    if path.suffix == ".gz":
        with gzip.open(path, "rt", encoding="utf-8", newline="") as packed:
            yield packed
    else:
        with path.open(encoding="utf-8", newline="") as plain:
            yield plain


def _stamps(path: Path, file: TextIO, requests: int) -> FloatArray:
    rows = csv.DictReader(file)
    if "TIMESTAMP" not in (rows.fieldnames or ()):
        raise WorkloadError(f"{path}: has no column TIMESTAMP; give a trace in Azure's form")
    found: list[float] = []
    start: datetime | None = None
    for row in rows:
        if len(found) == requests:
            break
        text = row["TIMESTAMP"] or ""
        try:
            # Azure writes seven digits of a second; Python reads six.
            whole, _, part = text.partition(".")
            stamp = datetime.fromisoformat(whole)
            fraction = float(f"0.{part}") if part else 0.0
            start = start or stamp
            found.append((stamp - start).total_seconds() + fraction)
        except (ValueError, TypeError) as error:
            raise WorkloadError(
                f"{path}, line {rows.line_num}: {text!r} is not a time such as "
                "2023-11-16 18:15:46.6805900"
            ) from error
    return np.array(found, dtype=np.float64)


def _check(requests: int, rate: float) -> None:
    if requests < 1 or not 0.0 < rate < float("inf"):
        raise WorkloadError("a workload needs at least one request and a rate above 0")
