#!/bin/bash
# flufl.lock 10.0.0 (PyPI): a lock with a lifetime of one second is taken over after eleven.
#
# Guess: lifetime says after how long others may break the lock of a holder that died.
# Seen: ten seconds are added to each lifetime, for clocks that differ between hosts. "expiration" shows the
#   lifetime alone; is_locked and refresh() of a holder that is late go by the files, so a late refresh() in
#   those ten seconds succeeds.
. "$(dirname "$0")/lib.sh"
pip_install flufl.lock==10.0.0
cd "$work"
python > "$work/seen" <<'END' || true
import time
from datetime import timedelta
from flufl.lock import Lock
dead, next_one = Lock("job.lock", lifetime=timedelta(seconds=1)), Lock("job.lock")
began = time.monotonic()
dead.lock()
time.sleep(3)
print("after 3 s: is_locked", dead.is_locked)
try:
    next_one.lock(timeout=timedelta(seconds=3))
except Exception as e:
    print("3 s more:", type(e).__name__)
next_one.lock(timeout=timedelta(seconds=20))
waited = time.monotonic() - began
print("granted, after 11 s or a little more:", 11 <= waited < 20)
END
still <<'END'
after 3 s: is_locked True
3 s more: TimeOutError
granted, after 11 s or a little more: True
END
