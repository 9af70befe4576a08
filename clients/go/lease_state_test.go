package pgfence

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"testing"
)

// The vectors of ../spec/vectors, which every client plays. Their format is in ../spec/README.md.

type vector struct {
	Name   string
	Jitter int64
	Steps  []step
}

type step struct {
	At       int64
	In       map[string]any
	Out      []any
	Held     map[string]bool
	Deadline map[string]int64
	NextBeat map[string]int64 `json:"next_beat"`
	Wake     *int64
}

func TestVectors(t *testing.T) {
	directory := os.Getenv("VECTORS")
	if directory == "" {
		_, here, _, _ := runtime.Caller(0)
		directory = filepath.Join(filepath.Dir(here), "../spec/vectors")
	}
	files, err := filepath.Glob(filepath.Join(directory, "*.json"))
	if err != nil || len(files) == 0 {
		t.Fatal("there are no vectors", err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		var vectors []vector
		if err == nil {
			err = json.Unmarshal(text, &vectors)
		}
		if err != nil {
			t.Fatal(file, err)
		}
		for _, v := range vectors {
			t.Run(filepath.Base(file)+"/"+v.Name, func(t *testing.T) { v.play(t) })
		}
	}
}

func (v vector) play(t *testing.T) {
	s, lead := newLeaseStates(v.Jitter), &leadState{jitter: v.Jitter}
	for i, step := range v.Steps {
		where := fmt.Sprintf("step %d at %d", i, step.At)
		var effects []effect
		for what, in := range step.In {
			effects = input(t, s, lead, step.At, what, in)
		}
		if len(effects) != len(step.Out) {
			t.Fatalf("%s: %s instead of %s", where, text(effects), text(step.Out))
		}
		for i, expected := range step.Out {
			expected := expand(expected).(map[string]any)
			if actual := fields(effects[i]); !matches(actual, expected) {
				t.Fatalf("%s: %s instead of %s", where, text(actual), text(expected))
			}
		}
		for key, isHeld := range step.Held {
			if s.remaining(step.At, key) > 0 != isHeld {
				t.Fatalf("%s: %s is held: %v", where, key, !isHeld)
			}
		}
		for key, at := range step.Deadline {
			if l := s.lease(key); l == nil || l.deadline != at {
				t.Fatalf("%s: the deadline of %s is not %d: %+v", where, key, at, l)
			}
		}
		for key, at := range step.NextBeat {
			if l := s.lease(key); l == nil || l.beatAt != at {
				t.Fatalf("%s: the next beat of %s is not at %d: %+v", where, key, at, l)
			}
		}
		if step.Wake != nil && min(s.wake(step.At), 1<<53) != *step.Wake {
			t.Fatalf("%s: wake is %d instead of %d", where, s.wake(step.At), *step.Wake)
		}
	}
}

// matches reports whether all expected fields are equal. A field that is missing in an effect is 0,
// false or empty.
func matches(actual, expected map[string]any) bool {
	for key, value := range expected {
		list, _ := actual[key].([]any)
		switch value := value.(type) {
		case map[string]any: // {"length": n} is any list of n elements
			if float64(len(list)) != value["length"] {
				return false
			}
		case []any:
			if len(list)+len(value) > 0 && !reflect.DeepEqual(list, value) {
				return false
			}
		default:
			if actual[key] != value {
				return false
			}
		}
	}
	return true
}

// expand replaces the shorthands: {"prefix": p, "count": n} in a list of names, and {"each": row,
// "count": n} in a list of rows. It removes the underscores from the keys of objects, which then
// are the names of Go's fields in lower case, and makes a Kind of an error's type.
func expand(value any) any {
	switch value := value.(type) {
	case map[string]any:
		object := map[string]any{}
		for key, field := range value {
			if name, isText := field.(string); isText && (key == "error" || key == "code") {
				field = kindOf(name)
			}
			object[strings.ReplaceAll(key, "_", "")] = expand(field)
		}
		return object
	case []any:
		all := []any{}
		for _, item := range value {
			short, _ := item.(map[string]any)
			count, isShort := short["count"].(float64)
			prefix, isName := short["prefix"].(string)
			for i := range int(max(count, 1)) {
				switch {
				case isName:
					all = append(all, prefix+strconv.Itoa(i))
				case isShort:
					all = append(all, short["each"])
				default:
					all = append(all, expand(item))
				}
			}
		}
		return all
	}
	return value
}

var wordEnd = regexp.MustCompile("([a-z])([A-Z])")

// kindOf returns the Kind of a type as the vectors name it. An SQLSTATE has no lower-case letters,
// and the client's own codes have no others.
func kindOf(name string) string {
	if name == strings.ToUpper(name) {
		return name
	}
	return strings.ToLower(wordEnd.ReplaceAllString(name, "$1 $2"))
}

func text(value any) string {
	text, err := json.Marshal(value)
	if err != nil {
		return err.Error()
	}
	return string(text)
}

// fields returns the fields of an effect, with names in lower case.
func fields(e effect) map[string]any {
	var all any
	_ = json.Unmarshal([]byte(text(e)), &all)
	fields := map[string]any{}
	for key, value := range all.(map[string]any) {
		fields[strings.ToLower(key)] = value
	}
	return fields
}

// inputArgs are the arguments of all inputs.
type inputArgs struct {
	acquireArgs
	Call, Connection int
	Key, Stage       string
	Keys             []string
	Code             string
	Broken           bool
	Rows             []any
	Taken            *taken
	What             string
	Error            Kind
	Lost             bool
	Stopped, Closed  bool
}

func input(t *testing.T, s *leaseStates, lead *leadState, now int64, what string, in any) []effect {
	var args inputArgs
	var decoded any = &args
	failure := guardFailure{Session: "open", Of: "names"}
	if what == "guard_failed" {
		decoded = &failure
	}
	if err := json.Unmarshal([]byte(text(expand(in))), decoded); err != nil {
		t.Fatal(what, err)
	}
	if args.Call > s.lastCall {
		t.Fatalf("at %d: call %d was never sent", now, args.Call)
	}
	decide := map[string]func(){
		"acquire": func() { s.acquire(args.acquireArgs) },
		"keep_row": func() {
			args.Names, args.Named = []string{args.Key}, true
			s.acquire(args.acquireArgs)
		},
		"give_up":          func() { s.giveUp(args.ID) },
		"release":          func() { s.release(args.Key) },
		"last_transaction": func() { s.lastTransaction(args.Keys, args.Stage) },
		"row_locked":       func() { s.rowLocked(args.Key) },
		"row_unlocked":     func() { s.rowUnlocked(args.Key) },
		"suspect":          func() { s.suspect(args.Keys) },
		"check":            func() { s.effects = append(s.effects, checked(s, now, args.Key)) },
		"close":            s.close,
		"sent":             func() { s.sent(args.Call) },
		"answer":           func() { s.answered(args.Call, answerOf(s.call(args.Call), args)) },
		"failed":           func() { s.failed(args.Call, args.Code, args.Broken) },
		"disconnected":     func() { s.disconnected(args.Connection) },
		"heartbeat_died":   s.heartbeatDied,
		"tick":             func() {},
	}[what]
	leadInputs := map[string]func() []effect{
		"start":   func() []effect { lead.ttl = args.TTL; return nil },
		"granted": func() []effect { lead.granted(now); return nil },
		"failed": func() []effect {
			return lead.failed(now, leadFailure{
				args.Error, args.Code, args.Lost, args.Stopped, args.Closed,
			})
		},
	}[args.What]
	switch {
	case what == "nothing":
		return nil
	case what == "guard_failed":
		return []effect{guardFailed(failure)}
	case what == "lead":
		return leadInputs()
	}
	return s.step(now, args.Call, decide)
}

// checked is the reply to a check.
func checked(s *leaseStates, now int64, key string) effect {
	e := effect{Reply: key}
	if s.remaining(now, key) > 0 {
		return e
	}
	e.Error, e.Reason = LeaseLost, ReasonReleased
	switch l := s.lease(key); {
	case s.isOver(now, key):
		e.Reason = ReasonDeadline
	case l != nil && l.state == lost:
		e.Reason, e.Advice = l.reason, l.advice
	}
	return e
}

// answerOf reads the rows of an answer as the call's statement returns them.
func answerOf(c *call, args inputArgs) (a answer) {
	if a.taken = args.Taken; c == nil {
		return a
	}
	for _, value := range args.Rows {
		row, _ := value.([]any)
		number := func(column int) int64 {
			if column < len(row) && row[column] != nil {
				return int64(row[column].(float64))
			}
			return -1
		}
		switch c.Do {
		case "acquire":
			a.token = number(1)
		case "keep", "keep_row":
			o := outcome{kind: row[0].(string), remaining: number(1), againIn: number(2)}
			if len(row) > 3 {
				o.code, _ = row[3].(string)
			}
			a.outcomes = append(a.outcomes, o)
		case "release":
			a.released = append(a.released, value != nil)
		case "undo":
			a.undone = int64(value.(float64))
		}
	}
	return a
}
