#!/bin/bash
# sing 0.1.5 (PyPI, a single process of a script): once a process was killed, every later one is the single one.
#
# Guess: a pid file of a process that is gone is stale. The next process takes it over, with its own pid, and the ones
#   after it are refused until that one ends.
# Seen: the next process removes the stale file, is told that it is single, and writes none of its own. So there is
#   nothing for the one after it to see: it is single too, at the same time.
. "$(dirname "$0")/lib.sh"
pip_install sing==0.1.5 psutil==6.1.1
cd "$work"
export TMPDIR=$work
cat > job.py <<'END'
import sys, time
from sing import single
print(f"{sys.argv[1]}: single is {single()}", flush=True)
time.sleep(60)
END
{
  for round in "in order" "after a crash"; do
    echo "$round"
    for name in first second third; do
      python/bin/python job.py $name & eval "$name=$!"
      sleep 2
      if [ "$round $name" = "after a crash first" ]; then
        kill -KILL "$first"; wait "$first" || true; echo "first: killed"
      fi
    done
    kill -KILL "$first" "$second" "$third" 2> killed || true
    wait || true
    rm ./*.pid
  done
} > seen 2> errors
still <<'END'
in order
first: single is True
second: single is False
third: single is False
after a crash
first: single is True
first: killed
second: single is True
third: single is True
END
