"""A published outcome table becomes routing knowledge without one request, by real embeddings."""

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from controller.cli import main
from controller.config import QualitySettings
from controller.quality.embedding import MANIFEST_FILE, default_folder
from edge_agent.config import ModelSettings
from pointsman.v1 import router_pb2
from tests.fakes.fleet import infer_request, running_fleet


@pytest.fixture
def embedding_dir() -> Path:
    folder = default_folder()
    if not (folder / MANIFEST_FILE).exists():
        pytest.skip(f"no embedding model in {folder}; run `edge-controller embedding export`")
    return folder


def imported(*arguments: str | Path, code: int = 0) -> str:
    ended = CliRunner().invoke(
        main, ["lab", "profile", "import", *(str(part) for part in arguments)]
    )
    assert ended.exit_code == code, ended.output
    return ended.output


def test_imported_outcomes_are_what_the_controller_predicts_by(
    tmp_path: Path, embedding_dir: Path
) -> None:
    table = tmp_path / "table.csv"
    sums = [f"What is {n} plus {n + 2}?" for n in range(2, 12)]
    table.write_text(
        "prompt,published-a|score,published-b|score\n"
        + "".join(f"{prompt},1,0\n" for prompt in sums)
    )
    told = imported(
        table,
        "--rename", "published-a=fake-a",
        "--rename", "published-b=fake-b",
        "--data-dir", tmp_path / "controller",
        "--embedding-dir", embedding_dir,
        "--json",
    )  # fmt: skip
    report = json.loads(told.splitlines()[-1])
    assert (report["outcomes"], report["prompts"], report["models"]) == (20, 10, 2)
    assert (report["stored_prompts"], report["blank_cells"]) == (10, 0)

    async def scenario() -> None:
        quality = QualitySettings(embedding_dir=str(embedding_dir))
        async with running_fleet(tmp_path, quality=quality) as fleet:
            models = (ModelSettings("fake-a"), ModelSettings("fake-b"))
            await fleet.add_agent("one", models=models)
            response = await fleet.client.router.Route(
                router_pb2.RouteRequest(requests=[infer_request("What is 30 plus 32?").request]),
                timeout=60,
            )
            (placement,) = response.placements
            found = {c.model: c.quality_ratio for c in (placement.chosen, *placement.others)}
            assert found["fake-a"] > found["fake-b"] + 0.3

    asyncio.run(scenario())


def test_import_that_cannot_be_done_is_said(tmp_path: Path, embedding_dir: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("prompt,model,score\nHi,a,1\n")
    data = ("--data-dir", tmp_path / "controller")
    assert "no model b" in imported(table, *data, "--rename", "b=c", code=2)
    assert "TABLE=MODEL" in imported(table, *data, "--rename", "b", code=2)
    assert "no outcomes are left" in imported(table, *data, "--only-renamed", code=1)
    missing = imported(table, *data, "--embedding-dir", tmp_path / "none", code=1)
    assert "embedding export" in missing
