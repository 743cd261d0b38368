"""Looking into what sensors answer, for tests."""

import time

from edge_agent.sensors.base import NoData, PowerReading, Readings, Sensor


def power_of(answer: Readings | NoData) -> PowerReading:
    """The power that a sensor must have given."""
    assert isinstance(answer, Readings), answer
    assert answer.power is not None
    return answer.power


def first_word(sensor: Sensor, now: float, patience_seconds: float = 10.0) -> Readings | NoData:
    """What a sensor says that waits for a service, once the service has answered or failed.

    Args:
        now: at which it is read, as often as it takes.
    """
    give_up_at = time.monotonic() + patience_seconds
    answer = sensor.read(now)
    while isinstance(answer, NoData) and answer.is_pending and time.monotonic() < give_up_at:
        time.sleep(0.002)
        answer = sensor.read(now)
    return answer
