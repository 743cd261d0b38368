from dataclasses import replace

import numpy as np
import pytest

from controller.domain.answer_length import AnswerLengthCurve
from controller.domain.cluster import (
    Calibration,
    NodeKind,
    PowerProfile,
    SessionPrefix,
    TokenPrice,
)
from controller.domain.link_traffic import REQUEST_OVERHEAD_BYTES, STREAMED_TOKEN_BYTES
from controller.domain.request import ChatMessage, Sampling
from controller.ids import ModelName, NodeId
from controller.routing.answer_tokens import expected_answer_tokens
from controller.routing.formulation import (
    TEMPLATE_TOKENS_PER_MESSAGE,
    UNKNOWN_POWER_WATTS,
    formulate,
)
from controller.routing.problem import (
    EmptyBatch,
    InvalidValue,
    InvalidWeights,
    MalformedArray,
    NoDestination,
    ProblemError,
)
from tests.unit.controller.routing.clusters import destination, fleet, node, request


def test_terms_of_one_pair_are_those_worked_by_hand() -> None:
    """100 prompt and 60 answer tokens: prefill 1 s, decode 6 s alone and 1.5 s saturated."""
    priced = destination("a", price=TokenPrice(1e-6, 2e-6, 3e-3))
    batch = formulate(
        [request()],
        fleet([node("a", backlog_seconds=2.5)], [priced]),
        output_tokens=np.array([[60.0]]),
    )
    problem = batch.problem
    assert batch.prompt_tokens[0, 0] == 100.0
    assert problem.latency_seconds[0, 0] == pytest.approx(7.0)
    assert problem.work_seconds[0, 0] == pytest.approx(2.5)
    received = 8.0 * (REQUEST_OVERHEAD_BYTES + 400.0) / 1e6
    sent = 8.0 * STREAMED_TOKEN_BYTES * 60.0 / 8e6
    assert problem.network_seconds[0, 0] == pytest.approx(0.01 + received + sent)
    assert problem.cost_usd[0, 0] == pytest.approx(100e-6 + 120e-6 + 3e-3)
    # u = 0.5 of the range from 4 to 10 W: 7 W for 2.5 executor seconds. The node's radio receives
    # the prompt at 0.5 W and transmits the answer at 1 W.
    assert problem.energy_joules[0, 0] == pytest.approx(17.5 + received * 0.5 + sent * 1.0)
    assert problem.quality[0, 0] == 0.5
    assert problem.backlog_seconds.tolist() == [2.5]


def test_predicted_seconds_replace_the_calibrated_ones_where_there_are_any() -> None:
    """Alone 7 s and saturated 2.5 s by calibration; 14 s predicted double both, and the energy."""
    snapshot = fleet([node("a")], [destination("a"), destination("a", model="other")])
    tokens = np.array([[60.0, 60.0]])
    told = np.array([[14.0, np.nan]])
    batch = formulate([request()], snapshot, output_tokens=tokens, inference_seconds=told)
    plain = formulate([request()], snapshot, output_tokens=tokens).problem
    problem = batch.problem
    assert problem.latency_seconds.tolist() == [[pytest.approx(14.0), pytest.approx(7.0)]]
    assert problem.work_seconds.tolist() == [[pytest.approx(5.0), pytest.approx(2.5)]]
    assert problem.energy_joules[0, 0] > 1.9 * plain.energy_joules[0, 0]
    assert problem.energy_joules[0, 1] == plain.energy_joules[0, 1]
    for wrong in (np.array([[-1.0, 1.0]]), np.array([[np.inf, 1.0]])):
        with pytest.raises(InvalidValue, match="inference_seconds"):
            formulate([request()], snapshot, inference_seconds=wrong)


def test_marginal_energy_leaves_the_idle_power_out() -> None:
    snapshot = fleet([node("a", power=PowerProfile(4.0, 10.0))], [destination("a")])
    batch = formulate(
        [request()], snapshot, output_tokens=np.array([[60.0]]), marginal_energy_only=True
    )
    assert batch.problem.energy_joules[0, 0] == pytest.approx(2.5 * 3.0)


def test_metered_transfer_costs_money() -> None:
    metered = node("a", receive_usd_per_byte=1e-6, transmit_usd_per_byte=1e-6)
    snapshot = fleet([metered], [destination("a")])
    batch = formulate([request()], snapshot, output_tokens=np.array([[60.0]]))
    transferred = REQUEST_OVERHEAD_BYTES + 400.0 + 60.0 * STREAMED_TOKEN_BYTES
    assert batch.problem.cost_usd[0, 0] == pytest.approx(transferred * 1e-6)


def test_power_measured_under_load_takes_the_place_of_a_share_of_the_range() -> None:
    """8 W measured, of which 4 are idle; a node that never told its power is charged all of it."""
    measured = Calibration(100.0, 10.0, 40.0, 1.0, load_watts=8.0)
    snapshot = fleet(
        [node("a", power=PowerProfile(4.0, 100.0)), node("b", power=None)],
        [destination("a", calibration=measured), destination("b", calibration=measured)],
    )
    tokens = np.array([[60.0, 60.0]])
    energy = formulate([request()], snapshot, output_tokens=tokens).problem.energy_joules
    assert energy[0].tolist() == pytest.approx([2.5 * 8.0, 2.5 * 8.0])
    marginal = formulate(
        [request()], snapshot, output_tokens=tokens, marginal_energy_only=True
    ).problem.energy_joules
    assert marginal[0].tolist() == pytest.approx([2.5 * 4.0, 2.5 * 8.0])


def test_node_of_unknown_power_is_charged_the_greatest_known() -> None:
    snapshot = fleet(
        [
            node("a", power=PowerProfile(4.0, 10.0)),
            node("b", power=None),
            node("c", power=PowerProfile(30.0, 50.0)),
        ],
        [destination("a"), destination("b"), destination("c")],
    )
    batch = formulate([request()], snapshot, output_tokens=np.array([[60.0] * 3]))
    assert batch.problem.energy_joules[0].tolist() == pytest.approx([17.5, 100.0, 100.0])


def test_fleet_of_unknown_power_is_charged_a_prior_and_never_zero() -> None:
    snapshot = fleet(
        [node("a", power=None), node("b", power=None, kind=NodeKind.CLOUD)],
        [destination("a"), destination("b")],
    )
    batch = formulate([request()], snapshot, output_tokens=np.array([[60.0] * 2]))
    expected = [2.5 * UNKNOWN_POWER_WATTS[NodeKind.EDGE], 2.5 * UNKNOWN_POWER_WATTS[NodeKind.CLOUD]]
    assert batch.problem.energy_joules[0].tolist() == pytest.approx(expected)


def test_prompt_is_counted_by_each_tokenizer_and_chats_by_their_turns() -> None:
    snapshot = fleet(
        [node("a")], [destination("a"), destination("a", "other", characters_per_token=2.0)]
    )
    turns = (ChatMessage("system", "y" * 99), ChatMessage("user", "x" * 300))
    batch = formulate([request(), request(prompt=turns)], snapshot)
    extra = 2 * TEMPLATE_TOKENS_PER_MESSAGE
    assert batch.prompt_tokens.tolist() == [[100.0, 200.0], [100.0 + extra, 200.0 + extra]]


def test_answer_is_cut_to_the_limit_and_to_the_context() -> None:
    snapshot = fleet([node("a")], [destination("a"), destination("a", "tiny", context_tokens=120)])
    requests = [request(sampling=Sampling(max_tokens=50)), request()]
    batch = formulate(requests, snapshot, output_tokens=np.full((2, 2), 80.0))
    assert batch.output_tokens.tolist() == [[50.0, 20.0], [80.0, 20.0]]
    assert batch.problem.feasible.tolist() == [[True, False], [True, False]]


@pytest.mark.parametrize("limit", [1.0, 32.0, 256.0, 100_000.0])
def test_expected_answer_stays_under_the_limit_and_a_typical_length(limit: float) -> None:
    expected = expected_answer_tokens(np.array([limit]))[0]
    assert 0.0 < expected <= min(limit, 256.0)


def test_unpredicted_answer_takes_the_estimate_from_the_limit() -> None:
    batch = formulate([request()], fleet([node("a")], [destination("a")]))
    assert batch.output_tokens[0, 0] == pytest.approx(128.0)


def test_columns_name_their_nodes_and_models() -> None:
    snapshot = fleet(
        [node("a"), node("b", kind=NodeKind.CLOUD)],
        [destination("a", "m"), destination("a", "n"), destination("b", "m", slots=9)],
    )
    metadata = formulate([request()], snapshot).problem.metadata
    assert metadata.node_is_edge is not None
    assert metadata.model_of is not None
    assert metadata.slots is not None
    assert metadata.node_is_edge.tolist() == [True, False]
    assert metadata.model_of.tolist() == [0, 1, 0]
    assert metadata.slots.tolist() == [4, 4, 9]


def test_predicted_quality_is_taken_as_it_is() -> None:
    snapshot = fleet([node("a")], [destination("a"), destination("a", "other")])
    quality = np.array([[0.125, 0.875]])
    assert formulate([request()], snapshot, quality=quality).problem.quality.tolist() == [
        [0.125, 0.875]
    ]


def test_text_beyond_ascii_is_sent_as_utf8_even_with_lone_surrogates() -> None:
    snapshot = fleet([node("a", power=PowerProfile(1.0, 1.0))], [destination("a")])
    plain = formulate([request(prompt="a" * 10)], snapshot).problem.network_seconds[0, 0]
    wide = formulate([request(prompt="é" * 9 + "\ud800")], snapshot).problem.network_seconds[0, 0]
    assert wide - plain == pytest.approx(8.0 * 11.0 / 1e6)


def test_bad_input_gets_an_error_of_its_own() -> None:
    snapshot = fleet([node("a")], [destination("a")])
    with pytest.raises(EmptyBatch):
        formulate([], snapshot)
    with pytest.raises(NoDestination):
        formulate([request()], fleet([node("a")], []))
    with pytest.raises(InvalidWeights):
        formulate([request()], snapshot, weights=(1.0, 1.0, 0.0, 0.0))
    with pytest.raises(MalformedArray, match="output_tokens"):
        formulate([request()], snapshot, output_tokens=np.ones((2, 1)))
    with pytest.raises(InvalidValue, match="quality"):
        formulate([request()], snapshot, quality=np.array([[np.nan]]))
    with pytest.raises(MalformedArray, match="node ghost"):
        formulate([request()], fleet([node("a")], [destination("ghost")]))
    with pytest.raises(InvalidValue, match="backlog"):
        formulate([request()], replace(snapshot, nodes=(node("a", backlog_seconds=np.nan),)))


def test_bytes_cost_what_each_nodes_link_costs() -> None:
    snapshot = fleet(
        [node("a", receive_usd_per_byte=2e-6, transmit_usd_per_byte=1e-6), node("b")],
        [destination("a"), destination("b")],
    )
    batch = formulate([request()], snapshot, output_tokens=np.array([[60.0, 60.0]]))
    received, sent = REQUEST_OVERHEAD_BYTES + 400.0, 60.0 * STREAMED_TOKEN_BYTES
    priced = received * 2e-6 + sent * 1e-6
    assert batch.problem.cost_usd[0].tolist() == pytest.approx([priced, 0.0])


def test_counted_joules_a_token_take_the_place_of_the_power_model() -> None:
    counted = Calibration(
        100.0, 10.0, 40.0, 0.5, prefill_joules_per_token=0.1, decode_joules_per_token=0.5
    )
    snapshot = fleet(
        [node("a", power=PowerProfile(4.0, 10.0))], [destination("a", calibration=counted)]
    )
    tokens = np.array([[60.0]])
    energy = formulate([request()], snapshot, output_tokens=tokens).problem.energy_joules
    # 100 prompt and 60 answer tokens: 2.5 executor seconds.
    assert energy[0, 0] == pytest.approx(2.5 * 4.0 + 100 * 0.1 + 60 * 0.5)
    marginal = formulate(
        [request()], snapshot, output_tokens=tokens, marginal_energy_only=True
    ).problem.energy_joules
    assert marginal[0, 0] == pytest.approx(100 * 0.1 + 60 * 0.5)


def test_conversations_last_node_is_faster_by_what_it_still_holds() -> None:
    """A hint, never a harm: elsewhere nothing changes, and nobody becomes infeasible."""
    plain = fleet([node("a"), node("b")], [destination("a"), destination("b")])
    prefix = SessionPrefix(NodeId("b"), ModelName("small"), 80, 0.5)
    warm = replace(plain, sessions={"talk": prefix})
    asked, tokens = request(session_id="talk"), np.array([[60.0, 60.0]])
    cold = formulate([asked], plain, output_tokens=tokens)
    found = formulate([asked], warm, output_tokens=tokens)
    assert found.prompt_tokens.tolist() == [[100.0, 100.0]]
    assert found.read_tokens.tolist() == [[100.0, 60.0]]
    saved = cold.problem.latency_seconds - found.problem.latency_seconds
    assert saved[0].tolist() == pytest.approx([0.0, 0.4])
    assert found.problem.feasible.all()
    stranger = formulate([request(session_id="other")], warm, output_tokens=tokens)
    assert stranger.read_tokens.tolist() == [[100.0, 100.0]]


def test_predicted_medians_stay_within_the_limit_and_need_their_means() -> None:
    snapshot = fleet([node("a")], [destination("a", "m")])
    asked = [request(sampling=Sampling(max_tokens=64))]
    batch = formulate(
        asked, snapshot, output_tokens=np.array([[40.0]]), median_tokens=np.array([[90.0]])
    )
    assert (batch.output_tokens[0, 0], batch.median_tokens[0, 0]) == (40.0, 64.0)
    with pytest.raises(ProblemError, match="belong"):
        formulate(asked, snapshot, median_tokens=np.array([[90.0]]))


def test_destinations_own_answers_replace_the_typical_length() -> None:
    curve = AnswerLengthCurve((0.0, 10.0, 20.0), (1.0, 0.6, 0.3))
    snapshot = fleet(
        [node("a")],
        [destination("a", "brief", answer_lengths=curve), destination("a", "unknown")],
    )
    batch = formulate([request(sampling=Sampling(max_tokens=limit)) for limit in (8, 64)], snapshot)
    # 40 % end at 10 tokens and 30 % at 20; the rest goes on.
    assert batch.output_tokens[:, 0].tolist() == pytest.approx([8.0, 10 + 6 + 0.3 * 44])
    assert batch.median_tokens[:, 0].tolist() == [8.0, 20.0]
    assert batch.output_tokens[1, 1] == pytest.approx(64 * 256 / 320)
