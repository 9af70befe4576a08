package pgfence;

import java.time.Duration;
import java.util.*;
import java.util.concurrent.CompletableFuture;
import java.util.stream.DoubleStream;
import org.postgresql.core.BaseConnection;
import pgfence.FenceException.*;

/** A lease that is held until it is closed: {@code try (Lease lease = fence.lease(…))}. A heartbeat keeps it. */
public final class Lease extends Holding implements AutoCloseable {
    final double ttl;
    /** The connection that a session lease lives on; 0 for others. */
    final int session;
    private final CompletableFuture<LeaseLost> lost = new CompletableFuture<>();
    /** Why it is over. */
    volatile Reason reason;
    volatile double deadline;
    // The rest is under the keeper's lock.
    double beatAt;
    /** Transactions that are about to release it: it is not renewed meanwhile. */
    int resting;
    /** The connections that are in a guard of it, once for each guard. */
    final List<BaseConnection> guards = new ArrayList<>();

    /** By a call that began at {@code before}, from where the ttl counts. */
    Lease(Keeper keeper, List<String> names, long token, double before, double ttl, int session) {
        super(keeper, names, token, null);
        this.ttl = ttl;
        this.session = session;
        deadline = before + ttl;
        beatAt = before + ttl / 3;
    }

    /** Whether it is ours at this moment, by our own clock. */
    public boolean isHeld() { return !remaining().isZero(); }

    /** How long it is ours if no renewal comes through any more. */
    public Duration remaining() {
        return Duration.ofNanos((long) ((reason == null ? Math.max(0, deadline - Clock.now()) : 0) * 1e9));
    }

    /** Throws {@link LeaseLost} once it is ours no more. For long steps, and before each call to the outside. */
    public void check() { keeper.check(this); }
    /** Completes at a loss: {@code lease.lost().thenRun(thread::interrupt)}. */
    public CompletableFuture<LeaseLost> lost() { return lost; }

    /**
     * Gives it back. No error where that fails: then it ends at its ttl.
     *
     * @throws LeaseLost after a loss; beside an exception of the block that is a suppressed one
     */
    @Override
    public void close() {
        keeper.release(List.of(this));
        if (isLost()) { throw loss(false, null); }
    }

    boolean isLost() { return reason != null && reason != Reason.RELEASED; }
    LeaseLost loss(boolean inDoubt, Throwable cause) { return new LeaseLost(reason, names(), inDoubt, cause); }

    // When it is renewed and when it is over: decisions from times and answers alone

    double dueAt() { return resting > 0 ? Double.POSITIVE_INFINITY : beatAt; }
    /** Whether it is renewed when another one is due. */
    boolean goesAlong(double now) { return dueAt() <= now + ttl / 6; }

    /**
     * Takes the answers of {@code lease_keep}, one for each name (outcome, remaining, again_in), to a call that began at
     * {@code before} and has kept something or not. Returns why the lease is lost, or null.
     */
    Reason answered(List<Object[]> answers, double before, double now, boolean hasKept) {
        List<Object> outcomes = answers.stream().map(answer -> answer[0]).toList();
        if (outcomes.contains("lost") || outcomes.contains("refused")) {
            return resting > 0 ? null : outcomes.contains("lost") ? Reason.GONE : Reason.REFUSED;
        }
        double againIn = least(answers.stream().mapToDouble(answer -> answer[2] instanceof Double span ? span : ttl / 12));
        if (answers.stream().allMatch(Lease::isKept)) {
            deadline = before + least(answers.stream().mapToDouble(answer -> answer[1] instanceof Double span ? span : 0));
            beatAt = before + againIn;
        } else {
            // Out of locks: at once, in another transaction, as long as that helps.
            beatAt = now + (hasKept || againIn > 0 ? againIn : ttl / 12);
        }
        return null;
    }

    static boolean isKept(Object[] answer) { return answer[0].equals("kept"); }
    static double least(DoubleStream times) { return times.min().orElse(Double.POSITIVE_INFINITY); }
}
