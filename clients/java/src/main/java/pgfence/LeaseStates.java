package pgfence;

import static pgfence.FenceException.Reason.*;

import static java.lang.Math.*;

import pgfence.FenceException.Reason;

import java.util.*;
import java.util.function.*;
import java.util.stream.*;

/**
 * The state machine of the client's leases. Its specification is clients/spec/lease_state.md, and
 * the tests play the vectors of clients/spec/vectors. The machine has no clock, thread or socket:
 * each input comes with the time, in milliseconds of a monotonic clock, and returns effects, which
 * the heartbeat carries out in their order.
 */
final class LeaseStates {
    static final long NEVER = 1L << 60, CHECK_INTERVAL = 1_000;
    static final long LONGEST_CALL = 10_000, SHORTEST_OPENING = 2_000;
    private static final long SHORTEST_PAUSE = 10, SHORTEST_WAIT = 250, LONGEST_PAUSE = 10_000;
    private static final long WAIT_PORTION = 2_000, RETRY_INTERVAL = 250, PORTION_INTERVAL = 50;
    private static final long FIRST_RETRY = 20, SHORTEST_RETRY_TIME = 1_000;
    private static final long QUEUE_TIMEOUT = 20_000, CLOSE_TIMEOUT = 5_000;
    private static final int MAX_PAIRS = 10_000, MAX_RELEASED_NAMES = 200;
    private static final int BEATS_PER_TTL = 3, MAX_BEATS_IN_A_ROW = 2;

    // Effects, with the fields that clients/spec/README.md lists.

    /** What the heartbeat carries out. */
    interface Effect {}

    /** Ends a connection at once, whatever hangs in it. */
    record Cut(int cut) implements Effect {}

    /** Closes a connection that no call uses. */
    record HangUp(int hangUp) implements Effect {}

    /** A lease is "acquired", "renewed", "lost" or "released"; a leader is "interrupted". */
    record Event(
            String event,
            String key,
            long token,
            long remaining,
            Reason reason,
            String advice,
            String code)
            implements Effect {}

    /** A line of the log. It has the key of an acquire, or the count of leases. */
    record Log(String log, String key, String code, Reason reason, int count) implements Effect {}

    /** The fence has closed: all calls are answered, or the time for that is over. */
    record Closed(boolean closed) implements Effect {}

    /** What a leader does next: "pause" or "end". */
    record Lead(String lead, long pause, String code) implements Effect {}

    /**
     * What follows from an error in a guarded transaction. An empty {@code error} leaves it as it
     * is.
     *
     * @param last the stage of a last transaction
     * @param suspect the next renewal, which is due at once, shows whether the leases are lost
     * @param again the guard begins once more, after a renewal
     */
    record GuardFailure(String error, boolean inDoubt, String last, boolean suspect, boolean again)
            implements Effect {}

    /** The reply to an acquire. Without an error the lease is held. */
    static final class Reply implements Effect {
        final String error;
        String reply, sqlstate, advice, holder, waitsFor;
        List<String> leases = List.of();
        Reason reason;
        long remaining;
        boolean inDoubt;

        Reply(String error) {
            this.error = error;
        }
    }

    /**
     * One statement on one connection. If it is {@code open}, the connection is opened first, and
     * the input {@link #sent} says so.
     */
    static final class Call implements Effect {
        /** The number of the call, and that of its connection. */
        int number, connection;

        final String verb;
        final long limit;
        final List<LeaseState> leases;

        /** The key of the acquire that the call sends or confirms, if it does. */
        final String requestKey;

        final String holder;

        /** The table of the leases, if they are rows. */
        final Object table;

        boolean open, reclaim;
        long wait;
        final List<String> names = new ArrayList<>();
        final List<Long> tokens = new ArrayList<>();

        /** When it was sent, or -1 until then. */
        private long sent = -1;

        private long until;
        private ConnectionState connectionState;
        private final List<Sender> senders;

        private Call(String verb, List<LeaseState> leases, long limit) {
            this.verb = verb;
            this.leases = leases;
            this.limit = limit;
            requestKey = leases.get(0).key;
            holder = leases.get(0).options.holder;
            table = leases.get(0).table;
            senders = new ArrayList<>(leases);
        }

        private boolean isOpening() {
            return sent < 0;
        }
    }

    // The answers of calls.

    /** The answer of an acquire without a grant. The state is null if it is not visible. */
    record Taken(String holder, long remaining, String state) {}

    /** The outcome of one name of a renewal or a release. A time that is not given is negative. */
    record Outcome(String outcome, long remaining, long againIn, String code) {
        /** The outcome of a release: "lost" if there was nothing to release. */
        Outcome(boolean isReleased) {
            this(isReleased ? "released" : "lost", -1, -1, null);
        }
    }

    /**
     * The answer of a call: of an acquire the token in {@code number}, or {@code taken}; of an undo
     * the number of released leases; of all others an outcome for each name.
     */
    record Answer(Long number, Taken taken, List<Outcome> outcomes) {}

    // Leases, and what sends their calls.

    /** The states of a lease. A lease that is CONFIRMING or HELD is live. */
    enum State {
        ACQUIRING,
        CONFIRMING,
        HELD,
        RELEASING,
        LOST,
        RELEASED
    }

    /**
     * A connection, the call on it, and the errors in a row on it. Without an owner it is closed
     * after its call.
     */
    private static final class ConnectionState {
        final int number;
        Sender owner;
        Call call;
        int errors;

        ConnectionState(int number, Sender owner) {
            this.number = number;
            this.owner = owner;
        }
    }

    /** What sends calls, one at a time: a lease, or the machine on the shared connection. */
    private static class Sender {
        /** The time of the next call: an acquire, a renewal, a release or an undo. */
        long dueAt;

        /** The number of attempts so far of an acquire, an undo or a release. */
        int tries;

        /** The call that has no answer yet. */
        Call call;

        ConnectionState connection;

        boolean isDue(long by) {
            return call == null && dueAt <= by;
        }
    }

    /** A call was sent, and got no answer. The server may carry it out until then. */
    private record Doubt(long sent, long until) {}

    /**
     * One lease, from its acquire on. A separate connection may acquire and confirm it. A session
     * lease keeps that connection, and ends with it.
     */
    static final class LeaseState extends Sender {
        final String key;
        final List<String> names;
        final Options options;
        final long ttl, requestedAt;

        /** The table of a row lease, which the machine only passes on. */
        final Object table;

        State state = State.ACQUIRING;
        long token, deadline;

        /** When {@code at_most} is over, and the lease is lost. */
        long endsAt = NEVER;

        Reason reason;
        String advice;

        /** True once the acquire has its reply; true while it waits for the end of an outage. */
        boolean hasReply, inOutage;

        Doubt doubt;

        /** The end of the acquire's wait; of a release, the end of its retries. */
        long until;

        /** The number of last transactions under way, and of transactions with the row locked. */
        int lastTransactions, rowLocks;

        /** True after a release in a savepoint: the program's transaction has not committed yet. */
        boolean hasUncommittedRelease;

        /** True once the event "acquired" was emitted. */
        boolean isReported;

        /** False while the last renewal that was sent has no answer. */
        boolean isRenewalAnswered = true;

        /** An earlier attempt may have released the lease; no other lease joins its release. */
        boolean isInDoubt, isAlone;

        /** The first lease of the call that has released this one, too, or null before it. */
        LeaseState joinedTo;

        /** After a loss: the names that the server may still hold for this lease. */
        List<String> unreleased = List.of();

        private LeaseState(
                String key, List<String> names, Options options, Object table, long now) {
            this.key = key;
            this.names = names;
            this.options = options;
            this.table = table;
            ttl = options.ttl;
            requestedAt = dueAt = now;
            until = now + min(options.wait, NEVER);
        }

        boolean isHeld() {
            return state == State.HELD;
        }

        boolean isLive() {
            return isHeld() || state == State.CONFIRMING;
        }

        private boolean hasOneName() {
            return names.size() == 1;
        }

        /** Returns true if a separate connection acquires it. */
        private boolean acquiresSeparately() {
            return options.session || options.wait > 0 && hasOneName();
        }

        private boolean mayReclaim() {
            return options.reclaim || hasOneName() && !options.isShared() && options.isHolderUnique;
        }

        /** Returns true if it waits to send its next acquire. */
        private boolean isQueued() {
            return state == State.ACQUIRING && call == null;
        }

        private boolean isInTransaction() {
            return lastTransactions > 0 || rowLocks > 0;
        }

        private boolean isRenewalDue(long by) {
            return isLive() && !isInTransaction() && isDue(by);
        }

        /** Returns true if the connection that has acquired it confirms it. */
        private boolean confirmsSeparately() {
            return state == State.CONFIRMING && connection != null;
        }

        /**
         * Returns true if its next call confirms a row. That call has no other leases: its error is
         * thrown by {@code keepRow}, as a name or a value of the key may be wrong.
         */
        private boolean confirmsRow() {
            return table != null && state == State.CONFIRMING;
        }

        /** The shortest time until the next renewal, if {@code left} remains until the deadline. */
        private long shortestInterval(long left) {
            return min(max(SHORTEST_PAUSE, ttl / 60), left / 4);
        }

        /** The names of its next call: after a loss, the unreleased ones. */
        private List<String> namesToSend() {
            return unreleased.isEmpty() ? names : unreleased;
        }
    }

    /** A number from 0 to 1000 that shortens the pauses, so that clients differ. */
    private final long jitter;

    /** All leases, in the order of the acquires. */
    private final Map<String, LeaseState> leases = new LinkedHashMap<>();

    /** The acquires that have ended in doubt. */
    private final List<LeaseState> undos = new ArrayList<>();

    /** The leases whose release is queued or has no answer yet. */
    private final List<LeaseState> releases = new ArrayList<>();

    private final Map<Integer, Call> calls = new LinkedHashMap<>();
    private final Map<Integer, ConnectionState> connections = new TreeMap<>();

    /** The owner of the shared connection, which has one call at a time. */
    private final Sender shared = new Sender();

    private int lastCall, lastConnection, beatsInARow;
    private boolean inOutage, isLossLogged, hasClosed;
    private long now, closedAt = NEVER;
    List<Effect> effects;

    /** The lines of the log, each with the number of leases that it is about. */
    private Map<Log, Integer> logs;

    LeaseStates(long jitter) {
        this.jitter = jitter;
    }

    // Inputs from the program. Each is passed to `step`.

    /** Acquires a lease, or keeps the row of a table, which the program has claimed. */
    void acquire(String id, List<String> names, Options options, Object table, long token) {
        LeaseState lease = new LeaseState(id, names, options, table, now);
        leases.put(id, lease);
        if (isClosing()) {
            reply(lease, new Reply("Closed"));
        } else if (table != null) {
            // It was claimed at an unknown time, so a renewal confirms it first.
            granted(lease, token, now - lease.ttl);
        }
    }

    void giveUp(String id) {
        LeaseState lease = leases.get(id);
        if (lease != null && !lease.hasReply) {
            reply(lease, new Reply("GivenUp"));
        }
    }

    void release(String key) {
        LeaseState lease = leases.get(key);
        if (lease != null && lease.isHeld()) {
            queueRelease(lease, false);
        } else if (lease != null && lease.state == State.LOST) {
            releaseAfterLoss(lease);
        }
    }

    /**
     * A transaction that releases the leases. "begins" comes before its release statement, and then
     * one of "committed", "rolled back", "in doubt" (the commit got no answer) and "inner" (a
     * savepoint was released, and the program's transaction goes on).
     */
    void lastTransaction(List<String> keys, String stage) {
        for (LeaseState lease : known(keys)) {
            lease.lastTransactions += stage.equals("begins") ? 1 : -1;
            if (stage.equals("begins") || !lease.isHeld()) {
                continue;
            }
            switch (stage) {
                case "committed" -> markReleased(lease, null);
                case "in doubt" -> queueRelease(lease, true);
                default -> {
                    lease.dueAt = now;
                    lease.hasUncommittedRelease = stage.equals("inner");
                }
            }
        }
    }

    /** The worker's transaction has locked the row, which nobody else can claim meanwhile. */
    void rowLocked(String key) {
        known(List.of(key)).forEach(lease -> lease.rowLocks++);
    }

    void rowUnlocked(String key) {
        for (LeaseState lease : known(List.of(key))) {
            lease.rowLocks--;
            lease.dueAt = lease.isLive() ? min(lease.dueAt, now) : lease.dueAt;
            endByClock(0);
        }
    }

    /** A guard was refused: the next renewal shows whether the leases are lost. */
    void suspect(List<String> keys) {
        known(keys).stream().filter(LeaseState::isLive).forEach(lease -> lease.dueAt = now);
    }

    boolean isClosing() {
        return closedAt < NEVER;
    }

    void close() {
        closedAt = min(closedAt, now);
        all().stream()
                .filter(lease -> !lease.hasReply)
                .forEach(lease -> reply(lease, new Reply("Closed")));
        all().stream().filter(LeaseState::isHeld).forEach(lease -> queueRelease(lease, false));
    }

    // Inputs from the connections.

    /** The connection of a call with {@code open} is established, and the call is sent next. */
    void sent(int number) {
        Call call = calls.get(number);
        if (call != null && call.isOpening()) {
            markSent(call);
        }
    }

    void answered(int number, Answer answer) {
        Call call = calls.get(number);
        if (call == null) {
            return;
        }
        endCall(call);
        inOutage = isLossLogged = false;
        call.connectionState.errors = 0;
        switch (call.verb) {
            case "acquire" -> acquireAnswered(call, call.leases.get(0), answer);
            case "undo" -> undoAnswered(call.leases.get(0), answer.number);
            case "release" -> byLease(call, answer.outcomes).forEach(this::releaseAnswered);
            default -> keepAnswered(call, byLease(call, answer.outcomes));
        }
    }

    /** The code is one of clients/spec/errors.md. A broken connection cannot be used again. */
    void failed(int number, String code, boolean isBroken) {
        Call call = calls.get(number);
        if (call != null) {
            callFailed(call, code, isBroken);
        }
    }

    void disconnected(int number) {
        ConnectionState connection = connections.get(number);
        if (connection != null && connection.call != null) {
            callFailed(connection.call, "ended", true);
        } else if (connection != null) {
            forgetConnection(connection);
        }
    }

    void heartbeatDied() {
        all().stream()
                .filter(LeaseState::isHeld)
                .forEach(lease -> markLost(lease, HEARTBEAT, lease.names));
    }

    // Queries, which are possible at any time, without an input.

    LeaseState lease(String key) {
        return leases.get(key);
    }

    /** How long the client may believe that it holds the lease. */
    long remaining(long now, String key) {
        LeaseState lease = leases.get(key);
        if (lease == null || !lease.isHeld()) {
            return 0;
        }
        return max(0, min(lease.deadline, lease.endsAt) - now);
    }

    /**
     * Returns true if the window of a lease is over, but the lease is not lost: a transaction has
     * locked its row.
     */
    boolean isOver(long now, String key) {
        LeaseState lease = leases.get(key);
        return lease != null && lease.isHeld() && remaining(now, key) == 0;
    }

    // Time. Each step first ends what has ended by its time.

    /**
     * Takes an input and returns the effects. If the input answers a call, its number is {@code
     * answerTo}, and the limit of that call is not applied.
     */
    List<Effect> step(long time, int answerTo, Runnable input) {
        now = time;
        effects = new ArrayList<>();
        logs = new LinkedHashMap<>();
        endByClock(answerTo);
        input.run();
        closeUnusedConnections();
        sendDueCalls();
        logs.forEach(
                (line, count) -> {
                    // An outage writes one line to the log, and all losses by it write one more.
                    boolean isOfOutage = inOutage && line.reason == DEADLINE;
                    if (!isOfOutage || !isLossLogged) {
                        effects.add(new Log(line.log, null, null, line.reason, count));
                    }
                    isLossLogged |= isOfOutage;
                });
        return effects;
    }

    /** The latest time of the next step, or NEVER if there is nothing to do. */
    long wake(long now) {
        List<Long> times = new ArrayList<>();
        boolean isFree = shared.call == null;
        calls.values().forEach(call -> times.add(call.until));
        for (LeaseState lease : releases) {
            long next = isFree ? min(lease.dueAt, lease.until) : lease.until;
            times.add(lease.call != null ? NEVER : next);
        }
        undos.forEach(lease -> times.add(lease.call == null ? lease.dueAt : NEVER));
        for (LeaseState lease : queued()) {
            times.add(lease.until + QUEUE_TIMEOUT);
            times.add(lease.acquiresSeparately() || isFree ? lease.dueAt : NEVER);
        }
        for (LeaseState lease : live()) {
            boolean canSend = isFree || lease.confirmsSeparately();
            times.add(min(lease.endsAt, now + CHECK_INTERVAL));
            times.add(lease.rowLocks == 0 ? lease.deadline : NEVER);
            times.add(lease.isRenewalDue(NEVER) && canSend ? lease.dueAt : NEVER);
        }
        times.add(hasClosed ? NEVER : closedAt + CLOSE_TIMEOUT);
        long next = Collections.min(times);
        return next >= NEVER ? NEVER : max(now, min(next, now + CHECK_INTERVAL));
    }

    private void endByClock(int answerTo) {
        for (LeaseState lease : all()) {
            if (lease.isHeld() && lease.endsAt <= now) {
                markLost(lease, AT_MOST, lease.names);
            } else if (lease.isLive() && lease.deadline <= now && lease.rowLocks == 0) {
                // The server may have received a renewal that got no answer.
                markLost(lease, DEADLINE, lease.isRenewalAnswered ? List.of() : lease.names);
            }
        }
        boolean isLate = now >= closedAt + CLOSE_TIMEOUT;
        for (Call call : List.copyOf(calls.values())) {
            if (isLate || call.number != answerTo && call.until <= now) {
                callFailed(call, "no answer", true);
            }
        }
        if (isLate) {
            undos.clear();
        }
        for (LeaseState lease : List.copyOf(releases)) {
            if (lease.call == null && (isLate || lease.until <= now)) {
                endRelease(lease, UNCONFIRMED);
            }
        }
        for (LeaseState lease : queued()) {
            if (now >= lease.until + QUEUE_TIMEOUT) {
                reply(lease, new Reply("NoConnection"));
            }
        }
    }

    // Calls. The shared connection has one call at a time, and none of them waits in the server.

    private void sendDueCalls() {
        queued().stream()
                .filter(lease -> lease.acquiresSeparately() && lease.dueAt <= now)
                .forEach(this::sendAcquire);
        undos.stream()
                .filter(lease -> lease.isDue(now))
                .map(lease -> new Call("undo", List.of(lease), ownLimit(lease.ttl)))
                .forEach(call -> sendCall(call, call.leases.get(0)));
        all().stream()
                .filter(lease -> lease.confirmsSeparately() && lease.isRenewalDue(now))
                .forEach(lease -> sendRenewal(List.of(lease), lease));
        if (shared.call == null) {
            sendOnSharedConnection();
        }
        endIfIdle();
    }

    private void sendOnSharedConnection() {
        Optional<LeaseState> first = renewable(lease -> lease.isRenewalDue(now)).findFirst();
        Optional<LeaseState> release =
                releases.stream().filter(lease -> lease.isDue(now)).findFirst();
        Optional<LeaseState> request =
                queued().stream()
                        .filter(lease -> !lease.acquiresSeparately() && lease.dueAt <= now)
                        .findFirst();
        // Heartbeats go first, but after two in a row another call has its turn.
        boolean isOthersTurn =
                beatsInARow >= MAX_BEATS_IN_A_ROW && (release.isPresent() || request.isPresent());
        beatsInARow = first.isEmpty() || isOthersTurn ? 0 : beatsInARow + 1;
        if (beatsInARow > 0) {
            sendRenewal(renewableWith(first.get()), shared);
        } else if (release.isPresent()) {
            sendRelease(release.get());
        } else {
            request.ifPresent(this::sendAcquire);
        }
    }

    /** The leases that the shared connection renews and the filter takes, the earliest first. */
    private Stream<LeaseState> renewable(Predicate<LeaseState> filter) {
        return leases.values().stream()
                .filter(lease -> !lease.confirmsSeparately())
                .filter(filter)
                .sorted(Comparator.comparingLong(lease -> lease.dueAt));
    }

    /** The leases to renew in one call with {@code first}, the earliest first. */
    private List<LeaseState> renewableWith(LeaseState first) {
        if (first.confirmsRow()) {
            return List.of(first);
        }
        Stream<LeaseState> soon =
                renewable(lease -> lease.isRenewalDue(now + lease.ttl / 6))
                        .filter(lease -> Objects.equals(lease.table, first.table))
                        .filter(lease -> !lease.confirmsRow());
        return firstWithin(MAX_PAIRS, soon);
    }

    /** The first leases that have at most {@code most} names together, and at least one lease. */
    private static List<LeaseState> firstWithin(int most, Stream<LeaseState> leases) {
        int[] count = {0};
        return leases.takeWhile(
                        lease -> count[0] == 0 | (count[0] += lease.namesToSend().size()) <= most)
                .toList();
    }

    private void sendRenewal(List<LeaseState> leases, Sender owner) {
        String verb = leases.get(0).table == null ? "keep" : "keep_row";
        sendCall(new Call(verb, leases, limit(NEVER)), owner);
    }

    /** Sends a call on its owner's connection, which is opened if there is none. */
    private void sendCall(Call call, Sender owner) {
        call.open = owner.connection == null;
        if (call.open) {
            owner.connection = new ConnectionState(++lastConnection, owner);
            connections.put(lastConnection, owner.connection);
        }
        call.number = ++lastCall;
        call.connectionState = owner.connection;
        call.connectionState.call = call;
        call.connection = owner.connection.number;
        call.until = now + max(call.limit, SHORTEST_OPENING);
        if (!call.open) {
            markSent(call);
        }
        for (LeaseState lease : call.leases) {
            call.names.addAll(lease.namesToSend());
            call.tokens.addAll(Collections.nCopies(lease.namesToSend().size(), lease.token));
        }
        call.senders.add(owner);
        call.senders.forEach(sender -> sender.call = call);
        calls.put(call.number, call);
        effects.add(call);
    }

    private void markSent(Call call) {
        call.sent = now;
        call.until = now + call.limit;
        if (call.verb.startsWith("keep")) {
            call.leases.forEach(lease -> lease.isRenewalAnswered = false);
        }
    }

    /** The limit of a call: a third of {@code ttl} and of each live lease's ttl. */
    private long limit(long ttl) {
        return min(LONGEST_CALL, min(ttl, smallestTtl(live())) / 3);
    }

    /** How long conflicts and releases are retried. */
    private long retryTime(long ttl) {
        return max(SHORTEST_RETRY_TIME, limit(ttl));
    }

    private long pause(long ttl) {
        return jittered(min(max(ttl / 12, SHORTEST_PAUSE), LONGEST_PAUSE), jitter);
    }

    /** A copy of the leases, as a lease that ends is removed from the map. */
    private List<LeaseState> all() {
        return List.copyOf(leases.values());
    }

    private List<LeaseState> live() {
        return leases.values().stream().filter(LeaseState::isLive).toList();
    }

    private List<LeaseState> queued() {
        return leases.values().stream().filter(LeaseState::isQueued).toList();
    }

    private List<LeaseState> known(List<String> keys) {
        return keys.stream().map(leases::get).filter(Objects::nonNull).toList();
    }

    private void endCall(Call call) {
        calls.remove(call.number);
        call.connectionState.call = null;
        call.senders.stream()
                .filter(sender -> sender.call == call)
                .forEach(sender -> sender.call = null);
    }

    // Connections.

    private void callFailed(Call call, String cause, boolean isBroken) {
        endCall(call);
        String code = call.isOpening() && cause.equals("no answer") ? "connect" : cause;
        ConnectionState connection = call.connectionState;
        boolean isUseless =
                call.isOpening() || isBroken || isConnectionError(code) || code.equals("panicked");
        if (!isLockError(code)) {
            connection.errors++;
        }
        // After a second error in a row the next call opens another connection.
        if (isUseless || connection.errors > 1 || connection.owner == null) {
            effects.add(new Cut(connection.number));
            forgetConnection(connection);
        }
        switch (call.verb) {
            case "acquire" -> acquireFailed(call, call.leases.get(0), code);
            case "undo" -> undoFailed(call.leases.get(0), code);
            case "release" -> call.leases.forEach(lease -> releaseFailed(call, lease, code));
            default -> keepFailed(call, code);
        }
    }

    /** Forgets a connection that has ended. The session lease on it is lost. */
    private void forgetConnection(ConnectionState connection) {
        connections.remove(connection.number);
        if (connection.owner == null) {
            return;
        }
        connection.owner.connection = null;
        if (connection.owner instanceof LeaseState lease
                && lease.options.session
                && lease.isLive()) {
            markLost(lease, SESSION, List.of());
        }
    }

    /** Takes the connection from its owner. It is closed after its call. */
    private void dropConnection(Sender owner) {
        if (owner.connection != null) {
            owner.connection.owner = null;
            owner.connection = null;
        }
    }

    private void closeUnusedConnections() {
        connections
                .values()
                .removeIf(
                        connection -> {
                            boolean isUnused = connection.owner == null && connection.call == null;
                            if (isUnused) {
                                effects.add(new HangUp(connection.number));
                            }
                            return isUnused;
                        });
    }

    /** Closes the shared connection after the last lease, and reports the end of `close`. */
    private void endIfIdle() {
        boolean areLost = leases.values().stream().allMatch(one -> one.state == State.LOST);
        boolean isIdle = calls.isEmpty() && releases.isEmpty() && areLost;
        boolean endsClose = isIdle && isClosing() && !hasClosed;
        if (endsClose) {
            undos.clear();
            connections.values().forEach(one -> dropConnection(one.owner));
        } else if (isIdle && undos.isEmpty()) {
            dropConnection(shared);
        }
        closeUnusedConnections();
        if (endsClose) {
            hasClosed = true;
            effects.add(new Closed(true));
        }
    }

    // Renewals.

    /** The outcomes of a call, by its leases. */
    private Map<LeaseState, List<Outcome>> byLease(Call call, List<Outcome> outcomes) {
        Map<LeaseState, List<Outcome>> byLease = new LinkedHashMap<>();
        int from = 0;
        for (LeaseState lease : call.leases) {
            int to = from + lease.namesToSend().size();
            byLease.put(lease, outcomes.subList(from, to));
            from = to;
        }
        return byLease;
    }

    // These run for each renewed lease, and loops are cheaper than streams.

    private static int count(List<Outcome> outcomes, String outcome) {
        int count = 0;
        for (Outcome one : outcomes) {
            count += one.outcome.equals(outcome) ? 1 : 0;
        }
        return count;
    }

    private static boolean isAny(List<Outcome> outcomes, String outcome) {
        return count(outcomes, outcome) > 0;
    }

    private static boolean areAll(List<Outcome> outcomes, String outcome) {
        return count(outcomes, outcome) == outcomes.size();
    }

    /** Returns the smallest span that is given, or NEVER. */
    private static long smallest(List<Outcome> outcomes, ToLongFunction<Outcome> span) {
        long smallest = NEVER;
        for (Outcome one : outcomes) {
            long ms = span.applyAsLong(one);
            smallest = ms >= 0 ? min(smallest, ms) : smallest;
        }
        return smallest;
    }

    private void keepAnswered(Call call, Map<LeaseState, List<Outcome>> byLease) {
        boolean keptAny = byLease.values().stream().anyMatch(outcomes -> areAll(outcomes, "kept"));
        byLease.forEach((lease, outcomes) -> takeOutcomes(lease, outcomes, call.sent, keptAny));
    }

    /** Applies the outcomes of the names of one lease. */
    private void takeOutcomes(
            LeaseState lease, List<Outcome> outcomes, long sent, boolean keptAny) {
        boolean isGone = isAny(outcomes, "lost"), isLost = isGone || isAny(outcomes, "refused");
        long again = smallest(outcomes, Outcome::againIn);
        lease.isRenewalAnswered = true;
        // A last transaction may have released the lease itself.
        if (!lease.isLive() || isLost && lease.lastTransactions > 0) {
            return;
        }
        if (lease.hasUncommittedRelease && areAll(outcomes, "lost")) {
            markReleased(lease, null);
        } else if (isLost) {
            boolean isOtherRole =
                    outcomes.stream()
                            .filter(one -> one.outcome.equals("refused"))
                            .anyMatch(one -> "42501".equals(one.code));
            lease.advice = isOtherRole && !isGone && lease.table == null ? "other role" : null;
            IntStream unreleased =
                    IntStream.range(0, outcomes.size())
                            .filter(i -> outcomes.get(i).outcome.matches("kept|later"));
            Reason reason = isGone ? GONE : REFUSED;
            markLost(lease, reason, unreleased.mapToObj(lease.names::get).toList());
        } else if (areAll(outcomes, "kept")) {
            extend(lease, sent, smallest(outcomes, Outcome::remaining), again);
        } else if (again == 0 && keptAny) {
            // The server was out of locks: the next transaction has them again, if this call has
            // renewed another lease.
            lease.dueAt = now;
        } else {
            long pause = again == 0 || again == NEVER ? pause(lease.ttl) : again;
            lease.dueAt = now + max(pause, lease.shortestInterval(lease.deadline - now));
        }
    }

    private void extend(LeaseState lease, long sent, long remaining, long again) {
        long least = lease.shortestInterval(remaining), deadline = sent + window(remaining);
        lease.dueAt = sent + min(max(again, least), remaining / BEATS_PER_TTL);
        if (deadline <= now) {
            return;
        }
        lease.deadline = deadline;
        lease.hasUncommittedRelease = false;
        if (lease.isHeld()) {
            emit("renewed", lease);
        } else {
            acquired(lease);
        }
    }

    private void keepFailed(Call call, String code) {
        boolean isWrong = call.leases.get(0).confirmsRow() && !isTransient(code);
        boolean isRefused = !call.isOpening() && code.matches("42501|42883|3F000") || isWrong;
        boolean isAtOnce = code.equals("unsent");
        if (code.equals("panicked")) {
            heartbeatDied();
        } else if (!isRefused
                && !isAtOnce
                && !inOutage
                && call.leases.stream().anyMatch(LeaseState::isLive)) {
            inOutage = true;
            isAtOnce = isConnectionError(code);
            effects.add(new Log("not renewed", null, code, null, 0));
        }
        for (LeaseState lease : call.leases) {
            if (!lease.isLive()) {
                continue;
            }
            lease.dueAt = isAtOnce ? now : now + pause(smallestTtl(call.leases));
            if (isRefused && lease.lastTransactions == 0) {
                if (lease.state == State.CONFIRMING) {
                    lease.state = State.LOST;
                    reply(lease, notGranted(code, call.isOpening(), lease.table != null));
                }
                markLost(lease, REFUSED, List.of());
            }
        }
    }

    // Acquires.

    private void sendAcquire(LeaseState lease) {
        boolean waits = lease.acquiresSeparately() && lease.hasOneName();
        // The snapshot of a longer wait would hold back vacuum.
        long wait = waits ? max(0, min(lease.until - now, WAIT_PORTION)) : 0;
        long limit = ownLimit(lease.ttl);
        limit = lease.acquiresSeparately() ? wait + limit : min(limit, limit(NEVER));
        Call call = new Call("acquire", List.of(lease), limit);
        call.wait = wait;
        call.reclaim = lease.options.reclaim || lease.doubt != null;
        sendCall(call, lease.acquiresSeparately() ? lease : shared);
    }

    private void acquireAnswered(Call call, LeaseState lease, Answer answer) {
        Taken taken = answer.taken;
        lease.inOutage = false;
        if (taken == null) {
            granted(lease, answer.number, call.sent);
            return;
        }
        // The lease is taken by its own first call, whose answer was lost.
        boolean isByItself = lease.doubt != null && lease.options.holder.equals(taken.holder);
        if (lease.doubt != null && !isByItself && now >= lease.doubt.until) {
            lease.doubt = null;
        }
        long until = isByItself ? max(lease.until, lease.doubt.until) : lease.until;
        if (lease.hasReply) {
            endAcquire(lease);
        } else if (now < until) {
            boolean isPortion = lease.acquiresSeparately() && lease.hasOneName() && !isByItself;
            long again = isPortion ? call.sent + PORTION_INTERVAL : now + RETRY_INTERVAL;
            lease.dueAt = min(until, again);
        } else if (isByItself) {
            reply(lease, new Reply("NoAnswer"));
        } else {
            Reply reply = new Reply("LeaseTaken");
            reply.holder = taken.holder;
            reply.remaining = taken.remaining;
            String end = taken.remaining <= 0 ? "guard" : "ttl";
            if (taken.state != null) {
                reply.waitsFor = taken.state.equals("uncommitted") ? "commit" : end;
            }
            reply(lease, reply);
        }
    }

    private void granted(LeaseState lease, long token, long sent) {
        lease.token = token;
        lease.state = State.CONFIRMING;
        lease.doubt = null;
        // If the answer was late, a renewal on the same connection confirms the lease, and until
        // then it may last no longer than a ttl from now.
        lease.deadline = now + lease.ttl;
        lease.dueAt = now;
        long firstBeat = sent + lease.ttl / BEATS_PER_TTL;
        if (lease.hasReply) {
            queueRelease(lease, false);
        } else if (now < firstBeat) {
            lease.deadline = sent + window(lease.ttl);
            lease.dueAt = firstBeat;
            acquired(lease);
        }
    }

    private void acquired(LeaseState lease) {
        lease.state = State.HELD;
        lease.isReported = true;
        lease.endsAt = now + lease.options.atMost;
        emit("acquired", lease);
        Reply reply = new Reply(null);
        reply.leases = List.of(lease.key);
        reply(lease, reply);
    }

    /** Replies to an acquire. A grant that is not confirmed, or in doubt, is released. */
    private void reply(LeaseState lease, Reply reply) {
        lease.hasReply = true;
        if (lease.state == State.ACQUIRING) {
            leases.remove(lease.key);
        }
        boolean isFailed = reply.error != null;
        reply.reply = lease.key;
        reply.inDoubt = lease.doubt != null && isFailed && !reply.error.equals("LeaseTaken");
        effects.add(reply);
        if (isFailed && lease.isLive()) {
            queueRelease(lease, false);
        }
        endAcquire(lease);
    }

    /**
     * Closes the connection of an acquire, unless its call has no answer yet, and queues the
     * release of a grant in doubt, if no other client can have the same holder.
     */
    private void endAcquire(LeaseState lease) {
        if (lease.call != null) {
            return;
        }
        if (lease.state == State.ACQUIRING || !lease.options.session) {
            dropConnection(lease);
        }
        if (lease.doubt != null && lease.options.isHolderUnique) {
            lease.dueAt = now;
            lease.tries = 0;
            undos.add(lease);
        }
    }

    private void acquireFailed(Call call, LeaseState lease, String code) {
        boolean wasInDoubt = lease.doubt != null;
        if (!call.isOpening() && !lease.options.session && leavesDoubt(code)) {
            lease.doubt = new Doubt(call.sent, call.sent + call.limit);
        }
        if (lease.hasReply) {
            endAcquire(lease);
            return;
        }
        if (code.equals("unsent")) {
            // The lease is still due, and is sent on another connection.
            return;
        }
        lease.tries++;
        boolean isConflict = isConflict(code), isOutage = isConnectionError(code);
        long retriedUntil = lease.requestedAt + retryTime(lease.ttl);
        long until = isConflict ? max(lease.until, retriedUntil) : lease.until;
        long longest = isConflict ? RETRY_INTERVAL : longestBackoff(lease.ttl);
        boolean isFirst = lease.tries == 1 || now >= until && !wasInDoubt;
        if (lease.doubt != null && lease.mayReclaim() && isFirst && isOutage) {
            return;
        }
        // A retry in doubt reclaims, so it must not take over the grant of another client.
        boolean mayPass = (isConflict || isOutage) && (lease.doubt == null || lease.mayReclaim());
        if (!mayPass || now >= until) {
            reply(lease, notGranted(code, call.isOpening() && lease.doubt == null, false));
            return;
        }
        if (isOutage) {
            // One line of the log for an outage, however many acquires wait for its end.
            if (leases.values().stream().noneMatch(one -> one.inOutage)) {
                effects.add(new Log("not acquired", lease.key, code, null, 0));
            }
            lease.inOutage = true;
        }
        long pause = jittered(backoff(lease.tries, longest), jitter);
        lease.dueAt = now + min(pause, until - now);
    }

    private void undoAnswered(LeaseState lease, long released) {
        lease.tries++;
        lease.dueAt = min(now + RETRY_INTERVAL, lease.doubt.until);
        // Until then the server may still carry out the acquire.
        if (released > 0 || now >= lease.doubt.until) {
            endUndo(lease);
        }
    }

    private void undoFailed(LeaseState lease, String code) {
        lease.tries++;
        long pause =
                code.equals("unsent") ? 0 : jittered(backoff(lease.tries, LONGEST_PAUSE), jitter);
        lease.dueAt = now + pause;
        boolean mayPass = isTransient(code) || code.equals("panicked");
        if (!mayPass || lease.dueAt >= lease.doubt.sent + lease.ttl) {
            endUndo(lease);
        }
    }

    private void endUndo(LeaseState lease) {
        undos.remove(lease);
        dropConnection(lease);
    }

    // Releases.

    private void queueRelease(LeaseState lease, boolean isInDoubt) {
        lease.dueAt = now;
        lease.tries = 0;
        lease.call = null;
        lease.until = now + retryTime(lease.ttl);
        lease.isInDoubt = isInDoubt || lease.hasUncommittedRelease || lease.isInTransaction();
        lease.isAlone = lease.isInDoubt;
        lease.joinedTo = null;
        if (!lease.options.session) {
            dropConnection(lease);
        }
        lease.state = lease.state == State.LOST ? State.LOST : State.RELEASING;
        releases.add(lease);
    }

    /** Sends the queued releases in one call, those of rows in one call for each table. */
    private void sendRelease(LeaseState first) {
        Stream<LeaseState> mayJoin =
                releases.stream()
                        .filter(lease -> !lease.isAlone && lease.isDue(now))
                        .filter(lease -> Objects.equals(lease.table, first.table));
        List<LeaseState> due = first.isAlone ? List.of(first) : mayJoin.toList();
        List<LeaseState> within = firstWithin(MAX_RELEASED_NAMES, due.stream());
        // A release that was joined before goes as a whole.
        LeaseState next = within.size() < due.size() ? due.get(within.size()).joinedTo : null;
        List<LeaseState> joined =
                within.stream().filter(lease -> next == null || lease.joinedTo != next).toList();
        // They are retried together from now on.
        long until = joined.stream().mapToLong(lease -> lease.until).min().orElse(now);
        boolean isInDoubt = joined.stream().anyMatch(lease -> lease.isInDoubt);
        for (LeaseState lease : joined) {
            lease.until = until;
            lease.tries = first.tries;
            lease.isInDoubt = isInDoubt;
            lease.joinedTo = first;
        }
        // A retry comes after the other releases.
        releases.removeAll(joined);
        releases.addAll(joined);
        // Without a shared connection a session lease is released on its own, unless a renewal
        // that confirms the lease is under way there.
        boolean hasOwn = first.connection != null && first.connection.call == null;
        boolean isOnOwn = hasOwn && shared.connection == null && joined.size() == 1;
        long limit = min(limit(NEVER), ownLimit(smallestTtl(joined)));
        sendCall(new Call("release", joined, limit), isOnOwn ? first : shared);
    }

    private void releaseAnswered(LeaseState lease, List<Outcome> outcomes) {
        boolean hasSession = !lease.options.session || lease.connection != null;
        boolean isKnown = !lease.isInDoubt && lease.table == null && hasSession;
        boolean isGone = isAny(outcomes, "lost") && now < lease.deadline;
        if (lease.state != State.LOST && isGone && isKnown) {
            markLost(lease, GONE, List.of());
            leases.remove(lease.key);
        }
        endRelease(lease, null);
    }

    /**
     * Ends a release. Without an answer its reason is UNCONFIRMED: the server keeps the lease until
     * its ttl.
     */
    private void endRelease(LeaseState lease, Reason reason) {
        releases.remove(lease);
        if (lease.state == State.LOST) {
            dropConnection(lease);
        } else {
            if (reason != null) {
                log("not released", null);
            }
            markReleased(lease, reason);
        }
    }

    private void releaseFailed(Call call, LeaseState lease, String code) {
        boolean isDisconnected = isConnectionError(code);
        lease.isInDoubt |= !call.isOpening() && leavesDoubt(code);
        // The error of a statement may be caused by one lease of several.
        boolean splits = call.leases.size() > 1 && !call.isOpening() && !isDisconnected;
        boolean mayPass = splits || isLockError(code) || isDisconnected;
        if (!mayPass || now >= lease.until) {
            endRelease(lease, UNCONFIRMED);
            return;
        }
        // Retried at once if the connection had ended, and one by one if a lease caused the error.
        boolean isAtOnce = splits || isDisconnected && lease.tries == 0 || code.equals("unsent");
        lease.dueAt = isAtOnce ? now : now + max(SHORTEST_PAUSE, (lease.until - now) / 4);
        lease.tries++;
        if (splits) {
            lease.isAlone = true;
            releases.remove(lease);
            releases.add(lease);
        }
    }

    // Ends.

    private void markLost(LeaseState lease, Reason reason, List<String> unreleased) {
        lease.state = State.LOST;
        lease.reason = reason;
        lease.unreleased = unreleased;
        if (lease.isReported) {
            log("lost", reason);
            emit("lost", lease);
            return;
        }
        releaseAfterLoss(lease);
        if (!lease.hasReply) {
            Reply reply = new Reply("LeaseLost");
            reply.reason = reason;
            reply.advice = lease.advice;
            reply(lease, reply);
        }
    }

    /** Forgets a lost lease, and releases the names that the server may still hold. */
    private void releaseAfterLoss(LeaseState lease) {
        leases.remove(lease.key);
        if (lease.unreleased.isEmpty() || hasClosed) {
            dropConnection(lease);
        } else {
            queueRelease(lease, false);
        }
    }

    private void markReleased(LeaseState lease, Reason reason) {
        lease.state = State.RELEASED;
        lease.reason = reason;
        leases.remove(lease.key);
        dropConnection(lease);
        if (lease.isReported) {
            emit("released", lease);
        }
    }

    private void emit(String event, LeaseState lease) {
        long left = lease.isHeld() ? lease.deadline - now : 0;
        effects.add(
                new Event(event, lease.key, lease.token, left, lease.reason, lease.advice, null));
    }

    /** Writes one line for all equal ones of a step, with their count. */
    private void log(String what, Reason reason) {
        logs.merge(new Log(what, null, null, reason, 0), 1, Integer::sum);
    }

    // Leaders.

    /**
     * The state of one {@code lead}. Its last effect after an error is "pause", before it acquires
     * again, or "end".
     */
    static final class LeadState {
        private final long ttl, jitter;
        private int failures;

        /** Since when it leads, or NEVER. */
        private long leadingSince = NEVER;

        LeadState(long ttl, long jitter) {
            this.ttl = ttl;
            this.jitter = jitter;
        }

        void granted(long now) {
            leadingSince = now;
        }

        /**
         * The acquire or the work has failed. The error is its type, or empty if this package has
         * none for it; after a loss of the lease it does not matter. An outage writes one line to
         * the log, and emits one event if this process has led.
         */
        List<Effect> failed(
                long now,
                String error,
                String code,
                boolean isLost,
                boolean isStopped,
                boolean isClosed) {
            long since = leadingSince;
            leadingSince = NEVER;
            String cause = cause(error, code, since == NEVER);
            if (cause.equals("own") && !isLost) {
                return List.of(new Lead("end", 0, cause));
            }
            if (isStopped || isClosed) {
                return List.of(new Lead("end", 0, isStopped ? "stopped" : "closed"));
            }
            if (now - since >= min(ttl, 60_000)) {
                failures = 0;
            }
            List<Effect> effects = new ArrayList<>();
            if (failures == 0) {
                effects.add(new Log("leads no more", null, cause, null, 0));
            }
            if (failures == 0 && since < NEVER) {
                effects.add(new Event("interrupted", null, 0, 0, null, null, cause));
            }
            long shortest = max(ttl / 12, SHORTEST_PAUSE) << min(failures++, 20);
            long pause = jittered(min(shortest, longestBackoff(ttl)), jitter);
            effects.add(new Lead("pause", pause, null));
            return effects;
        }
    }

    /** Returns why a leader acquires again, or "own" if it does not. */
    private static String cause(String error, String code, boolean isOfAcquire) {
        if (error.matches("LeaseLost|LeaseTaken|TransactionLost|NoAnswer")) {
            return error;
        }
        if (code.matches("PF00[14]")) {
            // The lease may be lost: the next acquire shows it.
            return "LeaseLost";
        }
        if (error.equals("NoConnection") && (code.isEmpty() || isTransient(code))) {
            return error;
        }
        // 53300: the server has no connection left for the work.
        if (endsSession(code) || code.equals("53300")) {
            return "ConnectionLost";
        }
        return isOfAcquire && isTransient(code) ? "transient" : "own";
    }

    // The errors of guards, and of the client's statements.

    /** The stages of a guarded transaction. */
    enum Stage {
        OPEN,
        BEGIN,
        WORK,
        CHECK,
        RELEASE,
        COMMIT
    }

    /**
     * Returns what follows from an error in a guarded transaction, whose stages, codes and sessions
     * are those of clients/spec/errors.md.
     *
     * @param isFatal by its severity
     * @param of "names", "rows" (of a table alone) or "adopted"
     * @param isInner it is a savepoint
     * @param isLost a lease of the guard is lost
     */
    static GuardFailure guardFailed(
            Stage stage,
            String code,
            boolean isFatal,
            String session,
            String of,
            boolean isInner,
            boolean isLost) {
        // A fatal error ends a session, whatever its SQLSTATE: poolers have some of their own.
        boolean isEnd = isFatal || endsSession(code), isOpenEnd = endsOpenSession(code);
        // An answer of the server is no end, even if the session has ended after it.
        boolean isOwnEnd = session.equals("closed") && (isEnd || code.isEmpty());
        boolean isBroken =
                switch (stage) {
                    // Without a connection no transaction has begun.
                    case OPEN -> isOpenEnd || isOwnEnd;
                    // The work may use other connections, whose end is not the end of this one.
                    case WORK -> isOpenEnd || isEnd && !session.equals("open");
                    default -> isEnd || isOwnEnd;
                };
        boolean hasFailed = code.equals("25P02") && stage.compareTo(Stage.CHECK) >= 0;
        boolean isEnded = code.equals("no transaction");
        // With 25P03 and 25P04 the server has ended an idle transaction before it read the commit.
        boolean isUnknown = stage == Stage.COMMIT && !isInner && !code.matches("25P0[34]");
        boolean inDoubt = isBroken || code.isEmpty() ? isUnknown : isEnded;
        String error;
        if (isBroken) {
            error = isLost ? "LeaseLost" : "TransactionLost";
        } else if (hasFailed || isEnded) {
            error = "TransactionLost";
        } else if (of.equals("adopted") && stage == Stage.BEGIN && code.matches("22004|PF004")) {
            // 22004: lease_adopt has returned NULL, as a transaction guards an older number. PF004:
            // another holder has adopted this number.
            error = "LeaseTaken";
        } else if (stage == Stage.BEGIN || stage == Stage.RELEASE) {
            error = errorType(code, of.equals("rows"));
        } else {
            // An error of the work: deferred triggers and constraints run at the commit.
            error = code.startsWith("PF") ? "Refused" : "";
        }
        String last = inDoubt && stage == Stage.COMMIT ? "in doubt" : "rolled back";
        boolean isSuspect = !of.equals("adopted") && code.matches("PF00[14]");
        // After a failover a token is valid only after a renewal.
        boolean isRefused = error.equals("Refused") && code.equals("PF004");
        boolean again = isRefused && stage == Stage.BEGIN && !isInner;
        return new GuardFailure(error, inDoubt, last, isSuspect, again);
    }

    /**
     * Returns the type of an error of one of the client's statements, or an empty text if it
     * remains the driver's. If the statement is about rows of a table, 3F000 may mean the table's
     * schema.
     */
    static String errorType(String code, boolean isOfTable) {
        if (code.equals("42883") || code.equals("3F000") && !isOfTable) {
            return "NotInstalled";
        }
        if (code.equals("42501")) {
            return "NotGranted";
        }
        return code.matches("(PF|22|55|0A|53)...") && !code.equals("55P03") ? "Refused" : "";
    }

    // Spans of time, and the codes of errors.

    /** The part of a span that the client trusts: the server counts it by another clock. */
    private static long window(long span) {
        return span - (span + 49) / 50;
    }

    /** The limit of an acquire, a release or an undo without regard to other leases. */
    private static long ownLimit(long ttl) {
        return min(max(ttl / 3, SHORTEST_RETRY_TIME), LONGEST_CALL);
    }

    private static long smallestTtl(List<LeaseState> leases) {
        return leases.stream().mapToLong(lease -> lease.ttl).min().orElse(NEVER);
    }

    private static long jittered(long pause, long jitter) {
        return pause - pause * jitter / 4000;
    }

    private static long backoff(int tries, long longest) {
        return min(FIRST_RETRY << min(tries - 1, 20), longest);
    }

    private static long longestBackoff(long ttl) {
        return min(max(ttl / 3, SHORTEST_WAIT), LONGEST_PAUSE);
    }

    /** Returns true if a call on another connection may succeed. */
    private static boolean isConnectionError(String code) {
        return code.matches("connect|unsent|ended|no answer|25006|53300|08...|57P0.");
    }

    /** Returns true if the server may have carried out the statement. */
    private static boolean leavesDoubt(String code) {
        return code.matches("unreadable|panicked|ended|no answer|connect|08...|57P0.");
    }

    private static boolean isConflict(String code) {
        return code.matches("40001|40P01");
    }

    /** Returns true if the same statement may succeed later, as on a standby that is promoted. */
    private static boolean isTransient(String code) {
        return isConnectionError(code) || code.matches("(25|40|53|57|58)...|55P03");
    }

    private static boolean isLockError(String code) {
        return isConflict(code) || code.equals("55P03");
    }

    /** Returns true if a session has ended, or could not be opened. */
    private static boolean endsSession(String code) {
        return code.matches("ended|57P03|08...") || endsOpenSession(code);
    }

    /**
     * Returns true if the server has ended an open session: idle in transaction,
     * transaction_timeout, terminated, crashed, idle.
     */
    private static boolean endsOpenSession(String code) {
        return code.matches("25P0[34]|57P0[125]");
    }

    private static Reply notGranted(String code, boolean isOpening, boolean isOfTable) {
        boolean hasNoAnswer = isConnectionError(code) || leavesDoubt(code);
        String type = hasNoAnswer ? "NoAnswer" : errorType(code, isOfTable);
        Reply reply = new Reply(isOpening ? "NoConnection" : type.isEmpty() ? "Refused" : type);
        reply.sqlstate = code.matches("[0-9A-Z]{5}") ? code : null;
        return reply;
    }
}
