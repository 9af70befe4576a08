package pgfence;

import pgfence.FenceException.*;

import java.sql.Connection;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.CompletableFuture;

/**
 * A lease that is held until it is closed: {@code try (Lease lease = fence.lease(…))}. A heartbeat
 * renews it.
 */
public final class Lease extends Holding implements AutoCloseable {
    final String key;

    /** The table of a row lease; null for any other. */
    final Statements.Table table;

    private final CompletableFuture<LeaseLost> lost = new CompletableFuture<>();

    /** Completes when the lease is lost or released. */
    final CompletableFuture<Void> ended = new CompletableFuture<>();

    volatile Reason reason;
    private volatile String advice;

    // The fields below are guarded by the heartbeat's lock.
    /** Completes at the next renewal. */
    CompletableFuture<Void> renewed = new CompletableFuture<>();

    /** The connections with a transaction that the lease guards, once for each guard. */
    final List<Connection> guards = new ArrayList<>();

    Lease(Heartbeat heartbeat, LeaseStates.LeaseState state, Heartbeat.Acquire acquire) {
        super(heartbeat, acquire.names, state.token, null);
        key = state.key;
        table = acquire.table;
    }

    /** Returns true if the lease is held now, by this process's clock. */
    public boolean isHeld() {
        return heartbeat.remaining(this) > 0;
    }

    /** Returns how long the lease is held without another renewal; zero if it is not held. */
    public Duration remaining() {
        return Duration.ofMillis(heartbeat.remaining(this));
    }

    /**
     * Throws {@link LeaseLost} if the lease is not held. Call it during long steps, and before each
     * call to another service.
     */
    public void check() {
        if (!isHeld()) {
            heartbeat.input(Heartbeat.TICK);
            throw loss(false, null);
        }
    }

    /**
     * Completes when the lease is lost: {@code lease.lost().thenRun(thread::interrupt)}. Each call
     * returns another future, so that a timeout or a cancellation of one does not end the others.
     */
    public CompletableFuture<LeaseLost> lost() {
        return lost.copy();
    }

    /**
     * Releases the lease. A release that fails is no error: the lease then ends at its ttl. The row
     * of a row lease is given up, unless the work has done so.
     *
     * @throws LeaseLost if the lease was lost; if the block throws an exception, this one is
     *     suppressed
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
        Reason other = heartbeat.isOver(this) ? Reason.DEADLINE : Reason.RELEASED;
        Reason known = Objects.requireNonNullElse(reason, other);
        return new LeaseLost(known, advice, names(), inDoubt, cause);
    }

    void end(Reason reason, String advice) {
        this.advice = advice;
        this.reason = reason;
        ended.complete(null);
    }

    void completeLost() {
        lost.complete(loss(false, null));
    }
}
