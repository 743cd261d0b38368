"""The figures that the quality estimates must reach, on real prompts with the real model."""

import pytest

from controller.lab.bench.embedding import bench_embedding
from controller.lab.bench.quality import QualityRow, evaluate
from controller.quality.embedding import (
    EmbeddingUnavailableError,
    OnnxEmbedding,
    default_folder,
)
from tests.fakes.published import published


def backend() -> OnnxEmbedding:
    try:
        return OnnxEmbedding()
    except EmbeddingUnavailableError as error:
        pytest.skip(str(error))


def rows_of(name: str) -> dict[str, QualityRow]:
    folder = published(name)
    cached = default_folder() / f"evaluation-{name}.npz"
    return {row.form: row for row in evaluate(folder, backend(), embeddings_file=cached).rows}


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.timeout(900)  # it embeds 12,032 prompts when nobody has yet
def test_estimates_beat_the_mean_and_routing_by_them_the_best_model_on_mmlu_pro() -> None:
    rows = rows_of("mmlu-pro-outcomes")
    mean, ours, paper = rows["destination-mean"], rows["ours"], rows["paper"]
    assert mean.brier == pytest.approx(0.223, abs=0.001)
    assert mean.log_loss == pytest.approx(0.637, abs=0.001)
    assert ours.brier <= 0.206
    assert ours.log_loss <= 0.600
    assert ours.argmax_accuracy >= ours.best_single_accuracy
    assert ours.brier < paper.brier
    assert ours.calibration_error <= 0.03
    assert mean.length_error_ratio is not None
    assert ours.length_error_ratio is not None
    assert ours.length_error_ratio < mean.length_error_ratio


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_estimates_beat_the_mean_on_routerbench() -> None:
    rows = rows_of("routerbench-subset")
    assert rows["ours"].brier < rows["destination-mean"].brier - 0.01
    assert rows["ours"].log_loss < rows["destination-mean"].log_loss - 0.03
    assert rows["ours"].argmax_accuracy >= rows["ours"].best_single_accuracy


@pytest.mark.slow
def test_eight_bits_find_the_float_model_s_neighbours_in_little_memory() -> None:
    backend()
    """Guards against a slip; the figures themselves are for `edge-controller lab bench embedding`.

    Both depend on the machine: int8 kernels differ by processor, and memory by its libraries.
    """
    report = bench_embedding(repeats=1)
    assert report.neighbour_overlap_ratio >= 0.88
    assert report.resident_megabytes <= 600.0
    assert not report.imports_torch
