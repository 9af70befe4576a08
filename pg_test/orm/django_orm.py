"""Django on managed tables: it fails where something else comes of a step than it says."""

import sys

import django
from django.conf import settings
from django.db import DatabaseError, connection, models, transaction

port, name = sys.argv[1:]
settings.configure(
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "HOST": "127.0.0.1",
            "PORT": port,
            "NAME": name,
            "USER": "postgres",
        }
    },
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
)
django.setup()


class Order(models.Model):
    v = models.IntegerField(default=0)
    fence = models.BigIntegerField(null=True, editable=False)

    class Meta:
        app_label = "shop"
        db_table = "orders"


class Job(models.Model):
    v = models.IntegerField(default=0)
    fence = models.BigIntegerField(null=True, editable=False)

    class Meta:
        app_label = "shop"
        db_table = "jobs"


def call(function, *arguments):
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {function}({', '.join(['%s'] * len(arguments))})", arguments)
        return cursor.fetchone()[0]


def step(what, work, token=None, comes="done"):
    """In a transaction of its own, under a token if there is one; that must come of it."""
    try:
        with transaction.atomic():
            if token:
                with connection.cursor() as cursor:
                    cursor.execute("SELECT set_config('pg_fence.token', %s, true)", [str(token)])
            work()
        came = "done"
    except DatabaseError as error:
        came = error.__cause__.sqlstate
    assert came == comes, f"{what}: {came}"


def saves(row, v, refresh=False):
    def work():
        if refresh:
            row.refresh_from_db()
        row.v = v
        row.save()

    return work


def upserts(model, rows):
    return lambda: model.objects.bulk_create(
        rows, update_conflicts=True, unique_fields=["id"], update_fields=["v", "fence"]
    )


# A row whose key the database makes is created without a lease, by the shop.
step("the shop creates a job", lambda: Job.objects.create(v=1))
step("it creates several", lambda: Job.objects.bulk_create([Job(v=2), Job(v=3)]))
step("it brings a fence", lambda: Job.objects.create(v=4, fence=7), comes="PF002")
assert not Job.objects.filter(fence__isnull=False)

token = call("lease_acquire", "order:1", "first")
row, other = Order.objects.get(id=1), Order.objects.get(id=1)
step("the holder saves", saves(row, 1), token)
step("it saves the same object again", saves(row, 2), token)
step("it refreshes and saves", saves(row, 3, refresh=True), token)
step("an object read before all that", saves(other, 4), token)
step("it updates in bulk", lambda: Order.objects.bulk_update([other], ["v", "fence"]), token)
step("it upserts", upserts(Order, [Order(id=1, v=5)]), token)
step("it upserts what it has read", upserts(Order, [Order.objects.get(id=1)]), token)
reader = Order.objects.get(id=1)
assert reader.fence == token

step("who has only read saves", saves(reader, 9), comes="PF002")
step("who has only read refreshes and saves", saves(reader, 9, refresh=True), comes="PF002")
step("who has only read updates in bulk", lambda: Order.objects.bulk_update([reader], ["v", "fence"]), comes="PF002")
step("who has only read upserts", upserts(Order, [reader]), comes="PF002")
step("who has only read deletes", lambda: Order.objects.filter(id=1).delete(), comes="PF002")

call("lease_revoke", "order:1")
newer = call("lease_acquire", "order:1", "second")
step("before the next one the stale worker refreshes and saves", saves(row, 9, refresh=True), token, comes="PF004")
step("the next holder saves", saves(other, 6), newer)
step("the stale worker saves", saves(row, 9), token, comes="PF001")
step("the stale worker refreshes and saves", saves(row, 9, refresh=True), token, comes="PF001")
step("the stale worker upserts", upserts(Order, [Order.objects.get(id=1)]), token, comes="PF004")
step("the stale worker deletes", lambda: Order.objects.filter(id=1).delete(), token, comes="PF001")
step("the next holder saves again", saves(other, 7), newer)

# Row by row, without a lease: the order of the tokens decides.
job = Job.objects.order_by("id").first()
step("a worker claims a job", saves(job, 10), newer)
step("it saves the job again", saves(job, 11), newer)
step("a stale worker refreshes and saves it", saves(Job.objects.get(id=job.id), 99, refresh=True), token, comes="PF001")
step("who has only read the job saves", saves(Job.objects.get(id=job.id), 99), comes="PF002")
assert (Order.objects.get(id=1).v, Job.objects.get(id=job.id).v) == (7, 11)
