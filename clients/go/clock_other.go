//go:build !linux

package pgfence

import "time"

var start = time.Now()

// now is the time since the start of the process, on a clock that nobody can set.
func now() time.Duration {
	return time.Since(start)
}
