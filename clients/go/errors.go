package pgfence

import (
	"cmp"
	"context"
	"crypto/tls"
	"database/sql"
	"database/sql/driver"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Kind is what an [Error] is about, to be asked for by errors.Is.
type Kind string

// The kinds of errors.
const (
	LeaseTaken      Kind = "lease taken"      // somebody else has it: Holder, at most for Remaining
	LeaseLost       Kind = "lease lost"       // it is ours no more: stop, and report no failure
	Refused         Kind = "refused"          // a write, a guard or a call: SQLState, Detail, Hint
	TransactionLost Kind = "transaction lost" // nothing has landed, unless InDoubt; the lease may live
	NotInstalled    Kind = "not installed"    // the extension is not there, or not on the search_path
	NotGranted      Kind = "not granted"      // the role may not use the lease
	NoConnection    Kind = "no connection"    // to the server, in time: nothing was sent
	NoAnswer        Kind = "no answer"        // in time: with InDoubt a grant may be there
	Closed          Kind = "closed"           // the fence is
)

// Error makes a Kind something that errors.Is can look for.
func (k Kind) Error() string { return string(k) }

// Reason is why a lease was lost.
type Reason string

// The reasons of a loss.
const (
	ReasonDeadline  Reason = "deadline"  // it could not be renewed in time
	ReasonGone      Reason = "gone"      // the server says so: taken over, revoked, expired
	ReasonRefused   Reason = "refused"   // the server will never renew it for this caller
	ReasonSession   Reason = "session"   // the connection of a session lease has ended
	ReasonHeartbeat Reason = "heartbeat" // the heartbeat has failed
	ReasonAtMost    Reason = "at_most"   // it was to be held no longer
	ReasonReleased  Reason = "released"  // its holder gave it back
)

// Error is whatever pg_fence and its client refuse or tell. Ask for its kind by errors.Is(err,
// pgfence.LeaseLost), and for the rest by errors.As. It wraps the driver's error. Of its fields
// those are set that apply, and can be seen.
type Error struct {
	Kind      Kind
	Names     []string
	Reason    Reason
	Holder    string
	Remaining time.Duration
	// WaitsFor is what ends a lease that is taken: "ttl", "commit" (of its acquire), "guard".
	WaitsFor string
	// InDoubt: a commit failed, or the work has committed by itself, so that it may have landed; or
	// an acquire had no answer.
	InDoubt bool
	// Detail has presented, stored, lease, holder…; a token is a json.Number, which is exact.
	Detail         map[string]any
	SQLState, Hint string

	message string
	cause   error
}

func (e *Error) Error() string { return cmp.Or(e.message, string(e.Kind)) }

// Unwrap returns the driver's error, or nil.
func (e *Error) Unwrap() error { return e.cause }

// Is lets errors.Is ask for the kind.
func (e *Error) Is(target error) bool { return target == e.Kind }

func tell(kind Kind, cause error, format string, args ...any) *Error {
	return &Error{Kind: kind, message: fmt.Sprintf(format, args...), cause: cause}
}

func lostBy(reason Reason, advice string, names ...string) *Error {
	told := tell(LeaseLost, nil, "the lease %s is lost (%s)", strings.Join(names, ", "), reason)
	if told.Reason, told.Names = reason, names; advice != "" {
		told.message += ": it is another role's; " + anotherRole
	}
	return told
}

func takenBy(
	holder string, left time.Duration, waitsFor string, cause error, names ...string,
) *Error {
	told := tell(LeaseTaken, cause, "the lease %s is taken", strings.Join(names, ", "))
	told.Names, told.Holder, told.Remaining, told.WaitsFor = names, holder, left, waitsFor
	if holder != "" {
		told.message += " by " + holder
	}
	switch {
	case waitsFor == "commit":
		told.message += ", whose acquire is not committed yet"
	case waitsFor == "guard":
		told.message += ", until a transaction ends that guards it: its ttl is over"
	case left > 0:
		told.message += fmt.Sprintf(", for %v at the most unless it is renewed", left)
	}
	return told
}

// refusal is the error of an acquire.
func (a *acquire) refusal(e effect) error {
	switch Kind(e.Error) {
	case "LeaseTaken":
		return takenBy(e.Holder, span(e.Remaining), e.WaitsFor, nil, a.names...)
	case "LeaseLost":
		if e.Reason != ReasonRefused || a.cause == nil {
			return lostBy(e.Reason, e.Advice, a.names...)
		}
	case "Closed":
		return &Error{Kind: Closed}
	case "NoConnection":
		return a.unanswered(NoConnection, e, "no connection to the server")
	case "NoAnswer":
		return a.unanswered(NoAnswer, e, "the server has not answered in time")
	}
	switch state := stateOf(a.cause); {
	case e.Error == "LeaseLost" && a.isOpening:
		return a.unanswered(NoConnection, effect{SQLState: state}, "no connection to the server")
	case a.table != "" && state == "42501":
		const message = "the role %s may not keep rows of %s, for which it needs SELECT and UPDATE: %v"
		return tell(NotGranted, a.cause, message, a.role, a.names[0], a.cause)
	case a.table != "" && state == "3F000":
		// The table's schema is not there.
		return a.cause
	}
	return typed(a.cause, false, a.role)
}

// unanswered has no cause that could be taken for a deadline of the caller's.
func (a *acquire) unanswered(kind Kind, e effect, message string) *Error {
	told := tell(kind, nil, "%s", message)
	if told.InDoubt, told.SQLState = e.InDoubt, e.SQLState; a.cause != nil {
		told.message += ": " + a.cause.Error()
		if !isOfContext(a.cause) {
			told.cause = a.cause
		}
	}
	return told
}

func isAnyOf(err error, targets ...error) bool {
	return slices.ContainsFunc(targets, func(target error) bool { return errors.Is(err, target) })
}

func isOfContext(err error) bool {
	return isAnyOf(err, context.Canceled, context.DeadlineExceeded)
}

// serverError is that of pgx or of lib/pq.
type serverError interface {
	error
	SQLState() string
}

// stateOf is the SQLSTATE, however deep it is wrapped; "" where there is none.
func stateOf(err error) string {
	var server serverError
	if errors.As(err, &server) {
		return server.SQLState()
	}
	return ""
}

// codeOfOpening is the SQLSTATE of what has failed to open a connection; "connect", if another try
// may open it; else "misconfigured".
func codeOfOpening(err error) string {
	var network net.Error
	mayPass := sessionEnded(err) || errors.As(err, &network) || errors.Is(err, context.Canceled)
	switch state := stateOf(err); {
	case state != "":
		return state
	case mayPass && !neverOpens(err):
		return "connect"
	}
	return "misconfigured"
}

// neverOpens tells that the driver says of all its tries that no other one will succeed.
func neverOpens(err error) bool {
	switch err := err.(type) {
	case nil:
		return false
	case *tls.CertificateVerificationError, *pgconn.ParseConfigError:
		return true
	case interface{ Unwrap() []error }:
		return !slices.ContainsFunc(err.Unwrap(), func(err error) bool { return !neverOpens(err) })
	case interface{ Unwrap() error }:
		return neverOpens(err.Unwrap())
	}
	// It has no type.
	return err.Error() == "server refused TLS connection"
}

// sessionEnded tells whether the error says that a session has ended, or that there was none.
func sessionEnded(err error) bool {
	if state := stateOf(err); state != "" {
		// Idle in transaction, transaction_timeout, terminated, crashed, starting, idle, too many
		// connections.
		return hasAnyPrefix(state, "25P03", "25P04", "57P01", "57P02", "57P03", "57P05", "53300", "08")
	}
	var network *net.OpError
	var connecting *pgconn.ConnectError
	var ofHTTP *url.Error
	isOurs := !isOfContext(err) && !errors.As(err, &ofHTTP) && !neverOpens(err)
	return isOurs && (pgconn.SafeToRetry(err) ||
		pgconn.Timeout(err) || errors.As(err, &network) || errors.As(err, &connecting) ||
		isAnyOf(err, io.ErrUnexpectedEOF, driver.ErrBadConn, sql.ErrConnDone))
}

// isInterrupted tells what comes of a context that has ended: lib/pq returns the server's answer to
// its cancel.
func isInterrupted(err error) bool {
	isOver := isAnyOf(err, sql.ErrTxDone, pgx.ErrTxClosed)
	return isOver || isOfContext(err) || stateOf(err) == "57014"
}

// typed is what an error means, of one of our own statements or of the work's.
func typed(err error, isOfWork bool, role string) error {
	var told *Error
	state := stateOf(err)
	switch {
	case errors.As(err, &told), isOfWork && !hasAnyPrefix(state, "PF"), state == "55P03":
	case state == "42883", state == "3F000":
		return tell(NotInstalled, err, "pg_fence is not installed in this database, or not on the "+
			"search_path: CREATE EXTENSION pg_fence, or name the schema that it is in, "+
			"pgfence.InSchema(…) (%v)", err)
	case state == "42501":
		role, level, message := cmp.Or(role, "…"), "", err.Error()
		if strings.Contains(message, "lease_adopt") {
			level = ", 'adopter'"
		}
		remedy := "an administrator grants it: SELECT fence_grant('" + role + "'" + level + ")"
		if strings.Contains(message, "was granted to another role") {
			remedy = anotherRole
		}
		return tell(NotGranted, err, "the role %s may not use the lease: %v; %s", role, err, remedy)
	case hasAnyPrefix(state, "PF", "22", "55", "0A", "53"):
		return refused(err, state)
	}
	return err
}

// anotherRole is the remedy where the login role changes while a lease is held.
const anotherRole = "a lease is used by the role that acquired it, and by its members: " +
	"where login roles change, let all of them act as one role (options=-c role=…, or SET ROLE)"

func failedInside(cause error) error {
	const message = "a statement of the transaction has failed, and all of it is rolled back"
	return tell(TransactionLost, cause, message)
}

func endedInside() error {
	const message = "the work has ended the transaction itself: what it did after that was not guarded"
	return &Error{Kind: TransactionLost, InDoubt: true, message: message}
}

func refused(err error, state string) *Error {
	var server serverError
	var has struct{ Message, Detail, Hint string }
	errors.As(err, &server)
	// The drivers' types have these fields alike.
	text, _ := json.Marshal(server)
	_ = json.Unmarshal(text, &has)
	told := tell(Refused, err, "%s", cmp.Or(has.Message, err.Error()))
	if told.SQLState, told.Hint = state, has.Hint; has.Hint != "" {
		told.message += " (" + has.Hint + ")"
	}
	// Numbers are tokens, which a float64 would round.
	decoder := json.NewDecoder(strings.NewReader(has.Detail))
	decoder.UseNumber()
	_ = decoder.Decode(&told.Detail)
	return told
}
