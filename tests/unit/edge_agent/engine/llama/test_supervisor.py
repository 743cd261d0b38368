import asyncio
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from edge_agent.config import ModelSettings
from edge_agent.engine.base import EngineSettings, GenerationRequest
from edge_agent.engine.llama.supervisor import SupervisedEngine
from edge_agent.engine.registry import check_limits
from edge_agent.errors import EngineError, EngineFailure, UsageError


def load_failure(path: Path, available: int = 1 << 40) -> EngineError:
    async def scenario() -> EngineError:
        engine = SupervisedEngine(EngineSettings(path), available=lambda: available)
        with pytest.raises(EngineError) as caught:
            await engine.load()
        stats = engine.stats()
        assert not stats.is_ready
        assert stats.issue == f"engine_{caught.value.kind.value}: {caught.value}"
        assert engine.child_pid is None
        await engine.close()
        return caught.value

    return asyncio.run(scenario())


def test_a_missing_file_is_found_before_a_child_starts(tmp_path: Path) -> None:
    """P5."""
    error = load_failure(tmp_path / "none.gguf")
    assert error.kind is EngineFailure.MISSING_FILE
    assert "pull the model" in str(error)


def test_a_web_page_is_found_before_a_child_starts(tmp_path: Path) -> None:
    """P5, M4."""
    path = tmp_path / "page.gguf"
    path.write_text("<html>Not found</html>")
    error = load_failure(path)
    assert error.kind is EngineFailure.BAD_MODEL_FILE
    assert "web page" in str(error)


def test_a_model_that_will_not_fit_is_found_before_a_child_starts(tmp_path: Path) -> None:
    """P5, P13."""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    error = load_failure(path, available=1 << 20)
    assert error.kind is EngineFailure.OUT_OF_MEMORY
    assert "fewer slots" in str(error)


@pytest.mark.parametrize(
    "wrong",
    [
        {"slots": 0},
        {"slots": 257},
        {"context_tokens": 1},
        {"context_tokens": 1 << 21},
        {"threads": 0},
        {"cpu_share_ratio": 0.0},
        {"cpu_share_ratio": 1.5},
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    settings = replace(EngineSettings(Path("m.gguf")), **wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=next(iter(wrong))):
        SupervisedEngine(settings)


def test_what_an_order_may_ask_for_the_engine_takes() -> None:
    model = ModelSettings("m", slots=256, context_tokens=1 << 20)
    check_limits(model)
    SupervisedEngine(
        EngineSettings(Path("m.gguf"), slots=model.slots, context_tokens=model.context_tokens)
    )


def test_nothing_is_generated_before_loading_or_after_closing() -> None:
    async def scenario() -> None:
        engine = SupervisedEngine(EngineSettings(Path("m.gguf")))
        with pytest.raises(EngineError, match="not loaded"):
            await anext(engine.generate(GenerationRequest("k", "hi")))
        await engine.cancel("k")
        await engine.close()
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await engine.load()

    asyncio.run(scenario())


def test_the_agents_process_imports_neither_numpy_nor_llama_cpp() -> None:
    modules = ("llama.supervisor", "fake", "llama.quantise", "llama.model_files")
    program = (
        "import sys\n"
        + "".join(f"import edge_agent.engine.{module}\n" for module in modules)
        + "heavy = {'numpy', 'torch', 'llama_cpp', 'jinja2', 'controller'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
