#!/bin/bash
# flockfile 0.2.3 (PyPI): after a refused lock() check_lock() says True, and its unlock() lets a third one in.
#
# Guess: check_lock(), "returns true if locked, false if not", is False of an object whose lock() raised; its
#   unlock() only warns that there is nothing to do.
# Seen: the file is opened and noted before the lock is tried, and check_lock() asks whether it is open. unlock(),
#   in a "finally" say, deletes the file, which is the holder's: the next one locks a new file of that name.
. "$(dirname "$0")/lib.sh"
pip_install flockfile==0.2.3
cd "$work"
python > "$work/seen" <<'END' || true
from flockfile import FileNotLocked, FlockFile
holder, second, third = (FlockFile("job.lock", lock_dir=".") for _ in range(3))
holder.lock()
try:
    second.lock()
except FileNotLocked:
    print("second: refused; check_lock:", second.check_lock())
try:
    third.lock()
except FileNotLocked:
    print("third: refused")
second.unlock()
third.lock()
print("second unlocked; third: granted; the holder still at work, check_lock:", holder.check_lock())
third.unlock()
END
still <<'END'
second: refused; check_lock: True
third: refused
second unlocked; third: granted; the holder still at work, check_lock: True
END
