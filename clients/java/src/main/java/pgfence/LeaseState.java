package pgfence;

import static pgfence.FenceException.Reason.*;

import static java.lang.Math.*;

import pgfence.FenceException.Reason;

import java.util.*;
import java.util.function.*;
import java.util.stream.*;

/**
 * What a client decides about its leases, as clients/spec/lease_state.md has it; the tests play its
 * vectors. There is no clock, thread or socket here: each input has the time, in milliseconds of a
 * monotonic clock, and returns effects, which are carried out in their order.
 */
final class LeaseState {
    static final long NEVER = 1L << 60, LOOK_AGAIN = 1_000;
    private static final long LONGEST_CALL = 10_000, SHORTEST_OPENING = 2_000, PORTION = 2_000;
    private static final long SHORTEST_PAUSE = 10, SHORTEST_WAIT = 250, LONGEST_PAUSE = 10_000;
    private static final long FIRST_RETRY = 20, TRY_AGAIN = 250, AFTER_PORTION = 50;
    private static final long LEAST_PATIENCE = 1_000, LONGEST_QUEUE = 20_000, CLOSING = 5_000;
    private static final int MOST_PAIRS = 10_000, MOST_RELEASED = 200;
    private static final int BEATS_PER_TTL = 3, MOST_BEATS = 2;

    // Effects, inputs, and what there is

    /** What the shell carries out. */
    interface Effect {}

    /** Ends a connection at once, whatever hangs in it. */
    record Cut(int cut) implements Effect {}

    /** Ends a connection as it should be. */
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

    /** A line of the log, of the acquire that is the key. */
    record Log(String log, String key, String code, Reason reason, int count) implements Effect {}

    /** Everything is given back, or the time for that is over. */
    record Closed(boolean closed) implements Effect {}

    /** What a leader does next: "acquire", "work", "pause" or "end". */
    record Lead(String lead, long pause, String code) implements Effect {}

    /** The answer to an acquire or a check: an error, or none, and then the lease is held. */
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
     * A statement that is to be sent. If it says so, its connection is opened before, and {@link
     * #sent} told.
     */
    static final class Call implements Effect {
        int call, connection;
        final String verb;
        final long limit;
        final List<Grant> grants;
        final String asker, holder;

        /** The table of all, if they are rows. */
        final Object table;

        boolean open, reclaim;
        long wait;
        final List<String> names = new ArrayList<>();
        final List<Long> tokens = new ArrayList<>();
        private long sent, until;
        private Link link;
        private final List<Sender> senders;

        private Call(String verb, List<Grant> grants, long limit) {
            this.verb = verb;
            this.grants = grants;
            this.limit = limit;
            asker = grants.get(0).key;
            holder = grants.get(0).options.holder;
            table = grants.get(0).table;
            senders = new ArrayList<>(grants);
        }
    }

    /** By whom a lease is taken. */
    record Taken(String holder, long remaining, String state) {}

    /** What has become of a name by a renewal, or a release. A time below 0 is not known. */
    record Outcome(String is, long remaining, long againIn, String code) {
        /** Of a release: "lost" if there was nothing to be released. */
        Outcome(boolean isReleased) {
            this(isReleased ? "released" : "lost", -1, -1, null);
        }
    }

    /**
     * The rows of a call's statement: the token that was granted, or how many were undone; by whom
     * it is taken; what has become of each name.
     */
    record Answer(Long number, Taken taken, List<Outcome> outcomes) {}

    enum State {
        ASKING,
        CONFIRMING,
        HELD,
        RELEASING,
        LOST,
        RELEASED
    }

    /** A connection. One that is leaving ends after the call on it. */
    private static final class Link {
        final int number;
        int errorsInARow;
        boolean isLeaving, isGone;

        Link(int number) {
            this.number = number;
        }
    }

    /**
     * What sends one call at a time, when it is due, over a connection of its own or the shared
     * one.
     */
    private static class Sender {
        long at;
        int tries;
        Call call;
        Link link;

        boolean isReady(long by) {
            return call == null && at <= by;
        }
    }

    /** A call that was sent, and had no answer, may still be carried out until then. */
    private record Doubt(long sent, long until) {}

    /** An acquire, and the lease that is granted to it. */
    static final class Grant extends Sender {
        final String key;
        final List<String> names;
        final Options options;
        final long ttl, begun;

        /** The table of a row lease, whatever the shell knows it by. */
        final Object table;

        State state = State.ASKING;
        long token, deadline, atMost = NEVER;
        Reason reason;
        String advice;

        /** The acquire is answered; it waits for the end of an outage. */
        boolean isOver, isOut;

        Doubt doubt;

        /**
         * When its wait ends; or, if it is given back, the attempts: a loss can no more be told
         * from their answers.
         */
        long until;

        /** How many last transactions are under way, and transactions that have the row locked. */
        int resting, touched;

        /**
         * Released in a transaction that goes on; an end of it is told; its last renewal had an
         * answer.
         */
        boolean isEnding, isTold, isAnswered = true;

        /** It may be released already; it is given back in no statement with others. */
        boolean isInDoubt, isAlone;

        /** Names that the server may hold still after a loss. */
        List<String> rest = List.of();

        private Grant(String key, List<String> names, Options options, Object table, long now) {
            this.key = key;
            this.names = names;
            this.options = options;
            this.table = table;
            ttl = options.ttl;
            begun = at = now;
            until = now + min(options.wait, NEVER);
        }

        boolean isHeld() {
            return state == State.HELD;
        }

        boolean isAlive() {
            return isHeld() || state == State.CONFIRMING;
        }

        private boolean isOne() {
            return names.size() == 1;
        }

        /** Its acquire may wait, or make a session lease: on a connection of its own. */
        private boolean isAside() {
            return options.session || options.wait > 0 && isOne();
        }

        private boolean reclaims() {
            return options.reclaim || isOne() && !options.isShared() && options.isOwnHolder;
        }

        private boolean rests() {
            return resting > 0 || touched > 0;
        }

        private boolean isDue(long by) {
            return isAlive() && !rests() && isReady(by);
        }

        /** It is confirmed over the connection that has granted it. */
        private boolean isConfirmedAside() {
            return state == State.CONFIRMING && isOpen(link);
        }

        /** It is confirmed in no statement with others: its error is its caller's. */
        private boolean isRowToConfirm() {
            return table != null && state == State.CONFIRMING;
        }

        /** The shortest time until the next renewal, if that much is left. */
        private long least(long left) {
            return min(max(SHORTEST_PAUSE, ttl / 60), left / 4);
        }

        /** The names that a call is about: after a loss, the rest. */
        private List<String> ours() {
            return rest.isEmpty() ? names : rest;
        }
    }

    /** Between 0 and 1000: makes the pauses of clients differ. */
    private final long spread;

    private final Map<String, Grant> grants = new LinkedHashMap<>();

    /** Acquires that are not answered. */
    private final Map<String, Grant> requests = new LinkedHashMap<>();

    /** Acquires that have ended in doubt, and leases, that are given back. */
    private final List<Grant> undos = new ArrayList<>(), giveBacks = new ArrayList<>();

    private final Map<Integer, Call> calls = new LinkedHashMap<>();
    private final Map<Integer, Link> links = new TreeMap<>();

    /** The connection for all that waits for nobody, with one call at a time. */
    private final Sender shared = new Sender();

    private int lastCall, lastLink, beatsInARow;
    private boolean isOut, isLossLogged, isDone;
    private long now, closedAt = NEVER;
    private List<Effect> effects;
    private Map<Log, Integer> logs;

    LeaseState(long spread) {
        this.spread = spread;
    }

    // What the program asks: each of these is an input, within a step

    void acquire(String id, List<String> names, Options options) {
        ask(id, names, options, null);
    }

    /** A row that the program has claimed, at a time that is not known. */
    void keepRow(String id, String row, Options options, Object table, long token) {
        Grant g = ask(id, List.of(row), options, table);
        if (!g.isOver) {
            granted(g, token, now - g.ttl);
        }
    }

    private Grant ask(String id, List<String> names, Options options, Object table) {
        Grant g = new Grant(id, names, options, table, now);
        requests.put(id, g);
        grants.put(id, g);
        if (closedAt < NEVER) {
            finish(g, new Reply("Closed"));
        }
        return g;
    }

    void giveUp(String id) {
        if (requests.containsKey(id)) {
            finish(requests.get(id), new Reply("GivenUp"));
        }
    }

    void release(String key) {
        Grant g = grants.get(key);
        if (g != null && g.isHeld()) {
            giveBack(g, false);
        } else if (g != null && g.state == State.LOST) {
            forget(g);
        }
    }

    /** How far a transaction has come that releases: the stages are the specification's. */
    void last(List<String> keys, String stage) {
        for (Grant g : those(keys)) {
            g.resting += stage.equals("begins") ? 1 : -1;
            if (stage.equals("begins") || !g.isHeld()) {
                continue;
            }
            switch (stage) {
                case "committed" -> end(g, null);
                case "in doubt" -> giveBack(g, true);
                default -> {
                    g.at = now;
                    g.isEnding = stage.equals("inner");
                }
            }
        }
    }

    /** A transaction has written the row of a row lease: nobody else can claim it until its end. */
    void touches(String key) {
        those(List.of(key)).forEach(g -> g.touched++);
    }

    void ended(String key) {
        for (Grant g : those(List.of(key))) {
            g.touched--;
            g.at = g.isAlive() ? min(g.at, now) : g.at;
            endByClock(0);
        }
    }

    /** A guard was refused: the next renewal tells. */
    void suspect(List<String> keys) {
        those(keys).stream().filter(Grant::isAlive).forEach(g -> g.at = now);
    }

    Reply check(String key) {
        Grant g = grants.get(key);
        Reply reply = new Reply(g != null && g.isHeld() ? null : "LeaseLost");
        reply.reply = key;
        if (reply.error != null) {
            boolean isLost = g != null && g.state == State.LOST;
            reply.reason = isLost ? g.reason : RELEASED;
            reply.advice = isLost ? g.advice : null;
        }
        effects.add(reply);
        return reply;
    }

    void close() {
        closedAt = min(closedAt, now);
        List.copyOf(requests.values()).forEach(g -> finish(g, new Reply("Closed")));
        all().stream().filter(Grant::isHeld).forEach(g -> giveBack(g, false));
    }

    // What the connections say

    /** The connection of a call is open, and the call is sent next. */
    void sent(int number) {
        Call c = calls.get(number);
        if (c != null && c.sent < 0) {
            isSent(c);
        }
    }

    private void isSent(Call c) {
        c.sent = now;
        c.until = now + c.limit;
        if (c.verb.startsWith("keep")) {
            c.grants.forEach(g -> g.isAnswered = false);
        }
    }

    void answered(int number, Answer answer) {
        Call c = calls.get(number);
        if (c == null) {
            return;
        }
        over(c);
        isOut = isLossLogged = false;
        c.link.errorsInARow = 0;
        if (c.link.isLeaving) {
            hangUp(c.link);
        }
        switch (c.verb) {
            case "acquire" -> acquireAnswered(c, c.grants.get(0), answer);
            case "undo" -> undoAnswered(c.grants.get(0), answer.number);
            case "release" -> eachOf(c, answer.outcomes).forEach(this::releaseAnswered);
            default -> keepAnswered(c, eachOf(c, answer.outcomes));
        }
    }

    /**
     * A call has failed: with an SQLSTATE; "connect": its connection could not be opened; "unsent":
     * that had ended before; "ended"; "unreadable"; "panicked". A broken connection is of no use
     * any more.
     */
    void failed(int number, String code, boolean isBroken) {
        Call c = calls.get(number);
        if (c != null) {
            failed(c, code, isBroken);
        }
    }

    void disconnected(int connection) {
        Link link = links.get(connection);
        List.copyOf(calls.values()).stream()
                .filter(c -> c.link == link)
                .forEach(c -> failed(c, "ended", true));
        if (isOpen(link)) {
            leave(link);
        }
    }

    /** What keeps the leases is broken. */
    void died() {
        all().stream().filter(Grant::isHeld).forEach(g -> lose(g, HEARTBEAT, g.names));
    }

    // What can be asked at any time

    Grant grant(String key) {
        return grants.get(key);
    }

    long remaining(long now, String key) {
        Grant g = grants.get(key);
        if (g == null || !g.isHeld()) {
            return 0;
        }
        long left = g.touched > 0 ? max(1, g.deadline - now) : g.deadline - now;
        return max(0, min(left, g.atMost - now));
    }

    /** When to tick at the latest; never, if there is nothing to do. */
    long wake(long now) {
        List<Long> times = new ArrayList<>();
        boolean isFree = shared.call == null;
        calls.values().forEach(c -> times.add(c.until));
        for (Grant g : giveBacks) {
            times.add(g.call != null ? NEVER : isFree ? min(g.at, g.until) : g.until);
        }
        undos.forEach(g -> times.add(g.call == null ? g.at : NEVER));
        for (Grant g : asking()) {
            times.add(g.until + LONGEST_QUEUE);
            times.add(g.isAside() || isFree ? g.at : NEVER);
        }
        for (Grant g : alive()) {
            times.add(min(g.atMost, now + LOOK_AGAIN));
            times.add(g.touched == 0 ? g.deadline : NEVER);
            times.add(g.isDue(NEVER) && (g.isConfirmedAside() || isFree) ? g.at : NEVER);
        }
        times.add(isDone ? NEVER : closedAt + CLOSING);
        long next = Collections.min(times);
        return next >= NEVER ? NEVER : max(now, min(next, now + LOOK_AGAIN));
    }

    // The clock goes first, whatever comes

    /** An input at a time. The call that it answers, if any, is not past its limit. */
    List<Effect> step(long time, int answered, Runnable input) {
        now = time;
        effects = new ArrayList<>();
        logs = new LinkedHashMap<>();
        endByClock(answered);
        input.run();
        send();
        logs.forEach(
                (line, count) -> {
                    // An outage is one line of the log, and so are the losses by it.
                    boolean isOfOutage = isOut && line.reason == DEADLINE;
                    if (!isOfOutage || !isLossLogged) {
                        effects.add(new Log(line.log, null, null, line.reason, count));
                    }
                    isLossLogged |= isOfOutage;
                });
        return effects;
    }

    private void endByClock(int answered) {
        for (Grant g : all()) {
            if (g.isHeld() && g.atMost <= now) {
                lose(g, AT_MOST, g.names);
            } else if (g.isAlive() && g.deadline <= now && g.touched == 0) {
                // A renewal without an answer may have come through all the same.
                lose(g, DEADLINE, g.isAnswered ? List.of() : g.names);
            }
        }
        boolean isLate = !isDone && now >= closedAt + CLOSING;
        for (Call c : List.copyOf(calls.values())) {
            if (isLate || c.call != answered && c.until <= now) {
                failed(c, "no answer", true);
            }
        }
        if (isLate) {
            undos.clear();
        }
        for (Grant g : List.copyOf(giveBacks)) {
            if (g.call == null && (isLate || g.until <= now)) {
                givenBack(g, UNCONFIRMED);
            }
        }
        for (Grant g : asking()) {
            if (now >= g.until + LONGEST_QUEUE) {
                finish(g, new Reply("NoConnection"));
            }
        }
    }

    // Calls: one at a time on the shared connection, where none waits for anybody

    private void send() {
        asking().stream().filter(g -> g.isAside() && g.at <= now).forEach(this::ask);
        undos.stream()
                .filter(g -> g.isReady(now))
                .forEach(g -> start(new Call("undo", List.of(g), ownLimit(g.ttl)), g));
        all().stream()
                .filter(g -> g.isConfirmedAside() && g.isDue(now))
                .forEach(g -> keep(List.of(g), g));
        if (shared.call == null) {
            sendShared();
        }
        endIdle();
    }

    /** Heartbeats go first; after two of them something else has its turn. */
    private void sendShared() {
        Optional<Grant> beat = beats(g -> g.isDue(now)).findFirst();
        Optional<Grant> back = giveBacks.stream().filter(g -> g.isReady(now)).findFirst();
        Optional<Grant> request =
                asking().stream().filter(g -> !g.isAside() && g.at <= now).findFirst();
        boolean isOthersTurn =
                beatsInARow >= MOST_BEATS && (back.isPresent() || request.isPresent());
        beatsInARow = beat.isEmpty() || isOthersTurn ? 0 : beatsInARow + 1;
        if (beatsInARow > 0) {
            keep(goAlong(beat.get()), shared);
        } else if (back.isPresent()) {
            sendRelease(back.get());
        } else {
            request.ifPresent(this::ask);
        }
    }

    private Stream<Grant> beats(Predicate<Grant> areThese) {
        return grants.values().stream()
                .filter(g -> !g.isConfirmedAside())
                .filter(areThese)
                .sorted(Comparator.comparingLong(g -> g.at));
    }

    /** What is due soon goes along, the earliest first. */
    private List<Grant> goAlong(Grant first) {
        if (first.isRowToConfirm()) {
            return List.of(first);
        }
        Stream<Grant> due =
                beats(g -> g.isDue(now + g.ttl / 6) && Objects.equals(g.table, first.table));
        return within(MOST_PAIRS, due.filter(g -> !g.isRowToConfirm()));
    }

    /** As many as have no more than that together, and one in any case. */
    private static List<Grant> within(int most, Stream<Grant> some) {
        int[] count = {0};
        return some.takeWhile(g -> count[0] == 0 | (count[0] += g.ours().size()) <= most).toList();
    }

    private void keep(List<Grant> some, Sender on) {
        String verb = some.get(0).table == null ? "keep" : "keep_row";
        start(new Call(verb, some, limit(NEVER)), on);
    }

    /** Sends a call on the connection of a sender, which may have to be opened before. */
    private void start(Call c, Sender on) {
        c.open = !isOpen(on.link);
        if (c.open) {
            links.put(++lastLink, on.link = new Link(lastLink));
        }
        c.call = ++lastCall;
        c.link = on.link;
        c.connection = c.link.number;
        c.sent = -1;
        c.until = now + max(c.limit, SHORTEST_OPENING);
        if (!c.open) {
            isSent(c);
        }
        for (Grant g : c.grants) {
            c.names.addAll(g.ours());
            c.tokens.addAll(Collections.nCopies(g.ours().size(), g.token));
        }
        c.senders.add(on);
        c.senders.forEach(sender -> sender.call = c);
        calls.put(c.call, c);
        effects.add(c);
    }

    /** A third of the smallest ttl of all that are held, and of what is asked for. */
    private long limit(long ttl) {
        return min(LONGEST_CALL, min(ttl, smallestTtl(alive())) / 3);
    }

    /** The limit of an acquire, a release or an undo that has no shorter lease beside it. */
    private static long ownLimit(long ttl) {
        return min(max(ttl / 3, LEAST_PATIENCE), LONGEST_CALL);
    }

    private static long smallestTtl(List<Grant> some) {
        return some.stream().mapToLong(g -> g.ttl).min().orElse(NEVER);
    }

    /** How long conflicts and releases are tried again. */
    private long patience(long ttl) {
        return max(LEAST_PATIENCE, limit(ttl));
    }

    private long pause(long ttl) {
        return spread(min(max(ttl / 12, SHORTEST_PAUSE), LONGEST_PAUSE), spread);
    }

    private static long spread(long pause, long spread) {
        return pause - pause * spread / 4000;
    }

    private static long growing(int tries, long longest) {
        return min(FIRST_RETRY << min(tries - 1, 20), longest);
    }

    private static long longestWait(long ttl) {
        return min(max(ttl / 3, SHORTEST_WAIT), LONGEST_PAUSE);
    }

    private List<Grant> all() {
        return List.copyOf(grants.values());
    }

    /** The acquires that have no call under way. */
    private List<Grant> asking() {
        return requests.values().stream()
                .filter(g -> g.state == State.ASKING && g.call == null)
                .toList();
    }

    private List<Grant> alive() {
        return grants.values().stream().filter(Grant::isAlive).toList();
    }

    private List<Grant> those(List<String> keys) {
        return keys.stream().map(grants::get).filter(Objects::nonNull).toList();
    }

    private void over(Call c) {
        calls.remove(c.call);
        c.senders.stream().filter(sender -> sender.call == c).forEach(sender -> sender.call = null);
    }

    // Connections

    /** Whether another connection may help. */
    private static boolean isOfConnection(String code) {
        return code.matches("connect|unsent|ended|no answer|25006|53300|08...|57P0.");
    }

    /** Whether the statement may have been carried out all the same. */
    private static boolean isDoubtful(String code) {
        return code.matches("unreadable|panicked|ended|no answer|connect|08...|57P0.");
    }

    /** Whether what the server says may be otherwise a while later, as on a standby. */
    static boolean passes(String code) {
        return isOfConnection(code) || code.matches("(25|40|53|57|58)...|55P03");
    }

    private static boolean isConflict(String code) {
        return code.matches("40001|40P01");
    }

    /** Whether somebody's transaction has to end before. */
    private static boolean isLocked(String code) {
        return isConflict(code) || code.equals("55P03");
    }

    private void failed(Call c, String why, boolean isBroken) {
        over(c);
        boolean isOpening = c.sent < 0;
        String code = isOpening && why.equals("no answer") ? "connect" : why;
        boolean isOfNoUse =
                isOpening || isBroken || isOfConnection(code) || code.equals("panicked");
        if (!isLocked(code)) {
            c.link.errorsInARow++;
        }
        // The second error in a row: another connection.
        if (isOfNoUse || c.link.errorsInARow > 1 || c.link.isLeaving) {
            effects.add(new Cut(c.connection));
            leave(c.link);
        }
        switch (c.verb) {
            case "acquire" -> acquireFailed(c, c.grants.get(0), code, isOpening);
            case "undo" -> undoFailed(c.grants.get(0), code);
            case "release" -> c.grants.forEach(g -> releaseFailed(c, g, code, isOpening));
            default -> keepFailed(c, code, isOpening);
        }
    }

    private static boolean isOpen(Link link) {
        return link != null && !link.isGone;
    }

    /** Forgets a connection, which has ended. A session lease ends with its own. */
    private void leave(Link link) {
        link.isGone = true;
        links.remove(link.number);
        all().stream()
                .filter(g -> g.options.session && g.isAlive() && !isOpen(g.link))
                .forEach(g -> lose(g, SESSION, List.of()));
    }

    /** Ends a connection that nobody needs any more, after the call on it. */
    private void hangUp(Sender sender) {
        Link link = sender.link;
        sender.link = null;
        if (!isOpen(link)) {
            return;
        }
        link.isLeaving = calls.values().stream().anyMatch(c -> c.link == link);
        if (!link.isLeaving) {
            hangUp(link);
        }
    }

    private void hangUp(Link link) {
        effects.add(new HangUp(link.number));
        link.isGone = true;
        links.remove(link.number);
    }

    /** The shared connection ends with the last lease; a fence that was closed is done then. */
    private void endIdle() {
        boolean isIdle =
                calls.isEmpty() && giveBacks.isEmpty() && requests.isEmpty() && alive().isEmpty();
        if (isIdle && closedAt < NEVER && !isDone) {
            isDone = true;
            undos.clear();
            List.copyOf(links.values()).forEach(this::hangUp);
            effects.add(new Closed(true));
        } else if (isIdle && undos.isEmpty()) {
            hangUp(shared);
        }
    }

    // Renewals

    /** The outcomes of a call, by its leases. */
    private Map<Grant, List<Outcome>> eachOf(Call c, List<Outcome> outcomes) {
        Map<Grant, List<Outcome>> each = new LinkedHashMap<>();
        Iterator<Outcome> next = outcomes.iterator();
        for (Grant g : c.grants) {
            each.put(g, Stream.generate(next::next).limit(g.ours().size()).toList());
        }
        return each;
    }

    private static boolean any(List<Outcome> outcomes, String what) {
        return outcomes.stream().anyMatch(o -> o.is.equals(what));
    }

    private static boolean areAll(List<Outcome> outcomes, String what) {
        return outcomes.stream().allMatch(o -> o.is.equals(what));
    }

    private static long smallest(List<Outcome> outcomes, ToLongFunction<Outcome> of) {
        return outcomes.stream().mapToLong(of).filter(span -> span >= 0).min().orElse(NEVER);
    }

    private void keepAnswered(Call c, Map<Grant, List<Outcome>> each) {
        boolean hasKept = each.values().stream().anyMatch(own -> areAll(own, "kept"));
        each.forEach((g, own) -> renewal(g, own, c.sent, hasKept));
    }

    /** What has become of the names of a lease; its call has kept a whole lease or not. */
    private void renewal(Grant g, List<Outcome> outcomes, long sent, boolean hasKept) {
        boolean isGone = any(outcomes, "lost"), isOver = isGone || any(outcomes, "refused");
        long again = smallest(outcomes, Outcome::againIn);
        g.isAnswered = true;
        // If it rests, its own transaction may have released it.
        if (!g.isAlive() || isOver && g.resting > 0) {
            return;
        }
        if (g.isEnding && areAll(outcomes, "lost")) {
            end(g, null);
        } else if (isOver) {
            boolean isOthers = outcomes.stream().anyMatch(o -> "42501".equals(o.code));
            g.advice = isOthers && !isGone && g.table == null ? "other role" : null;
            IntStream there =
                    IntStream.range(0, outcomes.size())
                            .filter(i -> outcomes.get(i).is.matches("kept|later"));
            lose(g, isGone ? GONE : REFUSED, there.mapToObj(g.names::get).toList());
        } else if (areAll(outcomes, "kept")) {
            renewed(g, sent, smallest(outcomes, Outcome::remaining), again);
        } else if (again == 0 && hasKept) {
            g.at = now;
        } else {
            boolean isUnknown = again == 0 || again == NEVER;
            g.at = now + max(isUnknown ? pause(g.ttl) : again, g.least(g.deadline - now));
        }
    }

    private void renewed(Grant g, long sent, long remaining, long again) {
        long least = g.least(remaining), deadline = sent + window(remaining);
        g.at = sent + min(max(again, least), remaining / BEATS_PER_TTL);
        if (deadline <= now) {
            return;
        }
        boolean isConfirmed = g.state == State.CONFIRMING;
        g.deadline = deadline;
        g.state = State.HELD;
        g.isEnding = false;
        if (isConfirmed && !g.options.session) {
            hangUp(g);
        }
        event(isConfirmed ? "acquired" : "renewed", g);
        settle(g);
    }

    /**
     * What is believed of a span that the server counts from a later moment, by a clock of its own.
     */
    private static long window(long span) {
        return span - (span + 49) / 50;
    }

    private void keepFailed(Call c, String code, boolean isOpening) {
        // What confirms a row may be wrong in itself: a name, or a value of the key.
        boolean isRefused =
                !isOpening && code.matches("42501|42883|3F000")
                        || c.grants.get(0).isRowToConfirm() && !passes(code);
        boolean isAtOnce = code.equals("unsent");
        if (code.equals("panicked")) {
            died();
        } else if (!isRefused
                && !isAtOnce
                && !isOut
                && c.grants.stream().anyMatch(Grant::isAlive)) {
            isOut = true;
            isAtOnce = isOfConnection(code);
            effects.add(new Log("not renewed", null, code, null, 0));
        }
        for (Grant g : c.grants) {
            if (!g.isAlive()) {
                continue;
            }
            g.at = isAtOnce ? now : now + pause(smallestTtl(c.grants));
            if (isRefused && g.resting == 0) {
                lose(g, REFUSED, List.of());
            }
        }
    }

    // Acquires

    private void ask(Grant g) {
        // A longer wait would hold back vacuum.
        long wait = g.isAside() && g.isOne() ? max(0, min(g.until - now, PORTION)) : 0;
        long limit = ownLimit(g.ttl);
        limit = g.isAside() ? wait + limit : min(limit, limit(NEVER));
        Call c = new Call("acquire", List.of(g), limit);
        c.wait = wait;
        c.reclaim = g.options.reclaim || g.doubt != null && g.reclaims();
        start(c, g.isAside() ? g : shared);
    }

    private void acquireAnswered(Call c, Grant g, Answer answer) {
        Taken taken = answer.taken;
        g.isOut = false;
        if (taken == null) {
            granted(g, answer.number, c.sent);
            return;
        }
        // By its own first call, whose answer was lost.
        boolean isOwn = g.doubt != null && g.options.holder.equals(taken.holder);
        if (g.doubt != null && !isOwn && now >= g.doubt.until) {
            g.doubt = null;
        }
        long until = isOwn ? max(g.until, g.doubt.until) : g.until;
        if (g.isOver) {
            leave(g);
        } else if (now < until) {
            boolean hasWaited = g.isAside() && g.isOne() && !isOwn;
            g.at = min(until, hasWaited ? max(c.sent + AFTER_PORTION, now) : now + TRY_AGAIN);
        } else if (isOwn) {
            finish(g, new Reply("NoAnswer"));
        } else {
            Reply reply = new Reply("LeaseTaken");
            reply.holder = taken.holder;
            reply.remaining = taken.remaining;
            String end = taken.remaining <= 0 ? "guard" : "ttl";
            if (taken.state != null) {
                reply.waitsFor = taken.state.equals("uncommitted") ? "commit" : end;
            }
            finish(g, reply);
        }
    }

    private void granted(Grant g, long token, long sent) {
        long firstBeat = sent + g.ttl / BEATS_PER_TTL;
        boolean isInTime = now < firstBeat;
        g.token = token;
        g.deadline = isInTime ? sent + window(g.ttl) : now + g.ttl;
        g.at = isInTime ? firstBeat : now;
        g.state = isInTime ? State.HELD : State.CONFIRMING;
        g.doubt = null;
        if (g.isOver) {
            giveBack(g, false);
        } else if (isInTime) {
            event("acquired", g);
            settle(g);
        }
    }

    /** Answers an acquire when it is known whether its lease is held. */
    private void settle(Grant g) {
        if (g.isOver) {
            return;
        }
        Reply reply = new Reply(g.isHeld() ? null : "LeaseLost");
        reply.leases = g.isHeld() ? List.of(g.key) : List.of();
        reply.reason = g.reason;
        reply.advice = g.advice;
        finish(g, reply);
    }

    /** Answers an acquire, once. What was granted to nobody, or may be, is given back. */
    private void finish(Grant g, Reply reply) {
        requests.remove(g.key);
        g.isOver = true;
        if (g.state == State.ASKING) {
            grants.remove(g.key);
        }
        boolean isFailed = reply.error != null;
        reply.reply = g.key;
        reply.inDoubt = g.doubt != null && isFailed && !reply.error.equals("LeaseTaken");
        effects.add(reply);
        if (isFailed && g.isAlive()) {
            giveBack(g, false);
        }
        leave(g);
    }

    private void leave(Grant g) {
        if (g.call != null) {
            return;
        }
        if (g.state == State.ASKING || !g.options.session) {
            hangUp(g);
        }
        // What may have been granted is released, if the holder is nobody else's.
        if (g.doubt != null && g.options.isOwnHolder && !isDone) {
            g.at = now;
            g.tries = 0;
            undos.add(g);
        }
    }

    private void acquireFailed(Call c, Grant g, String code, boolean isOpening) {
        if (!isOpening && !g.options.session && isDoubtful(code)) {
            g.doubt = new Doubt(c.sent, c.sent + c.limit);
        }
        g.at = now;
        if (g.isOver) {
            leave(g);
        }
        if (g.isOver || code.equals("unsent")) {
            return;
        }
        g.tries++;
        boolean isConflict = isConflict(code), mayPass = isConflict || isOfConnection(code);
        long until = isConflict ? max(g.until, g.begun + patience(g.ttl)) : g.until;
        long pause = spread(growing(g.tries, isConflict ? TRY_AGAIN : longestWait(g.ttl)), spread);
        // Nobody else's grant would be taken over: what there may be is undone, or ends at its ttl.
        boolean isStuck = g.doubt != null && !g.reclaims();
        if (g.doubt != null && g.reclaims() && g.tries == 1 && isOfConnection(code)) {
            return;
        }
        if (!mayPass || isStuck || now >= until) {
            Reply reply = new Reply(isOpening && g.doubt == null ? "NoConnection" : saidBy(code));
            reply.sqlstate = code.matches("[0-9A-Z]{5}") ? code : null;
            finish(g, reply);
            return;
        }
        // An outage is told once, however many wait for its end.
        if (!isConflict && requests.values().stream().noneMatch(one -> one.isOut)) {
            effects.add(new Log("not acquired", g.key, code, null, 0));
        }
        g.isOut |= !isConflict;
        g.at = now + min(pause, max(1, until - now));
    }

    private static String saidBy(String code) {
        if (isOfConnection(code) || isDoubtful(code)) {
            return "NoAnswer";
        }
        return switch (code) {
            case "42501" -> "NotGranted";
            case "42883", "3F000" -> "NotInstalled";
            default -> "Refused";
        };
    }

    private void undoAnswered(Grant g, long released) {
        g.tries++;
        // The call that it is about may still come.
        g.at = min(now + TRY_AGAIN, g.doubt.until);
        if (released > 0 || now >= g.doubt.until) {
            undone(g);
        }
    }

    private void undoFailed(Grant g, String code) {
        g.tries++;
        boolean isUnsent = code.equals("unsent");
        g.at = isUnsent ? now : now + spread(growing(g.tries, LONGEST_PAUSE), spread);
        boolean mayPass = passes(code) || code.equals("panicked");
        if (!mayPass || g.at >= g.doubt.sent + g.ttl) {
            undone(g);
        }
    }

    private void undone(Grant g) {
        undos.remove(g);
        hangUp(g);
    }

    // What is given back

    private void giveBack(Grant g, boolean isInDoubt) {
        g.at = now;
        g.tries = 0;
        g.call = null;
        g.until = now + patience(g.ttl);
        g.isInDoubt = isInDoubt || g.isEnding || g.rests();
        g.isAlone = g.isInDoubt;
        if (!g.options.session) {
            hangUp(g);
        }
        g.state = g.state == State.LOST ? State.LOST : State.RELEASING;
        giveBacks.add(g);
    }

    /** Those that are queued go together; those of rows, for each table. */
    private void sendRelease(Grant first) {
        Stream<Grant> due =
                giveBacks.stream()
                        .filter(g -> !g.isAlone && g.isReady(now))
                        .filter(g -> Objects.equals(g.table, first.table));
        List<Grant> some = first.isAlone ? List.of(first) : within(MOST_RELEASED, due);
        // From here on they are tried again together.
        long until = some.stream().mapToLong(g -> g.until).min().orElse(now);
        boolean isInDoubt = some.stream().anyMatch(g -> g.isInDoubt);
        for (Grant g : some) {
            g.until = until;
            g.tries = first.tries;
            g.isInDoubt = isInDoubt;
        }
        // If it is tried again, others go first.
        giveBacks.removeAll(some);
        giveBacks.addAll(some);
        // The connection of a session lease serves if there is no shared one.
        boolean isOwn = first.options.session && some.size() == 1 && !isOpen(shared.link);
        isOwn &= isOpen(first.link) && calls.values().stream().noneMatch(c -> c.link == first.link);
        long limit = min(limit(NEVER), ownLimit(smallestTtl(some)));
        start(new Call("release", some, limit), isOwn ? first : shared);
    }

    private void releaseAnswered(Grant g, List<Outcome> outcomes) {
        boolean hasSession = !g.options.session || isOpen(g.link);
        boolean isKnown = !g.isInDoubt && g.table == null && now < g.deadline && hasSession;
        if (any(outcomes, "lost") && isKnown && g.state != State.LOST) {
            lose(g, GONE, List.of());
            grants.remove(g.key);
        }
        givenBack(g, null);
    }

    /** Without an answer (unconfirmed) the server keeps it until its ttl. */
    private void givenBack(Grant g, Reason reason) {
        giveBacks.remove(g);
        if (g.state == State.LOST) {
            hangUp(g);
        } else {
            if (reason != null) {
                log("not released", null);
            }
            end(g, reason);
        }
    }

    private void releaseFailed(Call c, Grant g, String code, boolean isOpening) {
        boolean isOfConnection = isOfConnection(code);
        g.isInDoubt |= !isOpening && isDoubtful(code);
        // An error of the statement may be of one of them: then each goes by itself.
        boolean isOfOne = c.grants.size() > 1 && !isOpening && !isOfConnection;
        if (now >= g.until || !isOfOne && !isLocked(code) && !isOfConnection) {
            givenBack(g, UNCONFIRMED);
            return;
        }
        boolean isAtOnce = isOfOne || isOfConnection && g.tries == 0 || code.equals("unsent");
        g.at = isAtOnce ? now : now + max(SHORTEST_PAUSE, (g.until - now) / 4);
        g.tries++;
        if (isOfOne) {
            g.isAlone = true;
            giveBacks.remove(g);
            giveBacks.add(g);
        }
    }

    // Ends

    private void lose(Grant g, Reason reason, List<String> rest) {
        g.state = State.LOST;
        g.reason = reason;
        g.rest = rest;
        if (g.isTold) {
            log("lost", reason);
            event("lost", g);
            return;
        }
        forget(g);
        settle(g);
    }

    /** After a loss: gives back what the server may hold still. */
    private void forget(Grant g) {
        grants.remove(g.key);
        if (g.rest.isEmpty() || isDone) {
            hangUp(g);
        } else {
            giveBack(g, false);
        }
    }

    private void end(Grant g, Reason reason) {
        g.state = State.RELEASED;
        g.reason = reason;
        grants.remove(g.key);
        hangUp(g);
        if (g.isTold) {
            event("released", g);
        }
    }

    private void event(String kind, Grant g) {
        if (kind.equals("acquired")) {
            g.isTold = true;
            g.atMost = now + g.options.atMost;
        }
        long remaining = g.isHeld() ? g.deadline - now : 0;
        effects.add(new Event(kind, g.key, g.token, remaining, g.reason, g.advice, null));
    }

    /** One line for all of an input that are alike. */
    private void log(String what, Reason reason) {
        logs.merge(new Log(what, null, null, reason, 0), 1, Integer::sum);
    }

    /** Who leads, or waits to. */
    static final class Leader {
        private final long ttl, spread;
        private int failures;
        private boolean isLeading, isPausing;
        private long at, since;

        Leader(long ttl, long spread) {
            this.ttl = ttl;
            this.spread = spread;
        }

        List<Effect> start() {
            isPausing = false;
            return List.of(new Lead("acquire", 0, null));
        }

        List<Effect> granted(long now) {
            isLeading = true;
            since = now;
            return List.of(new Lead("work", 0, null));
        }

        List<Effect> workDone() {
            return end(null);
        }

        /** The lease is lost or not, whatever the error says. */
        List<Effect> workFailed(long now, String cause, boolean isLost) {
            if (now - since >= min(ttl, 60_000)) {
                failures = 0;
            }
            return isLost || passes(cause) ? again(now, cause) : end("work failed");
        }

        List<Effect> notGranted(long now, String cause) {
            return passes(cause) ? again(now, cause) : end(cause);
        }

        private static boolean passes(String cause) {
            return cause.matches(
                    "(Lease|Transaction|Connection)Lost|LeaseTaken"
                            + "|NoAnswer|NoConnection|transient");
        }

        /** The work ends by itself. */
        List<Effect> stop() {
            return isLeading ? List.of() : end(null);
        }

        List<Effect> tick(long now) {
            return isPausing && now >= at ? start() : List.of();
        }

        /** After a pause, which grows. An outage is one line of the log. */
        private List<Effect> again(long now, String cause) {
            List<Effect> effects = new ArrayList<>();
            if (failures == 0) {
                effects.add(new Log("leads no more", null, cause, null, 0));
            }
            if (failures == 0 && isLeading) {
                effects.add(new Event("interrupted", null, 0, 0, null, null, cause));
            }
            long shortest = max(ttl / 12, SHORTEST_PAUSE) << min(failures++, 20);
            long pause = spread(min(shortest, longestWait(ttl)), spread);
            isLeading = false;
            isPausing = true;
            at = now + pause;
            effects.add(new Lead("pause", pause, null));
            return effects;
        }

        private List<Effect> end(String why) {
            isLeading = isPausing = false;
            return List.of(new Lead("end", 0, why));
        }
    }
}
