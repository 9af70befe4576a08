package pgfence;

import pgfence.Connections.One;
import pgfence.FenceException.*;
import pgfence.LeaseState.*;

import java.lang.System.Logger.Level;
import java.sql.*;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.*;
import java.util.function.*;
import java.util.stream.Stream;

/**
 * Keeps all leases of a fence. It gives the inputs to {@link LeaseState}, which decides, and
 * carries out the effects: it has the clock, the threads and the connections. One thread watches
 * the time while there is anything to watch; each call is in a thread of its own, so that it does
 * not matter where one hangs.
 */
final class Heartbeat {
    private static final System.Logger LOG = System.getLogger("pgfence");
    private static final long IDLE = 250, FOR_A_CAUSE = 250, FOR_A_RENEWAL = 10_000, POLL = 100;
    private static final Consumer<LeaseState> TICK = states -> {};
    static final CountDownLatch NEVER = new CountDownLatch(1);

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

    /** Events, answers and lines of the log, which are told in their order, without the lock. */
    private final Deque<Runnable> toTell = new ArrayDeque<>();

    private Thread teller;
    private boolean isWatching;
    private long wakeAt = LeaseState.NEVER, lookedAt;
    private int lastId;
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
        final CompletableFuture<Reply> answer = new CompletableFuture<>();

        /** The error of a call, and the role of its connection, if that could be opened. */
        volatile Throwable cause;

        volatile String role;

        /** What it has got. */
        volatile Lease lease;

        Acquire(List<String> names, Statements.Table table) {
            this.names = names;
            this.table = table;
        }
    }

    // The clock, and what comes in

    /** Gives an input to the states. */
    void input(Consumer<LeaseState> what) {
        input(0, what);
    }

    /** The same, if it is about a call. */
    private void input(int call, Consumer<LeaseState> what) {
        decide(call, what);
        tell();
    }

    private synchronized void decide(int call, Consumer<LeaseState> what) {
        effects.addAll(states.step(Clock.now(), call, () -> what.accept(states)));
        // In their order. One that fails has an input of its own, whose effects come after these.
        for (Effect effect = effects.poll(); effect != null; effect = effects.poll()) {
            carryOut(effect);
        }
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
                next = teller != null ? null : toTell.poll();
                if (next == null) {
                    return;
                }
                teller = Thread.currentThread();
            }
            try {
                next.run();
            } catch (Throwable error) {
                log(Level.ERROR, "what listens to events has failed", error);
            }
            synchronized (this) {
                teller = null;
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
                decide(0, TICK);
                // What listens, or the log, may block: the time is watched all the same.
                if (!Connections.run(this::tell)) {
                    tell();
                }
                lookAtIdle();
            } catch (Throwable error) {
                log(Level.ERROR, "what keeps the leases has died, and begins anew", error);
                input(LeaseState::died);
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
        if (one.hasEnded(0)) {
            input(
                    states -> {
                        connections.remove(one.number);
                        states.disconnected(one.number);
                    });
            one.hangUp();
        }
    }

    // Effects

    private void carryOut(Effect effect) {
        if (effect instanceof Call call) {
            send(call);
        } else if (effect instanceof Cut cut) {
            Optional.ofNullable(connections.remove(cut.cut())).ifPresent(One::cut);
        } else if (effect instanceof HangUp ends) {
            Optional.ofNullable(connections.remove(ends.hangUp()))
                    .ifPresent(one -> Connections.run(one::hangUp));
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
            String what =
                    line.key() == null ? "leases are not renewed" : "no lease could be acquired";
            boolean isUnknown = line.code().equals("no answer") || lastError == null;
            warn(what + ", and it is tried again: " + (isUnknown ? line.code() : lastError));
            return;
        }
        String reason = line.reason() == null ? "" : " (" + line.reason() + ")";
        String count = line.count() > 1 ? line.count() + " leases are " : "leases are ";
        warn(count + line.log() + reason);
    }

    /** A line of the log. A handler that throws may not end what keeps the leases. */
    static void log(Level level, String line, Throwable error) {
        try {
            LOG.log(level, line, error);
        } catch (RuntimeException | Error failed) {
            // There is no other place to tell it.
        }
    }

    private void warn(String line) {
        toTell.add(() -> log(Level.WARNING, line, null));
    }

    private void event(LeaseState.Event event) {
        Lease lease = leases.get(event.key());
        Fence.Event.Kind kind = Fence.Event.Kind.valueOf(event.event().toUpperCase(Locale.ROOT));
        switch (kind) {
            case ACQUIRED -> {
                Acquire acquire = acquires.get(event.key());
                lease = acquire.lease = new Lease(this, states.grant(event.key()), acquire);
                leases.put(event.key(), lease);
            }
            case RENEWED -> lease.renewals++;
            case LOST -> {
                leases.remove(event.key());
                lease.ends(event.reason(), event.advice());
                lease.guards.forEach(Connections::cut);
                // What is done then may block.
                if (!Connections.run(lease::tellLoss)) {
                    toTell.add(lease::tellLoss);
                }
            }
            default -> {
                leases.remove(event.key());
                lease.ends(Reason.RELEASED, null);
            }
        }
        Duration remaining = Duration.ofMillis(event.remaining());
        tells(new Fence.Event(kind, lease.names(), event.token(), remaining, event.reason()));
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
        One one = call.open ? new One(call.connection) : connections.get(call.connection);
        connections.put(call.connection, one);
        // What confirms a lease is its acquire's as well.
        Acquire acquire = acquires.getOrDefault(call.asker, new Acquire(call.names, null));
        Statements.Statement statement =
                switch (call.verb) {
                    case "acquire" -> statements.acquire(call);
                    case "undo" -> statements.undo(call);
                    case "release" -> statements.release(call);
                    default -> statements.keep(call);
                };
        if (!Connections.run(() -> run(call, one, acquire, statement))) {
            acquire.cause = Connections.noThread();
            Runnable failed = () -> states.failed(call.call, "53000", false);
            effects.addAll(states.step(Clock.now(), call.call, failed));
        }
    }

    /** Sends a call, and gives its answer to the states. */
    private void run(Call call, One one, Acquire acquire, Statements.Statement statement) {
        Consumer<LeaseState> then;
        one.use.lock();
        try {
            if (call.open) {
                one.open(source);
                input(call.call, states -> states.sent(call.call));
            }
            boolean hasEnded = !call.open && one.hasEnded(IDLE);
            Answer answer = hasEnded ? null : read(call, one.rows(statement));
            then =
                    states -> {
                        if (hasEnded) {
                            states.failed(call.call, "unsent", true);
                            return;
                        }
                        // What failed before the grant is no cause of what comes after it.
                        acquire.cause = answer.number() == null ? acquire.cause : null;
                        states.answered(call.call, answer);
                    };
        } catch (Throwable error) {
            boolean isBroken = one.isBroken();
            String code = codeOf(error, one.role != null, isBroken);
            then =
                    states -> {
                        lastError = code + ": " + error.getMessage();
                        acquire.role = one.role;
                        acquire.cause = error;
                        states.failed(call.call, code, isBroken);
                    };
        } finally {
            one.use.unlock();
        }
        input(call.call, then);
    }

    private static String codeOf(Throwable error, boolean isOpen, boolean isBroken) {
        if (error instanceof Error) {
            return "panicked";
        }
        if (!isOpen) {
            return FenceException.codeOfOpening(error);
        }
        String state = FenceException.stateOf(error);
        return !state.isEmpty() ? state : isBroken ? "ended" : "unreadable";
    }

    // What the rows say

    private static Answer read(Call call, List<Object[]> rows) {
        return switch (call.verb) {
            case "acquire" -> {
                Object[] row = rows.get(0);
                Taken by = new Taken((String) row[1], span(row[2], 0), (String) row[3]);
                Taken taken = row[0] == null ? by : null;
                yield new Answer((Long) row[0], taken, null);
            }
            case "undo" -> new Answer((Long) rows.get(0)[0], null, null);
            default -> {
                if (rows.size() != call.names.size()) {
                    throw new IllegalStateException("as many rows as leases");
                }
                Function<Object[], Outcome> outcome =
                        call.verb.equals("release")
                                ? row -> new Outcome(row[0] != null)
                                : Heartbeat::outcome;
                yield new Answer(null, null, rows.stream().map(outcome).toList());
            }
        };
    }

    private static Outcome outcome(Object[] row) {
        return new Outcome((String) row[0], span(row[1], -1), span(row[2], -1), (String) row[3]);
    }

    /** Milliseconds of seconds, rounded down. */
    private static long span(Object seconds, long otherwise) {
        double span = seconds == null ? otherwise : Math.max(0, (Double) seconds * 1000);
        return (long) Math.min(span, LeaseState.NEVER);
    }

    // What a program asks for

    /** Null if it was to stop before. */
    Lease acquire(List<String> names, Options o, CountDownLatch stop)
            throws SQLException, InterruptedException {
        Acquire acquire = new Acquire(names, null);
        return await(acquire, stop, (states, id) -> states.acquire(id, names, o));
    }

    Lease keepRow(Statements.Table table, String row, long token, Options o)
            throws SQLException, InterruptedException {
        Acquire acquire = new Acquire(List.of(table.name(), row), table);
        return await(acquire, NEVER, (states, id) -> states.keepRow(id, row, o, table, token));
    }

    /** Waits for the answer to an acquire. A caller who gives up does not wait for a call. */
    private Lease await(Acquire acquire, CountDownLatch stop, BiConsumer<LeaseState, String> begin)
            throws SQLException, InterruptedException {
        if (Thread.interrupted()) {
            throw new InterruptedException();
        }
        String id;
        synchronized (this) {
            if (teller == Thread.currentThread()) {
                // No answer is told before the event is.
                throw new IllegalStateException("what is told an event may not acquire a lease");
            }
            if (!watch()) {
                throw Connections.noThread();
            }
            id = String.valueOf(++lastId);
            acquires.put(id, acquire);
            decide(0, states -> begin.accept(states, id));
        }
        tell();
        Reply reply = null;
        try {
            while (reply == null && stop.getCount() > 0) {
                reply = within(POLL, acquire.answer);
            }
        } finally {
            // What comes all the same is given back.
            if (reply == null) {
                input(
                        states -> {
                            states.giveUp(id);
                            states.release(id);
                        });
            }
        }
        if (reply != null && reply.error != null) {
            throw thrown(refusal(acquire, reply));
        }
        return reply == null ? null : acquire.lease;
    }

    /** Null if it has not come by then. */
    private static <T> T within(long limit, CompletableFuture<T> future)
            throws InterruptedException {
        try {
            return future.get(limit, TimeUnit.MILLISECONDS);
        } catch (TimeoutException | ExecutionException waits) {
            return null;
        }
    }

    /** Waits, for no longer than that, until it is so. */
    private synchronized void await(long limit, BooleanSupplier isSo) throws InterruptedException {
        long until = Clock.now() + limit;
        for (long left = limit; left > 0 && !isSo.getAsBoolean(); left = until - Clock.now()) {
            wait(left);
        }
    }

    private Throwable refusal(Acquire acquire, Reply reply) throws InterruptedException {
        List<String> names = acquire.names;
        // If the call was cut a moment ago, its error says where it hung.
        await(reply.error.startsWith("No") ? FOR_A_CAUSE : 0, () -> acquire.cause != null);
        Throwable cause = acquire.cause;
        return switch (reply.error) {
            case "LeaseTaken" ->
                    new LeaseTaken(names, reply.holder, reply.remaining, reply.waitsFor, null);
            case "LeaseLost" ->
                    reply.reason != Reason.REFUSED || cause == null
                            ? new LeaseLost(reply.reason, reply.advice, names, false, null)
                            : acquire.role == null
                                    ? noConnection(cause)
                                    : FenceException.ofCall(cause, acquire.role, acquire.table);
            case "Closed" -> new FenceException("the fence is closed", false, null);
            case "NoConnection" -> noConnection(cause);
            case "NoAnswer" -> {
                String message = "the server has not answered in time" + said(cause);
                yield new NoAnswer(message, reply.inDoubt, cause);
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
        input(states -> reply[0] = states.check(lease.key));
        return reply[0];
    }

    void release(Lease lease) {
        input(states -> states.release(lease.key));
        await(lease.ended);
    }

    /**
     * No interrupt ends this. It is ticked here, too, for there may be no thread to watch the time.
     */
    private void await(CompletableFuture<Void> ended) {
        boolean isInterrupted = false;
        while (!ended.isDone()) {
            try {
                within(LeaseState.LOOK_AGAIN, ended);
                input(TICK);
            } catch (InterruptedException later) {
                isInterrupted = true;
            }
        }
        if (isInterrupted) {
            Thread.currentThread().interrupt();
        }
    }

    /** Has them renewed at once, and waits for that, or for their loss. */
    void renew(List<Lease> some) {
        Map<Lease, Integer> before = new HashMap<>();
        synchronized (this) {
            some.forEach(lease -> before.put(lease, lease.renewals));
        }
        input(states -> states.suspect(keys(some)));
        Predicate<Lease> isTold = one -> one.renewals > before.get(one) || one.reason != null;
        try {
            await(FOR_A_RENEWAL, () -> some.stream().allMatch(isTold));
        } catch (InterruptedException interrupt) {
            Thread.currentThread().interrupt();
        }
    }

    static List<String> keys(List<Lease> some) {
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
        input(LeaseState::close);
        await(closed);
    }
}
