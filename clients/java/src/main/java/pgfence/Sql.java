package pgfence;

import java.nio.charset.StandardCharsets;
import java.sql.Connection;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.time.Duration;
import java.util.Arrays;
import java.util.Comparator;
import java.util.concurrent.TimeUnit;
import org.postgresql.PGStatement;

/** Statements, as JDBC wants them. */
final class Sql {
    /** The order in which the server locks names: that of their bytes. */
    static final Comparator<String> BY_BYTES = (one, other) ->
            Arrays.compareUnsigned(one.getBytes(StandardCharsets.UTF_8), other.getBytes(StandardCharsets.UTF_8));

    /** What a setting in milliseconds holds: the server refuses more. */
    private static final long LONGEST_TIMEOUT = Integer.MAX_VALUE;

    private Sql() {}

    /** The only value of the only row. JDBC reads NULL, which is a lost try, as 0. */
    static Long value(PreparedStatement statement) throws SQLException {
        try (ResultSet rows = statement.executeQuery()) {
            rows.next();
            return number(rows, 1);
        }
    }

    static Long value(Connection connection, String sql, Object... arguments) throws SQLException {
        try (PreparedStatement statement = prepare(connection, sql, arguments)) {
            return value(statement);
        }
    }

    static Long number(ResultSet rows, int column) throws SQLException {
        long value = rows.getLong(column);
        return rows.wasNull() ? null : value;
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
            } else if (argument instanceof Long[] tokens) {
                statement.setArray(index + 1, connection.createArrayOf("int8", tokens));
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
        return span.toSeconds() + " seconds " + span.toNanosPart() / 1000 + " microseconds";
    }

    /** Until the end of the transaction. As text: there is no set_config that takes a number. */
    static void set(Connection connection, String setting, String value) throws SQLException {
        try (PreparedStatement statement = prepare(connection, "SELECT set_config(?, ?, true)", setting, value)) {
            statement.executeQuery().close();
        }
    }

    /** For this transaction only: behind a pooler the session is others', too. */
    static void setTimeouts(Connection connection, long limit, long lockLimit) throws SQLException {
        String sql = "SELECT set_config('statement_timeout', ?, true), set_config('lock_timeout', ?, true)";
        try (PreparedStatement statement = prepare(connection, sql, milliseconds(limit), milliseconds(lockLimit))) {
            statement.executeQuery().close();
        }
    }

    private static String milliseconds(long span) {
        return Long.toString(Math.max(1, Math.min(TimeUnit.NANOSECONDS.toMillis(span), LONGEST_TIMEOUT)));
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
