"""What a model needs that a server elsewhere answers for, and how the server is asked."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

from edge_agent.engine.base import InferenceEngine, Rates
from edge_agent.engine.remote.settings import OpenAiSettings, RemoteSettings, section_problems
from edge_agent.engine.spec import (
    EngineSpec,
    FetchModel,
    ModelEntry,
    PreparedModel,
    Report,
    Shelf,
)
from edge_agent.findings import Finding
from edge_agent.identity import is_loopback


@dataclass(frozen=True, slots=True)
class RemoteSpec(EngineSpec):
    """Asks an OpenAI-compatible server; the model has no file here.

    Attributes:
        section: where the server is.
    """

    name: ClassVar[str] = "remote"
    uses_this_machine: ClassVar[bool] = False
    loading_text: ClassVar[str] = "trying out the remote endpoint"
    section: RemoteSettings

    @property
    def takes_raw_prompts(self) -> bool:
        """See `EngineSpec.takes_raw_prompts`."""
        return self.section.supports_raw_prompts

    def problems(self) -> list[str]:
        """See `EngineSpec.problems`."""
        return [f"{self.name}.{problem}" for problem in section_problems(self.section)]

    async def prepare(self, entry: ModelEntry, fetch: FetchModel, report: Report) -> PreparedModel:
        """What routing is told of the model before its endpoint was asked."""
        report("asking the remote endpoint")
        section = self.section
        where = f"{section.base_url.rstrip('/')} {section.model}"
        return PreparedModel(
            path=None,
            # Whose bytes these are, nobody can say; where they are is all that tells two apart.
            digest=f"remote-{hashlib.sha256(where.encode()).hexdigest()}",
            family=section.family or entry.name,
            parameters_billions=section.parameters_billions,
            quantisation=section.quantisation,
            context_tokens=section.context_tokens,
            chat_template=None,
            is_base_model=section.is_base_model,
        )

    def make(self, entry: ModelEntry, prepared: PreparedModel) -> InferenceEngine:
        """See `EngineSpec.make`."""
        from edge_agent.engine.remote.engine import OpenAiEngine

        return OpenAiEngine(self.engine_settings(entry))

    def engine_settings(self, entry: ModelEntry) -> OpenAiSettings:
        """How the server is asked. One that costs money is sent one small request at most."""
        section = self.section
        return OpenAiSettings(
            base_url=section.base_url,
            model=section.model,
            slots=entry.slots,
            context_tokens=section.context_tokens or entry.context_tokens,
            api_key_file=section.api_key_file,
            api_key_env=section.api_key_env,
            has_chat_template=not section.is_base_model,
            supports_raw_prompts=section.supports_raw_prompts,
            supports_response_format=section.supports_response_format,
            omit_parameters=section.omit_parameters,
            first_token_seconds=section.first_token_seconds,
            is_measured=section.calibrate and not entry.has_price,
            declared=Rates(
                section.prefill_tokens_per_second,
                section.decode_tokens_per_second,
                section.saturated_decode_tokens_per_second,
            ),
        )

    async def examine(self, entry: ModelEntry, shelf: Shelf) -> list[Finding]:
        """Ask the endpoint for its models, which costs nothing anywhere."""
        from edge_agent.engine.remote.endpoint import RemoteError, look, new_client, read_api_key

        section = self.section
        findings = []
        key_file = Path(section.api_key_file).expanduser()
        if section.api_key_file and _others_may_open(key_file):
            text = f"{entry.name}: others can read the API key in {key_file}"
            findings.append(Finding("remote", "warning", text, f"chmod 600 {key_file}"))
        has_key = bool(section.api_key_file or section.api_key_env)
        if (
            has_key
            and section.base_url.startswith("http://")
            and not is_loopback(urlsplit(section.base_url).hostname or "")
        ):
            text = f"{entry.name}: the API key goes to {section.base_url} unencrypted"
            findings.append(Finding("remote", "warning", text, "use https in base_url"))

        def headers() -> dict[str, str]:
            key = read_api_key(section.api_key_file, section.api_key_env, os.environ)
            return {} if key is None else {"Authorization": f"Bearer {key}"}

        try:
            async with new_client(1, 5.0) as client:
                listing = await look(client, section.base_url.rstrip("/"), section.model, headers)
        except RemoteError as error:
            fix = f"correct [models.remote] of {entry.name}, or start the server there"
            text = f"{entry.name}: {error.issue.value}: {error}"
            return [*findings, Finding("remote", "error", text, fix)]
        text = f"{entry.name}: {listing.model} at {section.base_url} answers"
        return [*findings, Finding("remote", "ok", text)]


def _others_may_open(file: Path) -> bool:
    try:
        return bool(file.stat().st_mode & 0o077)
    except OSError:
        return False  # that it is missing or unreadable is told where it is read
