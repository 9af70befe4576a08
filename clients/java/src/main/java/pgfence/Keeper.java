package pgfence;

import java.lang.System.Logger.Level;
import java.sql.Connection;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.time.Duration;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Comparator;
import java.util.Deque;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Set;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.locks.Condition;
import java.util.concurrent.locks.ReentrantLock;
import java.util.function.BooleanSupplier;
import java.util.function.LongSupplier;
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
class Keeper {
    /** So many leases are renewed by one statement: each takes locks until its end. */
    private static final int BATCH = 500;

    private static final long SHORTEST_LOCK_LIMIT = TimeUnit.MILLISECONDS.toNanos(10);

    private static final String LOCK_NOT_AVAILABLE = "55P03";

    private final Fence fence;
    /** Guards everything here, and in each {@link Kept}. */
    private final ReentrantLock lock = new ReentrantLock();
    private final Condition changed = lock.newCondition();
    private final Set<Kept> leases = new LinkedHashSet<>();
    private final Set<Observation> observations = new LinkedHashSet<>();
    private final Deque<Job<?>> jobs = new ArrayDeque<>();
    /** While there is something to do. */
    private Run run;

    Keeper(Fence fence) {
        this.fence = fence;
    }

    /** Something that the keeper's thread does by its connection. */
    @FunctionalInterface
    interface Step<T> {
        T on(OwnConnection own) throws SQLException;
    }

    private static final class Job<T> {
        final Step<T> step;
        /** Until then it is tried again where somebody's open transaction is in its way. */
        final long until;
        long notBefore;
        T value;
        Exception failure;
        boolean isDone;
        boolean isGivenUp;

        Job(Step<T> step, long until) {
            this.step = step;
            this.until = until;
        }

        void run(OwnConnection own) {
            try {
                value = step.on(own);
                failure = null;
            } catch (SQLException | RuntimeException error) {
                failure = error;
            }
        }

        boolean mustWait() {
            return failure instanceof SQLException error
                    && LOCK_NOT_AVAILABLE.equals(error.getSQLState())
                    && Clock.now() < until;
        }
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
        List<Job<Boolean>> self = new ArrayList<>();
        Job<Boolean> job = new Job<>(own -> take(own, kept, attempt, self.get(0)), 0);
        self.add(job);
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
        return outcome(job);
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
            own.transaction(bound(kept), lockLimit(kept.ttl), on -> giveBack(on, kept));
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

    void beatNow(Kept kept) {
        locked(() -> {
            kept.nextBeat = Clock.now();
            kept.beatsAgain = kept.isBeating;
            changed.signalAll();
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
            submit(new Job<>(own -> {
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
        SQLException failure = null;
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
            if (LOCK_NOT_AVAILABLE.equals(error.getSQLState())) {
                throw error;
            }
            failure = error;
        }
        if (failure != null) {
            warnOfRelease(kept, failure);
        }
        forget(kept);
    }

    private static void warnOfRelease(Kept kept, Exception failure) {
        Holding.LOG.log(Level.WARNING, "the lease {0} was not released, and ends at its ttl: {1}",
                String.join(", ", kept.names), failure.getMessage());
    }

    /** Releases it; or, while it must stay taken yet, has it end at that time. NULL: it was gone. */
    Long giveBack(Connection on, Kept kept) throws SQLException {
        String all = kept.isOfSeveral() ? "_all" : "";
        long stays = locked(kept::mustStay);
        if (stays > 0) {
            return Sql.value(on, fence.select("lease_renew" + all + "(?, ?, ?::interval)"), kept.name(), kept.token,
                    TimeUnit.NANOSECONDS.toMicros(stays) + " microseconds");
        }
        return Sql.value(on, fence.select("lease_release" + all + "(?, ?)"), kept.name(), kept.token);
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
    void lose(Kept kept, Reason reason, SQLException cause) {
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

    /** In the order of the names. A lease of several names has a statement of its own. */
    private static List<List<Kept>> batches(List<Kept> due) {
        List<Kept> ordered = due.stream()
                .filter(kept -> !kept.isOfSeveral())
                .sorted(Comparator.comparing(kept -> kept.names.get(0), Sql.BY_BYTES))
                .toList();
        List<List<Kept>> batches = new ArrayList<>();
        for (int begin = 0; begin < ordered.size(); begin += BATCH) {
            batches.add(ordered.subList(begin, Math.min(begin + BATCH, ordered.size())));
        }
        due.stream().filter(Kept::isOfSeveral).map(List::of).forEach(batches::add);
        return batches;
    }

    /** Renews them; whether the server could be reached. */
    boolean beat(OwnConnection own, List<Kept> batch) {
        long ttl = shortestTtl(batch);
        return beat(own, batch, lockLimit(ttl), true);
    }

    private boolean beat(OwnConnection own, List<Kept> all, long lockLimit, boolean mayReconnect) {
        long before = Clock.now();
        List<Kept> batch = locked(() -> all.stream().filter(kept -> kept.isRenewed(before)).toList());
        if (batch.isEmpty()) {
            return true;
        }
        boolean reusesConnection = own.isOpen();
        try {
            Long[] tokens = renew(own, batch, shortestTtl(batch) / 3, lockLimit);
            renewed(batch, before, tokens);
            return true;
        } catch (SQLException error) {
            if (!own.isOpen()) {
                // It may have ended unseen since the last time: a new one may do at once.
                if (reusesConnection && mayReconnect) {
                    return beat(own, batch, lockLimit, false);
                }
                Holding.LOG.log(Level.WARNING, "{0} leases were not renewed: {1}", batch.size(), error.getMessage());
                tryLater(batch);
                return false;
            }
            if (batch.size() > 1) {
                // One of them fails all: halves find it. Many that are locked must not use up the time of the others.
                int half = batch.size() / 2;
                long shorter = Math.max(lockLimit / 10, SHORTEST_LOCK_LIMIT);
                return beat(own, batch.subList(0, half), shorter, mayReconnect)
                        && beat(own, batch.subList(half, batch.size()), shorter, mayReconnect);
            }
            failedAlone(batch.get(0), error);
            return true;
        }
    }

    /** No loss yet where trying again can help: the deadline tells. */
    private void failedAlone(Kept kept, SQLException error) {
        Holding.LOG.log(Level.WARNING, "the lease {0} was not renewed: {1}", kept.names.get(0), error.getMessage());
        if (FenceException.isPermanent(error)) {
            lose(kept, Reason.DENIED, error);
        }
        locked(() -> kept.isApart = true);
        tryLater(List.of(kept));
    }

    private void tryLater(List<Kept> batch) {
        long now = Clock.now();
        locked(() -> batch.forEach(kept -> kept.nextBeat = now + kept.ttl / 12));
    }

    private void renewed(List<Kept> batch, long before, Long[] tokens) {
        for (int index = 0; index < tokens.length; index++) {
            if (tokens[index] == null) {
                lose(batch.get(index), Reason.GONE, null);
            } else {
                countsFrom(batch.get(index), before, tokens[index]);
            }
        }
    }

    /** Renews them by one statement. For each its new token, or null where it is gone. */
    Long[] renew(OwnConnection own, List<Kept> batch, long limit, long lockLimit) throws SQLException {
        Kept first = batch.get(0);
        if (first.isOfSeveral()) {
            String all = fence.select("lease_renew_all(?, ?)");
            return own.transaction(limit, lockLimit, on -> new Long[] {Sql.value(on, all, first.name(), first.token)});
        }
        String[] names = batch.stream().map(kept -> kept.names.get(0)).toArray(String[]::new);
        Long[] tokens = batch.stream().map(kept -> kept.token).toArray(Long[]::new);
        String each = "SELECT x.number, " + fence.named("lease_renew(x.name, x.token)")
                + " FROM unnest(?, ?) WITH ORDINALITY AS x(name, token, number)";
        return own.transaction(limit, lockLimit, on -> {
            Long[] renewed = new Long[names.length];
            try (PreparedStatement statement = Sql.prepare(on, each, names, tokens);
                    ResultSet rows = statement.executeQuery()) {
                while (rows.next()) {
                    renewed[rows.getInt(1) - 1] = Sql.number(rows, 2);
                }
            }
            return renewed;
        });
    }

    /** Granted or renewed by a call that was begun at {@code before}: from there the ttl counts. */
    void countsFrom(Kept kept, long before, long token) {
        locked(() -> {
            kept.deadline = before + kept.ttl;
            kept.nextBeat = before + kept.third;
            kept.renewed = token;
            kept.isApart = false;
            changed.signalAll();
        });
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

    private long shortestTtl() {
        return locked(() -> shortestTtl(leases));
    }

    private static long shortestTtl(Iterable<Kept> leases) {
        long shortest = Clock.nanos(Duration.ofDays(366));
        for (Kept kept : leases) {
            shortest = Math.min(shortest, kept.ttl);
        }
        return shortest;
    }

    /** How long a statement waits for somebody's open transaction, while other leases wait for it. */
    private static long lockLimit(long ttl) {
        return Math.max(ttl / 240, SHORTEST_LOCK_LIMIT);
    }

    /** What a caller waits for the keeper: a call for it after another's, and opening a connection. */
    private static long patience(Kept kept) {
        return 3 * kept.third + 3_000_000_000L;
    }

    // The lock

    private void wake() {
        locked(changed::signalAll);
    }

    private <T> T outcome(Job<T> job) throws SQLException {
        if (job.failure instanceof SQLException sql) {
            throw sql;
        } else if (job.failure instanceof RuntimeException other) {
            throw other;
        }
        return job.value;
    }

    private <T> T locked(Supplier<T> work) {
        lock.lock();
        try {
            return work.get();
        } finally {
            lock.unlock();
        }
    }

    private void locked(Runnable work) {
        lock.lock();
        try {
            work.run();
        } finally {
            lock.unlock();
        }
    }

    /** Waits for that time, or a change, or for a second. The lock is held. */
    private void pauseUntil(LongSupplier time) {
        try {
            changed.awaitNanos(Math.max(0, Math.min(time.getAsLong() - Clock.now(), Clock.LOOK_AGAIN)));
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

    private void awaitUninterruptibly(long until, BooleanSupplier comesTrue) {
        boolean wasInterrupted = false;
        while (true) {
            try {
                await(until, comesTrue);
                break;
            } catch (InterruptedException later) {
                wasInterrupted = true;
            }
        }
        if (wasInterrupted) {
            Thread.currentThread().interrupt();
        }
    }
}
