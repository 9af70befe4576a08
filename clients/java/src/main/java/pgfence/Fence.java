package pgfence;

import pgfence.FenceException.*;
import pgfence.LeaseStates.*;

import java.sql.*;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.*;
import java.util.function.Consumer;

import javax.sql.DataSource;

/**
 * Acquires leases. A process needs one fence. While it holds leases, the fence has one connection
 * that renews all of them; otherwise it has none.
 */
public final class Fence implements AutoCloseable {
    final Heartbeat heartbeat;

    /**
     * A fence that opens its connections by a URL: {@code jdbc:postgresql:…} or {@code
     * postgresql:…}.
     */
    public Fence(String url) {
        this(Connections.opener(url), "no connection to the server");
    }

    /**
     * A fence on connections of a data source. From a pool it takes one connection while leases are
     * held, and more for acquires that wait and for session leases.
     */
    public Fence(DataSource source) {
        this((Callable<Connection>) source::getConnection);
    }

    /** A fence on connections that a function opens. */
    public Fence(Callable<Connection> source) {
        this(
                limit -> source.call(),
                "no connection came in time from the source of the fence (if it is a pool, all of"
                        + " its connections may be in use: give the fence a source of its own)");
        Objects.requireNonNull(source, Connections.TAKES);
    }

    private Fence(Connections.Source source, String noConnection) {
        heartbeat = new Heartbeat(source, noConnection);
    }

    /** Sets the extension's schema, if that is not on the search_path. Returns this fence. */
    public Fence schema(String schema) {
        heartbeat.statements = new Statements(Statements.quoted(schema) + ".");
        return this;
    }

    /**
     * An event of a lease, for {@link #onEvent}. {@code remaining} is the time until the lease ends
     * without a renewal. A loss has a reason; a release has the reason UNCONFIRMED if the server
     * has not answered it, and otherwise none.
     */
    public record Event(
            Kind kind, List<String> names, long token, Duration remaining, Reason reason) {
        /** INTERRUPTED is {@link Fence#lead}'s: this process leads no more, and tries again. */
        public enum Kind {
            ACQUIRED,
            RENEWED,
            LOST,
            RELEASED,
            INTERRUPTED
        }

        /** Returns the event with the time that remains so many milliseconds later. */
        Event after(long millis) {
            Duration left = remaining.minusMillis(millis);
            return new Event(kind, names, token, left.isNegative() ? Duration.ZERO : left, reason);
        }
    }

    /**
     * Sets the listener of the fence's events, which is called in any thread. The listener must not
     * block, and cannot acquire a lease of this fence. Returns this fence.
     */
    public Fence onEvent(Consumer<Event> listener) {
        heartbeat.onEvent = Objects.requireNonNull(listener);
        return this;
    }

    /** Acquires a lease with a ttl of 30 s, as {@link #lease(List, Options)} does. */
    public Lease lease(String name) throws SQLException, InterruptedException {
        return lease(name, new Options());
    }

    /** Acquires a lease of one name, as {@link #lease(List, Options)} does. */
    public Lease lease(String name, Options options) throws SQLException, InterruptedException {
        return lease(Collections.singletonList(name), options);
    }

    /**
     * Acquires a lease of several names, all or none. Several names have no queue: they are tried
     * each quarter of a second until the wait is over, and may starve if others wait for each name.
     *
     * @throws LeaseTaken if another holder has the lease until the end of the wait
     * @throws NoConnection if the server cannot be reached
     * @throws NoAnswer if the server does not answer in time
     * @throws NotGranted if the role may not use the lease
     * @throws NotInstalled if the extension is not found in the database
     * @throws Refused if the server refuses a name or an option
     * @throws SQLException for another error of the driver
     * @throws InterruptedException if this thread is interrupted; a lease that is granted
     *     nevertheless is released
     */
    public Lease lease(List<String> names, Options options)
            throws SQLException, InterruptedException {
        if (names.size() > 1 && (options.isShared() || options.reclaim)) {
            throw new IllegalArgumentException(
                    "several names at once are exclusive: no shared, slots or reclaim");
        }
        return heartbeat.acquire(checked(names), options.withHolder(), Heartbeat.NO_STOP);
    }

    /**
     * Renews a row lease: a row that a statement of the program has claimed, in a table whose rows
     * are leases. The token is the one that the claim returned, and the ttl is that of the claim.
     * The table is written as in SQL; the row is given by the columns of a key and their values.
     * The claim is confirmed first. Finish the row in a {@link Lease#guardAndRelease}.
     *
     * @throws LeaseLost if another worker has claimed the row since
     */
    public Lease keepRow(String table, Map<String, ?> key, long token, Duration ttl)
            throws SQLException, InterruptedException {
        return keepRow(table, key, token, new Options().ttl(ttl));
    }

    /** Renews a row lease with the ttl, the columns and the {@code atMost} of the options. */
    public Lease keepRow(String table, Map<String, ?> key, long token, Options options)
            throws SQLException, InterruptedException {
        // Sorted, as one statement renews the rows of a table, and all name the same columns.
        Map<String, ?> sorted = new TreeMap<>(key);
        if (table == null || key.isEmpty() || sorted.containsValue(null)) {
            throw new IllegalArgumentException("a row has a table and a key, without null");
        }
        Statements.Table rowTable =
                new Statements.Table(
                        table, List.copyOf(sorted.keySet()), options.fence, options.deadline);
        return heartbeat.keepRow(rowTable, Statements.rowName(sorted.values()), token, options);
    }

    /** Guards a transaction as {@link Lease#guard(Connection, Holding.Step)}, by several leases. */
    public <E extends Exception> void guard(
            Connection connection, List<Lease> leases, Holding.Step<E> work)
            throws E, SQLException {
        new Transaction(heartbeat, leases, false, connection).run(work);
    }

    /**
     * Guards a transaction that releases its leases, as {@link Lease#guardAndRelease(Connection,
     * Holding.Step)}, by several leases.
     */
    public <E extends Exception> void guardAndRelease(
            Connection connection, List<Lease> leases, Holding.Step<E> work)
            throws E, SQLException {
        new Transaction(heartbeat, leases, true, connection).run(work);
    }

    /** Adopts a lease as {@link #adopted(String, long, String)}, for this process as the holder. */
    public Holding adopted(String name, long token) {
        return adopted(name, token, Options.PROCESS_HOLDER);
    }

    /**
     * Adopts a lease that another service grants (etcd, ZooKeeper, Redis, another database). The
     * token is its number there, which belongs to one holder: a guard throws {@link LeaseTaken} if
     * another holder has adopted the same number.
     */
    public Holding adopted(String name, long token, String holder) {
        List<String> names = checked(Collections.singletonList(name));
        return new Holding(heartbeat, names, token, Objects.requireNonNull(holder, "a holder"));
    }

    /** The work of a leader, for {@link #lead}. */
    @FunctionalInterface
    public interface Leading<E extends Exception> {
        /** Works until the work is done, or is to stop. */
        void run(Lease lease) throws E;
    }

    /**
     * Runs the work while this process leads. After a loss of the lease, the server, the connection
     * or the transaction it acquires the lease again, after a growing pause; each outage is one
     * line of the log and one event. It ends when the work returns or throws another exception.
     * After {@code stop}, which the work checks itself, it waits until the work ends.
     *
     * @return true if the work has returned; false if it was stopped while it did not lead
     * @throws InterruptedException if this thread is interrupted while it does not lead
     */
    public <E extends Exception> boolean lead(
            String name, Duration ttl, CountDownLatch stop, Leading<E> work)
            throws E, SQLException, InterruptedException {
        // If the answer to an acquire was lost, its holder takes the grant over by the next one.
        Options options =
                new Options().ttl(ttl).waitUpTo(Duration.ofDays(36_500)).withHolder().reclaim();
        List<String> names = checked(List.of(name));
        LeadState leader = new LeadState(options.ttl, heartbeat.jitter);
        while (stop.getCount() > 0) {
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
                boolean isLost = leading != null && leading.isLost();
                if (isLost) {
                    // The program may have its thread interrupted at the loss.
                    Thread.interrupted();
                }
                String type = FenceException.typeOf(error), code = FenceException.codeOf(error);
                boolean isStopped = stop.getCount() == 0, isClosed = heartbeat.isClosing();
                var effects = leader.failed(Clock.now(), type, code, isLost, isStopped, isClosed);
                for (Effect effect : effects) {
                    if (effect instanceof Log) {
                        String line = " leads no more, and it is tried again: ";
                        heartbeat.warn(name + line + error.getMessage());
                    } else if (effect instanceof LeaseStates.Event) {
                        var event = Event.Kind.INTERRUPTED;
                        heartbeat.emit(new Event(event, names, 0, Duration.ZERO, null));
                    } else if (effect instanceof Lead next) {
                        if (next.lead().equals("pause")) {
                            stop.await(next.pause(), TimeUnit.MILLISECONDS);
                        } else if (!next.code().equals("stopped")) {
                            throw error;
                        }
                    }
                }
            }
        }
        return false;
    }

    /** Releases all leases, and ends all waits, within 5 s: for the end of the process. */
    @Override
    public void close() {
        heartbeat.close();
    }

    private static List<String> checked(List<String> names) {
        names.forEach(name -> Objects.requireNonNull(name, "the name of a lease"));
        return List.copyOf(names);
    }
}
