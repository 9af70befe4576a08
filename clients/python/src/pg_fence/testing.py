"""For test suites, fixtures and data migrations: a transaction in which fences are off, for itself alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, LiteralString

from psycopg.rows import tuple_row
from psycopg.sql import SQL, Identifier

from .guarded import at_once, way_of

#: Each trigger of a fence that is on: its table, its name, and how it was switched on. Partitions have some of their own.
_TRIGGERS = """
    SELECT DISTINCT n.nspname, c.relname, t.tgname, t.tgenabled::text
      FROM pg_trigger t
      JOIN pg_class c ON c.oid = t.tgrelid
      JOIN pg_namespace n ON n.oid = c.relnamespace
      JOIN pg_proc p ON p.oid = t.tgfoid
     WHERE t.tgparentid = 0 AND t.tgenabled <> 'D'
       AND (EXISTS (SELECT FROM pg_depend d JOIN pg_extension e ON e.oid = d.refobjid AND e.extname = 'pg_fence'
                     WHERE d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e'
                       AND d.refclassid = 'pg_extension'::regclass)
            -- pg_fence_lite, which is no extension
            OR p.proname = 'fenced' AND EXISTS (SELECT FROM pg_namespace f
                     WHERE f.nspname = 'fence' AND f.nspowner = p.proowner
                       AND starts_with(obj_description(f.oid, 'pg_namespace'), 'pg_fence_lite')))
       AND (%(tables)s::text[] IS NULL
            OR EXISTS (SELECT FROM unnest(%(tables)s::regclass[]) AS one
                        WHERE t.tgrelid = one OR t.tgrelid IN (SELECT relid FROM pg_partition_tree(one))))
     ORDER BY 1, 2, 3"""

_ON: dict[str, LiteralString] = {"O": "ENABLE", "R": "ENABLE REPLICA", "A": "ENABLE ALWAYS"}


@contextlib.contextmanager
def unfenced(connection: Any, *tables: str) -> Iterator[Any]:
    """A transaction on a connection of psycopg, SQLAlchemy or Django in which the fences of those tables, or of all
    tables of the database, let everything through. It takes the owner of the tables, and no superuser.

    For all others the fences stay as they are: until the transaction ends, nobody else can write to these tables. A
    transaction that is open already goes on after it, with the fences on again.
    """
    way = way_of(connection)
    if way.is_async:
        raise TypeError("this takes a connection that is not asynchronous")
    drivers: list[Any] = []
    at_once(way.begin(drivers.append))
    if way.transaction is None:
        # SQLAlchemy's, which somebody else ends.
        way._enter(connection.begin_nested())
    error: BaseException | None = None
    try:
        (driver,) = drivers
        with driver.cursor(row_factory=tuple_row) as cursor:
            triggers = cursor.execute(_TRIGGERS, {"tables": list(tables) or None}).fetchall()
            for schema, table, trigger, _ in triggers:
                cursor.execute(_switched("DISABLE", schema, table, trigger))
            yield connection
            if hasattr(connection, "flush"):
                # What an SQLAlchemy session has kept back so far.
                connection.flush()
            # Else a row whose foreign key is still to be checked keeps its table from being altered.
            cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
            for schema, table, trigger, enabled in triggers:
                cursor.execute(_switched(_ON[enabled], schema, table, trigger))
    except BaseException as raised:
        error = raised
        raise
    finally:
        at_once(way.end(error))


def _switched(how: LiteralString, schema: str, table: str, trigger: str) -> Any:
    names = Identifier(schema, table), Identifier(trigger)
    return SQL("ALTER TABLE {} {} TRIGGER {}").format(names[0], SQL(how), names[1])
