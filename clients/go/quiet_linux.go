package pgfence

import (
	"net"
	"syscall"
)

// isQuiet reports whether a connection has nothing to read, not even its end. It does not wait.
func isQuiet(conn net.Conn) (isQuiet bool) {
	// The connection below TLS: what TLS has read already came before the end.
	if secure, ok := conn.(interface{ NetConn() net.Conn }); ok {
		conn = secure.NetConn()
	}
	socket, ok := conn.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		return false
	}
	err = raw.Control(func(fd uintptr) {
		_, _, err := syscall.Recvfrom(int(fd), make([]byte, 1), syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		isQuiet = err == syscall.EAGAIN
	})
	return err == nil && isQuiet
}
