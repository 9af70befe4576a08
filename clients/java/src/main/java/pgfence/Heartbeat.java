package pgfence;

import pgfence.Connections.One;
import pgfence.FenceException.*;
import pgfence.LeaseState.*;

import java.lang.System.Logger.Level;
import java.sql.*;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.*;
import java.util.function.Consumer;
import java.util.stream.Stream;

/**
 * Keeps all leases of a fence. It gives the inputs to {@link LeaseState}, which decides, and
 * carries out the effects: it has the clock, the threads and the connections. One thread watches
 * the time while there is anything to watch; each call is in a thread of its own, so that it does
 * not matter where one hangs.
 */
final class Heartbeat {
    static final System.Logger LOG = System.getLogger("pgfence");
    private static final long IDLE = 250, FOR_A_CAUSE = 250, FOR_A_RENEWAL = 10_000, POLL = 100;

    volatile Statements statements = new Statements("");
    volatile Consumer<Fence.Event> onEvent = event -> {};
    private final Callable<Connection> source;

    /** What is said of the source if no connection comes from it. */
    private final String noConnection;

    // The rest is guarded by the lock of this.
    private final LeaseState states;
    final long spread = ThreadLocalRandom.current().nextLong(1001);
    private final Map<String, Lease> leases = new HashMap<>();
    private final Map<String, Acquire> acquires = new HashMap<>();
    private final Map<Integer, One> connections = new HashMap<>();
    private final CompletableFuture<Void> closed = new CompletableFuture<>();
    private final Deque<Effect> effects = new ArrayDeque<>();

    /** Events and answers, which are told in their order, without the lock. */
    private final Deque<Runnable> toTell = new ArrayDeque<>();

    private boolean isCarryingOut, isTelling, isWatching;
    private long wakeAt = LeaseState.NEVER, lookedAt;
    private int lastId;

    /** For the line of the log that is about them. */
    private final List<String> lost = new ArrayList<>();

    private String lastError;

    Heartbeat(Callable<Connection> source, String noConnection) {
        this.source = source;
        this.noConnection = noConnection;
        states = new LeaseState(spread);
    }

    /** An acquire that is under way. */
    static final class Acquire {
        /** Of a row the table and the key. */
        final List<String> names;

        final Statements.Table table;
        final Options options;
        final CompletableFuture<Reply> answer = new CompletableFuture<>();

        /** The error of a call, and the role of its connection, if that could be opened. */
        final CompletableFuture<Throwable> failed = new CompletableFuture<>();

        volatile Throwable cause;
        volatile String role;

        Acquire(List<String> names, Statements.Table table, Options options) {
            this.names = names;
            this.table = table;
            this.options = options;
        }
    }

    // The clock, and what comes in

    /** Gives an input to the states: the answer to a call, or 0. */
    private void input(int call, Runnable input) {
        decide(call, input);
        tell();
    }

    private synchronized void decide(int call, Runnable input) {
        effects.addAll(states.step(Clock.now(), call, input));
        carryOutAll();
        wakeAt = states.wake(Clock.now());
        if (wakeAt < LeaseState.NEVER) {
            watch();
        }
        notifyAll();
    }

    /** By one thread at a time, so that the order stays. */
    private void tell() {
        while (true) {
            Runnable next;
            synchronized (this) {
                next = isTelling ? null : toTell.poll();
                if (next == null) {
                    return;
                }
                isTelling = true;
            }
            try {
                next.run();
            } catch (Throwable error) {
                LOG.log(Level.ERROR, "what listens to events has failed", error);
            }
            synchronized (this) {
                isTelling = false;
            }
        }
    }

    /** Has a thread watch the time, if there is one; the lock is held. */
    private boolean watch() {
        isWatching = isWatching || Connections.run(this::watchTheTime);
        return isWatching;
    }

    private void watchTheTime() {
        while (true) {
            try {
                synchronized (this) {
                    if (wakeAt >= LeaseState.NEVER) {
                        isWatching = false;
                        return;
                    }
                    long left = wakeAt - Clock.now();
                    if (left > 0) {
                        wait(left);
                        continue;
                    }
                }
                input(0, () -> {});
                lookAtIdle();
            } catch (Throwable error) {
                LOG.log(Level.ERROR, "what keeps the leases has died, and begins anew", error);
                input(0, states::died);
            }
        }
    }

    /** Nothing else tells that an idle connection has ended. */
    private synchronized void lookAtIdle() {
        if (Clock.now() < lookedAt + LeaseState.LOOK_AGAIN / 2) {
            return;
        }
        lookedAt = Clock.now();
        connections.values().forEach(one -> Connections.run(() -> look(one)));
    }

    private void look(One one) {
        boolean hasEnded = false;
        if (one.use.tryLock()) {
            try {
                hasEnded = one.hasEnded(0);
            } finally {
                one.use.unlock();
            }
        }
        if (hasEnded) {
            input(
                    0,
                    () -> {
                        connections.remove(one.number);
                        states.disconnected(one.number);
                    });
            one.hangUp();
        }
    }

    // Effects

    /**
     * In their order, and each to its end: one that fails has an input of its own, whose effects
     * come after these.
     */
    private void carryOutAll() {
        if (isCarryingOut) {
            return;
        }
        isCarryingOut = true;
        try {
            for (Effect effect = effects.poll(); effect != null; effect = effects.poll()) {
                carryOut(effect);
            }
        } finally {
            isCarryingOut = false;
            lost.clear();
        }
    }

    private void carryOut(Effect effect) {
        if (effect instanceof Call call) {
            send(call);
        } else if (effect instanceof Cut cut) {
            One one = connections.remove(cut.cut());
            if (one != null) {
                one.cut();
            }
        } else if (effect instanceof HangUp ends) {
            One one = connections.remove(ends.hangUp());
            if (one != null) {
                Connections.run(one::hangUp);
            }
        } else if (effect instanceof LeaseState.Event event) {
            event(event);
        } else if (effect instanceof Reply reply) {
            Acquire acquire = acquires.remove(reply.reply);
            if (acquire != null) {
                toTell.add(() -> acquire.answer.complete(reply));
            }
        } else if (effect instanceof Log line) {
            log(line);
        } else if (effect instanceof Closed) {
            closed.complete(null);
        }
    }

    private void log(Log line) {
        if (line.code() != null) {
            LOG.log(
                    Level.WARNING,
                    "{0}, and it is tried again: {1}",
                    line.key() == null ? "leases are not renewed" : "no lease could be acquired",
                    line.code().equals("no answer") || lastError == null ? line.code() : lastError);
            return;
        }
        String names =
                lost.isEmpty() || !line.log().equals("lost")
                        ? ""
                        : ": "
                                + String.join(", ", lost.subList(0, Math.min(5, lost.size())))
                                + (lost.size() > 5 ? ", …" : "");
        String reason = line.reason() == null ? "" : " (" + line.reason() + ")";
        String count = line.count() > 1 ? line.count() + " leases are " : "leases are ";
        LOG.log(Level.WARNING, "{0}", count + line.log() + reason + names);
    }

    private void event(LeaseState.Event event) {
        Lease lease = leases.get(event.key());
        Fence.Event.Kind kind = Fence.Event.Kind.valueOf(event.event().toUpperCase(Locale.ROOT));
        switch (kind) {
            case ACQUIRED -> {
                lease = new Lease(this, states.grant(event.key()), acquires.get(event.key()));
                leases.put(event.key(), lease);
            }
            case RENEWED -> lease.renewals++;
            case LOST -> {
                lost.addAll(lease.names());
                lease.ends(event.reason(), event.advice());
                lease.guards.forEach(Connections::cut);
                toTell.add(lease::tellLoss);
            }
            default -> {
                lease.ends(Reason.RELEASED, null);
                leases.remove(event.key());
            }
        }
        tells(
                new Fence.Event(
                        kind,
                        lease.names(),
                        event.token(),
                        Duration.ofMillis(event.remaining()),
                        event.reason()));
    }

    private synchronized void tells(Fence.Event event) {
        toTell.add(() -> onEvent.accept(event));
    }

    /** Of a leader, who does not hold a lease just then. */
    void interrupted(String name) {
        tells(new Fence.Event(Fence.Event.Kind.INTERRUPTED, List.of(name), 0, Duration.ZERO, null));
        tell();
    }

    // Calls

    private void send(Call call) {
        One one = call.open ? new One(call.on) : connections.get(call.on);
        connections.put(call.on, one);
        // What confirms a lease is its acquire's as well.
        String asker = call.grants.isEmpty() ? call.asker : call.grants.get(0).key;
        Acquire acquire = acquires.getOrDefault(asker, new Acquire(call.names, null, null));
        Statements.Statement statement =
                switch (call.verb) {
                    case "acquire" -> statements.acquire(call, acquire.options);
                    case "undo" -> statements.undo(call);
                    case "release" -> statements.release(call);
                    default -> statements.keep(call);
                };
        if (!Connections.run(() -> run(call, one, acquire, statement))) {
            acquire.cause = Connections.noThread();
            effects.addAll(
                    states.step(
                            Clock.now(),
                            call.call,
                            () -> states.failed(call.call, "53000", false)));
        }
    }

    /** Sends a call, and gives its answer to the states. */
    private void run(Call call, One one, Acquire acquire, Statements.Statement statement) {
        String code = null;
        Throwable error = null;
        Answer answer = null;
        boolean isOpen = !call.open;
        one.use.lock();
        try {
            if (!isOpen) {
                one.open(source);
                isOpen = true;
                input(call.call, () -> states.sent(call.call));
            } else if (one.hasEnded(IDLE)) {
                code = "unsent";
            }
            if (code == null) {
                answer = read(call, one.rows(statement));
            }
        } catch (Throwable failed) {
            error = failed;
            code = codeOf(failed, isOpen, one.isBroken());
        } finally {
            one.use.unlock();
        }
        if (code == null) {
            Answer said = answer;
            input(call.call, () -> states.answered(call.call, said));
        } else {
            fails(call, one, acquire, code, error);
        }
    }

    private void fails(Call call, One one, Acquire acquire, String code, Throwable error) {
        boolean isBroken = one.isBroken();
        input(
                call.call,
                () -> {
                    if (error != null) {
                        lastError = code + ": " + error.getMessage();
                        acquire.role = one.role;
                        acquire.cause = error;
                        acquire.failed.complete(error);
                    }
                    states.failed(call.call, code, isBroken);
                });
    }

    private static String codeOf(Throwable error, boolean isOpen, boolean isBroken) {
        String state = FenceException.stateOf(error);
        if (error instanceof Error || error instanceof IllegalArgumentException) {
            return "panicked";
        }
        if (!isOpen) {
            return FenceException.codeOfOpening(error);
        }
        return !state.isEmpty() ? state : isBroken ? "ended" : "unreadable";
    }

    // What the rows say

    private static Answer read(Call call, List<Object[]> rows) {
        return switch (call.verb) {
            case "acquire" -> {
                Object[] row = rows.get(0);
                Taken taken =
                        row[0] == null
                                ? new Taken((String) row[1], span(row[2], 0), (String) row[3])
                                : null;
                yield new Answer((Long) row[0], taken, null);
            }
            case "undo" -> new Answer((Long) rows.get(0)[0], null, null);
            default -> {
                boolean isRelease = call.verb.equals("release");
                if (rows.size() != call.names.size()) {
                    throw new IllegalStateException("as many rows as leases");
                }
                yield new Answer(
                        null, null, rows.stream().map(row -> outcome(isRelease, row)).toList());
            }
        };
    }

    private static Outcome outcome(boolean isRelease, Object[] row) {
        return isRelease
                ? new Outcome(row[0] != null)
                : new Outcome((String) row[0], span(row[1], -1), span(row[2], -1), (String) row[3]);
    }

    /** Milliseconds of seconds, rounded down. */
    private static long span(Object seconds, long otherwise) {
        return seconds == null
                ? otherwise
                : (long) Math.min(Math.max(0, (Double) seconds * 1000), LeaseState.NEVER);
    }

    // What a program asks for

    /** Null if it was to stop before. */
    Lease acquire(List<String> names, Options o, CountDownLatch stop)
            throws SQLException, InterruptedException {
        return await(new Acquire(names, null, o), stop, id -> states.acquire(ask(id, names, o)));
    }

    private static Ask ask(String id, List<String> names, Options o) {
        return new Ask(
                id,
                names,
                o.ttl,
                o.wait,
                o.holder,
                !o.isOwnHolder,
                o.reclaim,
                o.session,
                o.shared || o.slots > 1,
                o.atMost);
    }

    Lease keepRow(Statements.Table table, String row, long token, Options o)
            throws SQLException, InterruptedException {
        return await(
                new Acquire(List.of(table.name(), row), table, o),
                null,
                id -> states.keepRow(ask(id, List.of(row), o), table, token));
    }

    private interface Begin {
        void as(String id);
    }

    /** Waits for the answer to an acquire. A caller who gives up does not wait for a call. */
    private Lease await(Acquire acquire, CountDownLatch stop, Begin begin)
            throws SQLException, InterruptedException {
        if (Thread.interrupted()) {
            throw new InterruptedException();
        }
        String id;
        synchronized (this) {
            if (!watch()) {
                throw Connections.noThread();
            }
            id = String.valueOf(++lastId);
            acquires.put(id, acquire);
            decide(0, () -> begin.as(id));
        }
        tell();
        while (true) {
            try {
                Reply reply =
                        stop == null
                                ? acquire.answer.get()
                                : acquire.answer.get(POLL, TimeUnit.MILLISECONDS);
                if (reply.error != null) {
                    throw thrown(refusal(acquire, reply));
                }
                synchronized (this) {
                    return leases.get(id);
                }
            } catch (TimeoutException waits) {
                if (stop.getCount() > 0) {
                    continue;
                }
                giveUp(id);
                return null;
            } catch (InterruptedException interrupt) {
                giveUp(id);
                throw interrupt;
            } catch (ExecutionException never) {
                throw new IllegalStateException(never);
            }
        }
    }

    /** What comes all the same is given back. */
    private void giveUp(String id) {
        input(
                0,
                () -> {
                    states.giveUp(id);
                    states.release(id);
                });
        synchronized (this) {
            leases.remove(
                    id, leases.get(id) != null && leases.get(id).isLost() ? leases.get(id) : null);
        }
    }

    private Throwable refusal(Acquire acquire, Reply reply) throws InterruptedException {
        List<String> names = acquire.names;
        Throwable cause = acquire.cause;
        return switch (reply.error) {
            case "LeaseTaken" ->
                    new LeaseTaken(names, reply.holder, reply.remaining, reply.waitsFor, null);
            case "LeaseLost" ->
                    reply.reason != Reason.REFUSED || cause == null
                            ? new LeaseLost(reply.reason, null, names, false, null)
                            : acquire.role == null
                                    ? noConnection(cause)
                                    : FenceException.ofCall(cause, acquire.role, acquire.table);
            case "Closed" -> new FenceException("the fence is closed", false, null);
            case "NoConnection" -> noConnection(cause(acquire));
            case "NoAnswer" -> {
                Throwable last = cause(acquire);
                yield new NoAnswer(
                        "the server has not answered in time" + said(last), reply.inDoubt, last);
            }
            default -> FenceException.ofCall(cause, acquire.role, null);
        };
    }

    private Throwable noConnection(Throwable cause) {
        // The function that opens connections is wrong.
        boolean isWrong = cause instanceof Error || cause instanceof IllegalArgumentException;
        return isWrong ? cause : new NoConnection(noConnection + said(cause), cause);
    }

    private static String said(Throwable cause) {
        return cause == null ? "" : ": " + cause.getMessage();
    }

    /** The call was cut a moment ago: its error says where it hung. */
    private static Throwable cause(Acquire acquire) throws InterruptedException {
        try {
            return acquire.cause != null
                    ? acquire.cause
                    : acquire.failed.get(FOR_A_CAUSE, TimeUnit.MILLISECONDS);
        } catch (ExecutionException | TimeoutException hangs) {
            return null;
        }
    }

    /** Throws what another thread has thrown, with the way to it, and with the way to here. */
    private static RuntimeException thrown(Throwable error) {
        Stream<StackTraceElement> here = Stream.of(new Throwable().getStackTrace()).skip(1);
        error.setStackTrace(
                Stream.concat(Stream.of(error.getStackTrace()), here)
                        .toArray(StackTraceElement[]::new));
        return as(error);
    }

    /** Throws what the compiler does not expect here, and does at the caller's. */
    @SuppressWarnings("unchecked")
    static <E extends Throwable> RuntimeException as(Throwable error) throws E {
        throw (E) error;
    }

    synchronized long remaining(Lease lease) {
        return states.remaining(Clock.now(), lease.key);
    }

    Reply check(Lease lease) {
        Reply[] reply = new Reply[1];
        input(0, () -> reply[0] = states.check(lease.key));
        return reply[0];
    }

    void release(Lease lease) {
        input(0, () -> states.release(lease.key));
        await(lease.ended);
        synchronized (this) {
            leases.remove(lease.key);
        }
    }

    /**
     * No interrupt ends this. It is ticked here, too, for there may be no thread to watch the time.
     */
    private void await(CompletableFuture<Void> ended) {
        boolean isInterrupted = false;
        while (!ended.isDone()) {
            try {
                ended.get(LeaseState.LOOK_AGAIN, TimeUnit.MILLISECONDS);
            } catch (TimeoutException | ExecutionException waits) {
                input(0, () -> {});
            } catch (InterruptedException later) {
                isInterrupted = true;
            }
        }
        if (isInterrupted) {
            Thread.currentThread().interrupt();
        }
    }

    /** How far the transaction has come that releases them. */
    void last(List<Lease> some, String stage) {
        input(0, () -> states.last(keys(some), stage));
    }

    /** A transaction has written the row of a row lease, or has ended. */
    void touches(Lease row, boolean begins) {
        input(
                0,
                () -> {
                    if (begins) {
                        states.touches(row.key);
                    } else {
                        states.ended(row.key);
                    }
                });
    }

    /** The next renewal tells whether they are lost, and comes at once. */
    void suspect(List<Lease> some) {
        input(0, () -> states.suspect(keys(some)));
    }

    /** Waits for that renewal, or the loss. */
    void renew(List<Lease> some) {
        Map<Lease, Integer> before = new HashMap<>();
        synchronized (this) {
            some.forEach(lease -> before.put(lease, lease.renewals));
        }
        suspect(some);
        long until = Clock.now() + FOR_A_RENEWAL;
        synchronized (this) {
            try {
                while (Clock.now() < until
                        && before.entrySet().stream()
                                .anyMatch(
                                        one ->
                                                one.getKey().renewals == one.getValue()
                                                        && one.getKey().reason == null)) {
                    wait(until - Clock.now() + 1);
                }
            } catch (InterruptedException interrupt) {
                Thread.currentThread().interrupt();
            }
        }
    }

    private static List<String> keys(List<Lease> some) {
        return some.stream().map(lease -> lease.key).toList();
    }

    /** From here on a loss cuts the connection, where it hangs, too. */
    synchronized void enter(List<Lease> some, Connection on) {
        some.forEach(lease -> lease.guards.add(on));
    }

    synchronized void leave(List<Lease> some, Connection on) {
        some.forEach(lease -> lease.guards.remove(on));
    }

    /** Gives everything back, and ends the waits. */
    void close() {
        input(0, states::close);
        await(closed);
    }
}
