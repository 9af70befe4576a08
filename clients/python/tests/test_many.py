"""What is asked of leases beside `test_pg_fence`: many of one fence, verbs, and what is refused by name."""

import asyncio
import os
import socket
import threading
import time
import unittest
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import asyncpg
import psycopg
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from test_pg_fence import ALCHEMY, LONG, URL, OnOrders, Order, django_connection

import pg_fence
from pg_fence.connection import OwnConnection
from pg_fence.keeper import Batch, Keeper

SHORT = timedelta(seconds=2)

#: Where spans and counters go: a process can set that once.
SPANS = InMemorySpanExporter()
COUNTERS = InMemoryMetricReader()
tracers = TracerProvider()
tracers.add_span_processor(SimpleSpanProcessor(SPANS))
trace.set_tracer_provider(tracers)
metrics.set_meter_provider(MeterProvider([COUNTERS]))


class Patient(OnOrders):
    def sessions(self, name: str) -> int:
        return int(self.value("SELECT count(*) FROM pg_stat_activity WHERE application_name = %s", name))

    def terminate(self, name: str) -> None:
        sql = "SELECT count(pg_terminate_backend(pid, 10000)) FROM pg_stat_activity WHERE application_name = %s"
        self.assertGreater(self.value(sql, name), 0)

    def fence_of(self, name: str) -> pg_fence.Fence:
        return pg_fence.Fence(f"{URL}&application_name={name}")


class Many(Patient):
    def test_one_connection_and_two_threads_for_all(self) -> None:
        fence = self.fence_of("many")
        leases = [fence.lease(f"many:{number}", ttl=SHORT) for number in range(30)]
        self.assertTrue(all(lease.acquire() for lease in leases))
        self.assertEqual(threading.active_count(), self.threads + 2)
        self.assertEqual(self.sessions("many"), 1)
        time.sleep(SHORT.total_seconds() * 1.5)
        self.assertTrue(all(lease.held for lease in leases))
        for lease in leases:
            lease.release()
        self.comes_true(lambda: self.sessions("many") == 0)

    def test_what_is_told_of_a_loss_may_take_its_time(self) -> None:
        is_told, may_go_on = threading.Event(), threading.Event()

        def on_lost(_: pg_fence.LeaseLost) -> None:
            is_told.set()
            may_go_on.wait(60)

        with self.fence.lease("other", ttl=SHORT) as other:
            lost = self.fence.lease("order:7", ttl=SHORT, on_lost=on_lost)
            self.assertTrue(lost.acquire())
            self.value("SELECT lease_revoke('order:7')")
            self.assertTrue(is_told.wait(60))
            time.sleep(SHORT.total_seconds() * 1.5)
            self.assertTrue(other.held)
            may_go_on.set()
            lost.release()

    def test_a_try_on_a_connection_that_has_ended_unseen(self) -> None:
        fence = self.fence_of("ended")
        with fence.lease("other", ttl=LONG):
            self.terminate("ended")
            with fence.lease("order:7", ttl=LONG) as lease:
                self.assertTrue(lease.held)
            self.terminate("ended")
            with self.assertRaises(psycopg.OperationalError):
                fence.lease("order:7", ttl=LONG, holder="mine").acquire()
            self.terminate("ended") if self.sessions("ended") else None

    def test_a_renewal_that_is_asked_for_during_another_is_not_forgotten(self) -> None:
        answered, may_go_on = threading.Event(), threading.Event()

        class Slow(Keeper):
            def _ask(self, own: OwnConnection, batch: Batch) -> dict[int | None, int | None]:
                answers = super()._ask(own, batch)
                answered.set()
                may_go_on.wait(60)
                return answers

        class SlowFence(pg_fence.Fence):
            def _make_keeper(self) -> Keeper:
                return Slow(self._open, self._prefix)

        lease = SlowFence(URL).lease("order:7", ttl=LONG)
        self.assertTrue(lease.acquire())
        lease.beat_soon()
        self.assertTrue(answered.wait(60))
        self.value("SELECT lease_revoke('order:7')")
        lease.beat_soon()
        may_go_on.set()
        self.comes_true(lambda: lease.loss is not None)
        lease.release()

    def test_a_release_waits_for_nobody_s_transaction_at_others_cost(self) -> None:
        with self.fence.lease("other", ttl=SHORT) as other, self.fence.lease("order:7", ttl=LONG) as lease:
            locker = self.connect()
            locker.execute("SELECT lease_renew('order:7', %s)", [lease.token])
            releases = threading.Thread(target=lease.release)
            releases.start()
            time.sleep(SHORT.total_seconds() * 1.5)
            self.assertTrue(other.held)
            locker.rollback()
            releases.join()
            self.assertFalse(self.is_held("order:7"))

    def test_many_that_are_locked_hold_up_no_other(self) -> None:
        ttl = timedelta(seconds=4)
        leases = [self.fence.lease(f"many:{number:03}", ttl=ttl) for number in range(400)]
        self.assertTrue(all(lease.acquire() for lease in leases))
        locker = self.connect()
        for lease in leases[::20]:
            locker.execute("SELECT lease_renew(%s, %s)", [lease.names[0], lease.token])
        time.sleep(ttl.total_seconds() * 1.5)
        self.assertEqual([lease for lease in leases if not lease.held], leases[::20])
        locker.rollback()
        for lease in leases:
            lease.release()

    def test_a_forgotten_lease_is_told_and_released(self) -> None:
        lease = self.fence.lease("order:7", ttl=LONG)
        self.assertTrue(lease.acquire())
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            del lease
        self.assertEqual([one.category for one in told], [ResourceWarning])
        self.comes_true(lambda: not self.is_held("order:7") and threading.active_count() == self.threads)

    @unittest.skipUnless(hasattr(os, "fork"), "there is no fork")
    def test_after_a_fork_the_leases_are_the_parent_s(self) -> None:
        with self.fence.lease("order:7", ttl=SHORT) as lease, self.fence.lease("other", session=True) as other:
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    with self.assertRaises(pg_fence.LeaseLost):
                        lease.check()
                    self.assertFalse(lease.held or other.held)
                    with self.fence.lease("order:8", ttl=SHORT) as own:
                        time.sleep(SHORT.total_seconds() * 1.5)
                        own.check()
                    lease.release()
                    status = 0
                finally:
                    os._exit(status)
            self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
            lease.check()
            other.check()
            lease.renew()
            self.assertTrue(self.is_held("order:7") and self.is_held("other"))


class RefusedByName(Patient):
    def test_several_names_are_taken_in_both_forms(self) -> None:
        with self.fence.lease(["order:7", "order:8"], ttl=LONG) as lease:
            self.assertEqual(lease.names, ("order:7", "order:8"))
            self.assertFalse(self.fence.lease("order:8").acquire())
        with self.fence.lease(("order:7",), ttl=LONG):
            self.assertFalse(self.fence.lease("order:7").acquire())
        for bad in [(7,), (b"order:7",), (["order:7", None],), ({"order:7"},)]:
            with self.assertRaises(TypeError):
                self.fence.lease(*bad)  # type: ignore[arg-type]
        with self.assertRaises(ValueError):
            self.fence.lease([])

    def test_a_ttl_that_leaves_no_time(self) -> None:
        for ttl in (timedelta(0), timedelta(seconds=-1), timedelta(milliseconds=99)):
            for call in (lambda: self.fence.lease("order:7", ttl=ttl), lambda: self.fence.claim("SELECT 'a'", ttl=ttl)):
                with self.assertRaisesRegex(ValueError, "ttl"):
                    call()

    def test_what_is_no_way_to_connect(self) -> None:
        engine = self.engine()
        for bad in (engine, self.admin, None):
            with self.assertRaisesRegex(TypeError, "a connection string, or a function that opens a psycopg.Connection"):
                pg_fence.Fence(bad)  # type: ignore[arg-type]
        with self.assertRaisesRegex(TypeError, "this one returns a builtins.str"):
            pg_fence.Fence(lambda: "dbname=shop").lease("order:7").acquire()  # type: ignore[arg-type,return-value]

    def test_what_is_no_connection(self) -> None:
        engine = self.engine()
        with self.fence.lease("order:7", ttl=LONG) as lease:
            for bad in (engine, sessionmaker(engine), create_async_engine(ALCHEMY), "dbname=shop", self.fence):
                with self.assertRaisesRegex(TypeError, "a connection of psycopg 3, asyncpg or Django"):
                    lease.guard(bad)
                with self.assertRaises(TypeError), pg_fence.attach("dbname=shop", lease):
                    pass

    def test_an_extension_that_is_not_there(self) -> None:
        for fence in (pg_fence.Fence(URL, schema="nowhere"), pg_fence.Fence(f"{URL}&options=-csearch_path%3Dpg_catalog")):
            for call in (fence.lease("order:7").acquire, lambda: fence.adopt("order:9", 33), lambda: fence.claim("SELECT 'a'")):
                with self.assertRaisesRegex(pg_fence.NotInstalled, "schema="):
                    call()

    def test_an_acquire_that_is_broken_off(self) -> None:
        class Cursor(psycopg.Cursor[Any]):
            def execute(self, query: Any, *arguments: Any, **options: Any) -> Any:
                if "lease_acquire" in query:
                    return super().execute("SELECT pg_sleep(600)")
                return super().execute(query, *arguments, **options)

        for wait in (timedelta(0), timedelta(milliseconds=100)):
            fence = pg_fence.Fence(lambda: psycopg.connect(URL, cursor_factory=Cursor))
            with self.assertRaises(pg_fence.AcquireTimeout) as raised:
                fence.lease("order:7", ttl=timedelta(seconds=1), wait=wait).acquire()
            self.assertIsInstance(raised.exception, TimeoutError)
            self.assertIsInstance(raised.exception.__cause__, psycopg.Error)
        self.value("SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE query ~ '^SELECT pg_sleep.600'")

    def test_a_server_that_accepts_and_says_nothing(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            fence = pg_fence.Fence(f"host=127.0.0.1 port={server.getsockname()[1]} dbname=shop user=nobody")
            with self.assertRaises(pg_fence.AcquireTimeout):
                fence.lease("order:7", ttl=SHORT).acquire()

    def test_stop_ends_a_leader_that_works(self) -> None:
        stop, begun = threading.Event(), threading.Event()
        ends: list[str] = []

        def work(lease: pg_fence.Lease) -> None:
            begun.set()
            try:
                lease.wait(LONG)
            except pg_fence.LeaseLost as loss:
                ends.append(loss.reason)
                raise

        leads = threading.Thread(target=lambda: self.fence.lead("order:7", work, ttl=LONG, stop=stop))
        leads.start()
        self.assertTrue(begun.wait(60))
        stop.set()
        leads.join(60)
        self.assertEqual(ends, ["released"])
        self.assertFalse(leads.is_alive() or self.is_held("order:7"))

    def test_stop_lets_an_open_transaction_end(self) -> None:
        stop = threading.Event()
        connection = self.connect(autocommit=True)

        def work(lease: pg_fence.Lease) -> None:
            with lease.guard(connection):
                stop.set()
                time.sleep(1)
                self.assertTrue(self.is_held("order:7"))
                connection.execute("UPDATE orders SET status = 'paid'")
            lease.check()

        self.assertIsNone(self.fence.lead("order:7", work, ttl=LONG, stop=stop))
        self.assertEqual(self.status(), "paid")


class SwallowedErrors(Patient):
    """The work goes on after an error, or ends the transaction itself: nothing of it may seem to have landed."""

    def test_psycopg(self) -> None:
        for autocommit in (True, False):
            connection = self.connect(autocommit=autocommit)
            for how in ("guard", "present"):
                for statement in ("SELECT 1/0", "ROLLBACK"):
                    for release in (False, True):
                        with self.fence.lease("order:7", ttl=LONG) as lease:
                            with self.assertRaises(pg_fence.TransactionLost) as raised:
                                with getattr(lease, how)(connection, release=release):
                                    connection.execute("UPDATE orders SET status = 'lost'")
                                    self.swallow(lambda: connection.execute(statement))
                            self.assertEqual(raised.exception.in_doubt, statement == "ROLLBACK")
                            self.assertTrue(lease.held)
        self.assertEqual(self.status(), "new")

    def test_sqlalchemy(self) -> None:
        engine = self.engine()
        with self.fence.lease("order:7", ttl=LONG) as lease:
            for statement in ("SELECT 1/0", "ROLLBACK"):
                with self.assertRaises(pg_fence.TransactionLost), engine.connect() as connection:
                    with lease.guard(connection):
                        connection.execute(text("UPDATE orders SET status = 'lost'"))
                        self.swallow(lambda: connection.exec_driver_sql(statement))
            for end in (lambda session: session.execute(text("SELECT 1/0")), lambda session: session.rollback()):
                for queries in (False, True):
                    with self.assertRaises(pg_fence.TransactionLost), Session(engine) as session:
                        if queries:
                            session.get_one(Order, 7)
                        with lease.guard(session):
                            session.execute(text("UPDATE orders SET status = 'lost'"))
                            self.swallow(lambda: end(session))
        self.assertEqual(self.status(), "new")

    def test_django(self) -> None:
        self.addCleanup(django_connection.close)
        with self.fence.lease("order:7", ttl=LONG) as lease:
            for statement in ("SELECT 1/0", "ROLLBACK"):
                with self.assertRaises(pg_fence.TransactionLost), lease.guard(django_connection):
                    with django_connection.cursor() as cursor:
                        cursor.execute("UPDATE orders SET status = 'lost'")
                        self.swallow(lambda: cursor.execute(statement))
        self.assertEqual(self.status(), "new")

    def swallow(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception:
            pass


class Verbs(Patient):
    def test_claim(self) -> None:
        query = "SELECT 'job:' || n, n, repeat('x', n) FROM generate_series(1, %s) AS n ORDER BY n DESC"
        with self.fence.lease("job:4", ttl=LONG):
            with self.fence.claim(query, [5], n=2, ttl=SHORT, metadata={"run": 7}) as claimed:
                self.assertEqual([lease.row for lease in claimed], [("job:5", 5, "xxxxx"), ("job:3", 3, "xxx")])
                self.assertEqual(self.value("SELECT metadata->>'run' FROM lease_info('job:3')"), "7")
                others = self.fence.claim(query, [5], n=9, ttl=LONG)
                self.assertEqual([lease.names for lease in others], [("job:2",), ("job:1",)])
                others.release()
                time.sleep(SHORT.total_seconds() * 1.5)
                self.assertTrue(all(lease.held for lease in claimed))
            self.assertEqual(self.fence.claim("SELECT 'job:4'", n=3), [])
        self.assertEqual(self.value("SELECT count(*) FROM fence.leases WHERE state = 'held'"), 0)

    def test_a_claim_locks_no_row_beyond_those_it_takes(self) -> None:
        with self.fence.claim("SELECT 'untried:' || n FROM generate_series(1, 1000) AS n", n=3, ttl=LONG):
            self.assertEqual(self.value("SELECT count(*) FROM lease_info('untried:4')"), 0)

    def test_a_token_is_handed_over_after_many_renewals(self) -> None:
        connection = self.connect(autocommit=True)
        first = self.fence.lease("order:7", ttl=LONG)
        self.assertTrue(first.acquire())
        token, latest = first.token, [first.renew() for _ in range(20)][-1]
        self.assertEqual(first.detach(), token)
        self.assertEqual(threading.active_count(), self.threads)
        with self.assertRaises(pg_fence.LeaseLost), first.guard(connection):
            self.fail("it is another's")
        first.release()
        assert token is not None and latest is not None
        for handed_over in (token, latest):
            second = self.fence.resume("order:7", handed_over, ttl=SHORT)
            self.assertTrue(second.acquire())
            # It serves for as long as the grant lives, whatever was handed over.
            self.assertEqual(second.token, token)
            time.sleep(SHORT.total_seconds() * 1.5)
            with second.guard(connection):
                connection.execute("UPDATE orders SET status = status || '!'")
            self.assertEqual(second.detach(), token)
        with self.fence.resume("order:7", token):
            pass
        with self.assertRaises(pg_fence.LeaseLost) as raised, self.fence.resume("order:7", token):
            self.fail("it is over")
        self.assertEqual((raised.exception.reason, self.status()), ("gone", "new!!"))

    def test_a_guard_by_several_leases(self) -> None:
        connection = self.connect(autocommit=True)
        with self.fence.lease("other") as other, self.fence.lease("order:7", "order:8") as orders:
            with self.fence.guard(connection, [other, orders]):
                connection.execute("UPDATE orders SET status = 'paid'")
                for name, lease in (("other", other), ("order:7", orders), ("order:8", orders)):
                    guards = "SELECT cardinality(blocking_pids) FROM lease_info(%s)"
                    self.assertEqual(self.value(guards, name), 1, lease.names)
            with self.fence.guard(connection, [orders, other], release=True):
                connection.execute("UPDATE orders SET status = 'sent'")
            self.assertFalse(any(map(self.is_held, ("other", "order:7", "order:8"))))
        self.assertEqual(self.status(), "sent")
        with self.assertRaises(TypeError):
            self.fence.guard(connection, [])

    def test_held_at_least(self) -> None:
        with self.fence.lease("order:8", "order:7", ttl=SHORT, hold_at_least=timedelta(seconds=4)) as lease:
            pass
        self.assertIsNone(lease.loss)
        self.assertTrue(self.is_held("order:7") and self.is_held("order:8"))
        self.comes_true(lambda: not self.is_held("order:7"))
        with self.fence.lease("order:7", ttl=SHORT, hold_at_least=timedelta(seconds=3)) as lease:
            with lease.guard(self.connect(autocommit=True), release=True) as connection:
                connection.execute("UPDATE orders SET status = 'paid'")
            self.assertTrue(self.is_held("order:7"))
        self.comes_true(lambda: not self.is_held("order:7"))
        self.assertEqual(self.status(), "paid")

    def test_observe(self) -> None:
        told: list[pg_fence.Leader] = []
        with self.fence.observe("order:7", told.append):
            self.comes_true(lambda: len(told) == 1)
            with self.fence.lease("order:7", holder="A", ttl=SHORT) as lease:
                self.comes_true(lambda: len(told) == 2)
                time.sleep(SHORT.total_seconds())
            self.comes_true(lambda: len(told) == 3)
        self.assertEqual([(one.holder, one.token) for one in told], [(None, None), ("A", lease.token), (None, None)])
        self.assertIsNotNone(told[1].since)

    def test_a_leader_hears_of_itself(self) -> None:
        told: list[Any] = []

        def work(lease: pg_fence.Lease) -> None:
            self.comes_true(lambda: lease.token in told)

        self.fence.lead("order:7", work, ttl=SHORT, on_leader=lambda leader: told.append(leader.token))

    def test_a_connection_that_presents_by_its_options(self) -> None:
        with self.fence.lease("order:7", ttl=LONG) as lease:
            connection = self.connect(autocommit=True, options=pg_fence.options(lease))
            connection.execute("UPDATE orders SET status = 'paid'")
            self.assertEqual(pg_fence.options(34), "-c pg_fence.token=34")
        with self.refused_as(pg_fence.NotSpeaking):
            connection.execute("UPDATE orders SET status = 'late'")
        with self.assertRaises(pg_fence.LeaseLost):
            pg_fence.options(lease)
        self.assertEqual(self.status(), "paid")

    def test_an_engine_that_presents(self) -> None:
        engine = self.engine()

        def pay(status: str) -> None:
            with Session(engine) as session, session.begin():
                session.get_one(Order, 7).status = status

        with self.fence.lease("order:7", ttl=LONG) as lease:
            with pg_fence.attach(engine, lease):
                pay("paid")
                pay("sent")
            with self.refused_as(pg_fence.NoToken):
                pay("unfenced")
        with self.assertRaises(pg_fence.LeaseLost), pg_fence.attach(engine, lease):
            pay("late")
        self.assertEqual(self.status(), "sent")

    def test_a_django_connection_that_presents(self) -> None:
        self.addCleanup(django_connection.close)

        def pay(status: str) -> None:
            with django_connection.cursor() as cursor:
                cursor.execute("UPDATE orders SET status = %s", [status])

        with self.fence.lease("order:7", ttl=LONG) as lease:
            with pg_fence.attach(django_connection, lease):
                pay("paid")
                django_connection.close()
                pay("sent")
            with self.refused_as(pg_fence.NoToken):
                pay("unfenced")
        with self.assertRaises(pg_fence.LeaseLost), pg_fence.attach(django_connection, lease):
            pay("late")
        self.assertEqual(self.status(), "sent")

    def test_spans_and_counters(self) -> None:
        SPANS.clear()
        refused_before = self.counted("pg_fence.writes.refused", "sqlstate", "PF005")
        connection = self.connect(autocommit=True)
        with self.assertRaises(pg_fence.LeaseLost), self.fence.lease("order:7", ttl=LONG) as lease:
            with lease.guard(connection):
                connection.execute("UPDATE orders SET status = 'paid'")
            with self.assertRaises(pg_fence.CannotBeFenced), lease.guard(connection):
                connection.execute("TRUNCATE orders")
            self.value("SELECT lease_revoke('order:7')")
            lease.renew()
        spans = SPANS.get_finished_spans()
        self.assertEqual([span.name for span in spans], ["pg_fence acquire", "pg_fence guard", "pg_fence guard"])
        self.assertEqual([span.status.is_ok for span in spans], [True, True, False])
        refused = self.counted("pg_fence.writes.refused", "sqlstate", "PF005")
        self.assertEqual(refused, refused_before + 1)
        self.assertGreater(self.counted("pg_fence.leases.lost", "reason", "gone"), 0)

    def counted(self, name: str, key: str, value: str) -> int:
        data: Any = COUNTERS.get_metrics_data()
        points = [
            point
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]
        return sum(point.value for point in points if point.attributes[key] == value)


class OnAsyncpg(Patient, unittest.IsolatedAsyncioTestCase):
    async def connected(self) -> Any:
        connection = await asyncpg.connect(URL.replace("user=postgres", "user=postgres&client_connection_check_interval=200"))
        self.addAsyncCleanup(connection.close)
        return connection

    async def test_transactions(self) -> None:
        connection = await self.connected()
        async with self.fence.lease("order:7", ttl=LONG) as lease:
            async with lease.guard(connection):
                await connection.execute("UPDATE orders SET status = 'guarded'")
                self.assertEqual(self.value("SELECT cardinality(blocking_pids) FROM lease_info('order:7')"), 1)
            self.assertEqual(self.status(), "guarded")
            with self.assertRaises(ZeroDivisionError):
                async with lease.present(connection):
                    await connection.execute("UPDATE orders SET status = 'undone'")
                    1 / 0
            async with connection.transaction():
                async with lease.present(connection):
                    await connection.execute("UPDATE orders SET status = 'presented'")
                self.assertEqual(self.status(), "guarded", "it is another's to end")
            self.assertEqual(self.status(), "presented")
            with self.assertRaises(pg_fence.CannotBeFenced) as raised:
                async with lease.guard(connection):
                    await connection.execute("TRUNCATE orders")
            self.assertTrue(raised.exception.hint)
            with self.assertRaises(pg_fence.NotSpeaking):
                async with self.fence.lease("other") as other, other.present(connection):
                    await connection.execute("UPDATE orders SET status = 'late'")
            async with lease.guard(connection, release=True):
                await connection.execute("UPDATE orders SET status = 'last'")
            self.assertFalse(self.is_held("order:7"))
        self.assertEqual(self.status(), "last")

    async def test_what_asyncpg_sends_for_arguments(self) -> None:
        """As the table of drivers on the clients' common page has it."""
        connection = await self.connected()
        acquire = "SELECT lease_acquire('order:7', ttl => $1, metadata => $2)"
        with self.assertRaises(asyncpg.DataError):
            await connection.fetchval("SELECT set_config('pg_fence.token', $1, true)", 34)
        with self.assertRaises(asyncpg.DataError):
            await connection.fetchval(acquire, LONG, {"run": 7})
        token = await connection.fetchval(acquire, LONG, '{"run": 7}')
        self.assertIsNotNone(await connection.fetchval("SELECT lease_release('order:7', $1)", token))

    async def test_a_pool_s_connection(self) -> None:
        async with asyncpg.create_pool(URL, min_size=1) as pool, self.fence.lease("order:7", ttl=LONG) as lease:
            async with pool.acquire() as connection, lease.guard(connection):
                await connection.execute("UPDATE orders SET status = 'paid'")
            with self.assertRaises(TypeError):
                lease.guard(pool)
        self.assertEqual(self.status(), "paid")

    async def test_swallowed_errors(self) -> None:
        connection = await self.connected()
        async with self.fence.lease("order:7", ttl=LONG) as lease:
            for statement in ("SELECT 1/0", "ROLLBACK"):
                with self.assertRaises(pg_fence.TransactionLost):
                    async with lease.guard(connection):
                        await connection.execute("UPDATE orders SET status = 'lost'")
                        try:
                            await connection.execute(statement)
                        except asyncpg.PostgresError:
                            pass
        self.assertEqual(self.status(), "new")

    async def test_a_loss_ends_a_statement_that_hangs(self) -> None:
        connection = await self.connected()
        with self.assertRaises(pg_fence.LeaseLost):
            async with self.fence.lease("order:7", ttl=SHORT) as lease, lease.guard(connection):
                self.value("SELECT lease_revoke('order:7')")
                await connection.execute("SELECT pg_sleep(60)")
        guards = "SELECT coalesce(max(cardinality(blocking_pids)), 0) FROM lease_info('order:7')"
        await self.acomes_true(lambda: self.value(guards) == 0)

    async def test_sqlalchemy_on_asyncpg(self) -> None:
        engine = create_async_engine(URL.replace("postgresql://", "postgresql+asyncpg://"))
        async with self.fence.lease("order:7", ttl=LONG) as lease:
            async with engine.connect() as connection, lease.guard(connection):
                await connection.execute(text("UPDATE orders SET status = 'connection'"))
            with self.assertRaises(pg_fence.TransactionLost):
                async with engine.connect() as connection, lease.guard(connection):
                    await connection.execute(text("UPDATE orders SET status = 'lost'"))
                    try:
                        await connection.execute(text("SELECT 1/0"))
                    except Exception:
                        pass
            async with self.fence.lease("order:8") as other:
                async with engine.connect() as connection, self.fence.guard(connection, [lease, other]):
                    await connection.execute(text("UPDATE orders SET status = status || ' twice'"))
            with pg_fence.attach(engine, lease):
                async with engine.begin() as connection:
                    await connection.execute(text("UPDATE orders SET status = status || ' and attached'"))
        await engine.dispose()
        self.assertEqual(self.status(), "connection twice and attached")

    async def test_claims(self) -> None:
        async with await self.fence.aclaim("SELECT 'order:' || n FROM generate_series(7, 8) AS n", n=2) as claimed:
            self.assertEqual(len(claimed), 2)
        self.assertFalse(self.is_held("order:7"))

    async def test_leading_tells_who_leads(self) -> None:
        told: list[Any] = []

        async def work(lease: pg_fence.Lease) -> None:
            while lease.token not in told:
                await asyncio.sleep(0.05)

        await self.fence.alead("order:7", work, ttl=SHORT, on_leader=lambda leader: told.append(leader.token))


if __name__ == "__main__":
    unittest.main()
