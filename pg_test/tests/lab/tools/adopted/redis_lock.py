import os
import sys
import time
import uuid

import psycopg
import redis

# The lock and its number in one script. Were the number drawn in a second step, a holder that froze between the two
# would draw the greatest one after it has lost the lock.
GRANT = """
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
    return redis.call('INCR', KEYS[2])
end
return false
"""
RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
    return redis.call('DEL', KEYS[1])
end
return 0
"""
LEASE = "report-writer"
KEYS = [f"{{{LEASE}}}:lock", f"{{{LEASE}}}:number"]
TTL_MS = int(1000 * float(os.environ.get("LEASE_SECONDS", "600")))   # longer than a run takes

database, server, file = sys.argv[1:]
me = str(uuid.uuid4())
store = redis.Redis.from_url(server)
grant, release = store.register_script(GRANT), store.register_script(RELEASE)


def adopt(connection, number, wait):
    """The first line of each transaction: no older number writes from here on, and nobody else under this one."""
    adopt = "SELECT lease_guard(%(name)s, lease_adopt(%(name)s, %(number)s, %(me)s, %(wait)s))"
    connection.execute(adopt, {"name": LEASE, "number": number, "me": me, "wait": wait})
    [holder] = connection.execute("SELECT holder FROM lease_info(%s)", [LEASE]).fetchone()
    if holder != me:
        sys.exit(f"Redis has granted {number} twice: {holder} has it")


while (number := grant(KEYS, [me, TTL_MS])) is None:
    time.sleep(0.2)
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
    release(KEYS[:1], [me])
