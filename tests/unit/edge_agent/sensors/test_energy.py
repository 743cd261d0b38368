"""Counters, integration and attribution."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_agent.sensors.base import ESTIMATE
from edge_agent.sensors.energy import EnergyLedger, PowerSample, Work, WrappingCounter

INA = "ina3221"


def whole(start: float, end: float, work_seconds: float) -> Work:
    """A request that had an answer and next to no prompt."""
    return Work(0.0, end - start, work_seconds)


def feed(
    ledger: EnergyLedger, power: Callable[[float], float], seconds: float, hertz: float
) -> None:
    for tick in range(int(seconds * hertz) + 1):
        ledger.add(PowerSample(tick / hertz, INA, power(tick / hertz)))


# -- counters ----------------------------------------------------------------------------------


def test_first_counter_value_is_a_baseline() -> None:
    counter = WrappingCounter(1000, 100.0)
    assert counter.advance(990, 0.0) is None
    assert counter.dropped == 0


@given(
    range_units=st.integers(100, 10**9),
    start=st.integers(0, 10**9),
    rises=st.lists(st.integers(0, 99), min_size=1, max_size=40),
)
def test_counter_that_wraps_loses_and_invents_nothing(
    range_units: int, start: int, rises: list[int]
) -> None:
    """Each domain wraps at its own range."""
    counter = WrappingCounter(range_units, 100.0)
    value = start % range_units
    counter.advance(value, 0.0)
    found = 0
    for at, rise in enumerate(rises, 1):
        value = (value + rise) % range_units
        found += counter.advance(value, float(at)) or 0
    assert found == sum(rises)
    assert counter.dropped == 0


def test_impossible_rise_is_dropped_counted_and_a_new_baseline() -> None:
    """A driver that was reloaded starts at 0, which is no wrap."""
    counter = WrappingCounter(1_000_000, 100.0)
    counter.advance(500_000, 0.0)
    assert counter.advance(10, 1.0) is None
    assert counter.dropped == 1
    assert counter.advance(60, 2.0) == 50


def test_clock_that_stands_still_gives_no_energy() -> None:
    counter = WrappingCounter(1000, 100.0)
    counter.advance(1, 5.0)
    assert counter.advance(2, 5.0) is None


# -- integration -------------------------------------------------------------------------------


def test_power_ramp_is_followed_within_three_percent() -> None:
    """One early sample would say 5 W for the whole answer."""
    ledger = EnergyLedger()

    def ramp(at: float) -> float:  # idle, a steep rise, busy, a fall
        return (
            5.0
            + 20.0 / (1 + math.exp(-6.0 * (at - 2.0)))
            - 18.0 / (1 + math.exp(-6.0 * (at - 7.0)))
        )

    feed(ledger, ramp, 10.0, 10.0)
    truth = sum(ramp(step / 10_000.0) for step in range(100_000)) / 10_000.0
    assert ledger.totals(10.0).total_joules == pytest.approx(truth, rel=0.03)


def test_request_in_a_ramp_is_charged_for_its_own_window() -> None:
    """A request of 3 s on a linear ramp, from 5 W at its start to 20 W at its end."""
    ledger = EnergyLedger()
    ledger.set_active({"a": 1}, 0.0)
    feed(ledger, lambda at: 5.0 * at, 4.0, 10.0)
    charge = ledger.charge("a", 4.0, whole(1.0, 4.0, 3.0))
    assert charge is not None
    assert charge.source == INA
    assert charge.joules == pytest.approx(37.5, rel=0.03)


def test_engine_that_claims_more_work_than_time_takes_no_more_than_the_node_used() -> None:
    ledger = EnergyLedger()
    ledger.set_active({"a": 2}, 0.0)
    feed(ledger, lambda at: 10.0, 10.0, 10.0)
    for _ in range(2):  # each claims the whole engine for the whole time
        ledger.charge("a", 10.0, whole(0.0, 10.0, 10.0))
    totals = ledger.totals(10.0)
    assert totals.requests_joules == pytest.approx(totals.total_joules)
    assert totals.idle_joules >= -1e-6


def test_counter_is_preferred_to_the_power_beside_it() -> None:
    ledger = EnergyLedger()
    ledger.add(PowerSample(0.0, "rapl", None, 0.0))
    ledger.add(PowerSample(1.0, "rapl", 99.0, 12.0))
    ledger.add(PowerSample(60.0, "rapl", 1.0, 500.0))  # a counter bridges any gap
    totals = ledger.totals(60.0)
    assert totals.total_joules == pytest.approx(500.0)
    assert totals.estimated_seconds == 0


def test_long_gap_between_power_samples_is_an_estimate() -> None:
    ledger = EnergyLedger(max_gap_seconds=1.0)
    for at, watts in ((0.0, 10.0), (0.5, 10.0), (10.5, 20.0)):
        ledger.add(PowerSample(at, INA, watts))
    totals = ledger.totals(10.5)
    assert (totals.measured_seconds, totals.estimated_seconds) == (0.5, 10.0)
    assert totals.total_joules == pytest.approx(155.0)


def test_time_since_the_last_sample_counts_with_its_power_and_is_settled_later() -> None:
    ledger = EnergyLedger()
    ledger.add(PowerSample(0.0, INA, 10.0))
    assert ledger.totals(0.5).total_joules == pytest.approx(5.0)
    ledger.add(PowerSample(1.0, INA, 6.0))
    assert ledger.totals(1.0).total_joules == pytest.approx(8.0)


def test_power_that_fell_is_never_negative_energy() -> None:
    ledger = EnergyLedger()
    ledger.add(PowerSample(0.0, INA, 100.0))
    handed_out = ledger.totals(0.9).total_joules
    ledger.add(PowerSample(1.0, INA, 0.0))
    assert ledger.totals(1.0).total_joules >= handed_out
    ledger.add(PowerSample(3.0, INA, 100.0))
    assert ledger.totals(3.0).total_joules == pytest.approx(150.0)


def test_sample_that_another_thread_overtook_changes_nothing() -> None:
    ledger = EnergyLedger()
    ledger.add(PowerSample(0.0, ESTIMATE, 10.0))
    ledger.add(PowerSample(1.0, ESTIMATE, 10.0))
    ledger.add(PowerSample(0.9, ESTIMATE, 10.0))
    ledger.add(PowerSample(2.0, ESTIMATE, 10.0))
    assert ledger.totals(2.0).total_joules == pytest.approx(20.0)


# -- attribution -------------------------------------------------------------------------------


def test_overlapping_requests_share_by_the_work_each_did() -> None:
    ledger = EnergyLedger()
    ledger.set_active({"a": 2}, 0.0)
    feed(ledger, lambda at: 12.0, 4.0, 10.0)
    first = ledger.charge("a", 4.0, whole(0.0, 4.0, 3.0))
    second = ledger.charge("a", 4.0, whole(0.0, 4.0, 1.0))
    assert first is not None
    assert second is not None
    assert first.joules == pytest.approx(36.0)
    assert second.joules == pytest.approx(12.0)
    assert ledger.totals(4.0).idle_joules == pytest.approx(0.0, abs=1e-6)


def test_staggered_requests_are_charged_what_they_worked() -> None:
    """Alone in 0 to 5, both in 5 to 10, the other alone in 10 to 15."""
    ledger = EnergyLedger()
    ledger.add(PowerSample(0.0, INA, 10.0))
    ledger.set_active({"a": 1}, 0.0)
    charges = []
    for tick in range(1, 151):
        ledger.add(PowerSample(tick / 10, INA, 10.0))
        if tick == 50:
            ledger.set_active({"a": 2}, 5.0)
        if tick == 100:
            charges.append(ledger.charge("a", 10.0, whole(0.0, 10.0, 7.5)))
            ledger.set_active({"a": 1}, 10.0)
    charges.append(ledger.charge("a", 15.0, whole(5.0, 15.0, 7.5)))
    assert [charge.joules for charge in charges if charge] == pytest.approx([75.0, 75.0])


def test_two_busy_engines_share_the_node() -> None:
    """Each is busy all the time, and the node is there once."""
    ledger = EnergyLedger()
    ledger.set_active({"a": 1, "b": 1}, 0.0)
    feed(ledger, lambda at: 20.0, 2.0, 10.0)
    for engine in ("a", "b"):
        charge = ledger.charge(engine, 2.0, whole(0.0, 2.0, 2.0))
        assert charge is not None
        assert charge.joules == pytest.approx(20.0)
    assert ledger.totals(2.0).idle_joules == pytest.approx(0.0, abs=1e-6)


def test_request_before_the_first_sample_is_not_charged() -> None:
    ledger = EnergyLedger()
    assert ledger.charge("a", 1.0, whole(0.0, 1.0, 1.0)) is None
    ledger.add(PowerSample(5.0, INA, 10.0))
    assert ledger.charge("a", 5.5, whole(0.0, 5.5, 1.0)) is None


def test_request_that_was_half_estimated_says_so() -> None:
    ledger = EnergyLedger()
    ledger.add(PowerSample(0.0, ESTIMATE, 10.0))
    for at in (1.0, 1.5, 2.0):
        ledger.add(PowerSample(at, INA, 10.0))
    charge = ledger.charge("a", 2.0, whole(0.0, 2.0, 2.0))
    assert charge is not None
    assert charge.source == ESTIMATE


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 200), st.integers(50, 300)), min_size=1, max_size=8)
)
def test_each_request_is_charged_its_work_however_they_overlap(
    requests: list[tuple[int, int]],
) -> None:
    """On an engine that shares its time evenly, at constant power, within 5 %."""
    ledger = EnergyLedger()
    left = {index: float(work) for index, (_, work) in enumerate(requests)}
    active: dict[int, float] = {}
    slices = 0
    while left:
        now = slices * SLICE
        arrived = [i for i in left if requests[i][0] == slices]
        if arrived:
            active.update(dict.fromkeys(arrived, now))
            ledger.set_active({"a": len(active)}, now)
        if slices % 5 == 0:
            ledger.add(PowerSample(now, INA, 10.0))
        slices += 1
        now = slices * SLICE
        share = 1.0 / max(1, len(active))
        for i in list(active):
            left[i] -= share
        for i in [i for i in active if left[i] <= 1e-9]:
            work_seconds = (requests[i][1] - left.pop(i)) * SLICE
            charge = ledger.charge("a", now, whole(active.pop(i), now, work_seconds))
            assert charge is not None
            assert charge.joules == pytest.approx(10.0 * work_seconds, rel=0.05)
            ledger.set_active({"a": len(active)}, now)


def test_prompt_and_answer_are_charged_where_each_was_done() -> None:
    """Two seconds of reading at 30 W, then four of writing at 10 W."""
    ledger = EnergyLedger()
    ledger.set_active({"a": 1}, 0.0)
    for tick in range(61):
        now = tick / 10
        ledger.add(PowerSample(now, INA, 30.0 if now < 2.0 else 10.0, 0.0 if tick == 0 else None))
    charge = ledger.charge("a", 6.0, Work(2.0, 4.0, 6.0, prefill_work_seconds=2.0))
    assert charge is not None
    assert charge.prefill_joules == pytest.approx(60.0, rel=0.03)
    assert charge.decode_joules == pytest.approx(40.0, rel=0.03)
    assert charge.joules == pytest.approx(ledger.totals(6.0).total_joules)


def test_work_that_nobody_told_apart_is_shared_by_how_busy_the_engine_was() -> None:
    ledger = EnergyLedger()
    ledger.set_active({"a": 1}, 0.0)
    feed(ledger, lambda now: 10.0, 6.0, 10.0)
    charge = ledger.charge("a", 6.0, Work(2.0, 4.0, 6.0))
    assert charge is not None
    assert charge.prefill_joules == pytest.approx(20.0, rel=0.01)
    assert charge.decode_joules == pytest.approx(40.0, rel=0.01)


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(
        st.tuples(
            st.integers(0, 100),  # arrives, in slices
            st.integers(0, 80),  # of reading
            st.integers(1, 80),  # of writing
        ),
        min_size=1,
        max_size=6,
    ),
    reading_watts=st.floats(5.0, 50.0),
    writing_watts=st.floats(5.0, 50.0),
)
def test_phases_add_up_to_requests_and_these_with_idle_to_the_total(
    requests: list[tuple[int, int, int]], reading_watts: float, writing_watts: float
) -> None:
    """For the split as well: conserved within 1 %."""
    ledger = EnergyLedger()
    read = {i: float(r) for i, (_, r, _) in enumerate(requests)}
    left = {i: float(w) for i, (_, _, w) in enumerate(requests)}
    begun: dict[int, int] = {}
    answered: dict[int, int] = {}
    work = {i: [0.0, 0.0] for i in left}
    charges = []
    truth, slices = 0.0, 0
    while left or slices % 5:
        arrived = [i for i in left if requests[i][0] == slices]
        begun.update(dict.fromkeys(arrived, slices))
        active = [i for i in begun if i in left]
        if arrived:
            ledger.set_active({"a": len(active)}, slices * SLICE)
        reading = [i for i in active if read[i] > 0]
        watts = 2.0
        if active:
            part = len(reading) / len(active)
            watts = part * reading_watts + (1 - part) * writing_watts
        if slices % 5 == 0:
            ledger.add(PowerSample(slices * SLICE, "rapl", watts, truth))
        truth += watts * SLICE
        slices += 1
        for i in active:
            share = 1.0 / len(active)
            phase = 0 if i in reading else 1
            work[i][phase] += share * SLICE
            if phase == 0:
                read[i] -= share
                continue
            answered.setdefault(i, slices - 1)
            left[i] -= share
            if left[i] <= 1e-9:
                del left[i]
                seconds = [(answered[i] - begun[i]) * SLICE, (slices - answered[i]) * SLICE]
                told = Work(seconds[0], seconds[1], sum(work[i]), work[i][0])
                charge = ledger.charge("a", slices * SLICE, told)
                if charge is not None:
                    charges.append(charge)
                ledger.set_active({"a": len([k for k in begun if k in left])}, slices * SLICE)
    end = (slices + 5) * SLICE  # what was handed out too early is taken back by the next sample
    truth += 2.0 * 5 * SLICE
    ledger.add(PowerSample(end, "rapl", 2.0, truth))
    totals = ledger.totals(end)
    phases = sum(charge.prefill_joules + charge.decode_joules for charge in charges)
    assert phases == pytest.approx(totals.requests_joules)
    assert phases + totals.idle_joules == pytest.approx(truth, rel=0.01)
    assert all(charge.prefill_joules >= 0 for charge in charges)
    assert all(charge.decode_joules >= -1e-9 for charge in charges)


SLICE = 0.02

bursts = st.lists(
    st.tuples(
        st.integers(0, 200),  # arrives, in slices
        st.integers(5, 150),  # needs this many slices of work
        st.sampled_from(["a", "b"]),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(requests=bursts, idle_watts=st.floats(1.0, 20.0), busy_watts=st.floats(20.0, 300.0))
def test_requests_and_idle_are_the_total_however_they_overlap(
    requests: list[tuple[int, int, str]], idle_watts: float, busy_watts: float
) -> None:
    """Conservation within 1 %, on engines that share their time evenly."""
    ledger = EnergyLedger()
    left = {index: float(work) for index, (_, work, _) in enumerate(requests)}
    work_done = dict.fromkeys(left, 0.0)
    active: dict[int, float] = {}
    charged: dict[int, float] = {}
    truth = busy_seconds = 0.0
    slices = 0
    while left or slices % 10:
        now = slices * SLICE
        arrived = [i for i in left if requests[i][0] == slices]
        active.update(dict.fromkeys(arrived, now))
        counts = {e: sum(requests[i][2] == e for i in active) for e in ("a", "b")}
        if arrived:
            ledger.set_active(counts, now)
        watts = busy_watts if active else idle_watts
        if slices % 5 == 0:
            ledger.add(PowerSample(now, "rapl", watts, truth))
        slices += 1
        now = slices * SLICE
        truth += watts * SLICE
        busy_seconds += SLICE if active else 0.0
        for i in list(active):
            share = 1.0 / counts[requests[i][2]]
            left[i] -= share
            work_done[i] += share * SLICE
            if left[i] <= 0:
                start = active.pop(i)
                charge = ledger.charge(requests[i][2], now, whole(start, now, work_done[i]))
                if charge is not None:
                    charged[i] = charge.joules
                del left[i]
                ledger.set_active(
                    {e: sum(requests[k][2] == e for k in active) for e in ("a", "b")}, now
                )
    end = slices * SLICE
    ledger.add(PowerSample(end, "rapl", idle_watts, truth))
    totals = ledger.totals(end)
    assert totals.total_joules == pytest.approx(truth, rel=0.01)
    assert sum(charged.values()) + totals.idle_joules == pytest.approx(truth, rel=0.01)
    assert sum(charged.values()) == pytest.approx(totals.requests_joules)
    assert totals.idle_joules >= -1e-6
    assert all(joules >= 0 for joules in charged.values())
    # Nobody is charged for more than all the time that anyone was busy.
    assert totals.requests_joules <= busy_watts * busy_seconds * 1.01 + busy_watts * 0.2
