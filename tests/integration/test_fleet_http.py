"""The official OpenAI client against a whole fleet: HTTP in, real gRPC to the agents."""

import asyncio
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from controller.config import GatewaySettings
from edge_agent.config import ModelSettings
from tests.fakes.fleet import RunningFleet, running_fleet

GOLDEN = Path(__file__).parents[1] / "golden" / "metrics.txt"


def client_of(fleet: RunningFleet) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{fleet.listening.http_address}/v1",
        api_key="unused",
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(),
    )


def test_openai_client_gets_whole_and_streamed_answers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path) as fleet, client_of(fleet) as client:
            await fleet.add_agent("a", (ModelSettings("fake-a"),))
            await fleet.add_agent("b", (ModelSettings("fake-b"),))
            assert [m.id async for m in client.models.list()] == ["fake-a", "fake-b", "auto"]
            whole = await client.chat.completions.create(
                model="fake-b", messages=[{"role": "user", "content": "Hello?"}], seed=1
            )
            assert whole.choices[0].finish_reason == "stop"
            assert whole.usage is not None
            assert whole.usage.completion_tokens > 0
            stream = await client.chat.completions.create(
                model="fake-b",
                messages=[{"role": "user", "content": "Hello?"}],
                seed=1,
                stream=True,
            )
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            assert "".join(pieces) == whole.choices[0].message.content
            async with httpx.AsyncClient() as http:
                answer = await http.get(f"{fleet.listening.http_address}/metrics")
            for line in (
                'pointsman_node_state{node="b",state="ready"} 1.0',
                'pointsman_node_ended_requests_total{node="b",outcome="completed"} 2.0',
                'pointsman_ended_requests_total{outcome="completed"} 2.0',
                'pointsman_model_is_ready{model="fake-a",node="a"} 1.0',
                "pointsman_storage_is_failing 0.0",
            ):
                assert line in answer.text.splitlines()
            assert "pointsman_event_loop_lag_seconds_count 0.0" not in answer.text.splitlines()
            assert "pointsman_event_loop_lag_seconds_count " in answer.text
            check_names_and_labels(answer.text)

    asyncio.run(scenario())


def check_names_and_labels(scrape: str) -> None:
    """Every metric that dashboards know is there, with its type and, of its samples, its labels."""
    golden = {}
    for line in GOLDEN.read_text(encoding="utf-8").splitlines():
        name, kind, *labels = line.split()
        golden[name] = kind, set(labels[0].split(",") if labels else ())
    found = {}
    for family in text_string_to_metric_families(scrape):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found[name] = family.type, golden.get(name, ("", set()))[1]
        for sample in family.samples:  # of what is unknown on this machine there is none
            found[name] = family.type, sample.labels.keys() - {"le"}
    assert {name: found.get(name) for name in golden} == golden


def test_openai_client_sees_each_refusal_as_its_own_error(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_fleet(tmp_path) as fleet, client_of(fleet) as client:
            messages = [{"role": "user", "content": "Hello?"}]
            with pytest.raises(openai.InternalServerError) as failure:
                await client.chat.completions.create(model="auto", messages=messages)  # type: ignore[arg-type]
            assert failure.value.status_code == 503
            await fleet.add_agent("a")
            with pytest.raises(openai.NotFoundError, match="fake-a"):
                await client.chat.completions.create(model="gpt-none", messages=messages)  # type: ignore[arg-type]
            with pytest.raises(openai.BadRequestError, match="max_tokens"):
                await client.chat.completions.create(
                    model="auto",
                    messages=messages,  # type: ignore[arg-type]
                    max_tokens=0,
                )

    asyncio.run(scenario())


def test_http_takes_its_limits_from_the_settings(tmp_path: Path) -> None:
    async def scenario() -> None:
        limits = GatewaySettings(max_body_bytes=100)
        async with running_fleet(tmp_path, gateway=limits) as fleet, httpx.AsyncClient() as http:
            answer = await http.post(
                f"{fleet.listening.http_address}/v1/chat/completions",
                json={"messages": [{"role": "user", "content": "x" * 100}]},
            )
            assert answer.status_code == 413
            assert "at most 100 bytes" in answer.json()["error"]["message"]

    asyncio.run(scenario())
