#!/bin/bash
# adbc-driver-postgresql 1.13.0 (PyPI, Arrow's driver): an UPDATE with parameters that met no row counts -1, not 0.
#
# Guess: rowcount is the number of rows that the UPDATE has changed. A worker whose row was taken over meanwhile finds
#   0 there and stops: "if not cursor.rowcount" is the usual test of an optimistic lock.
# Seen: so it is for a statement without parameters, and even for executemany(). With parameters execute() leaves
#   -1, as if the number were not known, whether the row was written or not. -1 is true: a late worker goes on.
. "$(dirname "$0")/lib.sh"
pip_install adbc-driver-postgresql==1.13.0 adbc-driver-manager==1.13.0 pyarrow==18.1.0
postgres
python > "$work/seen" <<'END' || true
import os
from adbc_driver_postgresql import dbapi
with dbapi.connect(os.environ["DATABASE_URL"], autocommit=True) as connection, connection.cursor() as cursor:
    cursor.execute("CREATE TABLE jobs AS SELECT 1 AS id, 7 AS version, 'taken' AS state")
    for version in 7, 6:
        update = f"UPDATE jobs SET state = 'done' WHERE id = 1 AND version = {version}"
        cursor.execute(update)
        counts = [cursor.rowcount]
        update = "UPDATE jobs SET state = 'done' WHERE id = $1 AND version = $2"
        cursor.executemany(update, [(1, version)])
        counts.append(cursor.rowcount)
        cursor.execute(update, (1, version))
        counts.append(cursor.rowcount)
        print("version {} | without parameters: {} | executemany: {} | with parameters: {}".format(version, *counts),
              "| the worker", "goes on" if cursor.rowcount else "stops")
END
still <<'END'
version 7 | without parameters: 1 | executemany: 1 | with parameters: -1 | the worker goes on
version 6 | without parameters: 0 | executemany: 0 | with parameters: -1 | the worker goes on
END
