#!/bin/bash
# fasteners 0.20 (PyPI): two InterProcessLocks on one file in one process both hold, and the first to go frees both.
#
# Guess: two objects exclude each other, in whatever processes they are; at worst the second waits in vain.
# Seen: the lock is fcntl's, one for the process and file. The second object, made by some other module or
#   thread, is granted; when it is released, its file is closed and the process has no lock any more: another
#   process gets it, while the first object still says acquired.
. "$(dirname "$0")/lib.sh"
pip_install fasteners==0.20
cd "$work"
python > "$work/seen" <<'END' || true
import subprocess, sys
import fasteners
def another_process():
    return subprocess.run([sys.executable, "-c",
        "import fasteners; print(fasteners.InterProcessLock('job.lock').acquire(blocking=False))"],
        capture_output=True, text=True).stdout.strip()
first, second = fasteners.InterProcessLock("job.lock"), fasteners.InterProcessLock("job.lock")
print("first:", first.acquire(blocking=False), "another process:", another_process())
print("second, in the same process:", second.acquire(blocking=False))
second.release()
print("second released; first.acquired:", first.acquired, "another process:", another_process())
END
still <<'END'
first: True another process: False
second, in the same process: True
second released; first.acquired: True another process: True
END
