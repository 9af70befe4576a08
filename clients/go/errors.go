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

// Kind is the kind of an [Error]. A program looks for it with errors.Is.
type Kind string

// The kinds of errors.
const (
	// LeaseTaken: another holder has the lease. Holder is its name, and Remaining the longest time
	// until it ends without a renewal.
	LeaseTaken Kind = "lease taken"
	// LeaseLost: the lease is lost, and another holder may have it. Stop the work, and report no
	// failure of it.
	LeaseLost Kind = "lease lost"
	// Refused: the server has refused a write, a guard or a call, with SQLState, Detail and Hint.
	Refused Kind = "refused"
	// TransactionLost: the transaction is not committed, unless it is InDoubt. The lease may still
	// be held.
	TransactionLost Kind = "transaction lost"
	// NotInstalled: the extension is not installed in the database, or not on the search_path.
	NotInstalled Kind = "not installed"
	// NotGranted: the role may not use the lease.
	NotGranted Kind = "not granted"
	// NoConnection: no connection to the server could be opened in time. No call was sent.
	NoConnection Kind = "no connection"
	// NoAnswer: the server has not answered a call in time. InDoubt: it may have granted the lease.
	NoAnswer Kind = "no answer"
	// Closed: the fence is closed.
	Closed Kind = "closed"
)

// Error makes a Kind an error, as errors.Is takes one.
func (k Kind) Error() string { return string(k) }

// Reason is why a lease is lost.
type Reason string

// The reasons of a loss.
const (
	ReasonDeadline  Reason = "deadline"  // no renewal succeeded in time
	ReasonGone      Reason = "gone"      // the server says so: taken over, revoked or expired
	ReasonRefused   Reason = "refused"   // the server will never renew the lease for this caller
	ReasonSession   Reason = "session"   // the connection of a session lease has ended
	ReasonHeartbeat Reason = "heartbeat" // the heartbeat has failed
	ReasonAtMost    Reason = "at_most"   // the time AtMost is over
	ReasonReleased  Reason = "released"  // the program has released the lease
)

// Error is an error of pg_fence or of this client. Look for its kind with errors.Is(err,
// pgfence.LeaseLost), and for its fields with errors.As. It wraps the driver's error, if there is
// one. Only the fields that apply, and that are visible to the role, are set.
type Error struct {
	Kind   Kind
	Names  []string
	Reason Reason
	Holder string
	// Remaining is how long a taken lease lasts unless it is renewed.
	Remaining time.Duration
	// WaitsFor is the end of what a taken lease waits for: its "ttl", the "commit" of its acquire,
	// or a "guard", which is a transaction.
	WaitsFor string
	// InDoubt is true if a transaction may have committed all the same: its commit has failed, or
	// the work itself has committed. Of an acquire it is true if the lease may have been granted,
	// as the server has not answered.
	InDoubt bool
	// Detail has the fields of the server's error detail, such as presented, stored, lease and
	// holder. A token in it is a json.Number, which is exact.
	Detail         map[string]any
	SQLState, Hint string

	message string
	cause   error
}

func (e *Error) Error() string { return cmp.Or(e.message, string(e.Kind)) }

// Unwrap returns the driver's error, or nil.
func (e *Error) Unwrap() error { return e.cause }

// Is reports whether target is the kind of the error, for errors.Is.
func (e *Error) Is(target error) bool { return target == e.Kind }

func newError(kind Kind, cause error, format string, args ...any) *Error {
	return &Error{Kind: kind, message: fmt.Sprintf(format, args...), cause: cause}
}

func newLeaseLost(reason Reason, advice string, names ...string) *Error {
	e := newError(LeaseLost, nil, "the lease %s is lost (%s)", strings.Join(names, ", "), reason)
	if e.Reason, e.Names = reason, names; advice != "" {
		e.message += ": it is another role's; " + anotherRole
	}
	return e
}

func newLeaseTaken(
	holder string, left time.Duration, waitsFor string, cause error, names ...string,
) *Error {
	e := newError(LeaseTaken, cause, "the lease %s is taken", strings.Join(names, ", "))
	e.Names, e.Holder, e.Remaining, e.WaitsFor = names, holder, left, waitsFor
	if holder != "" {
		e.message += " by " + holder
	}
	switch {
	case waitsFor == "commit":
		e.message += ", whose acquire is not committed yet"
	case waitsFor == "guard":
		e.message += ", until a transaction ends that guards it: its ttl is over"
	case left > 0:
		e.message += fmt.Sprintf(", for %v at the most unless it is renewed", left)
	}
	return e
}

// replyError returns the error of a failed acquire.
func (a *acquire) replyError(e effect) error {
	switch {
	case e.Error == Closed:
		return &Error{Kind: Closed}
	case e.Error == LeaseTaken:
		return newLeaseTaken(e.Holder, span(e.Remaining), e.WaitsFor, nil, a.names...)
	case e.Error == LeaseLost:
		return newLeaseLost(e.Reason, e.Advice, a.names...)
	case e.Error == NoConnection:
		return a.withoutAnswer(NoConnection, e.InDoubt, "no connection to the server")
	case e.Error == NoAnswer:
		return a.withoutAnswer(NoAnswer, e.InDoubt, "the server has not answered in time")
	}
	isOfTable := a.Table != ""
	return typed(a.cause, errorType(sqlStateOf(a.cause), isOfTable), isOfTable, a.role)
}

// withoutAnswer returns an error that does not wrap the end of a context: a caller would take it
// for a deadline of its own.
func (a *acquire) withoutAnswer(kind Kind, isInDoubt bool, message string) *Error {
	e := newError(kind, nil, "%s", message)
	if e.InDoubt = isInDoubt; a.cause != nil {
		e.message += ": " + a.cause.Error()
		if !isContextError(a.cause) {
			e.cause, e.SQLState = a.cause, sqlStateOf(a.cause)
		}
	}
	return e
}

func isAnyOf(err error, targets ...error) bool {
	return slices.ContainsFunc(targets, func(target error) bool { return errors.Is(err, target) })
}

func isContextError(err error) bool {
	return isAnyOf(err, context.Canceled, context.DeadlineExceeded)
}

// serverError is an error of the server, as pgx and lib/pq return it.
type serverError interface {
	error
	SQLState() string
}

// sqlStateOf returns the SQLSTATE of an error or of one that it wraps, or "".
func sqlStateOf(err error) string {
	var server serverError
	if errors.As(err, &server) {
		return server.SQLState()
	}
	return ""
}

// codeOf returns the SQLSTATE of an error; without one "ended" if the error says that a session has
// ended or could not be opened, else "".
func codeOf(err error) string {
	state := sqlStateOf(err)
	var network *net.OpError
	var connecting *pgconn.ConnectError
	var ofHTTP *url.Error
	isConnecting := errors.As(err, &connecting)
	// The driver's connect_timeout is the deadline of a context, too.
	isOfContext := isContextError(err) && (!isConnecting || errors.Is(err, context.Canceled))
	// The connection is busy if the work has not closed its rows.
	isBusy := err != nil && strings.Contains(err.Error(), "conn busy")
	isOurs := !isOfContext && !isBusy && !errors.As(err, &ofHTTP) && !neverOpens(err)
	if state == "" && isOurs && (isConnecting || pgconn.SafeToRetry(err) || pgconn.Timeout(err) ||
		errors.As(err, &network) ||
		isAnyOf(err, io.ErrUnexpectedEOF, driver.ErrBadConn, sql.ErrConnDone)) {
		return "ended"
	}
	return state
}

// isFatal reports whether the severity of the server's error is FATAL or PANIC.
func isFatal(err error) bool {
	var ofPgx *pgconn.PgError
	var ofPq interface{ Fatal() bool }
	var opening *pgconn.ConnectError
	if errors.As(err, &opening) {
		// The work could not open another connection.
		return false
	}
	if errors.As(err, &ofPgx) {
		// Some poolers send only the severity in the server's language.
		severity := cmp.Or(ofPgx.SeverityUnlocalized, ofPgx.Severity)
		return severity == "FATAL" || severity == "PANIC"
	}
	return errors.As(err, &ofPq) && ofPq.Fatal()
}

// openingCode returns the code of an error that has failed to open a connection: its SQLSTATE;
// without one "connect" if another attempt may succeed, else "misconfigured".
func openingCode(err error) string {
	var network net.Error
	switch code := codeOf(err); {
	case code == "ended", code == "" && !neverOpens(err) &&
		(errors.As(err, &network) || errors.Is(err, context.Canceled)):
		return "connect"
	default:
		return cmp.Or(code, "misconfigured")
	}
}

// neverOpens reports whether the driver's error says that no other attempt will succeed. If it has
// tried several hosts, that must be true of each.
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
	// The driver's error for this has no type.
	return err.Error() == "server refused TLS connection"
}

// isInterrupted reports whether the error may come from the end of a context. lib/pq returns the
// server's answer to its cancel request, 57014.
func isInterrupted(err error) bool {
	isDone := isAnyOf(err, sql.ErrTxDone, pgx.ErrTxClosed)
	return isDone || isContextError(err) || sqlStateOf(err) == "57014"
}

// typed returns the error as an [Error] of a kind of errorType's, or the error itself for "".
// isOfTable: the statement was about rows of a table.
func typed(err error, kind Kind, isOfTable bool, role string) error {
	var e *Error
	switch kind {
	case NotInstalled:
		e = newError(kind, err, "pg_fence is not installed in this database, or not on the "+
			"search_path: CREATE EXTENSION pg_fence, or name the schema that it is in, "+
			"pgfence.InSchema(…) (%v)", err)
	case NotGranted:
		role, level, message := cmp.Or(role, "…"), "", err.Error()
		if strings.Contains(message, "lease_adopt") {
			level = ", 'adopter'"
		}
		granted := role
		if strings.Trim(role, "abcdefghijklmnopqrstuvwxyz0123456789_…") != "" {
			// The server reads the text as an identifier.
			granted = strings.ReplaceAll(pgx.Identifier{role}.Sanitize(), "'", "''")
		}
		remedy := "an administrator grants it: SELECT fence_grant('" + granted + "'" + level + ")"
		switch {
		case isOfTable:
			remedy = "for rows of a table it needs SELECT and UPDATE"
		case strings.Contains(message, "was granted to another role"):
			remedy = anotherRole
		}
		e = newError(kind, err, "the role %s may not use the lease: %v; %s", role, err, remedy)
	case Refused:
		return newRefused(err)
	default:
		return err
	}
	e.SQLState = sqlStateOf(err)
	return e
}

// anotherRole is the remedy if the login role changes while a lease is held.
const anotherRole = "a lease is used by the role that acquired it, and by its members: " +
	"where login roles change, let all of them act as one role (options=-c role=…, or SET ROLE)"

func newRefused(err error) *Error {
	var server serverError
	var fields struct{ Message, Detail, Hint string }
	errors.As(err, &server)
	// The types of both drivers have these fields, with the same names.
	text, _ := json.Marshal(server)
	_ = json.Unmarshal(text, &fields)
	e := newError(Refused, err, "%s", cmp.Or(fields.Message, err.Error()))
	if e.SQLState, e.Hint = sqlStateOf(err), fields.Hint; fields.Hint != "" {
		e.message += " (" + fields.Hint + ")"
	}
	// The numbers are tokens, which a float64 would round.
	decoder := json.NewDecoder(strings.NewReader(fields.Detail))
	decoder.UseNumber()
	_ = decoder.Decode(&e.Detail)
	return e
}
