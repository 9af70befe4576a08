package pgfence;

import static org.junit.jupiter.api.Assertions.*;

import static java.time.Duration.*;

import org.junit.jupiter.api.*;
import org.junit.jupiter.api.function.Executable;
import org.postgresql.ds.PGSimpleDataSource;
import org.postgresql.util.*;

import pgfence.FenceException.*;

import java.lang.reflect.*;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.sql.*;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.*;
import java.util.concurrent.locks.*;
import java.util.logging.*;

/**
 * Tests what the vectors and the scenarios of all clients do not: the API, and what is particular
 * to Java. {@code DATABASE_URL} names a database with the extension for these tests alone, as they
 * create and drop tables in it.
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

    /** The lease is held until the program commits, and still held if it rolls back. */
    @Test
    void theProgramCommitsItsOwnTransaction() throws Exception {
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
        eventually(() -> !lease.isHeld());
        assertEquals(Reason.RELEASED, assertThrows(LeaseLost.class, lease::check).reason());
    }

    @Test
    void aWrappedRefusalIsTyped() throws Exception {
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
        // What the program makes of it is the program's own.
        Exception own = new IllegalStateException(refused);
        Executable fails =
                () ->
                        lease.guard(
                                on,
                                () -> {
                                    throw own;
                                });
        assertSame(own, assertThrows(IllegalStateException.class, fails));
    }

    @Test
    void aGuardRefusesWrongConnectionsAndRollsBack() throws Exception {
        Lease lease = fence.lease("order:7", LONG);
        Connection stubborn = withMethod(as("postgres"), "setAutoCommit", () -> null);
        Connection foreign = withMethod(on, "isWrapperFor", () -> false);
        raises(WRONG, "autocommit", () -> lease.guard(stubborn, () -> fail("it began")));
        raises(WRONG, "to PostgreSQL", () -> lease.guard(foreign, () -> fail("it began")));
        raises(WRONG, "at least one", () -> fence.guard(on, List.of(), () -> fail("it began")));
        // A lease that is gone does not end the connection; a rollback that fails does.
        Lease gone = fence.lease("job", LONG);
        sql("SELECT lease_revoke('job')");
        assertThrows(FenceException.class, () -> gone.guard(on, () -> fail("it began")));
        assertThrows(LeaseLost.class, gone::close);
        assertEquals("1", sql(on, "SELECT 1"));
        Connection failing = withMethod(on, "rollback", Tests::fails);
        Executable divides = () -> lease.guard(failing, () -> sql(on, "SELECT 1 / 0"));
        raises(SQLException.class, "division by zero", divides);
        eventually(on::isClosed);
        raises(TransactionLost.class, "ended", () -> lease.guard(on, () -> fail("it began")));
        assertTrue(lease.isHeld());
    }

    /** The driver may send savepoints, and describe statements before it executes them. */
    @Test
    void theTransactionOfOthersSurvivesAGuardThatFails() throws Exception {
        Lease lease = fence.lease("order:7", LONG);
        for (String option : List.of("autosave=conservative", "prepareThreshold=-1")) {
            try (Connection other = DriverManager.getConnection(URL + '&' + option)) {
                other.setAutoCommit(false);
                Executable divides = () -> lease.guard(other, () -> sql(other, "SELECT 1 / 0"));
                raises(SQLException.class, "division by zero", divides);
                assertNotNull(sql(other, "SELECT pg_sleep(0.3)"), option);
            }
        }
    }

    /** A deferred constraint fails in the commit. */
    @Test
    void anErrorOfTheCommitIsAnErrorOfTheWork() throws Exception {
        String late =
                """
                CREATE OR REPLACE FUNCTION late() RETURNS trigger LANGUAGE plpgsql
                    AS 'BEGIN RAISE SQLSTATE ''%s''; END';
                DROP TRIGGER IF EXISTS late ON orders;
                CREATE CONSTRAINT TRIGGER late AFTER UPDATE ON orders
                    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION late();
                """;
        Lease lease = fence.lease("order:7", LONG);
        for (String state : List.of("42501", "22012", "42883")) {
            sql(late.formatted(state));
            Executable pays = () -> lease.guard(on, () -> sql(on, PAY));
            assertEquals(state, assertThrows(SQLException.class, pays).getSQLState());
        }
        assertEquals("new", sql(STATUS));
    }

    /** A pooler may end a session with an SQLSTATE of its own. */
    @Test
    void aFatalErrorOfTheCommitIsInDoubt() throws Exception {
        Callable<?> ends =
                () -> {
                    String fields = "SFATAL\0CXX000\0Mno data from the node\0\0";
                    throw new PSQLException(new ServerErrorMessage(fields));
                };
        Lease lease = fence.lease("order:7", LONG);
        Connection ended = withMethod(on, "createStatement", ends);
        assertTrue(
                assertThrows(TransactionLost.class, () -> lease.guard(ended, () -> {})).inDoubt());
    }

    /** The session presents the token in all its transactions. */
    @Test
    void theEndOfATransactionIsNoticed() throws Exception {
        Lease lease = fence.lease("order:7", LONG);
        sql(on, "SET pg_fence.token = " + lease.token());
        Executable ends = () -> lease.guard(on, () -> sql(on, "ROLLBACK; BEGIN; " + PAY));
        assertTrue(assertThrows(TransactionLost.class, ends).inDoubt());
        assertEquals("new", sql(STATUS));
    }

    @Test
    void aFenceTakesUrlsDataSourcesAndFunctions() throws Exception {
        PGSimpleDataSource source = new PGSimpleDataSource();
        source.setURL(URL);
        works(new Fence(URL));
        works(new Fence(ADDRESS));
        works(new Fence(ADDRESS.replace("//", "//postgres:s%40cret@")));
        Driver driver = DriverManager.getDriver(URL);
        DriverManager.deregisterDriver(driver);
        works(new Fence(URL));
        DriverManager.registerDriver(driver);
        works(new Fence(source));
        works(new Fence(source::getConnection));
        works(new Fence(URL).schema("public"));
        on.setAutoCommit(false);
        works(new Fence(() -> on));
        for (String url : Arrays.asList("mysql://me:secret@host/x", "jdbc:h2:mem", "shop", null)) {
            raises(WRONG, "^((?!secret).)*$", () -> new Fence(url));
        }
        String plus = ADDRESS.replace("//", "//a+b@").replace("user=postgres", "");
        raises(NoConnection.class, "role \"a[+]b\" does not", () -> works(new Fence(plus)));
        Connection real = as("postgres");
        Connection foreign = withMethod(real, "isWrapperFor", () -> false);
        raises(WRONG, "to PostgreSQL", () -> works(new Fence(() -> foreign)));
        eventually(real::isClosed);
        Connection busy = as("postgres");
        sql(busy, "BEGIN");
        raises(WRONG, "in a transaction", () -> works(new Fence(() -> busy)));
        eventually(busy::isClosed);
    }

    /** The first host is silent, or refuses, or its name does not exist. */
    @Test
    void eachHostHasItsPartOfTheTime() throws Exception {
        try (ServerSocket silent = new ServerSocket(0, 9, InetAddress.getLoopbackAddress())) {
            String other = "127.0.0.1:" + silent.getLocalPort();
            for (String host : List.of(other, "127.0.0.1:1", "nowhere.invalid", "[::1]:1")) {
                try (Fence made = new Fence(URL.replace("//", "//" + host + ","))) {
                    made.lease("job", SHORT).close();
                }
            }
        }
    }

    @Test
    void aSourceThatFailsOnceIsTriedAgain() throws Exception {
        Queue<Callable<Connection>> sources = new ConcurrentLinkedQueue<>();
        sources.add(() -> on);
        sources.add(
                () -> {
                    throw new IllegalArgumentException("planted");
                });
        Fence other = new Fence(() -> sources.isEmpty() ? as("postgres") : sources.remove().call());
        Lease lease = other.lease("job", LONG.ttl(TTL));
        on.close();
        eventually(sources::isEmpty);
        Thread.sleep(1000);
        lease.close();
        other.close();
    }

    /** Checks that a fence works, and that an interrupt neither ends a release nor gets lost. */
    private static void works(Fence made) throws Exception {
        try (made;
                Lease lease = made.lease("job", LONG.session())) {
            assertTrue(lease.isHeld());
            raises(WRONG, "own fence", () -> new Fence(URL).guard(null, List.of(lease), () -> {}));
            Thread.currentThread().interrupt();
        }
        assertTrue(Thread.interrupted());
    }

    @Test
    void errorsNameTheWrongArgument() throws Exception {
        raises(WRONG, "ttl", () -> new Options().ttl(ofMillis(99)));
        raises(WRONG, "wait", () -> new Options().waitUpTo(ofSeconds(-1)));
        raises(WRONG, "at most", () -> new Options().atMost(ZERO));
        raises(WRONG, "several", () -> fence.lease(List.of("a", "b"), LONG.shared()));
        raises(WRONG, "a key", () -> fence.keepRow("runs", Map.of(), 7, SHORT));
        Map<String, ?> key = Map.of("id", 7);
        raises(SQLException.class, "held_until", () -> fence.keepRow("runs", key, 7, SHORT));
        raises(SQLException.class, "nowhere", () -> fence.keepRow("nowhere.runs", key, 7, SHORT));
        Fence elsewhere = new Fence(URL).schema("pg_catalog");
        raises(NotInstalled.class, "search_path", () -> elsewhere.keepRow("runs", key, 7, SHORT));
        raises(NullPointerException.class, "the name", () -> fence.lease((String) null));
        for (Duration endless : List.of(ofMillis(Long.MAX_VALUE), ofSeconds(Long.MAX_VALUE))) {
            fence.lease("y" + endless, LONG.waitUpTo(endless).atMost(endless)).check();
            raises(Refused.class, "out of range", () -> fence.lease("job", LONG.ttl(endless)));
        }
        raises(Refused.class, "512 bytes", () -> fence.lease("x".repeat(600)));
        raises(Refused.class, "reclaim", () -> fence.lease("job", LONG.reclaim()));
        fence.lease("x", LONG.metadata("{\"run\": 7}"));
        assertEquals("{\"run\": 7}", sql("SELECT metadata FROM fence.leases WHERE name = 'x'"));
    }

    @Test
    void leaseTakenNamesTheHolderAndWhatEndsIt() throws Exception {
        fence.lease("job", LONG.holder("me"));
        Executable job = () -> fence.lease("job"), open = () -> fence.lease("open");
        raises(LeaseTaken.class, "job is taken by me, for [23].. s at the", job);
        sql(on, "BEGIN; SELECT lease_acquire('open', ttl => '1 s')");
        raises(LeaseTaken.class, "not committed", open);
        sql(on, "COMMIT; BEGIN");
        sql(on, "SELECT lease_guard('open', first_token), pg_sleep(1.1) FROM lease_info('open')");
        assertNull(raises(LeaseTaken.class, "until a transaction ends", open).remaining());
    }

    @Test
    void notGrantedNamesTheRemedy() throws Exception {
        raises(
                NotInstalled.class,
                "search_path",
                () -> works(new Fence(URL).schema("else\"where")));
        sql(
                "CREATE ROLE login_1 LOGIN; CREATE ROLE \"Login 2\" LOGIN; SELECT"
                        + " fence_grant('login_1')");
        Iterator<String> logins = List.of("login_1", "Login 2", "Login 2").iterator();
        Fence other = new Fence(() -> as(logins.next()));
        Lease rotated = other.lease("job", new Options().ttl(TTL));
        Holding adopted = other.adopted("x", 7);
        try (Connection own = as("Login 2")) {
            Class<NotGranted> may = NotGranted.class;
            raises(may, "fence_grant.'.Login 2.'.", () -> rotated.guard(own, () -> {}));
            sql("SELECT fence_grant('\"Login 2\"')");
            Options columns = SHORT.columns("fence", "till");
            Executable row = () -> other.keepRow("runs", Map.of("id", 7), 7, columns);
            raises(may, "needs SELECT and UPDATE", row);
            raises(may, "act as one role", () -> rotated.guard(own, () -> {}));
            raises(may, "fence_grant.'.Login 2.', 'adopter'", () -> adopted.guard(own, () -> {}));
        }
        sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'login_1'");
        eventually(() -> !rotated.isHeld());
        raises(LeaseLost.class, "lost .refused.: .* act as one role", rotated::check);
        other.close();
        sql("SELECT lease_revoke('job'), fence_revoke('login_1'), fence_revoke('\"Login 2\"')");
        sql("DROP ROLE login_1, \"Login 2\"");
    }

    private static Connection as(String role) throws SQLException {
        return DriverManager.getConnection(URL.replace("user=postgres", "user=" + role));
    }

    @Test
    void aRowLeaseIsRenewedAndFinished() throws Exception {
        Options options = new Options().ttl(TTL).columns("fence", "till");
        Map<String, ?> key = Map.of("id", 7, "the \"one", "me,\n\"\\");
        long token = claim();
        Lease lease = fence.keepRow("public.runs", key, token, options);
        assertEquals("[\"\\u005cx00ff\"]", Statements.rowName(List.of(new byte[] {0, -1})));
        String date = Statements.rowName(List.of(new java.util.Date(7)));
        assertEquals("[\"1970-01-01T00:00:00.007Z\"]", date);
        assertEquals("public.runs " + token, lease.names().get(0) + " " + lease.token());
        Thread.sleep(4000);
        assertEquals("t", sql("SELECT till > now() FROM runs"));
        // The lease's own transaction has the row locked when its renewal is due.
        lease.guard(on, () -> Thread.sleep(2000));
        lease.check();
        lease.guardAndRelease(on, () -> sql(on, "UPDATE runs SET state = 'done'"));
        assertEquals("done", sql("SELECT state FROM runs WHERE till IS NULL"));
        assertFalse(lease.isHeld());
        assertThrows(LeaseLost.class, () -> fence.keepRow("runs", key, token, options));
        Lease given = fence.keepRow("runs", key, claim(), options);
        sql("UPDATE runs SET till = NULL, fence = fence");
        assertThrows(LeaseLost.class, () -> given.guard(on, () -> fail("it began")));
        given.close();
        fence.keepRow("runs", key, claim(), options).close();
        assertEquals("t", sql("SELECT till IS NULL FROM runs"));
    }

    private long claim() throws SQLException {
        String sql = "UPDATE runs SET till = clock_timestamp() + '2 s' RETURNING fence";
        return Long.parseLong(sql(sql));
    }

    @Test
    void misconfiguredConnectionsFailAtOnce() throws Exception {
        Map<String, Fence> fences =
                Map.of(
                        "SSL", new Fence(URL + "&sslmode=require"),
                        "does not exist", new Fence(URL.replace("?", "_nowhere?")),
                        "planted", new Fence((Callable<Connection>) Tests::fails));
        Class<NoConnection> none = NoConnection.class;
        Map<String, ?> key = Map.of("id", 7);
        Options waits = SHORT.waitUpTo(ofMinutes(9));
        fences.forEach((words, one) -> raises(none, words, () -> one.lease("job", waits)));
        fences.forEach((words, one) -> raises(none, words, () -> one.keepRow("x", key, 7, SHORT)));
        CountDownLatch stop = new CountDownLatch(1);
        Fence.Leading<Exception> work = lease -> fail("it leads");
        fences.forEach((words, one) -> raises(none, words, () -> one.lead("x", TTL, stop, work)));
        Fence away = new Fence("postgresql://127.0.0.1:1/x");
        Executable outage = () -> away.lease("job", SHORT.waitUpTo(ofSeconds(1)));
        NoConnection nobody = raises(none, "refused", outage);
        assertEquals("08001", ((SQLException) nobody.getCause()).getSQLState());
        // An exhausted pool is the cause, and not the server.
        CompletableFuture<Connection> next = new CompletableFuture<>();
        Fence pool = new Fence(next::get);
        raises(none, "no connection came .*a pool", () -> pool.lease("job", SHORT));
        next.complete(on);
        eventually(on::isClosed);
    }

    @Test
    void aLeaderEmitsEventsAndStops() throws Exception {
        List<String> kinds = new CopyOnWriteArrayList<>();
        CountDownLatch stop = new CountDownLatch(1);
        fence.onEvent(event -> kinds.add(event.kind().toString()));
        Fence.Leading<Exception> work =
                lease -> {
                    if (!kinds.contains("INTERRUPTED")) {
                        Thread own = Thread.currentThread();
                        lease.lost().thenRun(own::interrupt);
                        sql("SELECT lease_revoke('job')");
                        eventually(own::isInterrupted);
                    }
                    lease.check();
                };
        assertTrue(fence.lead("job", TTL, stop, work));
        // The last event may come after `lead` has returned.
        eventually(() -> kinds.contains("RELEASED"));
        kinds.remove("RENEWED");
        assertEquals("[ACQUIRED, LOST, INTERRUPTED, ACQUIRED, RELEASED]", kinds.toString());
        Lease held = fence.lease("job", LONG.atMost(ofMillis(500)));
        held.lost().cancel(true);
        held.lost().thenRun(stop::countDown);
        assertFalse(fence.lead("job", TTL, stop, leads -> {}));
        assertThrows(LeaseLost.class, held::close);
        // A leader that is stopped does not try again, nor one whose fence is closed.
        CountDownLatch stopping = new CountDownLatch(1);
        Fence.Leading<Exception> stops =
                lease -> {
                    stopping.countDown();
                    sql("SELECT lease_revoke('job')");
                    lease.lost().get();
                };
        assertFalse(fence.lead("job", TTL, stopping, stops));
        Fence.Leading<Exception> closes =
                lease -> {
                    fence.close();
                    lease.check();
                };
        CountDownLatch never = new CountDownLatch(1);
        assertThrows(FenceException.class, () -> fence.lead("job", TTL, never, closes));
        assertEquals(1, Collections.frequency(kinds, "INTERRUPTED"));
    }

    @Test
    void aLeaderGoesOnAfterALostTransactionThatAnExecutorWraps() throws Exception {
        int[] terms = {0};
        Fence.Leading<Exception> work =
                lease -> {
                    if (++terms[0] == 1) {
                        throw new ExecutionException(new TransactionLost("", false, null));
                    }
                };
        assertTrue(fence.lead("job", TTL, new CountDownLatch(1), work));
        assertEquals(2, terms[0]);
    }

    @Test
    void aThreadThatCannotStartIsReported() throws Exception {
        ThreadFactory starts = Connections.THREADS.getThreadFactory();
        ThreadFactory none =
                work -> {
                    throw new OutOfMemoryError("planted");
                };
        // All threads have ended, so that the next task needs a new one.
        eventually(() -> Connections.THREADS.getPoolSize() == 0);
        Connections.THREADS.setThreadFactory(none);
        raises(FenceException.class, "thread", () -> fence.lease("job"));
        Connections.THREADS.setThreadFactory(starts);
        fence.lease("job").close();
    }

    /** A listener waits for a lock of a thread that asks the lease meanwhile. */
    @Test
    void aListenerHoldsUpNoCheckIfNoThreadCanStart() throws Exception {
        ReentrantLock lock = new ReentrantLock();
        Semaphore events = new Semaphore(0);
        fence.onEvent(
                event -> {
                    events.release();
                    lock.lock();
                    lock.unlock();
                });
        Lease lease = fence.lease("job", LONG.atMost(TTL));
        events.acquire();
        // Threads that have nothing to do have ended.
        Thread.sleep(2000);
        lock.lock();
        ThreadFactory starts = Connections.THREADS.getThreadFactory();
        ThreadFactory none =
                work -> {
                    throw new OutOfMemoryError("planted");
                };
        Connections.THREADS.setThreadFactory(none);
        fence.heartbeat.notifications.setThreadFactory(none);
        events.acquire();
        try {
            assertFalse(assertTimeoutPreemptively(TTL, lease::isHeld));
        } finally {
            lock.unlock();
            Connections.THREADS.setThreadFactory(starts);
            fence.heartbeat.notifications.setThreadFactory(starts);
        }
        assertThrows(LeaseLost.class, lease::close);
    }

    @Test
    void aLogThatHangsDelaysNoCallAndNoRenewal() throws Exception {
        CompletableFuture<Boolean> isHeld = new CompletableFuture<>();
        CompletableFuture<String> first = new CompletableFuture<>();
        CompletableFuture<Void> mayEnd = new CompletableFuture<>();
        Lease renewed = fence.lease("renewed", SHORT);
        Lease late = fence.lease("late", LONG.atMost(TTL.plusSeconds(2)));
        Lease lease = fence.lease("job", LONG.atMost(TTL));
        Handler handler =
                new StreamHandler() {
                    @Override
                    public void publish(LogRecord line) {
                        first.complete(line.getMessage());
                        isHeld.completeAsync(lease::isHeld).join();
                        mayEnd.join();
                    }
                };
        Logger.getLogger("pgfence").addHandler(handler);
        assertFalse(isHeld.get(30, TimeUnit.SECONDS));
        assertEquals(Reason.AT_MOST, late.lost().get(30, TimeUnit.SECONDS).reason());
        renewed.check();
        // A leader whose line hangs ends when it is stopped.
        CountDownLatch stop = new CountDownLatch(1);
        Fence.Leading<Exception> loses =
                leading -> {
                    sql("SELECT lease_revoke('led')");
                    leading.lost().get();
                    stop.countDown();
                    leading.check();
                };
        Fence other = new Fence(URL);
        assertFalse(assertTimeoutPreemptively(TTL, () -> other.lead("led", TTL, stop, loses)));
        mayEnd.complete(null);
        other.close();
        Logger.getLogger("pgfence").removeHandler(handler);
        assertEquals("leases are lost (at_most): 1 (job)", first.join());
        assertThrows(LeaseLost.class, lease::close);
        assertThrows(LeaseLost.class, late::close);
    }

    /** On a dead network a rollback hangs until the loss cuts the connection. */
    @Test
    void aRollbackOfARowsGuardThatHangsEndsAtTheDeadline() throws Exception {
        Options options = new Options().ttl(TTL).columns("fence", "till");
        Map<String, ?> key = Map.of("id", 7, "the \"one", "me,\n\"\\");
        Lease lease = fence.keepRow("public.runs", key, claim(), options);
        Connection other = as("postgres");
        Callable<?> hangs =
                () -> {
                    eventually(other::isClosed);
                    throw new SQLException("This connection has been closed.", "08003");
                };
        Connection dead = withMethod(other, "rollback", hangs);
        Executable works =
                () ->
                        lease.guard(
                                dead,
                                () -> {
                                    Thread.sleep(TTL.toMillis());
                                    assertFalse(lease.isHeld());
                                    lease.check();
                                });
        Executable ends = () -> assertTimeoutPreemptively(TTL.plusSeconds(2), works);
        assertEquals(Reason.DEADLINE, assertThrows(LeaseLost.class, ends).reason());
        assertThrows(LeaseLost.class, lease::close);
    }

    /** HikariCP resets what it takes back, which a connection that was cut refuses. */
    @Test
    void toCutAConnectionOfAPoolWritesNoLineToTheLog() throws Exception {
        List<String> lines = new CopyOnWriteArrayList<>();
        CompletableFuture<Void> isClosed = new CompletableFuture<>();
        Callable<?> closes =
                () -> {
                    isClosed.complete(null);
                    throw new SQLException("This connection has been closed.", "08003");
                };
        Handler handler =
                new StreamHandler() {
                    @Override
                    public void publish(LogRecord line) {
                        lines.add(line.getMessage() + line.getThrown());
                    }
                };
        Logger.getLogger("pgfence").addHandler(handler);
        Connections.cut(withMethod(as("postgres"), "close", closes));
        isClosed.get(30, TimeUnit.SECONDS);
        // A line would come after that.
        Thread.sleep(300);
        Logger.getLogger("pgfence").removeHandler(handler);
        assertEquals(List.of(), lines);
    }

    @Test
    void aListenerOrALogThatFailsDelaysNoCall() throws Exception {
        Handler failing =
                new StreamHandler() {
                    @Override
                    public void publish(LogRecord line) {
                        fails();
                    }
                };
        Logger.getLogger("pgfence").addHandler(failing);
        Class<IllegalStateException> wrong = IllegalStateException.class;
        Semaphore refusals = new Semaphore(0);
        fence.onEvent(
                event -> {
                    raises(wrong, "may not acquire", () -> fence.lease("other"));
                    refusals.release();
                    fails();
                });
        Lease lost = fence.lease("job", LONG.atMost(ofMillis(1)));
        lost.lost().get();
        assertThrows(LeaseLost.class, lost::close);
        fence.lease("job").close();
        eventually(() -> refusals.availablePermits() == 4);
        Logger.getLogger("pgfence").removeHandler(failing);
    }

    /** A listener that hangs at each loss, and at each release. */
    @Test
    void aListenerThatHangsDelaysNoVerb() throws Exception {
        CompletableFuture<Void> mayEnd = new CompletableFuture<>();
        fence.onEvent(
                event -> {
                    if (event.kind() != Fence.Event.Kind.ACQUIRED) {
                        mayEnd.join();
                    }
                });
        Lease lost = fence.lease("job", LONG.atMost(ofMillis(100)));
        long end = System.nanoTime() + ofSeconds(1).toNanos();
        // A check notices the loss as soon as the thread that watches the time does.
        Executable checks =
                () -> {
                    while (System.nanoTime() < end) {
                        lost.check();
                    }
                };
        Class<LeaseLost> loss = LeaseLost.class;
        assertThrows(loss, () -> assertTimeoutPreemptively(TTL, checks));
        assertThrows(loss, () -> assertTimeoutPreemptively(TTL, lost::close));
        assertTimeoutPreemptively(ofSeconds(5), fence::close);
        mayEnd.complete(null);
    }

    // Helpers.

    /** Asserts that the body throws an error with the pattern in its message, and returns it. */
    private static <T extends Throwable> T raises(Class<T> type, String pattern, Executable body) {
        T error = assertThrows(type, body);
        assertTrue(error.getMessage().matches("(?s).*" + pattern + ".*"), error.toString());
        return error;
    }

    /** Returns a connection that does something else in one of its methods. */
    private static Connection withMethod(Connection real, String name, Callable<?> does) {
        InvocationHandler handler =
                (self, method, arguments) -> {
                    try {
                        boolean isReplaced = method.getName().equals(name);
                        return isReplaced ? does.call() : method.invoke(real, arguments);
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

    /** Executes a statement, and returns its first value, or null if it has none. */
    private static String sql(Connection on, String text) throws SQLException {
        try (Statement statement = on.createStatement()) {
            boolean hasRows = statement.execute(text) && statement.getResultSet().next();
            return hasRows ? statement.getResultSet().getString(1) : null;
        }
    }

    private static void eventually(Callable<Boolean> check) throws Exception {
        for (int round = 0; !check.call(); round++) {
            assertTrue(round < 600, () -> "it does not come true: " + Thread.getAllStackTraces());
            Thread.sleep(50);
        }
    }
}
