package pgfence

import (
	"syscall"
	"time"
	"unsafe"
)

var start = time.Now()

// now returns the time of CLOCK_BOOTTIME (7), which nobody can set, and which goes on while the
// machine sleeps. The clock of package time does not.
func now() time.Duration {
	var read syscall.Timespec
	into := uintptr(unsafe.Pointer(&read))
	if _, _, no := syscall.RawSyscall(syscall.SYS_CLOCK_GETTIME, 7, into, 0); no != 0 {
		// If a sandbox refuses this call, it refuses each, so the two clocks are never mixed.
		return time.Since(start)
	}
	return time.Duration(read.Nano())
}
