#!/bin/bash
# exclusiveprocess 0.9.4 (PyPI): a forked child that exits removes its living parent's lock.
#
# Guess: Lock().forever() holds for the lifetime of the process that called it, whose pid is in the lock file.
# Seen: "forever" is a function at exit that deletes the file, and a fork inherits it. The first child that
#   leaves by sys.exit() takes the lock file with it, and a second copy of the program starts beside the first.
. "$(dirname "$0")/lib.sh"
pip_install exclusiveprocess==0.9.4
cd "$work"
python > "$work/seen" <<'END' || true
import os, subprocess, sys, uuid
from exclusiveprocess import Lock
name = "finding-" + uuid.uuid4().hex
def another_process():
    return subprocess.run([sys.executable, "-c", f"""
from exclusiveprocess import CannotAcquireLock, Lock
try:
    with Lock(name={name!r}): print("granted")
except CannotAcquireLock: print("refused")"""], capture_output=True, text=True).stdout.strip()
Lock(name=name).forever()
print("another process:", another_process(), flush=True)
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
print("a child has come and gone; another process:", another_process())
END
still <<'END'
another process: refused
a child has come and gone; another process: granted
END
