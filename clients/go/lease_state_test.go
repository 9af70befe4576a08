package pgfence

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strconv"
	"testing"
)

// The vectors of ../spec/vectors, which every client plays. Their format is in ../spec/README.md.

type vector struct {
	Name   string
	Spread int64
	Steps  []step
}

type step struct {
	At       int64
	In       map[string]json.RawMessage
	Out      []map[string]any
	Held     map[string]bool
	Deadline map[string]int64
	NextBeat map[string]int64 `json:"next_beat"`
	Wake     *int64
}

func TestVectors(t *testing.T) {
	_, here, _, _ := runtime.Caller(0)
	files, err := filepath.Glob(filepath.Join(filepath.Dir(here), "../spec/vectors/*.json"))
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
	s, d := newLeaseStates(v.Spread), &leadState{spread: v.Spread}
	for i, step := range v.Steps {
		where := fmt.Sprintf("step %d at %d", i, step.At)
		effects := input(t, s, d, step.At, step.In)
		if len(effects) != len(step.Out) {
			t.Fatalf("%s: %s instead of %s", where, text(effects), text(step.Out))
		}
		for i, expected := range step.Out {
			if is := fields(effects[i]); !isLike(is, expected) {
				t.Fatalf("%s: %s instead of %s", where, text(is), text(expected))
			}
		}
		for key, is := range step.Held {
			if s.held(step.At, key) != is {
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

// isLike tells whether all that is expected is there, in full; what is missing is 0, false or empty.
func isLike(is, expected map[string]any) bool {
	for key, value := range expected {
		switch value := spread(value).(type) {
		case map[string]any: // so many of them
			some, _ := is[key].([]any)
			if float64(len(some)) != value["length"] {
				return false
			}
		default:
			missing := is[key] == nil && slices.Contains([]any{0.0, false, ""}, value)
			if some, isList := value.([]any); isList {
				missing = is[key] == nil && len(some) == 0
			}
			if !missing && !reflect.DeepEqual(is[key], value) {
				return false
			}
		}
	}
	return true
}

// spread writes out the shorthands: {"prefix": p, "count": n} in a list of names, and {"each": row,
// "count": n} in a list of rows.
func spread(value any) any {
	some, isList := value.([]any)
	if !isList {
		return value
	}
	all := []any{}
	for _, one := range some {
		of, _ := one.(map[string]any)
		count, isShort := of["count"].(float64)
		if !isShort {
			all = append(all, spread(one))
			continue
		}
		for i := range int(count) {
			if prefix, is := of["prefix"].(string); is {
				all = append(all, prefix+strconv.Itoa(i))
			} else {
				all = append(all, of["each"])
			}
		}
	}
	return all
}

func text(value any) string {
	text, err := json.Marshal(value)
	if err != nil {
		return err.Error()
	}
	return string(text)
}

func fields(value any) (fields map[string]any) {
	_ = json.Unmarshal([]byte(text(value)), &fields)
	return fields
}

// said is what an input may have.
type said struct {
	Call, On       int
	ID, Key, Stage string
	Keys           []string
	Code           string
	Broken         bool
	Rows           []any
	Taken          *taken
	What, Cause    string
	TTL            int64
	Lost           bool
}

func input(
	t *testing.T, s *leaseStates, d *leadState, now int64, in map[string]json.RawMessage,
) []effect {
	for what, raw := range in {
		var all any
		if err := json.Unmarshal(raw, &all); err != nil {
			t.Fatal(err)
		}
		if object, is := all.(map[string]any); is {
			for key, value := range object {
				object[key] = spread(value)
			}
		}
		raw, o := []byte(text(all)), said{}
		var a ask
		var r row
		target := any(&o)
		switch what {
		case "acquire":
			target = &a
		case "keep_row":
			target = &r
		}
		if err := json.Unmarshal(raw, target); err != nil {
			t.Fatal(what, err)
		}
		if o.Call > s.lastCall {
			t.Fatalf("at %d: call %d was never sent", now, o.Call)
		}
		decide := map[string]func(){
			"acquire":      func() { s.acquire(a) },
			"keep_row":     func() { s.keepRow(r) },
			"give_up":      func() { s.giveUp(o.ID) },
			"release":      func() { s.release(o.Key) },
			"last":         func() { s.last(o.Keys, o.Stage) },
			"touches":      func() { s.touches(o.Key, true) },
			"ended":        func() { s.touches(o.Key, false) },
			"suspect":      func() { s.suspect(o.Keys) },
			"check":        func() { s.check(o.Key) },
			"close":        s.close,
			"sent":         func() { s.sent(o.Call) },
			"answer":       func() { s.answered(o.Call, answerOf(s.call(o.Call), o)) },
			"failed":       func() { s.failed(o.Call, o.Code, o.Broken) },
			"disconnected": func() { s.disconnected(o.On) },
			"died":         s.died,
			"tick":         func() {},
		}[what]
		switch {
		case what == "nothing":
			return nil
		case what == "lead":
			return leads(t, d, now, o)
		case decide == nil:
			t.Fatal("there is no input ", what)
		}
		return s.step(now, o.Call, decide)
	}
	return nil
}

func leads(t *testing.T, d *leadState, now int64, o said) []effect {
	switch o.What {
	case "start":
		d.ttl = o.TTL
		return d.start()
	case "granted":
		return d.granted(now)
	case "work done":
		return d.workDone()
	case "work failed":
		return d.workFailed(now, o.Cause, o.Lost)
	case "not granted":
		return d.notGranted(now, o.Cause)
	case "stop":
		return d.stop()
	case "tick":
		return d.tick(now)
	}
	t.Fatal("there is no such step of a leader: ", o.What)
	return nil
}

// answerOf reads the rows as those of the statement that the call has sent.
func answerOf(c *call, o said) (a answer) {
	if a.taken = o.Taken; c == nil {
		return a
	}
	number := func(value any) int64 {
		if number, is := value.(float64); is {
			return int64(number)
		}
		return -1
	}
	for _, one := range o.Rows {
		columns, _ := one.([]any)
		at := func(i int) any {
			if i < len(columns) {
				return columns[i]
			}
			return nil
		}
		words, _ := at(0).(string)
		switch c.do {
		case "acquire":
			names := []string{}
			for _, name := range at(0).([]any) {
				names = append(names, name.(string))
			}
			a.grants = append(a.grants, grant{names, number(at(1))})
		case "keep", "keep_row":
			code, _ := at(3).(string)
			a.outcomes = append(a.outcomes, outcome{words, number(at(1)), number(at(2)), code})
		case "release":
			a.released = append(a.released, one != nil)
		case "undo":
			a.undone = number(one)
		}
	}
	return a
}
