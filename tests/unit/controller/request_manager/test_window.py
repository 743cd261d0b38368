from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.request_manager.window import (
    CloseReason,
    FleetLoad,
    Window,
    WindowLimits,
    closes_at,
)

LIMITS = WindowLimits(max_wait_seconds=1.0, max_requests=128, quiet_seconds=0.1)
BUSY = FleetLoad(routable_destinations=4, is_idle=False)
IDLE = FleetLoad(routable_destinations=4, is_idle=True)
OPEN = Window(opened_at=100.0, last_arrival_at=100.3, requests=5)

seconds = st.floats(0.0, 1e4)
loads = st.builds(FleetLoad, st.integers(0, 5), st.booleans())
all_limits = st.builds(WindowLimits, st.floats(0.0, 10.0), st.integers(1, 50), st.floats(0.0, 10.0))


@st.composite
def windows(draw: st.DrawFn) -> Window:
    """Windows as `with_arrival` makes them."""
    opened_at = draw(seconds)
    window = Window(opened_at, opened_at, 0)
    for gap in draw(st.lists(st.floats(0.0, 2.0), min_size=1, max_size=20)):
        now = window.last_arrival_at + gap
        deadline_at = draw(st.none() | st.floats(0.0, 20.0).map(lambda s, now=now: now + s))
        window = window.with_arrival(now, deadline_at)
    return window


@pytest.mark.parametrize(
    ("window", "load", "moment", "reason"),
    [
        (OPEN, BUSY, 101.0, CloseReason.INTERVAL),
        (OPEN, IDLE, 100.4, CloseReason.QUIET),
        (replace(OPEN, last_arrival_at=100.95), IDLE, 101.0, CloseReason.INTERVAL),
        (replace(OPEN, requests=128), BUSY, 100.3, CloseReason.FULL),
        (replace(OPEN, requests=127), BUSY, 101.0, CloseReason.INTERVAL),
        (OPEN, FleetLoad(1, True), 100.3, CloseReason.NO_CHOICE),
        (OPEN, FleetLoad(0, False), 100.3, CloseReason.NO_CHOICE),
        (OPEN, FleetLoad(2, False), 101.0, CloseReason.INTERVAL),
        (replace(OPEN, earliest_deadline_at=100.5), BUSY, 100.5, CloseReason.DEADLINE),
        (replace(OPEN, earliest_deadline_at=100.35), IDLE, 100.35, CloseReason.DEADLINE),
        (replace(OPEN, earliest_deadline_at=100.5), IDLE, 100.4, CloseReason.QUIET),
        (replace(OPEN, earliest_deadline_at=101.5), BUSY, 101.0, CloseReason.INTERVAL),
    ],
)
def test_window_closes_by_the_rule_that_comes_first(
    window: Window, load: FleetLoad, moment: float, reason: CloseReason
) -> None:
    closing, why = closes_at(window, LIMITS, load)
    assert closing == pytest.approx(moment)
    assert why is reason


def test_quiet_rule_can_be_switched_off_to_wait_as_the_paper_does() -> None:
    paper = replace(LIMITS, quiet_seconds=0.0)
    assert closes_at(OPEN, paper, IDLE) == (101.0, CloseReason.INTERVAL)


@given(windows(), all_limits, loads)
def test_window_never_stays_open_longer_than_its_interval(
    window: Window, limits: WindowLimits, load: FleetLoad
) -> None:
    moment, reason = closes_at(window, limits, load)
    latest = window.opened_at + limits.max_wait_seconds
    if reason in (CloseReason.FULL, CloseReason.NO_CHOICE):
        assert moment == window.last_arrival_at
    else:
        assert moment <= latest


@given(windows(), all_limits, loads, st.integers(0, 200), st.none() | seconds)
def test_more_requests_at_the_same_moment_never_close_a_window_later(
    window: Window, limits: WindowLimits, load: FleetLoad, more: int, deadline_at: float | None
) -> None:
    # A window whose moment has passed is closed at once, so only later moments are compared.
    now = window.last_arrival_at
    before = max(now, closes_at(window, limits, load)[0])
    for _ in range(more):
        window = window.with_arrival(now, deadline_at)
    assert max(now, closes_at(window, limits, load)[0]) <= before


@given(windows(), all_limits, st.integers(2, 5), st.booleans())
def test_fewer_places_to_go_never_close_a_window_later(
    window: Window, limits: WindowLimits, destinations: int, is_idle: bool
) -> None:
    now = window.last_arrival_at
    before = max(now, closes_at(window, limits, FleetLoad(destinations, is_idle))[0])
    assert max(now, closes_at(window, limits, FleetLoad(1, is_idle))[0]) <= before


def test_window_remembers_its_most_pressing_deadline() -> None:
    window = Window(1.0, 1.0, 0)
    for now, deadline_at in [(1.0, None), (1.1, 9.0), (1.2, 4.0), (1.3, None), (1.4, 7.0)]:
        window = window.with_arrival(now, deadline_at)
    assert window == Window(1.0, 1.4, 5, 4.0)
