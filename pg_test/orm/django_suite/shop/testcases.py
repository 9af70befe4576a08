from django.db import connection
from django.test import TransactionTestCase

from pg_fence.testing import unfenced


class FencedTransactionTestCase(TransactionTestCase):
    """Its flush at the end of each test, a TRUNCATE, takes the tables that are fenced along."""

    def _fixture_teardown(self):
        with unfenced(connection):
            super()._fixture_teardown()
