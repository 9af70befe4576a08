//go:build !linux

package pgfence

import "time"

var start = time.Now()

// now returns the time of a clock that nobody can set.
func now() time.Duration { return time.Since(start) }
