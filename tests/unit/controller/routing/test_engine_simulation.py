import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.domain.cluster import Calibration, ClusterSnapshot, InFlightWork, NetworkPath
from controller.domain.engine_speed import CHUNK_SECONDS
from controller.ids import ModelName
from controller.routing.engine_simulation import predicted_finish_seconds
from controller.routing.formulation import FormulatedBatch, formulate
from tests.unit.controller.routing.clusters import destination, fleet, node, request

NO_NETWORK = NetworkPath(0.0, 1e15, 1e15)
SPEEDS = Calibration(100.0, 10.0, 20.0)
SMALL = ModelName("small")


def batch_of(snapshot: ClusterSnapshot, outputs: list[float], prompt: int = 400) -> FormulatedBatch:
    """Requests of `prompt` / 4 tokens whose answers have these lengths."""
    asked = [request(f"r{i}", prompt="x" * prompt) for i in range(len(outputs))]
    shape = (len(outputs), len(snapshot.destinations))
    tokens = np.broadcast_to(np.array(outputs)[:, None], shape)
    return formulate(asked, snapshot, output_tokens=tokens)


def one_node(in_flight: tuple[InFlightWork, ...] = (), slots: int = 4) -> ClusterSnapshot:
    return fleet(
        [node("a", network=NO_NETWORK, in_flight=in_flight)],
        [destination("a", "small", calibration=SPEEDS, slots=slots)],
    )


def finish(batch: FormulatedBatch) -> list[float]:
    assignment = np.zeros(batch.problem.n_requests, dtype=np.int64)
    return [float(value) for value in predicted_finish_seconds(batch, assignment)]


def test_request_alone_takes_its_prompt_and_its_steps() -> None:
    """100 prompt tokens at 100 a second; the first of 31 tokens comes with the prompt's end."""
    assert finish(batch_of(one_node(), [31.0])) == [pytest.approx(1.0 + 30 / 10.0)]


def test_two_answers_share_their_steps() -> None:
    """t(1) = 0.1 s, t(4) = 0.2 s, so t(2) = 0.1333 s; the second prompt is read meanwhile."""
    times = finish(batch_of(one_node(), [31.0, 31.0], prompt=4))
    read = 0.01
    assert times[1] == pytest.approx(2 * read + 30 * 0.4 / 3, rel=0.05)
    assert times[0] <= times[1]


def test_reading_a_long_prompt_slows_writing_but_does_not_stop_it() -> None:
    in_flight = (InFlightWork(SMALL, 0.0, 40.0),)
    alone = finish(batch_of(one_node(), [2.0], prompt=4000))[0]
    beside = finish(batch_of(one_node(in_flight), [2.0], prompt=4000))[0]
    assert alone == pytest.approx(10.1, rel=0.02)
    # 40 steps of 0.1 s come in between, and the rest is read at full speed.
    assert beside == pytest.approx(alone + 4.0, rel=0.05)
    assert CHUNK_SECONDS < 1.0


def test_requests_in_flight_hold_their_slots() -> None:
    """Both slots are taken: the next begins when the shorter of them ends."""
    in_flight = (InFlightWork(SMALL, 0.0, 10.0), InFlightWork(SMALL, 0.0, 1000.0))
    speeds = Calibration(1e9, 10.0, 20.0)  # two sequences at the price of one
    snapshot = fleet(
        [node("a", network=NO_NETWORK, in_flight=in_flight)],
        [destination("a", "small", calibration=speeds, slots=2)],
    )
    assert finish(batch_of(snapshot, [11.0])) == [pytest.approx(1.0 + 1.0)]
    free = fleet(
        [node("a", network=NO_NETWORK, in_flight=in_flight[1:])],
        [destination("a", "small", calibration=speeds, slots=2)],
    )
    assert finish(batch_of(free, [11.0])) == [pytest.approx(1.0)]


def test_models_of_one_node_slow_each_other_down_as_far_as_they_share_the_processor() -> None:
    def two_models(utilisation: float) -> list[float]:
        speeds = Calibration(1e9, 10.0, 20.0, utilisation)
        snapshot = fleet(
            [node("a", network=NO_NETWORK)],
            [destination("a", name, calibration=speeds) for name in ("m1", "m2")],
        )
        batch = batch_of(snapshot, [11.0, 11.0])
        return [float(t) for t in predicted_finish_seconds(batch, np.array([0, 1]))]

    assert two_models(1.0) == [pytest.approx(2.0), pytest.approx(2.0)]
    assert two_models(0.5) == [pytest.approx(1.0), pytest.approx(1.0)]
    assert two_models(0.75) == [pytest.approx(1.5), pytest.approx(1.5)]


def test_request_sent_nowhere_has_no_finish_and_network_is_added() -> None:
    snapshot = fleet([node("a", overhead_seconds=0.5)], [destination("a", calibration=SPEEDS)])
    batch = batch_of(snapshot, [31.0, 31.0])
    times = predicted_finish_seconds(batch, np.array([0, -1]))
    assert np.isnan(times[1])
    assert times[0] == pytest.approx(4.0 + batch.problem.network_seconds[0, 0])
    assert batch.problem.network_seconds[0, 0] > 0.5


@pytest.mark.parametrize("assignment", [[0.0], [1], [-2], [0, 0]])
def test_assignment_that_names_no_destination_is_refused(assignment: list[float]) -> None:
    with pytest.raises(ValueError, match="assignment"):
        predicted_finish_seconds(batch_of(one_node(), [5.0]), np.array(assignment))


works = st.builds(InFlightWork, st.just(SMALL), st.floats(0.0, 500.0), st.floats(0.0, 200.0))


@given(
    st.lists(works, max_size=6),
    st.lists(st.floats(1.0, 200.0), min_size=1, max_size=8),
    st.integers(1, 6),
    works,
)
def test_everything_ends_and_more_in_flight_never_ends_the_batch_sooner(
    in_flight: list[InFlightWork], outputs: list[float], slots: int, more: InFlightWork
) -> None:
    before = finish(batch_of(one_node(tuple(in_flight), slots), outputs))
    after = finish(batch_of(one_node((*in_flight, more), slots), outputs))
    assert np.isfinite(before).all()
    assert np.isfinite(after).all()
    alone = [1.0 + (tokens - 1.0) / 10.0 for tokens in outputs]
    assert all(t >= a - 1e-6 for t, a in zip(before, alone, strict=True))
    assert max(after) >= 0.8 * max(before)  # who gets which slot may turn out luckier
