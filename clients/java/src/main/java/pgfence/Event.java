package pgfence;

import java.time.Duration;
import java.util.List;
import pgfence.FenceException.Reason;

/** What {@link Fence#onEvent} is told of a lease, and what remains of it. A loss has a reason, and nothing else has one. */
public record Event(Kind kind, List<String> names, long token, Duration remaining, Reason reason) {
    /** What can happen to a lease. */
    public enum Kind { ACQUIRED, RENEWED, LOST, RELEASED }
}
