"""The tables of the controller's database, as the code of this version expects them."""

from typing import Final

from sqlalchemy import Column, Float, Index, Integer, LargeBinary, MetaData, String, Table, Text

REVISION: Final = "0002"
"""The migration that makes these tables; `migrations/versions` has the way there."""

METADATA: Final = MetaData()

NODES: Final = Table(
    "nodes",
    METADATA,
    Column("node_id", String, primary_key=True),
    Column("hello", Text, nullable=False),
    Column("is_draining", Integer, nullable=False),
    Column("completed_requests", Integer, nullable=False),
    Column("failed_requests", Integer, nullable=False),
    Column("cancelled_requests", Integer, nullable=False),
    Column("instance_id", String, nullable=False),
    Column("acked_sequence", Integer, nullable=False),
    Column("saved_time", Float, nullable=False),
)

CALIBRATIONS: Final = Table(
    "calibrations",
    METADATA,
    Column("hardware", String, primary_key=True),
    Column("digest", String, primary_key=True),
    Column("engine_version", String, primary_key=True),
    Column("power_mode", String, primary_key=True),
    Column("document", Text, nullable=False),
    Column("saved_time", Float, nullable=False),
)

CHOICES: Final = Table(
    "choices",
    METADATA,
    Column("name", String, primary_key=True),
    Column("document", Text, nullable=False),
    Column("saved_time", Float, nullable=False),
)

REQUESTS: Final = Table(
    "requests",
    METADATA,
    Column("number", Integer, primary_key=True),
    Column("request_id", String, nullable=False, unique=True),
    Column("finished_time", Float, nullable=False),
    Column("state", String, nullable=False),
    Column("batch_id", String),
    Column("node_id", String),
    Column("model", String),
    Column("policy", String),
    Column("finish_reason", String),
    Column("prompt_tokens", Integer),
    Column("completion_tokens", Integer),
    Column("cached_prompt_tokens", Integer),
    Column("queue_seconds", Float),
    Column("prefill_seconds", Float),
    Column("decode_seconds", Float),
    Column("window_seconds", Float),
    Column("first_token_seconds", Float),
    Column("total_seconds", Float),
    Column("predicted_finish_seconds", Float),
    Column("measured_finish_seconds", Float),
    Column("quality_ratio", Float),
    Column("cost_usd", Float),
    Column("energy_joules", Float),
    Column("energy_source", String),
    Column("attempts", Integer, nullable=False),
    Column("prompt_characters", Integer, nullable=False),
    Column("prompt", Text),
    Column("document", LargeBinary, nullable=False),
)
Index("requests_by_time", REQUESTS.c.finished_time)
