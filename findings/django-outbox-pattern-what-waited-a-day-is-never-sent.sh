#!/bin/bash
# django-outbox-pattern 3.2.1 (PyPI, transactional outbox): a message that has waited for a day is never sent.
#
# Guess: a message that was committed with its row is sent at least once, be it later: after a weekend without the
#   publisher, or without the broker, it goes out when the publisher runs. What cannot be sent is marked as failed.
# Seen: each message expires a day after it was made, unless its maker says otherwise, and the publisher passes over
#   those that have expired. Nothing is logged, its status stays "schedule", and after thirty days it is deleted.
. "$(dirname "$0")/lib.sh"
pip_install django-outbox-pattern==3.2.1 Django==5.2.3 'psycopg[binary]==3.3.9'
postgres
python > "$work/seen" <<'END' || true
import logging, os, socket, sys, threading, django
from django.conf import settings
broker = socket.create_server(("127.0.0.1", 0))
def frames(session):
    text = ""
    while data := session.recv(65536):
        *whole, text = (text + data.decode()).split("\0")
        yield from whole
def serve():
    while True:
        session, _ = broker.accept()
        for frame in frames(session):
            command, *headers = frame.strip().split("\n\n")[0].split("\n")
            headers = dict(line.split(":", 1) for line in headers)
            if command in ("STOMP", "CONNECT"):
                session.sendall(b"CONNECTED\nversion:1.2\n\n\0")
            if command == "SEND":
                print("the broker is sent", frame.split("\n\n")[1])
            if "receipt" in headers:
                session.sendall(f"RECEIPT\nreceipt-id:{headers['receipt']}\n\n\0".encode())
threading.Thread(target=serve, daemon=True).start()
settings.configure(
    INSTALLED_APPS=["django_outbox_pattern"], USE_TZ=True,
    DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", "HOST": os.environ["PGHOST"],
                           "PORT": os.environ["PGPORT"], "USER": "postgres", "NAME": "postgres"}},
    DJANGO_OUTBOX_PATTERN={"DEFAULT_STOMP_HOST_AND_PORTS": [broker.getsockname()]})
django.setup()
from django.core.cache import cache
from django.core.management import call_command
from django.db import connection
from django_outbox_pattern.factories import factory_producer
from django_outbox_pattern.models import Published
call_command("migrate", verbosity=0)
logged = logging.getLogger("django_outbox_pattern")
logged.addHandler(logging.StreamHandler(sys.stdout))
logged.setLevel(logging.WARNING)
def passes(hours):
    cache.clear()
    connection.cursor().execute(f"update published set added = added - interval '{hours} hours',"
                                f" expires_at = expires_at - interval '{hours} hours' where status = 1")
def publish():
    factory_producer().publish_message_from_database()
    for message in Published.objects.order_by("added"):
        print(" ", message.body, message.get_status_display())
def order(name):
    Published.objects.create(destination="/queue/orders", body={"order": name})
order("one")
passes(20)
print("20 hours later")
publish()
order("two")
passes(25)
print("25 hours later")
publish()
passes(31 * 24)
order("three")
print("31 days later")
publish()
END
still <<'END'
20 hours later
the broker is sent {"order": "one"}
  {'order': 'one'} Succeeded
25 hours later
  {'order': 'two'} Schedule
  {'order': 'one'} Succeeded
31 days later
the broker is sent {"order": "three"}
  {'order': 'one'} Succeeded
  {'order': 'three'} Succeeded
END
