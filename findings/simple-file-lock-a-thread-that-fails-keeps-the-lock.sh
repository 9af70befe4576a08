#!/bin/bash
# simple-file-lock 2024.1 (PyPI, locks on files among processes): a thread is refused with an error, and keeps the lock.
#
# Guess: "with FileLock(path)" locks a file against other processes, in whichever thread it is; or, if it cannot be used
#   in a thread, it raises there and leaves everything as it was.
# Seen: it announces itself by a file of its own, sets handlers for signals, which Python refuses in all threads but the
#   first, and leaves the file behind. As its process lives, nobody is granted that lock until the process has ended,
#   whose first thread waits for ever as well.
. "$(dirname "$0")/lib.sh"
pip_install simple-file-lock==2024.1 psutil==6.1.1
cd "$work"
cat > ask.py <<'END'
from simple_file_lock import FileLock
with FileLock("ledger"): print("granted")
END
cat > service.py <<'END'
import sys, threading, time
from simple_file_lock import FileLock
def work():
    try:
        with FileLock("ledger"): print("a thread: granted", flush=True)
    except Exception as error:
        print(f"a thread: {type(error).__name__}", flush=True)
def first_thread():
    with FileLock("ledger"): print("the first thread: granted", flush=True)
first_thread()
thread = threading.Thread(target=work)
thread.start()
thread.join()
open("begun", "w").close()
time.sleep(60)
END
ask() { timeout 5 python/bin/python ask.py || echo "not within 5 seconds"; }
{
  python/bin/python service.py & service=$!
  until [ -e begun ]; do sleep 0.1; done
  echo "another process: $(ask)"
  kill -KILL "$service"; wait "$service" || true
  echo "another process, the first one killed: $(ask)"
} > seen 2> errors
still <<'END'
the first thread: granted
a thread: ValueError
another process: not within 5 seconds
another process, the first one killed: granted
END
