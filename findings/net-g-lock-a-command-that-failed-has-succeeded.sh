#!/bin/bash
# net of Samba 4.17.12 (Debian 12), "net g_lock do": it ends with 0 if its command has failed, and not if it was killed.
#
# Guess: "net g_lock do NAME TIMEOUT COMMAND" runs a command under a lock of the cluster and ends as the command did, as
#   flock does, so that "&&" and cron see a failure. Or it ends with 0 whenever the lock was had.
# Seen: what wait(2) said is handed to exit(2), which takes its low eight bits. A status of 1, 3 or 127 is in the upper
#   ones, so each of them becomes 0. The number of a signal is in the lower ones: a command that was killed ends with 9.
. "$(dirname "$0")/lib.sh"
apt_unpack 'samba-common-bin=2:4.17.12*' 'samba-libs=2:4.17.12*' libtalloc2 libtdb1 libtevent0 \
  libldb2 libwbclient0 libcups2 libjansson4 libpopt0 libbsd0 libldap-2.5-0 libgnutls30 libncurses6 libavahi-client3 \
  libavahi-common3 libdbus-1-3 libicu72 liblmdb0 libkrb5-3 libsasl2-2 libacl1 libgssapi-krb5-2 libk5crypto3 \
  libkrb5support0 libkeyutils1 libcom-err2 libtirpc3 libtasn1-6 libp11-kit0 libidn2-0 libunistring2 libnettle8 \
  libhogweed6 libgmp10 libffi8 libsystemd0 libcap2 libgcrypt20 libgpg-error0 libmd0 libreadline8 libtinfo6 liblz4-1
library=$work/debian/usr/lib/$(uname -m)-linux-gnu
export LD_LIBRARY_PATH=$library:$library/samba:$work/debian/lib/$(uname -m)-linux-gnu
cd "$work"
mkdir samba
printf '%s\n' '[global]' "lock directory = $work/samba" "state directory = $work/samba" \
  "cache directory = $work/samba" "private directory = $work/samba" "pid directory = $work/samba" > smb.conf
locked() {
  net -s smb.conf g_lock do report "$1" "$2" 2> errors && status=0 || status=$?
  echo "$2: $status"
}
{
  for command in true 'exit 1' 'exit 3' no-such-command 'kill -9 $$'; do locked 5 "$command"; done
  net -s smb.conf g_lock do report 5 'touch begun; sleep 5' > first 2>&1 &
  until [ -e begun ]; do sleep 0.1; done
  locked 1 'echo not run'
  wait
} > seen
still <<'END'
true: 0
exit 1: 0
exit 3: 0
no-such-command: 0
kill -9 $$: 9
echo not run: 255
END
