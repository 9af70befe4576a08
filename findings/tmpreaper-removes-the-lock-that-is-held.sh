#!/bin/bash
# tmpreaper 1.6.17 with flock of util-linux 2.38.1 (both of Debian 12): a lock file that is in use each minute counts as
# unused, and is removed while it is held.
#
# Guess: tmpreaper removes what nobody has used for some time. A lock file that a job locks every minute is in use, and
#   stays; at the least it stays while it is locked.
# Seen: flock neither reads nor writes the file, so its times are those of the day on which it was made. Once these are
#   old enough it is removed, with its lock held. The next job makes a new file of that name, and is granted its lock
#   beside the first one. A file that somebody writes to stays.
. "$(dirname "$0")/lib.sh"
apt_unpack tmpreaper=1.6.17 util-linux='2.38.1-5+deb12u*'
cd "$work"
mkdir tmp
work_until() { echo "$1 is at work"; until [ -e "$2" ]; do sleep 0.1; done; echo "$1 ends"; }
export -f work_until
next() { flock -n tmp/job.lock bash -c 'echo "the next one is granted the lock"' || echo "the next one is refused"; }
{
  for _ in $(seq 10); do
    flock tmp/job.lock true
    echo >> tmp/written
    sleep 0.5
  done
  flock tmp/job.lock bash -c 'work_until "the first one" over' & first=$!
  sleep 0.5
  next
  tmpreaper --mtime 3s "$work/tmp" > log 2>&1
  echo "left by tmpreaper: $(ls tmp | xargs)"
  next
  touch over
  wait "$first"
} > seen
still <<'END'
the first one is at work
the next one is refused
left by tmpreaper: written
the next one is granted the lock
the first one ends
END
