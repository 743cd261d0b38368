from dataclasses import replace

import numpy as np
import pytest

from controller.domain.hardware import DeviceClass, ModelConfiguration
from controller.lab.training.fit_predictors import fit, fit_splits, split_queries
from controller.lab.training.held_out import determination
from controller.lab.training.measurement_table import FitError, TrainingTable, table_of
from controller.predictors.features import profile_query
from controller.predictors.fitted import MeasuredLimits, load_predictors, save_predictors
from controller.predictors.latency_regressor import feature_group
from controller.storage.artifacts import ArtifactError
from tests.unit.controller.lab.offline.rows import measurement

GIB = 1 << 30


def embed(texts):
    """Texts that begin alike lie close together."""
    rng = np.random.default_rng(len(texts))
    found = rng.normal(0, 0.02, (len(texts), 384)).astype(np.float32)
    for row, text in enumerate(texts):
        found[row] += np.random.default_rng(ord(text[0])).normal(0, 0.05, 384)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def table(queries=80, noise=0.05, seed=0):
    rng = np.random.default_rng(seed)
    models = (ModelConfiguration("a", 1.0, 4, 16, 8), ModelConfiguration("b", 7.0, 8))
    devices = (DeviceClass("pi", 4, 4 * GIB), DeviceClass("vm", 8, 16 * GIB))
    label = np.arange(queries) % 2
    words = rng.integers(5, 200, queries)
    query, model, device = (
        part.ravel() for part in np.meshgrid(np.arange(queries), [0, 1], [0, 1], indexing="ij")
    )
    speed = np.array([[1.0, 3.0], [0.1, 0.5]])[model, device]
    tokens = np.array([20.0, 120.0])[label[query]]
    seconds = (words[query] * 0.1 + tokens) / speed / 20
    return TrainingTable(
        prompts=tuple(("math " if kind else "zoo ") + "word " * n
                      for kind, n in zip(label, words, strict=True)),
        classes=("animals", "numbers"),
        class_index=label,
        model_names=("a-1b", "b-7b"),
        models=models,
        devices=devices,
        query=query,
        model=model,
        device=device,
        seconds=seconds * np.exp(rng.normal(0, noise, seconds.shape)),
        completion_tokens=tokens,
        score_ratio=(rng.random(query.shape) < np.array([0.3, 0.9])[model]).astype(float),
    )  # fmt: skip


@pytest.fixture(scope="module")
def fitted():
    return fit(table(), embed, boosted_trees=60, forest_trees=20, threads=1)


def test_held_out_figures_show_what_was_learned(fitted):
    predictors, figures = fitted
    assert figures["classifier"]["accuracy"] > 0.9
    assert np.sum(figures["classifier"]["confusion"]) == figures["held_out_queries"] == 16
    assert figures["latency"]["r2_log"] > 0.8
    assert figures["latency"]["lightgbm_difference"] < 1e-9
    np.testing.assert_allclose(
        sum(figures["latency"]["feature_importance"]["groups"].values()), 1.0
    )
    assert figures["quality"]["log_loss"] < 0.69
    assert figures["held_out_measurements"] == 16 * 4
    assert predictors.quality.answered.sum() == 64 * 4


def test_noise_is_reported_as_the_residual_sigma():
    quiet = fit(table(), embed, boosted_trees=60, forest_trees=5, threads=1)[0].latency
    loud = fit(table(noise=0.8), embed, boosted_trees=60, forest_trees=5, threads=1)[0].latency
    assert loud.residual_sigma > 1.5 * quiet.residual_sigma


def test_each_split_holds_other_queries_out_and_the_first_is_kept():
    small = {"boosted_trees": 30, "forest_trees": 5, "threads": 1}
    alone, figures = fit(table(), embed, seed=1, **small)
    kept, found = fit_splits(table(), embed, seed=1, splits=3, **small)
    assert kept.latency_model == alone.latency_model
    splits = found["splits"]
    assert splits["r2_log"][0] == figures["latency"]["r2_log"]
    assert len(set(splits["r2_log"])) == 3
    assert splits["r2_log_lowest"] == min(splits["r2_log"])
    assert splits["r2_log_highest"] == max(splits["r2_log"])
    np.testing.assert_allclose(splits["r2_log_mean"], np.mean(splits["r2_log"]))
    assert set(splits["r2_log_mean_by_model"]) == {"a-1b", "b-7b"}
    assert "splits" not in fit_splits(table(), embed, seed=1, **small)[1]


def test_determination_is_the_share_of_the_spread_that_is_foreseen():
    measured = np.array([1.0, 2.0, 3.0, 4.0])
    assert determination(measured, measured) == 1.0
    assert determination(measured, np.full(4, 2.5)) == 0.0
    assert determination(measured, np.array([1.0, 2.0, 3.0, 5.0])) == 0.8
    assert determination(np.ones(3), np.zeros(3)) == 0.0


def test_the_same_seed_fits_the_same(fitted):
    again, figures = fit(table(), embed, boosted_trees=60, forest_trees=20, threads=1)
    assert again.latency_model == fitted[0].latency_model
    assert figures == fitted[1]


def test_predictors_come_back_from_their_folder(fitted, tmp_path):
    predictors, figures = fitted
    save_predictors(tmp_path / "p", predictors, provenance={"figures": figures})
    again = load_predictors(tmp_path / "p")
    embeddings = embed(["math word", "zoo word", "queer word"])
    shares = predictors.classifier.probabilities(embeddings)
    assert again.classifier.probabilities(embeddings).tolist() == shares.tolist()
    queries = again.classifier.classify([profile_query("math x", embedding=embeddings[0])])
    pairs = [(model, device) for model in table().models for device in table().devices]
    listed = predictors.latency.predict(queries, pairs)
    assert again.latency.predict(queries, again.latency.encode(pairs)).tolist() == listed.tolist()
    assert listed.shape == (1, 4)
    assert (listed > 0).all()
    assert listed[0, 2] > listed[0, 1]  # the large model on the board, the small one on the VM
    found = again.output_length.predict(shares), again.quality.predict(shares)
    assert found[0].tolist() == predictors.output_length.predict(shares).tolist()
    assert found[1].tolist() == predictors.quality.predict(shares).tolist()


def apart(queries=80):
    """The same measurements, with reading and writing told apart."""
    whole = table(queries)
    words = np.array([len(text.split()) for text in whole.prompts])[whole.query]
    reading = words * 0.1 / (words * 0.1 + whole.completion_tokens)
    return replace(whole, prefill_seconds=whole.seconds * reading)


def test_reading_and_writing_apart_are_learned_from_few_measurements():
    few = {"boosted_trees": 60, "forest_trees": 20, "threads": 1}
    alone = fit(table(25), embed, **few)[1]["latency"]
    found, figures = fit(apart(25), embed, **few)
    assert figures["latency"]["r2_log"] > max(0.95, alone["r2_log"])
    assert figures["latency"]["lightgbm_difference"] < 1e-9
    assert found.latency.layout.rates is not None
    np.testing.assert_allclose(
        sum(figures["latency"]["feature_importance"]["groups"].values()), 1.0
    )


def test_speeds_come_back_from_their_folder_and_heed_a_shorter_answer(tmp_path):
    predictors, _ = fit(apart(), embed, boosted_trees=20, forest_trees=20, threads=1)
    save_predictors(tmp_path / "p", predictors, provenance={})
    again = load_predictors(tmp_path / "p")
    queries = again.classifier.classify([profile_query("math x", embedding=embed(["math"])[0])])
    pairs = [(model, device) for model in table().models for device in table().devices]
    whole = predictors.latency.predict(queries, pairs)
    assert again.latency.predict(queries, pairs).tolist() == whole.tolist()
    encoded = again.latency.encode(pairs)
    np.testing.assert_allclose(again.latency.predict(queries, encoded), whole, rtol=1e-12)
    limited = again.latency.predict(queries, encoded, np.array([10.0]))
    assert (limited < whole / 2).all()


def test_an_altered_model_is_refused(fitted, tmp_path):
    save_predictors(tmp_path / "p", fitted[0], provenance={})
    path = tmp_path / "p" / "latency.txt"
    path.write_text(path.read_text().replace("leaf_value=", "leaf_value=9 ", 1))
    with pytest.raises(ArtifactError, match="not the file that was saved"):
        load_predictors(tmp_path / "p")


def test_a_model_and_a_device_never_seen_are_predicted_by_their_numbers(fitted):
    latency = fitted[0].latency
    strange = (ModelConfiguration("c", 7.0, 8), DeviceClass("nuc", 8, 16 * GIB))
    found = latency.predict([profile_query("hello there")], [strange])
    assert np.isfinite(found).all()
    assert found[0, 0] > 0


def test_every_feature_has_a_group(fitted):
    layout = fitted[0].latency.layout
    groups = [feature_group(name) for name in layout.names]
    assert groups.count("length") == 3
    assert groups.count("class") == 2
    assert feature_group("family:a") == "architecture"


def test_queries_are_split_apart():
    held_out = split_queries(100, 3)
    assert held_out.sum() == 20
    assert (held_out == split_queries(100, 3)).all()
    assert (held_out != split_queries(100, 4)).any()
    with pytest.raises(FitError, match="at least 5"):
        split_queries(4, 0)


def rows(n, **changes):
    base = {
        "prefill_seconds": 0.5, "decode_seconds": 1.0, "completion_tokens": 9,
        "model_parameters_billions": 1.0, "model_quantisation": "Q4_K_M",
    }  # fmt: skip
    return [
        measurement(**{**base, "prompt": f"p{at}", "prompt_digest": f"d{at}", **changes})
        for at in range(n)
    ]


def test_measurements_become_columns_and_rare_subjects_their_workload():
    measured = [
        *rows(12, workload="mmlu", question_class="physics", model="m"),
        *rows(1, workload="mmlu", question_class="law", prompt_digest="rare", model="m"),
        *rows(3, workload="gsm8k", question_class="any", prompt_digest="g", model="n"),
    ]
    found = table_of(measured)
    assert found.classes == ("gsm8k", "mmlu", "physics")
    assert found.model_names == ("m", "n")
    assert len(found.prompts) == 14
    assert (found.seconds == 1.5).all()


def test_limits_and_cut_answers_are_kept():
    cut = rows(1, prompt_digest="cut", max_tokens=64, finish_reason="length")
    whole = rows(3, max_tokens=32, finish_reason="stop")
    assert table_of([*cut, *whole]).limits == MeasuredLimits(64, 0.25)


def test_nodes_of_one_kind_are_one_class_unless_told_apart():
    measured = [*rows(2, node_id="a", hardware="Pi"), *rows(2, node_id="b", hardware="Pi")]
    assert len(table_of(measured).devices) == 1
    assert {device.kind for device in table_of(measured, device_by="node").devices} == {"a", "b"}


def test_rows_that_tell_no_speed_are_left_out_and_none_left_is_an_error():
    with pytest.raises(FitError, match="no measurement has"):
        table_of([*rows(2, decode_seconds=0.0, prefill_seconds=0.0),
                  *rows(2, model_quantisation="?"), *rows(2, model_parameters_billions=0.0),
                  *rows(1, completion_tokens=0)])  # fmt: skip
    kept = table_of([*rows(3), *rows(1, score_ratio=None, prompt_digest="u")])
    assert np.isnan(kept.score_ratio).sum() == 1


def test_one_class_alone_is_refused():
    only = table_of(rows(20))
    with pytest.raises(FitError, match="all of one class"):
        fit(only, embed, boosted_trees=2, forest_trees=2, threads=1)
