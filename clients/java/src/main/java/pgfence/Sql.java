package pgfence;

import java.sql.Connection;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.time.Duration;
import java.util.concurrent.TimeUnit;
import org.postgresql.PGStatement;

/** Statements, as JDBC wants them. */
final class Sql {
    private Sql() {}

    /** The only value of the only row. JDBC reads NULL, which is a lost try, as 0. */
    static Long value(PreparedStatement statement) throws SQLException {
        try (ResultSet rows = statement.executeQuery()) {
            rows.next();
            long value = rows.getLong(1);
            return rows.wasNull() ? null : value;
        }
    }

    static Long value(Connection connection, String sql, Object... arguments) throws SQLException {
        try (PreparedStatement statement = prepare(connection, sql, arguments)) {
            return value(statement);
        }
    }

    static PreparedStatement prepare(Connection connection, String sql, Object... arguments) throws SQLException {
        PreparedStatement statement = connection.prepareStatement(sql);
        // A pooler in transaction mode hands each transaction to a server that may not know the statement.
        if (statement.isWrapperFor(PGStatement.class)) {
            statement.unwrap(PGStatement.class).setPrepareThreshold(0);
        }
        for (int index = 0; index < arguments.length; index++) {
            Object argument = arguments[index];
            if (argument instanceof String[] names) {
                statement.setArray(index + 1, connection.createArrayOf("text", names));
            } else if (argument == null) {
                statement.setString(index + 1, null);
            } else {
                statement.setObject(index + 1, argument);
            }
        }
        return statement;
    }

    /** As PostgreSQL reads a span of time. */
    static String interval(Duration span) {
        return TimeUnit.NANOSECONDS.toMicros(span.toNanos()) + " microseconds";
    }

    /** Until the end of the transaction. As text: there is no set_config that takes a number. */
    static void set(Connection connection, String setting, String value) throws SQLException {
        try (PreparedStatement statement = prepare(connection, "SELECT set_config(?, ?, true)", setting, value)) {
            statement.executeQuery().close();
        }
    }

    /** Closes its socket, from any thread, whatever hangs on it. */
    static void breakOff(Connection connection) {
        try {
            if (connection != null) {
                // With TLS, to close may hang as well.
                connection.abort(command -> daemon("pg_fence abort", command).start());
            }
        } catch (SQLException closedAlready) {
            // There is nothing to break off.
        }
    }

    /** A thread that does not keep the process from ending. */
    static Thread daemon(String name, Runnable work) {
        Thread thread = new Thread(work, name);
        thread.setDaemon(true);
        return thread;
    }

    /** Waits for one that is about to end. */
    static void join(Thread thread) {
        try {
            thread.join(5000);
        } catch (InterruptedException later) {
            Thread.currentThread().interrupt();
        }
    }

    static void closeQuietly(Connection connection) {
        try {
            if (connection != null) {
                connection.close();
            }
        } catch (SQLException brokenAlready) {
            // It is gone in any case.
        }
    }
}
