#!/bin/bash
# File::NFSLock 1.29 (Perl, Debian 12): a lock that goes stale while somebody waits for it does not fall to the waiter.
#
# Guess: with stale_lock_timeout => 3 and blocking_timeout => 8 a waiter gets the lock of a hung holder three
#   seconds after that took it.
# Seen: the age is looked at once, before the wait begins. The waiter, who came a second early, waits all its
#   eight seconds and gives up on a lock of ten, while one who comes along at that moment is granted at once.
. "$(dirname "$0")/lib.sh"
apt_unpack libfile-nfslock-perl=1.29-2
cd "$work"
export PERL5LIB="$work/debian/usr/share/perl5"
cat > try.pl <<'END'
use strict; use File::NFSLock qw(uncache); use Fcntl qw(LOCK_EX LOCK_NB);
my ($name, $wait, $stay) = @ARGV;
$| = 1;
my $began = time;
my $lock = File::NFSLock->new({file => "job", lock_type => $wait ? LOCK_EX : LOCK_EX|LOCK_NB,
    blocking_timeout => $wait, stale_lock_timeout => 3});
my $waited = time - $began;
print "$name: ", $lock ? "granted" : "refused, $File::NFSLock::errstr", $waited >= 8 ? " after 8 s or more\n" : "\n";
sleep $stay if $stay;
kill "KILL", $$ if $stay;
END
{
  perl try.pl "the holder, which hangs" 8 30 & holder=$!
  until [ -e job.NFSLock ]; do sleep 0.1; done; sleep 1
  perl try.pl "waits from its second second on" 8 0
  perl try.pl "comes along now" 0 0
  kill -KILL "$holder"; wait "$holder" || true
} > "$work/seen" 2> /dev/null
still <<'END'
the holder, which hangs: granted
waits from its second second on: refused, Timed out waiting for blocking lock after 8 s or more
comes along now: granted
END
