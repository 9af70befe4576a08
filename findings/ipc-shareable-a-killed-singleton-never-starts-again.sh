#!/bin/bash
# IPC::Shareable 1.13 (Debian 12): a singleton that was stopped by a signal cannot be started again, and nobody says so.
#
# Guess: IPC::Shareable->singleton("name") lets one instance of a script run at a time. Once it was killed there is
#   none, so the next one runs; if it cannot, it says so, or its exit status does.
# Seen: the sign of an instance is a segment of shared memory, which outlives its process. Only an orderly end removes
#   it. After a SIGTERM, as each service manager sends it, or a kill by the OOM killer every later start ends at once,
#   with no word and status 0, until somebody removes the segment by hand or the machine is started anew.
. "$(dirname "$0")/lib.sh"
apt_unpack libipc-shareable-perl=1.13-1 libstring-crc32-perl=2.100-2 libjson-perl=4.10000-1
export PERL5LIB="$work/debian/usr/share/perl5:$(echo "$work"/debian/usr/lib/*-linux-gnu/perl5/*)"
cd "$work"
cat > once.pl <<'END'
use IPC::Shareable;
$| = 1;
my ($key, $name, $wait) = @ARGV;
IPC::Shareable->singleton($key);
print "$name runs\n";
if ($wait) { open my $begun, ">", "begun"; close $begun; open my $go, "<", "go"; <$go> }
END
cat > remove.pl <<'END'
use IPC::Shareable;
tie my $mark, "IPC::Shareable", {key => $ARGV[0]} or die;
tied($mark)->remove;
END
mkfifo go
{
  for signal in none TERM KILL; do
    key=$work-$signal
    perl once.pl "$key" "the first one" 1 & first=$!
    until [ -e begun ]; do sleep 0.1; done; rm begun
    if [ "$signal" = none ]; then echo > go; else kill "-$signal" "$first"; fi
    wait "$first" 2> /dev/null || true
    echo "ended, signal: $signal"
    perl once.pl "$key" "the second one" && echo "the second one's status: 0"
    if [ "$signal" != none ]; then perl remove.pl "$key"; perl once.pl "$key" "the segment is removed, the third one"; fi
  done
} > "$work/seen" 2>&1
still <<'END'
the first one runs
ended, signal: none
the second one runs
the second one's status: 0
the first one runs
ended, signal: TERM
the second one's status: 0
the segment is removed, the third one runs
the first one runs
ended, signal: KILL
the second one's status: 0
the segment is removed, the third one runs
END
