"""What of new settings a running agent takes."""

from dataclasses import fields, replace
from pathlib import Path

from edge_agent.config import (
    ControllerSettings,
    MemorySettings,
    ModelSettings,
    PowerSettings,
    Settings,
)
from edge_agent.reload import plan_reload

OLD = Settings(
    node_id="pi",
    data_dir=Path("/data"),
    controller=ControllerSettings("old:1"),
    power=PowerSettings(2.0, 8.0),
    models=(ModelSettings("a"),),
)


def test_same_settings_change_nothing() -> None:
    plan = plan_reload(OLD, replace(OLD))
    assert (plan.settings, plan.applied, plan.needs_restart) == (OLD, (), ())


def test_what_can_be_taken_is_and_the_rest_is_named() -> None:
    new = replace(
        OLD,
        node_id="other",
        log_level="debug",
        drain_seconds=3.0,
        controller=ControllerSettings("new:1", insecure=True),
        power=PowerSettings(3.0, 9.0, pmic_scale=1.2),
        memory=MemorySettings(idle_seconds=60.0),
        models=(ModelSettings("b"),),
    )
    plan = plan_reload(OLD, new)
    assert plan.settings.models == new.models
    assert plan.settings.memory == new.memory
    assert (plan.settings.log_level, plan.settings.drain_seconds) == ("debug", 3.0)
    assert (plan.settings.power.idle_watts, plan.settings.power.max_watts) == (3.0, 9.0)
    assert plan.settings.power.pmic_scale is None
    assert plan.settings.controller == OLD.controller
    assert set(plan.applied) == {
        "log_level",
        "drain_seconds",
        "power.idle_watts",
        "power.max_watts",
        "memory",
        "models",
    }
    assert set(plan.needs_restart) == {
        "node_id",
        "controller.address",
        "controller.insecure",
        "power.pmic_scale",
    }


def test_every_setting_is_either_taken_or_named() -> None:
    others = {"node_id": "x", "kind": "cloud", "hardware": "x", "data_dir": Path("/x")}
    others |= {"models_dir": "x", "catalog_file": "x", "drain_seconds": 1.0, "log_level": "debug"}
    for entry in fields(Settings):
        if entry.name not in others:
            continue
        plan = plan_reload(OLD, replace(OLD, **{entry.name: others[entry.name]}))  # type: ignore[arg-type]
        assert (plan.applied or plan.needs_restart) == (entry.name,)
