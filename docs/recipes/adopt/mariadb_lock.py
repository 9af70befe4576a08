"""Under a lock of MariaDB: mariadb_lock.py 'dbname=shop' 127.0.0.1:3306 body.txt"""
import os
import sys
import uuid

import psycopg
import pymysql

LEASE = "report-writer"
TTL = int(float(os.environ.get("LEASE_SECONDS", "600")))   # longer than a run takes
database, server, file = sys.argv[1:]
me = str(uuid.uuid4())
host, port = server.rsplit(":", 1)
# In autocommit, and never connected anew: the lock and its number are this connection's.
locks = pymysql.connect(host=host, port=int(port), user="root", autocommit=True)
# A holder that is frozen keeps the lock until the server ends its idle connection: by default after eight hours.
with locks.cursor() as cursor:
    cursor.execute("SET SESSION wait_timeout = %s", [TTL])
    cursor.execute("CREATE DATABASE IF NOT EXISTS locks")
    cursor.execute("CREATE TABLE IF NOT EXISTS locks.numbers (name varchar(64) PRIMARY KEY, n bigint NOT NULL)")
    cursor.execute("INSERT IGNORE INTO locks.numbers VALUES (%s, 0)", [LEASE])
    granted = 0
    while not granted:
        cursor.execute("SELECT GET_LOCK(%s, 10)", [LEASE])
        [granted] = cursor.fetchone()
    cursor.execute("UPDATE locks.numbers SET n = LAST_INSERT_ID(n + 1) WHERE name = %s", [LEASE])
    cursor.execute("SELECT LAST_INSERT_ID()")
    [number] = cursor.fetchone()


def adopt(connection, wait):
    """The first line of each transaction: no older number writes from here on, and nobody else under this one."""
    adopt = "SELECT lease_guard(%(name)s, lease_adopt(%(name)s, %(number)s, %(me)s, %(wait)s))"
    connection.execute(adopt, {"name": LEASE, "number": number, "me": me, "wait": wait})


try:
    with psycopg.connect(database, autocommit=True) as connection:
        with connection.transaction():
            adopt(connection, wait="1 min")
        with open(file) as work:   # which takes its time
            body = work.read()
        with connection.transaction():
            adopt(connection, wait="0")
            connection.execute("UPDATE reports SET body = %s WHERE id = 1", [body])
            connection.execute("SELECT lease_release(%s, %s)", [LEASE, number])
except psycopg.Error as error:
    sys.exit(f"{error.sqlstate}: {error}")
# The end of the connection gives the lock back.
