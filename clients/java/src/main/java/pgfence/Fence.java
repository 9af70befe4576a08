package pgfence;

import pgfence.FenceException.*;
import pgfence.LeaseState.*;

import java.lang.System.Logger.Level;
import java.sql.*;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.*;
import java.util.function.Consumer;

import javax.sql.DataSource;

/**
 * Where leases come from: one for a process. It has a connection while it holds leases, however
 * many, and none otherwise.
 */
public final class Fence implements AutoCloseable {
    private final Heartbeat heartbeat;

    /** On connections that it opens by a URL, {@code jdbc:postgresql:…} or {@code postgresql:…}. */
    public Fence(String url) {
        this(Connections.opener(url), "no connection to the server");
    }

    /**
     * On connections of a data source: of a pool it takes one while leases are held, and more for
     * waits and sessions.
     */
    public Fence(DataSource source) {
        this((Callable<Connection>) source::getConnection);
    }

    /** On connections that a function opens. */
    public Fence(Callable<Connection> source) {
        this(
                Objects.requireNonNull(source, Connections.TAKES),
                "no connection came in time from the source of the fence (if it is a pool, all of"
                        + " its connections may be in use: give the fence a source of its own)");
    }

    private Fence(Callable<Connection> source, String noConnection) {
        heartbeat = new Heartbeat(source, noConnection);
    }

    /** The same fence, for an extension in a schema that is not on the {@code search_path}. */
    public Fence schema(String schema) {
        heartbeat.statements = new Statements(Statements.quoted(schema) + ".");
        return this;
    }

    /**
     * An event of a lease, for {@link #onEvent}, and the time that remains. A loss has a reason; a
     * release has one if it is unconfirmed, for the server has not answered.
     */
    public record Event(
            Kind kind, List<String> names, long token, Duration remaining, Reason reason) {
        /** The last one is of {@link Fence#lead}: it leads no more, and goes on. */
        public enum Kind {
            ACQUIRED,
            RENEWED,
            LOST,
            RELEASED,
            INTERRUPTED
        }
    }

    /**
     * The same fence, where this is told what becomes of leases, in whatever thread that happens.
     * It must not block, and can acquire nothing.
     */
    public Fence onEvent(Consumer<Event> listener) {
        heartbeat.onEvent = Objects.requireNonNull(listener);
        return this;
    }

    /** A lease for 30 s at a time, as {@link #lease(List, Options)}. */
    public Lease lease(String name) throws SQLException, InterruptedException {
        return lease(name, new Options());
    }

    /** A lease of one name, as {@link #lease(List, Options)}. */
    public Lease lease(String name, Options options) throws SQLException, InterruptedException {
        return lease(Collections.singletonList(name), options);
    }

    /**
     * A lease of several names at once, all or none. Several names have no queue: they are tried
     * each quarter of a second, and may starve beside waiters for each of them, until the wait is
     * over.
     *
     * @throws LeaseTaken if somebody else has it, for as long as we were to wait
     * @throws NoConnection if the server cannot be reached, and {@link NoAnswer} if it does not
     *     answer
     * @throws SQLException at another error of the driver's
     * @throws InterruptedException at an interrupt, which gives up: a grant that comes all the same
     *     is given back
     */
    public Lease lease(List<String> names, Options options)
            throws SQLException, InterruptedException {
        if (names.size() > 1 && (options.isShared() || options.reclaim)) {
            throw new IllegalArgumentException(
                    "several names at once are exclusive: no shared, slots or reclaim");
        }
        return heartbeat.acquire(checked(names), options.named(), Heartbeat.NEVER);
    }

    /**
     * Keeps a row of a table whose rows are leases of their own, which a statement of yours has
     * claimed: under the token that it returned, with its ttl. The table is named as in SQL, the
     * row by the columns of a key and their values. The claim is confirmed first. Finish the row in
     * a {@link Lease#guardAndRelease}.
     *
     * @throws LeaseLost if somebody else has claimed it since
     */
    public Lease keepRow(String table, Map<String, ?> key, long token, Duration ttl)
            throws SQLException, InterruptedException {
        return keepRow(table, key, token, new Options().ttl(ttl));
    }

    /** The same, by the ttl and the columns of the options, and no longer than at most. */
    public Lease keepRow(String table, Map<String, ?> key, long token, Options options)
            throws SQLException, InterruptedException {
        // In the same order, whatever the map's is: one statement keeps the rows of a table.
        Map<String, ?> sorted = new TreeMap<>(key);
        if (table == null || key.isEmpty() || sorted.containsValue(null)) {
            throw new IllegalArgumentException("a row has a table and a key, without null");
        }
        Statements.Table of =
                new Statements.Table(
                        table, List.copyOf(sorted.keySet()), options.fence, options.deadline);
        return heartbeat.keepRow(of, Statements.row(sorted.values()), token, options);
    }

    /** As {@link Lease#guard(Connection, Holding.Step)}, by several leases at once. */
    public <E extends Exception> void guard(Connection on, List<Lease> leases, Holding.Step<E> work)
            throws E, SQLException {
        new Transaction(heartbeat, leases, false, on).around(work);
    }

    /** As {@link Lease#guardAndRelease(Connection, Holding.Step)}, by several leases at once. */
    public <E extends Exception> void guardAndRelease(
            Connection on, List<Lease> leases, Holding.Step<E> work) throws E, SQLException {
        new Transaction(heartbeat, leases, true, on).around(work);
    }

    /** As {@link #adopted(String, long, String)}, where this process is the holder. */
    public Holding adopted(String name, long token) {
        return adopted(name, token, Options.PROCESS);
    }

    /**
     * A lease that somebody else grants (etcd, ZooKeeper, Redis, another database), under its
     * number there. The number is that of one holder: a guard throws {@link LeaseTaken} where
     * another one has adopted it.
     */
    public Holding adopted(String name, long token, String holder) {
        List<String> names = checked(Collections.singletonList(name));
        return new Holding(heartbeat, names, token, Objects.requireNonNull(holder, "a holder"));
    }

    /** The work that is done while leading. */
    @FunctionalInterface
    public interface Leading<E extends Exception> {
        /** Until it is done, or to stop. */
        void run(Lease lease) throws E;
    }

    /**
     * Does the work whenever this process leads: again after each loss of the lease, the server,
     * the connection, the transaction, after a pause that grows, told once an outage by the log and
     * an event. It ends when the work returns or throws an exception of its own. After {@code
     * stop}, which the work looks at itself, it waits for the work.
     *
     * @return whether the work has returned; false if it was stopped before
     * @throws InterruptedException at an interrupt while it does not lead
     */
    public <E extends Exception> boolean lead(
            String name, Duration ttl, CountDownLatch stop, Leading<E> work)
            throws E, SQLException, InterruptedException {
        // If the answer to an acquire was lost, its own holder takes the grant over.
        Options options =
                new Options().ttl(ttl).waitUpTo(Duration.ofDays(36_500)).named().reclaim();
        List<String> names = checked(List.of(name));
        Leader leader = new Leader(options.ttl, heartbeat.spread);
        List<Effect> effects = leader.start();
        Exception failed = null;
        while (true) {
            long pause = 0;
            for (Effect effect : effects) {
                if (effect instanceof Log) {
                    String line = " leads no more, and it is tried again: ";
                    Heartbeat.log(Level.WARNING, name + line + failed.getMessage(), null);
                } else if (effect instanceof Lead next) {
                    if (next.lead().equals("end")) {
                        throw Heartbeat.as(failed);
                    }
                    pause = next.pause();
                } else {
                    heartbeat.interrupted(name);
                }
            }
            if (stop.await(pause, TimeUnit.MILLISECONDS)) {
                return false;
            }
            Lease leading = null;
            try (Lease lease = heartbeat.acquire(names, options, stop)) {
                if (lease == null) {
                    return false;
                }
                leading = lease;
                leader.granted(Clock.now());
                work.run(lease);
                return true;
            } catch (Exception error) {
                failed = error;
                String cause = FenceException.causeOf(error);
                effects =
                        leading == null
                                ? leader.notGranted(Clock.now(), cause)
                                : leader.workFailed(
                                        Clock.now(),
                                        cause.equals("transient") ? "own" : cause,
                                        leading.isLost());
            }
        }
    }

    /** Gives everything back, and ends all waits: for the end of the process. */
    @Override
    public void close() {
        heartbeat.close();
    }

    private static List<String> checked(List<String> names) {
        names.forEach(name -> Objects.requireNonNull(name, "the name of a lease"));
        return List.copyOf(names);
    }
}
