package pgfence

import (
	"syscall"
	"time"
	"unsafe"
)

// bootTime is CLOCK_BOOTTIME, which nobody can set, and which goes on while the machine sleeps. Go's own monotonic
// clock stands still then.
const bootTime = 7

var start = time.Now()

// now is the time since a moment that stays the same for the whole process.
func now() time.Duration {
	var read syscall.Timespec
	_, _, failed := syscall.Syscall(syscall.SYS_CLOCK_GETTIME, bootTime, uintptr(unsafe.Pointer(&read)), 0)
	if failed != 0 {
		// A sandbox may refuse the call; it does so always, so that the two clocks are never mixed.
		return time.Since(start)
	}
	return time.Duration(read.Nano())
}
