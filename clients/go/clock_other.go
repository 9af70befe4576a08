//go:build !linux

package pgfence

import "time"

var start = time.Now()

// now is on a clock that nobody can set.
func now() time.Duration { return time.Since(start) }
