"""Log set-up: colour on a terminal, JSON otherwise, to standard error."""

import logging
import sys

import structlog


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
                [structlog.dev.ConsoleRenderer()]
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
