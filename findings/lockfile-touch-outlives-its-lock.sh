#!/bin/bash
# lockfile-progs 0.1.19 (Debian 12): the heartbeat goes on, in silence, when its lock has been taken away.
#
# Guess: "lockfile-touch" in the background, which touches the lock each minute, ends with an error once the
#   lock file is gone; its end is the sign that the lock is lost.
# Seen: two of its beats later it still runs and has printed nothing, though there is no file to touch. Whoever
#   watches the heartbeat's process to learn of a loss learns nothing.
. "$(dirname "$0")/lib.sh"
apt_unpack lockfile-progs=0.1.19 liblockfile-bin=1.17-1+b1 liblockfile1=1.17-1+b1
cd "$work"
{
  lockfile-create -r 0 job
  lockfile-touch job & beat=$!
  sleep 1; lockfile-remove job
  sleep 125; kill -0 "$beat" && echo "two minutes after the lock was removed, the heartbeat lives"
  [ -e job.lock ] || echo "and there is no lock file"
} > "$work/seen" 2>&1
still <<'END'
two minutes after the lock was removed, the heartbeat lives
and there is no lock file
END
