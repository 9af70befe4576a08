#!/bin/bash
# lockfile-progs 0.1.19 with liblockfile 1.17 (Debian 12): lockfile-check says "valid" of what lockfile-create takes.
#
# Guess: the two share one rule: a lock that was not touched for five minutes is stale, so the check fails and
#   the create succeeds.
# Seen: the check is happy with a lock of any age (here an hour), while lockfile-create takes it at the first
#   try. "Check that my lock is still mine" by lockfile-check is a check that the file exists.
. "$(dirname "$0")/lib.sh"
apt_unpack lockfile-progs=0.1.19 liblockfile-bin=1.17-1+b1 liblockfile1=1.17-1+b1
cd "$work"
ask() { "$@" > /dev/null 2>&1 && echo "$*: 0" || echo "$*: $?"; }
{
  ask lockfile-create -r 0 job
  ask lockfile-check job
  ask lockfile-create -r 0 job
  touch -d "1 hour ago" job.lock
  echo "an hour later, never touched"
  ask lockfile-check job
  ask lockfile-create -r 0 job
} > "$work/seen"
still <<'END'
lockfile-create -r 0 job: 0
lockfile-check job: 0
lockfile-create -r 0 job: 4
an hour later, never touched
lockfile-check job: 0
lockfile-create -r 0 job: 0
END
