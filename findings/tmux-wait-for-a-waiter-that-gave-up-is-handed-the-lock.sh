#!/bin/bash
# tmux 3.3a (Debian 12), wait-for -L and -U as a lock between scripts: a waiter that gave up is handed the lock.
#
# Guess: "timeout 1 tmux wait-for -L job" that is ended while it waits has left the queue. The holder's -U hands the
#   channel to the next script that waits, or leaves it unlocked.
# Seen: the server keeps the place of the one that went. -U hands the channel to it, and says nothing: those behind it
#   wait on, and so does all who come later, with nobody at work. It takes one -U more for each that ever gave up.
. "$(dirname "$0")/lib.sh"
apt_unpack tmux=3.3a-3 libevent-core-2.1-7 libutempter0
cd "$work"
export TMUX_TMPDIR=$work
tmux() { command tmux -f /dev/null "$@"; }
lock() { timeout "$1" tmux -f /dev/null wait-for -L job && got=granted || got="gave up after $1 s"; }
tmux new-session -d "sleep 120"
{
  for before in 0 1 2; do
    lock 5; echo "$before will give up; the first one: $got"
    for _ in $(seq $before); do lock 1; echo "a waiter: $got"; done
    { lock 60; echo "the last one: $got" > last; } & last=$!
    sleep 1
    for _ in $(seq 3); do
      tmux wait-for -U job; echo "unlocked"
      sleep 1
      if [ -e last ]; then cat last; rm last; break; else echo "nobody at work, the last one waits"; fi
    done
    wait "$last"
    tmux wait-for -U job
  done
  tmux kill-server
} > seen 2>&1
still <<'END'
0 will give up; the first one: granted
unlocked
the last one: granted
1 will give up; the first one: granted
a waiter: gave up after 1 s
unlocked
nobody at work, the last one waits
unlocked
the last one: granted
2 will give up; the first one: granted
a waiter: gave up after 1 s
a waiter: gave up after 1 s
unlocked
nobody at work, the last one waits
unlocked
nobody at work, the last one waits
unlocked
the last one: granted
END
