package pgfence;

import pgfence.FenceException.*;

import java.sql.Connection;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.CompletableFuture;

/**
 * A lease that is held until it is closed: {@code try (Lease lease = fence.lease(…))}. A heartbeat
 * keeps it.
 */
public final class Lease extends Holding implements AutoCloseable {
    final String key;

    /** The table of a row lease. */
    final Statements.Table table;

    private final CompletableFuture<LeaseLost> lost = new CompletableFuture<>();

    /** It is over: lost, or released. */
    final CompletableFuture<Void> ended = new CompletableFuture<>();

    volatile Reason reason;
    private volatile String advice;
    // The rest is guarded by the heartbeat's lock.
    int renewals;

    /** The connections that are in a guard of it, once for each guard. */
    final List<Connection> guards = new ArrayList<>();

    Lease(Heartbeat heartbeat, LeaseState.Grant grant, Heartbeat.Acquire acquire) {
        super(heartbeat, acquire.names, grant.token, null);
        key = grant.key;
        table = acquire.table;
    }

    /** Whether it is ours at this moment, by our own clock. */
    public boolean isHeld() {
        return heartbeat.remaining(this) > 0;
    }

    /** How long it is ours if no renewal comes through any more. */
    public Duration remaining() {
        return Duration.ofMillis(heartbeat.remaining(this));
    }

    /**
     * Throws {@link LeaseLost} once it is ours no more. For long steps, and before each call to the
     * outside.
     */
    public void check() {
        LeaseState.Reply reply = isHeld() ? null : heartbeat.check(this);
        if (reply != null && reply.error != null) {
            throw new LeaseLost(
                    isLost() ? reason : reply.reason, reply.advice, names(), false, null);
        }
    }

    /** Completes at a loss: {@code lease.lost().thenRun(thread::interrupt)}. */
    public CompletableFuture<LeaseLost> lost() {
        return lost;
    }

    /**
     * Gives it back. No error if that fails: then it ends at its ttl. A row lease gives its row up,
     * unless the work has.
     *
     * @throws LeaseLost after a loss; beside an exception of the block that is a suppressed one
     */
    @Override
    public void close() {
        heartbeat.release(this);
        if (isLost()) {
            throw loss(false, null);
        }
    }

    boolean isLost() {
        return reason != null && reason != Reason.RELEASED;
    }

    LeaseLost loss(boolean inDoubt, Throwable cause) {
        return new LeaseLost(reason, advice, names(), inDoubt, cause);
    }

    void ends(Reason why, String advice) {
        this.advice = advice;
        reason = why;
        ended.complete(null);
    }

    void tellLoss() {
        lost.complete(loss(false, null));
    }
}
