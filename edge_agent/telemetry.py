"""Log set-up: colour on a terminal, JSON otherwise, to standard error."""

import logging
import sys

import structlog
from structlog.dev import plain_traceback


def configure_logs(level: str) -> None:
    """Set up structlog.

    Args:
        level: debug, info, warning or error.
    """
    renderer: list[structlog.typing.Processor] = (
        # With rich installed, structlog would print what each variable held: prompts, keys.
        [structlog.dev.ConsoleRenderer(exception_formatter=plain_traceback)]
        if sys.stderr.isatty()
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        # A reload of the settings may change the level.
        cache_logger_on_first_use=False,
    )
