"""A profiling run over real agents with real weights, from the command line."""

import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from controller.lab.offline.measurements import read_measurements
from tests.e2e.hosts.processes import running

pytestmark = [pytest.mark.llama, pytest.mark.slow, pytest.mark.timeout(900)]

BIN = Path(sys.executable).parent
MODEL = "smollm2-135m-instruct-q4_1"


@dataclass
class Fleet:
    """A controller and agents that are ready."""

    address: str
    ca_file: str

    def ask(self, *arguments: str | Path) -> dict[str, Any]:
        """Run a command of `edge-controller` that asks this controller, and expect success."""
        where = ["--controller", self.address, "--ca-file", self.ca_file, "--json"]
        ended = subprocess.run(
            [str(BIN / "edge-controller"), *(str(argument) for argument in arguments), *where],
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert ended.returncode == 0, ended.stderr
        found: dict[str, Any] = json.loads(ended.stdout)
        return found


@pytest.fixture
def fleet(tmp_path: Path, smollm2: Path) -> Iterator[Fleet]:
    """Two agents with the same small model, one of them half as fast as the other."""
    command = [
        str(BIN / "edge-controller"), "serve",
        "--listen", "127.0.0.1:0",
        "--http-listen", "",
        "--data-dir", str(tmp_path / "controller"),
    ]  # fmt: skip
    with ExitStack() as stack:
        line = stack.enter_context(running(command, tmp_path / "controller.log", 180))
        listening = json.loads(line)
        found = Fleet(listening["listen"], listening["ca_file"])
        for node_id, share in (("fast", "0.8"), ("slow", "0.4")):
            agent = [
                str(BIN / "edge-agent"), "run",
                "--controller", found.address,
                "--ca-file", found.ca_file,
                "--data-dir", str(tmp_path / node_id),
                "--models-dir", str(smollm2.parent),
                "--node-id", node_id,
                "--model", MODEL,
                "--slots", "2",
                "--threads", "1",
                "--context-tokens", "512",
                "--cpu-share", share,
            ]  # fmt: skip
            log = stack.enter_context((tmp_path / f"{node_id}.log").open("wb"))
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig=KILL", *agent],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
            stack.callback(_end, process)
            _wait_until_ready(found, node_id, tmp_path / f"{node_id}.log")
        yield found


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)


def _wait_until_ready(fleet: Fleet, node_id: str, log: Path) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        nodes = {node["node_id"]: node for node in fleet.ask("nodes")["nodes"]}
        node = nodes.get(node_id)
        if node and node["state"] == "ready" and "health" in node:
            return
        time.sleep(0.5)
    raise AssertionError(log.read_text()[-2000:])


def _write_workloads(folder: Path) -> list[Path]:
    """Questions in the three published forms."""
    sums = folder / "sums.jsonl"
    sums.write_text(
        "".join(
            json.dumps(
                {
                    "question": f"Ann has {n} apples and buys {n + 1} more. How many has she?",
                    "answer": f"She has {n} + {n + 1} = {2 * n + 1}.\n#### {2 * n + 1}",
                }
            )
            + "\n"
            for n in range(2, 4)
        )
    )
    places = folder / "places.jsonl"
    asked = [("Where do you borrow books?", 1), ("Where do you keep money?", 0)]
    texts = ["bank", "library", "pool", "forest", "kitchen"]
    choices = [{"label": la, "text": t} for la, t in zip("ABCDE", texts, strict=True)]
    places.write_text(
        "".join(
            json.dumps(
                {
                    "id": f"place-{number}",
                    "answerKey": "ABCDE"[right],
                    "question": {"stem": stem, "question_concept": "", "choices": choices},
                }
            )
            + "\n"
            for number, (stem, right) in enumerate(asked)
        )
    )
    subjects = folder / "geography_test.csv"
    with subjects.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["Which is the capital of France?", "Rome", "Oslo", "Paris", "Bern", "C"])
        writer.writerow(["Which of these is an ocean?", "Pacific", "Nile", "Alps", "Sahara", "A"])
    return [sums, places, subjects]


def test_real_agents_are_profiled_taught_and_reported(fleet: Fleet, tmp_path: Path) -> None:
    out = tmp_path / "run"
    workloads = [part for path in _write_workloads(tmp_path) for part in ("--workload", path)]
    options = [*workloads, "--max-tokens", "24", "--out", out]
    done = fleet.ask("lab", "profile", "run", *options, "--concurrency", "2")
    assert (done["answered"], done["failed"], done["left"]) == (12, 0, 0)
    rows = read_measurements(
        Path(_run("lab", "profile", "export", out, "--format", "csv", "--json")["file"])
    )
    assert {(row.workload, row.question_class) for row in rows} == {
        ("gsm8k", "gsm8k"),
        ("commonsenseqa", "commonsenseqa"),
        ("mmlu", "geography"),
    }
    for row in rows:
        assert row.answer
        assert 1 <= row.completion_tokens <= 24
        assert row.model_digest
        assert row.engine_version
        assert min(row.prefill_seconds, row.decode_seconds, row.first_token_seconds) > 0
        assert (row.energy_joules or 0) > 0
        assert row.score_ratio in (0.0, 1.0)
    # Greedy: what two nodes with one file say to one question begins alike.
    by_question: dict[str, list[str]] = {}
    for row in rows:
        by_question.setdefault(row.question_id, []).append(row.answer[:12])
    assert all(len(starts) == 2 and len(set(starts)) == 1 for starts in by_question.values())

    told = fleet.ask(
        "lab", "profile", "routed", *options, "--batches", "2", "--batch-size", "4", "--no-teach"
    )
    assert told["requests"]["requests"] == 8
    assert told["requests"]["median_error_ratio"] > 0
    assert set(told["destinations"]) <= {f"fast/{MODEL}", f"slow/{MODEL}"}
    report = _run("lab", "profile", "report", out, "--json")
    assert report["energy"]["requests"] == 8  # both nodes estimate their joules
    assert report["requests"] == told["requests"]
    assert sum(row["graded"] for row in report["quality"]) == 12 + 8


def _run(*arguments: str | Path) -> dict[str, Any]:
    ended = subprocess.run(
        [str(BIN / "edge-controller"), *(str(argument) for argument in arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        env=dict(os.environ),
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found
