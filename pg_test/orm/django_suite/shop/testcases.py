from django.test import TransactionTestCase

from .unfenced import unfenced


class FencedTransactionTestCase(TransactionTestCase):
    """Its flush at the end of each test, a TRUNCATE, takes the tables that are fenced along."""

    def _fixture_teardown(self):
        with unfenced():
            super()._fixture_teardown()
