"""Log set-up: colour on a terminal, JSON otherwise, to standard error."""

import logging
import sys

import structlog
from structlog.dev import plain_traceback


def configure_logs(level: str) -> None:
    """Set up structlog and the standard library's loggers, which libraries use.

    Args:
        level: debug, info, warning or error.
    """
    number = getattr(logging, level.upper())
    is_terminal = sys.stderr.isatty()
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[
            *shared,
            *(
                # With rich installed, structlog would print what each variable held: prompts, keys.
                [structlog.dev.ConsoleRenderer(exception_formatter=plain_traceback)]
                if is_terminal
                else [
                    structlog.processors.format_exc_info,
                    structlog.processors.JSONRenderer(),
                ]
            ),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=max(number, logging.WARNING), stream=sys.stderr)
