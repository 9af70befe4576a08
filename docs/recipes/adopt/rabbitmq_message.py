"""One message of the quorum queue `reports`: rabbitmq_message.py 'dbname=shop' amqp://… body.txt"""
import os
import sys
import uuid

import pika
import psycopg

database, server, file = sys.argv[1:]
me = str(uuid.uuid4())
parameters = pika.URLParameters(server)
# A consumer that is silent for about twice as long is cut off, and its message is handed to another. This one is silent
# while it works: longer than a run takes.
parameters.heartbeat = int(float(os.environ.get("LEASE_SECONDS", "600")))
connection = pika.BlockingConnection(parameters)
channel = connection.channel()
method = None
while method is None:
    method, properties, _ = channel.basic_get("reports")
    connection.sleep(0.2)
lease = f"message:{properties.message_id}"
number = (properties.headers or {}).get("x-delivery-count", 0) + 1   # absent at the first delivery


def adopt(database, wait):
    """The first line of each transaction: no older number writes from here on, and nobody else under this one."""
    adopt = "SELECT lease_guard(%(name)s, lease_adopt(%(name)s, %(number)s, %(me)s, %(wait)s))"
    database.execute(adopt, {"name": lease, "number": number, "me": me, "wait": wait})


try:
    with psycopg.connect(database, autocommit=True) as rows:
        with rows.transaction():
            adopt(rows, wait="1 min")
        with open(file) as work:   # which takes its time
            body = work.read()
        with rows.transaction():
            adopt(rows, wait="0")
            rows.execute("UPDATE reports SET body = %s WHERE id = 1", [body])
            rows.execute("SELECT lease_release(%s, %s)", [lease, number])
except psycopg.Error as error:
    sys.exit(f"{error.sqlstate}: {error}")
try:
    channel.basic_ack(method.delivery_tag)
    connection.close()
except pika.exceptions.AMQPError as cut:
    print(f"it is handed to another, who finds it done: {cut!r}", file=sys.stderr)
