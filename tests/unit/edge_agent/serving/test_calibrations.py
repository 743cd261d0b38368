from pathlib import Path

from edge_agent.serving.calibrations import KeptCalibrations, Speeds


def test_speeds_that_an_earlier_version_kept_are_not_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "calibrations.json"
    path.write_text(
        '{"board": {"prefill_rate": 200.0, "decode_rate": 20.0, "saturated_decode_rate": 60.0, '
        '"measured_slots": 4, "engine_version": "e", "power_mode": "", "load_watts": 9.5, '
        '"prefill_joules_per_token": null, "decode_joules_per_token": null}}'
    )
    kept = KeptCalibrations(path)
    speeds = Speeds(200.0, 20.0, 60.0, 4, "e", load_watts=9.5)
    assert kept.find("board") == speeds
    kept.keep("other", speeds)
    assert KeptCalibrations(path).find("board") == KeptCalibrations(path).find("other") == speeds
