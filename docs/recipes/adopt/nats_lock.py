"""Under a lock of NATS KV: nats_lock.py 'dbname=shop' nats://… body.txt"""
import asyncio
import os
import sys
import uuid

import nats
import psycopg
from nats.js.errors import KeyWrongLastSequenceError, NotFoundError

LEASE = "report-writer"
TTL = float(os.environ.get("LEASE_SECONDS", "600"))   # longer than a run takes: this program renews nothing
database, server, file = sys.argv[1:]
me = str(uuid.uuid4())


async def bucket(connection):
    context = connection.jetstream()
    try:
        return await context.key_value("locks")
    except NotFoundError:
        return await context.create_key_value(bucket="locks", ttl=TTL)   # in files, which is the default


async def grant():
    """The revision that created the key."""
    async with await nats.connect(server) as connection:
        locks = await bucket(connection)
        while True:
            try:
                return await locks.create(LEASE, me.encode())
            except KeyWrongLastSequenceError:
                await asyncio.sleep(0.2)


async def release(number):
    async with await nats.connect(server) as connection:
        try:
            await (await bucket(connection)).delete(LEASE, last=number)   # nobody else's
        except (KeyWrongLastSequenceError, nats.js.errors.APIError):
            pass


def adopt(connection, number, wait):
    """The first line of each transaction: no older number writes from here on, and nobody else under this one."""
    adopt = "SELECT lease_guard(%(name)s, lease_adopt(%(name)s, %(number)s, %(me)s, %(wait)s))"
    connection.execute(adopt, {"name": LEASE, "number": number, "me": me, "wait": wait})


number = asyncio.run(grant())
try:
    with psycopg.connect(database, autocommit=True) as connection:
        with connection.transaction():
            adopt(connection, number, wait="1 min")
        with open(file) as work:   # which takes its time
            body = work.read()
        with connection.transaction():
            adopt(connection, number, wait="0")
            connection.execute("UPDATE reports SET body = %s WHERE id = 1", [body])
            connection.execute("SELECT lease_release(%s, %s)", [LEASE, number])
except psycopg.Error as error:
    sys.exit(f"{error.sqlstate}: {error}")
finally:
    asyncio.run(release(number))
