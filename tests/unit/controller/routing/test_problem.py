import io
import pickle
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from controller.routing.problem import (
    FORMAT,
    EmptyBatch,
    InvalidValue,
    InvalidWeights,
    MalformedArray,
    NoDestination,
    Normalisation,
    ProblemError,
    ProblemMetadata,
    RoutingProblem,
    UnreadableProblem,
    load_problem,
    save_problem,
)
from tests.unit.controller.routing.problems import problems, random_problem


def arrays(n_requests: int = 2, n_destinations: int = 3, n_nodes: int = 2) -> dict[str, Any]:
    shape = (n_requests, n_destinations)
    return {
        "quality": np.full(shape, 0.5),
        "cost_usd": np.zeros(shape),
        "energy_joules": np.ones(shape),
        "work_seconds": np.ones(shape),
        "latency_seconds": np.ones(shape),
        "network_seconds": np.zeros(shape),
        "node_of": np.arange(n_destinations) % max(n_nodes, 1),
        "backlog_seconds": np.zeros(n_nodes),
        "feasible": np.ones(shape, dtype=np.bool_),
        "weights": np.full(4, 0.25),
    }


def test_empty_batch_is_refused() -> None:
    with pytest.raises(EmptyBatch, match="no request"):
        RoutingProblem(**arrays(n_requests=0))


def test_batch_without_destination_is_refused() -> None:
    with pytest.raises(NoDestination):
        RoutingProblem(**arrays(n_destinations=0))


def test_fleet_without_node_is_refused() -> None:
    with pytest.raises(NoDestination):
        RoutingProblem(**arrays(n_nodes=0))


@pytest.mark.parametrize(
    "name",
    [
        "quality",
        "cost_usd",
        "energy_joules",
        "work_seconds",
        "latency_seconds",
        "network_seconds",
        "backlog_seconds",
    ],
)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.nan, "NaN"),
        (np.inf, "infinite"),
        (-np.inf, "infinite"),
        (-0.001, "negative"),
        (1e300, "above"),
    ],
)
def test_impossible_number_is_refused_with_its_place(name: str, value: float, message: str) -> None:
    broken = arrays()
    broken[name] = broken[name].copy()
    broken[name].flat[1] = value
    place = r"\[1\]" if name == "backlog_seconds" else r"\[0, 1\]"
    with pytest.raises(InvalidValue, match=rf"{name}{place}.*{message}"):
        RoutingProblem(**broken)


def test_quality_above_one_is_refused() -> None:
    with pytest.raises(InvalidValue, match=r"quality.*above 1"):
        RoutingProblem(**{**arrays(), "quality": np.full((2, 3), 1.01)})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("quality", np.zeros(3)),
        ("cost_usd", np.zeros((3, 2))),
        ("node_of", np.zeros(2, dtype=np.int64)),
        ("node_of", np.array([0, 1, 2])),
        ("node_of", np.array([0, -1, 0])),
        ("node_of", np.array([0.0, 1.0, 0.0])),
        ("backlog_seconds", np.zeros((2, 1))),
        ("feasible", np.ones((2, 3))),
        ("quality", np.array([["a"] * 3] * 2)),
        ("bounds", np.zeros((4, 3))),
        ("normalisation", "payoff"),
    ],
)
def test_wrong_shape_dtype_or_index_is_refused(name: str, value: Any) -> None:
    with pytest.raises(MalformedArray, match=name.split("_")[0]):
        RoutingProblem(**{**arrays(), name: value})


@pytest.mark.parametrize(
    "weights",
    [
        [0.5, 0.5, 0.5, -0.5],
        [0.0, 0.0, 0.0, 0.0],
        [0.3, 0.3, 0.3, 0.3],
        [1.0],
        [np.nan, 0.0, 0.0, 1.0],
    ],
)
def test_weights_that_are_no_shares_are_refused(weights: list[float]) -> None:
    with pytest.raises(InvalidWeights):
        RoutingProblem(**{**arrays(), "weights": np.array(weights)})


def test_bounds_upside_down_are_refused_by_the_name_of_their_term() -> None:
    bounds = np.array([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    with pytest.raises(InvalidValue, match="cost"):
        RoutingProblem(**arrays(), bounds=bounds)


def test_metadata_is_checked_like_the_rest() -> None:
    with pytest.raises(InvalidValue, match="slots"):
        RoutingProblem(**arrays(), metadata=ProblemMetadata(slots=np.array([1, 0, 1])))
    with pytest.raises(MalformedArray, match="node_is_edge"):
        RoutingProblem(
            **arrays(), metadata=ProblemMetadata(node_is_edge=np.ones(3, dtype=np.bool_))
        )


def test_arrays_of_a_problem_cannot_be_changed_by_a_policy_or_the_caller() -> None:
    given = arrays()
    problem = RoutingProblem(**given)
    given["quality"][:] = 0.9
    assert (problem.quality == 0.5).all()
    with pytest.raises(ValueError, match="read-only"):
        problem.quality[0, 0] = 1.0


def test_request_without_feasible_destination_is_not_routable() -> None:
    feasible = np.array([[True, False, False], [False, False, False]])
    problem = RoutingProblem(**{**arrays(), "feasible": feasible})
    assert problem.routable.tolist() == [True, False]


@settings(deadline=None)
@given(problems())
def test_saved_problem_loads_the_same(problem: RoutingProblem) -> None:
    buffer = io.BytesIO()
    save_problem(problem, buffer)
    buffer.seek(0)
    loaded = load_problem(buffer)
    for part in fields(RoutingProblem):
        if part.name == "metadata":
            continue
        np.testing.assert_array_equal(getattr(problem, part.name), getattr(loaded, part.name))


def test_bounds_and_metadata_are_kept_in_the_file(tmp_path: Path) -> None:
    bounds = np.array([[0.0, 1.0], [0.0, 0.0], [2.0, 5.0], [1.0, 9.0]])
    metadata = ProblemMetadata(
        node_is_edge=np.array([True, False]),
        slots=np.array([4, 1, 2]),
        model_of=np.array([0, 1, 0]),
    )
    file = tmp_path / "one.npz"
    save_problem(RoutingProblem(**arrays(), bounds=bounds, metadata=metadata), file)
    loaded = load_problem(file)
    np.testing.assert_array_equal(loaded.bounds, bounds)
    np.testing.assert_array_equal(loaded.metadata.slots, [4, 1, 2])
    np.testing.assert_array_equal(loaded.metadata.node_is_edge, [True, False])
    assert loaded.metadata.cluster_error is None


def test_file_has_the_arrays_of_the_format_and_opens_without_pickles(tmp_path: Path) -> None:
    file = tmp_path / "problem"
    save_problem(random_problem(3, 4, 3), file)
    with np.load(file, allow_pickle=False) as archive:
        assert str(archive["format"]) == FORMAT == "pointsman.problem/1"
        assert str(archive["normalisation"]) == "payoff"
        assert archive["node_of"].dtype == np.int64
        assert archive["feasible"].dtype == np.bool_
        assert archive["quality"].shape == (4, 3)


def stored(tmp_path: Path, **changes: Any) -> Path:
    contents = {"format": np.array(FORMAT), "normalisation": np.array("payoff"), **arrays()}
    contents.update(changes)
    file = tmp_path / "stored.npz"
    np.savez(file, **{name: value for name, value in contents.items() if value is not None})
    return file


def test_file_of_another_solver_loads(tmp_path: Path) -> None:
    problem = load_problem(stored(tmp_path, extra=np.zeros(7)))
    assert problem.normalisation is Normalisation.PAYOFF
    assert problem.bounds is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": np.array("pointsman.problem/2")}, "format is pointsman.problem/2"),
        ({"format": None}, "format is absent"),
        ({"quality": None, "weights": None}, "lacks quality, weights"),
        ({"normalisation": np.array("z-score")}, "known are payoff"),
        ({"quality": np.array([[object()] * 3] * 2)}, "unreadable"),
    ],
)
def test_file_of_something_else_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnreadableProblem, match=message) as caught:
        load_problem(stored(tmp_path, **changes))
    assert "pickle" not in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04 torn", b"text", pickle.dumps({"quality": [1]})]
)
def test_bytes_that_are_no_archive_are_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "junk.npz"
    file.write_bytes(content)
    with pytest.raises(UnreadableProblem, match="archive") as caught:
        load_problem(file)
    assert "pickle" not in str(caught.value)


def test_single_array_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "single.npy"
    np.save(file, np.zeros(3))
    with pytest.raises(UnreadableProblem, match="single array"):
        load_problem(file)


def test_absent_file_is_the_callers_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_problem(tmp_path / "absent.npz")


def test_wrong_numbers_in_a_file_are_refused_as_in_memory(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match="NaN"):
        load_problem(stored(tmp_path, quality=np.full((2, 3), np.nan)))


def test_replacing_an_array_checks_again() -> None:
    with pytest.raises(InvalidValue):
        replace(random_problem(0, 2, 2), cost_usd=np.full((2, 2), -1.0))


def test_only_arrays_that_nobody_can_write_to_are_shared() -> None:
    """A read-only view does not keep the owner of the memory from writing."""
    frozen, view_of = np.full((1, 2), 0.5), np.full((1, 2), 0.5)
    frozen.flags.writeable = False
    view = view_of.view()
    view.flags.writeable = False
    found = RoutingProblem(**arrays(1, 2) | {"quality": frozen, "cost_usd": view})
    assert found.quality is frozen
    view_of[0, 0] = 7.0
    assert found.cost_usd[0, 0] == 0.5
