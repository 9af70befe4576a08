#!/bin/bash
# filespooler 1.2.2 (Debian 12, job queue of files): what a sender sends that has lost its counter is never run, and
# nobody is told.
#
# Guess: jobs are numbered by their sender, to be run in order. If a sender was set up anew and begins again at one, the
#   queue runs its jobs, or says that it has had these numbers, by a line or by its exit status.
# Seen: the queue waits for number four. One to three are left where they are: queue-process prints nothing and ends with
#   0, as if the queue were empty. Number four, when the sender has got there, is run, as the first of them.
. "$(dirname "$0")/lib.sh"
apt_unpack filespooler=1.2.2-2+b2
cd "$work"
send() { echo "$1" | fspl prepare -s counter -i - | fspl queue-write -q queue; }
process() { fspl queue-process -q queue sed -- 's/^/run: /'; echo "queue-process: status $?; in the queue: $(fspl queue-ls -q queue | grep -c fspl-)"; }
{
  fspl queue-init -q queue
  for job in one two three; do send "$job"; done
  process
  rm counter
  for job in 'new one' 'new two' 'new three'; do send "$job"; done
  process
  send 'new four'
  process
} > seen 2>&1
still <<'END'
run: one
run: two
run: three
queue-process: status 0; in the queue: 0
queue-process: status 0; in the queue: 3
run: new four
queue-process: status 0; in the queue: 3
END
