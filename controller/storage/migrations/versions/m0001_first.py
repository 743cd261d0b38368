"""The first schema: nodes, calibrations and finished requests."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "nodes",
        sa.Column("node_id", sa.String, primary_key=True),
        sa.Column("hello", sa.Text, nullable=False),
        sa.Column("is_draining", sa.Integer, nullable=False),
        sa.Column("completed_requests", sa.Integer, nullable=False),
        sa.Column("failed_requests", sa.Integer, nullable=False),
        sa.Column("cancelled_requests", sa.Integer, nullable=False),
        sa.Column("instance_id", sa.String, nullable=False),
        sa.Column("acked_sequence", sa.Integer, nullable=False),
        sa.Column("saved_time", sa.Float, nullable=False),
    )
    op.create_table(
        "calibrations",
        sa.Column("hardware", sa.String, primary_key=True),
        sa.Column("digest", sa.String, primary_key=True),
        sa.Column("engine_version", sa.String, primary_key=True),
        sa.Column("power_mode", sa.String, primary_key=True),
        sa.Column("document", sa.Text, nullable=False),
        sa.Column("saved_time", sa.Float, nullable=False),
    )
    texts = ("batch_id", "node_id", "model", "policy", "finish_reason")
    counts = ("prompt_tokens", "completion_tokens", "cached_prompt_tokens")
    figures = (
        "queue_seconds",
        "prefill_seconds",
        "decode_seconds",
        "window_seconds",
        "first_token_seconds",
        "total_seconds",
        "predicted_finish_seconds",
        "measured_finish_seconds",
        "quality_ratio",
        "cost_usd",
        "energy_joules",
    )
    op.create_table(
        "requests",
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("request_id", sa.String, nullable=False, unique=True),
        sa.Column("finished_time", sa.Float, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        *(sa.Column(name, sa.String) for name in texts),
        *(sa.Column(name, sa.Integer) for name in counts),
        *(sa.Column(name, sa.Float) for name in figures),
        sa.Column("energy_source", sa.String),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("prompt_characters", sa.Integer, nullable=False),
        sa.Column("prompt", sa.Text),
        sa.Column("document", sa.LargeBinary, nullable=False),
    )
    op.create_index("requests_by_time", "requests", ["finished_time"])


def downgrade() -> None:
    """Drop the tables; used by nobody but Alembic's own checks."""
    for name in ("requests", "calibrations", "nodes"):
        op.drop_table(name)
