import json
from pathlib import Path

import numpy as np
import pytest

from controller.storage.artifacts import Artifact, ArtifactError, load_artifact, save_artifact


def example() -> Artifact:
    return Artifact(
        "thing",
        {"a": np.arange(6.0).reshape(2, 3), "b": np.array([1, 2])},
        {"words": "ä line\n"},
        {"classes": ["x", "y"]},
        {"rows": 7},
        made_time=1.5,
    )


def test_what_is_saved_comes_back(tmp_path):
    save_artifact(tmp_path / "art", example())
    found = load_artifact(tmp_path / "art", "thing")
    assert found.arrays["a"].tolist() == example().arrays["a"].tolist()
    assert found.texts == {"words": "ä line\n"}
    assert found.details == {"classes": ["x", "y"]}
    assert (found.provenance, found.made_time) == ({"rows": 7}, 1.5)


def test_saving_again_replaces_all_of_it(tmp_path):
    save_artifact(tmp_path / "art", example())
    save_artifact(tmp_path / "art", Artifact("thing", {"c": np.zeros(1)}))
    found = load_artifact(tmp_path / "art", "thing")
    assert set(found.arrays) == {"c"}
    assert found.texts == {}
    assert [path.name for path in tmp_path.iterdir()] == ["art"]


def test_one_that_is_saved_while_it_is_read_comes_whole(tmp_path, monkeypatch):
    save_artifact(tmp_path / "art", example())
    read, seen = Path.read_bytes, []

    def read_bytes(path):
        if not seen:  # the manifest has been read, the files beside it have not
            seen.append(path)
            save_artifact(tmp_path / "art", Artifact("thing", {"c": np.zeros(1)}))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    assert set(load_artifact(tmp_path / "art", "thing").arrays) == {"c"}


def test_arrays_are_those_whose_digest_was_checked(tmp_path, monkeypatch):
    save_artifact(tmp_path / "art", example())
    save_artifact(tmp_path / "next", Artifact("thing", {"a": np.zeros(1)}))
    read = Path.read_bytes

    def read_bytes(path):
        content = read(path)
        if path == tmp_path / "art" / "arrays.npz":
            (tmp_path / "next" / "arrays.npz").replace(path)
        return content

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    found = load_artifact(tmp_path / "art", "thing")
    assert found.arrays["a"].tolist() == example().arrays["a"].tolist()


@pytest.mark.parametrize("name", ["arrays.npz", "words.txt"])
def test_an_altered_file_is_refused(tmp_path, name):
    save_artifact(tmp_path / "art", example())
    path = tmp_path / "art" / name
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(ArtifactError, match="not the file that was saved"):
        load_artifact(tmp_path / "art", "thing")


def test_another_kind_version_or_nothing_is_refused_with_a_reason(tmp_path):
    with pytest.raises(ArtifactError, match="holds no manifest"):
        load_artifact(tmp_path / "none", "thing")
    save_artifact(tmp_path / "art", example())
    with pytest.raises(ArtifactError, match="holds 'thing', not 'other'"):
        load_artifact(tmp_path / "art", "other")
    path = tmp_path / "art" / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "schema_version": 99}))
    with pytest.raises(ArtifactError, match="has schema 99"):
        load_artifact(tmp_path / "art", "thing")


def test_a_manifest_cannot_name_files_elsewhere(tmp_path):
    save_artifact(tmp_path / "art", example())
    path = tmp_path / "art" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"]["../secret.txt"] = "0" * 64
    path.write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match="no plain name"):
        load_artifact(tmp_path / "art", "thing")


def test_objects_are_never_saved(tmp_path):
    with pytest.raises(ArtifactError, match="pickle"):
        save_artifact(tmp_path / "art", Artifact("thing", {"a": np.array([{}], dtype=object)}))
    assert list(tmp_path.iterdir()) == []
