#!/bin/bash
# TclX 8.4.1 (Tcl, Debian 12): its "flock" and the shell's flock(1) are granted side by side on one file.
#
# Guess: a Tcl script and a shell script that both lock job.lock, by TclX's flock and by flock(1), exclude each other;
#   the lock is the open file's, so it stays until that is closed or unlocked.
# Seen: TclX's flock is fcntl(2). flock(1) does not see it, nor the other way round; only TclX refuses TclX. And it is
#   the process's lock on the file, not the channel's: a glance into the file, by a second channel that is closed again,
#   is the end of it, and the holder is told nothing.
. "$(dirname "$0")/lib.sh"
apt_unpack tclx8.4=8.4.1-4 tcl8.6 libtcl8.6
cd "$work"
export TCL_LIBRARY=$work/debian/usr/share/tcltk/tcl8.6 TCLX_LIBRARY=$work/debian/usr/lib/tclx8.4
cat > try.tcl <<'END'
load debian/usr/lib/libtclx8.4.so.0 Tclx
set file [open job.lock w+]
puts "[lindex $argv 0]: a Tcl script [expr {[flock -write -nowait $file] ? {is granted} : {is refused}}]"
END
cat > hold.tcl <<'END'
load debian/usr/lib/libtclx8.4.so.0 Tclx
proc try {while} {
    puts [exec tclsh8.6 try.tcl $while]
    puts "$while: flock(1) [expr {[catch {exec flock -n job.lock true}] ? {is refused} : {is granted}}]"
}
set file [open job.lock w+]
flock -write -nowait $file
try "a Tcl script holds it"
set again [open job.lock]
gets $again
close $again
try "the holder has looked into the file"
END
{
  tclsh8.6 hold.tcl
  flock job.lock sh -c 'tclsh8.6 try.tcl "flock(1) holds it"
    flock -n job.lock true || echo "flock(1) holds it: flock(1) is refused"'
} > seen 2>&1
still <<'END'
a Tcl script holds it: a Tcl script is refused
a Tcl script holds it: flock(1) is granted
the holder has looked into the file: a Tcl script is granted
the holder has looked into the file: flock(1) is granted
flock(1) holds it: a Tcl script is granted
flock(1) holds it: flock(1) is refused
END
