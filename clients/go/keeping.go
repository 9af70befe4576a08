package pgfence

import (
	"cmp"
	"math"
	"time"
)

// When a lease is renewed, and when it is over: decisions from times and answers alone. Times are those of now().

// forever is what spans are cut to, so that no sum of two times overflows.
const forever = time.Duration(math.MaxInt64 / 4)

// answer is what lease_keep says of one name. A span that it does not say is negative.
type answer struct {
	outcome            string
	remaining, againIn time.Duration
}

// keeping are the times of one lease.
type keeping struct {
	ttl, deadline, beatAt time.Duration
	// resting are the transactions that are about to release it: it is not renewed meanwhile.
	resting int
}

// grantedBefore is by a call that began then, from where the ttl counts.
func grantedBefore(before, ttl time.Duration) keeping {
	ttl = min(ttl, forever)
	return keeping{ttl: ttl, deadline: before + ttl, beatAt: before + ttl/3}
}

// answered takes the answers, one for each name, to a call that began at before; gotOn: it has kept something. It returns why
// the lease is lost, if it is, and whether it was renewed.
func (k *keeping) answered(answers []answer, before, now time.Duration, gotOn bool) (lost Reason, renewed bool) {
	remaining, againIn, renewed := forever, forever, true
	for _, one := range answers {
		switch one.outcome {
		case "lost":
			lost = ReasonGone
		case "refused":
			lost = cmp.Or(lost, ReasonRefused)
		}
		if one.againIn < 0 {
			one.againIn = k.ttl / 12
		}
		renewed = renewed && one.outcome == "kept"
		remaining, againIn = min(remaining, one.remaining), min(againIn, one.againIn)
	}
	switch {
	case lost != "" && k.resting > 0:
		return "", false
	case lost != "":
		return lost, false
	case renewed:
		k.deadline, k.beatAt = before+remaining, before+againIn
	case gotOn || againIn > 0:
		k.beatAt = now + againIn
	default:
		// Out of locks: at once, in another transaction, as long as that helps.
		k.beatAt = now + k.ttl/12
	}
	return "", renewed
}

func (k *keeping) dueAt() time.Duration {
	if k.resting > 0 {
		return forever
	}
	return k.beatAt
}

// goesAlong tells whether it is renewed when another one is due.
func (k *keeping) goesAlong(now time.Duration) bool { return k.dueAt() <= now+k.ttl/6 }
