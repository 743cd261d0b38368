"""The command `edge-agent`: parses, calls one function, prints."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from edge_agent import __version__
from edge_agent.config import Settings, load_settings
from edge_agent.errors import (
    EXIT_FAILED,
    EXIT_NOT_READY,
    EXIT_NOT_RUNNING,
    EXIT_READY,
    AgentError,
    UsageError,
)


class _ReportedError(click.ClickException):
    """An AgentError with the exit code that its kind has."""

    def __init__(self, error: AgentError) -> None:
        super().__init__(str(error))
        self._code = error.exit_code

    @property
    def exit_code(self) -> int:  # type: ignore[override]  # click declares a class variable
        """The code that the command ends with."""
        return self._code


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="edge-agent")
def main() -> None:
    """Run quantised models on this device for a Pointsman controller."""


def _settings_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--data-dir", type=click.Path(file_okay=False, path_type=Path)),
        click.option(
            "--config",
            type=click.Path(dir_okay=False, path_type=Path),
            envvar="EDGE_AGENT_CONFIG",
            help="TOML file with settings.",
        ),
    ):
        command = option(command)
    return command


def _load(config: Path | None, **overrides: object) -> Settings:
    try:
        return _read_settings(config, overrides)
    except AgentError as error:
        raise _ReportedError(error) from error


def _read_settings(config: Path | None, overrides: dict[str, Any]) -> Settings:
    # The file's own variable is no setting.
    environ = {key: value for key, value in os.environ.items() if key != "EDGE_AGENT_CONFIG"}
    return load_settings(config, environ, overrides)


# -- run ------------------------------------------------------------------------------------------


@main.command()
@_settings_options
@click.option("--controller", help="Address (host:port) of the controller.")
@click.option("--insecure", is_flag=True, default=None, help="Connect without TLS.")
@click.option("--ca-file", help="PEM of the authority that signed the controller's certificate.")
@click.option("--node-id", help="Name of this node. Default: the host's name.")
@click.option("--kind", type=click.Choice(["edge", "cloud"]))
@click.option("--hardware", help="Description of this node. Default: read from the board.")
@click.option("--model", "models", multiple=True, help="Model of the catalogue (repeatable).")
@click.option("--slots", type=int, help="Number of sequences decoded at once, for each --model.")
@click.option("--threads", type=int, help="Number of decoding threads, for each --model.")
@click.option(
    "--context-tokens", type=int, help="Maximum tokens of prompt plus answer, for each --model."
)
@click.option("--cpu-share", type=float, help="Share of the threads' time used, for each --model.")
@click.option("--models-dir", help="Folder for model files.")
@click.option("--idle-watts", type=float, help="Power of the idle board.")
@click.option("--max-watts", type=float, help="Power of the fully busy board.")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]))
def run(
    config: Path | None,
    data_dir: Path | None,
    controller: str | None,
    insecure: bool | None,
    ca_file: str | None,
    node_id: str | None,
    kind: str | None,
    hardware: str | None,
    models: tuple[str, ...],
    slots: int | None,
    threads: int | None,
    context_tokens: int | None,
    cpu_share: float | None,
    models_dir: str | None,
    idle_watts: float | None,
    max_watts: float | None,
    log_level: str | None,
) -> None:
    """Serve models until SIGTERM or Ctrl-C. SIGHUP reads the settings again."""
    given = {
        "slots": slots,
        "threads": threads,
        "context_tokens": context_tokens,
        "cpu_share_ratio": cpu_share,
    }
    model_settings = {key: value for key, value in given.items() if value is not None}
    if model_settings and not models:
        raise click.UsageError("--slots, --threads, --context-tokens and --cpu-share need --model")
    overrides = {
        "data_dir": data_dir,
        "models_dir": models_dir,
        "node_id": node_id,
        "kind": kind,
        "hardware": hardware,
        "log_level": log_level,
        "controller.address": controller,
        "controller.insecure": insecure,
        "controller.ca_file": ca_file,
        "power.idle_watts": idle_watts,
        "power.max_watts": max_watts,
        "models": [{"name": name, **model_settings} for name in models] or None,
    }
    settings = _load(config, **overrides)
    from edge_agent.app import Reloading
    from edge_agent.app import run as run_agent
    from edge_agent.link.session import check_address
    from edge_agent.systemd import notify_systemd
    from edge_agent.telemetry import configure_logs

    configure_logs(settings.log_level)

    async def serve() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def stopping() -> None:
            notify_systemd("STOPPING=1")
            stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopping)
        hangup = asyncio.Event()
        loop.add_signal_handler(signal.SIGHUP, hangup.set)
        await run_agent(
            settings,
            stop,
            lambda: notify_systemd("READY=1"),
            reloading=Reloading(hangup, lambda: _read_settings(config, overrides)),
        )

    try:
        check_address(settings.controller)
        asyncio.run(serve())
    except AgentError as error:
        raise _ReportedError(error) from error
    except OSError as error:
        raise _ReportedError(
            AgentError(f"{error.filename or ''}: {error.strerror or error}")
        ) from error


# -- status and doctor ----------------------------------------------------------------------------


@main.command()
@_settings_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--watch", is_flag=True, help="Update every second until Ctrl-C.")
def status(config: Path | None, data_dir: Path | None, as_json: bool, watch: bool) -> None:
    """Show the state of the running agent. Works without the controller.

    Exit codes: 0 ready, 1 failed, 2 wrong usage, 3 not running, 4 running but not ready. With
    --watch an agent that is away is waited for.
    """
    settings = _load(config, data_dir=data_dir)
    if not watch:
        sys.exit(_show_status(settings, as_json, is_watched=False))
    _watch_status(settings, as_json)


def _watch_status(settings: Settings, as_json: bool) -> None:
    """Update every second until Ctrl-C."""
    is_wanted = True

    def stop(*_: object) -> None:
        nonlocal is_wanted
        is_wanted = False

    # As an exception it would be lost where it met the last moment of an `asyncio.run`.
    signal.signal(signal.SIGINT, stop)
    while is_wanted:
        try:
            _show_status(settings, as_json, is_watched=True)
        except _ReportedError as away:  # being restarted, say
            if not as_json:
                click.clear()
                click.echo(away.message)
        sys.stdout.flush()
        shown_at = time.monotonic()
        while is_wanted and time.monotonic() - shown_at < 1.0:
            time.sleep(0.05)


def _show_status(settings: Settings, as_json: bool, is_watched: bool) -> int:
    """Ask once and print; the exit code that the answer has."""
    from edge_agent.render import print_status
    from edge_agent.status import ask_status, exit_code_of

    try:
        answer = asyncio.run(ask_status(settings.socket_path))
    except AgentError as error:
        if as_json:
            is_away = error.exit_code == EXIT_NOT_RUNNING
            state = "not_running" if is_away else "failed"
            click.echo(json.dumps({"state": state, "message": str(error)}))
        raise _ReportedError(error) from error
    if as_json:
        click.echo(json.dumps(answer, ensure_ascii=False))
    else:
        if is_watched:
            click.clear()
        print_status(answer)
    return exit_code_of(answer)


@main.command()
@_settings_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(config: Path | None, data_dir: Path | None, as_json: bool) -> None:
    """Check this device and print the fix for each problem.

    Exit codes: 0 nothing is wrong, 1 something will not work, 2 wrong usage, 4 only warnings.
    """
    from edge_agent.doctor import examine
    from edge_agent.render import print_findings

    settings = _load(config, data_dir=data_dir)
    findings = asyncio.run(examine(settings))
    levels = {finding.level for finding in findings}
    code = EXIT_FAILED if "error" in levels else EXIT_NOT_READY if "warning" in levels else 0
    if as_json:
        body = {
            "ok": "error" not in levels,
            "findings": [finding.to_json() for finding in findings],
        }
        click.echo(json.dumps(body, ensure_ascii=False))
    else:
        print_findings(findings)
    sys.exit(code)


# -- models ---------------------------------------------------------------------------------------


@main.group()
def models() -> None:
    """Model files: list, pull, verify, remove. Models of the running agent: load, unload, pin."""


@models.command("list")
@_settings_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_command(config: Path | None, data_dir: Path | None, as_json: bool) -> None:
    """List the catalogue and the files that are here."""
    from edge_agent.models.commands import list_models
    from edge_agent.models.tables import render_list

    _models_command(config, data_dir, as_json, list_models, render_list)


@models.command()
@click.argument("name")
@_settings_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def pull(name: str, config: Path | None, data_dir: Path | None, as_json: bool) -> None:
    """Fetch a model from its first working source, or derive it."""
    from edge_agent.models.commands import pull_model
    from edge_agent.models.tables import render_pulled, shown_progress

    def action(catalog: Any, store: Any) -> Any:
        with shown_progress(_console(stderr=True)) as on_progress:
            return pull_model(catalog, store, name, on_progress=on_progress)

    _models_command(config, data_dir, as_json, action, render_pulled)


@models.command()
@click.argument("names", nargs=-1)
@_settings_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def verify(
    names: tuple[str, ...], config: Path | None, data_dir: Path | None, as_json: bool
) -> None:
    """Check the model files against the catalogue's checksums."""
    from edge_agent.models.commands import verify_models
    from edge_agent.models.tables import render_verification

    result = _models_command(
        config,
        data_dir,
        as_json,
        lambda catalog, store: verify_models(catalog, store, names or None),
        render_verification,
    )
    sys.exit(EXIT_READY if result.ok else EXIT_FAILED)


@models.command()
@click.argument("name")
@_settings_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def remove(name: str, config: Path | None, data_dir: Path | None, as_json: bool) -> None:
    """Remove a model's file and its unfinished downloads."""
    from edge_agent.models.commands import remove_model
    from edge_agent.models.tables import render_removed

    _models_command(
        config,
        data_dir,
        as_json,
        lambda catalog, store: remove_model(catalog, store, name),
        render_removed,
    )


def _order_command(action_name: str, help_text: str) -> None:
    """Add `models ACTION NAME`, which has the running agent do something with a model."""

    def command(
        name: str,
        config: Path | None,
        data_dir: Path | None,
        as_json: bool,
        slots: int | None = None,
        context_tokens: int | None = None,
    ) -> None:
        from edge_agent.control import give_order

        settings = _load(config, data_dir=data_dir)

        async def follow() -> dict[str, Any]:
            update: dict[str, Any] = {}
            shown = ""
            async for update in give_order(
                settings.control_path, action_name, name, slots, context_tokens
            ):
                ratio = update.get("progress_ratio")
                text = update["message"] + ("" if ratio is None else f" ({100 * ratio:.0f} %)")
                if update["phase"] == "running" and text != shown:
                    shown = text
                    click.echo(text, err=True)
            return update

        try:
            update = asyncio.run(follow())
        except AgentError as error:
            raise _ReportedError(error) from error
        except KeyboardInterrupt:
            raise click.Abort from None  # the agent goes on with it
        if as_json:
            click.echo(json.dumps(update, ensure_ascii=False))
        elif update["phase"] == "done":
            click.echo(update["message"])
        else:
            raise _ReportedError(AgentError(update["message"]))
        sys.exit(EXIT_READY if update["phase"] == "done" else EXIT_FAILED)

    command.__doc__ = help_text
    decorated: Callable[..., Any] = click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON object."
    )(command)
    if action_name == "load":
        decorated = click.option("--slots", type=int, help="Number of sequences decoded at once.")(
            decorated
        )
        decorated = click.option(
            "--context-tokens", type=int, help="Maximum tokens of prompt plus answer."
        )(decorated)
    decorated = _settings_options(decorated)
    models.command(action_name)(click.argument("name")(decorated))


for _action, _help in (
    ("load", "Load NAME in the running agent. Fetches the file if it is missing."),
    ("unload", "Unload NAME in the running agent after its running answers have ended."),
    ("pin", "Keep NAME loaded, even when idle or when memory is short."),
    ("unpin", "Allow NAME to be unloaded."),
    ("measure", "Measure NAME's speed again in the running agent, between requests."),
):
    _order_command(_action, _help)


def _models_command(
    config: Path | None,
    data_dir: Path | None,
    as_json: bool,
    action: Callable[[Any, Any], Any],
    render: Callable[[Any, Any], None],
) -> Any:
    from edge_agent.models.catalog import load_catalog
    from edge_agent.models.store import ModelStore

    settings = _load(config, data_dir=data_dir)
    try:
        catalog = load_catalog(user_path=settings.catalog_path)
        result = action(catalog, ModelStore(settings.models_path))
    except AgentError as error:
        raise _ReportedError(error) from error
    except KeyboardInterrupt:
        raise click.Abort from None
    if as_json:
        click.echo(json.dumps(result.to_json(), ensure_ascii=False))
    else:
        render(result, _console())
    return result


def _console(stderr: bool = False) -> Any:
    from edge_agent.render import console

    return console(stderr)


# -- bench ----------------------------------------------------------------------------------------


class _Bench(click.Group):
    """`bench MODEL` means `bench model MODEL`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["model", *args]
        return super().parse_args(ctx, args)


@main.group(cls=_Bench)
def bench() -> None:
    """Measure a MODEL of the catalogue on this device, alone and with full slots."""


def _bench_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Which model is run, and how."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
        click.option("--context-tokens", type=int, default=1024, show_default=True),
        click.option("--threads", type=int, default=0, help="Number of threads. 0: all cores."),
        click.option("--slots", type=int, default=8, show_default=True),
        click.option(
            "--file", "path", type=click.Path(exists=True, dir_okay=False, path_type=Path)
        ),
        _settings_options,
        click.argument("model", required=False),
    ):
        command = option(command)
    return command


def _run_bench(
    measure: Callable[[Any], Any],
    model: str | None,
    config: Path | None,
    data_dir: Path | None,
    path: Path | None,
    slots: int,
    threads: int,
    context_tokens: int,
) -> Any:
    """What `measure` makes of the settings of an engine that runs the model."""
    from edge_agent.engine.base import EngineSettings
    from edge_agent.engine.registry import ModelSettings, spec_of
    from edge_agent.identity import usable_cores

    if (model is None) == (path is None):
        raise click.UsageError("name a MODEL of the catalogue, or give --file")
    if slots < 1:
        raise click.UsageError("--slots: at least 1")
    settings = _load(config, data_dir=data_dir)

    async def run() -> Any:
        file = path
        if file is None:
            from edge_agent.serving.prepare import ModelPreparer

            def report(
                text: str, progress_ratio: float | None = None, is_downloading: bool = False
            ) -> None:
                click.echo(text, err=True)

            entries = {entry.name: entry for entry in settings.models}
            entry = entries.get(str(model), ModelSettings(str(model)))
            file = (await spec_of(entry).prepare(entry, ModelPreparer(settings), report)).path
            if file is None:
                raise UsageError(f"{model} has no file here; name a model that this device runs.")
        return await measure(
            EngineSettings(
                model_path=file,
                slots=slots,
                threads=threads or usable_cores(),
                context_tokens=context_tokens,
            )
        )

    try:
        return asyncio.run(run())
    except AgentError as error:
        raise _ReportedError(error) from error


_PROGRAM = click.Path(exists=True, dir_okay=False, path_type=Path)


@bench.command("model")
@_bench_options
@click.option(
    "--beside", type=_PROGRAM, help="llama-batched-bench, measured in turns with this engine."
)
@click.option("--server", type=_PROGRAM, help="With --beside: llama-server, for its peak memory.")
@click.option("--rounds", type=int, default=3, show_default=True)
def bench_model(
    beside: Path | None, server: Path | None, rounds: int, as_json: bool, **options: Any
) -> None:
    """Measure MODEL alone and with full slots, or beside llama.cpp's own tools."""
    from edge_agent.bench import run_bench
    from edge_agent.render import print_bench

    if server is not None and beside is None:
        raise click.UsageError("--server needs --beside")
    if beside is not None:
        from edge_agent.bench_beside import run_beside

        tool = beside
        compared = _run_bench(
            lambda settings: run_beside(settings, tool, server=server, rounds=rounds), **options
        )
        click.echo(json.dumps(compared.as_dict(), indent=None if as_json else 2))
        return
    report = _run_bench(lambda settings: run_bench(settings, rounds=rounds), **options)
    if as_json:
        click.echo(json.dumps(report.as_dict()))
    else:
        print_bench(report)


@bench.command("first-token")
@_bench_options
@click.option("--long-tokens", type=click.IntRange(min=64), default=2000, show_default=True)
@click.option("--rounds", type=int, default=9, show_default=True)
def bench_first_token(
    long_tokens: int, rounds: int, as_json: bool, context_tokens: int, **options: Any
) -> None:
    """Measure the time to the first token of a short prompt beside a long one.

    The context is made long enough for the long prompt.
    """
    from edge_agent.bench_first_token import ROOM_TOKENS, run_first_token

    found = _run_bench(
        lambda settings: run_first_token(settings, rounds=rounds, long_tokens=long_tokens),
        context_tokens=max(context_tokens, long_tokens + ROOM_TOKENS),
        **options,
    )
    click.echo(json.dumps(found.as_dict(), indent=None if as_json else 2))


@bench.command("idle")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--seconds", type=click.FloatRange(min=1.0), default=20.0, show_default=True)
def bench_idle(as_json: bool, seconds: float) -> None:
    """Measure the agent's own memory and CPU time, without an engine."""
    from edge_agent.bench_idle import measure_idle

    found = measure_idle(seconds).as_dict()
    if as_json:
        click.echo(json.dumps(found))
        return
    for name, value in found.items():
        click.echo(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")


@bench.command("soak")
@_bench_options
@click.option(
    "--cycles", type=int, default=200, show_default=True, help="Number of loads and unloads."
)
@click.option("--requests", type=int, default=10_000, show_default=True)
def bench_soak(cycles: int, requests: int, as_json: bool, **options: Any) -> None:
    """Load, answer and unload for a long time, and measure the memory."""
    from edge_agent.bench_soak import run_soak

    def report(text: str) -> None:
        click.echo(text, err=True)

    soaked = _run_bench(
        lambda settings: run_soak(settings, cycles=cycles, requests=requests, report=report),
        **options,
    )
    click.echo(json.dumps(soaked.as_dict(), indent=None if as_json else 2))


if __name__ == "__main__":
    main()
