"""What every test shares: in the gate, a skip for want of something is a failure."""

import os
from collections.abc import Iterator

import hypothesis
import pytest
import structlog

# How long an example takes is the machine's affair, which may be busy with something else.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

# structlog draws tracebacks with every local variable unless told otherwise, which takes seconds.
structlog.configure(
    [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.dev.ConsoleRenderer(
            colors=False, exception_formatter=structlog.dev.plain_traceback
        ),
    ]
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: "pytest.CallInfo[None]") -> Iterator[None]:
    """Turn skips into failures when POINTSMAN_NO_SKIPS is set, as .ci/run does."""
    report = yield
    if os.environ.get("POINTSMAN_NO_SKIPS") and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped in the gate: {report.longrepr}"
    return report


@pytest.fixture
def anyio_backend() -> str:
    """Coroutine tests run on asyncio alone, as the programs do."""
    return "asyncio"
