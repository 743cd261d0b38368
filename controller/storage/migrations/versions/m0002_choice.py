"""Keep the policy that an operator has chosen."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "choices",
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("document", sa.Text, nullable=False),
        sa.Column("saved_time", sa.Float, nullable=False),
    )


def downgrade() -> None:
    """Drop the table; used by nobody but Alembic's own checks."""
    op.drop_table("choices")
