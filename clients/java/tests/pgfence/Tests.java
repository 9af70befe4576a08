package pgfence;

import static org.junit.jupiter.api.Assertions.*;

import static java.time.Duration.*;
import static java.util.concurrent.TimeUnit.*;

import org.junit.jupiter.api.*;
import org.junit.jupiter.api.function.Executable;
import org.postgresql.core.BaseConnection;
import org.postgresql.ds.PGSimpleDataSource;

import pgfence.FenceException.*;

import java.lang.reflect.*;
import java.sql.*;
import java.util.*;
import java.util.concurrent.*;

/**
 * What the vectors and the scenarios of all clients do not show: the shape of the API, and what is
 * Java's own. {@code DATABASE_URL} names a database with the extension that is otherwise of no use:
 * tables are made and dropped in it.
 */
@SuppressWarnings("try")
final class Tests {
    private static final String ADDRESS = System.getenv("DATABASE_URL"), URL = "jdbc:" + ADDRESS;
    private static final Options SHORT = new Options().ttl(ofSeconds(1));
    private static final Options LONG = new Options().ttl(ofMinutes(5));
    private static final String HELD = "SELECT count(*) FROM fence.leases WHERE state = 'held'";
    private static final String PAY = "UPDATE orders SET status = 'paid' WHERE id = 7";
    private static final String STATUS = "SELECT status FROM orders";
    private static final Class<IllegalArgumentException> WRONG = IllegalArgumentException.class;

    private Connection admin, on;
    private Fence fence;

    @BeforeEach
    void makeTables() throws SQLException {
        admin = as("postgres");
        on = as("postgres");
        fence = new Fence(URL);
        sql(
                """
                DROP TABLE IF EXISTS orders, runs CASCADE;
                CREATE TABLE orders (id bigint PRIMARY KEY, status text);
                CREATE TABLE runs (id bigint, "the ""one" text, state text, till timestamptz);
                INSERT INTO orders VALUES (7, 'new');
                INSERT INTO runs VALUES (7, E'me,\\n"\\\\', 'new', NULL);
                SELECT fence_protect('orders', lease => 'order:{id}'),
                       fence_protect('runs', deadline => 'till');
                """);
    }

    @AfterEach
    void nothingIsLeft() throws Exception {
        fence.close();
        on.close();
        assertEquals("0", sql(HELD));
        admin.close();
    }

    /** Until the program commits the server keeps the lease, and if it rolls back it lives on. */
    @Test
    void theTransactionOfOthersIsTheirs() throws Exception {
        Lease lease = fence.lease("order:7", LONG.ttl(ofSeconds(9)));
        sql(on, "BEGIN");
        assertEquals(1, lease.guard(on, () -> on.createStatement().executeUpdate(PAY)));
        assertEquals("new", sql(STATUS));
        assertTrue(on.getAutoCommit());
        sql(on, "COMMIT");
        assertEquals("paid", sql(STATUS));
        on.setAutoCommit(false);
        lease.guardAndRelease(on, () -> sql(on, "DELETE FROM orders WHERE id = 7"));
        on.rollback();
        Thread.sleep(2000);
        assertTrue(lease.isHeld());
        assertEquals("1 paid", sql("SELECT (%s) || ' ' || (%s)".formatted(HELD, STATUS)));
        lease.guardAndRelease(on, () -> {});
        on.commit();
        comesTrue(() -> !lease.isHeld());
        assertEquals(Reason.RELEASED, assertThrows(LeaseLost.class, lease::check).reason());
    }

    @Test
    void aRefusalIsATypeHoweverDeepItIsWrapped() throws Exception {
        Lease lease = fence.lease("other", LONG);
        Statement batch = on.createStatement();
        batch.addBatch(PAY);
        FutureTask<int[]> wraps = new FutureTask<>(batch::executeBatch);
        Holding.Step<Exception> work =
                () -> {
                    wraps.run();
                    wraps.get();
                };
        Refused refused = assertThrows(Refused.class, () -> lease.guard(on, work));
        assertEquals("PF004", refused.sqlState());
        assertTrue(refused.detail().replace(" ", "").contains("\"lease\":\"order:7\""));
        assertNotNull(refused.hint());
        assertInstanceOf(ExecutionException.class, refused.getCause());
    }

    /** As drivers before 42.7 do on Java 24 and newer. The connection is closed, too. */
    @Test
    void aLossEndsAStatementOfADriverThatCannotAbort() throws Exception {
        CompletableFuture<Boolean> closed = new CompletableFuture<>();
        BaseConnection real = on.unwrap(BaseConnection.class);
        BaseConnection fails = instead(BaseConnection.class, real, "abort", Tests::fails);
        BaseConnection closes =
                instead(BaseConnection.class, fails, "close", () -> closed.complete(true));
        Connection wrapped = instead(Connection.class, on, "unwrap", () -> closes);
        sql(on, "SET client_connection_check_interval = 100");
        Lease lease = fence.lease("order:7", LONG.atMost(ofSeconds(2)));
        Executable hangs = () -> lease.guard(wrapped, () -> sql(on, "SELECT pg_sleep(60)"));
        assertEquals(Reason.AT_MOST, assertThrows(LeaseLost.class, hangs).reason());
        assertEquals(List.of("order:7"), lease.lost().get(10, SECONDS).names());
        assertTrue(closed.get(10, SECONDS));
        told(LeaseLost.class, "^the lease order:7 is lost .at_most.$", lease::close);
    }

    @Test
    void whatAGuardRefusesAndUndoes() throws Exception {
        Lease lease = fence.lease("order:7", LONG);
        Connection stubborn =
                instead(Connection.class, as("postgres"), "setAutoCommit", () -> null);
        Connection foreign = instead(Connection.class, on, "isWrapperFor", () -> false);
        told(WRONG, "autocommit", () -> lease.guard(stubborn, () -> fail("it began")));
        told(WRONG, "to PostgreSQL", () -> lease.guard(foreign, () -> fail("it began")));
        told(WRONG, "to PostgreSQL", () -> lease.guard(null, () -> fail("it began")));
        told(WRONG, "at least one", () -> fence.guard(on, List.of(), () -> fail("it began")));
        // That the lease is gone is no fault of the connection; a rollback that fails ends it.
        for (int round = 0; round < 20; round++) {
            Lease gone = fence.lease("job", LONG);
            sql("SELECT lease_revoke('job')");
            assertThrows(FenceException.class, () -> gone.guard(on, () -> fail("it began")));
            assertThrows(LeaseLost.class, gone::close);
            assertEquals("1", sql(on, "SELECT 1"));
        }
        Connection failing = instead(Connection.class, on, "rollback", Tests::fails);
        Executable divides = () -> lease.guard(failing, () -> sql(on, "SELECT 1 / 0"));
        told(SQLException.class, "division by zero", divides);
        comesTrue(on::isClosed);
    }

    @Test
    void whatAFenceIsMadeFrom() throws Exception {
        PGSimpleDataSource source = new PGSimpleDataSource();
        source.setURL(URL);
        opens(new Fence(URL));
        opens(new Fence(ADDRESS));
        opens(new Fence(ADDRESS.replace("//", "//postgres:s%40cret@")));
        opens(new Fence(source));
        opens(new Fence(source::getConnection));
        opens(new Fence(URL).schema("public"));
        on.setAutoCommit(false);
        opens(new Fence(() -> on));
        for (String url : Arrays.asList("mysql://me:secret@host/x", "jdbc:h2:mem", "shop", null)) {
            told(WRONG, "^((?!secret).)*$", () -> new Fence(url));
        }
        Connection foreign = instead(Connection.class, on, "isWrapperFor", () -> false);
        told(WRONG, "to PostgreSQL", () -> opens(new Fence(() -> foreign)));
    }

    /** An interrupt neither ends a release nor gets lost. */
    private static void opens(Fence made) throws Exception {
        try (made;
                Lease lease = made.lease("job", LONG.session())) {
            assertTrue(lease.isHeld());
            Thread.currentThread().interrupt();
        }
        assertTrue(Thread.interrupted());
    }

    /** It was not the server. */
    @Test
    void aPoolThatIsExhaustedIsNamed() throws Exception {
        CompletableFuture<Connection> next = new CompletableFuture<>();
        try (Fence exhausted = new Fence(next::get)) {
            Executable lease = () -> exhausted.lease("job", SHORT);
            told(NoConnection.class, "no connection came .*if it is a pool", lease);
        }
        Connection late = as("postgres");
        next.complete(late);
        comesTrue(late::isClosed);
    }

    @Test
    void whatIsWrongIsNamed() throws Exception {
        told(WRONG, "ttl", () -> new Options().ttl(ofMillis(99)));
        told(WRONG, "wait", () -> new Options().waitUpTo(ofSeconds(-1)));
        told(WRONG, "at most", () -> new Options().atMost(ZERO));
        told(WRONG, "several", () -> fence.lease(List.of("a", "b"), LONG.shared()));
        told(NullPointerException.class, "the name", () -> fence.lease((String) null));
        told(Refused.class, "512 bytes", () -> fence.lease("x".repeat(600)));
        told(Refused.class, "reclaim", () -> fence.lease("job", LONG.reclaim()));
        Options one = LONG.metadata("{\"run\": 7}");
        assertNotSame(one, one.holder("me"));
        fence.lease("x", one);
        assertEquals("{\"run\": 7}", sql("SELECT metadata FROM fence.leases WHERE name = 'x'"));
    }

    @Test
    void byWhomItIsTakenAndWhatItWaitsFor() throws Exception {
        fence.lease("job", LONG.holder("me"));
        Executable job = () -> fence.lease("job"), open = () -> fence.lease("open");
        LeaseTaken taken = told(LeaseTaken.class, "job is taken by me, for [23].. s at the", job);
        assertEquals("me, ttl", taken.holder() + ", " + taken.waitsFor());
        sql(on, "BEGIN; SELECT lease_acquire('open', ttl => '1 s')");
        told(LeaseTaken.class, "not committed", open);
        sql(on, "COMMIT; BEGIN");
        sql(on, "SELECT lease_guard('open', first_token), pg_sleep(1.1) FROM lease_info('open')");
        assertNull(told(LeaseTaken.class, "until a transaction ends", open).remaining());
    }

    @Test
    void aRoleThatMayNotIsToldTheWayOut() throws Exception {
        told(NotInstalled.class, "search_path", () -> opens(new Fence(URL).schema("else\"where")));
        sql("CREATE ROLE login_1 LOGIN; CREATE ROLE login_2 LOGIN; SELECT fence_grant('login_1')");
        Iterator<String> logins = List.of("login_1", "login_2", "login_2").iterator();
        Fence other = new Fence(() -> as(logins.next()));
        Lease rotated = other.lease("job", new Options().ttl(ofSeconds(3)));
        Holding adopted = other.adopted("x", 7);
        try (Connection own = as("login_2")) {
            Class<NotGranted> may = NotGranted.class;
            told(may, "fence_grant.'login_2'.", () -> rotated.guard(own, () -> {}));
            sql("SELECT fence_grant('login_2')");
            Options columns = SHORT.columns("fence", "till");
            Executable row = () -> other.keepRow("runs", Map.of("id", 7), 7, columns);
            told(may, "needs SELECT and UPDATE", row);
            told(may, "act as one role", () -> rotated.guard(own, () -> {}));
            told(may, "fence_grant.'login_2', 'adopter'", () -> adopted.guard(own, () -> {}));
        }
        sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'login_1'");
        comesTrue(() -> !rotated.isHeld());
        told(LeaseLost.class, "lost .refused.: .* act as one role", rotated::check);
        other.close();
        sql("SELECT lease_revoke('job'), fence_revoke('login_1'), fence_revoke('login_2')");
        sql("DROP ROLE login_1, login_2");
    }

    private static Connection as(String role) throws SQLException {
        return DriverManager.getConnection(URL.replace("user=postgres", "user=" + role));
    }

    @Test
    void aRowIsKeptAndFinished() throws Exception {
        Options ask = new Options().ttl(ofSeconds(3)).columns("fence", "till");
        Map<String, ?> key = Map.of("id", 7, "the \"one", "me,\n\"\\");
        long token = claimed();
        Lease lease = fence.keepRow("public.runs", key, token, ask);
        assertEquals("public.runs " + token, lease.names().get(0) + " " + lease.token());
        Thread.sleep(4000);
        assertEquals("t", sql("SELECT till > now() FROM runs"));
        // Its own transaction has the row locked when it is due.
        lease.guard(on, () -> Thread.sleep(2000));
        lease.check();
        lease.guardAndRelease(on, () -> sql(on, "UPDATE runs SET state = 'done'"));
        assertEquals("done", sql("SELECT state FROM runs WHERE till IS NULL"));
        assertFalse(lease.isHeld());
        assertThrows(LeaseLost.class, () -> fence.keepRow("runs", key, token, ask));
        Lease given = fence.keepRow("runs", key, claimed(), ask);
        sql("UPDATE runs SET till = NULL, fence = fence");
        assertThrows(LeaseLost.class, () -> given.guard(on, () -> fail("it began")));
        given.close();
        fence.keepRow("runs", key, claimed(), ask).close();
        assertEquals("t", sql("SELECT till IS NULL FROM runs"));
    }

    private long claimed() throws SQLException {
        String claim = "UPDATE runs SET till = clock_timestamp() + '2 s' RETURNING fence";
        return Long.parseLong(sql(claim));
    }

    @Test
    void whatIsWrongWithARowIsItsCallers() throws Exception {
        Map<String, ?> key = Map.of("id", 7);
        told(WRONG, "a key", () -> fence.keepRow("runs", Map.of(), 7, SHORT));
        told(SQLException.class, "held_until", () -> fence.keepRow("runs", key, 7, SHORT));
        told(SQLException.class, "nowhere", () -> fence.keepRow("nowhere.runs", key, 7, SHORT));
        Fence away = new Fence(URL.replace("?", "_nowhere?"));
        told(NoConnection.class, "not exist", () -> away.keepRow("runs", key, 7, SHORT));
        Fence elsewhere = new Fence(URL).schema("pg_catalog");
        told(NotInstalled.class, "search_path", () -> elsewhere.keepRow("runs", key, 7, SHORT));
    }

    @Test
    void whatCanNeverBeOpenedIsToldAtOnce() throws Exception {
        neverOpens("SSL", new Fence(URL + "&sslmode=require"));
        neverOpens("does not exist", new Fence(URL.replace("?", "_nowhere?")));
        neverOpens("planted", new Fence((Callable<Connection>) Tests::fails));
        Fence away = new Fence("postgresql://127.0.0.1:1/x");
        Executable waits = () -> away.lease("job", SHORT.waitUpTo(ofSeconds(1)));
        NoConnection nobody = told(NoConnection.class, "refused", waits);
        assertEquals("08001", ((SQLException) nobody.getCause()).getSQLState());
    }

    private static void neverOpens(String words, Fence fence) {
        CountDownLatch stop = new CountDownLatch(1);
        Executable lease = () -> fence.lease("job", SHORT.waitUpTo(ofMinutes(1)));
        Executable lead = () -> fence.lead("job", ofSeconds(1), stop, leads -> {});
        assertTimeoutPreemptively(ofSeconds(5), () -> told(NoConnection.class, words, lease));
        assertTimeoutPreemptively(ofSeconds(5), () -> told(NoConnection.class, words, lead));
    }

    @Test
    void whatALeaderTellsAndHowItIsStopped() throws Exception {
        List<String> kinds = new CopyOnWriteArrayList<>();
        CountDownLatch stop = new CountDownLatch(1);
        fence.onEvent(
                event -> {
                    kinds.add(event.kind().toString());
                    throw new IllegalStateException("which takes nothing from the lease");
                });
        Fence.Leading<Exception> work =
                lease -> {
                    if (!kinds.contains("INTERRUPTED")) {
                        sql("SELECT lease_revoke('job')");
                        lease.lost().get();
                    }
                    lease.check();
                };
        assertTrue(fence.lead("job", ofSeconds(3), stop, work));
        // The last event is told while `lead` returns.
        comesTrue(() -> kinds.contains("RELEASED"));
        kinds.remove("RENEWED");
        assertEquals("[ACQUIRED, LOST, INTERRUPTED, ACQUIRED, RELEASED]", kinds.toString());
        Lease held = fence.lease("job", LONG.atMost(ofMillis(500)));
        held.lost().thenRun(stop::countDown);
        assertFalse(fence.lead("job", ofSeconds(3), stop, leads -> {}));
        assertThrows(LeaseLost.class, held::close);
    }

    /** A loss is told by whoever looks. */
    @Test
    void aThreadThatCannotBeStartedIsTold() throws Exception {
        ThreadFactory starts = Connections.THREADS.getThreadFactory();
        ThreadFactory none =
                work -> {
                    throw new OutOfMemoryError("unable to create native thread (planted)");
                };
        comesTrue(() -> Connections.THREADS.getPoolSize() == 0);
        try {
            // No thread that has worked just before takes the next work.
            Connections.THREADS.setKeepAliveTime(1, MILLISECONDS);
            Connections.THREADS.setThreadFactory(none);
            told(FenceException.class, "thread", () -> fence.lease("job"));
            Connections.THREADS.setThreadFactory(starts);
            Lease lease = fence.lease("job", SHORT);
            Connections.THREADS.setThreadFactory(none);
            assertEquals(Reason.DEADLINE, lease.lost().get(20, SECONDS).reason());
        } finally {
            Connections.THREADS.setThreadFactory(starts);
            Connections.THREADS.setKeepAliveTime(1, SECONDS);
        }
        sql("SELECT lease_revoke('job')");
    }

    // Shared by the tests

    /** The error, in whose message the pattern is found. */
    private static <T extends Throwable> T told(Class<T> type, String pattern, Executable body) {
        T error = assertThrows(type, body);
        assertTrue(error.getMessage().matches("(?s).*" + pattern + ".*"), error.toString());
        return error;
    }

    /** The same, but for one method. */
    private static <T> T instead(Class<T> type, T real, String name, Callable<?> does) {
        InvocationHandler handler =
                (self, method, arguments) -> {
                    try {
                        return method.getName().equals(name)
                                ? does.call()
                                : method.invoke(real, arguments);
                    } catch (InvocationTargetException error) {
                        throw error.getCause();
                    }
                };
        ClassLoader loader = Tests.class.getClassLoader();
        return type.cast(Proxy.newProxyInstance(loader, new Class<?>[] {type}, handler));
    }

    private static <T> T fails() {
        throw new IllegalStateException("planted");
    }

    private String sql(String text) throws SQLException {
        return sql(admin, text);
    }

    /** Its first value, if it has one. */
    private static String sql(Connection on, String text) throws SQLException {
        try (Statement statement = on.createStatement()) {
            boolean hasRows = statement.execute(text) && statement.getResultSet().next();
            return hasRows ? statement.getResultSet().getString(1) : null;
        }
    }

    private static void comesTrue(Callable<Boolean> check) throws Exception {
        for (int round = 0; !check.call(); round++) {
            assertTrue(round < 600, () -> "it does not come true: " + Thread.getAllStackTraces());
            Thread.sleep(50);
        }
    }
}
