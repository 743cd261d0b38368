"""DRLM's cluster as shipped, and what is wrong with files that describe none."""

from pathlib import Path

import pytest

from controller.lab.simulator.scenario_file import ScenarioError, parse_scenario, read_scenario

SMALL = """
format = "pointsman.scenario/1"
name = "small"
[[device]]
class = "BOARD"
cores = 4
memory_gib = 4
[[nodes]]
name = "board"
class = "BOARD"
count = 2
memory_gib = 2
[[model]]
family = "gemma3"
billions = 1
quantisation_bits = [4, 16]
classes = ["BOARD"]
"""


def test_the_papers_cluster_is_shipped() -> None:
    cluster = read_scenario("drlm")
    by_class = [0] * len(cluster.devices)
    for group in cluster.groups:
        by_class[group.device] += group.count
    kinds = [device.kind for device in cluster.devices]
    assert dict(zip(kinds, by_class, strict=True)) == {
        "RP": 38,
        "NJN": 6,
        "JON": 2,
        "JOA": 2,
        "VM": 16,
    }
    assert len(cluster.node_names) == len(set(cluster.node_names)) == 64
    assert len(cluster.models) == 23
    assert cluster.pairs[0].size == 85
    # Table I: what is placed on which class.
    names = [model.configuration.name for model in cluster.models]
    on_nano = {names[m] for m, d in zip(*cluster.pairs, strict=True) if kinds[d] == "NJN"}
    assert "llama3.2-1b-z8" in on_nano
    assert not any(name.startswith(("llama3.2-3b", "gpt-oss", "qwen3")) for name in on_nano)


def test_a_node_has_what_fits_its_memory() -> None:
    cluster = read_scenario("drlm")
    names = [model.configuration.name for model in cluster.models]
    groups = [group.name for group in cluster.groups]
    hosted = cluster.hosted
    three, four = names.index("llama3.2-3b-z4"), names.index("llama3.1-8b-z16")
    assert not hosted[three, groups.index("rpi4-2gb")]
    assert hosted[three, groups.index("rpi4-4gb")]
    assert not hosted[four, groups.index("vm-4")]
    assert hosted[four, groups.index("vm-8")]
    node_of, model_of = cluster.destinations
    assert node_of.size == int((hosted.sum(axis=0) * [g.count for g in cluster.groups]).sum())
    assert hosted[model_of, cluster.group_of_node[node_of]].all()


def test_a_file_is_read_as_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(SMALL + '[[event]]\nnode = "board-1"\nat_seconds = 5\nwhat = "fails"\n')
    cluster = read_scenario(path)
    assert cluster.node_names == ("board-0", "board-1")
    assert cluster.hosted.tolist() == [[True], [False]]  # 2 GB of weights do not fit 2 GiB
    assert [(e.node, e.at_seconds, e.is_up) for e in cluster.events] == [(1, 5.0, False)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[[", "not valid TOML"),
        (SMALL.replace("scenario/1", "scenario/9"), "this version reads pointsman.scenario/1"),
        (SMALL.replace("count = 2", "count = 0"), "count is 0; at least 1"),
        (SMALL.replace("count = 2", "count = true"), "no int"),
        (SMALL.replace("count = 2", "count = 2\ncolour = 3"), "unknown key colour"),
        (SMALL.replace('class = "BOARD"\ncount', 'class = "BORED"\ncount'), "there are BOARD"),
        (SMALL.replace("[4, 16]", "[4, 77]"), "quantisation_bits has 77"),
        (SMALL.replace("[4, 16]", "[]"), "at least one"),
        (SMALL.replace("memory_gib = 2", "memory_gib = 0.3"), "no model that is placed"),
        (SMALL.replace("memory_gib = 2", "memory_gib = inf"), "finite"),
        (SMALL.replace("billions = 1", "billions = 1\nactive_billions = 2"), "above billions"),
        (SMALL + "[[nodes]]\nname = 'board'\nclass = 'BOARD'\n", "board is there twice"),
        (SMALL + "[[event]]\nnode = 'board-7'\n", "names 'board-7'"),
        (SMALL + "[[event]]\nnode = 'board-0'\nwhat = 'sleeps'\n", "fails or joins"),
        ("format = 'pointsman.scenario/1'\n", "the cluster has no model"),
    ],
)
def test_what_is_wrong_is_said(text: str, found: str) -> None:
    with pytest.raises(ScenarioError, match=found.replace("[", r"\[")):
        parse_scenario(text, "small.toml")


def test_everything_wrong_is_said_at_once() -> None:
    with pytest.raises(ScenarioError) as caught:
        parse_scenario(SMALL.replace("count = 2", "count = 0").replace("[4, 16]", "[77]"), "a")
    assert "count is 0" in str(caught.value)
    assert "77" in str(caught.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ScenarioError, match=r"nowhere\.toml: cannot be read"):
        read_scenario("nowhere.toml")
