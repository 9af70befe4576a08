package pgfence;

import java.net.URLDecoder;
import java.nio.charset.StandardCharsets;
import java.sql.*;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.*;
import java.util.function.*;
import java.util.regex.*;
import java.util.stream.Stream;
import javax.sql.DataSource;
import pgfence.FenceException.*;

/** Where leases come from: one for a process. It has a connection while it holds leases, however many, and none otherwise. */
public final class Fence implements AutoCloseable {
    private static final String TAKES = "a fence takes a URL, jdbc:postgresql:… or postgresql:…, a DataSource, or a function";
    private static final Pattern URL = Pattern.compile("(?:jdbc:)?postgres(?:ql)?:(?<authority>/*)"
            + "(?:(?<user>[^/?@:]*)(?::(?<password>[^/?@]*))?@)?(?<rest>.*)");

    private final Keeper keeper;

    /** On connections that it opens by a URL, {@code jdbc:postgresql:…} or {@code postgresql:…}. */
    public Fence(String url) { this(opener(url)); }
    /** On connections of a data source, or of a pool. */
    public Fence(DataSource source) { this((Callable<Connection>) source::getConnection); }
    /** On connections that a function opens. */
    public Fence(Callable<Connection> source) { keeper = new Keeper(Objects.requireNonNull(source, TAKES)); }

    /** The same fence, for an extension in a schema that is not on the {@code search_path}. */
    public Fence schema(String schema) {
        keeper.prefix = '"' + schema.replace("\"", "\"\"") + "\".";
        return this;
    }

    /** An event of a lease, for {@link #onEvent}, and the time that remains. A loss has a reason, and nothing else has one. */
    public record Event(Kind kind, List<String> names, long token, Duration remaining, Reason reason) {
        /** The events of a lease. */
        public enum Kind { ACQUIRED, RENEWED, LOST, RELEASED }
    }

    /** The same fence, where this is told what becomes of leases, in whatever thread that happens. It must not block. */
    public Fence onEvent(Consumer<Event> listener) {
        keeper.onEvent = Objects.requireNonNull(listener);
        return this;
    }

    /** A lease for 30 s at a time, as {@link #lease(List, Options)}. */
    public Lease lease(String name) throws SQLException, InterruptedException { return lease(name, new Options()); }

    /** A lease of one name, as {@link #lease(List, Options)}. */
    public Lease lease(String name, Options options) throws SQLException, InterruptedException {
        return lease(Collections.singletonList(name), options);
    }

    /**
     * A lease of several names at once, all or none.
     *
     * @throws LeaseTaken where somebody else has it, for as long as we were to wait
     * @throws SQLException where the server cannot be reached
     * @throws InterruptedException at an interrupt, which gives up
     */
    public Lease lease(List<String> names, Options options) throws SQLException, InterruptedException {
        if (names.size() > 1 && (options.shared || options.slots != 1 || options.reclaim)) {
            throw new IllegalArgumentException("several names at once are exclusive: no shared, slots or reclaim");
        }
        return keeper.acquire(checked(names), options.named(), () -> false).get(0);
    }

    /** As {@link Lease#guard(Connection, Holding.Step)}, by several leases at once. */
    public <E extends Exception> void guard(Connection on, List<Lease> leases, Holding.Step<E> work) throws E, SQLException {
        new Guard(keeper, leases, false, on).around(work);
    }

    /** As {@link Lease#guardAndRelease(Connection, Holding.Step)}, by several leases at once. */
    public <E extends Exception> void guardAndRelease(Connection on, List<Lease> leases, Holding.Step<E> work)
            throws E, SQLException {
        new Guard(keeper, leases, true, on).around(work);
    }

    /** As {@link #adopted(String, long, String)}, where this process is the holder. */
    public Holding adopted(String name, long token) { return adopted(name, token, Options.PROCESS); }

    /**
     * A lease that somebody else grants (etcd, ZooKeeper, Redis, another database), under its number there. The number is
     * that of one holder: a guard throws {@link LeaseTaken} where another one has adopted it.
     */
    public Holding adopted(String name, long token, String holder) {
        return new Holding(keeper, checked(Collections.singletonList(name)), token, Objects.requireNonNull(holder, "a holder"));
    }

    /** The work that is done while leading. */
    @FunctionalInterface
    public interface Leading<E extends Exception> {
        /** Until it is done, or to stop. */
        void run(Lease lease) throws E;
    }

    /**
     * Does the work whenever this process leads: again after each loss of the lease, the server, the connection, the
     * transaction. It ends when the work returns or throws an exception of its own. After {@code stop}, which the work looks
     * at itself, it waits for the work.
     *
     * @return whether the work has returned; false where it was stopped before
     * @throws InterruptedException at an interrupt while it does not lead
     */
    public <E extends Exception> boolean lead(String name, Duration ttl, CountDownLatch stop, Leading<E> work)
            throws E, SQLException, InterruptedException {
        // Where the answer to an acquire was lost, its own holder takes the grant over.
        Options options = new Options().ttl(ttl).waitUpTo(Duration.ofDays(36_500)).named().reclaim();
        List<String> names = checked(Collections.singletonList(name));
        while (stop.getCount() > 0) {
            Lease leading = null;
            try (Lease lease = keeper.acquire(names, options, () -> stop.getCount() == 0).get(0)) {
                leading = lease;
                work.run(lease);
                return true;
            } catch (Exception error) {
                if (keeper.isClosed || !goesOn(error, leading)) { throw error; }
            }
            stop.await((long) (options.ttl / 12 * 1000), TimeUnit.MILLISECONDS);
        }
        return false;
    }

    private static boolean goesOn(Exception error, Lease lease) {
        boolean isLoss = error instanceof FenceException
                && !(error instanceof Refused || error instanceof NotInstalled || error instanceof NotGranted);
        // Stale; or it waits for the lease still, and the server has no time or place, or is a standby yet.
        String passes = lease == null ? "PF00[14]|(25|40|53|57|58)...|55P03" : "PF00[14]";
        return isLoss || FenceException.stateOf(error).matches(passes) || FenceException.isEnd(error)
                || lease != null && lease.isLost();
    }

    /** Gives everything back, and ends all waits: for the end of the process. */
    @Override public void close() { keeper.close(); }

    private static List<String> checked(List<String> names) {
        names.forEach(name -> Objects.requireNonNull(name, "the name of a lease"));
        return List.copyOf(names);
    }

    private static Callable<Connection> opener(String url) {
        Matcher parts = URL.matcher(String.valueOf(url));
        if (!parts.matches()) {
            // Not all of it: it may have a password.
            throw new IllegalArgumentException(TAKES + ", and not \"" + String.valueOf(url).split(":")[0] + ":…\"");
        }
        Properties all = new Properties();
        // A server that does not answer leaves no thread behind.
        all.putAll(Map.of("socketTimeout", "30", "tcpKeepAlive", "true"));
        Stream.of("user", "password").filter(key -> parts.group(key) != null)
                .forEach(key -> all.put(key, URLDecoder.decode(parts.group(key), StandardCharsets.UTF_8)));
        // As the driver calls it, and not libpq.
        String rest = parts.group("rest").replace("application_name=", "ApplicationName=");
        String full = "jdbc:postgresql:" + parts.group("authority") + rest.replace("connect_timeout=", "connectTimeout=");
        return () -> DriverManager.getConnection(full, all);
    }
}
