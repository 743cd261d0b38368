"""Learned policies on disk: what comes back, and what is refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from controller.request_manager.policy_files import load_policy, policies_in, save_policy
from controller.routing.ppo.artifact import NoArtifact, PolicyArtifact
from controller.routing.ppo.observation import CANDIDATE_FEATURES, Layout, vector_size
from controller.routing.ppo.policy import served_policy
from controller.storage.artifacts import ArtifactError, load_artifact, save_artifact

LAYOUT = Layout(
    model_keys=np.array([11, 12]),
    node_keys=np.array([21, 22, 23]),
    kind_of_node=np.array([0, 0, 1]),
    choice_of_model=np.array([0, 1]),
    level_of_model=np.array([0, 0]),
    deployed=np.array([[True, True, True], [False, False, True]]),
)


def of_set() -> PolicyArtifact:
    inputs = len(CANDIDATE_FEATURES)
    weights = {"candidate.0.weight": np.arange(4.0 * inputs, dtype=np.float32).reshape(4, inputs)}
    low = np.zeros(inputs, dtype=np.float32)
    return PolicyArtifact("set", weights, low, low + 1, None, {"episodes": 8})


def of_fleet() -> PolicyArtifact:
    inputs = vector_size(LAYOUT)
    weights = {"encoder.0.weight": np.ones((4, inputs), dtype=np.float32)}
    low = np.zeros(inputs, dtype=np.float32)
    return PolicyArtifact("factorised", weights, low, low + 1, LAYOUT, {})


@pytest.mark.parametrize("made", [of_set(), of_fleet()], ids=["set", "factorised"])
def test_what_is_saved_comes_back(tmp_path: Path, made: PolicyArtifact) -> None:
    save_policy(tmp_path / "policy", made)
    found = load_policy(tmp_path / "policy")
    assert found.digest == made.digest
    assert (found.architecture, found.provenance) == (made.architecture, made.provenance)
    assert (found.layout is None) == (made.layout is None)
    changed = {name: values + 1 for name, values in made.weights.items()}
    assert replace(made, weights=changed).digest != made.digest


def test_a_torn_a_strange_or_an_absent_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    with pytest.raises(ArtifactError, match="holds no manifest"):
        load_policy(folder)
    save_policy(folder, of_set())
    whole = load_artifact(folder, "routing-policy")
    (folder / "arrays.npz").write_bytes(b"something else")
    with pytest.raises(ArtifactError, match="not the file that was saved"):
        load_policy(folder)
    details = {**whole.details, "candidate_features": ["quality"]}
    save_artifact(folder, replace(whole, details=details))
    with pytest.raises(ArtifactError, match="other features; train it again"):
        load_policy(folder)
    save_artifact(folder, replace(whole, kind="drlm-predictors"))
    with pytest.raises(ArtifactError, match="holds 'drlm-predictors'"):
        load_policy(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weights.candidate.0.weight", np.zeros((4, 3), dtype=np.float32)),
        ("lowest", np.zeros(2, dtype=np.float32)),
        ("weights.score.weight", np.array([[np.nan]], dtype=np.float32)),
    ],
)
def test_arrays_that_cannot_serve_are_refused_before_they_do(
    tmp_path: Path, name: str, value: np.ndarray
) -> None:
    save_policy(tmp_path / "policy", of_set())
    whole = load_artifact(tmp_path / "policy", "routing-policy")
    save_artifact(tmp_path / "policy", replace(whole, arrays={**whole.arrays, name: value}))
    with pytest.raises(ArtifactError, match="is inconsistent"):
        load_policy(tmp_path / "policy")


def test_policies_are_found_by_their_names_and_only_of_their_architecture(tmp_path: Path) -> None:
    save_policy(tmp_path / "ppo-set", of_set())
    save_policy(tmp_path / "ppo", of_set())
    find = policies_in(tmp_path)
    assert served_policy("ppo-set", find).is_trained
    assert not served_policy("ppo", find).is_trained
    nowhere = policies_in(None)("ppo")
    assert isinstance(nowhere, NoArtifact)
    assert "edge-controller lab train ppo" in nowhere.reason
