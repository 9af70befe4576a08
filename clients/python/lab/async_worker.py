"""The laboratory's worker in Python with asyncio: as `worker.py`, where a lease is a block that is cancelled when the
lease is lost."""

import asyncio
import contextlib
import json
import sys
import threading
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any

import psycopg
from worker import Observed, Orders, RenewInWork, claim_of, plant, refused, say

import pg_fence

#: Orders that are not for the block of a lease.
OUTSIDE = {
    *("connect", "acquire", "adopt", "census", "close", "lead", "release", "unfenced", "resume", "detach", "hold"),
    *("claim", "holding", "release-all", "observe"),
}


class Ended(Exception):
    """The block of the lease ends in good order."""


class AsyncWorker(Orders):
    def __init__(self) -> None:
        super().__init__()
        self.orders: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.answered = asyncio.Event()
        #: Whether what it does now has not been answered yet.
        self.owes_answer = False
        self.block: asyncio.Task[None] | None = None
        #: Nobody is in the block of a lease.
        self.outside = asyncio.Event()
        self.outside.set()
        #: What the block is to do.
        self.inner: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()

        def read() -> None:
            for line in sys.stdin:
                loop.call_soon_threadsafe(self.orders.put_nowait, json.loads(line))
            loop.call_soon_threadsafe(self.orders.put_nowait, None)

        threading.Thread(target=read, daemon=True).start()
        while (order := await self.orders.get()) is not None:
            await self.do(order)

    async def do(self, order: dict[str, Any]) -> None:
        if order["do"] == "guard-all" and self.outside.is_set():
            # It reads what is to be done, as the block of a lease does.
            self.block = asyncio.create_task(self.without_a_lease())
            await asyncio.sleep(0)
        if order["do"] in OUTSIDE:
            await self.answer(order)
        elif not self.outside.is_set():
            # The block does it, unless it ends before it comes to that.
            self.answered.clear()
            self.inner.put_nowait(order)
            either = [asyncio.create_task(event.wait()) for event in (self.answered, self.outside)]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            for waiting in either:
                waiting.cancel()
            if not self.inner.empty():
                await self.answer(self.inner.get_nowait())
        else:
            await self.answer(order)

    async def answer(self, order: dict[str, Any]) -> None:
        self.owes_answer = True
        try:
            waited_for = self.follow(**order)
            if waited_for is not None:
                await waited_for
        except asyncio.CancelledError as error:
            # Between two orders of a transaction there is nothing to refuse.
            if self.owes_answer:
                loss = self.lease.loss if self.lease is not None else None
                refused(loss or error)
            raise
        except Ended:
            raise
        except Exception as error:  # noqa: BLE001
            if self.owes_answer:
                refused(error)
        finally:
            self.answered.set()

    async def in_block(self) -> None:
        self.outside.clear()
        try:
            while True:
                await self.answer(await self.inner.get())
        finally:
            self.outside.set()

    async def take(self, lease: pg_fence.Lease) -> None:
        await self.end_block()
        assert isinstance(lease, Observed)
        self.lease = None
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.block = asyncio.create_task(self.in_lease(lease, answer))
        await answer

    async def in_lease(self, lease: Observed, answer: asyncio.Future[None]) -> None:
        try:
            async with lease:
                self.lease = lease
                say("acquired", token=lease.token, deadline=lease.deadline())
                answer.set_result(None)
                await self.in_block()
        except pg_fence.LeaseTaken:
            say("taken")
        except Ended:
            pass
        except pg_fence.LeaseLost as loss:
            # One that was to be resumed, and is over.
            if not answer.done():
                refused(loss)
        except Exception as error:  # noqa: BLE001
            refused(error)
        finally:
            if not answer.done():
                answer.set_result(None)

    async def adopt(self, name: str, token: int, wait_ms: int = 0) -> None:
        try:
            adopted = await self.fence.aadopt(name, token, wait=timedelta(milliseconds=wait_ms))
        except pg_fence.LeaseTaken:
            say("taken")
            return
        await self.end_block()
        self.lease = adopted
        say("adopted", token=adopted.token)
        self.block = asyncio.create_task(self.under(adopted))
        # Until it waits for orders.
        await asyncio.sleep(0)

    async def under(self, adopted: pg_fence.Adopted) -> None:
        with contextlib.suppress(Ended, pg_fence.LeaseLost):
            async with adopted:
                await self.in_block()

    async def detach(self) -> None:
        lease = self.held_lease()
        token = await lease.adetach()
        await self.end_block()
        say("detached", token=token)

    async def hold(self, names: list[str], ttl_ms: int) -> None:
        leases = [self.fence.lease(name, ttl=timedelta(milliseconds=ttl_ms)) for name in names]
        for lease in leases:
            self.is_one_of_many(lease)
        if all(await asyncio.gather(*(lease.aacquire() for lease in leases))):
            self.holding()
        else:
            say("taken")

    async def claim(self, names: list[str], n: int, ttl_ms: int) -> None:
        self.has_claimed(await self.fence.aclaim(**claim_of(names, n, ttl_ms)))

    async def release_all(self) -> None:
        await self.let_go()
        say("released")

    async def let_go(self) -> None:
        for lease in self.many:
            await lease.arelease()
        self.many = []

    async def without_a_lease(self) -> None:
        with contextlib.suppress(Ended):
            await self.in_block()

    async def end(self) -> None:
        raise Ended()

    async def end_block(self) -> None:
        if self.block is not None:
            if self.outside.is_set():
                self.block.cancel()
            else:
                self.inner.put_nowait({"do": "end"})
            await asyncio.wait({self.block})
        self.block = None

    async def release(self) -> None:
        lease = self.held()
        lease.refuse_if_over()
        await self.end_block()
        say("released") if lease.loss is None else refused(lease.loss)

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        connection = await psycopg.AsyncConnection.connect(self.conninfo, autocommit=True)
        try:
            yield connection
        finally:
            await connection.close()

    async def transaction(self, begun: str, by: Callable[[Any], pg_fence.Guarded]) -> None:
        loop, step = asyncio.get_running_loop(), "commit"
        async with self.connected() as connection, by(connection):

            async def value(sql: str, arguments: list[Any]) -> Any:
                row = await (await connection.execute(sql.encode(), arguments)).fetchone()
                return row and row[0]

            RenewInWork.work = lambda *call: asyncio.run_coroutine_threadsafe(value(*call), loop).result()
            try:
                say(begun)
                step = await self.steps(connection)
                if step == "rollback":
                    raise psycopg.Rollback()
            finally:
                RenewInWork.work = None
        say("committed" if step == "commit" else "rolled-back")

    async def steps(self, connection: psycopg.AsyncConnection[Any]) -> str:
        while True:
            self.owes_answer = False
            self.answered.set()
            order = await self.inner.get()
            self.owes_answer = True
            if order["do"] in ("commit", "rollback"):
                return str(order["do"])
            if order["do"] == "end":
                raise Ended()
            if order["do"] == "sleep":
                await connection.execute("SELECT pg_sleep(%s)", [order["ms"] / 1000])
                say("slept")
            else:
                await connection.execute("UPDATE work SET value = %s WHERE id = 1", [order["value"]])
                say("updated")

    async def write(self, value: str, by: str = "guard", release: bool = False) -> None:
        lease = self.held()
        async with self.connected() as connection, getattr(lease, by)(connection, release=release):
            await connection.execute("UPDATE work SET value = %s WHERE id = 1", [value])
        say("wrote")

    async def truncate(self) -> None:
        async with self.connected() as connection, self.held().guard(connection):
            await connection.execute("TRUNCATE work")
        say("wrote")

    async def unfenced(self, value: str) -> None:
        async with self.connected() as connection:
            await connection.execute("UPDATE work SET value = %s WHERE id = 1", [value])
        say("wrote")

    async def lead(self, name: str, ttl_ms: int) -> None:
        async def work(lease: pg_fence.Lease) -> None:
            assert isinstance(lease, Observed)
            self.lease = lease
            say("leading", token=lease.token, deadline=lease.deadline())
            await self.in_block()

        async def lead() -> None:
            try:
                await self.fence.alead(name, work, ttl=timedelta(milliseconds=ttl_ms))
                say("stopped")
            except Ended:
                pass

        self.block = asyncio.create_task(lead())
        say("done")

    async def census(self) -> None:
        say("census", tasks=threading.active_count() + len(asyncio.all_tasks()))

    async def close(self) -> None:
        await self.end_block()
        await self.let_go()
        for observer in self.observers:
            observer.close()
        self.lease = None
        say("closed")


plant()
asyncio.run(AsyncWorker().serve())
