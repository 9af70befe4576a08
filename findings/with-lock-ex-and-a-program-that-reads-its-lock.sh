#!/bin/bash
# with-lock-ex of chiark-utils 7.0.0 (Debian 12): a program that reads the locked file once has no lock any more.
#
# Guess: "with-lock-ex -w data program" holds the lock on data until the program ends; locking the very file that
#   the program works on is the natural use.
# Seen: it is a lock of fcntl's, which belongs to the process and file, not to the descriptor. When the program
#   itself opens data and closes it again, the kernel drops the lock, and the next holder comes in.
. "$(dirname "$0")/lib.sh"
apt_unpack chiark-utils-bin=7.0.0
cd "$work"
echo "1" > data
{
  for how in "read -r n < other" "read -r n < data"; do
    rm -f begun; cp data other
    with-lock-ex -w data bash -c "$how; touch begun; sleep 2" &
    until [ -e begun ]; do sleep 0.1; done
    with-lock-ex -f data true 2> /dev/null && got=granted || got="refused, status $?"
    echo "after $how: $got"
    wait
  done
} > "$work/seen" 2>&1
still <<'END'
after read -r n < other: refused, status 255
after read -r n < data: granted
END
