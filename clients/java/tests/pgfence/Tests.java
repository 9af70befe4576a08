package pgfence;

import static org.junit.jupiter.api.Assertions.*;

import static java.time.Duration.*;

import org.junit.jupiter.api.*;
import org.junit.jupiter.api.function.Executable;
import org.postgresql.ds.PGSimpleDataSource;

import pgfence.FenceException.*;

import java.lang.reflect.*;
import java.sql.*;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.*;
import java.util.logging.*;

/**
 * What the vectors and the scenarios of all clients do not show: the shape of the API, and what is
 * Java's own. {@code DATABASE_URL} names a database with the extension that is otherwise of no use:
 * tables are made and dropped in it.
 */
@SuppressWarnings("try")
@Timeout(120)
final class Tests {
    private static final String ADDRESS = System.getenv("DATABASE_URL"), URL = "jdbc:" + ADDRESS;
    private static final Duration TTL = ofSeconds(3);
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
        ForkJoinPool other = ForkJoinPool.commonPool();
        Executable guard = () -> lease.guard(on, () -> other.submit(batch::executeBatch).get());
        Refused refused = assertThrows(Refused.class, guard);
        assertEquals("PF004", refused.sqlState());
        assertTrue(refused.detail().replace(" ", "").contains("\"lease\":\"order:7\""));
        assertNotNull(refused.hint());
        assertInstanceOf(ExecutionException.class, refused.getCause());
    }

    @Test
    void whatAGuardRefusesAndUndoes() throws Exception {
        Lease lease = fence.lease("order:7", LONG);
        Connection stubborn = instead(as("postgres"), "setAutoCommit", () -> null);
        Connection foreign = instead(on, "isWrapperFor", () -> false);
        told(WRONG, "autocommit", () -> lease.guard(stubborn, () -> fail("it began")));
        told(WRONG, "to PostgreSQL", () -> lease.guard(foreign, () -> fail("it began")));
        told(WRONG, "at least one", () -> fence.guard(on, List.of(), () -> fail("it began")));
        // That the lease is gone is no fault of the connection; a rollback that fails ends it.
        Lease gone = fence.lease("job", LONG);
        sql("SELECT lease_revoke('job')");
        assertThrows(FenceException.class, () -> gone.guard(on, () -> fail("it began")));
        assertThrows(LeaseLost.class, gone::close);
        assertEquals("1", sql(on, "SELECT 1"));
        Connection failing = instead(on, "rollback", Tests::fails);
        Executable divides = () -> lease.guard(failing, () -> sql(on, "SELECT 1 / 0"));
        told(SQLException.class, "division by zero", divides);
        comesTrue(on::isClosed);
    }

    /** Whatever the driver sends by itself. */
    @Test
    void theTransactionOfOthersSurvivesAGuardThatFails() throws Exception {
        Lease lease = fence.lease("order:7", LONG);
        for (String option : List.of("autosave=conservative", "prepareThreshold=-1")) {
            try (Connection other = DriverManager.getConnection(URL + '&' + option)) {
                other.setAutoCommit(false);
                Executable divides = () -> lease.guard(other, () -> sql(other, "SELECT 1 / 0"));
                told(SQLException.class, "division by zero", divides);
                assertNotNull(sql(other, "SELECT pg_sleep(0.3)"), option);
            }
        }
    }

    /** As of a deferred constraint. */
    @Test
    void anErrorOfTheCommitIsTheWorks() throws Exception {
        String late =
                """
                CREATE OR REPLACE FUNCTION late() RETURNS trigger LANGUAGE plpgsql
                    AS 'BEGIN RAISE SQLSTATE ''%s''; END';
                DROP TRIGGER IF EXISTS late ON orders;
                CREATE CONSTRAINT TRIGGER late AFTER UPDATE ON orders
                    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION late();
                """;
        Lease lease = fence.lease("order:7", LONG);
        for (String state : List.of("42501", "22P02", "42883")) {
            sql(late.formatted(state));
            Executable pays = () -> lease.guard(on, () -> sql(on, PAY));
            assertEquals(state, assertThrows(SQLException.class, pays).getSQLState());
        }
        assertEquals("new", sql(STATUS));
    }

    @Test
    void whatAFenceIsMadeFrom() throws Exception {
        PGSimpleDataSource source = new PGSimpleDataSource();
        source.setURL(URL);
        opens(new Fence(URL));
        opens(new Fence(ADDRESS));
        opens(new Fence(ADDRESS.replace("//", "//postgres:s%40cret@")));
        Driver driver = DriverManager.getDriver(URL);
        DriverManager.deregisterDriver(driver);
        opens(new Fence(URL));
        DriverManager.registerDriver(driver);
        opens(new Fence(source));
        opens(new Fence(source::getConnection));
        opens(new Fence(URL).schema("public"));
        on.setAutoCommit(false);
        opens(new Fence(() -> on));
        for (String url : Arrays.asList("mysql://me:secret@host/x", "jdbc:h2:mem", "shop", null)) {
            told(WRONG, "^((?!secret).)*$", () -> new Fence(url));
        }
        String plus = ADDRESS.replace("//", "//a+b@").replace("user=postgres", "");
        told(NoConnection.class, "role \"a[+]b\" does not", () -> opens(new Fence(plus)));
        Connection real = as("postgres");
        Connection foreign = instead(real, "isWrapperFor", () -> false);
        told(WRONG, "to PostgreSQL", () -> opens(new Fence(() -> foreign)));
        comesTrue(real::isClosed);
    }

    @Test
    void aSourceThatFailsOnceIsAskedAgain() throws Exception {
        Queue<Callable<Connection>> sources = new ConcurrentLinkedQueue<>();
        sources.add(() -> on);
        sources.add(
                () -> {
                    throw new IllegalArgumentException("planted");
                });
        Fence other = new Fence(() -> sources.isEmpty() ? as("postgres") : sources.remove().call());
        Lease lease = other.lease("job", LONG.ttl(TTL));
        on.close();
        comesTrue(sources::isEmpty);
        Thread.sleep(1000);
        lease.close();
        other.close();
    }

    /** An interrupt neither ends a release nor gets lost. */
    private static void opens(Fence made) throws Exception {
        try (made;
                Lease lease = made.lease("job", LONG.session())) {
            assertTrue(lease.isHeld());
            told(WRONG, "own fence", () -> new Fence(URL).guard(null, List.of(lease), () -> {}));
            Thread.currentThread().interrupt();
        }
        assertTrue(Thread.interrupted());
    }

    @Test
    void whatIsWrongIsNamed() throws Exception {
        told(WRONG, "ttl", () -> new Options().ttl(ofMillis(99)));
        told(WRONG, "wait", () -> new Options().waitUpTo(ofSeconds(-1)));
        told(WRONG, "at most", () -> new Options().atMost(ZERO));
        told(WRONG, "several", () -> fence.lease(List.of("a", "b"), LONG.shared()));
        told(WRONG, "a key", () -> fence.keepRow("runs", Map.of(), 7, SHORT));
        Map<String, ?> key = Map.of("id", 7);
        told(SQLException.class, "held_until", () -> fence.keepRow("runs", key, 7, SHORT));
        told(SQLException.class, "nowhere", () -> fence.keepRow("nowhere.runs", key, 7, SHORT));
        Fence elsewhere = new Fence(URL).schema("pg_catalog");
        told(NotInstalled.class, "search_path", () -> elsewhere.keepRow("runs", key, 7, SHORT));
        told(NullPointerException.class, "the name", () -> fence.lease((String) null));
        for (Duration ever : List.of(ofMillis(Long.MAX_VALUE), ofSeconds(Long.MAX_VALUE))) {
            fence.lease("y" + ever, LONG.waitUpTo(ever).atMost(ever)).check();
            told(Refused.class, "out of range", () -> fence.lease("job", LONG.ttl(ever)));
        }
        told(Refused.class, "512 bytes", () -> fence.lease("x".repeat(600)));
        told(Refused.class, "reclaim", () -> fence.lease("job", LONG.reclaim()));
        fence.lease("x", LONG.metadata("{\"run\": 7}"));
        assertEquals("{\"run\": 7}", sql("SELECT metadata FROM fence.leases WHERE name = 'x'"));
    }

    @Test
    void byWhomItIsTakenAndWhatItWaitsFor() throws Exception {
        fence.lease("job", LONG.holder("me"));
        Executable job = () -> fence.lease("job"), open = () -> fence.lease("open");
        told(LeaseTaken.class, "job is taken by me, for [23].. s at the", job);
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
        Lease rotated = other.lease("job", new Options().ttl(TTL));
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
        Options ask = new Options().ttl(TTL).columns("fence", "till");
        Map<String, ?> key = Map.of("id", 7, "the \"one", "me,\n\"\\");
        long token = claimed();
        Lease lease = fence.keepRow("public.runs", key, token, ask);
        assertEquals("[\"\\u005cx00ff\"]", Statements.row(List.of(new byte[] {0, -1})));
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
    void whatCanNeverBeOpenedIsToldAtOnce() throws Exception {
        Map<String, Fence> fences =
                Map.of(
                        "SSL", new Fence(URL + "&sslmode=require"),
                        "does not exist", new Fence(URL.replace("?", "_nowhere?")),
                        "planted", new Fence((Callable<Connection>) Tests::fails));
        Class<NoConnection> none = NoConnection.class;
        Map<String, ?> key = Map.of("id", 7);
        Options waits = SHORT.waitUpTo(ofMinutes(9));
        fences.forEach((words, one) -> told(none, words, () -> one.lease("job", waits)));
        fences.forEach((words, one) -> told(none, words, () -> one.keepRow("x", key, 7, SHORT)));
        CountDownLatch stop = new CountDownLatch(1);
        Fence.Leading<Exception> work = lease -> fail("it leads");
        fences.forEach((words, one) -> told(none, words, () -> one.lead("x", TTL, stop, work)));
        Fence away = new Fence("postgresql://127.0.0.1:1/x");
        Executable outage = () -> away.lease("job", SHORT.waitUpTo(ofSeconds(1)));
        NoConnection nobody = told(none, "refused", outage);
        assertEquals("08001", ((SQLException) nobody.getCause()).getSQLState());
        // If a pool is exhausted, it was not the server.
        CompletableFuture<Connection> next = new CompletableFuture<>();
        Fence pool = new Fence(next::get);
        told(none, "no connection came .*a pool", () -> pool.lease("job", SHORT));
        next.complete(on);
        comesTrue(on::isClosed);
    }

    @Test
    void whatALeaderTellsAndHowItIsStopped() throws Exception {
        List<String> kinds = new CopyOnWriteArrayList<>();
        CountDownLatch stop = new CountDownLatch(1);
        fence.onEvent(event -> kinds.add(event.kind().toString()));
        Fence.Leading<Exception> work =
                lease -> {
                    if (!kinds.contains("INTERRUPTED")) {
                        sql("SELECT lease_revoke('job')");
                        lease.lost().get();
                    }
                    lease.check();
                };
        assertTrue(fence.lead("job", TTL, stop, work));
        // The last event is told while `lead` returns.
        comesTrue(() -> kinds.contains("RELEASED"));
        kinds.remove("RENEWED");
        assertEquals("[ACQUIRED, LOST, INTERRUPTED, ACQUIRED, RELEASED]", kinds.toString());
        Lease held = fence.lease("job", LONG.atMost(ofMillis(500)));
        held.lost().thenRun(stop::countDown);
        assertFalse(fence.lead("job", TTL, stop, leads -> {}));
        assertThrows(LeaseLost.class, held::close);
    }

    @Test
    void aThreadThatCannotBeStartedIsTold() throws Exception {
        ThreadFactory starts = Connections.THREADS.getThreadFactory();
        ThreadFactory none =
                work -> {
                    throw new OutOfMemoryError("planted");
                };
        // No thread that has worked just before takes the next work.
        comesTrue(() -> Connections.THREADS.getPoolSize() == 0);
        Connections.THREADS.setThreadFactory(none);
        told(FenceException.class, "thread", () -> fence.lease("job"));
        Connections.THREADS.setThreadFactory(starts);
        fence.lease("job").close();
    }

    @Test
    void aLogThatHangsHoldsUpNoVerbAndNoHeartbeat() throws Exception {
        CompletableFuture<Boolean> isHeld = new CompletableFuture<>();
        CompletableFuture<Void> ends = new CompletableFuture<>();
        Lease kept = fence.lease("kept", SHORT);
        Lease late = fence.lease("late", LONG.atMost(TTL.plusSeconds(2)));
        Lease lease = fence.lease("job", LONG.atMost(TTL));
        Handler asks =
                new StreamHandler() {
                    @Override
                    public void publish(LogRecord line) {
                        isHeld.completeAsync(lease::isHeld).join();
                        ends.join();
                    }
                };
        Logger.getLogger("pgfence").addHandler(asks);
        assertFalse(isHeld.get(30, TimeUnit.SECONDS));
        assertEquals(Reason.AT_MOST, late.lost().get(30, TimeUnit.SECONDS).reason());
        kept.check();
        ends.complete(null);
        Logger.getLogger("pgfence").removeHandler(asks);
        assertThrows(LeaseLost.class, lease::close);
        assertThrows(LeaseLost.class, late::close);
    }

    @Test
    void aListenerAndALogThatFailHoldUpNoVerb() throws Exception {
        Handler failing =
                new StreamHandler() {
                    @Override
                    public void publish(LogRecord line) {
                        fails();
                    }
                };
        Logger.getLogger("pgfence").addHandler(failing);
        Class<IllegalStateException> wrong = IllegalStateException.class;
        Semaphore told = new Semaphore(0);
        fence.onEvent(
                event -> {
                    told(wrong, "may not acquire", () -> fence.lease("other"));
                    told.release();
                    fails();
                });
        Lease lost = fence.lease("job", LONG.atMost(ofMillis(1)));
        lost.lost().get();
        assertThrows(LeaseLost.class, lost::close);
        fence.lease("job").close();
        comesTrue(() -> told.availablePermits() == 4);
        Logger.getLogger("pgfence").removeHandler(failing);
    }

    // Shared by the tests

    /** The error, in whose message the pattern is found. */
    private static <T extends Throwable> T told(Class<T> type, String pattern, Executable body) {
        T error = assertThrows(type, body);
        assertTrue(error.getMessage().matches("(?s).*" + pattern + ".*"), error.toString());
        return error;
    }

    /** The same, but for one method. */
    private static Connection instead(Connection real, String name, Callable<?> does) {
        InvocationHandler handler =
                (self, method, arguments) -> {
                    try {
                        boolean isIt = method.getName().equals(name);
                        return isIt ? does.call() : method.invoke(real, arguments);
                    } catch (InvocationTargetException error) {
                        throw error.getCause();
                    }
                };
        Class<?>[] types = {Connection.class};
        return (Connection) Proxy.newProxyInstance(Tests.class.getClassLoader(), types, handler);
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
