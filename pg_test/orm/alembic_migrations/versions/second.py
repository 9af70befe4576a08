import os

import sqlalchemy as sa
from alembic import op
from standstill import stand_still

revision, down_revision = "second", "first"


def upgrade():
    stand_still()
    op.add_column("shop_customer", sa.Column(os.environ.get("COLUMN", "name"), sa.Text))
