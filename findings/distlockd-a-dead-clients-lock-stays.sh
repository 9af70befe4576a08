#!/bin/bash
# distlockd 1.0.3 (PyPI, a lock server): the lock of a client that died is never given to anybody else.
#
# Guess: its page says "Auto-timeout of stale locks", 10 seconds by default. A killed client's lock is free after 10
#   seconds, or at once, since the server sees the connection close.
# Seen: the limit is an hour in the code, no option changes it, and even then nothing happens: the task that removes
#   stale locks looks once, as the server starts, and then sleeps until the server stops. With the limit set to one
#   second by hand the lock stays as well. A lost connection means nothing to the server. Only a restart frees it.
. "$(dirname "$0")/lib.sh"
pip_install distlockd==1.0.3
cd "$work"
cat > limit_of_a_second.py <<'END'
import distlockd.cli, distlockd.server
distlockd.server.STALE_LOCK_TIMEOUT = 1
distlockd.cli.main()
END
read -r port other < <(free_ports 2)
"$work/python/bin/distlockd" server --host 127.0.0.1 --port "$port" > server.log 2>&1 &
"$work/python/bin/python" limit_of_a_second.py server --host 127.0.0.1 --port "$other" > other.log 2>&1 &
for p in $port $other; do
  wait_for_port "$p"
  { "$work/python/bin/python" -c "if True:
    import os
    from distlockd.client import Client
    if Client(host='127.0.0.1', port=$p).acquire('job', timeout=5.0): os.kill(os.getpid(), 9)" || true; } 2> /dev/null
done
sleep 15
python "$port" "$other" > "$work/seen" <<'END' || true
import logging, sys
from distlockd.client import Client
from distlockd.constants import STALE_LOCK_TIMEOUT
from distlockd.exceptions import LockAcquisitionTimeout
logging.disable()
print("limit:", STALE_LOCK_TIMEOUT, "s")
for name, port in zip(("as it comes", "with a limit of 1 s"), sys.argv[1:]):
    try:
        got = Client(host="127.0.0.1", port=int(port)).acquire("job", timeout=3.0)
    except LockAcquisitionTimeout:
        got = "refused"
    print(f"{name}, 15 s after the holder was killed: {got}")
END
still <<'END'
limit: 3600 s
as it comes, 15 s after the holder was killed: refused
with a limit of 1 s, 15 s after the holder was killed: refused
END
