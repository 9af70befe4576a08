package pgfence;

import pgfence.Connections.HeartbeatConnection;
import pgfence.Connections.Source;
import pgfence.FenceException.*;
import pgfence.LeaseStates.*;

import java.lang.System.Logger.Level;
import java.sql.*;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.*;
import java.util.function.*;
import java.util.stream.Stream;

/**
 * Renews all leases of a fence. It gives the inputs to {@link LeaseStates}, which decides, and
 * carries out the effects: the heartbeat has the clock, the threads and the connections. One thread
 * watches the time while there are leases; each call has a separate thread, so that a call that
 * hangs holds up no other.
 */
final class Heartbeat {
    private static final System.Logger LOG = System.getLogger("pgfence");

    // In milliseconds.
    private static final long SHORTEST_IDLE = 250, POLL_INTERVAL = 100;
    private static final long LAST_EVENTS_TIMEOUT = 1000;
    static final Consumer<LeaseStates> TICK = states -> {};

    /** For an acquire that only an interrupt stops. */
    static final CountDownLatch NO_STOP = new CountDownLatch(1);

    volatile Statements statements = new Statements("");
    volatile Consumer<Fence.Event> onEvent = event -> {};

    private final Source source;

    /** The message of the error if no connection comes from the source. */
    private final String noConnection;

    /** Runs events, replies and lines of the log in their order, without the lock. */
    final ThreadPoolExecutor notifications = Connections.threads(1, 1, new LinkedBlockingQueue<>());

    /** The thread that runs a notification; null while none runs. */
    private volatile Thread notifier;

    // The fields below are guarded by this object's lock.
    private final LeaseStates states;
    final long jitter = ThreadLocalRandom.current().nextLong(1001);
    private final Map<String, Lease> leases = new HashMap<>();
    private final Map<String, Acquire> acquires = new HashMap<>();
    private final Map<Integer, HeartbeatConnection> connections = new HashMap<>();
    private final CompletableFuture<Void> closed = new CompletableFuture<>();

    private boolean isWatching;
    private long wakeAt = LeaseStates.NEVER, checkedAt;
    private int lastId;
    private String lastError;

    /** What the current input has ended, for the log. */
    private final List<Fence.Event> ended = new ArrayList<>();

    Heartbeat(Source source, String noConnection) {
        this.source = source;
        this.noConnection = noConnection;
        states = new LeaseStates(jitter);
    }

    /** An acquire that is under way. */
    static final class Acquire {
        /** The names to acquire; of a row lease, the table and the key. */
        final List<String> names;

        final Statements.Table table;
        final CompletableFuture<Reply> reply = new CompletableFuture<>();

        /** The error of the last call, and the role of its connection, if that could be opened. */
        volatile Throwable cause;

        volatile String role;

        /** The lease that was acquired. */
        volatile Lease lease;

        Acquire(List<String> names, Statements.Table table) {
            this.names = names;
            this.table = table;
        }
    }

    // Inputs, and the clock.

    /** Gives an input to the states. */
    void input(Consumer<LeaseStates> input) {
        input(0, input);
    }

    /** Gives an input to the states that is about a call: {@code answerTo} is its number. */
    private synchronized void input(int answerTo, Consumer<LeaseStates> input) {
        ended.clear();
        for (Effect effect : states.step(Clock.now(), answerTo, () -> input.accept(states))) {
            carryOut(effect);
        }
        wakeAt = states.wake(Clock.now());
        if (wakeAt < LeaseStates.NEVER) {
            watch();
        }
        notifyAll();
    }

    /**
     * Runs an event, a reply or a line of the log after those before it, in a separate thread: a
     * listener or the log may block, which must not stop the caller.
     */
    private void deliver(Runnable notification) {
        Runnable task =
                () -> {
                    notifier = Thread.currentThread();
                    try {
                        notification.run();
                    } catch (Throwable error) {
                        log(Level.ERROR, "the event listener or the log handler failed", error);
                    }
                    notifier = null;
                };
        if (!Connections.run(notifications, task)) {
            task.run();
        }
    }

    /**
     * Starts the thread that watches the time, unless it runs. Returns false if it cannot be
     * started. The caller has the lock.
     */
    private boolean watch() {
        if (!isWatching) {
            // The thread of the notifications stays for as long: if it had to be started later, and
            // could not be, a listener would run under the lock.
            isWatching =
                    Connections.run(notifications, () -> {}) && Connections.run(this::watchTheTime);
            notifications.allowCoreThreadTimeOut(!isWatching);
        }
        return isWatching;
    }

    private void watchTheTime() {
        while (true) {
            try {
                synchronized (this) {
                    if (wakeAt >= LeaseStates.NEVER) {
                        isWatching = false;
                        notifications.allowCoreThreadTimeOut(true);
                        return;
                    }
                    long left = wakeAt - Clock.now();
                    if (left > 0) {
                        wait(left);
                        continue;
                    }
                }
                input(TICK);
                checkIdleConnections();
            } catch (Throwable error) {
                log(Level.ERROR, "the heartbeat has failed, and is restarted", error);
                input(LeaseStates::heartbeatDied);
            }
        }
    }

    /** Only a check shows that an idle connection has ended. */
    private synchronized void checkIdleConnections() {
        if (Clock.now() < checkedAt + LeaseStates.CHECK_INTERVAL / 2) {
            return;
        }
        checkedAt = Clock.now();
        for (HeartbeatConnection connection : connections.values()) {
            Connections.run(() -> checkConnection(connection));
        }
    }

    private void checkConnection(HeartbeatConnection connection) {
        if (connection.hasEnded(0)) {
            input(
                    states -> {
                        connections.remove(connection.number);
                        states.disconnected(connection.number);
                    });
            connection.hangUp();
        }
    }

    // Effects.

    private void carryOut(Effect effect) {
        if (effect instanceof Call call) {
            sendCall(call);
        } else if (effect instanceof Cut cut) {
            Optional.ofNullable(connections.remove(cut.cut())).ifPresent(HeartbeatConnection::cut);
        } else if (effect instanceof HangUp hangUp) {
            Optional.ofNullable(connections.remove(hangUp.hangUp()))
                    .ifPresent(connection -> Connections.run(connection::hangUp));
        } else if (effect instanceof LeaseStates.Event event) {
            carryOutEvent(event);
        } else if (effect instanceof Reply reply) {
            Acquire acquire = acquires.remove(reply.reply);
            deliver(() -> acquire.reply.complete(reply));
        } else if (effect instanceof Log line) {
            writeLog(line);
        } else if (effect instanceof Closed) {
            closed.complete(null);
        }
    }

    private void writeLog(Log line) {
        if (line.code() != null) {
            String what =
                    line.key() == null ? "leases are not renewed" : "no lease could be acquired";
            boolean isUnknown = line.code().equals("no answer") || lastError == null;
            warn(what + ", and it is tried again: " + (isUnknown ? line.code() : lastError));
            return;
        }
        Reason reason = line.reason();
        List<String> names =
                ended.stream()
                        .filter(of -> of.reason() == (reason == null ? Reason.UNCONFIRMED : reason))
                        .map(of -> String.join(", ", of.names()))
                        .toList();
        String first = String.join("; ", names.subList(0, Math.min(3, names.size())));
        String which = first + (names.size() > 3 ? "; …" : "");
        // The program does not know a lease that was granted after its acquire had been given up.
        String more = ": " + line.count() + (which.isEmpty() ? "" : " (" + which + ")");
        warn("leases are " + line.log() + (reason == null ? "" : " (" + reason + ")") + more);
    }

    /** Writes a line to the log. A handler that throws does not end the heartbeat. */
    static void log(Level level, String line, Throwable error) {
        try {
            LOG.log(level, line, error);
        } catch (RuntimeException | Error failed) {
            // The error cannot be reported anywhere else.
        }
    }

    /** Writes a warning to the log after the events before it. */
    void warn(String line) {
        deliver(() -> log(Level.WARNING, line, null));
    }

    private void carryOutEvent(LeaseStates.Event event) {
        Lease lease = leases.get(event.key());
        Fence.Event.Kind kind = Fence.Event.Kind.valueOf(event.event().toUpperCase(Locale.ROOT));
        switch (kind) {
            case ACQUIRED -> {
                Acquire acquire = acquires.get(event.key());
                lease = acquire.lease = new Lease(this, states.lease(event.key()), acquire);
                leases.put(event.key(), lease);
            }
            case RENEWED -> {
                lease.renewed.complete(null);
                lease.renewed = new CompletableFuture<>();
            }
            case LOST -> {
                leases.remove(event.key());
                lease.end(event.reason(), event.advice());
                lease.guards.forEach(Connections::cut);
                // The callbacks of the loss may block, so they get a separate thread if one starts.
                if (!Connections.run(lease::completeLost)) {
                    deliver(lease::completeLost);
                }
            }
            default -> {
                leases.remove(event.key());
                lease.end(Reason.RELEASED, null);
            }
        }
        Duration left = Duration.ofMillis(event.remaining());
        var report = new Fence.Event(kind, lease.names(), event.token(), left, event.reason());
        if (event.reason() != null) {
            ended.add(report);
        }
        emit(report);
    }

    void emit(Fence.Event event) {
        long emittedAt = Clock.now();
        deliver(() -> onEvent.accept(event.after(Clock.now() - emittedAt)));
    }

    // Calls, each in a separate thread.

    private void sendCall(Call call) {
        HeartbeatConnection connection =
                call.open
                        ? new HeartbeatConnection(call.connection)
                        : connections.get(call.connection);
        connections.put(call.connection, connection);
        // The acquire that waits for the call. A renewal that confirms a lease belongs to one, too.
        Acquire acquire = acquires.getOrDefault(call.requestKey, new Acquire(call.names, null));
        Statements.Statement statement =
                switch (call.verb) {
                    case "acquire" -> statements.acquire(call);
                    case "undo" -> statements.undo(call);
                    case "release" -> statements.release(call);
                    default -> statements.keep(call);
                };
        if (!Connections.run(() -> runCall(call, connection, acquire, statement))) {
            // The call has no answer, and ends at its limit.
            acquire.cause = Connections.noThread();
        }
    }

    /** Executes the statement of a call, and gives the answer or the error to the states. */
    private void runCall(
            Call call,
            HeartbeatConnection connection,
            Acquire acquire,
            Statements.Statement statement) {
        Consumer<LeaseStates> input;
        connection.use.lock();
        try {
            if (call.open) {
                // A little less than the limit, so that the opening itself fails, and says why.
                long limit = Math.max(call.limit, LeaseStates.SHORTEST_OPENING);
                connection.open(source, limit * 9 / 10);
                input(call.number, states -> states.sent(call.number));
            }
            if (!call.open && connection.hasEnded(SHORTEST_IDLE)) {
                input = states -> states.failed(call.number, "unsent", true);
            } else {
                Answer answer = readAnswer(call, connection.rows(statement));
                input =
                        states -> {
                            // An error before the grant is not the cause of a later failure.
                            acquire.cause = answer.number() == null ? acquire.cause : null;
                            states.answered(call.number, answer);
                        };
            }
        } catch (Throwable error) {
            boolean isBroken = connection.isBroken();
            String code = codeOf(error, connection.role != null, isBroken);
            input =
                    states -> {
                        lastError = code + ": " + error.getMessage();
                        acquire.role = connection.role;
                        acquire.cause = error;
                        states.failed(call.number, code, isBroken);
                    };
        } finally {
            connection.use.unlock();
        }
        input(call.number, input);
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

    // The rows of an answer.

    private static Answer readAnswer(Call call, List<Object[]> rows) {
        return switch (call.verb) {
            case "acquire" -> {
                Object[] row = rows.get(0);
                Taken taken = new Taken((String) row[1], milliseconds(row[2], 0), (String) row[3]);
                yield new Answer((Long) row[0], row[0] == null ? taken : null, null);
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
        long remaining = milliseconds(row[1], -1), againIn = milliseconds(row[2], -1);
        return new Outcome((String) row[0], remaining, againIn, (String) row[3]);
    }

    /** Converts seconds to milliseconds, rounded down. */
    private static long milliseconds(Object seconds, long ifNull) {
        double ms = seconds == null ? ifNull : Math.max(0, (Double) seconds * 1000);
        return (long) Math.min(ms, LeaseStates.NEVER);
    }

    // Requests of the program.

    /** Acquires a lease. Returns null if {@code stop} ends the wait. */
    Lease acquire(List<String> names, Options options, CountDownLatch stop)
            throws SQLException, InterruptedException {
        return acquire(new Acquire(names, null), names, options, 0, stop);
    }

    Lease keepRow(Statements.Table table, String row, long token, Options options)
            throws SQLException, InterruptedException {
        Acquire acquire = new Acquire(List.of(table.name(), row), table);
        return acquire(acquire, List.of(row), options, token, NO_STOP);
    }

    /** Begins an acquire and waits for its reply. Giving up does not wait for a call. */
    private Lease acquire(
            Acquire acquire, List<String> names, Options options, long token, CountDownLatch stop)
            throws SQLException, InterruptedException {
        if (Thread.interrupted()) {
            throw new InterruptedException();
        }
        if (notifier == Thread.currentThread()) {
            // The reply to the acquire would wait until this notification has ended.
            throw new IllegalStateException("a listener of events may not acquire a lease");
        }
        String id;
        synchronized (this) {
            if (!watch()) {
                throw Connections.noThread();
            }
            id = String.valueOf(++lastId);
            acquires.put(id, acquire);
            input(states -> states.acquire(id, names, options, acquire.table, token));
        }
        Reply reply = null;
        try {
            while (reply == null && stop.getCount() > 0) {
                reply = getWithin(POLL_INTERVAL, acquire.reply);
            }
        } finally {
            // If the lease is granted nevertheless, it is released.
            if (reply == null) {
                input(
                        states -> {
                            states.giveUp(id);
                            states.release(id);
                        });
            }
        }
        if (reply != null && reply.error != null) {
            throw rethrow(errorOf(acquire, reply));
        }
        return reply == null ? null : acquire.lease;
    }

    /** Returns null if the future has no result within the limit, in milliseconds. */
    private static <T> T getWithin(long limit, CompletableFuture<T> future)
            throws InterruptedException {
        try {
            return future.get(limit, TimeUnit.MILLISECONDS);
        } catch (TimeoutException | ExecutionException noResult) {
            return null;
        }
    }

    private Throwable errorOf(Acquire acquire, Reply reply) {
        List<String> names = acquire.names;
        Throwable cause = acquire.cause;
        return switch (reply.error) {
            case "LeaseTaken" ->
                    new LeaseTaken(names, reply.holder, reply.remaining, reply.waitsFor, null);
            case "LeaseLost" -> new LeaseLost(reply.reason, reply.advice, names, false, null);
            case "Closed" -> new FenceException("the fence is closed", false, null);
            case "NoConnection" -> noConnection(cause);
            case "NoAnswer" -> {
                String message = "the server has not answered in time" + because(cause);
                yield new NoAnswer(message, reply.inDoubt, cause);
            }
            default -> {
                String code = FenceException.stateOf(cause);
                String type = LeaseStates.errorType(code, acquire.table != null);
                yield FenceException.typed(cause, type, acquire.role, acquire.table);
            }
        };
    }

    private Throwable noConnection(Throwable cause) {
        // An error of the program's function that opens connections.
        boolean isWrong = cause instanceof Error || cause instanceof IllegalArgumentException;
        return isWrong ? cause : new NoConnection(noConnection + because(cause), cause);
    }

    private static String because(Throwable cause) {
        return cause == null ? "" : ": " + cause.getMessage();
    }

    /** Throws the error of another thread, with the stack trace of that thread and of this one. */
    private static RuntimeException rethrow(Throwable error) {
        Stream<StackTraceElement> here = Stream.of(new Throwable().getStackTrace()).skip(1);
        error.setStackTrace(
                Stream.concat(Stream.of(error.getStackTrace()), here)
                        .toArray(StackTraceElement[]::new));
        return sneakyThrow(error);
    }

    /** Throws a checked exception without a declaration: the callers' callers declare it. */
    @SuppressWarnings("unchecked")
    static <E extends Throwable> RuntimeException sneakyThrow(Throwable error) throws E {
        throw (E) error;
    }

    /** Returns true as soon as the program has begun to close the fence. */
    synchronized boolean isClosing() {
        return states.isClosing();
    }

    synchronized long remaining(Lease lease) {
        return states.remaining(Clock.now(), lease.key);
    }

    synchronized boolean isOver(Lease lease) {
        return states.isOver(Clock.now(), lease.key);
    }

    /** Releases a lease, and waits for its end. An interrupt does not end the wait. */
    void release(Lease lease) {
        input(states -> states.release(lease.key));
        lease.ended.join();
    }

    /** Renews leases at once, and waits until each is renewed or lost. */
    void renew(List<Lease> suspects) {
        CompletableFuture<?>[] known;
        synchronized (this) {
            known =
                    suspects.stream()
                            .map(lease -> CompletableFuture.anyOf(lease.renewed, lease.ended))
                            .toArray(CompletableFuture[]::new);
        }
        input(states -> states.suspect(keys(suspects)));
        try {
            getWithin(LeaseStates.LONGEST_CALL, CompletableFuture.allOf(known));
        } catch (InterruptedException interrupt) {
            Thread.currentThread().interrupt();
        }
    }

    static List<String> keys(List<Lease> leases) {
        return leases.stream().map(lease -> lease.key).toList();
    }

    /** From now on a loss of one of the leases cuts the connection, even if a statement hangs. */
    synchronized void enterGuard(List<Lease> guards, Connection connection) {
        guards.forEach(lease -> lease.guards.add(connection));
    }

    synchronized void leaveGuard(List<Lease> guards, Connection connection) {
        guards.forEach(lease -> lease.guards.remove(connection));
    }

    /**
     * Releases all leases, and ends the waits of all acquires. The last events are delivered before
     * the program ends, unless a listener blocks.
     */
    void close() {
        input(LeaseStates::close);
        closed.join();
        if (notifier == Thread.currentThread()) {
            return;
        }
        CompletableFuture<Void> delivered = new CompletableFuture<>();
        deliver(() -> delivered.complete(null));
        try {
            getWithin(LAST_EVENTS_TIMEOUT, delivered);
        } catch (InterruptedException interrupt) {
            Thread.currentThread().interrupt();
        }
    }
}
