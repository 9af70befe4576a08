from datetime import timedelta
from io import StringIO

import psycopg
from django.core.management import CommandError, call_command
from django.db import connection, models, transaction
from django.test import TestCase

import pg_fence
from shop.models import Customer, Order
from shop.testcases import FencedTransactionTestCase
from shop.unfenced import unfenced


def fence():
    """Of the database that the tests run in."""
    return pg_fence.Fence(lambda: psycopg.connect(**connection.get_connection_params()))


def sqlstate(error):
    """That of the driver's error, however deep Django has wrapped it."""
    while error is not None and not getattr(error, "sqlstate", None):
        error = error.__cause__
    return error and error.sqlstate


class InATransaction(TestCase):
    """Each test is rolled back."""

    @classmethod
    def setUpTestData(cls):
        with unfenced():
            call_command("loaddata", "orders", verbosity=0)

    def test_a_worker_pays(self):
        order = Order.objects.get(id=7)
        with fence().lease("order:7", ttl=timedelta(minutes=5)) as lease, lease.guard(connection):
            order.status = "paid"
            order.save()
        self.assertEqual(Order.objects.get(id=7).status, "paid")

    def test_a_guard_lasts_until_the_end_of_the_test(self):
        with fence().lease("order:7", ttl=timedelta(minutes=5)) as lease, lease.guard(connection):
            Order.objects.filter(id=7).update(status="paid")
        self.assertEqual(Order.objects.filter(id=7).update(status="without a guard"), 1)
        with self.assertRaises(pg_fence.LeaseTaken), fence().lease("order:7"):
            self.fail("it is held")

    def test_the_fence_is_on_again(self):
        with self.assertRaises(Exception) as raised, transaction.atomic():
            Order.objects.update(status="late")
        self.assertEqual(sqlstate(raised.exception), "PF002")

    def test_a_block_that_fails_leaves_the_fence_on(self):
        with self.assertRaises(ZeroDivisionError), unfenced():
            Order.objects.update(status="undone")
            1 / 0
        self.assertEqual(Order.objects.get(id=7).status, "loaded")
        self.test_the_fence_is_on_again()

    def test_migrations_know_nothing_of_the_column_and_leave_it(self):
        told = StringIO()
        call_command("makemigrations", check_changes=True, dry_run=True, stdout=told)
        self.assertIn("No changes", told.getvalue())


class OtherConnections(TestCase):
    def test_a_copy_is_not_what_django_begins_transactions_on(self):
        with fence().lease("order:7", ttl=timedelta(minutes=5)) as lease:
            copy = connection.copy()
            self.addCleanup(copy.close)
            with self.assertRaises(TypeError), lease.guard(copy):
                self.fail("the guard would be in another transaction than the writes")


class Committed(FencedTransactionTestCase):
    def test_fixtures_are_refused_by_the_fence(self):
        with self.assertRaises(Exception) as raised:
            call_command("loaddata", "orders", verbosity=0)
        self.assertEqual(sqlstate(raised.exception), "PF002")

    def test_flush_is_refused_by_the_fence(self):
        with unfenced():
            call_command("loaddata", "orders", verbosity=0)
        with self.assertRaises(CommandError) as raised:
            call_command("flush", interactive=False, verbosity=0)
        self.assertEqual(sqlstate(raised.exception), "PF005")
        self.assertEqual(Order.objects.count(), 1)
        with unfenced():
            call_command("flush", interactive=False, verbosity=0)
        self.assertEqual(Customer.objects.count(), 0)

    def test_the_test_before_has_left_nothing(self):
        self.assertEqual(Order.objects.count(), 0)

    def test_a_version_beside_the_fence_tells_of_other_saves_under_the_same_lease(self):
        with unfenced():
            call_command("loaddata", "orders", verbosity=0)

        def saves(version):
            of_version = Order.objects.filter(id=7, version=version)
            return of_version.update(status="paid", version=models.F("version") + 1)

        with fence().lease("order:7", ttl=timedelta(minutes=5)) as lease:
            with lease.guard(connection):
                self.assertEqual(saves(1), 1)
            with lease.guard(connection):
                self.assertEqual(saves(1), 0)
        with self.assertRaises(Exception) as raised:
            saves(2)
        self.assertEqual(sqlstate(raised.exception), "PF002")

    def test_nobody_else_writes_meanwhile(self):
        with unfenced():
            call_command("loaddata", "orders", verbosity=0)
        with fence().lease("order:7", ttl=timedelta(minutes=5)) as lease:
            with psycopg.connect(**connection.get_connection_params()) as other, unfenced():
                with self.assertRaises(psycopg.errors.LockNotAvailable), lease.guard(other):
                    other.execute("SET LOCAL lock_timeout = '100ms'")
                    other.execute("UPDATE orders SET status = 'meanwhile'")
