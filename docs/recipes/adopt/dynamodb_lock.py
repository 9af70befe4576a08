"""Under a lock in an item of DynamoDB: dynamodb_lock.py 'dbname=shop' https://… body.txt, credentials as boto3 finds
them. The table `locks` has the key `name`, and no TTL attribute: an item that is deleted takes its number along."""
import os
import sys
import time
import uuid
from decimal import Decimal

import boto3
import psycopg
from botocore.exceptions import ClientError

LEASE = "report-writer"
TTL = float(os.environ.get("LEASE_SECONDS", "600"))   # longer than a run takes: this program renews nothing
database, server, file = sys.argv[1:]
me = str(uuid.uuid4())                                # of this try
locks = boto3.resource("dynamodb", endpoint_url=server).Table("locks")


def update(expression, condition, **values):
    """The item as it is now, or None where the condition does not hold."""
    try:
        answer = locks.update_item(
            Key={"name": LEASE}, UpdateExpression=expression, ConditionExpression=condition,
            ExpressionAttributeNames={"#until": "until", "#number": "number"} if "ADD" in expression else {"#until": "until"},
            ExpressionAttributeValues={f":{name}": value for name, value in values.items()}, ReturnValues="ALL_NEW",
        )
    except ClientError as error:
        if error.response["Error"]["Code"] != "ConditionalCheckFailedException":
            raise
        # boto3 sends a lost request again, and may be refused for its own success.
        item = locks.get_item(Key={"name": LEASE}, ConsistentRead=True).get("Item", {})
        return item if item.get("holder") == me else None
    return answer["Attributes"]


def grant():
    while True:
        now = Decimal(str(time.time()))
        item = update(
            "ADD #number :one SET holder = :me, #until = :until", "attribute_not_exists(#until) OR #until < :now",
            one=1, me=me, until=now + Decimal(str(TTL)), now=now,
        )
        if item is not None:
            return int(item["number"])
        time.sleep(0.2)


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
    update("SET #until = :never", "holder = :me", never=0, me=me)
