#!/bin/bash
# instance-checker 0.4.3 (PyPI, counts the running instances of a program by lock files): a lock ends as it is granted.
#
# Guess: acquire_pid_file() returns the path and the descriptor of a locked file. While the process lives, others see by
#   is_released_pid_file() that the file is not free; that is how they tell a running instance from what a crash left.
# Seen: the file object ends with the function, and Python closes its descriptor with it: what is returned is the number
#   of a file that is closed. For everybody else each running instance looks like one that has crashed.
. "$(dirname "$0")/lib.sh"
pip_install instance-checker==0.4.3 psutil==7.0.0
python "$work" > "$work/seen" <<'END' || true
import os, subprocess, sys
from instance_checker import CountHelper
helper = CountHelper(lock_dir=sys.argv[1])
path, descriptor = helper.acquire_pid_file("report.lock.1")
ask = "import sys; from instance_checker import CountHelper; print(CountHelper(lock_dir=sys.argv[1])" \
    ".is_released_pid_file('report.lock.1'))"
def another_process_asks(): return subprocess.run([sys.executable, "-c", ask, sys.argv[1]], text=True,
                                                  stdout=subprocess.PIPE).stdout.strip()
print("instances, by their files:", helper.pid_file_count("report"))
print("another process, while this one lives: released is", another_process_asks())
try:
    os.fstat(descriptor)
    print("the descriptor is open")
except OSError as error:
    print("the descriptor:", error.strerror)
with open(path, "r+") as file:
    os.lockf(file.fileno(), os.F_LOCK, 0)
    print("another process, with the file locked by hand: released is", another_process_asks())
END
still <<'END'
instances, by their files: 1
another process, while this one lives: released is True
the descriptor: Bad file descriptor
another process, with the file locked by hand: released is False
END
