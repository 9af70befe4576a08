#!/bin/bash
# connectorx 0.4.6 (PyPI, query results as data frames): a function that claims a job claims two, and one is lost.
#
# Guess: read_sql() sends the query once. A worker whose work is in data frames calls its queue's claim() through it,
#   and gets the job that was claimed.
# Seen: for pandas, the default, the number of rows is asked first, by a count(*) over the same query: it claims the
#   first job and commits, and the query itself then claims the second one. The first has no worker, and nobody
#   knows. With return_type="arrow" the query is sent once.
. "$(dirname "$0")/lib.sh"
pip_install connectorx==0.4.6 pandas==2.2.3 pyarrow==18.1.0 psycopg2-binary==2.9.13
postgres
python > "$work/seen" <<'END' || true
import os, connectorx, psycopg2
url = os.environ["DATABASE_URL"]
database = psycopg2.connect(url)
database.autocommit = True
queue = database.cursor()
queue.execute("""
    CREATE TABLE jobs AS SELECT id, 'ready' AS state FROM generate_series(1, 4) AS id;
    CREATE FUNCTION claim() RETURNS SETOF jobs LANGUAGE sql AS $$
        UPDATE jobs SET state = 'taken' WHERE id = (
            SELECT id FROM jobs WHERE state = 'ready' ORDER BY id FOR UPDATE SKIP LOCKED LIMIT 1)
        RETURNING * $$""")
def show(kind, received):
    queue.execute("SELECT array_agg(id ORDER BY id) FROM jobs WHERE state = 'taken'")
    print(f"{kind}: received job {received}, taken so far: {queue.fetchone()[0]}")
show("pandas", connectorx.read_sql(url, "SELECT * FROM claim()")["id"].tolist())
show("arrow", connectorx.read_sql(url, "SELECT * FROM claim()", return_type="arrow")["id"].to_pylist())
END
still <<'END'
pandas: received job [2], taken so far: [1, 2]
arrow: received job [3], taken so far: [1, 2, 3]
END
