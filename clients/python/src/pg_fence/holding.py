"""What a lease of ours and an adopted one have in common: the transactions under them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from .connection import Handle
from .errors import LeaseLost
from .guarded import Guarded


class Holding(ABC):
    """A lease that somebody holds, under a token that its transactions present: `Lease` or `Adopted`."""

    def __init__(self, prefix: str, names: tuple[str, ...]):
        #: The extension's schema and a dot, where it is named.
        self.prefix = prefix
        self.names = names
        #: The token that its transactions present; it serves for as long as the lease is held.
        self.token: int | None = None
        #: Why the lease was lost, once it was.
        self.loss: LeaseLost | None = None

    def call(self, call: str) -> str:
        """A statement that calls a function of the extension."""
        return f"SELECT {self.prefix}{call}"

    def guard(self, connection: Any, *, release: bool = False) -> Guarded:
        """A transaction during which nobody else is granted the lease, and whose writes present its token. It does
        not begin when the lease is lost. With `release`, its end releases the lease.

        `connection` is psycopg's (also async), asyncpg's, SQLAlchemy's connection or session (also async), or Django's.
        One that is in a transaction is guarded from here on, and the code that began it ends it."""
        return Guarded([self], connection, guards=True, release=release)

    def present(self, connection: Any, *, release: bool = False) -> Guarded:
        """As `guard`, without a lock: its writes present the token, and somebody else may be granted the lease
        until one of them is to a bound table."""
        return Guarded([self], connection, guards=False, release=release)

    @abstractmethod
    def release(self) -> None:
        """Gives it back."""

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        self.release()
        if error is None and self.loss is not None:
            raise self._lost()

    def _lost(self) -> LeaseLost:
        # A new one each time: a raised exception keeps the trace of where it was raised first.
        assert self.loss is not None
        return LeaseLost(self.loss.reason, self.names, self.loss.__cause__)

    @abstractmethod
    def _lose(self, reason: str, cause: BaseException | None = None) -> None:
        """Tells a loss, once."""

    # For the transactions under it

    @abstractmethod
    def refuse_if_over(self) -> None:
        """Raises LeaseLost when it is known to be ours no more."""

    def begins_with(self, guards: bool) -> Iterator[tuple[str, list[Any]]]:
        """The first statements of a transaction under it, with their arguments."""
        if guards:
            yield self._guard()
        else:
            # As text: there is no set_config that takes a number.
            yield "SELECT set_config('pg_fence.token', %s, true)", [str(self.token)]

    def _guard(self) -> tuple[str, list[Any]]:
        return self._on_names("lease_guard")

    #: Whether a transaction was refused, so that the next one mends before it begins.
    in_doubt = False

    @abstractmethod
    def can_mend(self, error: BaseException) -> bool:
        """Whether `mend` may help where a transaction could not begin because of that."""

    @abstractmethod
    def mend(self) -> bool:
        """Makes the token speak again, as after a failover; whether it does. Blocks. Raises LeaseLost."""

    def beat_soon(self) -> None:
        """The server refused a write: to be found out whether the lease is lost."""

    def enter(self, handle: Handle) -> None:
        """From here on a loss breaks off the connection of `handle`. Raises LeaseLost."""

    def leave(self, handle: Handle) -> None:
        handle.close()

    def pause(self) -> None:
        """Has no renewal begin: it would wait for the transaction that releases."""

    def wait_for_heartbeat(self) -> None:
        """Waits for the end of a renewal that is under way."""

    def go_on(self) -> None:
        """Renewals may begin again."""

    def _on_names(self, function: str) -> tuple[str, list[Any]]:
        name, *others = self.names
        if others:
            return self.call(f"{function}_all(%s::text[], %s::bigint)"), [list(self.names), self.token]
        return self.call(f"{function}(%s::text, %s::bigint)"), [name, self.token]

    def _last_call(self) -> tuple[str, list[Any]]:
        """What gives it back; NULL: it is lost."""
        return self._on_names("lease_release")

    async def release_by(self, value: Callable[[str, list[Any]], Any]) -> None:
        """Releases it in a transaction of its holder's."""
        if await value(*self._last_call()) is None:
            self._lose("gone")
            self.refuse_if_over()

    @abstractmethod
    def has_been_released(self) -> None:
        """That transaction was committed."""
