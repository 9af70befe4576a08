package pgfence;

import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.sql.Statement;
import java.time.Duration;
import java.util.Objects;
import java.util.concurrent.Callable;
import org.postgresql.ds.PGSimpleDataSource;

/** What all tests have. {@code DATABASE_URL} names a database with the extension: a table is made and dropped in it. */
abstract class Case {
    static final Duration LONG = Duration.ofMinutes(5);
    static final String URL = "jdbc:" + System.getenv("DATABASE_URL");

    final Fence fence = new Fence(URL);
    final Connection admin = DriverManager.getConnection(URL);

    Case() throws SQLException {}

    final void setUp() throws SQLException {
        run(admin, "DROP TABLE IF EXISTS orders");
        run(admin, "CREATE TABLE orders (id bigint PRIMARY KEY, status text)");
        run(admin, "INSERT INTO orders VALUES (7, 'new')");
        run(admin, "SELECT fence_protect('orders', lease => 'order:{id}')");
    }

    /** Another order. */
    final void add(int id) throws SQLException {
        run(admin, "SELECT fence_unprotect('orders')");
        run(admin, "INSERT INTO orders VALUES (" + id + ", 'new')");
        run(admin, "SELECT fence_protect('orders', lease => 'order:{id}')");
    }

    static PGSimpleDataSource source() {
        PGSimpleDataSource source = new PGSimpleDataSource();
        source.setURL(URL);
        return source;
    }

    static void run(Connection connection, String sql) throws SQLException {
        try (Statement statement = connection.createStatement()) {
            statement.execute(sql);
        }
    }

    static String value(Connection connection, String sql) throws SQLException {
        try (Statement statement = connection.createStatement(); ResultSet rows = statement.executeQuery(sql)) {
            rows.next();
            return rows.getString(1);
        }
    }

    final String value(String sql) throws SQLException {
        return value(admin, sql);
    }

    final String status() throws SQLException {
        return value("SELECT status FROM orders");
    }

    static void equal(Object is, Object should) {
        if (!Objects.equals(is, should)) {
            throw new AssertionError("it is " + is + " and should be " + should);
        }
    }

    @FunctionalInterface
    interface Body {
        void run() throws Exception;
    }

    static <E extends Throwable> E thrown(Class<E> type, Body body) throws Exception {
        try {
            body.run();
        } catch (Throwable error) {
            if (type.isInstance(error)) {
                return type.cast(error);
            }
            throw error;
        }
        throw new AssertionError("no " + type);
    }

    /** A thread whose failure is known at its end. */
    static Thread started(Body body) {
        Thread thread = new Thread(() -> {
            try {
                body.run();
            } catch (Exception error) {
                throw new IllegalStateException(error);
            }
        });
        thread.start();
        return thread;
    }

    final Lease lease(String... names) throws Exception {
        return fence.lease(names).ttl(LONG).acquire();
    }

    static final String HELD = "SELECT count(*) FROM fence.leases WHERE state = 'held'";
    static final String WAITING =
            "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query LIKE 'SELECT lease_acquire%'";

    static void comesTrue(Callable<Boolean> check) throws Exception {
        for (int round = 0; round < 600 && !check.call(); round++) {
            Thread.sleep(50);
        }
        equal(check.call(), true);
    }
}
