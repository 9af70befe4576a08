#!/bin/bash
# named-semaphores 1.0.3 (PyPI, POSIX semaphores): when the process that made a semaphore ends, the next one makes another.
#
# Guess: LINK_OR_CREATE gives all processes one semaphore, whoever comes first; a with block excludes the others.
# Seen: the object that made it unlinks the name when it is collected, while others still hold or wait. A third
#   process creates a new semaphore of that name and is granted beside the second, who has the old one.
. "$(dirname "$0")/lib.sh"
pip_install named-semaphores==1.0.3 posix-ipc==1.3.2 typing-extensions==4.12.2
cat > "$work/member.py" <<'END'
import logging, os, sys, time
logging.disable()
from named_semaphores import semaphore as module
name, who, begin, end = sys.argv[1:]
semaphore = module.NamedSemaphore(name, handle_existence=module.NamedSemaphore.Flags.LINK_OR_CREATE)
open(who + ".has-opened", "w").close()
while begin != "-" and not os.path.exists(begin):
    time.sleep(0.05)
with semaphore:
    print(who, "begins", flush=True)
    open(who + ".begun", "w").close()
    while end != "-" and not os.path.exists(end):
        time.sleep(0.05)
    print(who, "ends", flush=True)
END
cd "$work"
name=finding-$(python3 -c 'import uuid; print(uuid.uuid4().hex)')
member() { timeout 60 "$work/python/bin/python" -W ignore member.py "$name" "$@"; }
{
  member first - second.has-opened & first=$!
  until [ -e first.has-opened ]; do sleep 0.05; done
  member second - third.done &
  wait "$first"
  until [ -e second.begun ]; do sleep 0.05; done
  member third - second.begun
  touch third.done
  wait
} > "$work/seen" 2>&1
still <<'END'
first begins
first ends
second begins
third begins
third ends
second ends
END
