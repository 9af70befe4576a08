"""Under a lock in an object of S3: s3_lock.py 'dbname=shop' https://… body.txt, credentials as boto3 finds them."""
import json
import os
import sys
import time
import uuid

import boto3
import psycopg
from botocore.exceptions import ClientError

LEASE = "report-writer"
TTL = float(os.environ.get("LEASE_SECONDS", "600"))   # longer than a run takes: this program renews nothing
PLACE = {"Bucket": "locks", "Key": LEASE}
database, server, file = sys.argv[1:]
me = str(uuid.uuid4())                                # of this try
store = boto3.client("s3", endpoint_url=server)


def read():
    """The lock, and the condition under which it may be replaced."""
    try:
        answer = store.get_object(**PLACE)
    except store.exceptions.NoSuchKey:
        return {"number": 0, "holder": None, "until": 0}, {"IfNoneMatch": "*"}
    return json.loads(answer["Body"].read()), {"IfMatch": answer["ETag"]}


def write(number, until, condition):
    """Whether it is ours now: boto3 sends a lost PUT again, and answers 412 for its own success."""
    try:
        store.put_object(**PLACE, Body=json.dumps({"number": number, "holder": me, "until": until}), **condition)
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] not in (409, 412):
            raise
    lock, _ = read()
    return (lock["number"], lock["holder"]) == (number, me)


def grant():
    while True:
        lock, condition = read()
        number = lock["number"] + 1
        if lock["until"] < time.time() and write(number, time.time() + TTL, condition):
            return number
        time.sleep(0.2)


def release(number):
    lock, condition = read()
    if (lock["number"], lock["holder"]) == (number, me):
        write(number, 0, condition)                   # never deleted: the number is in it


def adopt(connection, number, wait):
    """The first line of each transaction: no older number writes from here on, and nobody else under this one."""
    adopt = "SELECT lease_guard(%(name)s, lease_adopt(%(name)s, %(number)s, %(me)s, %(wait)s))"
    connection.execute(adopt, {"name": LEASE, "number": number, "me": me, "wait": wait})


number = grant()
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
    release(number)
