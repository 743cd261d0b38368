import json

import numpy as np
import pytest
from click.testing import CliRunner

from controller.cli import main
from controller.lab.offline.measurements import write_measurements
from controller.predictors.fitted import load_predictors
from controller.storage.artifacts import load_artifact
from tests.unit.controller.lab.offline.rows import measurement


class LetterEmbedding:
    """Stands in for the real one: texts that begin alike have one direction."""

    name = model = "letters"
    dimension = 384

    def embed(self, texts):
        found = [np.random.default_rng(ord(text[0])).normal(size=384) for text in texts]
        return np.array(found, dtype=np.float32)


@pytest.fixture(autouse=True)
def letters(monkeypatch):
    monkeypatch.setattr("controller.lab.commands.fit.OnnxEmbedding", LetterEmbedding)


def measured(tmp_path, count=40):
    rows = [
        measurement(
            workload=workload,
            prompt=f"{workload} {'word ' * (at % 7)}{at}",
            prompt_digest=f"{workload}{at}",
            model="m",
            model_parameters_billions=1.0,
            model_quantisation="Q4_0",
            prefill_seconds=0.1 + 0.01 * at,
            decode_seconds=1.0,
            completion_tokens=10 + at % 3,
            score_ratio=float(at % 2),
        )
        for workload in ("arithmetic", "zoology")
        for at in range(count)
    ]
    write_measurements(tmp_path / "measurements.csv", rows, "csv")
    return tmp_path / "measurements.csv"


def test_fitting_prints_figures_and_keeps_where_they_come_from(tmp_path):
    source = measured(tmp_path)
    out = tmp_path / "out"
    arguments = ["lab", "fit", "--measurements", str(source), "--out", str(out)]
    result = CliRunner().invoke(main, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["held_out_queries"] == 16
    assert figures["classifier"]["accuracy"] == 1.0
    kept = load_artifact(out, "drlm-predictors").provenance
    assert [entry["file"] for entry in kept["sources"]] == ["measurements.csv"]
    assert len(kept["sources"][0]["sha256"]) == 64
    assert (kept["rows"], kept["is_synthetic"]) == (80, False)
    assert kept["figures"]["latency"] == figures["latency"]
    assert load_predictors(out).classifier.classes == ("arithmetic", "zoology")
    shown = CliRunner().invoke(main, arguments)
    assert shown.exit_code == 0
    assert "R2" in shown.stdout
    assert "accuracy 1.000" in shown.stdout


def test_one_source_must_be_named(tmp_path):
    result = CliRunner().invoke(main, ["lab", "fit", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "either --measurements or --paper-setting" in result.output


def test_bad_data_are_told_without_a_traceback(tmp_path):
    bad = tmp_path / "bad.csv"
    bad.write_text("nothing\n")
    for arguments in (
        ["--measurements", str(bad)],
        ["--measurements", str(measured(tmp_path, count=2))],
        ["--paper-setting", str(tmp_path)],
    ):
        result = CliRunner().invoke(main, ["lab", "fit", *arguments, "--out", str(tmp_path / "o")])
        assert result.exit_code == 1
        assert "Error: " in result.output
        assert not (tmp_path / "o").exists()


def test_bench_drlm_prints_its_sections(tmp_path):
    result = CliRunner().invoke(main, ["lab", "bench", "drlm", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["predictors"]["pairs"] == 85


def test_simulation_inputs_are_of_the_papers_setting_alone(tmp_path):
    source, file = measured(tmp_path), tmp_path / "inputs.npz"
    arguments = ["--measurements", str(source), "--simulation-inputs", str(file)]
    result = CliRunner().invoke(main, ["lab", "fit", *arguments, "--out", str(tmp_path / "o")])
    assert result.exit_code == 2
    assert "needs --paper-setting" in result.output
