"""Arrival times."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from controller.lab.simulator.workload import (
    Trace,
    TrafficError,
    bursts,
    poisson,
    queries_like,
    read_trace,
    workload_of,
)
from tests.fakes.published import published

TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:48.6805900,396,109
2023-11-16 18:15:50.1805900,879,55
"""


@pytest.mark.parametrize("make", [poisson, bursts])
def test_arrivals_rise_have_the_rate_and_follow_the_seed(make: object) -> None:
    times = make(20_000, 2.0, np.random.default_rng(1))  # type: ignore[operator]
    again = make(20_000, 2.0, np.random.default_rng(1))  # type: ignore[operator]
    np.testing.assert_array_equal(times, again)
    assert (np.diff(times) >= 0.0).all()
    assert times[-1] == pytest.approx(10_000.0, rel=0.15)


def test_bursts_vary_more_than_poisson() -> None:
    def dispersion(times: np.ndarray) -> float:
        counts = np.bincount((times // 10.0).astype(np.int64))
        return float(counts.var() / counts.mean())

    rng = np.random.default_rng(2)
    assert dispersion(bursts(5_000, 1.0, rng)) > 3.0 * dispersion(poisson(5_000, 1.0, rng))


@pytest.mark.parametrize("packed", [False, True])
def test_a_trace_is_replayed_from_zero(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / ("trace.csv.gz" if packed else "trace.csv")
    path.write_bytes(gzip.compress(TRACE.encode()) if packed else TRACE.encode())
    trace, rng = read_trace(path), np.random.default_rng(0)
    np.testing.assert_allclose(trace.seconds, [0.0, 2.0, 3.5])
    assert trace.prompt_tokens.tolist() == [374.0, 396.0, 879.0]
    assert trace.answer_tokens.tolist() == [44.0, 109.0, 55.0]
    np.testing.assert_allclose(trace.part(3, 4.0, rng).seconds, [0.0, 2.0 / 7.0, 0.5])
    starts = {round(float(trace.part(2, None, rng).seconds[1]), 6) for _ in range(20)}
    assert starts == {2.0, 1.5}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("a,b\n1,2\n", "no column TIMESTAMP"),
        ("TIMESTAMP\nsoon\n", "line 2: 'soon'"),
        ("TIMESTAMP\n", "has no arrival"),
        (TRACE.replace("879", "many"), "line 4: token counts"),
    ],
)
def test_a_trace_that_will_not_do_is_told(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(content)
    with pytest.raises(TrafficError, match=says):
        read_trace(path)


def test_a_trace_that_is_too_short_is_told(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    with pytest.raises(TrafficError, match="has 3 arrivals"):
        read_trace(path).part(9, None, np.random.default_rng(0))


def test_a_torn_archive_is_told(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(TRACE.encode() * 50)[:60])
    with pytest.raises(TrafficError, match="trace"):
        read_trace(path)
    with pytest.raises(TrafficError, match="cannot be read"):
        read_trace(tmp_path / "absent.csv")


def test_recorded_requests_ask_queries_of_like_length() -> None:
    rng = np.random.default_rng(3)
    prompt, answer = rng.lognormal(4.0, 1.0, 400), rng.lognormal(4.0, 1.0, 400)
    recorded = Trace(
        np.arange(100.0), 20.0 * rng.lognormal(4.0, 1.0, 100), rng.lognormal(2.0, 1.0, 100)
    )
    found = queries_like(recorded, prompt, answer, rng)
    for asked, given in ((recorded.prompt_tokens, prompt), (recorded.answer_tokens, answer)):
        assert np.corrcoef(np.log(asked), np.log(given[found]))[0, 1] > 0.8
    assert np.unique(found).size > 40
    blind = Trace(recorded.seconds, np.full(100, np.nan), recorded.answer_tokens)
    assert np.unique(queries_like(blind, prompt, answer, rng)).size > 60


def test_nonsense_is_refused() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(TrafficError):
        poisson(0, 1.0, rng)
    with pytest.raises(TrafficError):
        bursts(3, 0.0, rng)
    with pytest.raises(TrafficError):
        workload_of(np.array([2.0, 1.0]), 3, rng)


@pytest.mark.data
@pytest.mark.parametrize(("name", "arrivals"), [("code", 8819), ("conv", 19366)])
def test_the_published_traces_are_read(name: str, arrivals: int) -> None:
    """The counts are those that the data's own description states."""
    trace = read_trace(published(f"azure-llm-traces/AzureLLMInferenceTrace_{name}.csv.gz"))
    assert trace.seconds.size == arrivals
    assert (np.diff(trace.seconds) >= 0.0).all()
    assert not np.isnan(trace.answer_tokens).any()
    part = trace.part(100, 2.0, np.random.default_rng(0))
    assert part.seconds[-1] == pytest.approx(49.5)
