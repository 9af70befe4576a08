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
import java.util.stream.Stream;

/** The connections of a heartbeat, and the threads that open, use and end them. */
final class Connections {
    /** The beginning of the error message about a wrong argument. */
    static final String TAKES =
            "a fence takes a URL, jdbc:postgresql:… or postgresql:…, a DataSource, or a function";

    private static final Pattern URL =
            Pattern.compile(
                    "(?:jdbc:)?postgres(?:ql)?:(?<authority>/*)"
                            + "(?:(?<user>[^/?@:]*)(?::(?<password>[^/?@]*))?@)?(?<rest>.*)");

    static final ThreadPoolExecutor THREADS =
            threads(0, Integer.MAX_VALUE, new SynchronousQueue<>());

    /**
     * Makes threads that no interrupt of a caller reaches. A thread ends a second after its last
     * task.
     */
    static ThreadPoolExecutor threads(int least, int most, BlockingQueue<Runnable> queue) {
        ThreadFactory factory =
                work -> {
                    Thread thread = new Thread(work, "pg_fence");
                    thread.setDaemon(true);
                    return thread;
                };
        ThreadPoolExecutor threads =
                new ThreadPoolExecutor(least, most, 1, TimeUnit.SECONDS, queue, factory);
        threads.allowCoreThreadTimeOut(true);
        return threads;
    }

    /** A task for a separate thread. */
    interface Task {
        void run() throws Exception;
    }

    /** Opens a connection. An answer after the limit, in milliseconds, is too late. */
    interface Source {
        Connection open(long limit) throws Exception;
    }

    private Connections() {}

    /** Runs a task in a separate thread. Returns false if none can be started, which is logged. */
    static boolean run(Executor threads, Runnable task) {
        try {
            threads.execute(task);
            return true;
        } catch (OutOfMemoryError error) {
            Heartbeat.log(Level.WARNING, "a thread cannot be started", error);
            return false;
        }
    }

    /** As {@link #run(Executor, Runnable)}. An error of the task is logged. */
    static boolean run(Task task) {
        return run(
                THREADS,
                () -> {
                    try {
                        task.run();
                    } catch (Throwable error) {
                        Heartbeat.log(Level.WARNING, "in a thread of the fence", error);
                    }
                });
    }

    static FenceException noThread() {
        return new FenceException("a thread cannot be started", false, null);
    }

    /** A connection for one call at a time. At the limit of a call the heartbeat cuts it. */
    static final class HeartbeatConnection {
        final int number;

        /** Held during each use of the connection. */
        final ReentrantLock use = new ReentrantLock();

        private volatile Connection connection;
        private volatile boolean isCut;
        private volatile long usedAt;

        /** The role that has logged in; null until the connection is open. */
        volatile String role;

        HeartbeatConnection(int number) {
            this.number = number;
        }

        void open(Source source, long limit) throws Exception {
            Connection opened = connection = source.open(limit);
            if (opened == null || !opened.isWrapperFor(PGConnection.class)) {
                throw new IllegalArgumentException(
                        "a fence takes connections to PostgreSQL, and not " + opened);
            }
            // A grant in the program's transaction would not be committed.
            if (opened.unwrap(BaseConnection.class).getTransactionState()
                    != TransactionState.IDLE) {
                throw new IllegalArgumentException(
                        "a fence takes connections that are not in a transaction");
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

        /**
         * Returns true if the server has closed the connection. It is only checked if it has been
         * idle for {@code idle} milliseconds, and nobody uses it now.
         */
        boolean hasEnded(long idle) {
            Connection checked = connection;
            if (checked == null || Clock.now() < usedAt + idle || !use.tryLock()) {
                return false;
            }
            try {
                // The driver reads the server's last message, and notices the end.
                checked.unwrap(PGConnection.class).getNotifications(1);
                return checked.isClosed();
            } catch (SQLException ended) {
                return true;
            } finally {
                use.unlock();
            }
        }

        /** Returns true if the connection cannot execute another statement. */
        boolean isBroken() {
            Connection checked = connection;
            try {
                return checked == null
                        || checked.isClosed()
                        || checked.unwrap(BaseConnection.class).getTransactionState()
                                != TransactionState.IDLE;
            } catch (SQLException ended) {
                return true;
            }
        }

        /** Ends the connection at once, even if a statement or its opening hangs. */
        void cut() {
            isCut = true;
            Connections.cut(connection);
        }

        /** Closes the connection in an orderly way, once nobody uses it. */
        void hangUp() {
            use.lock();
            try {
                if (connection != null) {
                    connection.close();
                }
            } catch (SQLException hasEnded) {
                // Then there is nothing to close.
            } finally {
                use.unlock();
            }
        }
    }

    /**
     * Executes a statement and returns its rows. On a connection of the heartbeat (isOwn) no
     * statement is prepared: behind a pooler the next transaction may be in another session.
     */
    static List<Object[]> rows(Connection connection, Statements.Statement call, boolean isOwn)
            throws SQLException {
        try (PreparedStatement statement = connection.prepareStatement(call.sql())) {
            if (isOwn && statement.isWrapperFor(PGStatement.class)) {
                statement.unwrap(PGStatement.class).setPrepareThreshold(0);
            }
            int index = 0;
            for (Object argument : call.arguments()) {
                if (argument instanceof List<?> list) {
                    boolean hasTokens = !list.isEmpty() && list.get(0) instanceof Long;
                    String type = hasTokens ? "bigint" : "text";
                    argument = connection.createArrayOf(type, list.toArray());
                }
                statement.setObject(++index, argument);
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
     * Closes the socket of a connection, even if a statement hangs. It is done in another thread,
     * as with TLS closing may hang, too.
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
                        // Drivers before 42.7 need a security manager, which Java 24 has not.
                        connection.unwrap(BaseConnection.class).getQueryExecutor().abort();
                    }
                    // Until close, newer drivers keep a thread, and a pool counts the connection.
                    try {
                        connection.close();
                    } catch (SQLException hasEnded) {
                        // A pool resets the connection before it gives it up.
                    }
                });
    }

    static Source opener(String url) {
        Matcher parts = URL.matcher(String.valueOf(url));
        if (!parts.matches()) {
            // Only the beginning of the URL is shown, as it may have a password.
            throw new IllegalArgumentException(
                    TAKES + ", and not \"" + String.valueOf(url).split(":")[0] + ":…\"");
        }
        Properties properties = new Properties();
        // A thread that waits for a server without an answer ends after 30 s.
        properties.put("socketTimeout", "30");
        properties.put("tcpKeepAlive", "true");
        // The driver's own settings then go in the first message, without another round trip.
        properties.put("assumeMinServerVersion", "9.0");
        for (String key : List.of("user", "password")) {
            if (parts.group(key) != null) {
                // A plus stands for a space only in a query.
                String part = parts.group(key).replace("+", "%2B");
                properties.put(key, URLDecoder.decode(part, StandardCharsets.UTF_8));
            }
        }
        // libpq's parameters have other names in the driver.
        String rest = parts.group("rest").replace("application_name=", "ApplicationName=");
        rest = rest.replace("connect_timeout=", "connectTimeout=");
        String authority = "jdbc:postgresql:" + parts.group("authority");
        // Without slashes the rest begins with the database.
        boolean hasHosts = parts.group("authority").length() == 2;
        String[] hosts = rest.split("[/?]", 2)[0].split(hasHosts ? "," : "$");
        String more = rest.substring(String.join(",", hosts).length());
        List<String> urls = Stream.of(hosts).map(host -> authority + host + more).toList();
        return limit -> connect(urls, properties, limit);
    }

    /**
     * Connects to the first host that accepts, within a limit in milliseconds. Each host has its
     * part of the time, so that one that hangs, or whose name does, leaves time for the next.
     */
    private static Connection connect(List<String> urls, Properties properties, long limit)
            throws SQLException {
        long until = Clock.now() + limit;
        SQLException failed = null;
        for (int left = urls.size(); left > 0; left--) {
            Properties own = new Properties();
            own.putAll(properties);
            if (urls.size() > 1) {
                double part = Math.max(1, until - Clock.now()) / 1000.0 / left;
                own.put("loginTimeout", String.valueOf(part));
            }
            try {
                // DriverManager does not find the driver of a web application.
                return new org.postgresql.Driver().connect(urls.get(urls.size() - left), own);
            } catch (SQLException error) {
                if (failed != null) {
                    error.addSuppressed(failed);
                }
                failed = error;
            }
        }
        throw failed;
    }
}
