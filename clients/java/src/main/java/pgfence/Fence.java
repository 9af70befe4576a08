package pgfence;

import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.SQLException;
import java.time.Duration;
import java.util.Collection;
import java.util.List;
import java.util.Optional;
import java.util.Properties;
import java.util.concurrent.TimeUnit;
import java.util.function.Consumer;
import javax.sql.DataSource;
import org.postgresql.PGConnection;
import org.postgresql.PGProperty;

/**
 * Where leases come from. One connection and two threads keep all leases of a Fence, however many; they begin with the
 * first lease and end with the last. So have one Fence for a process.
 */
public class Fence {
    private static final String TAKES = "a Fence takes a URL, jdbc:postgresql:…, or a DataSource of PostgreSQL's driver";

    private final OwnConnection.Opener opener;
    private final String schema;
    private final Telemetry telemetry;
    private Keeper keeper;

    /** On connections that it opens by this URL, {@code jdbc:postgresql:…} or without {@code jdbc:}. */
    public Fence(String url) {
        this(url, new Properties());
    }

    /**
     * On connections that it opens by this URL.
     *
     * @param url {@code jdbc:postgresql:…}, or without {@code jdbc:}
     * @param properties of the driver: {@code user}, {@code password}…
     */
    public Fence(String url, Properties properties) {
        this(opener(url, properties), "", Telemetry.NONE);
    }

    /**
     * On connections of a data source. How long they may take to open is its own business; a pool gives one away for as
     * long as a lease is held.
     *
     * @param source of PostgreSQL's driver, or a pool of its connections
     */
    public Fence(DataSource source) {
        this(limit -> source.getConnection(), "", Telemetry.NONE);
        if (source == null) {
            throw new IllegalArgumentException(TAKES);
        }
    }

    private Fence(OwnConnection.Opener opener, String schema, Telemetry telemetry) {
        this.opener = opener;
        this.schema = schema;
        this.telemetry = telemetry;
    }

    /** The same, for an extension in a schema that is not on the search path. It is a Fence with leases of its own. */
    public final Fence inSchema(String schema) {
        return new Fence(opener, '"' + schema.replace("\"", "\"\"") + "\".", telemetry);
    }

    /** The same, with somebody who is told what it does. It is a Fence with leases of its own. */
    public final Fence telemetry(Telemetry telemetry) {
        return new Fence(opener, schema, telemetry);
    }

    /** A lease of one name, or of several at once, all or none; up to 1000. */
    public final LeaseRequest lease(String... names) {
        return new LeaseRequest(this, List.of(names));
    }

    /** A lease of several names at once, all or none; up to 1000. */
    public final LeaseRequest lease(Collection<String> names) {
        return new LeaseRequest(this, List.copyOf(names));
    }

    /**
     * Goes on with a lease that another process has handed over: {@link LeaseRequest#resume}.
     *
     * @throws FenceException.LeaseLost where the token no longer speaks for it
     * @throws SQLException where the server refuses, or cannot be reached
     */
    public final Lease resume(String name, long token, Duration ttl) throws SQLException, InterruptedException {
        return lease(name).ttl(ttl).resume(token);
    }

    /**
     * Leases for the first free rows of a query, whose first column is the name of the lease.
     *
     * @param query a SELECT, with {@code ?} for its parameters
     */
    public final ClaimRequest claim(String query, Object... parameters) {
        return new ClaimRequest(this, query, parameters.clone());
    }

    /**
     * Makes a lease known that somebody else has granted (etcd, ZooKeeper, Redis, another database), under the number
     * that it has there.
     */
    public final AdoptRequest adopt(String name, long token) {
        return new AdoptRequest(this, name, token);
    }

    /**
     * A transaction under several leases, guarded by one statement, in the order of their names: all of it lands, or
     * nothing.
     *
     * @param connection of the work's own, to PostgreSQL
     * @param leases of this Fence
     */
    public final Guarded guard(Connection connection, Collection<Lease> leases) {
        if (leases.isEmpty()) {
            throw new IllegalArgumentException("a guard takes at least one lease");
        }
        return new Guarded(List.copyOf(leases), connection, true, false);
    }

    /**
     * As the other, for a few.
     *
     * @param connection of the work's own, to PostgreSQL
     * @param leases of this Fence
     */
    public final Guarded guard(Connection connection, Lease... leases) {
        return guard(connection, List.of(leases));
    }

    /**
     * Tells who has a lease now, and each change, by looking each second. {@code tell} is called from another thread;
     * empty where nobody has it.
     */
    public final Observation observe(String name, Consumer<Optional<Leader>> tell) {
        return new Observation(this, name, tell);
    }

    /** What is done while leading. A loss shows at its next step under the lease. */
    @FunctionalInterface
    public interface Leading<T, E extends Exception> {
        /** The work, for what {@link Leadership#run} is to return. */
        T under(Lease lease) throws E, InterruptedException;
    }

    /** How to lead, where more is to be said than {@link #lead} takes. */
    public final Leadership leadership(String name) {
        return new Leadership(this, name);
    }

    /**
     * Does {@code work} while leading, again after each loss. An interrupt ends it.
     *
     * @throws E from the work, where it was no loss
     * @throws SQLException where the lease cannot be had, for good
     */
    public final <T, E extends Exception> T lead(String name, Duration ttl, Leading<T, E> work)
            throws E, SQLException, InterruptedException {
        return leadership(name).ttl(ttl).run(work);
    }

    /**
     * For a connection that presents a token from its beginning: the driver's property {@code options}.
     *
     * @return {@code -c pg_fence.token=34}
     */
    public static String options(long token) {
        return "-c pg_fence.token=" + token;
    }

    // For the client itself

    /** One for all leases. */
    final synchronized Keeper keeper() {
        if (keeper == null) {
            keeper = newKeeper();
        }
        return keeper;
    }

    Keeper newKeeper() {
        return new Keeper(this);
    }

    Adopted make(AdoptRequest request) {
        return new Adopted(request);
    }

    final Telemetry telemetry() {
        return telemetry;
    }

    /** What the client asks the server by itself. */
    @FunctionalInterface
    interface OwnCall<T> {
        T get() throws SQLException, InterruptedException;
    }

    /** In a span; its errors have their types. */
    final <T> T told(String verb, List<String> names, OwnCall<T> call) throws SQLException, InterruptedException {
        Telemetry.Span span = telemetry.begin(verb, names);
        Exception failure = null;
        try {
            return FenceException.typed(call);
        } catch (SQLException | RuntimeException | InterruptedException error) {
            failure = error;
            throw error;
        } finally {
            span.end(failure);
        }
    }

    /** A function of the extension. */
    final String named(String call) {
        return schema + call;
    }

    final String select(String call) {
        return "SELECT " + named(call);
    }

    /** A connection of the client's own. */
    final Connection open(long limit) throws SQLException {
        Connection connection = opener.open(limit);
        refuseForeign(connection);
        if (connection.isWrapperFor(PGConnection.class)) {
            // A pooler in transaction mode hands each transaction to a server that may not know the statement; the
            // driver prepares even COMMIT.
            connection.unwrap(PGConnection.class).setPrepareThreshold(0);
        }
        connection.setAutoCommit(true);
        return connection;
    }

    /** Of another database, or none at all. */
    static void refuseForeign(Connection connection) throws SQLException {
        if (connection == null) {
            throw new IllegalArgumentException("no connection: " + TAKES);
        }
        String product = connection.getMetaData().getDatabaseProductName();
        if (!"PostgreSQL".equals(product)) {
            String what = product + " (" + connection.getClass().getName() + ")";
            throw new IllegalArgumentException("a connection to " + what + ": it takes one to PostgreSQL, and " + TAKES);
        }
    }

    private static OwnConnection.Opener opener(String url, Properties properties) {
        String full = url != null && url.startsWith("postgresql:") ? "jdbc:" + url : url;
        if (full == null || !full.startsWith("jdbc:postgresql:")) {
            // Not all of it: it may have a password.
            String begin = full == null ? "null" : full.substring(0, Math.max(0, full.indexOf(':')));
            throw new IllegalArgumentException("\"" + begin + ":…\" is no URL of PostgreSQL's driver: " + TAKES);
        }
        Properties copy = new Properties();
        copy.putAll(properties);
        return limit -> connect(full, copy, limit);
    }

    private static Connection connect(String url, Properties properties, long limit) throws SQLException {
        Properties all = new Properties();
        all.putAll(properties);
        // The driver takes whole seconds, and keeps them as milliseconds in an int.
        String seconds = Long.toString(Math.min(TimeUnit.NANOSECONDS.toSeconds(limit) + 1, Integer.MAX_VALUE / 1000));
        all.putIfAbsent(PGProperty.CONNECT_TIMEOUT.getName(), seconds);
        all.putIfAbsent(PGProperty.SOCKET_TIMEOUT.getName(), seconds);
        Connection connection = DriverManager.getConnection(url, all);
        // From here on the watch breaks off what takes too long, and a wait in line may take longer.
        connection.setNetworkTimeout(Runnable::run, 0);
        return connection;
    }
}
