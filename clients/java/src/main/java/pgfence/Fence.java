package pgfence;

import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.SQLException;
import java.time.Duration;
import java.util.List;
import java.util.Optional;
import java.util.Properties;
import java.util.concurrent.TimeUnit;
import javax.sql.DataSource;
import org.postgresql.PGConnection;
import org.postgresql.PGProperty;
import pgfence.FenceException.LeaseLost;
import pgfence.FenceException.NotSpeaking;
import pgfence.FenceException.StaleToken;

/** Where leases come from. Each has one connection of its own while it is held. */
public class Fence {
    private final OwnConnection.Opener opener;
    private final String schema;

    /** {@code jdbc:postgresql:…}, or without {@code jdbc:}. */
    public Fence(String url) {
        this(url, new Properties());
    }

    public Fence(String url, Properties properties) {
        this(limit -> connect(url, properties, limit), "");
    }

    /** How long its connections may take to open is the data source's own business. */
    public Fence(DataSource source) {
        this(limit -> source.getConnection(), "");
    }

    private Fence(OwnConnection.Opener opener, String schema) {
        this.opener = opener;
        this.schema = schema;
    }

    /** The same, for an extension in a schema that is not in the search path. */
    public final Fence inSchema(String schema) {
        return new Fence(opener, '"' + schema.replace("\"", "\"\"") + "\".");
    }

    /** A lease of one name, or of several at once, all or none. */
    public final LeaseRequest lease(String... names) {
        return new LeaseRequest(this, List.of(names));
    }

    /**
     * Makes a lease known that somebody else has granted (etcd, ZooKeeper, Redis, another database), under the number
     * that it has there.
     */
    public final AdoptRequest adopt(String name, long token) {
        return new AdoptRequest(this, name, token);
    }

    Lease make(LeaseRequest request) {
        return new Lease(request);
    }

    Adopted make(AdoptRequest request) {
        return new Adopted(request);
    }

    /** What is done while leading. A loss shows at its next step under the lease. */
    @FunctionalInterface
    public interface Leading<T, E extends Exception> {
        T under(Lease lease) throws E, InterruptedException;
    }

    /**
     * Does {@code work} while leading, again after each loss, and returns what it returned once it came to its end. An
     * interrupt ends it.
     */
    public final <T, E extends Exception> T lead(String name, Duration ttl, Leading<T, E> work)
            throws E, SQLException, InterruptedException {
        // Whoever never saw the answer to an acquire takes the grant over by its own unique name.
        LeaseRequest request = lease(name).ttl(ttl).waiting(portionOf(ttl)).reclaim(LeaseRequest.uniqueHolder());
        while (true) {
            Optional<Lease> taken = Optional.empty();
            try {
                taken = request.tryAcquire();
            } catch (SQLException error) {
                if (FenceException.isPermanent(error)) {
                    throw error;
                }
                Thread.sleep(ttl.dividedBy(12).toMillis());
            }
            if (taken.isEmpty()) {
                continue;
            }
            Lease lease = taken.get();
            try (lease) {
                return work.under(lease);
            } catch (Exception error) {
                if (error instanceof InterruptedException || !goesOn(lease, error)) {
                    throw error;
                }
                Thread.sleep(ttl.dividedBy(12).toMillis());
            }
        }
    }

    private static Duration portionOf(Duration ttl) {
        return Duration.ofMillis(Math.min(Math.max(ttl.toMillis() / 3, 1000), 10_000));
    }

    /** Whether whoever leads tries again. */
    private static boolean goesOn(Lease lease, Exception error) {
        FenceException told = FenceException.classify(error).orElse(null);
        return lease.loss() != null
                || told instanceof LeaseLost
                || told instanceof StaleToken
                || told instanceof NotSpeaking;
    }

    final String select(String call) {
        return "SELECT " + schema + call;
    }

    /** A connection of a lease's own. */
    final Connection open(long limit) throws SQLException {
        Connection connection = opener.open(limit);
        if (connection.isWrapperFor(PGConnection.class)) {
            // A pooler in transaction mode hands each transaction to a server that may not know the statement; the
            // driver prepares even COMMIT.
            connection.unwrap(PGConnection.class).setPrepareThreshold(0);
        }
        connection.setAutoCommit(true);
        return connection;
    }

    private static Connection connect(String url, Properties properties, long limit) throws SQLException {
        Properties all = new Properties();
        all.putAll(properties);
        // The driver takes whole seconds, and keeps them as milliseconds in an int.
        String seconds = Long.toString(Math.min(TimeUnit.NANOSECONDS.toSeconds(limit) + 1, Integer.MAX_VALUE / 1000));
        all.putIfAbsent(PGProperty.CONNECT_TIMEOUT.getName(), seconds);
        all.putIfAbsent(PGProperty.SOCKET_TIMEOUT.getName(), seconds);
        Connection connection = DriverManager.getConnection(url.startsWith("jdbc:") ? url : "jdbc:" + url, all);
        // From here on the watch breaks off what takes too long, and a wait in line may take longer.
        connection.setNetworkTimeout(Runnable::run, 0);
        return connection;
    }
}
