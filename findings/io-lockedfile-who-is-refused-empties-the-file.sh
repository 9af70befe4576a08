#!/bin/bash
# IO::LockedFile 0.23 (Debian libio-lockedfile-perl): whoever asks for a file that is locked has emptied it already.
#
# Guess: `new IO::LockedFile(">report")`, first on its page, opens the file when its lock is had: until then the
#   holder's file is as the holder left it. With `block => 0` a taken file gives undef and nothing else happens.
# Seen: ">" truncates as the file is opened, and the lock comes after that. One who is refused, or who waits, has cut
#   off what the holder wrote; the holder writes on where it was, and the file begins with a hole of zero bytes.
. "$(dirname "$0")/lib.sh"
apt_unpack libio-lockedfile-perl=0.23+d030220-5
export PERL5LIB="$work/debian/usr/share/perl5"
cd "$work"
cat > hold.pl <<'END'
use IO::LockedFile; use IO::Handle;
my $file = IO::LockedFile->new(">report");
$file->print("first half\n"); $file->flush;
open my $go, "<", "go"; <$go>;
$file->print("second half\n");
END
cat > try.pl <<'END'
use IO::LockedFile;
print IO::LockedFile->new({block => 0}, ">report") ? "granted\n" : "refused\n";
END
show() { echo "$1: $(stat -c %s report) bytes, $(tr -d '\0' < report | tr '\n' ';')"; }
mkfifo go
{
  perl hold.pl & holder=$!
  until [ -s report ]; do sleep 0.1; done
  show "the holder is half way"
  perl try.pl
  show "after that"
  echo > go; wait "$holder"
  show "the holder has ended"
} > "$work/seen" 2>&1
still <<'END'
the holder is half way: 11 bytes, first half;
refused
after that: 0 bytes, 
the holder has ended: 23 bytes, second half;
END
