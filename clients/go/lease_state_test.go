package pgfence

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
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
	s, d := newLeaseStates(v.Jitter), &leadState{spread: v.Jitter}
	for i, step := range v.Steps {
		where := fmt.Sprintf("step %d at %d", i, step.At)
		var effects []effect
		for what, in := range step.In {
			effects = input(t, s, d, step.At, what, in)
		}
		if len(effects) != len(step.Out) {
			t.Fatalf("%s: %s instead of %s", where, text(effects), text(step.Out))
		}
		for i, expected := range step.Out {
			expected := spread(expected).(map[string]any)
			if is := fields(effects[i]); !isLike(is, expected) {
				t.Fatalf("%s: %s instead of %s", where, text(is), text(expected))
			}
		}
		for key, is := range step.Held {
			if s.remaining(step.At, key) > 0 != is {
				t.Fatalf("%s: %s is held: %v", where, key, !is)
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

// isLike tells whether all that is expected is there, in full; what is missing is 0, false or
// empty.
func isLike(is, expected map[string]any) bool {
	for key, value := range expected {
		some, _ := is[key].([]any)
		switch value := value.(type) {
		case map[string]any: // so many of them
			if float64(len(some)) != value["length"] {
				return false
			}
		case []any:
			if len(some)+len(value) > 0 && !reflect.DeepEqual(some, value) {
				return false
			}
		default:
			if is[key] != value {
				return false
			}
		}
	}
	return true
}

// spread writes out the shorthands: {"prefix": p, "count": n} in a list of names, and {"each": row,
// "count": n} in a list of rows. The keys of objects become those of Go's fields in lower case.
func spread(value any) any {
	switch value := value.(type) {
	case map[string]any:
		object := map[string]any{}
		for key, one := range value {
			object[strings.ReplaceAll(key, "_", "")] = spread(one)
		}
		return object
	case []any:
		all := []any{}
		for _, one := range value {
			of, _ := one.(map[string]any)
			count, isShort := of["count"].(float64)
			prefix, isName := of["prefix"].(string)
			for i := range int(max(count, 1)) {
				switch {
				case isName:
					all = append(all, prefix+strconv.Itoa(i))
				case isShort:
					all = append(all, of["each"])
				default:
					all = append(all, spread(one))
				}
			}
		}
		return all
	}
	return value
}

func text(value any) string {
	text, err := json.Marshal(value)
	if err != nil {
		return err.Error()
	}
	return string(text)
}

// fields are those of an effect.
func fields(e effect) map[string]any {
	var all any
	_ = json.Unmarshal([]byte(text(e)), &all)
	fields := map[string]any{}
	for key, value := range all.(map[string]any) {
		fields[strings.ToLower(key)] = value
	}
	return fields
}

// said is what an input may have.
type said struct {
	ask
	Call, Connection  int
	Key, Stage, Table string
	Token             int64
	Keys              []string
	Code              string
	Broken            bool
	Rows              []any
	Taken             *taken
	What, Cause       string
	Lost              bool
}

func input(t *testing.T, s *leaseStates, d *leadState, now int64, what string, in any) []effect {
	var o said
	if err := json.Unmarshal([]byte(text(spread(in))), &o); err != nil {
		t.Fatal(what, err)
	}
	if o.Call > s.lastCall {
		t.Fatalf("at %d: call %d was never sent", now, o.Call)
	}
	decide := map[string]func(){
		"acquire": func() { s.acquire(o.ask) },
		"keep_row": func() {
			o.Names, o.Named = []string{o.Key}, true
			s.keepRow(o.ask, o.Table, o.Token)
		},
		"give_up":          func() { s.giveUp(o.ID) },
		"release":          func() { s.release(o.Key) },
		"last_transaction": func() { s.last(o.Keys, o.Stage) },
		"row_locked":       func() { s.touches(o.Key, true) },
		"row_unlocked":     func() { s.touches(o.Key, false) },
		"suspect":          func() { s.suspect(o.Keys) },
		"check":            func() { s.check(o.Key) },
		"close":            s.close,
		"sent":             func() { s.sent(o.Call) },
		"answer":           func() { s.answered(o.Call, answerOf(s.call(o.Call), o)) },
		"failed":           func() { s.failed(o.Call, o.Code, o.Broken) },
		"disconnected":     func() { s.disconnected(o.Connection) },
		"heartbeat_died":   s.died,
		"tick":             func() {},
	}[what]
	leads := map[string]func() []effect{
		"start":       func() []effect { d.ttl = o.TTL; return d.start() },
		"granted":     func() []effect { return d.granted(now) },
		"work done":   d.workDone,
		"work failed": func() []effect { return d.failed(now, o.Cause, o.Lost) },
		"not granted": func() []effect { return d.failed(now, o.Cause, false) },
		"stop":        d.stop,
		"tick":        func() []effect { return d.tick(now) },
	}[o.What]
	switch {
	case what == "nothing":
		return nil
	case what == "lead":
		return leads()
	}
	return s.step(now, o.Call, decide)
}

// answerOf reads the rows as those of the statement that the call has sent.
func answerOf(c *call, o said) (a answer) {
	if a.taken = o.Taken; c == nil {
		return a
	}
	for _, one := range o.Rows {
		row, _ := one.([]any)
		number := func(at int) int64 {
			if at < len(row) && row[at] != nil {
				return int64(row[at].(float64))
			}
			return -1
		}
		switch c.Do {
		case "acquire":
			a.token = number(1)
		case "keep", "keep_row":
			is := outcome{is: row[0].(string), remaining: number(1), againIn: number(2)}
			if len(row) > 3 {
				is.code, _ = row[3].(string)
			}
			a.outcomes = append(a.outcomes, is)
		case "release":
			a.released = append(a.released, one != nil)
		case "undo":
			a.undone = int64(one.(float64))
		}
	}
	return a
}
