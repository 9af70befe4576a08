package pgfence;

import java.sql.Connection;
import java.sql.PreparedStatement;
import java.sql.SQLException;
import java.sql.Statement;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.locks.Condition;
import java.util.concurrent.locks.ReentrantLock;

/**
 * A lease's own connection: opened when it is needed, used by one thread. Another thread breaks it off when a call
 * takes longer than it may.
 */
final class OwnConnection {
    static final long NEVER = Long.MAX_VALUE;

    /** Opens a connection, within so many nanoseconds as far as it can. */
    @FunctionalInterface
    interface Opener {
        Connection open(long limit) throws SQLException;
    }

    private final Opener opener;
    private final ReentrantLock lock;
    /** Signalled when there is a new time to break a call off. */
    private final Condition changed;
    private volatile Connection connection;
    private volatile Statement statement;
    /** When the call that is under way is to be broken off; under the lock. */
    private long cutAt = NEVER;

    OwnConnection(Opener opener, ReentrantLock lock, Condition changed) {
        this.opener = opener;
        this.lock = lock;
        this.changed = changed;
    }

    boolean isOpen() {
        return connection != null;
    }

    /** The only value of one statement, in a transaction of its own; null is NULL. */
    Long call(long limit, String sql, Object... arguments) throws SQLException {
        return bounded(limit, () -> value(connection, sql, arguments));
    }

    /** The same, where the server does not let it go on for ever either. */
    Long callWithin(long limit, String sql, Object... arguments) throws SQLException {
        return bounded(limit, () -> {
            connection.setAutoCommit(false);
            try {
                // For this transaction only: behind a pooler the session is others', too.
                String timeout = Long.toString(Math.max(1, TimeUnit.NANOSECONDS.toMillis(limit)));
                Sql.set(connection, "statement_timeout", timeout);
                Long value = value(connection, sql, arguments);
                connection.commit();
                return value;
            } catch (SQLException error) {
                if (!connection.isClosed()) {
                    connection.rollback();
                }
                throw error;
            } finally {
                if (!connection.isClosed()) {
                    connection.setAutoCommit(true);
                }
            }
        });
    }

    private Long value(Connection connection, String sql, Object... arguments) throws SQLException {
        try (PreparedStatement prepared = Sql.prepare(connection, sql, arguments)) {
            statement = prepared;
            return Sql.value(prepared);
        } finally {
            statement = null;
        }
    }

    @FunctionalInterface
    private interface Call {
        Long call() throws SQLException;
    }

    private Long bounded(long limit, Call call) throws SQLException {
        if (connection == null) {
            connection = opener.open(limit);
        }
        cutAt(Clock.now() + limit);
        try {
            return call.call();
        } catch (SQLException error) {
            if (connection == null || connection.isClosed() || FenceException.isEnd(error)) {
                close();
            }
            throw error;
        } finally {
            cutAt(NEVER);
        }
    }

    private void cutAt(long time) {
        lock.lock();
        try {
            cutAt = time;
            changed.signalAll();
        } finally {
            lock.unlock();
        }
    }

    /** The lock is held. */
    long cutAt() {
        return cutAt;
    }

    /** Ends what hangs on it. The lock is held. */
    void cut() {
        cutAt = NEVER;
        Sql.breakOff(connection);
    }

    /** Asks the server to end the call that is under way, whose answer then comes. */
    void cancel() {
        Statement running = statement;
        try {
            if (running != null) {
                running.cancel();
            }
        } catch (SQLException unreachable) {
            // Then the call ends at its limit.
        }
    }

    void close() {
        Connection closing = connection;
        connection = null;
        Sql.closeQuietly(closing);
    }
}
