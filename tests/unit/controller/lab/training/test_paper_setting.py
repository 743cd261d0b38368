import numpy as np
import pytest

from controller.lab.training.paper_setting import (
    ANCHORS,
    CLASSES,
    PaperDataError,
    fit_speeds,
    paper_cluster,
    paper_setting_from,
    table_one,
)
from tests.fakes.published import PUBLISHED

needs_data = [
    pytest.mark.data,
    pytest.mark.skipif(
        not (PUBLISHED / "device-benchmarks").is_dir(), reason="no public data here"
    ),
]


def test_table_one_has_the_papers_numbers():
    models, placements = table_one()
    assert (len(models), len(placements), len(paper_cluster().devices)) == (23, 85, 5)
    assert len({model.scale_name for model in models}) == len(ANCHORS) == 12
    assert len({model.family for model in models}) == 8
    assert len({model.billions for model in models}) == 11
    assert {model.quantisation_bits for model in models} == {2, 3, 4, 8, 16}
    assert all(model.layers and model.heads for model in models)
    assert {model.scale_name for model in models} == set(ANCHORS)


def test_absent_data_are_named(tmp_path):
    with pytest.raises(PaperDataError, match="mmlu_test"):
        paper_setting_from(tmp_path)


def test_speed_is_fitted_on_bytes_and_an_overhead(tmp_path):
    lines = ["device,class,runtime,model,params_b,quant,backend,decode_tps"]
    for device, kind, slow in (
        ("Raspberry Pi 4 8GB", "sbc", 4e9), ("Jetson Nano 4GB", "jetson", 8e9),
        ("Jetson Orin Nano", "jetson", 3e10), ("Jetson AGX Orin", "jetson", 1e11),
        ("VM", "vm", 2e10),
    ):  # fmt: skip
        for billions in (1.0, 3.0, 7.0):
            seconds = billions * 1e9 * 8.5 / 8 / slow + 0.01
            lines.append(f"{device},{kind},llama.cpp,m,{billions},Q8_0,cuda,{1 / seconds}")
            lines.append(f"{device},{kind},TensorRT,m,{billions},Q8_0,cuda,{9 / seconds}")
    path = tmp_path / "speeds.csv"
    path.write_text("\n".join(lines))
    found = fit_speeds(path)
    np.testing.assert_allclose(found["JOA"].bandwidth, 1e11)
    np.testing.assert_allclose(found["RP"].overhead_seconds, 0.01)
    assert {speed.rows for speed in found.values()} == {3}
    np.testing.assert_allclose(found["NJN"].decode_seconds(8e9), 1.01)
    path.write_text("\n".join(line for line in lines if not line.startswith("VM")))
    with pytest.raises(ValueError, match="no rows of VM"):
        fit_speeds(path)


@pytest.fixture(scope="module")
def setting():
    return paper_setting_from(PUBLISHED)


class TestOnPublicData:
    pytestmark = needs_data

    def test_the_papers_queries_are_there(self, setting):
        counts = np.bincount(setting.table.class_index).tolist()
        assert dict(zip(CLASSES, counts, strict=True)) == {
            "biology": 165, "commonsense": 200, "geography": 225, "history": 268,
            "mathematics": 200, "truthfulness": 200,
        }  # fmt: skip
        assert setting.table.query.shape == (1258 * 85,)

    def test_published_outcomes_are_used_where_there_are_some(self, setting):
        names = [model.name for model in setting.models]
        mathematics = setting.table.class_index == CLASSES.index("mathematics")
        real = setting.is_real.mean(axis=0)
        assert setting.is_real[mathematics, names.index("gemma2-2b-z4")].all()
        assert setting.is_real[:, names.index("mistral-7b-z8")].mean() > 0.3
        assert real[names.index("gpt-oss-20b-z4")] == 0

    def test_synthetic_answers_meet_their_anchors(self, setting):
        strongest = [model.name for model in setting.models].index("gpt-oss-20b-z4")
        means = setting.correct.mean(axis=0)
        assert means.argmax() == strongest
        wanted = np.array(ANCHORS["gpt-oss-20b"])[setting.table.class_index].mean()
        assert abs(means[strongest] - wanted) < 0.05
        tiny = [model.name for model in setting.models].index("tinyllama-1.1b-z2")
        assert means[tiny] < 0.25

    def test_the_same_seed_makes_the_same_setting(self, setting):
        again = paper_setting_from(PUBLISHED)
        assert (again.seconds == setting.seconds).all()
        assert (again.correct == setting.correct).all()
        other = paper_setting_from(PUBLISHED, seed=1)
        assert (other.seconds != setting.seconds).any()

    def test_boards_are_slower_than_servers(self, setting):
        median = np.median(setting.seconds, axis=0)
        by_kind = {
            device.kind: float(median[at])
            for at, (model, device) in enumerate(setting.placements)
            if model.name == "gemma3-1b-z4"
        }
        assert by_kind["RP"] > by_kind["NJN"] > by_kind["JON"]
        assert by_kind["RP"] > by_kind["VM"] > by_kind["JOA"]
