package pgfence;

import java.lang.System.Logger.Level;
import java.sql.Connection;
import java.sql.SQLException;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.OptionalLong;
import java.util.Set;
import java.util.concurrent.locks.Condition;
import java.util.concurrent.locks.ReentrantLock;
import java.util.function.BooleanSupplier;
import java.util.function.Consumer;
import pgfence.FenceException.LeaseLost;
import pgfence.FenceException.NotSpeaking;
import pgfence.FenceException.Reason;

/**
 * A lease that is kept by a thread and a connection of its own, until it is closed or lost. {@link LeaseRequest}
 * acquires it; use it in a try-with-resources statement.
 */
public class Lease extends Holding {
    // Two threads: the keeper acquires, renews and releases; the watch tells a loss at the deadline and breaks off
    // calls that take too long, so that it does not matter where the keeper hangs. The lock guards what they share.

    final LeaseRequest request;
    final OwnConnection own;
    private final long ttl;
    /** Between two renewals, and how long a call may take. */
    private final long third;
    private final ReentrantLock lock = new ReentrantLock();
    private final Condition changed = lock.newCondition();
    final List<Consumer<LeaseLost>> onLost;
    private final List<Thread> threads = new ArrayList<>();
    private final Set<Connection> guarded = new HashSet<>();
    // Where it stands: answered (the acquire), held, ending (the holder wants it to end), finished (the keeper).
    private boolean answered;
    private boolean held;
    private boolean ending;
    private boolean finished;
    /** Its release was part of a transaction of the holder's. */
    private boolean released;
    /** Nobody waits for its acquire. */
    private volatile boolean givenUp;
    private Exception failure;
    private long deadline;
    private long nextBeat;
    private boolean beating;
    private long beats;
    private int pauses;
    private Long renewed;

    Lease(LeaseRequest request) {
        super(request.fence, request.names);
        this.request = request;
        ttl = request.ttl.toNanos();
        third = ttl / 3;
        onLost = new ArrayList<>(request.onLost);
        own = new OwnConnection(request.fence::open, lock, changed);
    }

    // What its holder asks

    /** Whether it is ours at this moment, by our own clock. */
    public final boolean isHeld() {
        return !remaining().isZero();
    }

    /** How long it is ours if no renewal comes through any more. */
    public final Duration remaining() {
        return locked(() -> Duration.ofNanos(held && loss == null ? Math.max(0, deadline - Clock.now()) : 0));
    }

    /**
     * Throws LeaseLost when it is ours no more. For long steps between transactions, and before each call to the
     * outside.
     */
    public final void check() {
        if (locked(() -> held && loss == null && Clock.now() >= deadline)) {
            lose(Reason.DEADLINE, null);
        }
        if (locked(() -> loss != null || !held)) {
            throw lost(null);
        }
    }

    /** Sleeps; throws LeaseLost as soon as the lease is lost. */
    public final void sleep(Duration span) throws InterruptedException {
        long end = Clock.now() + span.toNanos();
        lock.lockInterruptibly();
        try {
            await(end, () -> loss != null);
        } finally {
            lock.unlock();
        }
        check();
    }

    /**
     * Has it renewed at once, and returns the new token, which a {@code strict} table asks for when a row is written
     * again; empty when the renewal failed, which is no loss yet. Throws LeaseLost.
     */
    public final OptionalLong renew() {
        check();
        Long token = locked(() -> {
            // The one that is under way may have been judged before what the caller knows.
            long seen = beats + (beating ? 1 : 0);
            renewed = null;
            nextBeat = Clock.now();
            changed.signalAll();
            // Opening a connection may take two seconds beside the calls themselves.
            awaitUninterruptibly(Clock.now() + 3 * third + 3_000_000_000L, () -> beats > seen || finished || loss != null);
            return renewed;
        });
        check();
        return token == null ? OptionalLong.empty() : OptionalLong.of(token);
    }

    /** Gives it back. No error where that fails: then it ends at its ttl. */
    @Override
    public final void release() {
        end();
        // A renewal, then the release, and opening a connection may take two seconds.
        long limit = Clock.now() + 3 * third + 3_000_000_000L;
        locked(() -> awaitUninterruptibly(limit, () -> finished || threads.contains(Thread.currentThread())));
        threads.stream().filter(one -> one != Thread.currentThread()).forEach(Sql::join);
    }

    // Acquire

    /** Whether the lease could be had. */
    final boolean acquire() throws SQLException, InterruptedException {
        for (Runnable runnable : List.<Runnable>of(this::keep, this::watch)) {
            // One that hangs in the resolver must not keep the process from ending.
            threads.add(Sql.daemon("pg_fence " + names().get(0), runnable));
        }
        threads.forEach(Thread::start);
        // Not interruptibly: nothing may be thrown from here on without giving up.
        lock.lock();
        try {
            await(OwnConnection.NEVER, () -> answered);
        } catch (InterruptedException givenUp) {
            giveUp();
            throw givenUp;
        } finally {
            lock.unlock();
        }
        if (failure instanceof SQLException sql) {
            throw sql;
        } else if (failure instanceof RuntimeException other) {
            throw other;
        }
        return locked(() -> held || loss != null);
    }

    /** Nobody waits for the acquire any more. A grant that comes all the same is given back. */
    private void giveUp() {
        givenUp = true;
        end();
        Sql.daemon("pg_fence cancel", this::cancel).start();
    }

    private void cancel() {
        boolean isOver = false;
        while (!isOver) {
            own.cancel();
            // A request that comes before the statement does is lost, hence more than one.
            isOver = locked(() -> awaitUninterruptibly(Clock.now() + OwnConnection.CANCEL_AGAIN, () -> answered));
        }
    }

    private void end() {
        locked(() -> {
            ending = true;
            changed.signalAll();
            return null;
        });
    }

    private void answer(Exception why) {
        locked(() -> {
            failure = why;
            answered = true;
            changed.signalAll();
            return null;
        });
    }

    // The threads

    /** Tells a loss at the deadline, and breaks off a call that takes too long. */
    void watch() {
        while (true) {
            lock.lock();
            try {
                if (finished) {
                    return;
                }
                if (Clock.now() >= own.cutAt()) {
                    own.cut();
                }
                long due = held && loss == null ? deadline : OwnConnection.NEVER;
                if (Clock.now() < due) {
                    pause(Math.min(own.cutAt(), due));
                    continue;
                }
            } finally {
                lock.unlock();
            }
            lose(Reason.DEADLINE, null);
        }
    }

    private void keep() {
        try {
            if (take()) {
                renewUntilTheEnd();
                giveBack();
            }
        } finally {
            own.close();
            locked(() -> {
                finished = true;
                changed.signalAll();
                return null;
            });
        }
    }

    private boolean take() {
        try {
            long before = Clock.now();
            Long granted = ask();
            token = granted == null ? 0 : granted;
            // After a wait in line the server counts from a later moment than we do: a renewal mends that.
            while (granted != null && Clock.now() >= before + third && !locked(() -> ending)) {
                before = Clock.now();
                granted = askToRenew();
            }
            if (granted == null) {
                answer(null);
                return false;
            }
            long from = before;
            long token = granted;
            locked(() -> {
                // Held and until when at once: the watch looks at both.
                held = true;
                countsFrom(from, token);
                return null;
            });
            answer(null);
            return true;
        } catch (SQLException | RuntimeException error) {
            answer(error);
            return false;
        }
    }

    private Long ask() throws SQLException {
        String ttl = Sql.interval(request.ttl);
        if (names().size() == 1) {
            String call = "lease_acquire(?, ?, ?::interval, ?::interval, ?::jsonb, ?, ?, ?, ?)";
            return own.call(third + request.wait.toNanos(), fence.select(call),
                    names().get(0), request.holder, ttl, Sql.interval(request.wait), request.metadata,
                    request.shared, request.slots, request.reclaim, request.session);
        }
        String call = fence.select("lease_acquire_all(?, ?, ?::interval, ?::jsonb, ?)");
        long until = Clock.now() + request.wait.toNanos();
        while (true) {
            Long token = own.call(third, call, name(), request.holder, ttl, request.metadata, request.session);
            if (token != null || Clock.now() >= until) {
                return token;
            }
            // The server has no line to wait in for several at once.
            long next = Math.min(until, Clock.now() + 250_000_000);
            if (locked(() -> awaitUninterruptibly(next, () -> ending))) {
                return null;
            }
        }
    }

    private void renewUntilTheEnd() {
        while (true) {
            lock.lock();
            try {
                while (!ending && loss == null && (pauses > 0 || Clock.now() < nextBeat)) {
                    pause(pauses > 0 ? OwnConnection.NEVER : nextBeat);
                }
                if (ending || loss != null) {
                    return;
                }
                beating = true;
            } finally {
                lock.unlock();
            }
            try {
                beat();
            } finally {
                locked(() -> {
                    beating = false;
                    beats++;
                    changed.signalAll();
                    return null;
                });
            }
        }
    }

    void beat() {
        boolean reusesConnection = own.isOpen();
        long before = Clock.now();
        try {
            Long token = askToRenew();
            if (token == null) {
                lose(Reason.GONE, null);
            } else {
                countsFrom(before, token);
            }
        } catch (SQLException error) {
            if (reusesConnection && !own.isOpen() && !request.session) {
                // The connection had ended unseen since the last time: a new one may do at once.
                beat();
            } else {
                heartbeatFailed(error);
            }
        }
    }

    Long askToRenew() throws SQLException {
        return own.callWithin(third, onNames("lease_renew"), name(), token);
    }

    /** Granted or renewed by a call that was begun at {@code before}: from there the ttl counts. */
    void countsFrom(long before, long token) {
        locked(() -> {
            deadline = before + ttl;
            nextBeat = before + third;
            renewed = token;
            changed.signalAll();
            return null;
        });
    }

    /** No loss yet where trying again can help: the deadline tells. */
    private void heartbeatFailed(SQLException error) {
        LOG.log(Level.WARNING, "the lease {0} was not renewed: {1}", names().get(0), error.getMessage());
        if (FenceException.isPermanent(error)) {
            lose(Reason.DENIED, error);
        } else if (request.session && !own.isOpen()) {
            lose(Reason.SESSION, error);
        }
        locked(() -> nextBeat = Clock.now() + third / 4);
    }

    private void giveBack() {
        if (locked(() -> loss == null && !released)) {
            try {
                boolean isGone = own.callWithin(third, onNames("lease_release"), name(), token) == null;
                if (isGone && !givenUp) {
                    lose(Reason.GONE, null);
                }
            } catch (SQLException error) {
                LOG.log(Level.WARNING, "the lease {0} was not released, and ends at its ttl: {1}", names().get(0),
                        error.getMessage());
            }
        }
        locked(() -> held = false);
    }

    @Override
    final void lose(Reason reason, SQLException cause) {
        LeaseLost lost = new LeaseLost(reason, names(), cause);
        boolean isFirst = locked(() -> {
            if (!held || loss != null) {
                return false;
            }
            loss = lost;
            // What still works under it ends here, wherever it hangs.
            guarded.forEach(Sql::breakOff);
            if (reason == Reason.DEADLINE) {
                own.cut();
            }
            changed.signalAll();
            return true;
        });
        if (isFirst) {
            LOG.log(Level.WARNING, lost.getMessage());
            onLost.forEach(tell -> tell(tell, lost));
        }
    }

    private static void tell(Consumer<LeaseLost> tell, LeaseLost lost) {
        try {
            tell.accept(lost);
        } catch (RuntimeException error) {
            LOG.log(Level.ERROR, "onLost failed", error);
        }
    }

    // For the transactions under it

    @Override
    final void refuseIfOver() {
        check();
    }

    @Override
    final boolean canMend(Throwable error) {
        return error instanceof NotSpeaking;
    }

    @Override
    final boolean mend() {
        return renew().isPresent();
    }

    @Override
    final void enter(Connection connection) {
        super.enter(connection);
        locked(() -> guarded.add(connection));
        if (loss != null) {
            // It came in between.
            leave(connection);
            throw lost(null);
        }
    }

    @Override
    final void leave(Connection connection) {
        locked(() -> guarded.remove(connection));
    }

    @Override
    final void beatSoon() {
        locked(() -> {
            nextBeat = Clock.now();
            changed.signalAll();
            return null;
        });
    }

    @Override
    final void pause() {
        locked(() -> {
            pauses++;
            return awaitUninterruptibly(OwnConnection.NEVER, () -> !beating || finished);
        });
    }

    @Override
    final void goOn() {
        locked(() -> {
            pauses--;
            changed.signalAll();
            return null;
        });
    }

    @Override
    final void hasBeenReleased() {
        locked(() -> {
            released = true;
            held = false;
            return null;
        });
        end();
    }

    final boolean isEnding() {
        return locked(() -> ending || loss != null);
    }

    // The lock

    @FunctionalInterface
    private interface Locked<T> {
        T get();
    }

    private <T> T locked(Locked<T> work) {
        lock.lock();
        try {
            return work.get();
        } finally {
            lock.unlock();
        }
    }

    /** Waits for that time, or a change, or for a second. The lock is held. */
    private void pause(long until) {
        try {
            changed.awaitNanos(Math.max(0, Math.min(until - Clock.now(), Clock.LOOK_AGAIN)));
        } catch (InterruptedException nobodyDoes) {
            Thread.currentThread().interrupt();
        }
    }

    /** Whether it came true by then. The lock is held. */
    private boolean await(long until, BooleanSupplier comesTrue) throws InterruptedException {
        while (!comesTrue.getAsBoolean()) {
            long left = until - Clock.now();
            if (left <= 0) {
                return false;
            }
            changed.awaitNanos(Math.min(left, Clock.LOOK_AGAIN));
        }
        return true;
    }

    private boolean awaitUninterruptibly(long until, BooleanSupplier comesTrue) {
        boolean wasInterrupted = false;
        try {
            while (true) {
                try {
                    return await(until, comesTrue);
                } catch (InterruptedException later) {
                    wasInterrupted = true;
                }
            }
        } finally {
            if (wasInterrupted) {
                Thread.currentThread().interrupt();
            }
        }
    }
}
