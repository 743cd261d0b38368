"""`edge-agent run` with a fake engine, as a process: its arguments are FOLDER ADDRESS CA_FILE.

Ends on SIGTERM, and then prints the names of all modules that were imported, as one JSON list. An
empty CA_FILE connects without TLS.
"""

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from edge_agent.app import run
from edge_agent.config import ControllerSettings, ModelSettings, Settings
from edge_agent.engine.base import InferenceEngine
from edge_agent.engine.fake import FakeEngine
from edge_agent.engine.llama.spec import LlamaSpec
from edge_agent.engine.registry import ENGINES
from edge_agent.engine.spec import PreparedModel
from edge_agent.serving.calibrations import Speeds
from edge_agent.telemetry import configure_logs


async def prepare(name: str, report: Callable[[str], None]) -> PreparedModel:
    """A model file nobody reads."""
    return PreparedModel(Path(f"/nowhere/{name}.gguf"), name, "fake", 0.1, "Q4_0", 2048, None)


async def calibrate(engine: InferenceEngine, slots: int) -> Speeds:
    """Speeds nobody measured."""
    return Speeds(2000.0, 200.0, 200.0 * slots)


async def main(folder: Path, address: str, ca_file: str) -> None:
    """Serve one fake model until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    settings = Settings(
        node_id="fake",
        data_dir=folder,
        drain_seconds=1.0,
        controller=ControllerSettings(address, insecure=not ca_file, ca_file=ca_file),
        models=(ModelSettings("fake-a", slots=2, threads=1),),
    )
    await run(
        settings,
        stop,
        fetch=prepare,
        engines=(*ENGINES[:-1], lambda entry: LlamaSpec(FakeEngine)),
        calibrate=calibrate,
        find_sensors=lambda settings: [],
    )


if __name__ == "__main__":
    configure_logs("warning")
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
    sys.stdout.write(json.dumps(sorted(sys.modules)))
