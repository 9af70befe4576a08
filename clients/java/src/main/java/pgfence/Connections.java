package pgfence;

import org.postgresql.PGConnection;
import org.postgresql.PGStatement;
import org.postgresql.core.*;

import java.lang.System.Logger.Level;
import java.net.URLDecoder;
import java.nio.charset.StandardCharsets;
import java.sql.*;
import java.util.*;
import java.util.concurrent.*;
import java.util.concurrent.locks.ReentrantLock;
import java.util.regex.*;

/** The connections of a heartbeat, and the threads in which they are used, opened and ended. */
final class Connections {
    static final String TAKES =
            "a fence takes a URL, jdbc:postgresql:… or postgresql:…, a DataSource, or a function";
    private static final Pattern URL =
            Pattern.compile(
                    "(?:jdbc:)?postgres(?:ql)?:(?<authority>/*)"
                            + "(?:(?<user>[^/?@:]*)(?::(?<password>[^/?@]*))?@)?(?<rest>.*)");

    /** Threads that no interrupt of a caller reaches. They end a second after their last work. */
    static final ThreadPoolExecutor THREADS =
            new ThreadPoolExecutor(
                    0,
                    Integer.MAX_VALUE,
                    1,
                    TimeUnit.SECONDS,
                    new SynchronousQueue<>(),
                    work -> {
                        Thread thread = new Thread(work, "pg_fence");
                        thread.setDaemon(true);
                        return thread;
                    });

    /** Work that is done in a thread of its own. */
    interface Task {
        void run() throws Exception;
    }

    private Connections() {}

    /**
     * False if there is no thread for it. What the task throws is a line of the log, and so is
     * that.
     */
    static boolean run(Task task) {
        try {
            THREADS.execute(
                    () -> {
                        try {
                            task.run();
                        } catch (Throwable error) {
                            Heartbeat.log(Level.WARNING, "in a thread of the fence", error);
                        }
                    });
            return true;
        } catch (OutOfMemoryError error) {
            Heartbeat.log(Level.WARNING, "a thread cannot be started", error);
            return false;
        }
    }

    static FenceException noThread() {
        return new FenceException("a thread cannot be started", false, null);
    }

    /** One of them: for one call at a time, without a time limit of its own, until it is cut. */
    static final class One {
        final int number;
        final ReentrantLock use = new ReentrantLock();
        private volatile Connection connection;
        private volatile boolean isCut;
        private volatile long usedAt;

        /** The role that has logged in. */
        volatile String role;

        One(int number) {
            this.number = number;
        }

        void open(Callable<Connection> source) throws Exception {
            Connection opened = connection = source.call();
            if (opened == null || !opened.isWrapperFor(PGConnection.class)) {
                throw new IllegalArgumentException(
                        "a fence takes connections to PostgreSQL, and not " + opened);
            }
            if (isCut) {
                opened.close();
                throw new SQLException("it was opened too late", "08003");
            }
            opened.setAutoCommit(true);
            role = opened.getMetaData().getUserName();
            usedAt = Clock.now();
        }

        List<Object[]> rows(Statements.Statement statement) throws SQLException {
            List<Object[]> rows = Connections.rows(connection, statement, true);
            usedAt = Clock.now();
            return rows;
        }

        /** Looks whether the server has closed it, if it was idle for so long, and is so still. */
        boolean hasEnded(long idle) {
            Connection on = connection;
            if (on == null || Clock.now() < usedAt + idle || !use.tryLock()) {
                return false;
            }
            try {
                // The driver reads what the server says at the end, and the end itself.
                on.unwrap(PGConnection.class).getNotifications(1);
                return on.isClosed();
            } catch (SQLException ended) {
                return true;
            } finally {
                use.unlock();
            }
        }

        /** Whether it is of no use for another statement. */
        boolean isBroken() {
            Connection on = connection;
            try {
                return on == null
                        || on.isClosed()
                        || on.unwrap(BaseConnection.class).getTransactionState()
                                != TransactionState.IDLE;
            } catch (SQLException ended) {
                return true;
            }
        }

        /** Ends it at once, whatever hangs in it, also in its opening. */
        void cut() {
            isCut = true;
            Connections.cut(connection);
        }

        /** Ends it as it should, when nobody uses it. */
        void hangUp() {
            use.lock();
            try {
                if (connection != null) {
                    connection.close();
                }
            } catch (SQLException goneAlready) {
                // As it should be.
            } finally {
                use.unlock();
            }
        }
    }

    /**
     * On ours nothing is prepared: behind a pooler the next transaction may be in another session.
     */
    static List<Object[]> rows(Connection on, Statements.Statement call, boolean isOurs)
            throws SQLException {
        try (PreparedStatement statement = on.prepareStatement(call.sql())) {
            if (isOurs && statement.isWrapperFor(PGStatement.class)) {
                statement.unwrap(PGStatement.class).setPrepareThreshold(0);
            }
            int at = 0;
            for (Object one : call.arguments()) {
                if (one instanceof List<?> list) {
                    boolean isOfTokens = !list.isEmpty() && list.get(0) instanceof Long;
                    one = on.createArrayOf(isOfTokens ? "bigint" : "text", list.toArray());
                }
                statement.setObject(++at, one);
            }
            List<Object[]> rows = new ArrayList<>();
            try (ResultSet read = statement.executeQuery()) {
                while (read.next()) {
                    Object[] row = new Object[read.getMetaData().getColumnCount()];
                    for (int i = 0; i < row.length; i++) {
                        row[i] = read.getObject(i + 1);
                    }
                    rows.add(row);
                }
            }
            return rows;
        }
    }

    /**
     * Shuts the socket of a connection, whatever hangs on it, without waiting: with TLS that may
     * hang as well.
     */
    static void cut(Connection connection) {
        if (connection == null) {
            return;
        }
        run(
                () -> {
                    try {
                        connection.abort(Runnable::run);
                    } catch (SQLException | RuntimeException | LinkageError refused) {
                        // Drivers before 42.7 ask for a security manager, which Java 24 has not.
                        connection.unwrap(BaseConnection.class).getQueryExecutor().abort();
                    }
                    // Newer drivers keep a thread until then, and a pool counts the connection.
                    connection.close();
                });
    }

    static Callable<Connection> opener(String url) {
        Matcher parts = URL.matcher(String.valueOf(url));
        if (!parts.matches()) {
            // Not all of it: it may have a password.
            throw new IllegalArgumentException(
                    TAKES + ", and not \"" + String.valueOf(url).split(":")[0] + ":…\"");
        }
        Properties all = new Properties();
        // A server that does not answer leaves no thread behind.
        all.put("socketTimeout", "30");
        all.put("tcpKeepAlive", "true");
        // What the driver sets goes along in the first message.
        all.put("assumeMinServerVersion", "9.0");
        for (String key : List.of("user", "password")) {
            if (parts.group(key) != null) {
                // Only in a query a plus is a space.
                String part = parts.group(key).replace("+", "%2B");
                all.put(key, URLDecoder.decode(part, StandardCharsets.UTF_8));
            }
        }
        // As the driver calls it, and not libpq.
        String rest = parts.group("rest").replace("application_name=", "ApplicationName=");
        rest = rest.replace("connect_timeout=", "connectTimeout=");
        String full = "jdbc:postgresql:" + parts.group("authority") + rest;
        // DriverManager does not know the driver of a web application.
        return () -> new org.postgresql.Driver().connect(full, all);
    }
}
