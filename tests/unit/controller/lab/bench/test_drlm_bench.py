import numpy as np

from controller.lab.bench.drlm import predictors_section, random_trees


def test_the_predictors_are_timed_for_the_papers_number_of_pairs():
    found = predictors_section(None, np.random.default_rng(0), repeats=3)
    assert (found["pairs"], found["latency_trees"], found["is_fitted"]) == (85, 600, False)
    for part in ("profile", "classes", "latency", "all"):
        assert 0 < found[f"{part}_milliseconds_p50"] <= found[f"{part}_milliseconds_p95"]
    assert found["all_milliseconds_p50"] >= found["latency_milliseconds_p50"]


def test_random_trees_have_as_many_leaves_as_asked():
    found = random_trees(np.random.default_rng(0), 4, 63, 10, 1)
    assert (found.feature < 0).sum() == 4 * 63
    assert found.roots.tolist() == [0, 125, 250, 375]
