"""When requests arrive, and which."""

import csv
import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TextIO

import numpy as np

from controller.routing.problem import FloatArray, IntArray


class TrafficError(ValueError):
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


def workload_of(
    arrivals: FloatArray,
    queries: int,
    rng: np.random.Generator,
    query: IntArray | None = None,
) -> Workload:
    """Requests at these times, each asking one of `queries` drawn evenly.

    Args:
        arrivals: float64[R]; seconds, rising.
        queries: how many there are.
        rng: draws queries and luck.
        query: int64[R]; which query each asks, in place of drawn ones.

    Raises:
        WorkloadError: there is no arrival, they are not in order, or there is no query.
    """
    if arrivals.size == 0 or queries < 1:
        raise TrafficError("a workload needs at least one arrival and one query")
    if arrivals[0] < 0.0 or (np.diff(arrivals) < 0.0).any():
        raise TrafficError("arrivals must be in order of time and not before 0")
    drawn = rng.integers(0, queries, arrivals.size)
    return Workload(arrivals, drawn if query is None else query, rng.standard_normal(arrivals.size))


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
        raise TrafficError("bursts need on_seconds above 0 and off_seconds of at least 0")
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


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """A recorded stretch of real requests.

    Attributes:
        seconds: float64[n]; since the first, rising.
        prompt_tokens, answer_tokens: float64[n]; NaN where the trace does not say.
    """

    seconds: FloatArray
    prompt_tokens: FloatArray
    answer_tokens: FloatArray

    def part(self, requests: int, rate: float | None, rng: np.random.Generator) -> "Trace":
        """As many requests on end, from anywhere in it, from 0 seconds on.

        Args:
            requests: how many.
            rate: mean arrivals a second that the part is stretched or pressed to; None keeps its
                pace.
            rng: draws where it begins.

        Raises:
            WorkloadError: the trace is too short, or the rate is nonsense.
        """
        _check(requests, 1.0 if rate is None else rate)
        if self.seconds.size < requests:
            raise TrafficError(
                f"the trace has {self.seconds.size} arrivals; {requests} were asked for"
            )
        start = int(rng.integers(0, self.seconds.size - requests + 1))
        chosen = slice(start, start + requests)
        times = self.seconds[chosen] - self.seconds[start]
        if rate is not None and times[-1] > 0.0:
            times = times * ((requests - 1) / rate / times[-1])
        return Trace(times, self.prompt_tokens[chosen], self.answer_tokens[chosen])


def read_trace(path: Path) -> Trace:
    """A trace in the form of the Azure LLM inference traces.

    Args:
        path: CSV, also gzipped, with a column TIMESTAMP, and with ContextTokens and
            GeneratedTokens if it has them.

    Raises:
        WorkloadError: the file cannot be read, or is no such trace.
    """
    try:
        with _opened(path) as file:
            rows = _rows(path, file)
    except OSError as error:
        raise TrafficError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, EOFError, zlib.error) as error:
        raise TrafficError(f"{path}: neither a CSV nor a whole gzipped one") from error
    if not rows.size:
        raise TrafficError(f"{path}: has no arrival")
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    return Trace(rows[:, 0] - rows[0, 0], rows[:, 1], rows[:, 2])


def queries_like(
    trace: Trace,
    prompt_tokens: FloatArray,
    answer_tokens: FloatArray,
    rng: np.random.Generator,
    nearest: int = 5,
) -> IntArray:
    """For each recorded request one of the queries most like it in length, int64[requests].

    Likeness is the distance of the logarithms of both token counts, each scaled to the queries'
    own spread after both are centred: a trace of longer requests keeps its order, not its lengths,
    since the queries have no longer ones.

    Args:
        trace: the requests; where it has no token counts, queries are drawn evenly.
        prompt_tokens: float64[Q].
        answer_tokens: float64[Q]; expected, of a typical model.
        rng: draws among the nearest.
        nearest: how many are alike enough to be drawn.
    """
    size = prompt_tokens.size
    if np.isnan(trace.prompt_tokens).any() or np.isnan(trace.answer_tokens).any():
        return np.asarray(rng.integers(0, size, trace.seconds.size))

    def scaled(values: FloatArray) -> FloatArray:
        logs = np.log1p(values)
        spread = float(logs.std())
        return np.asarray((logs - logs.mean()) / (spread if spread > 0.0 else 1.0))

    asked = np.stack([scaled(trace.prompt_tokens), scaled(trace.answer_tokens)], axis=1)
    known = np.stack([scaled(prompt_tokens), scaled(answer_tokens)], axis=1)
    distance = ((asked[:, None, :] - known[None, :, :]) ** 2).sum(axis=2)
    alike = np.argsort(distance, axis=1, kind="stable")[:, : min(nearest, size)]
    drawn = rng.integers(0, alike.shape[1], trace.seconds.size)
    return np.asarray(alike[np.arange(trace.seconds.size), drawn], dtype=np.int64)


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    if path.suffix == ".gz":
        with gzip.open(path, "rt", encoding="utf-8", newline="") as packed:
            yield packed
    else:
        with path.open(encoding="utf-8", newline="") as plain:
            yield plain


def _rows(path: Path, file: TextIO) -> FloatArray:
    """float64[n, 3]; seconds since the first row, and both token counts."""
    rows = csv.DictReader(file)
    if "TIMESTAMP" not in (rows.fieldnames or ()):
        raise TrafficError(f"{path}: has no column TIMESTAMP; give a trace in Azure's form")
    found: list[tuple[float, float, float]] = []
    start: datetime | None = None
    for row in rows:
        text = row["TIMESTAMP"] or ""
        try:
            # Azure writes seven digits of a second; Python reads six.
            whole, _, part = text.partition(".")
            stamp = datetime.fromisoformat(whole)
            fraction = float(f"0.{part}") if part else 0.0
            start = start or stamp
            seconds = (stamp - start).total_seconds() + fraction
        except (ValueError, TypeError) as error:
            raise TrafficError(
                f"{path}, line {rows.line_num}: {text!r} is not a time such as "
                "2023-11-16 18:15:46.6805900"
            ) from error
        try:
            prompt, answer = (
                float(row[name]) if row.get(name) else float("nan")
                for name in ("ContextTokens", "GeneratedTokens")
            )
        except ValueError as error:
            raise TrafficError(f"{path}, line {rows.line_num}: token counts: {error}") from error
        found.append((seconds, prompt, answer))
    return np.array(found, dtype=np.float64).reshape(-1, 3)


def _check(requests: int, rate: float) -> None:
    if requests < 1 or not 0.0 < rate < float("inf"):
        raise TrafficError("a workload needs at least one request and a rate above 0")
