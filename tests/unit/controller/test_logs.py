import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("level", "shown"),
    [("debug", {"d", "i", "w"}), ("info", {"i", "w"}), ("error", set())],
)
def test_piped_logs_are_json_on_standard_error_from_their_level_on(
    level: str, shown: set[str]
) -> None:
    program = (
        "import structlog, sys\n"
        "from controller.telemetry.logs import configure_logs\n"
        f"configure_logs({level!r})\n"
        "log = structlog.get_logger()\n"
        "log.debug('d', seconds=0.5); log.info('i'); log.warning('w')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout == b""
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert {line["event"] for line in lines} == shown
    assert all({"level", "timestamp"} <= line.keys() for line in lines)


@pytest.mark.parametrize("module", ["controller.telemetry.logs", "edge_agent.telemetry"])
def test_traceback_on_a_terminal_shows_no_value_of_a_variable(module: str) -> None:
    program = (
        "import structlog, sys\n"
        f"from {module} import configure_logs\n"
        "sys.stderr.isatty = lambda: True\n"
        "configure_logs('info')\n"
        "def answer(prompt):\n"
        "    try:\n"
        "        raise ValueError('no')\n"
        "    except ValueError:\n"
        "        structlog.get_logger().exception('request.failed')\n"
        "answer('my ' + 'secret')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.returncode == 0
    assert b"request.failed" in done.stderr
    assert b"ValueError: no" in done.stderr
    assert b"my secret" not in done.stderr
