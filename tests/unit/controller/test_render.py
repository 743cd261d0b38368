import pytest

from controller import render
from pointsman.v1 import admin_pb2, fleet_pb2, router_pb2, types_pb2

TAG = "[/red] [bold]x"
"""What a terminal library might take for markup."""


def placement() -> router_pb2.Placement:
    return router_pb2.Placement(
        request_id=f"r1 {TAG}",
        chosen=router_pb2.Candidate(
            node_id="pi", model="small", quality_ratio=0.5, finish_seconds=2.5
        ),
        others=[router_pb2.Candidate(node_id="vm", model=TAG, refusal=f"too dear {TAG}")],
    )


def decision() -> router_pb2.Decision:
    return router_pb2.Decision(
        batch_id="b1",
        policy="least-loaded",
        objective=0.25,
        lower_bound=0.125,
        batch_size=2,
        fallback_reason="memetic failed",
    )


def test_nodes_are_shown_with_what_is_unknown_left_open(
    capsys: pytest.CaptureFixture[str],
) -> None:
    nodes = [
        admin_pb2.NodeStatus(node_id="fresh", state="loading"),
        admin_pb2.NodeStatus(
            node_id="pi",
            state="ready",
            attributes=fleet_pb2.StaticAttributes(
                kind=types_pb2.NODE_KIND_EDGE, hardware=f"Board {TAG}"
            ),
            health=fleet_pb2.HealthSample(
                cpu_utilisation_ratio=0.25,
                power_watts=4.25,
                power_source=types_pb2.POWER_SOURCE_ESTIMATE,
                issues=[f"reboot_needed: {TAG}"],
            ),
            round_trip_seconds=0.0125,
            completed_requests=7,
        ),
    ]
    render.print_nodes(admin_pb2.ListNodesResponse(nodes=nodes))
    out = capsys.readouterr().out
    assert f"Board {TAG}" in out
    assert "~4.2 W" in out
    assert "12.5" in out
    assert "25 %" in out
    assert f"pi: reboot_needed: {TAG}" in out
    (fresh,) = [line for line in out.splitlines() if "fresh" in line]
    assert fresh.count(" - ") >= 4


def test_empty_fleet_is_said_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    render.print_nodes(admin_pb2.ListNodesResponse())
    assert capsys.readouterr().out == "No node has connected yet.\n"


def test_route_shows_where_each_request_goes_and_why_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    nowhere = router_pb2.Placement(request_id="r2", others=placement().others)
    render.print_route(
        router_pb2.RouteResponse(decision=decision(), placements=[placement(), nowhere])
    )
    out = capsys.readouterr().out
    assert "2.5" in out
    assert "vm/" in out
    assert "too dear" in out
    assert "no assignment is below 0.1250" in out
    assert "[fell back: memetic failed]" in out


def test_explanation_tells_state_decision_candidates_and_finish(
    capsys: pytest.CaptureFixture[str],
) -> None:
    response = router_pb2.ExplainResponse(
        state="failed",
        error=f"node lost {TAG}",
        decision=decision(),
        placement=placement(),
        account=router_pb2.Account(predicted_finish_seconds=2.0, measured_finish_seconds=3.0),
    )
    render.print_explanation(f"r1 {TAG}", response)
    out = capsys.readouterr().out
    assert f"r1 {TAG}: failed (node lost {TAG})" in out
    assert "Batch b1 of 2." in out
    assert f"too dear {TAG}" in out
    assert "Predicted to finish 2.00 s after the window closed; took 3.00 s." in out


def test_waiting_request_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    render.print_explanation("r1", router_pb2.ExplainResponse(state="waiting"))
    assert capsys.readouterr().out == "r1: waiting\nIts window has not closed yet.\n"


@pytest.mark.parametrize(
    ("usage", "shown"),
    [
        (types_pb2.Usage(prompt_tokens=3, completion_tokens=4), False),
        (
            types_pb2.Usage(energy_joules=1.5, energy_source=types_pb2.POWER_SOURCE_ESTIMATE),
            True,
        ),
    ],
)
def test_account_goes_to_standard_error_and_never_invents_energy(
    capsys: pytest.CaptureFixture[str], usage: types_pb2.Usage, shown: bool
) -> None:
    render.print_account(router_pb2.Account(request_id=TAG, node_id="pi", usage=usage))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(TAG)
    assert ("1.5 J estimated" in err) is shown


def test_policy_is_one_line_and_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    render.print_policy(
        admin_pb2.GetPolicyResponse(
            policy="memetic",
            weights=types_pb2.ObjectiveWeights(quality=0.4, time=0.6),
            normalisation="payoff",
            available_policies=["memetic", "round-robin"],
            window_seconds=1.0,
            max_batch_requests=128,
            fallbacks=[
                admin_pb2.PolicyFallbacks(policy="ppo", cause="out_of_range", requests=7),
            ],
        )
    )
    out = capsys.readouterr().out
    assert "ppo left 7 requests to another: out_of_range" in out
    assert "memetic, weights quality 0.4, cost 0, energy 0, time 0.6, payoff" in out
    assert "available: memetic, round-robin" in out


def test_models_are_listed_with_the_speeds_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    node = admin_pb2.NodeStatus(
        node_id="pi",
        state="ready",
        models=[
            fleet_pb2.ModelState(
                name=f"small {TAG}",
                phase=fleet_pb2.MODEL_PHASE_READY,
                slots=4,
                is_pinned=True,
                calibration=fleet_pb2.Calibration(decode_tokens_per_second=21.5),
            ),
            fleet_pb2.ModelState(
                name="next", phase=fleet_pb2.MODEL_PHASE_DOWNLOADING, progress_ratio=0.4
            ),
        ],
    )
    render.print_models([node])
    out = capsys.readouterr().out
    assert f"small {TAG}" in out
    assert "21.5" in out
    assert "downloading 40 %" in out
    render.print_models([])
    assert capsys.readouterr().out == "No node has a model.\n"


def test_goodput_is_shown_with_its_age_and_metered_links_say_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    nodes = [
        admin_pb2.NodeStatus(
            node_id="old",
            receive_bytes_per_second=1e6,
            transmit_bytes_per_second=2e6,
            goodput_age_seconds=1200.0,
            cancelled_requests=3,
        ),
        admin_pb2.NodeStatus(
            node_id="paid", attributes=fleet_pb2.StaticAttributes(is_link_metered=True)
        ),
    ]
    render.print_nodes(admin_pb2.ListNodesResponse(nodes=nodes))
    out = " ".join(capsys.readouterr().out.split())
    assert "8/16" in out
    assert "20" in out
    assert "metered" in out


def test_orders_are_told_in_lines_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with render.OrderProgress() as progress:
        for message in ("loading", "loading", "measuring its speed"):
            progress.show(
                "pi",
                fleet_pb2.OrderUpdate(phase=fleet_pb2.ORDER_PHASE_RUNNING, message=message),
            )
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == ["pi: loading", "pi: measuring its speed"]
