package pgfence;

import java.sql.*;
import java.util.List;

/**
 * A lease that can guard transactions: a {@link Lease}, or an adopted lease, which another service
 * grants, and whose token is its number there.
 */
public class Holding {
    final Heartbeat heartbeat;
    private final List<String> names;
    private final long token;

    /** The holder of an adopted lease; null for any other. */
    final String holder;

    Holding(Heartbeat heartbeat, List<String> names, long token, String holder) {
        this.heartbeat = heartbeat;
        this.names = names;
        this.token = token;
        this.holder = holder;
    }

    /** Work in a transaction, without a result. */
    @FunctionalInterface
    public interface Step<E extends Exception> {
        void run() throws E;
    }

    /** Work in a transaction, with a result. */
    @FunctionalInterface
    public interface Work<T, E extends Exception> {
        T run() throws E;
    }

    /** The names of the lease; for a row lease its table and its key. */
    public final List<String> names() {
        return names;
    }

    /** The fencing token, which stays the same as long as the lease is held. */
    public final long token() {
        return token;
    }

    /**
     * The connection property {@code options}, for code that knows nothing of fences: a connection
     * with this value presents the token in all its transactions. It does not work through a pooler
     * in transaction mode.
     */
    public final String options() {
        return "-c pg_fence.token=" + token;
    }

    /**
     * Runs the work in a transaction during which nobody else is granted the lease. An exception of
     * the work rolls the transaction back. On a connection in autocommit the transaction begins and
     * ends here. On any other the guard is a savepoint in the transaction of the code that has
     * turned autocommit off, and that code commits it. The guard of a row lease first writes the
     * row, so that the holder makes all further writes of the row in this transaction.
     *
     * @throws FenceException.LeaseLost if the lease is lost
     * @throws FenceException.Refused if the server refuses the guard, or a write of the work
     * @throws FenceException.TransactionLost if the session ends, or the work ends the transaction
     * @throws SQLException if the transaction cannot begin or commit
     */
    public final <E extends Exception> void guard(Connection connection, Step<E> work)
            throws E, SQLException {
        new Transaction(heartbeat, List.of(this), false, connection).run(work);
    }

    /** As {@link #guard(Connection, Step) guard}, and returns the result of the work. */
    public final <T, E extends Exception> T guard(Connection connection, Work<T, E> work)
            throws E, SQLException {
        return new Transaction(heartbeat, List.of(this), false, connection).run(work);
    }

    /**
     * As {@link #guard(Connection, Step) guard}, and the same transaction releases the lease. If
     * other code commits the transaction, that commit releases the lease; after a rollback the
     * lease is still held.
     */
    public final <E extends Exception> void guardAndRelease(Connection connection, Step<E> work)
            throws E, SQLException {
        new Transaction(heartbeat, List.of(this), true, connection).run(work);
    }

    /** As {@link #guardAndRelease(Connection, Step)}, and returns the result of the work. */
    public final <T, E extends Exception> T guardAndRelease(Connection connection, Work<T, E> work)
            throws E, SQLException {
        return new Transaction(heartbeat, List.of(this), true, connection).run(work);
    }
}
