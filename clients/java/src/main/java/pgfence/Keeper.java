package pgfence;

import java.lang.System.Logger.Level;
import java.sql.*;
import java.util.*;
import java.util.concurrent.Callable;
import java.util.concurrent.locks.LockSupport;
import java.util.function.*;
import java.util.stream.Collectors;
import org.postgresql.core.BaseConnection;
import pgfence.FenceException.*;

/**
 * What keeps all leases of a fence. One thread watches their deadlines, and starts the heartbeats, each in a thread of its
 * own. It begins with the first lease and ends with the last, and so does the connection. Times are in seconds.
 */
final class Keeper {
    /** Timers may stand still while the machine sleeps, and nothing tells that a session has ended. */
    private static final double LOOK_AGAIN = 1;
    /** No call takes longer, whatever the ttl; and no portion of a wait, whose snapshot would hold back vacuum. */
    private static final double LONGEST = 10, PORTION = 2;
    /** Several names have no queue: so often they are tried. */
    private static final double TRY_AGAIN = 0.25;
    /** What {@code lease_keep} takes at once; and how many are released in one transaction, which has its share of locks. */
    private static final int MOST_PAIRS = 10_000, MOST_RELEASED = 200;
    private static final System.Logger LOG = System.getLogger("pgfence");

    /** The extension's schema, or nothing. */
    volatile String prefix = "";
    volatile Consumer<Event> onEvent;
    private final Callable<Connection> source;
    private final Line line;
    private final Set<Lease> leases = new HashSet<>();
    /** Calls that are under way, and heartbeats. */
    private int users;
    private boolean isRunning, isBeating;
    private double lookAt;
    /** The heartbeat fails; and a loss by that is in the log: one line an outage, however many leases there are. */
    private volatile boolean isOut, hasTold;
    volatile boolean isClosed;

    Keeper(Callable<Connection> source) {
        this.source = source;
        line = new Line(source, () -> !leases.isEmpty());
    }

    Sql.Call call(String sql, Object... arguments) { return new Sql.Call(sql.replace("@", prefix), arguments); }

    Sql.Call release(Holding held) {
        return held.names().size() == 1 ? call(Sql.RELEASE, held.names().get(0), held.token())
                : call(Sql.RELEASE_ALL, held.names().toArray(String[]::new), held.token());
    }

    // What a fence asks of it, in a thread of ours:

    /** A wait ends soon after it is given up. */
    List<Lease> acquire(List<String> names, Options asked, String holder, BooleanSupplier isGivenUp) throws SQLException {
        // The others are renewed meanwhile, and a session lease lives on their connection.
        Line on = asked.wait == 0 || asked.session ? line : new Line(source, () -> false);
        try {
            return using(true, () -> acquire(on, names, asked, holder, isGivenUp));
        } finally {
            Threads.close(on == line ? null : on.detach());
        }
    }

    private List<Lease> acquire(Line on, List<String> names, Options asked, String holder, BooleanSupplier isGivenUp)
            throws SQLException {
        double until = Clock.now() + asked.wait;
        String ttl = Sql.span(asked.ttl);
        while (true) {
            double before = Clock.now();
            double limit = on == line ? limit(asked.ttl) : Math.min(asked.ttl / 3, LONGEST);
            double portion = Math.max(0, Math.min(until - before, on == line ? Math.min(PORTION, limit) : PORTION));
            Sql.Call call = names.size() > 1
                    ? call(Sql.ACQUIRE_ALL, names.toArray(String[]::new), holder, ttl, asked.metadata, asked.session)
                    : call(Sql.ACQUIRE, names.get(0), holder, ttl, Sql.span(portion), asked.metadata, asked.shared, asked.slots,
                            asked.reclaim, asked.session);
            try {
                Line.Rows rows = on.rows(call, portion + limit, false);
                if (rows.list().get(0)[0] instanceof Long token) {
                    return granted(List.of(new Lease(this, names, token, before, asked.ttl, asked.session ? rows.session() : 0)));
                }
                if (Clock.now() >= until || isGivenUp.getAsBoolean() || isClosed) { throw taken(on, names, limit); }
                LockSupport.parkNanos(names.size() > 1 ? (long) (Math.min(until - Clock.now(), TRY_AGAIN) * 1e9) : 0);
            } catch (SQLException error) {
                // The role's transactions are SERIALIZABLE.
                if (!FenceException.stateOf(error).equals("40001") || isGivenUp.getAsBoolean()) { throw error; }
            }
        }
    }

    /** By whom, where that can be seen. */
    private LeaseTaken taken(Line on, List<String> names, double limit) {
        try {
            Sql.Call call = call(Sql.HOLDER, (Object) names.toArray(String[]::new));
            Object[] first = on.rows(call, limit, false).list().stream().findFirst().orElse(new Object[2]);
            return new LeaseTaken(names, (String) first[0], (Double) first[1], null);
        } catch (SQLException | FenceException unseen) {
            return new LeaseTaken(names, null, null, unseen);
        }
    }

    List<Lease> claim(List<String> names, int n, Options asked, String holder) throws SQLException {
        return using(true, () -> {
            double before = Clock.now();
            Sql.Call call = call(Sql.CLAIM, names.toArray(String[]::new), n, holder, Sql.span(asked.ttl));
            return granted(line.rows(call, limit(asked.ttl), false).list().stream()
                    .map(row -> new Lease(this, List.of((String) row[0]), (Long) row[1], before, asked.ttl, 0)).toList());
        });
    }

    private List<Lease> granted(List<Lease> some) {
        tell(Event.Kind.ACQUIRED, some);
        // Where the call has waited: the server counts from a later moment.
        some.stream().filter(lease -> Clock.now() > lease.beatAt).forEach(lease -> keep(List.of(lease)));
        synchronized (this) {
            some.stream().filter(lease -> lease.reason == null && !isClosed).forEach(leases::add);
            notifyAll();
        }
        try {
            end(isClosed ? some : List.of(), Reason.RELEASED);
            some.forEach(Lease::check);
        } catch (LeaseLost lost) {
            end(some, Reason.RELEASED);
            giveBack(some);
            throw lost;
        }
        return some;
    }

    /** Renews them now. */
    void keep(List<Lease> due) {
        List<Sql.Pair> pairs = pairsOf(due);
        double before = Clock.now(), smallest = smallest(due);
        List<Object[]> answers = new ArrayList<>();
        try {
            for (int from = 0; from < pairs.size(); from += MOST_PAIRS) {
                List<Sql.Pair> some = pairs.subList(from, Math.min(pairs.size(), from + MOST_PAIRS));
                Sql.Call call = call(Sql.KEEP, Sql.names(some), Sql.tokens(some));
                // A guard may ask for it while the thread ends.
                answers.addAll(using(false, () -> line.rows(call, Math.min(smallest / 3, LONGEST), true)).list());
            }
            isOut = hasTold = false;
            take(due, answers, before);
        } catch (NotGranted | NotInstalled forGood) {
            // The statement itself: trying again cannot help.
            end(due, Reason.REFUSED);
        } catch (SQLException | RuntimeException error) {
            beatAt(due, Clock.now() + smallest / 12);
            if (!isOut) { LOG.log(Level.WARNING, "leases are not renewed, and it is tried again: {0}", error.getMessage()); }
            isOut = true;
        }
    }

    private void take(List<Lease> due, List<Object[]> answers, double before) {
        Map<Reason, List<Lease>> lost = new EnumMap<>(Reason.class);
        List<Lease> renewed = new ArrayList<>();
        boolean hasKept = answers.stream().anyMatch(Lease::isKept);
        synchronized (this) {
            int at = 0;
            double now = Clock.now();
            for (Lease lease : due) {
                List<Object[]> own = answers.subList(at, at += lease.names().size());
                Reason reason = lease.answered(own, before, now, hasKept);
                if (reason != null) {
                    lost.computeIfAbsent(reason, none -> new ArrayList<>()).add(lease);
                } else if (lease.reason == null && own.stream().allMatch(Lease::isKept)) {
                    renewed.add(lease);
                }
            }
        }
        tell(Event.Kind.RENEWED, renewed);
        lost.forEach((reason, some) -> end(some, reason));
    }

    // In any thread:

    /** No error where that fails: then they end at their ttl. */
    void release(List<Lease> releasing) {
        // The connection, on which a session lease lives, is there until then.
        use(1);
        giveBack(end(releasing, Reason.RELEASED));
        use(-1);
    }

    private synchronized void use(int more) {
        users += more;
        notifyAll();
    }

    private void giveBack(List<Lease> ended) {
        if (ended.isEmpty()) { return; }
        List<Lease> first = ended.subList(0, Math.min(ended.size(), MOST_RELEASED));
        boolean isReached = Threads.start(() -> release(first, 0)).exceptionally(error -> warn(first, error)).join();
        giveBack(isReached ? ended.subList(first.size(), ended.size()) : List.of());
    }

    /** In one transaction. */
    private boolean release(List<Lease> some, double until) {
        double limit = limit(smallest(some));
        List<Sql.Pair> pairs = pairsOf(some);
        String lockLimit = String.valueOf(Math.max(10, Math.round(limit / 4 * 1000)));
        Sql.Call call = call(Sql.RELEASE_ASIDE, lockLimit, Sql.names(pairs), Sql.tokens(pairs));
        try {
            Iterator<Object[]> answers = using(false, () -> line.rows(call, limit, false)).list().iterator();
            for (Lease lease : some) {
                boolean isGone = lease.names().stream().filter(name -> answers.next()[0] == null).count() > 0;
                if (isGone && lease.reason == Reason.RELEASED) {
                    lease.reason = Reason.GONE;
                    LOG.log(Level.WARNING, "{0} lost (gone)", allOf(List.of(lease)));
                    tell(Event.Kind.LOST, List.of(lease));
                } else if (!isGone) {
                    tell(Event.Kind.RELEASED, List.of(lease));
                }
            }
            return true;
        } catch (SQLException | RuntimeException error) {
            // Somebody's open transaction has changed one of them.
            boolean isLocked = FenceException.stateOf(error).equals("55P03");
            if (isLocked && some.size() > 1) { return some.stream().allMatch(lease -> release(List.of(lease), 0)); }
            if (isLocked && (until == 0 || Clock.now() < until)) {
                LockSupport.parkNanos((long) (limit / 4 * 1e9));
                return release(some, until == 0 ? Clock.now() + limit : until);
            }
            return warn(some, error);
        }
    }

    /** Gives everything back, and ends the waits after their portions. */
    void close() {
        List<Lease> all;
        synchronized (this) {
            isClosed = true;
            all = List.copyOf(leases);
        }
        release(all);
        Threads.run(() -> awaitEnd(Clock.now() + 3 * LOOK_AGAIN)).exceptionally(error -> null).join();
    }

    private synchronized void awaitEnd(double until) throws InterruptedException {
        for (notifyAll(); isRunning && Clock.now() < until; ) { sleep(until); }
    }

    /** Throws LeaseLost where it is over, whatever the threads do. */
    void check(Lease lease) {
        if (lease.reason == null && Clock.now() >= lease.deadline) { end(List.of(lease), Reason.DEADLINE); }
        if (lease.reason != null) { throw lease.loss(false, null); }
    }

    /** When the next renewal tells whether they are lost. */
    synchronized void beatAt(List<Lease> some, double at) {
        some.forEach(lease -> lease.beatAt = at);
        notifyAll();
    }

    /** The heartbeat leaves out what is about to be released. */
    synchronized void rest(List<Lease> some, int more) { some.forEach(lease -> lease.resting += more); }
    /** From here on a loss breaks the connection off, where it hangs, too. */
    synchronized void enter(List<Lease> some, BaseConnection on) { some.forEach(lease -> lease.guards.add(on)); }
    synchronized void leave(List<Lease> some, BaseConnection on) { some.forEach(lease -> lease.guards.remove(on)); }

    /** Returns what was not over before. */
    List<Lease> end(List<Lease> ending, Reason reason) {
        List<BaseConnection> cuts = new ArrayList<>();
        List<Lease> ended;
        synchronized (this) {
            ended = ending.stream().filter(lease -> lease.reason == null).distinct().toList();
            for (Lease lease : ended) {
                lease.reason = reason;
                leases.remove(lease);
                cuts.addAll(lease.guards);
            }
            notifyAll();
        }
        if (!ended.isEmpty() && reason != Reason.RELEASED) {
            cuts.forEach(Threads::breakOff);
            boolean byOutage = isOut && reason == Reason.DEADLINE;
            LOG.log(byOutage && hasTold ? Level.DEBUG : Level.WARNING, "{0} lost ({1})", allOf(ended), reason);
            hasTold = byOutage;
            tell(Event.Kind.LOST, ended);
        }
        return ended;
    }

    void tell(Event.Kind kind, List<Lease> some) {
        for (Lease lease : onEvent == null ? List.<Lease>of() : some) {
            Reason reason = kind == Event.Kind.LOST ? lease.reason : null;
            try {
                onEvent.accept(new Event(kind, lease.names(), lease.token(), lease.remaining(), reason));
            } catch (RuntimeException error) {
                LOG.log(Level.ERROR, "what listens to events has failed", error);
            }
        }
        if (kind == Event.Kind.LOST) {
            // In another thread, for what is done then may block.
            Threads.run(() -> some.forEach(lease -> lease.lost().complete(lease.loss(false, null))));
        }
    }

    /** Whether the server could be asked at all. */
    private static boolean warn(List<Lease> some, Throwable error) {
        LOG.log(Level.WARNING, "{0} not released, and ends at its ttl: {1}", allOf(some), error.getMessage());
        return !FenceException.stateOf(error).isEmpty() && !FenceException.isEnd(error);
    }

    /** How long a call may take: a third of that ttl and of all that are kept. */
    private synchronized double limit(double ttl) { return Math.min(LONGEST, Math.min(ttl, smallest(leases)) / 3); }
    private static double smallest(Collection<Lease> some) { return Lease.least(some.stream().mapToDouble(lease -> lease.ttl)); }

    static List<Sql.Pair> pairsOf(List<Lease> some) {
        return some.stream().flatMap(one -> one.names().stream().map(name -> new Sql.Pair(name, one.token()))).toList();
    }

    private static String allOf(List<Lease> some) {
        String names = some.stream().limit(5).map(lease -> String.join(", ", lease.names())).collect(Collectors.joining(", "));
        String more = some.size() > 5 ? " and " + (some.size() - 5) + " more" : "";
        return (some.size() == 1 ? "the lease is " : "leases are ") + names + more + ":";
    }

    // Threads

    private interface Use<T> {
        T call() throws SQLException;
    }

    /** The connection and the thread are there meanwhile. */
    private <T> T using(boolean begins, Use<T> use) throws SQLException {
        synchronized (this) {
            if (begins && isClosed) { throw new FenceException("the fence is closed", null); }
            if (!isRunning && Threads.run(this::run).isCompletedExceptionally()) {
                throw new FenceException("a thread cannot be started", null);
            }
            isRunning = true;
            users++;
        }
        try {
            return use.call();
        } finally {
            use(-1);
        }
    }

    private void run() {
        for (boolean goesOn = true; goesOn; ) {
            try {
                goesOn = watch();
            } catch (Throwable error) {
                hasDied(error);
            }
        }
    }

    /** Of whatever: it begins anew, without these leases. */
    private void hasDied(Throwable error) {
        LOG.log(Level.ERROR, "what kept the leases has died", error);
        List<Lease> all;
        synchronized (this) { all = List.copyOf(leases); }
        end(all, Reason.KEEPER);
    }

    private boolean watch() throws InterruptedException {
        List<Lease> over, due;
        Connection idle = null;
        boolean goesOn, beats;
        synchronized (this) {
            if (leases.isEmpty() && users == 0) {
                idle = line.detach();
                isRunning = idle != null;
                notifyAll();
            }
            goesOn = isRunning;
            double now = Clock.now();
            over = leases.stream().filter(lease -> lease.deadline <= now).toList();
            double first = Lease.least(leases.stream().mapToDouble(Lease::dueAt));
            boolean looks = lookAt <= now && leases.stream().anyMatch(lease -> lease.session != 0);
            due = leases.stream().filter(lease -> first <= now && lease.goesAlong(now)).toList();
            beats = !isBeating && (first <= now || looks);
            if (beats) {
                lookAt = now + LOOK_AGAIN;
                isBeating = true;
                users++;
            } else if (goesOn && over.isEmpty() && idle == null) {
                double deadline = Lease.least(leases.stream().mapToDouble(lease -> lease.deadline));
                sleep(isBeating ? deadline : Math.min(first, deadline));
            }
        }
        end(over, Reason.DEADLINE);
        Threads.close(idle);
        if (beats) { Threads.run(() -> beat(due)).exceptionally(noThread -> beat(due)); }
        return goesOn;
    }

    private Void beat(List<Lease> due) {
        try {
            // A session lease ends with its connection.
            line.look();
            List<Lease> ended;
            synchronized (this) {
                ended = leases.stream().filter(one -> one.session != 0 && one.session != line.session).toList();
            }
            end(ended, Reason.SESSION);
            if (!due.isEmpty()) { keep(due); }
        } catch (Throwable error) {
            hasDied(error);
        } finally {
            synchronized (this) {
                isBeating = false;
                users--;
                notifyAll();
            }
        }
        return null;
    }

    /** The lock is held. */
    private void sleep(double until) throws InterruptedException {
        wait(Math.max(1, (long) Math.ceil(Math.min(until - Clock.now(), LOOK_AGAIN) * 1000)));
    }
}
