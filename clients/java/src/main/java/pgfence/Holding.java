package pgfence;

import java.sql.*;
import java.util.List;

/**
 * Guards a transaction: a {@link Lease}, or a lease that somebody else grants, under the number
 * that it has there.
 */
public class Holding {
    final Heartbeat heartbeat;
    private final List<String> names;
    private final long token;

    /** Whose the number is, if it is adopted. */
    final String holder;

    Holding(Heartbeat heartbeat, List<String> names, long token, String holder) {
        this.heartbeat = heartbeat;
        this.names = names;
        this.token = token;
        this.holder = holder;
    }

    /** Work that is done in a transaction, for its effect. */
    @FunctionalInterface
    public interface Step<E extends Exception> {
        void run() throws E;
    }

    /** Work that is done in a transaction, for a result. */
    @FunctionalInterface
    public interface Work<T, E extends Exception> {
        T run() throws E;
    }

    /** The names of the lease; of a row lease, its table and its key. */
    public final List<String> names() {
        return names;
    }

    /** The acquire's: it serves for as long as the lease is held. */
    public final long token() {
        return token;
    }

    /**
     * For code that knows nothing of fences: a connection whose property {@code options} is this
     * presents the token in all its transactions. Not through a pooler in transaction mode.
     */
    public final String options() {
        return "-c pg_fence.token=" + token;
    }

    /**
     * Does the work in a transaction during which nobody else is granted the lease; whatever the
     * work throws rolls it back. On a connection in autocommit it begins and ends here. On any
     * other it is the transaction of whoever has ended the autocommit, and who commits it. Of a row
     * lease it writes the row first, so that all further writes of the row in this transaction are
     * its holder's.
     *
     * @throws SQLException where the transaction cannot begin or commit
     */
    public final <E extends Exception> void guard(Connection connection, Step<E> work)
            throws E, SQLException {
        new Transaction(heartbeat, List.of(this), false, connection).around(work);
    }

    /** The same, for a result. */
    public final <T, E extends Exception> T guard(Connection connection, Work<T, E> work)
            throws E, SQLException {
        return new Transaction(heartbeat, List.of(this), false, connection).around(work);
    }

    /**
     * As {@link #guard(Connection, Step) guard}, and the same transaction gives the lease back. In
     * a transaction that somebody else commits, it is given back by that commit, and lives on if
     * there is none.
     */
    public final <E extends Exception> void guardAndRelease(Connection connection, Step<E> work)
            throws E, SQLException {
        new Transaction(heartbeat, List.of(this), true, connection).around(work);
    }

    /** The same, for a result. */
    public final <T, E extends Exception> T guardAndRelease(Connection connection, Work<T, E> work)
            throws E, SQLException {
        return new Transaction(heartbeat, List.of(this), true, connection).around(work);
    }
}
