"""Arrival times."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from controller.simulator.workload import WorkloadError, bursts, poisson, replay, workload_of

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
    np.testing.assert_allclose(replay(path, 3), [0.0, 2.0, 3.5])
    np.testing.assert_allclose(replay(path, 2), [0.0, 2.0])
    np.testing.assert_allclose(replay(path, 3, rate=4.0), [0.0, 2.0 / 7.0, 0.5])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (TRACE, "has 3 arrivals"),
        ("a,b\n1,2\n", "no column TIMESTAMP"),
        ("TIMESTAMP\nsoon\n", "line 2: 'soon'"),
    ],
)
def test_a_trace_that_will_not_do_is_told(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(content)
    with pytest.raises(WorkloadError, match=says):
        replay(path, 9)


def test_a_torn_archive_is_told(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(TRACE.encode() * 50)[:60])
    with pytest.raises(WorkloadError, match="trace"):
        replay(path, 60)
    with pytest.raises(WorkloadError, match="cannot be read"):
        replay(tmp_path / "absent.csv", 1)


def test_nonsense_is_refused() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(WorkloadError):
        poisson(0, 1.0, rng)
    with pytest.raises(WorkloadError):
        bursts(3, 0.0, rng)
    with pytest.raises(WorkloadError):
        workload_of(np.array([2.0, 1.0]), 3, rng)
