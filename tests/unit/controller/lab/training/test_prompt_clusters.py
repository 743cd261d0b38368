import numpy as np
import pytest

from controller.lab.training.prompt_clusters import fit_clusters


def test_clusters_find_groups_and_count_errors_in_each() -> None:
    rng = np.random.default_rng(0)
    centres = np.array([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]])
    training = np.repeat(centres, 50, axis=0) + rng.normal(0.0, 0.5, (150, 2))
    validation = np.repeat(centres[:2], 4, axis=0)
    mistakes = np.array([[0.0, 1.0]] * 4 + [[1.0, 0.5]] * 4)
    clusters = fit_clusters(training, validation, mistakes, 3, rng)
    found = clusters.errors_of(centres)
    assert found[:2].tolist() == [[0.0, 1.0], [1.0, 0.5]]
    assert found[2].tolist() == [0.5, 0.75]  # no validation prompt: the overall errors


@pytest.mark.parametrize("n_clusters", [0, 4])
def test_clusters_that_cannot_be_are_refused(n_clusters: int) -> None:
    points, mistakes = np.zeros((3, 2)), np.zeros((3, 1))
    with pytest.raises(ValueError, match="n_clusters"):
        fit_clusters(points, points, mistakes, n_clusters, np.random.default_rng(0))


def test_equal_prompts_can_be_clustered() -> None:
    points, mistakes = np.ones((5, 2)), np.full((5, 1), 0.25)
    clusters = fit_clusters(points, points, mistakes, 3, np.random.default_rng(0))
    assert clusters.errors_of(points[:1]).tolist() == [[0.25]]
