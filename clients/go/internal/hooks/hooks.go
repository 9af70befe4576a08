// Package hooks is how the laboratory watches leases, and builds known faults into their keeping: each hook is given what
// the client does by itself.
package hooks

import "time"

// Hooks are called by a client object.
type Hooks struct {
	// Renewed is told of each renewal, and asks how long the lease is held from then.
	Renewed func(name string, token int64, remaining func() time.Duration)
	// CountsFrom says from when a ttl counts: from before the call, and not from after it.
	CountsFrom func(before, after time.Duration) time.Duration
	// IsStarved tells whether the heartbeat is to send nothing.
	IsStarved func() bool
	// Renew is the call to the server, with an answer for each of the names.
	Renew func(renew func() ([]*int64, error), names []string, tokens []int64) ([]*int64, error)
	// Watch tells losses at the deadlines.
	Watch func(watch func())
	// Adopt is the call to the server that makes a number known.
	Adopt func(adopt func() (*int64, error)) (*int64, error)
	// AdoptsAgain tells whether later transactions make it known once more.
	AdoptsAgain func() bool
}

// None leaves everything as it is.
func None() Hooks {
	return Hooks{
		Renewed:    func(string, int64, func() time.Duration) {},
		CountsFrom: func(before, _ time.Duration) time.Duration { return before },
		IsStarved:  func() bool { return false },
		Renew:      func(renew func() ([]*int64, error), _ []string, _ []int64) ([]*int64, error) { return renew() },
		Watch:      func(watch func()) { watch() },

		Adopt:       func(adopt func() (*int64, error)) (*int64, error) { return adopt() },
		AdoptsAgain: func() bool { return true },
	}
}
