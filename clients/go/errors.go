package pgfence

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"encoding/json"
	"errors"
	"reflect"
	"strings"
)

// Kind is what an [Error] is about, to be asked for by errors.Is.
type Kind string

// Error makes a Kind something that errors.Is can look for.
func (k Kind) Error() string { return string(k) }

// The kinds of errors.
const (
	// ErrStaleToken (PF001): the row has seen the same or a greater token. The lease is lost: stop.
	ErrStaleToken Kind = "stale token"
	// ErrNoToken (PF002): the write presented no token. It ran outside of Guard and Present.
	ErrNoToken Kind = "no token"
	// ErrNeverIssued (PF003): this database never issued that token.
	ErrNeverIssued Kind = "token never issued"
	// ErrNotSpeaking (PF004): the token does not speak for the lease.
	ErrNotSpeaking Kind = "token does not speak for the lease"
	// ErrCannotBeFenced (PF005): a statement that cannot be fenced (TRUNCATE).
	ErrCannotBeFenced Kind = "statement cannot be fenced"
	// ErrLeaseLost: the lease is ours no more. Stop, and report no failure of the work: somebody else may be at it.
	ErrLeaseLost Kind = "lease lost"
	// ErrLeaseTaken: somebody else has the lease, and kept it for as long as we waited.
	ErrLeaseTaken Kind = "lease taken"
	// ErrTransactionLost: the session has ended under the transaction, or the transaction was rolled back under its work,
	// which went on all the same. The lease may well be held still.
	ErrTransactionLost Kind = "transaction lost"
	// ErrAcquireTimeout: the server did not answer in time, and was waited for no longer.
	ErrAcquireTimeout Kind = "acquire timed out"
	// ErrNotInstalled: the extension is not in this database, or its schema is not on the search_path.
	ErrNotInstalled Kind = "pg_fence is not installed"
)

// Reason is why a lease was lost.
type Reason string

// The reasons of a loss.
const (
	// Deadline: it could not be renewed in time.
	Deadline Reason = "deadline"
	// Gone: the server says so. It was taken over, revoked, or expired.
	Gone Reason = "gone"
	// Denied: the server will not renew it, and trying again will not help.
	Denied Reason = "denied"
	// Session: the session that it was bound to has ended.
	Session Reason = "session"
	// Released: its holder gave it back.
	Released Reason = "released"
)

// Error is everything that pg_fence and its client refuse or tell. Ask for its kind by errors.Is(err, ErrLeaseLost),
// and for the rest by errors.As. It wraps the driver's error.
type Error struct {
	Kind Kind
	// Reason and Names are those of a lost lease; Names those of a taken one, too.
	Reason Reason
	Names  []string
	// InDoubt: it was the commit that failed, or the work has ended the transaction itself, so that it may have landed all the
	// same.
	InDoubt bool
	// SQLState is empty where the server has not said it, as the following.
	SQLState string
	Message  string
	Hint     string
	// Detail has the keys presented, stored, lease, holder…, as they apply. A token is an int64.
	Detail map[string]any
	cause  error
}

func (e *Error) Error() string {
	names := strings.Join(e.Names, ", ")
	switch {
	case e.Kind == ErrLeaseLost:
		return "the lease " + names + " is lost (" + string(e.Reason) + ")"
	case e.Kind == ErrLeaseTaken:
		return "the lease " + names + " is taken"
	case e.Kind == ErrTransactionLost:
		return "the transaction is lost: " + e.Message
	case e.Kind == ErrAcquireTimeout:
		return "the server did not answer in time whether the lease " + names + " is granted"
	default:
		return e.Message
	}
}

// Unwrap returns the driver's error, or nil.
func (e *Error) Unwrap() error { return e.cause }

// Is lets errors.Is ask for the kind. A lost lease is context.Canceled, too, for it is how contexts end by it.
func (e *Error) Is(target error) bool {
	return target == e.Kind || target == context.Canceled && e.Kind == ErrLeaseLost
}

// Classify finds the typed error in what a driver, a pool or an ORM returned, however deep it is wrapped; nil where it
// is no business of pg_fence. Within Guard and Present that is done already.
func Classify(err error) *Error {
	var typed *Error
	if errors.As(err, &typed) {
		return typed
	}
	state, server := sqlState(err)
	switch kind, isKind := kinds[state]; {
	case isKind:
		return fromServer(kind, err, state, server)
	case isEnd(state) || isBroken(err):
		return fromServer(ErrTransactionLost, err, state, server)
	default:
		return nil
	}
}

var kinds = map[string]Kind{
	"PF001": ErrStaleToken,
	"PF002": ErrNoToken,
	"PF003": ErrNeverIssued,
	"PF004": ErrNotSpeaking,
	"PF005": ErrCannotBeFenced,
}

// installed is the error of a call of pg_fence's functions: where there are none, it says that.
func installed(err error) error {
	state, server := sqlState(err)
	if state == "42883" || state == "3F000" {
		told := fromServer(ErrNotInstalled, err, state, server)
		told.Message = "pg_fence is not installed in this database, or its schema is not on the search_path: " + told.Message
		told.Hint = "Run CREATE EXTENSION pg_fence there, or name its schema: fence.InSchema(\"…\")."
		return told
	}
	return err
}

// isEnd tells the SQLSTATEs of a session, and with it of a transaction, that has ended:
// idle_in_transaction_session_timeout, transaction_timeout, terminated, crashed, idle_session_timeout; all of class 08.
func isEnd(state string) bool {
	switch state {
	case "25P03", "25P04", "57P01", "57P02", "57P05":
		return true
	}
	return strings.HasPrefix(state, "08")
}

// isBroken tells what database/sql returns for a connection that has ended.
func isBroken(err error) bool {
	return errors.Is(err, driver.ErrBadConn) || errors.Is(err, sql.ErrConnDone)
}

// isPermanent tells a heartbeat's error that will come again, so that there is nothing to wait for.
func isPermanent(err error) bool {
	state, _ := sqlState(err)
	if len(state) != 5 {
		return false
	}
	switch state[:2] {
	case "22", "28", "3D", "3F", "42":
		return true
	}
	return state == "0A000" || state == "55000"
}

// sqlState also returns the error that has it: that of pgx or of lib/pq.
func sqlState(err error) (string, error) {
	var server interface {
		error
		SQLState() string
	}
	if errors.As(err, &server) {
		return server.SQLState(), server
	}
	return "", nil
}

func fromServer(kind Kind, err error, state string, server error) *Error {
	made := &Error{Kind: kind, SQLState: state, Message: err.Error(), cause: err}
	if server != nil {
		// The drivers' types have these fields alike.
		made.Message, made.Hint = field(server, "Message"), field(server, "Hint")
		made.Detail = detail(field(server, "Detail"))
	}
	return made
}

func field(err error, name string) string {
	value := reflect.Indirect(reflect.ValueOf(err))
	if value.Kind() != reflect.Struct {
		return ""
	}
	if found := value.FieldByName(name); found.Kind() == reflect.String {
		return found.String()
	}
	return ""
}

// detail reads the JSON of a DETAIL. Numbers are tokens, which a float64 would round.
func detail(text string) map[string]any {
	var object map[string]any
	decoder := json.NewDecoder(strings.NewReader(text))
	decoder.UseNumber()
	if decoder.Decode(&object) != nil {
		return nil
	}
	for key, value := range object {
		if number, isNumber := value.(json.Number); isNumber {
			if whole, err := number.Int64(); err == nil {
				object[key] = whole
			}
		}
	}
	return object
}

// copyOf is a loss told once more: with what has shown it this time.
func (e *Error) copyOf(cause error) *Error {
	told := *e
	if cause != nil {
		told.cause = cause
	}
	return &told
}
