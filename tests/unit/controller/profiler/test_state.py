from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from controller.domain.cluster import Calibration, NodeKind, NodeState
from controller.domain.completion import Usage
from controller.domain.engine_speed import CHUNK_SECONDS
from controller.domain.known_calibration import CalibrationKey, KnownCalibration
from controller.domain.node_report import ModelPhase
from controller.ids import ModelName, NodeId, RequestId
from controller.profiler.events import (
    DrainChanged,
    HealthReported,
    ModelsReported,
    NodeConnected,
    NodeDisconnected,
    NodeForgotten,
    ProbeReturned,
    RequestDispatched,
    RequestEnded,
    TokensStreamed,
)
from controller.profiler.request_monitor import Claim
from controller.profiler.state import ProfilerState
from tests.fakes.reports import SPEEDS, health, hello, join, reported_model, routable_nodes

STALE_SECONDS = 10.0
PI = NodeId("pi")
SMALL = ModelName("small")


def dispatched(
    request_id: str = "r1", node_id: NodeId = PI, work: float = 2.0
) -> RequestDispatched:
    return RequestDispatched(node_id, RequestId(request_id), Claim(SMALL, work, 100.0))


@pytest.fixture
def profiler() -> ProfilerState:
    return ProfilerState(STALE_SECONDS)


def refusal(profiler: ProfilerState, now: float) -> str | None:
    (node,) = profiler.snapshot(now).nodes
    return node.refusal


# -- what is routable ------------------------------------------------------------------------------


def test_connected_node_takes_work_from_its_first_health_sample_on(
    profiler: ProfilerState,
) -> None:
    profiler.apply(NodeConnected(hello(), False), 1.0)
    assert refusal(profiler, 1.0) == "node has not reported its health yet"
    profiler.apply(HealthReported(PI, health()), 1.0)
    assert refusal(profiler, 1.0) is None


def test_stale_health_means_unknown_and_never_idle(profiler: ProfilerState) -> None:
    join(profiler, 1.0)
    assert refusal(profiler, 1.0 + STALE_SECONDS) is None
    why = refusal(profiler, 1.1 + STALE_SECONDS)
    assert why is not None
    assert "health report is 10 s old" in why
    profiler.apply(HealthReported(PI, health()), 20.0)
    assert refusal(profiler, 20.0) is None


def test_lost_node_leaves_routing_at_once_and_stays_listed_until_forgotten(
    profiler: ProfilerState,
) -> None:
    join(profiler, 1.0)
    profiler.apply(NodeDisconnected(PI), 5.0)
    assert refusal(profiler, 5.0) == "node is offline"
    record = profiler.nodes[PI]
    assert (record.state, record.last_seen_at) == (NodeState.OFFLINE, 1.0)
    profiler.apply(NodeForgotten(PI), 6.0)
    assert profiler.snapshot(6.0).nodes == ()


def test_end_of_a_request_is_no_sign_of_life(profiler: ProfilerState) -> None:
    """The controller's own cancel of a request at a lost node said nothing about the node."""
    join(profiler, 1.0)
    profiler.apply(dispatched(), 1.0)
    profiler.apply(NodeDisconnected(PI), 5.0)
    profiler.apply(RequestEnded(PI, RequestId("r1"), True), 9.0)
    assert profiler.nodes[PI].last_seen_at == 1.0


@pytest.mark.parametrize("phase", [ModelPhase.LOADING, ModelPhase.FAILED])
def test_model_that_is_not_ready_is_no_destination(
    profiler: ProfilerState, phase: ModelPhase
) -> None:
    join(profiler, 1.0, hello(models=(reported_model(phase=phase),)))
    assert profiler.snapshot(1.0).destinations == ()
    assert refusal(profiler, 1.0) == "node is loading"


def test_model_of_unknown_speed_is_no_destination(profiler: ProfilerState) -> None:
    join(profiler, 1.0, hello(models=(reported_model(calibration=None),)))
    assert profiler.snapshot(1.0).destinations == ()
    profiler.apply(ModelsReported(PI, (reported_model(),)), 2.0)
    assert [d.model for d in profiler.snapshot(2.0).destinations] == ["small"]


def test_drained_node_keeps_what_it_has_and_gets_nothing_new(profiler: ProfilerState) -> None:
    join(profiler, 1.0)
    profiler.apply(dispatched(), 1.0)
    profiler.apply(DrainChanged(PI, True), 2.0)
    assert refusal(profiler, 2.0) == "node is draining"
    assert profiler.snapshot(2.0).nodes[0].inflight_requests == 1
    profiler.apply(DrainChanged(PI, False), 3.0)
    assert refusal(profiler, 3.0) is None


def test_snapshot_is_in_the_order_that_its_readers_rely_on(profiler: ProfilerState) -> None:
    for name in ("vm", "jetson", "pi"):
        models = (reported_model("zeta"), reported_model("alpha"))
        join(profiler, 1.0, hello(name, models))
    snapshot = profiler.snapshot(1.0)
    assert [node.node_id for node in snapshot.nodes] == ["jetson", "pi", "vm"]
    assert [(d.node_id, d.model) for d in snapshot.destinations] == [
        (node, model) for node in ("jetson", "pi", "vm") for model in ("alpha", "zeta")
    ]


def test_fleet_version_rises_when_something_is_learnt_of_a_destination_and_not_by_requests(
    profiler: ProfilerState,
) -> None:
    join(profiler, 1.0)
    before = profiler.snapshot(1.0)
    profiler.apply(dispatched(), 2.0)
    profiler.apply(TokensStreamed(PI, RequestId("r1"), 3), 2.5)
    claimed = profiler.snapshot(2.5)
    assert claimed.destinations != before.destinations  # a slot is taken
    assert claimed.fleet_version == before.fleet_version
    join(profiler, 3.0, hello("vm", models=()))  # a node alone moves the indices of others
    joined = profiler.snapshot(3.0)
    assert joined.fleet_version == (before.fleet_version or 0) + 1
    join(profiler, 4.0, hello("vm"))
    assert profiler.snapshot(4.0).fleet_version == (before.fleet_version or 0) + 2


# -- what is believed ------------------------------------------------------------------------------


def test_round_trip_is_a_default_until_measured_and_smoothed_after(
    profiler: ProfilerState,
) -> None:
    join(profiler, 1.0)
    join(profiler, 1.0, hello("vm", kind=NodeKind.CLOUD))
    pi, vm = profiler.snapshot(1.0).nodes
    assert 0 < pi.network.round_trip_seconds < vm.network.round_trip_seconds
    profiler.apply(ProbeReturned(PI, 0.2), 2.0)
    assert profiler.snapshot(2.0).nodes[0].network.round_trip_seconds == pytest.approx(0.2)
    profiler.apply(ProbeReturned(PI, 0.6), 3.0)
    assert profiler.snapshot(3.0).nodes[0].network.round_trip_seconds == pytest.approx(0.3)


def test_quality_comes_from_the_prior_and_says_so(profiler: ProfilerState) -> None:
    models = (reported_model("a", parameters_billions=0.1), reported_model("b"))
    join(profiler, 1.0, hello(models=models))
    small, large = profiler.snapshot(1.0).destinations
    assert small.mean_quality_ratio < large.mean_quality_ratio
    assert (small.quality_source, small.quality_count) == ("prior", 0)


def test_health_sample_does_not_touch_claims(profiler: ProfilerState) -> None:
    """A node's view, which may be older than a claim, never overwrites it."""
    join(profiler, 1.0)
    profiler.apply(dispatched(), 2.0)
    profiler.apply(HealthReported(PI, health()), 2.0)
    profiler.apply(ModelsReported(PI, (reported_model(),)), 2.0)
    (node,) = profiler.snapshot(2.0).nodes
    assert node.inflight_requests == 1
    assert node.backlog_seconds == pytest.approx(2.0)


def test_request_that_ends_twice_is_counted_once(profiler: ProfilerState) -> None:
    """The node's completion and the client's going away may both end it."""
    join(profiler, 1.0)
    profiler.apply(dispatched(), 1.0)
    for _ in range(2):
        profiler.apply(RequestEnded(PI, RequestId("r1"), False), 2.0)
    profiler.apply(dispatched("r2"), 3.0)
    for _ in range(2):
        profiler.apply(RequestEnded(PI, RequestId("r2"), True), 4.0)
    record = profiler.nodes[PI]
    assert (record.completed_requests, record.failed_requests) == (1, 1)


def test_requests_of_a_lost_node_count_as_failed_there(profiler: ProfilerState) -> None:
    join(profiler, 1.0)
    profiler.apply(dispatched("r1"), 1.0)
    profiler.apply(dispatched("r2"), 1.0)
    profiler.apply(NodeDisconnected(PI), 2.0)
    record = profiler.nodes[PI]
    assert (record.completed_requests, record.failed_requests) == (0, 2)


def test_counts_of_a_node_outlive_its_reconnects(profiler: ProfilerState) -> None:
    join(profiler, 1.0)
    profiler.apply(dispatched(), 1.0)
    profiler.apply(RequestEnded(PI, RequestId("r1"), False), 2.0)
    profiler.apply(NodeDisconnected(PI), 3.0)
    join(profiler, 4.0)
    assert profiler.nodes[PI].completed_requests == 1


@pytest.mark.parametrize(
    "event",
    [
        NodeDisconnected(PI),
        NodeForgotten(PI),
        DrainChanged(PI, True),
        ModelsReported(PI, ()),
        HealthReported(PI, health()),
        ProbeReturned(PI, 1.0),
        dispatched(),
        TokensStreamed(PI, RequestId("r1"), 1),
        RequestEnded(PI, RequestId("r1"), False),
    ],
)
def test_events_about_a_forgotten_node_are_ignored(
    profiler: ProfilerState, event: NodeDisconnected
) -> None:
    profiler.apply(event, 1.0)
    assert profiler.nodes == {}


# -- what completions teach ------------------------------------------------------------------------


def answer(profiler: ProfilerState, number: int, slow: float, start: float) -> float:
    """One request alone at a node that is so many times slower than reported; its end's time."""
    request_id = RequestId(f"q{number}")
    profiler.apply(
        RequestDispatched(PI, request_id, Claim(SMALL, 1.0, 50.0, 0.5, 100.0, 64)),
        start,
    )
    prefill, decode = slow * 100.0 / 200.0, slow * 49.0 / 20.0
    profiler.apply(TokensStreamed(PI, request_id, 1), start + prefill)
    profiler.apply(TokensStreamed(PI, request_id, 49), start + prefill + decode)
    end = start + prefill + decode
    usage = Usage(100, 50, 0.0, prefill, decode)
    profiler.apply(RequestEnded(PI, request_id, False, usage=usage), end)
    return end


def speeds(profiler: ProfilerState, now: float) -> Calibration:
    (found,) = profiler.snapshot(now).destinations
    return found.calibration


def test_slow_down_is_in_the_predictions_within_twenty_completions(
    profiler: ProfilerState,
) -> None:
    join(profiler, 1.0)
    now = 1.0
    for number in range(20):
        now = answer(profiler, number, 2.0, now)
    found = speeds(profiler, now)
    assert found.prefill_tokens_per_second == pytest.approx(100.0, rel=0.1)
    assert found.decode_tokens_per_second == pytest.approx(10.0, rel=0.1)


def test_node_that_comes_back_is_as_fast_as_it_was_and_a_new_measurement_begins_anew(
    profiler: ProfilerState,
) -> None:
    join(profiler, 1.0)
    now = 1.0
    for number in range(20):
        now = answer(profiler, number, 2.0, now)
    learnt = speeds(profiler, now)
    profiler.apply(NodeDisconnected(PI), now)
    join(profiler, now + 5.0)
    assert speeds(profiler, now + 5.0) == learnt
    fresh = reported_model(calibration=Calibration(300.0, 30.0, 90.0))
    profiler.apply(ModelsReported(PI, (fresh,)), now + 6.0)
    assert speeds(profiler, now + 6.0).decode_tokens_per_second == pytest.approx(30.0)


def test_remembered_speed_makes_a_node_routable_before_it_has_measured(
    profiler: ProfilerState,
) -> None:
    """Another controller, or the same one after a restart, has seen this hardware and file."""
    join(profiler, 1.0)
    known = profiler.known_calibrations()
    later = ProfilerState(STALE_SECONDS)
    later.remember(known)
    join(later, 1.0, hello("other", (reported_model(calibration=None),)))
    assert routable_nodes(later.snapshot(1.0)) == {"other"}
    stranger = reported_model(calibration=None, digest="f" * 64)
    join(later, 1.0, hello("stranger", (stranger,)))
    assert [d.node_id for d in later.snapshot(1.0).destinations] == ["other"]


def test_speed_holds_for_one_power_mode(profiler: ProfilerState) -> None:
    join(profiler, 1.0)
    now = 1.0
    for number in range(20):
        now = answer(profiler, number, 2.0, now)
    profiler.apply(HealthReported(PI, health(power_mode="7W")), now)
    assert speeds(profiler, now).decode_tokens_per_second == pytest.approx(20.0)
    profiler.apply(HealthReported(PI, health()), now)
    assert speeds(profiler, now).decode_tokens_per_second == pytest.approx(10.0, rel=0.1)


def test_measurement_is_remembered_only_for_the_power_mode_it_was_made_in(
    profiler: ProfilerState,
) -> None:
    measured = replace(SPEEDS, power_mode="15W")
    join(profiler, 1.0, hello(models=(reported_model(calibration=measured),)))
    for mode in ("15W", "7W"):
        profiler.apply(HealthReported(PI, health(power_mode=mode)), 2.0)
        assert (
            speeds(profiler, 2.0).decode_tokens_per_second == 20.0
        )  # it stands in for the other mode
    assert {known.key.power_mode for known in profiler.known_calibrations()} == {"15W"}
    slow = replace(measured, decode_tokens_per_second=5.0, power_mode="7W")
    profiler.apply(ModelsReported(PI, (reported_model(calibration=slow),)), 3.0)
    remembered = {
        known.key.power_mode: known.calibration.decode_tokens_per_second
        for known in profiler.known_calibrations()
    }
    assert remembered == {"15W": 20.0, "7W": 5.0}


def test_throttled_node_is_predicted_slower_before_any_completion_says_so(
    profiler: ProfilerState,
) -> None:
    join(profiler, 1.0)
    profiler.apply(HealthReported(PI, health(is_throttled=True)), 2.0)
    assert speeds(profiler, 2.0).decode_tokens_per_second < 0.8 * 20.0
    profiler.apply(HealthReported(PI, health(is_throttled=False)), 3.0)
    assert speeds(profiler, 3.0).decode_tokens_per_second == pytest.approx(20.0)


def test_slots_are_claimed_at_decision_time(profiler: ProfilerState) -> None:
    """Before the node has said anything."""
    join(profiler, 1.0)
    for number in range(3):
        profiler.apply(dispatched(f"r{number}"), 1.0)
    (found,) = profiler.snapshot(1.0).destinations
    assert (found.free_slots, found.next_slot_seconds) == (1, 0.0)
    for number in range(3, 7):
        profiler.apply(dispatched(f"r{number}"), 1.0)
    (found,) = profiler.snapshot(1.0).destinations
    assert found.free_slots == 0
    assert found.next_slot_seconds > 0.0
    assert len(profiler.snapshot(1.0).nodes[0].in_flight) == 7


def test_cancelled_requests_are_counted_apart(profiler: ProfilerState) -> None:
    join(profiler, 1.0)
    profiler.apply(dispatched(), 1.0)
    profiler.apply(RequestEnded(PI, RequestId("r1"), False, is_cancelled=True), 2.0)
    record = profiler.nodes[PI]
    counts = (record.completed_requests, record.failed_requests, record.cancelled_requests)
    assert counts == (0, 0, 1)


def test_conversation_is_remembered_where_its_last_turn_was(profiler: ProfilerState) -> None:
    join(profiler, 1.0)
    for number in range(3):
        request_id = RequestId(f"r{number}")
        profiler.apply(dispatched(request_id), 1.0)
        profiler.apply(TokensStreamed(PI, request_id, 10), 2.0)
        usage = Usage(100, 10, 0.0, 0.5, 0.5, cached_prompt_tokens=90 if number else 0)
        profiler.apply(RequestEnded(PI, request_id, False, usage=usage, session_id="talk"), 3.0)
    assert profiler.snapshot(3.0).sessions == {}
    prefix = profiler.snapshot(3.0, ["", "talk", "unknown"]).sessions["talk"]
    assert (prefix.node_id, prefix.model, prefix.tokens) == (PI, SMALL, 110)
    assert 0.5 < prefix.hit_ratio <= 1.0
    profiler.apply(NodeDisconnected(PI), 4.0)
    assert profiler.snapshot(4.0, ["talk"]).sessions == {}


def test_answer_lengths_and_templates_are_learnt(profiler: ProfilerState) -> None:
    join(profiler, 1.0)
    for number in range(10):
        request_id = RequestId(f"r{number}")
        event = RequestDispatched(PI, request_id, Claim(SMALL, 1.0, 50.0, 0.5, 100.0, 64))
        profiler.apply(event, 1.0)
        profiler.apply(TokensStreamed(PI, request_id, 64), 2.0)
        usage = Usage(130, 64, 0.0, 0.5, 0.5)
        profiler.apply(RequestEnded(PI, request_id, False, usage=usage, was_cut=True), 3.0)
    (found,) = profiler.snapshot(3.0).destinations
    assert found.answer_lengths is not None
    assert found.answer_lengths.median_tokens > 64.0
    assert found.extra_prompt_tokens > 0.0


def test_paper_backlog_hears_of_dispatches_alone(profiler: ProfilerState) -> None:
    """CEMA III-B: B <- max(0, B - elapsed) + newly assigned service time."""
    join(profiler, 1.0)
    profiler.apply(dispatched(work=4.0), 1.0)
    profiler.apply(RequestEnded(PI, RequestId("r1"), False), 2.0)
    (node,) = profiler.snapshot(3.0).nodes
    assert node.backlog_seconds == 0.0
    assert node.paper_backlog_seconds == pytest.approx(2.0)
    assert profiler.snapshot(9.0).nodes[0].paper_backlog_seconds == 0.0


def test_fleet_that_falls_silent_as_one_gets_a_period_of_grace(profiler: ProfilerState) -> None:
    """The controller was stalled; it must not refuse everything at once."""
    for name in ("a", "b", "c"):
        join(profiler, 1.0, hello(name))
    assert len(routable_nodes(profiler.snapshot(2.0 + STALE_SECONDS))) == 3
    assert profiler.routable_destinations(2.0 + STALE_SECONDS) == 3
    assert routable_nodes(profiler.snapshot(2.0 + 2 * STALE_SECONDS)) == set()


# -- any interleaving ------------------------------------------------------------------------------


# -- what completions teach in company -------------------------------------------------------------


def claim(profiler: ProfilerState, name: str, now: float, model: ModelName = SMALL) -> RequestId:
    """Of 100 prompt tokens, which take half a second at the reported speed."""
    request_id = RequestId(name)
    profiler.apply(RequestDispatched(PI, request_id, Claim(model, 1.0, 50.0, 0.5, 100.0, 64)), now)
    return request_id


def stream(profiler: ProfilerState, request_id: RequestId, now: float, tokens: int = 1) -> None:
    profiler.apply(TokensStreamed(PI, request_id, tokens), now)


def finish(
    profiler: ProfilerState, request_id: RequestId, now: float, prefill: float, decode: float
) -> None:
    """Of an answer of 50 tokens, with the engine's own seconds."""
    usage = Usage(100, 50, 0.0, prefill, decode)
    profiler.apply(RequestEnded(PI, request_id, False, usage=usage), now)


def test_answers_written_together_teach_the_speed_of_one(profiler: ProfilerState) -> None:
    """As the calibration says, two at once take 10/9 as long; the prompts are read in a second."""
    join(profiler, 1.0)
    now, decode = 1.0, 49.0 / 20.0 * 10.0 / 9.0
    for number in range(12):
        pair = [claim(profiler, f"q{number}-{name}", now) for name in "ab"]
        for request_id in pair:
            stream(profiler, request_id, now + 1.0)
        now += 1.0 + decode
        for request_id in pair:
            finish(profiler, request_id, now, 1.0, decode)
    found = speeds(profiler, now)
    assert found.decode_tokens_per_second == pytest.approx(20.0, rel=0.02)
    assert found.prefill_tokens_per_second == pytest.approx(200.0, rel=0.02)


def test_prompt_that_was_read_meanwhile_is_taken_off_an_answer(profiler: ProfilerState) -> None:
    join(profiler, 1.0)
    now, decode = 1.0, 49.0 / 20.0 + 0.5
    for number in range(12):
        answer_id = claim(profiler, f"q{number}", now)
        stream(profiler, answer_id, now + 0.5)
        other = claim(profiler, f"other{number}", now + 1.0)
        stream(profiler, other, now + 1.5)
        profiler.apply(RequestEnded(PI, other, False, is_cancelled=True), now + 1.5)
        now += 0.5 + decode
        finish(profiler, answer_id, now, 0.5, decode)
    assert speeds(profiler, now).decode_tokens_per_second == pytest.approx(20.0, rel=0.02)


def test_other_models_that_were_busy_do_not_make_a_model_slow(profiler: ProfilerState) -> None:
    models = (reported_model(), reported_model("other", digest="1" * 64))
    join(profiler, 1.0, hello(models=models))
    claim(profiler, "long", 1.0, ModelName("other"))
    now = 1.0
    for number in range(12):
        now = answer(profiler, number, 2.0, now)
    found = {d.model: d.calibration for d in profiler.snapshot(now).destinations}["small"]
    assert found.decode_tokens_per_second == pytest.approx(20.0, rel=0.02)
    assert found.prefill_tokens_per_second == pytest.approx(200.0, rel=0.02)


def test_prompt_read_between_the_steps_of_an_answer_teaches_its_own_speed(
    profiler: ProfilerState,
) -> None:
    """The engine decodes a step of the others after each piece of a prompt."""
    join(profiler, 1.0)
    stream(profiler, claim(profiler, "long", 1.0), 1.5)
    now, prefill = 2.0, 0.5 * (1.0 + 1.0 / 20.0 / CHUNK_SECONDS)
    for number in range(12):
        request_id = claim(profiler, f"q{number}", now)
        stream(profiler, request_id, now + prefill)
        now += prefill + 0.1
        usage = Usage(100, 2, 0.0, prefill, 0.1)  # too short to tell how fast it writes
        profiler.apply(RequestEnded(PI, request_id, False, usage=usage), now)
    assert speeds(profiler, now).prefill_tokens_per_second == pytest.approx(200.0, rel=0.02)


@pytest.mark.parametrize(("completions", "rate"), [(5, 20.0), (30, 4.0)])
def test_remembered_speed_goes_before_a_measurement_once_it_rests_on_many_completions(
    profiler: ProfilerState, completions: int, rate: float
) -> None:
    key = CalibrationKey("Board", "0" * 64, "fake", "")
    slow = replace(SPEEDS, decode_tokens_per_second=4.0, saturated_decode_tokens_per_second=12.0)
    profiler.remember([KnownCalibration(key, slow, completions)])
    join(profiler, 1.0)
    assert speeds(profiler, 1.0).decode_tokens_per_second == pytest.approx(rate)


def test_request_that_comes_again_has_failed_the_first_time(profiler: ProfilerState) -> None:
    join(profiler, 1.0)
    for now in (1.0, 2.0):
        profiler.apply(dispatched(), now)
    record = profiler.nodes[PI]
    assert (len(record.requests), record.failed_requests) == (1, 1)


def test_long_wait_outside_the_engine_is_no_overhead_of_every_request(
    profiler: ProfilerState,
) -> None:
    join(profiler, 1.0)
    request_id = claim(profiler, "q0", 1.0)
    stream(profiler, request_id, 1.5)
    finish(profiler, request_id, 60.0, 0.5, 2.45)
    assert profiler.nodes[PI].overhead_seconds == 0.0


def test_prompt_that_was_partly_held_teaches_nothing_of_the_template(
    profiler: ProfilerState,
) -> None:
    join(profiler, 1.0)
    request_id = claim(profiler, "q0", 1.0)
    stream(profiler, request_id, 1.5)
    usage = Usage(150, 50, 0.0, 0.5, 2.45, cached_prompt_tokens=60)
    profiler.apply(RequestEnded(PI, request_id, False, usage=usage), 4.0)
    assert profiler.nodes[PI].story_of(SMALL).extra_prompt_tokens == 0.0


def test_what_is_known_of_a_path_ends_with_the_session(profiler: ProfilerState) -> None:
    join(profiler, 1.0)
    profiler.apply(ProbeReturned(PI, 0.5), 1.0)
    assert profiler.nodes[PI].round_trip_seconds == 0.5
    profiler.apply(NodeDisconnected(PI), 2.0)
    assert profiler.nodes[PI].round_trip_seconds is None


def test_age_of_a_speed_counts_from_a_new_measurement_or_the_last_completion(
    profiler: ProfilerState,
) -> None:
    def age(now: float) -> float | None:
        (model,) = profiler.nodes[PI].models
        return profiler.nodes[PI].speed_age_seconds(model, now)

    join(profiler, 1.0)
    assert age(2.0) is None  # it may have been measured on any earlier day
    end = answer(profiler, 0, 1.0, 2.0)
    assert age(end + 3.0) == pytest.approx(3.0)
    measured = replace(SPEEDS, decode_tokens_per_second=30.0)
    profiler.apply(ModelsReported(PI, (reported_model(calibration=measured),)), 50.0)
    assert age(54.0) == pytest.approx(4.0)


def test_speed_that_is_measured_anew_on_a_throttled_node_is_a_throttled_one(
    profiler: ProfilerState,
) -> None:
    join(profiler, 1.0)
    profiler.apply(HealthReported(PI, health(is_throttled=True)), 2.0)
    measured = replace(SPEEDS, decode_tokens_per_second=30.0)
    profiler.apply(ModelsReported(PI, (reported_model(calibration=measured),)), 3.0)
    assert speeds(profiler, 3.0).decode_tokens_per_second == pytest.approx(30.0 / 1.5)


def test_conversations_whose_turns_are_not_held_are_expected_less_and_less(
    profiler: ProfilerState,
) -> None:
    join(profiler, 1.0)
    ratios = []
    for turn in range(4):
        profiler.apply(dispatched(f"r{turn}"), 1.0 + turn)
        usage = Usage(40, 10, 0.0, 0.2, 0.5, cached_prompt_tokens=0)
        event = RequestEnded(PI, RequestId(f"r{turn}"), False, usage=usage, session_id="talk")
        profiler.apply(event, 1.5 + turn)
        ratios.append(profiler.snapshot(2.0 + turn, ["talk"]).sessions["talk"].hit_ratio)
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[-1] < 0.5 * ratios[0]


def test_conversations_and_calibrations_are_bounded(
    profiler: ProfilerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.profiler.state._MAX_SESSIONS", 3)
    monkeypatch.setattr("controller.profiler.state._MAX_REMEMBERED", 3)
    join(profiler, 1.0)
    for number in range(5):
        profiler.apply(dispatched(f"r{number}"), 1.0)
        event = RequestEnded(
            PI, RequestId(f"r{number}"), False, usage=Usage(40, 10), session_id=f"s{number}"
        )
        profiler.apply(event, 1.0)
        key = CalibrationKey("Board", f"{number}", "fake", "")
        profiler.remember([KnownCalibration(key, SPEEDS, 0)])
    sessions = profiler.snapshot(1.0, [f"s{number}" for number in range(5)]).sessions
    assert set(sessions) == {"s2", "s3", "s4"}
    remembered = {one.key.digest for one in profiler.known_calibrations()}
    assert remembered == {"3", "4", "0" * 64}  # the connected node's own is the latest


NODES = tuple(NodeId(name) for name in ("a", "b", "c"))


class AnyInterleaving(RuleBasedStateMachine):
    """Events of three nodes and their requests in any order, as a slow network may bring them.

    The model keeps what must be true: which claims are open, and how many were ever made.
    """

    claims = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        self.profiler = ProfilerState(STALE_SECONDS)
        self.now = 0.0
        self.open: dict[NodeId, set[RequestId]] = {}
        self.made: dict[NodeId, int] = {}
        self.health_at: dict[NodeId, float | None] = {}
        self.connected: set[NodeId] = set()
        self.number = 0

    @rule(seconds=st.floats(0.0, 30.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(node_id=st.sampled_from(NODES), is_draining=st.booleans())
    def connect(self, node_id: NodeId, is_draining: bool) -> None:
        self.profiler.apply(NodeConnected(hello(node_id), is_draining), self.now)
        self.open[node_id] = set()
        self.made.setdefault(node_id, 0)
        self.health_at[node_id] = None
        self.connected.add(node_id)

    @rule(node_id=st.sampled_from(NODES))
    def disconnect(self, node_id: NodeId) -> None:
        self.profiler.apply(NodeDisconnected(node_id), self.now)
        self.connected.discard(node_id)
        if node_id in self.open:
            self.open[node_id] = set()

    @rule(node_id=st.sampled_from(NODES))
    def forget(self, node_id: NodeId) -> None:
        self.profiler.apply(NodeForgotten(node_id), self.now)
        self.connected.discard(node_id)
        for known in (self.open, self.made, self.health_at):
            known.pop(node_id, None)

    @rule(
        node_id=st.sampled_from(NODES),
        power_mode=st.sampled_from(["", "15W"]),
        is_throttled=st.booleans(),
    )
    def report_health(self, node_id: NodeId, power_mode: str, is_throttled: bool) -> None:
        sample = replace(health(), power_mode=power_mode, is_throttled=is_throttled)
        self.profiler.apply(HealthReported(node_id, sample), self.now)
        if node_id in self.health_at:
            self.health_at[node_id] = self.now

    @rule(node_id=st.sampled_from(NODES), phase=st.sampled_from(ModelPhase))
    def report_models(self, node_id: NodeId, phase: ModelPhase) -> None:
        self.profiler.apply(ModelsReported(node_id, (reported_model(phase=phase),)), self.now)

    @rule(node_id=st.sampled_from(NODES), is_draining=st.booleans())
    def drain(self, node_id: NodeId, is_draining: bool) -> None:
        self.profiler.apply(DrainChanged(node_id, is_draining), self.now)

    @rule(target=claims, node_id=st.sampled_from(NODES), work=st.floats(0.0, 100.0))
    def dispatch(self, node_id: NodeId, work: float) -> tuple[NodeId, RequestId]:
        request_id = RequestId(f"r{self.number}")
        self.number += 1
        before = self._backlog(node_id)
        self.profiler.apply(dispatched(request_id, node_id, work), self.now)
        assert self._backlog(node_id) >= before
        if node_id in self.open:
            self.open[node_id].add(request_id)
            self.made[node_id] += 1
        return node_id, request_id

    @rule(claim=claims, tokens=st.integers(0, 500))
    def stream(self, claim: tuple[NodeId, RequestId], tokens: int) -> None:
        self.profiler.apply(TokensStreamed(*claim, tokens), self.now)

    @rule(claim=claims, how=st.sampled_from(["completed", "failed", "cancelled"]))
    def end(self, claim: tuple[NodeId, RequestId], how: str) -> None:
        node_id, request_id = claim
        event = RequestEnded(
            node_id,
            request_id,
            is_failure=how == "failed",
            is_cancelled=how == "cancelled",
            usage=Usage(20, 30, 0.1, 0.5, 1.5, cached_prompt_tokens=5),
            session_id="talk",
        )
        self.profiler.apply(event, self.now)
        self.open.get(node_id, set()).discard(request_id)

    @rule(claim=claims, work=st.floats(0.0, 100.0))
    def dispatch_again(self, claim: tuple[NodeId, RequestId], work: float) -> None:
        """The same request comes back to a node, ended there or not: an attempt of its own."""
        node_id, request_id = claim
        self.profiler.apply(dispatched(request_id, node_id, work), self.now)
        if node_id in self.open:
            self.open[node_id].add(request_id)
            self.made[node_id] += 1

    @rule(node_id=st.sampled_from(NODES), seconds=st.floats(-1.0, 10.0))
    def probe_returns(self, node_id: NodeId, seconds: float) -> None:
        self.profiler.apply(ProbeReturned(node_id, seconds), self.now)

    @precondition(lambda self: any(self.open.values()))
    @rule()
    def everything_ends(self) -> None:
        for node_id, requests in self.open.items():
            for request_id in list(requests):
                self.profiler.apply(RequestEnded(node_id, request_id, False), self.now)
            requests.clear()
        for node in self.profiler.snapshot(self.now).nodes:
            assert (node.inflight_requests, node.backlog_seconds) == (0, 0.0)

    @invariant()
    def snapshot_is_as_if_it_kept_nothing_of_the_last_one(self) -> None:
        found = self.profiler.snapshot(self.now)
        for record in self.profiler.nodes.values():
            record.models_changed()
        assert found == self.profiler.snapshot(self.now)

    @invariant()
    def counts_are_those_of_the_open_claims(self) -> None:
        nodes = {node.node_id: node for node in self.profiler.snapshot(self.now).nodes}
        assert nodes.keys() == self.open.keys()
        for node_id, node in nodes.items():
            assert node.inflight_requests == len(self.open[node_id])
            if not self.open[node_id]:
                assert node.backlog_seconds == 0.0
            assert node.backlog_seconds >= 0.0

    @invariant()
    def every_claim_is_open_completed_failed_or_cancelled(self) -> None:
        for node_id, record in self.profiler.nodes.items():
            ended = record.completed_requests + record.failed_requests + record.cancelled_requests
            assert ended + len(self.open[node_id]) == self.made[node_id]

    @invariant()
    def slots_are_those_of_the_open_claims(self) -> None:
        for destination in self.profiler.snapshot(self.now).destinations:
            claimed = min(len(self.open[destination.node_id]), destination.slots)
            assert destination.free_slots == destination.slots - claimed

    @invariant()
    def speeds_stay_possible(self) -> None:
        for destination in self.profiler.snapshot(self.now).destinations:
            found = destination.calibration
            assert found.prefill_tokens_per_second > 0.0
            assert (
                0.0
                < found.decode_tokens_per_second
                <= found.saturated_decode_tokens_per_second * (1 + 1e-9)
            )

    @invariant()
    def only_ready_nodes_with_fresh_health_take_work(self) -> None:
        """Health is fresh, or as fresh as most of a fleet that fell silent."""
        routable = routable_nodes(self.profiler.snapshot(self.now))
        assert routable <= self.connected
        for node_id in routable:
            assert self.profiler.nodes[node_id].state is NodeState.READY
            heard_at = self.health_at[node_id]
            assert heard_at is not None
            assert self.now - heard_at <= 2 * STALE_SECONDS
            ages = [at for at in self.health_at.values() if at is not None]
            if sum(self.now - at > STALE_SECONDS for at in ages) < 2:
                assert self.now - heard_at <= STALE_SECONDS

    def _backlog(self, node_id: NodeId) -> float:
        nodes = {n.node_id: n.backlog_seconds for n in self.profiler.snapshot(self.now).nodes}
        return nodes.get(node_id, 0.0)


AnyInterleaving.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyInterleaving = AnyInterleaving.TestCase
