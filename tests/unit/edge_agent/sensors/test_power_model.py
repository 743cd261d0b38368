import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.sensors.base import Coverage
from edge_agent.sensors.power_model import PowerModel, power_model


def test_operators_figures_come_before_any_table() -> None:
    assert power_model("Raspberry Pi 5", 4, 2.5, 11.0) == PowerModel(2.5, 11.0)
    assert power_model("Raspberry Pi 5", 4, 0.0, 0.0) == PowerModel(0.0, 0.0)


@pytest.mark.parametrize(
    ("hardware", "idle_watts", "max_watts"),
    [
        ("Raspberry Pi 5 Model B Rev 1.0", 3.0, 12.0),
        ("Raspberry Pi 4 Model B Rev 1.5", 2.7, 6.5),
        ("Raspberry Pi 400 Rev 1.0", 2.8, 6.5),
        ("NVIDIA Jetson Orin Nano Developer Kit", 5.0, 15.0),
        ("NVIDIA Jetson AGX Orin", 9.0, 50.0),
        ("NVIDIA Jetson Nano Developer Kit", 2.0, 10.0),
    ],
)
def test_known_boards_have_their_own_figures(
    hardware: str, idle_watts: float, max_watts: float
) -> None:
    """Whatever the board's revision is: a Pi 4 rev 1.5 is a Pi 4."""
    found = power_model(hardware, 4, None, None)
    assert (found.idle_watts, found.max_watts) == (idle_watts, max_watts)
    assert found.coverage is Coverage.BOARD


def test_half_of_an_operators_figures_is_not_mixed_with_a_tables() -> None:
    assert power_model("Raspberry Pi 5", 4, 2.5, None).idle_watts == 3.0


def test_machine_that_nobody_knows_draws_by_its_cores() -> None:
    """A VM is estimated, with a wide error bar."""
    one, eight = (power_model("Standard PC", cores, None, None) for cores in (1, 8))
    assert eight.idle_watts == pytest.approx(8 * one.idle_watts)
    assert eight.max_watts == pytest.approx(8 * one.max_watts)
    board, metered = (power_model("Raspberry Pi 4", 4, *watts) for watts in ((None, None), (3, 7)))
    assert one.relative_error > board.relative_error > metered.relative_error > 0.1
    assert one.coverage is Coverage.PARTIAL, "the cores' share of a server"


@given(st.floats(0.0, 1.0), st.floats(0.0, 100.0), st.floats(0.0, 100.0))
def test_power_lies_between_idle_and_full(
    utilisation: float, idle_watts: float, extra_watts: float
) -> None:
    model = PowerModel(idle_watts, idle_watts + extra_watts)
    tolerance = 1e-9
    assert model.watts(0.0) == model.idle_watts
    assert model.watts(1.0) == pytest.approx(model.max_watts)
    assert model.idle_watts - tolerance <= model.watts(utilisation) <= model.max_watts + tolerance
