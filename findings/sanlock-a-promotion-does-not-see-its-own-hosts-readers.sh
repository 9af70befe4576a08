#!/bin/bash
# sanlock 3.8.5 (leases on a shared disk, Debian 12): a shared lease becomes exclusive beside a reader of the same host.
#
# Guess: "convert" makes a process's shared lease exclusive if nobody else has it shared, and is refused otherwise. It
#   is refused beside a reader on another host, and so is a plain exclusive "acquire" beside a reader of the same host.
# Seen: readers of the same host are not looked at. The writer has its exclusive lease with a new version while the
#   other process has it shared, and both are told so by the daemon that keeps the list of both. The reader's release is
#   refused from then on.
. "$(dirname "$0")/lib.sh"
apt_unpack sanlock=3.8.5-1+b1 libsanlock1=3.8.5-1+b1 libsanlock-client1=3.8.5-1+b1 libaio1=0.3.113-4
export SANLOCK_PRIVILEGED=0
cd "$work"
lease=space:job:$work/disk:1048576
on() { SANLOCK_RUN_DIR=$work/$1 timeout 30 sanlock client "${@:2}"; }
host() {
  mkdir "$1"
  SANLOCK_RUN_DIR=$work/$1 timeout -k 1 90 \
    sanlock daemon -D -w 0 -l 0 -U "$(id -un)" -G "$(id -gn)" -e "$1" > "$1.log" 2>&1 &
  for _ in $(seq 100); do [ -S "$1/sanlock.sock" ] && break; sleep 0.1; done
  on "$1" add_lockspace -s "space:$2:$work/disk:0" -o 1 > "$1.joined"
}
# A process that may have leases, on a host: its pid is kept in a variable of its name.
process() {
  SANLOCK_RUN_DIR=$work/$1 sanlock client command -c /bin/sleep 90 > process.log & declare -g "$2=$!"
  for _ in $(seq 100); do on "$1" status | grep -q "^p ${!2} " && return; sleep 0.1; done
}
do_for() { # host, who, action, lease
  echo "$2: $3${4#"$lease"} -> $(on "$1" "$3" -r "$4" -p "${!2}" | sed -n 's/.* done //p')"
}
has() { echo "$2 has $(on "$1" inquire -p "${!2}" | grep '^"' | sed "s|$work||")"; }
truncate -s 2M disk
sanlock direct init -s "space:0:$work/disk:0" -o 1 > made
sanlock direct init -r "$lease" > made
{
  host first 1
  host second 2
  process first reader
  process first writer
  process second other_hosts_reader
  echo "a reader on another host"
  do_for second other_hosts_reader acquire "$lease:SH"
  do_for first writer acquire "$lease:SH"
  do_for first writer convert "$lease"
  do_for second other_hosts_reader release "$lease"
  do_for first writer release "$lease"
  echo "a reader on the same host"
  do_for first reader acquire "$lease:SH"
  do_for first writer acquire "$lease"
  do_for first writer acquire "$lease:SH"
  do_for first writer convert "$lease"
  has first reader
  has first writer
  do_for first reader release "$lease"
} > seen 2>&1
still <<'END'
a reader on another host
other_hosts_reader: acquire:SH -> 0
writer: acquire:SH -> 0
writer: convert -> -11
other_hosts_reader: release -> 0
writer: release -> 0
a reader on the same host
reader: acquire:SH -> 0
writer: acquire -> -17
writer: acquire:SH -> 0
writer: convert -> 0
reader has "space:job:/disk:1048576:SH"
writer has "space:job:/disk:1048576:5"
reader: release -> -201
END
