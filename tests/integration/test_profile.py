"""Profiling runs over real gRPC with fake engines: measured, graded, stopped, gone on with."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from controller.cli import main
from controller.lab.offline.measurements import Measurement, read_measurements
from controller.lab.offline.summary import all_entries
from edge_agent.config import ModelSettings
from edge_agent.engine.base import EngineSettings
from edge_agent.engine.fake import FakeEngine, FakeSpeeds
from tests.fakes.fleet import RunningFleet, running_fleet

PATIENCE_SECONDS = 90.0
COMMAND = [sys.executable, "-m", "controller.cli"]


def arithmetic(count: int) -> str:
    """A workload of sums; answers are "#### n" for those that can add."""
    return "".join(
        json.dumps(
            {
                "id": f"sum-{n}",
                "prompt": f"What is {n} plus 1?",
                "answer": n + 1,
                "grader": "numeric",
                "class": "even" if n % 2 == 0 else "odd",
                "max_tokens": 12,
            }
        )
        + "\n"
        for n in range(count)
    )


def adds(settings: EngineSettings) -> FakeEngine:
    """Always right."""
    return FakeEngine(settings, answer=lambda prompt, seed: f"#### {int(prompt.split()[2]) + 1}")


def adds_even(settings: EngineSettings) -> FakeEngine:
    """Right for even numbers only."""

    def answer(prompt: str, seed: int) -> str:
        number = int(prompt.split()[2])
        return f"The answer is {number + (1 if number % 2 == 0 else 5)}."

    return FakeEngine(settings, answer=answer)


def slowly(settings: EngineSettings) -> FakeEngine:
    """About ten answers a second and slot."""
    return FakeEngine(
        settings,
        answer=lambda prompt, seed: "one two three four five",
        speeds=FakeSpeeds(decode_tokens_per_second=50.0),
    )


async def command(
    fleet: RunningFleet, *arguments: str | Path, code: int = 0
) -> tuple[dict[str, Any], str]:
    """Run `profile` to its end; its JSON and its standard error."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        "lab",
        "profile",
        *(str(argument) for argument in arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, errors = await asyncio.wait_for(process.communicate(), PATIENCE_SECONDS)
    assert process.returncode == code, errors.decode()
    found: dict[str, Any] = json.loads(out) if out else {}
    return found, errors.decode()


def where(fleet: RunningFleet) -> list[str]:
    return ["--controller", fleet.listening.grpc_address, "--insecure", "--json"]


def measured(folder: Path) -> list[Measurement]:
    return [entry for entry in all_entries(folder) if isinstance(entry, Measurement)]


def test_every_question_goes_to_every_destination_and_is_graded(tmp_path: Path) -> None:
    workload, out = tmp_path / "sums.jsonl", tmp_path / "run"
    workload.write_text(arithmetic(6))

    async def scenario() -> None:
        async with running_fleet(tmp_path) as fleet:
            both = (ModelSettings("fake-a", slots=2), ModelSettings("fake-b", slots=2))
            await fleet.add_agent("one", models=both, make_engine=adds)
            await fleet.add_agent("two", make_engine=adds_even, kind="cloud")
            options: list[str | Path] = [
                "run",
                "--workload",
                workload,
                "--out",
                out,
                "--concurrency",
                "2",
            ]
            found, errors = await command(fleet, *options, *where(fleet))
            assert (found["answered"], found["failed"], found["left"]) == (18, 0, 0)
            # This fleet has no embedding model, and the run says so rather than nothing.
            assert found["taught"] == 0
            assert "does not learn" in errors
            scores = {
                f"{row['node_id']}/{row['model']}": row["mean_score_ratio"]
                for row in found["destinations"]
            }
            assert scores == {"one/fake-a": 1.0, "one/fake-b": 1.0, "two/fake-a": 0.5}
            again, _ = await command(fleet, *options, "--resume", *where(fleet))
            assert (again["answered"], again["answered_before"]) == (0, 18)
            _, refused = await command(fleet, *options, *where(fleet), code=1)
            assert "--resume" in refused
            _, other = await command(
                fleet, *options, "--resume", "--limit", "2", *where(fleet), code=1
            )
            assert "other questions" in other

    asyncio.run(scenario())
    rows = measured(out)
    assert len({(row.question_id, row.node_id, row.model) for row in rows}) == 18
    for row in rows:
        assert (row.kind, row.workload, row.grader) == ("profiled", "sums", "numeric")
        assert row.node_kind == ("edge" if row.node_id == "one" else "cloud")
        assert row.finish_reason == "stop"
        assert (row.max_tokens, row.seed, row.policy != "") == (12, 0, True)
        assert row.prompt_tokens > 0
        assert row.completion_tokens > 0
        assert row.energy_joules is not None
        assert row.energy_source == "estimate"
        assert row.cpu_utilisation_ratio is not None
        assert row.predicted_finish_seconds > 0
        assert 0 <= row.network_seconds <= row.measured_finish_seconds <= row.total_seconds
        assert row.extracted_answer


def test_routed_batches_are_reported_and_everything_is_exported(tmp_path: Path) -> None:
    workload, out = tmp_path / "sums.jsonl", tmp_path / "run"
    workload.write_text(arithmetic(8))

    async def scenario() -> None:
        async with running_fleet(tmp_path) as fleet:
            await fleet.add_agent("one", make_engine=adds)
            await fleet.add_agent("two", make_engine=adds_even)
            told, _ = await command(
                fleet, "routed", "--workload", workload, "--batches", "3", "--batch-size", "5",
                "--out", out, *where(fleet),
            )  # fmt: skip
            assert told["predictions_of"] == "routed"
            assert told["requests"]["requests"] == 15
            assert told["makespans"]["requests"] >= 3
            assert told["requests"]["median_error_ratio"] >= 0
            await command(
                fleet, "run", "--workload", workload, "--limit", "2", "--node", "two", "--out", out,
                *where(fleet),
            )  # fmt: skip
            report, _ = await command(fleet, "report", out, "--json")
            assert report["requests"]["requests"] == 15  # the pinned ones are not routed
            assert sum(row["graded"] for row in report["quality"]) == 17
            assert {row["question_class"] for row in report["quality"]} == {"even", "odd"}
            live, _ = await command(fleet, "report", "--live", *where(fleet))
            assert live["predictions_of"] == "live"
            assert live["requests"]["requests"] == 17
            assert set(live["destinations"]) == set(report["destinations"]) | {"two/fake-a"}
            few, _ = await command(fleet, "report", "--live", "--last", "3", *where(fleet))
            assert few["requests"]["requests"] == 3
            for format in ("csv", "parquet"):
                exported, _ = await command(fleet, "export", out, "--format", format, "--json")
                assert exported["measurements"] == 17
                assert read_measurements(Path(exported["file"])) == measured(out)
        async with running_fleet(tmp_path) as restarted:
            again, _ = await command(restarted, "report", "--live", *where(restarted))
            assert again == live

    asyncio.run(scenario())


@pytest.mark.parametrize("concurrency", [1, 3])
def test_as_many_questions_are_under_way_at_a_destination_as_were_asked_for(
    tmp_path: Path, concurrency: int
) -> None:
    workload, out = tmp_path / "sums.jsonl", tmp_path / "run"
    workload.write_text(arithmetic(9))

    async def scenario() -> None:
        async with running_fleet(tmp_path) as fleet:
            models = (ModelSettings("fake-a", slots=8, threads=1),)
            await fleet.add_agent("one", models, make_engine=slowly)
            await command(
                fleet, "run", "--workload", workload, "--out", out,
                "--concurrency", str(concurrency),
                *where(fleet),
            )  # fmt: skip
        others = [row.inflight_requests for row in measured(out)]
        assert len(others) == 9
        assert max(others) == concurrency - 1

    asyncio.run(scenario())


@contextlib.contextmanager
def profiling(arguments: list[str | Path]) -> Iterator["subprocess.Popen[bytes]"]:
    """A run in the background; killed at the end if it is still there."""
    process = subprocess.Popen(
        [*COMMAND, "lab", "profile", *(str(argument) for argument in arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_SECONDS)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_run_that_is_stopped_goes_on_and_asks_nothing_twice(
    tmp_path: Path, how: signal.Signals
) -> None:
    workload, out = tmp_path / "sums.jsonl", tmp_path / "run"
    workload.write_text(arithmetic(20))
    journal = out / "journal.jsonl"

    async def scenario() -> None:
        async with running_fleet(tmp_path) as fleet:
            await fleet.add_agent("one", make_engine=slowly)
            options: list[str | Path] = ["run", "--workload", workload, "--out", out, *where(fleet)]
            with profiling(options) as process:
                deadline = time.monotonic() + PATIENCE_SECONDS
                while not journal.exists() or journal.read_bytes().count(b"\n") < 3:
                    assert time.monotonic() < deadline
                    assert process.poll() is None
                    await asyncio.sleep(0.02)
                process.send_signal(how)
                errors = await asyncio.to_thread(process.communicate, None, PATIENCE_SECONDS)
                assert process.returncode != 0
                if how is signal.SIGINT:
                    assert b"--resume goes on with it" in errors[1]
            kept = len(measured(out))
            assert 3 <= kept < 20
            # What a crash in the midst of a write leaves.
            with journal.open("ab") as file:
                file.write(b'{"type": "measurement", "run_id": "cut o')
            found, told = await command(fleet, *options, "--resume")
            assert "cut off by a crash" in told
            assert (found["answered_before"], found["answered"]) == (kept, 20 - kept)

    asyncio.run(scenario())
    ids = [row.question_id for row in measured(out)]
    assert sorted(ids) == sorted({f"sum-{n}" for n in range(20)})
    assert len({row.run_id for row in measured(out)}) == 1


def test_node_that_goes_away_leaves_its_questions_for_later(tmp_path: Path) -> None:
    workload, out = tmp_path / "sums.jsonl", tmp_path / "run"
    workload.write_text(arithmetic(30))

    async def scenario() -> None:
        async with running_fleet(tmp_path) as fleet:
            one = await fleet.add_agent("one", make_engine=slowly)
            options: list[str | Path] = ["run", "--workload", workload, "--out", out, *where(fleet)]
            run = asyncio.create_task(command(fleet, *options, "--node-wait", "0.5", code=1))
            journal = out / "journal.jsonl"
            while not journal.exists() or journal.read_bytes().count(b"\n") < 3:
                await asyncio.sleep(0.02)
            await one.kill()
            found, errors = await run
            assert found["left"] > 0
            assert found["left"] + found["answered"] + found["failed"] == 30
            assert "were not asked" in errors
            await fleet.add_agent("one", make_engine=adds)
            again, _ = await command(fleet, *options, "--resume")
            assert again["failed"] == again["left"] == 0
            assert again["answered"] + again["answered_before"] == 30

    asyncio.run(scenario())


def test_what_no_destination_can_take_is_a_failure_and_the_rest_is_measured(
    tmp_path: Path,
) -> None:
    workload, out = tmp_path / "mixed.jsonl", tmp_path / "run"
    long = {"id": "long", "prompt": "word " * 3000, "answer": "1", "grader": "numeric"}
    workload.write_text(arithmetic(2) + json.dumps(long) + "\n")

    async def scenario() -> None:
        async with running_fleet(tmp_path) as fleet:
            await fleet.add_agent("one", make_engine=adds)
            found, errors = await command(
                fleet, "run", "--workload", workload, "--out", out, *where(fleet), code=1
            )
            assert (found["answered"], found["failed"]) == (2, 1)
            assert "INVALID_ARGUMENT" in errors
            exported, _ = await command(fleet, "export", out, "--format", "csv", "--json")
            assert (exported["measurements"], exported["failures"]) == (2, 1)
            assert "long" in Path(exported["failures_file"]).read_text()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["run", "--out", "run"], 2, "--workload"),
        (["run", "--workload", "nothing.jsonl", "--out", "run"], 2, "no such file"),
        (["run", "--workload", "bad.jsonl", "--out", "run"], 2, "bad.jsonl, line 2"),
        (["run", "--workload", "good.jsonl"], 2, "--out"),
        (
            ["run", "--workload", "good.jsonl", "--classes", "other", "--out", "run"],
            2,
            "no class other",
        ),
        (["run", "--workload", "good.jsonl", "--out", "run"], 1, "no controller answers"),
        (["report", "nothing"], 1, "no profiling run"),
        (["report"], 2, "--live"),
        (["report", "run", "--live"], 2, "--live"),
        (["report", "run", "--last", "3"], 2, "--last"),
        (["export", "nothing"], 1, "no profiling run"),
    ],
)
def test_what_cannot_be_done_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, told: str
) -> None:
    (tmp_path / "good.jsonl").write_text(arithmetic(2))
    (tmp_path / "bad.jsonl").write_text(arithmetic(1) + '{"prompt": "x", "max_tokens": 0}\n')
    monkeypatch.chdir(tmp_path)
    environment = {"POINTSMAN_CONTROLLER": "127.0.0.1:9", "POINTSMAN_INSECURE": "1"}
    ended = CliRunner().invoke(main, ["lab", "profile", *arguments], env=environment)
    assert ended.exit_code == code, ended.output
    assert told in ended.output
