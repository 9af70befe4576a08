package pgfence;

import java.lang.System.Logger.Level;
import java.sql.Connection;
import java.sql.SQLException;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Deque;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Set;
import java.util.concurrent.TimeUnit;
import java.util.function.Supplier;
import org.postgresql.PGConnection;
import pgfence.FenceException.AcquireTimeout;
import pgfence.FenceException.LeaseLost;
import pgfence.FenceException.Reason;

/**
 * Keeps all leases of a {@link Fence}, by one connection and two threads: the keeper renews, tries and releases; the
 * watch tells a loss at the deadline and breaks off calls that take too long, so that it does not matter where the
 * keeper hangs. They begin with the first lease and end with the last.
 */
class Keeper extends Renewals {
    private final Set<Observation> observations = new LinkedHashSet<>();
    private final Deque<Job<?>> jobs = new ArrayDeque<>();
    /** While there is something to do. */
    private Run run;

    Keeper(Fence fence) {
        super(fence);
    }

    // What leases ask

    /** From now on it is kept: granted by a call that was begun at {@code before}. */
    void keep(Kept kept, long before, long token, Connection session) {
        locked(() -> {
            kept.token = token;
            kept.isHeld = true;
            kept.acquiredAt = Clock.now();
            kept.session = session;
            leases.add(kept);
            countsFrom(kept, before, token);
            begin();
        });
        if (session != null) {
            Sql.daemon("pg_fence session", () -> listen(kept, session)).start();
        }
    }

    /** Tries to acquire it, without waiting, by the keeper's connection; whether it could be had. */
    boolean attempt(Kept kept, Attempt attempt) throws InterruptedException, SQLException {
        Job<Boolean> job = new Job<>((own, self) -> take(own, kept, attempt, self), 0);
        submit(job);
        boolean wasInterrupted = false;
        lock.lock();
        try {
            await(Clock.now() + patience(kept), () -> job.isDone);
        } catch (InterruptedException interrupt) {
            if (!kept.isHeld) {
                job.isGivenUp = true;
                throw interrupt;
            }
            wasInterrupted = true;
        } finally {
            job.isGivenUp |= !job.isDone && !kept.isHeld;
            lock.unlock();
        }
        if (wasInterrupted) {
            // It was granted: the caller has it, and learns of the interrupt at its next wait.
            Thread.currentThread().interrupt();
            return true;
        }
        if (job.isGivenUp) {
            throw new AcquireTimeout(kept.names, null);
        }
        return job.outcome();
    }

    private boolean take(OwnConnection own, Kept kept, Attempt attempt, Job<?> job) throws SQLException {
        if (locked(() -> job.isGivenUp)) {
            return false;
        }
        long[] before = {0};
        Long token = attempt.tryOn(own, bound(kept), before);
        if (token == null) {
            return false;
        }
        boolean isWanted = locked(() -> {
            if (!job.isGivenUp) {
                keep(kept, before[0], token, null);
            }
            return !job.isGivenUp;
        });
        if (!isWanted) {
            kept.token = token;
            giveBackUnwanted(own, kept, bound(kept));
        }
        return isWanted;
    }

    boolean isHeld(Kept kept) {
        return locked(() -> kept.isHeld);
    }

    boolean isBoundToSession(Kept kept) {
        return locked(() -> kept.session != null);
    }

    /** Nanoseconds. */
    long remaining(Kept kept) {
        return locked(() -> kept.isHeld ? Math.max(0, kept.deadline - Clock.now()) : 0);
    }

    /** Sleeps; comes back as soon as the lease is held no more. */
    void sleep(Kept kept, long span) throws InterruptedException {
        lock.lockInterruptibly();
        try {
            await(Clock.now() + span, () -> !kept.isHeld);
        } finally {
            lock.unlock();
        }
    }

    /** Renews at once; the new token, or null. */
    Long renew(Kept kept) {
        return locked(() -> {
            if (!kept.isRenewed(Clock.now())) {
                return null;
            }
            // The one that is under way may have been judged before what the caller knows.
            long seen = kept.beats + (kept.isBeating ? 1 : 0);
            kept.renewed = null;
            beatNow(kept);
            awaitUninterruptibly(Clock.now() + patience(kept), () -> kept.beats > seen || !kept.isHeld);
            return kept.renewed;
        });
    }

    /** Gives it back. No error where that fails: then it ends at its ttl. */
    void release(Kept kept) {
        boolean isFirst = locked(() -> {
            boolean first = kept.isHeld && !kept.isEnding;
            kept.isEnding = true;
            return first;
        });
        if (isFirst) {
            int[] tries = {0};
            submit(new Job<>((own, self) -> {
                releaseBy(own, kept, tries[0]++);
                return null;
            }, Clock.now() + kept.third));
        }
        locked(() -> awaitUninterruptibly(Clock.now() + patience(kept), () -> !kept.isHeld));
        forget(kept);
        // Who is told of a loss is told before its holder goes on.
        kept.teller.await();
        awaitEnd();
    }

    private void releaseBy(OwnConnection own, Kept kept, int tries) throws SQLException {
        boolean reusesConnection = own.isOpen();
        try {
            Long closing = own.transaction(bound(kept), lockLimit(shortestTtl()), on -> giveBack(on, kept));
            if (closing == null && tries == 0) {
                lose(kept, Reason.GONE, null);
            }
        } catch (SQLException error) {
            if (reusesConnection && !own.isOpen()) {
                // The connection had ended unseen. Where the answer was lost, the lease is gone by our own release.
                releaseBy(own, kept, tries + 1);
                return;
            }
            if (Job.isLocked(error)) {
                throw error;
            }
            warnOfRelease(kept, error);
        }
        forget(kept);
    }

    /** Gives back a grant that came after its caller had given up. */
    void giveBackUnwanted(OwnConnection own, Kept kept, long limit) {
        try {
            own.transaction(limit, limit, on -> giveBack(on, kept));
        } catch (SQLException error) {
            warnOfRelease(kept, error);
        }
    }

    private static void warnOfRelease(Kept kept, Exception failure) {
        Holding.LOG.log(Level.WARNING, "the lease {0} was not released, and ends at its ttl: {1}",
                String.join(", ", kept.names), failure.getMessage());
    }

    /** Releases it; or, while it must stay taken yet, has it end at that time. NULL: it was gone. */
    Long giveBack(Connection on, Kept kept) throws SQLException {
        long stays = locked(kept::mustStay);
        if (stays > 0) {
            return Sql.value(on, fence.select(kept.form("lease_renew") + "(?, ?, ?::interval)"), kept.name(), kept.token,
                    TimeUnit.NANOSECONDS.toMicros(stays) + " microseconds");
        }
        return Sql.value(on, fence.select(kept.form("lease_release") + "(?, ?)"), kept.name(), kept.token);
    }

    /** It is kept no more: released, handed over, or lost. */
    void forget(Kept kept) {
        locked(() -> {
            kept.isHeld = false;
            leases.remove(kept);
            Sql.breakOff(kept.session);
            kept.session = null;
            changed.signalAll();
        });
    }

    /** From here on a loss breaks that connection off; false where it is lost already. */
    boolean enter(Kept kept, Connection connection) {
        return locked(() -> kept.isHeld && kept.guarded.add(connection));
    }

    void leave(Kept kept, Connection connection) {
        locked(() -> kept.guarded.remove(connection));
    }

    /** Waits for a renewal that is under way, and has no other begin. */
    void pause(Kept kept) {
        locked(() -> {
            kept.pauses++;
            awaitUninterruptibly(OwnConnection.NEVER, () -> !kept.isBeating || !kept.isHeld);
        });
    }

    void goOn(Kept kept) {
        locked(() -> {
            kept.pauses--;
            changed.signalAll();
        });
    }

    /** A loss, told once. */
    @Override
    final void lose(Kept kept, Reason reason, SQLException cause) {
        LeaseLost loss = new LeaseLost(reason, kept.names, cause);
        boolean isFirst = locked(() -> {
            boolean first = kept.isHeld;
            if (first) {
                kept.loss = loss;
                // What still works under it ends here, wherever it hangs.
                kept.guarded.forEach(Sql::breakOff);
                forget(kept);
            }
            return first;
        });
        if (isFirst) {
            Holding.LOG.log(Level.WARNING, loss.getMessage());
            // Not on a thread of ours: what is told may block.
            if (fence.telemetry() != Telemetry.NONE) {
                kept.teller.tell(() -> fence.telemetry().lost(loss));
            }
            kept.onLost.forEach(tell -> kept.teller.tell(() -> tell.accept(loss)));
        }
    }

    void observe(Observation observation) {
        locked(() -> {
            observations.add(observation);
            begin();
        });
    }

    void endObserving(Observation observation) {
        locked(() -> {
            observations.remove(observation);
            changed.signalAll();
        });
        awaitEnd();
    }

    // The threads

    private void submit(Job<?> job) {
        locked(() -> {
            jobs.add(job);
            begin();
        });
    }

    /** The lock is held. */
    private void begin() {
        if (run == null) {
            Run begun = new Run();
            // One that hangs in the resolver must not keep the process from ending.
            begun.threads.add(Sql.daemon("pg_fence keeper", begun::keep));
            begun.threads.add(Sql.daemon("pg_fence watch", () -> watch(begun)));
            begun.threads.forEach(Thread::start);
            run = begun;
        }
        changed.signalAll();
    }

    /** Waits for the threads where they have nothing left to do, so that nothing is cut short with the process. */
    private void awaitEnd() {
        long until = Clock.now() + TimeUnit.SECONDS.toNanos(5);
        locked(() -> {
            Run ending = run;
            boolean ends = ending != null && leases.isEmpty() && jobs.isEmpty() && observations.isEmpty();
            if (ends && !ending.threads.contains(Thread.currentThread())) {
                awaitUninterruptibly(until, () -> ending.isClosed || run == ending && !leases.isEmpty());
            }
        });
    }

    /** From the first lease to the last. */
    final class Run {
        final OwnConnection own = new OwnConnection(fence::open, Keeper.this::wake);
        final List<Thread> threads = new ArrayList<>();
        private boolean isOver;
        private boolean isClosed;
        private boolean wasApart;

        private void keep() {
            try {
                for (Runnable next = next(); next != null; next = next()) {
                    next.run();
                }
            } finally {
                own.close();
                locked(() -> {
                    isClosed = true;
                    changed.signalAll();
                });
            }
        }

        /** What is to be done next: renewals that are due go first. Null: nothing any more. */
        private Runnable next() {
            return locked(() -> {
                while (true) {
                    List<Kept> due = due();
                    if (!due.isEmpty()) {
                        return () -> beatAll(due);
                    }
                    Runnable small = wasApart ? first(this::job, this::apart) : first(this::apart, this::job);
                    small = small == null ? look() : small;
                    if (small != null) {
                        return small;
                    }
                    if (leases.isEmpty() && jobs.isEmpty() && observations.isEmpty()) {
                        isOver = true;
                        run = null;
                        changed.signalAll();
                        return null;
                    }
                    pauseUntil(this::nextTime);
                }
            });
        }

        private static Runnable first(Supplier<Runnable> one, Supplier<Runnable> other) {
            Runnable found = one.get();
            return found == null ? other.get() : found;
        }

        private long nextTime() {
            long now = Clock.now();
            long next = OwnConnection.NEVER;
            for (Kept kept : leases) {
                next = Math.min(next, kept.beatsAt(now));
            }
            for (Job<?> job : jobs) {
                next = Math.min(next, job.notBefore);
            }
            for (Observation observation : observations) {
                next = Math.min(next, observation.next);
            }
            return next;
        }

        /** Those to be renewed; with one, all that soon will, so that they go together from then on. */
        private List<Kept> due() {
            long now = Clock.now();
            if (leases.stream().noneMatch(kept -> !kept.isApart && kept.beatsAt(now) <= now)) {
                return List.of();
            }
            long soon = now + shortestTtl() / 6;
            List<Kept> due = leases.stream().filter(kept -> !kept.isApart && kept.beatsAt(now) <= soon).toList();
            due.forEach(kept -> kept.isBeating = true);
            return due;
        }

        private Runnable apart() {
            long now = Clock.now();
            for (Kept kept : leases) {
                if (kept.isApart && kept.beatsAt(now) <= now) {
                    kept.isBeating = true;
                    wasApart = true;
                    return () -> beatAll(List.of(kept));
                }
            }
            return null;
        }

        private Runnable job() {
            long now = Clock.now();
            for (Job<?> job : jobs) {
                if (job.notBefore <= now) {
                    jobs.remove(job);
                    wasApart = false;
                    return () -> perform(job);
                }
            }
            return null;
        }

        private void perform(Job<?> job) {
            job.run(own);
            locked(() -> {
                if (job.mustWait()) {
                    job.notBefore = Clock.now() + Math.max(10_000_000, (job.until - Clock.now()) / 20);
                    jobs.add(job);
                } else {
                    job.isDone = true;
                }
                changed.signalAll();
            });
        }

        private Runnable look() {
            long now = Clock.now();
            for (Observation observation : observations) {
                if (observation.next <= now) {
                    observation.next = now + Clock.LOOK_AGAIN;
                    return () -> observation.look(own, Math.min(shortestTtl() / 3, TimeUnit.SECONDS.toNanos(5)));
                }
            }
            return null;
        }

        private void beatAll(List<Kept> due) {
            boolean isReachable = true;
            for (List<Kept> batch : batches(due)) {
                try {
                    if (isReachable) {
                        isReachable = beat(own, batch);
                    } else {
                        tryLater(batch);
                    }
                } catch (RuntimeException error) {
                    Holding.LOG.log(Level.ERROR, "a renewal failed", error);
                    tryLater(batch);
                } finally {
                    locked(() -> {
                        batch.forEach(kept -> {
                            kept.isBeating = false;
                            kept.beats++;
                            if (kept.beatsAgain) {
                                beatNow(kept);
                            }
                        });
                        changed.signalAll();
                    });
                }
            }
        }
    }

    /** Tells losses at their deadlines, and breaks off a call that takes too long. */
    void watch(Run run) {
        while (true) {
            List<Kept> over = new ArrayList<>();
            List<Kept> forgotten = new ArrayList<>();
            lock.lock();
            try {
                if (run.isOver) {
                    return;
                }
                run.own.cutIfLate();
                long now = Clock.now();
                leases.stream().filter(kept -> kept.deadline <= now).forEach(over::add);
                leases.stream().filter(Kept::becomesForgotten).forEach(forgotten::add);
                if (over.isEmpty() && forgotten.isEmpty()) {
                    pauseUntil(() -> leases.stream().mapToLong(kept -> kept.deadline).reduce(run.own.cutAt(), Math::min));
                }
            } finally {
                lock.unlock();
            }
            over.forEach(kept -> lose(kept, Reason.DEADLINE, null));
            for (Kept kept : forgotten) {
                Holding.LOG.log(Level.WARNING, "the lease {0} was never released, and nothing has its Lease any more: it is "
                        + "renewed no more, and ends at its ttl", String.join(", ", kept.names));
            }
        }
    }

    /** Waits for the session of a session lease to end. */
    private void listen(Kept kept, Connection session) {
        try {
            PGConnection driver = session.unwrap(PGConnection.class);
            while (isHeld(kept)) {
                // Nobody notifies it: the call ends with the session.
                driver.getNotifications(0);
            }
        } catch (SQLException ended) {
            lose(kept, Reason.SESSION, ended);
        } finally {
            Sql.closeQuietly(session);
        }
    }

    // Times

    /** How long a call for this lease may take: no longer than any lease that is held can spare. */
    private long bound(Kept kept) {
        return Math.min(kept.third, shortestTtl() / 3);
    }

    /** What a caller waits for the keeper: a call for it after another's, and opening a connection. */
    private static long patience(Kept kept) {
        return 3 * kept.third + 3_000_000_000L;
    }
}
