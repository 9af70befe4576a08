package pgfence

import (
	"context"
	"sync"
)

// leaseContext ends with its parent or with the lease, and then its Err is the loss. (Contexts have had causes of their
// own only since Go 1.20.)
type leaseContext struct {
	context.Context
	cancel context.CancelFunc
	parent context.Context
	lease  *holding
	once   sync.Once
	err    error
}

// under returns a context that a loss of the lease ends. Once it is of no more use, forget it.
func (h *holding) under(parent context.Context) (ctx *leaseContext, forget func()) {
	inner, cancel := context.WithCancel(parent)
	ctx = &leaseContext{Context: inner, cancel: cancel, parent: parent, lease: h}
	leave, isLost := h.interrupts(cancel)
	if isLost {
		cancel()
	}
	return ctx, func() {
		leave()
		cancel()
	}
}

// Err returns the loss where there is one.
func (c *leaseContext) Err() error {
	err := c.Context.Err()
	if err == nil {
		return nil
	}
	// It must not change any more once it has been told.
	c.once.Do(func() {
		c.err = err
		if loss := c.lease.loss.Load(); loss != nil {
			c.err = loss
		}
	})
	return c.err
}

// Value leaves out the inner context: contexts made from this one are to end with this one's Err, and not with its.
func (c *leaseContext) Value(key any) any { return c.parent.Value(key) }
