package pgfence_test

import "testing"

func TestNothing(t *testing.T) {}
