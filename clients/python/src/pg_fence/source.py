"""What a fence can be made from, and the connections that it opens."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import psycopg
from psycopg import conninfo

#: Opens a connection, which may take that many seconds.
Opener = Callable[[float], "psycopg.Connection[Any]"]


def opener(source: Any) -> Opener:
    """Of a connection string, a URL, a function, an engine of SQLAlchemy's, or a connection of Django's."""
    url: Any = getattr(source, "url", None)
    if isinstance(source, str):
        # As SQLAlchemy writes it: postgresql+psycopg://…
        return _of_parameters(conninfo.conninfo_to_dict(re.sub(r"^(postgres(?:ql)?)\+\w+://", r"\1://", source)))
    if hasattr(source, "get_connection_params"):
        return _of_parameters(source.get_connection_params())
    if hasattr(url, "translate_connect_args"):
        options = dict(url.query) if "psycopg" in url.drivername else {}
        return _of_parameters(url.translate_connect_args(username="user", database="dbname") | options)
    if callable(source):
        return lambda _: _ready(source())
    takes = "a connection string, a URL, a function that opens a psycopg.Connection, an engine, or Django's connection"
    raise TypeError(f"a fence takes {takes}, and not {kind_of(source)}")


def _of_parameters(given: dict[str, Any]) -> Opener:
    # Django's and SQLAlchemy's have some that are not libpq's.
    known = {option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults()}
    parameters = {key: value for key, value in given.items() if key in known and value is not None}

    def open(limit: float) -> psycopg.Connection[Any]:
        # libpq counts in whole seconds, two at least.
        defaults: dict[str, Any] = {"connect_timeout": max(2, math.ceil(limit)), "client_encoding": "utf8"}
        return _ready(psycopg.connect(**(defaults | parameters)))

    return open


def _ready(connection: Any) -> psycopg.Connection[Any]:
    if not isinstance(connection, psycopg.Connection):
        raise TypeError(f"the function of a fence opens a psycopg.Connection, and not {kind_of(connection)}")
    connection.autocommit = True
    # A pooler in transaction mode hands each transaction to a server that may not know the statement.
    connection.prepare_threshold = None
    return connection


def kind_of(thing: object) -> str:
    """Its type, for an error."""
    return f"a {type(thing).__module__}.{type(thing).__qualname__}"
