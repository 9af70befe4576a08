import sqlalchemy as sa
from alembic import op

revision, down_revision = "first", None


def upgrade():
    op.create_table("shop_customer", sa.Column("id", sa.BigInteger, primary_key=True))
