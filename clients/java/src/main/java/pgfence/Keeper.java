package pgfence;

import java.lang.System.Logger.Level;
import java.sql.*;
import java.util.*;
import java.util.concurrent.*;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.concurrent.locks.LockSupport;
import java.util.function.*;
import java.util.stream.Collectors;
import org.postgresql.core.BaseConnection;
import pgfence.Fence.Event;
import pgfence.FenceException.*;

/**
 * Keeps all leases of a fence. One thread watches their deadlines, and starts the heartbeats, each in a thread of its
 * own. It begins with the first lease and ends with the last, and so does the connection. Times are in seconds.
 */
final class Keeper {
    /** Timers may stand still while the machine sleeps, and nothing tells that a session has ended. */
    private static final double LOOK_AGAIN = 1;
    /** No call takes longer, whatever the ttl; and no portion of a wait, whose snapshot would hold back vacuum. */
    private static final double LONGEST = 10, PORTION = 2;
    /** Several names have no queue: so often they are tried. */
    private static final double TRY_AGAIN = 0.25;
    /** The most for one {@code lease_keep}; and for a release in one transaction, which has its share of locks. */
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
    private boolean isRunning;
    private volatile boolean isBeating;
    private double lookAt;
    /** The heartbeat fails; and a loss by that is in the log: one line an outage, however many leases there are. */
    private volatile boolean isOut, hasTold;
    volatile boolean isClosed;

    Keeper(Callable<Connection> source) {
        this.source = source;
        line = new Line(source, () -> !leases.isEmpty());
    }

    Sql.Call call(String sql, Object... arguments) { return new Sql.Call(sql.replace("@", prefix), arguments); }

    List<Lease> acquire(List<String> names, Options asked, BooleanSupplier stop) throws SQLException, InterruptedException {
        return aside(stop, isOver -> {
            // The others are renewed meanwhile, and a session lease lives on their connection.
            Line on = asked.wait == 0 || asked.session ? line : new Line(source, () -> false);
            try {
                return List.of(acquired(on, names, asked, isOver));
            } finally {
                Threads.close(on == line ? null : on.detach());
            }
        });
    }

    private Lease acquired(Line on, List<String> names, Options asked, BooleanSupplier isOver) throws SQLException {
        double until = Clock.now() + asked.wait;
        String ttl = Sql.span(asked.ttl);
        String[] all = names.toArray(String[]::new);
        while (true) {
            double before = Clock.now();
            double limit = on == line ? limit(asked.ttl) : Math.min(asked.ttl / 3, LONGEST);
            double portion = Math.max(0, Math.min(until - before, on == line ? Math.min(PORTION, limit) : PORTION));
            Sql.Call call = names.size() != 1
                    ? call(Sql.ACQUIRE_ALL, all, asked.holder, ttl, asked.metadata, asked.session, all)
                    : call(Sql.ACQUIRE, names.get(0), asked.holder, ttl, Sql.span(portion), asked.metadata, asked.shared,
                            asked.slots, asked.reclaim, asked.session, all);
            Line.Rows rows = on.calmly(call, portion + limit, isOver);
            Object[] answer = rows.list().get(0);
            if (answer[0] instanceof Long token) {
                return new Lease(this, names, token, before, asked.ttl, asked.session ? rows.session() : 0);
            }
            if (Clock.now() >= until || isOver.getAsBoolean()) {
                throw new LeaseTaken(names, (String) answer[1], (Double) answer[2], null);
            }
            LockSupport.parkNanos(names.size() > 1 ? (long) (Math.min(until - Clock.now(), TRY_AGAIN) * 1e9) : 0);
        }
    }

    private interface Acquiring {
        List<Lease> until(BooleanSupplier isOver) throws SQLException;
    }

    /** In a thread of ours: an interrupt gives up, and {@code stop}. A grant that comes all the same is given back. */
    private List<Lease> aside(BooleanSupplier stop, Acquiring acquiring) throws SQLException, InterruptedException {
        AtomicBoolean isGivenUp = new AtomicBoolean();
        BooleanSupplier isOver = () -> isClosed || isGivenUp.get() || stop.getAsBoolean();
        CompletableFuture<List<Lease>> granting = Threads.start(() -> using(() -> granted(acquiring.until(isOver))));
        try {
            return granting.get();
        } catch (ExecutionException failed) {
            throw Threads.thrown(failed.getCause());
        } catch (InterruptedException interrupt) {
            isGivenUp.set(true);
            granting.thenAccept(this::release);
            throw interrupt;
        }
    }

    private List<Lease> granted(List<Lease> some) {
        try {
            tell(Event.Kind.ACQUIRED, some);
            // Where the call has waited: the server counts from a later moment.
            some.stream().filter(lease -> Clock.now() > lease.beatAt).forEach(lease -> keep(List.of(lease)));
            synchronized (this) {
                some.stream().filter(lease -> lease.reason == null && !isClosed).forEach(leases::add);
                notifyAll();
            }
            if (isClosed) { release(some); }
            some.forEach(Lease::check);
        } catch (RuntimeException | Error failed) {
            // Nobody gets them.
            release(some);
            throw failed;
        }
        return some;
    }

    /** Renews them now. */
    void renew(List<Lease> some) throws Exception { using(() -> keep(some)); }

    private Void keep(List<Lease> due) {
        String[] names = Sql.names(due);
        Long[] tokens = Sql.tokens(due);
        double before = Clock.now(), smallest = smallest(due);
        List<Object[]> answers = new ArrayList<>();
        try {
            // None are due where it is to be seen whether a session has ended.
            for (int from = 0, to = -1; to < names.length; from = to) {
                to = Math.min(names.length, from + MOST_PAIRS);
                Sql.Call call = call(Sql.KEEP, Arrays.copyOfRange(names, from, to), Arrays.copyOfRange(tokens, from, to));
                answers.addAll(line.rows(call, limit(smallest)).list());
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
        return null;
    }

    private void take(List<Lease> due, List<Object[]> answers, double before) {
        Map<Reason, List<Lease>> lost = new EnumMap<>(Reason.class);
        List<Lease> renewed = new ArrayList<>();
        boolean hasKept = answers.stream().anyMatch(Lease::isKept);
        Iterator<Object[]> each = answers.iterator();
        synchronized (this) {
            for (Lease lease : due) {
                List<Object[]> own = lease.names().stream().map(name -> each.next()).toList();
                Reason reason = hasSession(lease) ? lease.answered(own, before, Clock.now(), hasKept) : Reason.SESSION;
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

    /** No error where that fails: then they end at their ttl. */
    void release(List<Lease> releasing) {
        // The connection, on which a session lease lives, is there until then.
        use(1);
        List<Lease> ended = end(releasing, Reason.RELEASED);
        if (!ended.isEmpty()) { Threads.start(() -> giveBack(ended)).exceptionally(error -> warn(ended, error)).join(); }
        use(-1);
    }

    private synchronized void use(int more) {
        users += more;
        notifyAll();
    }

    /** Whether the server could be asked at all. */
    private boolean giveBack(List<Lease> some) {
        if (some.size() > MOST_RELEASED) {
            return giveBack(some.subList(0, MOST_RELEASED)) && giveBack(some.subList(MOST_RELEASED, some.size()));
        }
        double limit = limit(smallest(some)), until = Clock.now() + limit;
        String lockLimit = String.valueOf(Math.max(10, Math.round(limit / 4 * 1000)));
        Sql.Call call = call(Sql.RELEASE_ASIDE, Sql.names(some), Sql.tokens(some), lockLimit);
        for (int ended = 0; ; ) {
            try {
                List<Lease> gone = Sql.gone(some, line.rows(call, limit).list());
                gone.stream().filter(lease -> lease.reason == Reason.RELEASED).forEach(lease -> {
                    lease.reason = Reason.GONE;
                    LOG.log(Level.WARNING, "{0} lost (gone)", allOf(List.of(lease)));
                    tell(Event.Kind.LOST, List.of(lease));
                });
                tell(Event.Kind.RELEASED, some.stream().filter(lease -> !gone.contains(lease)).toList());
                return true;
            } catch (SQLException | RuntimeException error) {
                if (FenceException.isEnd(error) && ended++ == 0) { continue; } // it may only have shown that
                // Somebody's open transaction has changed one of them.
                boolean isLocked = FenceException.stateOf(error).matches("55P03|40001");
                if (isLocked && some.size() > 1) { return some.stream().allMatch(lease -> giveBack(List.of(lease))); }
                if (!isLocked || Clock.now() > until) { return warn(some, error); }
                LockSupport.parkNanos((long) (limit / 4 * 1e9));
            }
        }
    }

    /** Gives everything back, and ends the waits after their portions. */
    void close() {
        isClosed = true;
        release(all());
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
            Runnable completes = () -> some.forEach(lease -> lease.lost().complete(lease.loss(false, null)));
            // In another thread, if there is one, for what is done then may block.
            Threads.run(completes::run).exceptionally(noThread -> {
                completes.run();
                return null;
            });
        }
    }

    private static boolean warn(List<Lease> some, Throwable error) {
        LOG.log(Level.WARNING, "{0} not released, and ends at its ttl: {1}", allOf(some), error.getMessage());
        return !FenceException.stateOf(error).isEmpty() && !FenceException.isEnd(error);
    }

    /** How long a call may take: a third of that ttl and of all that are kept. */
    private synchronized double limit(double ttl) { return Math.min(LONGEST, Math.min(ttl, smallest(leases)) / 3); }
    private static double smallest(Collection<Lease> some) { return Lease.least(some.stream().mapToDouble(lease -> lease.ttl)); }

    private static String allOf(List<Lease> some) {
        String names = some.stream().limit(5).map(lease -> String.join(", ", lease.names())).collect(Collectors.joining(", "));
        String more = some.size() > 5 ? " and " + (some.size() - 5) + " more" : "";
        return (some.size() == 1 ? "the lease is " : "leases are ") + names + more + ":";
    }

    // Threads

    /** The connection and the thread are there meanwhile. */
    private <T> T using(Callable<T> use) throws Exception {
        synchronized (this) {
            if (isClosed) { throw new FenceException("the fence is closed", false, null); }
            // Throws where no thread can be started.
            if (!isRunning) { Threads.run(this::run).getNow(null); }
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
        end(all(), Reason.KEEPER);
    }

    private synchronized List<Lease> all() { return List.copyOf(leases); }

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

    /** A session lease ends with its connection. */
    private boolean hasSession(Lease lease) { return lease.session == 0 || lease.session == line.session; }

    private Void beat(List<Lease> due) {
        try {
            keep(due);
            end(all().stream().filter(lease -> !hasSession(lease)).toList(), Reason.SESSION);
        } catch (Throwable error) {
            hasDied(error);
        } finally {
            isBeating = false;
            use(-1);
        }
        return null;
    }

    /** The lock is held. */
    private void sleep(double until) throws InterruptedException {
        wait(Math.max(1, (long) Math.ceil(Math.min(until - Clock.now(), LOOK_AGAIN) * 1000)));
    }
}
