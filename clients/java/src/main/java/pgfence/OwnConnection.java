package pgfence;

import java.sql.Connection;
import java.sql.PreparedStatement;
import java.sql.SQLException;
import java.sql.Statement;
import java.util.concurrent.TimeUnit;

/**
 * A connection of the client's own: opened when it is needed, used by one thread. Another thread breaks it off when a
 * call takes longer than it may.
 */
final class OwnConnection {
    static final long NEVER = Long.MAX_VALUE;

    /** Opens a connection, within so many nanoseconds as far as it can. */
    @FunctionalInterface
    interface Opener {
        Connection open(long limit) throws SQLException;
    }

    @FunctionalInterface
    interface Call<T> {
        T on(Connection connection) throws SQLException;
    }

    /** The call took longer than it may, and we ended it. */
    @SuppressWarnings("serial")
    static final class BrokenOff extends SQLException {
        BrokenOff(long limit, SQLException cause) {
            super("no answer within " + TimeUnit.NANOSECONDS.toMillis(limit) + " ms: broken off", "08006", cause);
        }
    }

    private final Opener opener;
    /** Told that there is a new time to break a call off. */
    private final Runnable watch;
    private volatile Connection connection;
    private volatile long cutAt = NEVER;
    private volatile boolean isCut;
    private Statement cancellable;

    OwnConnection(Opener opener, Runnable watch) {
        this.opener = opener;
        this.watch = watch;
    }

    boolean isOpen() {
        return connection != null;
    }

    /** In autocommit. */
    <T> T call(long limit, Call<T> call) throws SQLException {
        if (connection == null) {
            connection = opener.open(limit);
        }
        isCut = false;
        cutAt = Clock.now() + limit;
        watch.run();
        try {
            return call.on(connection);
        } catch (SQLException error) {
            if (isCut) {
                close();
                throw new BrokenOff(limit, error);
            }
            if (connection.isClosed() || FenceException.isEnd(error)) {
                close();
            }
            throw error;
        } finally {
            cutAt = NEVER;
        }
    }

    /** The only value of one statement in autocommit; null is NULL. {@link #cancel} ends it. */
    Long value(long limit, String sql, Object... arguments) throws SQLException {
        return call(limit, on -> {
            try (PreparedStatement prepared = Sql.prepare(on, sql, arguments)) {
                setCancellable(prepared);
                return Sql.value(prepared);
            } finally {
                setCancellable(null);
            }
        });
    }

    /** In a transaction, which the server does not let go on for ever either, nor wait for a lock. */
    <T> T transaction(long limit, long lockLimit, Call<T> call) throws SQLException {
        return call(limit, on -> {
            on.setAutoCommit(false);
            try {
                Sql.setTimeouts(on, limit, lockLimit);
                T value = call.on(on);
                on.commit();
                return value;
            } catch (SQLException error) {
                rollBack(on, error);
                throw error;
            } finally {
                if (!on.isClosed()) {
                    on.setAutoCommit(true);
                }
            }
        });
    }

    private static void rollBack(Connection on, SQLException why) {
        try {
            if (!on.isClosed()) {
                on.rollback();
            }
        } catch (SQLException broken) {
            why.addSuppressed(broken);
        }
    }

    private synchronized void setCancellable(Statement running) {
        cancellable = running;
    }

    /** Asks the server to end the {@code value} that is under way, whose answer then comes. */
    synchronized void cancel() {
        try {
            if (cancellable != null) {
                cancellable.cancel();
            }
        } catch (SQLException unreachable) {
            // Then the call ends at its limit.
        }
    }

    /** When the call that is under way is to be broken off. */
    long cutAt() {
        return cutAt;
    }

    /** Ends what takes longer than it may. */
    void cutIfLate() {
        if (Clock.now() >= cutAt) {
            cutAt = NEVER;
            isCut = true;
            Sql.breakOff(connection);
        }
    }

    /** Hands the connection over, which is from then on its taker's to close. */
    Connection take() {
        Connection taken = connection;
        connection = null;
        return taken;
    }

    void close() {
        Sql.closeQuietly(take());
    }
}
