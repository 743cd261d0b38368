"""What people see of an agent's status."""

from typing import Any

import pytest

from edge_agent.render import print_status


def status(**changed: Any) -> dict[str, Any]:
    """A ready agent that has answered once."""
    answer = {
        "request_id": "req-1",
        "model": "small",
        "outcome": "stop",
        "completion_tokens": 30,
        "total_seconds": 1.05,
        "ended_seconds_ago": 150.0,
        "energy_joules": 15.9,
        "message": "",
    }
    model = {
        "name": "small",
        "phase": "downloading",
        "issue": "downloading: 3 of 4 MB",
        "slots": 2,
        "busy_slots": 1,
        "queued_requests": 0,
        "resident_bytes": 219_000_000,
        "is_pinned": True,
        "progress_ratio": 0.75,
        "decode_tokens_per_second": 47.4,
        "saturated_decode_tokens_per_second": None,
    }
    found: dict[str, Any] = {
        "state": "ready",
        "node_id": "pi",
        "hardware": "Board",
        "controller": {
            "address": "controller:50551",
            "is_connected": True,
            "connected_seconds": 9000.0,
        },
        "models": [model],
        "health": {
            "cpu_utilisation_ratio": 0.5,
            "gpu_utilisation_ratio": 0.25,
            "memory_available_bytes": 2_000_000_000,
            "temperature_celsius": 61.2,
            "is_throttled": True,
            "limits": ["under_voltage"],
            "power_watts": 8.06,
            "power_source": "ina3221",
            "power_coverage": "board",
            "power_relative_error": 0.05,
            "power_mode": "15W",
        },
        "memory": {"budget_bytes": 4_000_000_000, "reserved_bytes": 304_000_000},
        "energy": {
            "today_joules": 90.0,
            "total_joules": 100.0,
            "requests_joules": 16.0,
            "idle_joules": 84.0,
            "measured_seconds": 9.0,
            "estimated_seconds": 1.0,
        },
        "requests": {
            "running": 1,
            "completed": 1,
            "failed": 0,
            "energy_joules": 16.0,
            "prefill_joules": 6.0,
            "decode_joules": 10.0,
            "energy_source": "ina3221",
            "recent": [answer],
        },
        "issues": [],
    }
    return found | changed


def shown(capsys: pytest.CaptureFixture[str], told: dict[str, Any]) -> str:
    print_status(told)
    return capsys.readouterr().out


def test_status_says_all_that_an_operator_asks_for(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, status())
    for text in (
        "pi is ready; connected to controller:50551 for 2.5 h",
        "Board: CPU 50 %, GPU 25 %, 2.0 GB free, 61 °C, throttled (under_voltage), "
        "8.1 W (ina3221, board, ±5 %), power mode 15W",
        "small (pinned)",
        "downloading 75 %",
        "1/2",
        "models hold 304 MB of a budget of 4000 MB",
        "1 running, 1 answered, 0 failed; 16 J (ina3221; 6 J for prompts, 10 J for answers)",
        "req-1: stop, 30 tokens in 1.05 s, small, 15.9 J, 2 min ago\n",
        "100 J = 16 J answers + 84 J idle; 90 % of the time measured",
        "energy today: 90 J",
        "small: downloading: 3 of 4 MB",
    ):
        assert text in out


def test_issue_stays_on_one_line_however_long_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    issue = "power_sensor_unreadable: rapl: [denied]; fix: " + "do this, " * 40
    assert f"issue: {issue}" in shown(capsys, status(issues=[issue]))


def test_status_of_an_agent_before_this_version_is_shown_as_well(
    capsys: pytest.CaptureFixture[str],
) -> None:
    older = status()
    del older["requests"]["recent"][0]["ended_seconds_ago"]
    older["health"] |= {
        "power_source": "estimate",
        "power_coverage": None,
        "power_relative_error": None,
    }
    out = shown(capsys, older)
    assert "8.1 W (estimate)" in out
    assert "req-1: stop, 30 tokens in 1.05 s, small, 15.9 J\n" in out
