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

    /** How long a statement that was cancelled may take to end. */
    static final long CANCEL_AGAIN = TimeUnit.SECONDS.toNanos(1);

    /** What a setting in milliseconds holds: the server refuses more. */
    private static final long LONGEST_TIMEOUT = Integer.MAX_VALUE;

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
    /** Held while the server is asked to cancel: no other statement may begin meanwhile. */
    private final Object cancelling = new Object();
    private Statement cancellable;
    private boolean isCancelled;
    /** When the call that is under way is to be broken off; under the lock. */
    private long cutAt = NEVER;

    OwnConnection(Opener opener, ReentrantLock lock, Condition changed) {
        this.opener = opener;
        this.lock = lock;
        this.changed = changed;
    }

    /** One that nobody watches but by {@link #cutIfLate}. */
    OwnConnection(Opener opener) {
        this.opener = opener;
        lock = new ReentrantLock();
        changed = lock.newCondition();
    }

    boolean isOpen() {
        return connection != null;
    }

    /** The only value of one statement, in a transaction of its own; null is NULL. It can be cancelled. */
    Long call(long limit, String sql, Object... arguments) throws SQLException {
        try {
            return bounded(limit, () -> {
                try (PreparedStatement prepared = Sql.prepare(connection, sql, arguments)) {
                    setCancellable(prepared);
                    return Sql.value(prepared);
                } finally {
                    setCancellable(null);
                }
            });
        } finally {
            if (wasCancelled()) {
                // A request that is late would hit the next statement: the release of a grant that came all the same.
                close();
            }
        }
    }

    private void setCancellable(Statement running) {
        synchronized (cancelling) {
            cancellable = running;
        }
    }

    private boolean wasCancelled() {
        synchronized (cancelling) {
            boolean was = isCancelled;
            isCancelled = false;
            return was;
        }
    }

    /** The same, where the server does not let it go on for ever either. */
    Long callWithin(long limit, String sql, Object... arguments) throws SQLException {
        return bounded(limit, () -> {
            connection.setAutoCommit(false);
            try {
                // For this transaction only: behind a pooler the session is others', too.
                long timeout = Math.max(1, Math.min(TimeUnit.NANOSECONDS.toMillis(limit), LONGEST_TIMEOUT));
                Sql.set(connection, "statement_timeout", Long.toString(timeout));
                Long value = Sql.value(connection, sql, arguments);
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

    /** Ends what takes longer than it may. */
    void cutIfLate() {
        lock.lock();
        try {
            if (Clock.now() >= cutAt) {
                cut();
            }
        } finally {
            lock.unlock();
        }
    }

    /** Asks the server to end the {@code call} that is under way, whose answer then comes. */
    void cancel() {
        synchronized (cancelling) {
            if (cancellable == null) {
                return;
            }
            isCancelled = true;
            try {
                cancellable.cancel();
            } catch (SQLException unreachable) {
                // Then the call ends at its limit.
            }
        }
    }

    void close() {
        Connection closing = connection;
        connection = null;
        Sql.closeQuietly(closing);
    }
}
