"""The laboratory's worker in Python: does what it reads, a JSON object a line, and says what became of it.

What it is told and what it says is the same for the clients of all languages, and written down in clients/new-language.md.
`--plant` builds in a known fault, which the laboratory must catch.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo

import pg_fence
from pg_fence.acquiring import Asked
from pg_fence.connection import OwnConnection, now, value
from pg_fence.holding import Holding
from pg_fence.keeper import Batch, Keeper
from pg_fence.watch import Watch

_says = threading.Lock()


def say(event: str, **more: Any) -> None:
    with _says:
        print(json.dumps({"event": event, "at": int(time.time() * 1000), **more}), flush=True)


KINDS = {
    pg_fence.StaleToken: "stale",
    pg_fence.NoToken: "no-token",
    pg_fence.NeverIssued: "never-issued",
    pg_fence.NotSpeaking: "not-speaking",
    pg_fence.CannotBeFenced: "cannot-be-fenced",
    pg_fence.LeaseLost: "lost",
    pg_fence.LeaseTaken: "taken",
    pg_fence.TransactionLost: "transaction-lost",
}


def refused(error: BaseException) -> None:
    told = pg_fence.classify(error)
    sqlstate = getattr(told or error, "sqlstate", None)
    say("refused", error=KINDS.get(type(told), "other"), sqlstate=sqlstate, message=str(error))


class Observed(pg_fence.Lease):
    """A lease that says when it was renewed and lost, and whose heartbeat can be starved."""

    starved = False
    #: Of many, nobody tells that they are renewed.
    is_one_of_many = False

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._on_lost.append(lambda loss: say("lost", name=self.names[0], reason=loss.reason))

    def deadline(self) -> int:
        wall = time.time()
        return int((wall + self.remaining.total_seconds()) * 1000)

    def _counts_from(self, before: float, token: int) -> None:
        super()._counts_from(before, token)
        if self._answered and not self.is_one_of_many:
            say("renewed", token=token, deadline=self.deadline())

    @property
    def _is_kept(self) -> bool:
        return not self.starved and super()._is_kept


class DeadlineFromAnswer(Observed):
    def _counts_from(self, before: float, token: int) -> None:
        super()._counts_from(now(), token)


class ErrorIsLoss(Keeper):
    def _ask(self, own: OwnConnection, batch: Batch) -> dict[int | None, int | None]:
        try:
            return super()._ask(own, batch)
        except Exception as error:
            for lease in batch:
                lease._lose("denied", error)
            raise


class RenewInWork(Keeper):
    #: Runs a statement in the transaction that is open, if one is.
    work: Callable[[str, list[Any]], Any] | None = None

    def _ask(self, own: OwnConnection, batch: Batch) -> dict[int | None, int | None]:
        if RenewInWork.work is None:
            return super()._ask(own, batch)
        return {lease.token: RenewInWork.work(*lease._on_names("lease_renew")) for lease in batch}


class NoWatch(Watch):
    def _look_by(self, when: float) -> None:
        pass


class HangHidesLoss(Keeper):
    """The deadline is looked at by the heartbeat only."""

    def _reset(self) -> None:
        super()._reset()
        self.watch = NoWatch()
        self._changed = threading.Condition(self.watch.lock)


class OneNullLosesAll(Keeper):
    def _ask(self, own: OwnConnection, batch: Batch) -> dict[int | None, int | None]:
        answers = super()._ask(own, batch)
        return {} if None in answers.values() else answers


class OneLockStopsAll(Keeper):
    def _refused(self, batch: Batch, error: Exception) -> list[Batch]:
        for lease in batch:
            lease._beat_failed(error)
        return []


class AdoptsLate(pg_fence.Adopted):
    """A number is made known by the first transaction that is guarded with it."""

    def adopt(self, wait: timedelta) -> None:
        pass


class AdoptsOnce(pg_fence.Adopted):
    """A number is made known once, and never again."""

    def _guard(self) -> tuple[str, list[Any]]:
        return Holding._guard(self)

    def mend(self) -> bool:
        return False


#: What an adopted lease is with a fault.
ADOPTED: dict[str, type[pg_fence.Adopted]] = {"adopts-late": AdoptsLate, "adopts-once": AdoptsOnce}

KEEPERS: dict[str, type[Keeper]] = {
    "error-is-loss": ErrorIsLoss,
    "renew-in-work": RenewInWork,
    "hang-hides-loss": HangHidesLoss,
    "one-null-loses-all": OneNullLosesAll,
    "one-lock-stops-all": OneLockStopsAll,
}

LEASES: dict[str, type[Observed]] = {"deadline-from-answer": DeadlineFromAnswer}


class ObservedFence(pg_fence.Fence):
    kind: type[Observed] = Observed
    keeper: type[Keeper] = Keeper
    adopted: type[pg_fence.Adopted] = pg_fence.Adopted

    def _make_keeper(self) -> Keeper:
        return self.keeper(self._open, self._prefix)

    def _make(self, asked: Asked) -> Observed:
        return self.kind(self._keeper, asked)

    def _adopted(self, name: str, token: int, holder: str, metadata: Any) -> pg_fence.Adopted:
        return self.adopted(self._keeper, name, token, holder, metadata)


def spans(milliseconds: dict[str, Any]) -> dict[str, Any]:
    """What is in milliseconds, as the client wants it."""
    return {
        key.removesuffix("_ms"): timedelta(milliseconds=value) if key.endswith("_ms") else value
        for key, value in milliseconds.items()
    }


def claim_of(names: list[str], n: int, ttl_ms: int) -> dict[str, Any]:
    return {"query": "SELECT unnest(%s::text[])", "parameters": [names], "n": n, "ttl": timedelta(milliseconds=ttl_ms)}


def tell_leader(leader: pg_fence.Leader) -> None:
    say("leader", name=leader.name, holder=leader.holder, token=leader.token)


#: Orders within a transaction.
WITHIN = {"update", "sleep", "commit", "rollback"}


class Orders:
    """What the workers with and without asyncio do alike. What one of them waits for, it returns."""

    def __init__(self) -> None:
        self.lease: Holding | None = None
        self.many: list[Observed] = []
        self.observers: list[pg_fence.Observer] = []

    def follow(self, do: str, **arguments: Any) -> Any:
        if do in WITHIN:
            raise pg_fence.LeaseLost("released", ("its transaction has ended",))
        call = getattr(self, do.replace("-", "_"), None)
        if call is None:
            raise ValueError("unknown order")
        return call(**arguments)

    def take(self, lease: pg_fence.Lease) -> Any:
        raise NotImplementedError

    def transaction(self, begun: str, by: Callable[[Any], pg_fence.Guarded]) -> Any:
        """Until it reads `commit` or `rollback`, what it does is one transaction."""
        raise NotImplementedError

    def connect(self, host: str, port: int, user: str, dbname: str, application: str) -> None:
        self.conninfo = make_conninfo(
            host=host, port=port, user=user, dbname=dbname, application_name=application
        )
        self.fence = ObservedFence(self.conninfo)
        say("connected")

    def acquire(self, names: list[str], **options: Any) -> Any:
        return self.take(self.fence.lease(*names, **spans(options)))

    def resume(self, name: str, token: int, **options: Any) -> Any:
        return self.take(self.fence.resume(name, token, **spans(options)))

    def is_one_of_many(self, lease: pg_fence.Lease) -> None:
        assert isinstance(lease, Observed)
        lease.is_one_of_many = True
        self.many.append(lease)

    def has_claimed(self, claimed: pg_fence.Claimed) -> None:
        for lease in claimed:
            self.is_one_of_many(lease)
        say("claimed", names=[lease.names[0] for lease in claimed])

    def holding(self) -> None:
        say("holding", count=sum(lease.held for lease in self.many))

    def observe(self, name: str) -> None:
        say("done")
        self.observers.append(self.fence.observe(name, tell_leader))

    def held(self) -> Holding:
        if self.lease is None:
            raise pg_fence.LeaseLost("gone", ("job",))
        return self.lease

    def held_lease(self) -> Observed:
        lease = self.held()
        assert isinstance(lease, Observed)
        return lease

    def check(self) -> None:
        self.held_lease().check()
        say("held")

    def starve(self) -> None:
        self.held_lease().starved = True
        say("done")

    def guard(self) -> Any:
        return self.transaction("guarded", self.held().guard)

    def guard_all(self) -> Any:
        return self.transaction("guarded", lambda connection: self.fence.guard(connection, self.many))

    def present(self) -> Any:
        return self.transaction("presented", self.held().present)


class Worker(Orders):
    def __init__(self) -> None:
        super().__init__()
        self.connection: psycopg.Connection[Any] | None = None
        self.leading: threading.Thread | None = None
        self.stop = threading.Event()

    def serve(self) -> None:
        for line in sys.stdin:
            try:
                self.follow(**json.loads(line))
            except Exception as error:  # noqa: BLE001
                refused(error)

    def take(self, lease: pg_fence.Lease) -> None:
        if self.lease is not None:
            self.lease.release()
        self.lease = None
        assert isinstance(lease, Observed)
        if lease.acquire():
            self.lease = lease
            say("acquired", token=lease.token, deadline=lease.deadline())
        else:
            say("taken")

    def detach(self) -> None:
        say("detached", token=self.held_lease().detach())

    def hold(self, names: list[str], ttl_ms: int) -> None:
        for name in names:
            lease = self.fence.lease(name, ttl=timedelta(milliseconds=ttl_ms))
            self.is_one_of_many(lease)
            if not lease.acquire():
                say("taken")
                return
        self.holding()

    def claim(self, names: list[str], n: int, ttl_ms: int) -> None:
        self.has_claimed(self.fence.claim(**claim_of(names, n, ttl_ms)))

    def release_all(self) -> None:
        self.let_go()
        say("released")

    def let_go(self) -> None:
        for lease in self.many:
            lease.release()
        self.many = []

    def adopt(self, name: str, token: int, wait_ms: int = 0) -> None:
        try:
            adopted = self.fence.adopt(name, token, wait=timedelta(milliseconds=wait_ms))
        except pg_fence.LeaseTaken:
            say("taken")
            return
        self.lease = adopted
        say("adopted", token=adopted.token)

    def renew(self) -> None:
        self.held_lease().renew()
        say("done")

    def transaction(self, begun: str, by: Callable[[Any], pg_fence.Guarded]) -> None:
        with psycopg.connect(self.conninfo, autocommit=True) as connection:
            step = "commit"
            with by(connection):
                self.connection = connection
                RenewInWork.work = lambda *call: value(connection, *call)
                try:
                    say(begun)
                    for line in sys.stdin:
                        order = json.loads(line)
                        step = order.pop("do")
                        if step in ("commit", "rollback"):
                            break
                        getattr(self, f"in_{step}")(**order)
                    if step == "rollback":
                        raise psycopg.Rollback()
                finally:
                    self.connection = RenewInWork.work = None
            say("committed" if step == "commit" else "rolled-back")

    def in_update(self, value: str) -> None:
        assert self.connection is not None
        self.connection.execute("UPDATE work SET value = %s WHERE id = 1", [value])
        say("updated")

    def in_sleep(self, ms: int) -> None:
        """In the server, so that the work hangs in its connection."""
        assert self.connection is not None
        self.connection.execute("SELECT pg_sleep(%s)", [ms / 1000])
        say("slept")

    def write(self, value: str, by: str = "guard", release: bool = False) -> None:
        """A whole transaction; with `release`, the last one."""
        lease = self.held()
        with (
            psycopg.connect(self.conninfo, autocommit=True) as connection,
            getattr(lease, by)(connection, release=release),
        ):
            connection.execute("UPDATE work SET value = %s WHERE id = 1", [value])
        say("wrote")

    def truncate(self) -> None:
        with psycopg.connect(self.conninfo, autocommit=True) as connection, self.held().guard(connection):
            connection.execute("TRUNCATE work")
        say("wrote")

    def unfenced(self, value: str) -> None:
        """A write that knows nothing of leases."""
        with psycopg.connect(self.conninfo, autocommit=True) as connection:
            connection.execute("UPDATE work SET value = %s WHERE id = 1", [value])
        say("wrote")

    def release(self) -> None:
        lease = self.held()
        lease.release()
        lease.refuse_if_over() if lease.loss else say("released")

    def lead(self, name: str, ttl_ms: int) -> None:
        def work(lease: pg_fence.Lease) -> None:
            assert isinstance(lease, Observed)
            self.lease = lease
            say("leading", token=lease.token, deadline=lease.deadline())
            while not self.stop.is_set():
                lease.wait(timedelta(milliseconds=50))

        def run() -> None:
            self.fence.lead(name, work, ttl=timedelta(milliseconds=ttl_ms), stop=self.stop)
            if not self.stop.is_set():
                say("stopped")

        self.stop.clear()
        self.leading = threading.Thread(target=run)
        self.leading.start()
        say("done")

    def census(self) -> None:
        say("census", tasks=threading.active_count())

    def close(self) -> None:
        self.stop.set()
        if self.leading is not None:
            self.leading.join()
        if self.lease is not None:
            self.lease.release()
        self.let_go()
        for observer in self.observers:
            observer.close()
        self.lease = self.leading = None
        say("closed")


def plant() -> None:
    if "--plant" in sys.argv:
        name = sys.argv[sys.argv.index("--plant") + 1]
        ObservedFence.adopted = ADOPTED.get(name, pg_fence.Adopted)
        ObservedFence.kind = LEASES.get(name, Observed)
        ObservedFence.keeper = KEEPERS.get(name, Keeper)
        if name not in {*ADOPTED, *LEASES, *KEEPERS}:
            raise ValueError(f"there is no fault called {name}")


if __name__ == "__main__":
    plant()
    Worker().serve()
