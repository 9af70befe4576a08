//go:build !linux

package pgfence

import "net"

// isQuiet is not known without waiting.
func isQuiet(net.Conn) bool { return false }
