"""`edge-controller serve`."""

import asyncio
import json
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

import click

from controller.commands.target import (
    CommandFailedError,
    WrongUsage,
)
from controller.config import SettingsError, load_settings
from controller.telemetry.logs import configure_logs


@click.command()
@click.option(
    "--config", type=click.Path(dir_okay=False, path_type=Path), help="TOML file with settings."
)
@click.option("--listen", help="Address (host:port) for gRPC: clients, operators, agents.")
@click.option("--http-listen", help="Address (host:port) for the OpenAI-compatible HTTP. '': off.")
@click.option("--data-dir", type=click.Path(file_okay=False, path_type=Path))
@click.option("--insecure", is_flag=True, default=None, help="Serve without TLS.")
@click.option(
    "--tls-cert-file", help="PEM file of the certificate chain. Default: one is made in data-dir."
)
@click.option("--tls-key-file", help="PEM file of the chain's private key.")
@click.option(
    "--tls-name", "tls_names", multiple=True, help="One more name for the certificate (repeatable)."
)
@click.option("--policy", help="Routing policy at the start.")
@click.option("--weights", help="Weights of quality,cost,energy,time, such as 0.4,0,0.2,0.4.")
@click.option(
    "--window-seconds", type=float, help="Longest wait for other requests to join a batch."
)
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]))
def serve(
    config: Path | None,
    listen: str | None,
    http_listen: str | None,
    data_dir: Path | None,
    insecure: bool | None,
    tls_cert_file: str | None,
    tls_key_file: str | None,
    tls_names: tuple[str, ...],
    policy: str | None,
    weights: str | None,
    window_seconds: float | None,
    log_level: str | None,
) -> None:
    """Run the controller until SIGTERM or Ctrl-C."""
    try:
        settings = load_settings(
            config,
            overrides={
                ("server", "listen"): listen,
                ("server", "http_listen"): http_listen,
                ("server", "data_dir"): data_dir,
                ("server", "insecure"): insecure,
                ("server", "tls_cert_file"): tls_cert_file,
                ("server", "tls_key_file"): tls_key_file,
                ("server", "tls_names"): tls_names or None,
                ("server", "log_level"): log_level,
                ("routing", "policy"): policy,
                ("routing", "weights"): weights,
                ("batching", "window_seconds"): window_seconds,
            },
        )
    except SettingsError as error:
        raise WrongUsage(str(error)) from error
    configure_logs(settings.server.log_level)
    from controller.api.grpc_server import ListenError
    from controller.app import Listening
    from controller.app import serve as run_controller
    from controller.errors import RouterError, UnknownPolicyError
    from controller.gateway.server import HttpListenError
    from controller.memory import keep_heaps_small
    from controller.request_manager.decider import GIL_SWITCH_SECONDS

    sys.setswitchinterval(GIL_SWITCH_SECONDS)
    keep_heaps_small()

    def ready(listening: Listening) -> None:
        click.echo(
            json.dumps(
                {
                    "listen": listening.grpc_address,
                    "http": listening.http_address,
                    "ca_file": listening.ca_file,
                }
            )
        )
        sys.stdout.flush()

    async def run() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await run_controller(settings, stop, ready)

    try:
        asyncio.run(run())
    except (SettingsError, UnknownPolicyError) as error:
        raise WrongUsage(str(error)) from error
    except (ListenError, HttpListenError, RouterError) as error:
        raise CommandFailedError(str(error)) from error
    except BaseException as error:
        for inner in _flatten(error):
            if isinstance(inner, ListenError | HttpListenError):
                raise CommandFailedError(str(inner)) from error
        raise


def _flatten(error: BaseException) -> Iterable[BaseException]:
    """Exceptions inside the groups that task groups raise."""
    inner = getattr(error, "exceptions", None)
    if inner is None:
        yield error
        return
    for one in inner:
        yield from _flatten(one)
