#!/bin/bash
# dotlock of GNU Mailutils 3.15 (Debian 12): "dotlock -p" takes over each lock that "dotlock -p" made, and procmail's.
#
# Guess: a script locks its mbox by "dotlock -p" and works. As -p asks whether the owner lives, a second script is
#   refused while the first one lives and granted once it was killed, as with "dotlockfile -p".
# Seen: the pid in the file is dotlock's own, which has ended when the script goes on. So the check always finds a dead
#   owner, and each "dotlock -p" is granted. The 0 in the lock of procmail's lockfile counts as dead, too. Without -p,
#   or if dotlockfile has noted the script's pid, it is refused as it should be.
. "$(dirname "$0")/lib.sh"
apt_unpack mailutils=1:3.15-4 libmailutils9 procmail=3.22-27 liblockfile-bin=1.17-1+b1 liblockfile1
cd "$work"
touch mbox
hold() {
  case $1 in
  dotlock | "dotlock -p") ${1/dotlock/dotlock.mailutils} -r 1 mbox ;;
  *) $1 mbox.lock ;;
  esac
}
# The second one is another process, and this script, the first one, lives on.
export -f hold
{
  for first in "dotlock" "dotlock -p" "lockfile -r 0" "dotlockfile -l -r 0 -p"; do
    for second in "dotlock" "dotlock -p"; do
      rm -f mbox.lock
      hold "$first"
      bash -c 'hold "$0"' "$second" > said 2>&1 && got=granted || got=refused
      echo "locked by $first, a second script's $second: $got"
    done
  done
} > seen 2>&1
still <<'END'
locked by dotlock, a second script's dotlock: refused
locked by dotlock, a second script's dotlock -p: refused
locked by dotlock -p, a second script's dotlock: refused
locked by dotlock -p, a second script's dotlock -p: granted
locked by lockfile -r 0, a second script's dotlock: refused
locked by lockfile -r 0, a second script's dotlock -p: granted
locked by dotlockfile -l -r 0 -p, a second script's dotlock: refused
locked by dotlockfile -l -r 0 -p, a second script's dotlock -p: refused
END
