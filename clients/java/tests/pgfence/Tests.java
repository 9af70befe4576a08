package pgfence;

import static org.junit.jupiter.api.Assertions.*;

import org.junit.jupiter.api.*;
import org.postgresql.core.BaseConnection;
import org.postgresql.ds.PGSimpleDataSource;

import pgfence.Fence.*;
import pgfence.FenceException.*;

import java.lang.reflect.*;
import java.nio.file.Path;
import java.sql.*;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.*;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.logging.*;
import java.util.stream.*;

/**
 * What the vectors and the scenarios of all clients do not show: the shape of the API, and what is
 * Java's own. {@code DATABASE_URL} names a database with the extension that is otherwise of no use:
 * tables are made and dropped in it.
 */
@SuppressWarnings("try")
@TestInstance(TestInstance.Lifecycle.PER_CLASS)
final class Tests {
    private static final String ADDRESS = System.getenv("DATABASE_URL"), URL = "jdbc:" + ADDRESS;
    private static final Options LONG = new Options().ttl(Duration.ofMinutes(5));
    private static final Options SHORT = new Options().ttl(Duration.ofSeconds(1));
    private static final String HELD = "SELECT count(*) FROM fence.leases WHERE state = 'held'";
    private static final String PAY = "UPDATE orders SET status = 'paid' WHERE id = 7";
    private static final String CLAIM =
            "UPDATE runs SET held_until = clock_timestamp() + '%s' WHERE id = 7 RETURNING fence";

    private final Connection admin = DriverManager.getConnection(URL);
    private Fence fence;
    private int threads;

    Tests() throws SQLException {}

    @BeforeAll
    void countThreads() {
        System.setProperty("java.util.logging.SimpleFormatter.format", "%5$s%n");
        threads = Thread.activeCount();
    }

    @BeforeEach
    void makeTables() throws Exception {
        run(
                admin,
                """
                DROP TABLE IF EXISTS orders, runs CASCADE;
                CREATE TABLE orders (id bigint PRIMARY KEY, status text);
                INSERT INTO orders VALUES (7, 'new');
                CREATE TABLE runs (id bigint PRIMARY KEY, state text);
                INSERT INTO runs VALUES (7, 'new');
                SELECT fence_protect('orders', lease => 'order:{id}'),
                       fence_protect('runs', deadline => 'held_until');
                """);
        fence = new Fence(URL);
    }

    @AfterEach
    void nothingIsLeft() throws Exception {
        fence.close();
        equal(value(HELD), "0");
        // A thread that has done its work ends a second later.
        comesTrue(
                () -> Thread.activeCount() <= threads,
                () -> "it leaves " + Thread.getAllStackTraces());
    }

    @Test
    void theVectorsHold() throws Exception {
        Vectors.play(Path.of(System.getenv().getOrDefault("VECTORS", "../spec/vectors")));
    }

    // Transactions

    @Test
    void theTransactionOfOthersIsTheirs() throws Exception {
        try (Lease lease = fence.lease("order:7", LONG);
                Connection on = connected(false)) {
            assertThrows(
                    ClassNotFoundException.class,
                    () ->
                            lease.guard(
                                    on,
                                    () -> {
                                        run(on, PAY);
                                        throw new ClassNotFoundException("a checked one");
                                    }));
            equal(value(on, "SELECT status FROM orders"), "new");
            lease.guard(on, () -> run(on, PAY));
            on.rollback();
            equal(status(), "new");
            on.setAutoCommit(true);
            run(on, "BEGIN");
            equal(lease.guard(on, () -> on.createStatement().executeUpdate(PAY)), 1);
            equal(all(status(), on.getAutoCommit()), all("new", true));
            run(on, "COMMIT");
            equal(status(), "paid");
        }
    }

    /** Until the program commits the server keeps it, and if the program rolls back it lives on. */
    @Test
    void aLastWriteInTheTransactionOfOthersReleasesWithTheirCommit() throws Exception {
        try (Lease lease = fence.lease("order:7", LONG.ttl(Duration.ofSeconds(9)));
                Connection on = connected(false)) {
            lease.guardAndRelease(on, () -> run(on, PAY));
            on.rollback();
            Thread.sleep(2000);
            equal(all(lease.isHeld(), value(HELD)), all(true, "1"));
            lease.guardAndRelease(on, () -> run(on, PAY));
            on.commit();
            comesTrue(() -> !lease.isHeld(), () -> "it is believed still");
            equal(assertThrows(LeaseLost.class, lease::check).reason(), Reason.RELEASED);
        }
    }

    @Test
    void aRefusalIsATypeHoweverDeepItIsWrapped() throws Exception {
        try (Lease lease = fence.lease("other", LONG);
                Connection on = connected(true)) {
            Refused refused =
                    assertThrows(Refused.class, () -> lease.guard(on, () -> run(on, PAY)));
            equal(refused.sqlState(), "PF004");
            equal(refused.detail().replace(" ", "").contains("\"lease\":\"order:7\""), true);
            equal(refused.hint() != null && refused.getCause() instanceof SQLException, true);
            assertThrows(
                    Refused.class,
                    () ->
                            lease.guard(
                                    on,
                                    () -> {
                                        try (Statement batch = on.createStatement()) {
                                            batch.addBatch(PAY);
                                            batch.executeBatch();
                                        } catch (SQLException error) {
                                            throw new IllegalStateException(
                                                    "as an ORM has it", error);
                                        }
                                    }));
            equal(
                    assertThrows(
                                    SQLException.class,
                                    () -> lease.guard(on, () -> run(on, "SELECT 1 / 0")))
                            .getSQLState(),
                    "22012");
        }
    }

    /** As drivers before 42.7 do on Java 24 and newer. The connection is closed, too. */
    @Test
    void aLossEndsAStatementOfADriverThatCannotAbort() throws Exception {
        BaseConnection real = connected(true).unwrap(BaseConnection.class);
        CompletableFuture<Boolean> closed = new CompletableFuture<>();
        BaseConnection fails =
                instead(
                        BaseConnection.class,
                        real,
                        "abort",
                        arguments -> {
                            throw new SecurityException("checking permissions is not supported");
                        });
        BaseConnection closes =
                instead(
                        BaseConnection.class,
                        fails,
                        "close",
                        arguments -> closed.complete(true) ? NOTHING : null);
        Lease lease = fence.lease("order:7", SHORT);
        try (Connection on = instead(Connection.class, real, "unwrap", arguments -> closes)) {
            run(on, "SET client_connection_check_interval = 100");
            Thread revokes =
                    started(
                            () -> {
                                Thread.sleep(200);
                                value("SELECT lease_revoke('order:7')");
                            });
            LeaseLost lost =
                    assertThrows(
                            LeaseLost.class,
                            () -> lease.guard(on, () -> run(on, "SELECT pg_sleep(60)")));
            equal(lost.reason(), Reason.GONE);
            revokes.join();
        }
        equal(lease.lost().get(10, TimeUnit.SECONDS).names(), List.of("order:7"));
        equal(closed.get(10, TimeUnit.SECONDS), true);
        assertThrows(LeaseLost.class, lease::close);
    }

    @Test
    void whatTheWorkGoesOnToWriteAfterItsOwnCommitIsUndone() throws Exception {
        try (Lease lease = fence.lease("order:7", LONG);
                Connection on = connected(true)) {
            TransactionLost lost =
                    assertThrows(
                            TransactionLost.class,
                            () ->
                                    lease.guard(
                                            on,
                                            () -> {
                                                run(on, PAY);
                                                on.commit();
                                                run(on, "CREATE TABLE undone ()");
                                            }));
            equal(
                    all(lost.inDoubt(), status(), value("SELECT to_regclass('undone') IS NULL")),
                    all(true, "paid", "t"));
        }
    }

    @Test
    void aRollbackThatFailsEndsTheConnection() throws Exception {
        try (Lease lease = fence.lease("order:7", LONG);
                Connection on = connected(true)) {
            Connection failing =
                    instead(
                            Connection.class,
                            on,
                            "rollback",
                            arguments -> {
                                throw new SQLException("planted");
                            });
            assertThrows(
                    ClassNotFoundException.class,
                    () ->
                            lease.guard(
                                    failing,
                                    () -> {
                                        throw new ClassNotFoundException();
                                    }));
            comesTrue(on::isClosed, () -> "it goes on");
        }
    }

    @Test
    void whatCannotBeGuardedIsRefusedBeforeTheWork() throws Exception {
        try (Lease lease = fence.lease("order:7", LONG);
                Connection on = connected(true)) {
            Connection stubborn = instead(Connection.class, on, "setAutoCommit", arguments -> null);
            Connection foreign = instead(Connection.class, on, "isWrapperFor", arguments -> false);
            for (Connection wrong : Arrays.asList(stubborn, foreign, null)) {
                assertThrows(
                        IllegalArgumentException.class,
                        () ->
                                lease.guard(
                                        wrong,
                                        () -> {
                                            throw new AssertionError("it began");
                                        }));
            }
            assertThrows(
                    IllegalArgumentException.class, () -> fence.guard(on, List.of(), () -> {}));
        }
    }

    @Test
    void aGuardThatFindsItsLeaseGoneLeavesTheConnection() throws Exception {
        try (Connection on = connected(true)) {
            for (int round = 0; round < 20; round++) {
                Lease lease = fence.lease("job", LONG);
                value("SELECT lease_revoke('job')");
                assertThrows(
                        FenceException.class,
                        () ->
                                lease.guard(
                                        on,
                                        () -> {
                                            throw new AssertionError("it began");
                                        }));
                assertThrows(LeaseLost.class, lease::close);
                equal(value(on, "SELECT 1"), "1");
            }
        }
    }

    // Leases

    @Test
    void whatAFenceIsMadeFrom() throws Exception {
        PGSimpleDataSource source = new PGSimpleDataSource();
        source.setURL(URL);
        String named = ADDRESS.replace("//", "//postgres:s%40cret@");
        Callable<Connection> begins = () -> connected(false);
        for (Fence made :
                List.of(
                        new Fence(URL),
                        new Fence(ADDRESS),
                        new Fence(named),
                        new Fence(source),
                        new Fence(begins),
                        new Fence(source::getConnection),
                        new Fence(URL).schema("public"))) {
            try (made;
                    Lease lease = made.lease("job", LONG.session())) {
                equal(lease.isHeld(), true);
            }
        }
        for (String wrong :
                new String[] {"mysql://me:secret@host/x", "jdbc:h2:mem", "shop", null}) {
            IllegalArgumentException error =
                    assertThrows(IllegalArgumentException.class, () -> new Fence(wrong));
            equal(error.getMessage().contains("secret"), false);
        }
        Connection foreign = instead(Connection.class, admin, "isWrapperFor", arguments -> false);
        assertThrows(IllegalArgumentException.class, () -> new Fence(() -> foreign).lease("job"));
    }

    /** The work has all of its connections: it was not the server. */
    @Test
    void aPoolThatIsExhaustedIsNamed() throws Exception {
        CountDownLatch free = new CountDownLatch(1);
        PGSimpleDataSource pool =
                new PGSimpleDataSource() {
                    @Override
                    public Connection getConnection() throws SQLException {
                        try {
                            free.await();
                        } catch (InterruptedException never) {
                            throw new SQLException(never);
                        }
                        return connected(true);
                    }
                };
        try (Fence waits = new Fence(pool)) {
            String told =
                    assertThrows(NoConnection.class, () -> waits.lease("job", SHORT)).getMessage();
            equal(told.contains("no connection came") && told.contains("pool"), true);
            free.countDown();
        }
        NoConnection nobody =
                assertThrows(
                        NoConnection.class,
                        () -> new Fence("postgresql://127.0.0.1:1/x").lease("job"));
        equal(((SQLException) nobody.getCause()).getSQLState(), "08001");
    }

    @Test
    void whatIsWrongIsNamed() throws Exception {
        Map<String, Body> wrong =
                Map.of(
                        "ttl", () -> new Options().ttl(Duration.ofMillis(99)),
                        "wait", () -> new Options().waitUpTo(Duration.ofSeconds(-1)),
                        "at most", () -> new Options().atMost(Duration.ZERO),
                        "several", () -> fence.lease(List.of("a", "b"), new Options().shared()),
                        "name of", () -> fence.lease(Arrays.asList("a", null), new Options()),
                        "fence_protect",
                                () ->
                                        fence.keepRow(
                                                "pg_class", 7, 7, SHORT.atMost(Duration.ofDays(1))),
                        "has 1 columns",
                                () ->
                                        fence.keepRow(
                                                "runs", List.of(7, 8), 7, Duration.ofSeconds(1)),
                        "the name", () -> fence.lease((String) null));
        for (Map.Entry<String, Body> one : wrong.entrySet()) {
            RuntimeException error = assertThrows(RuntimeException.class, one.getValue()::run);
            equal(
                    error.getMessage().contains(one.getKey()) && !(error instanceof FenceException),
                    true);
        }
        equal(assertThrows(Refused.class, () -> fence.lease("x".repeat(600))).sqlState(), "22023");
        equal(
                assertThrows(Refused.class, () -> fence.lease(List.of(), new Options())).sqlState(),
                "22023");
        Refused whose =
                assertThrows(Refused.class, () -> fence.lease("job", new Options().reclaim()));
        equal(whose.getMessage().contains("reclaim"), true);
        equal(
                assertThrows(
                                Refused.class,
                                () -> fence.lease("x", new Options().metadata("{no JSON")))
                        .sqlState(),
                "22P02");
        Options one = new Options().metadata("{\"run\": 7}");
        equal(one.holder("me") == one, false);
        try (Lease lease = fence.lease("x", one)) {
            equal(value("SELECT metadata FROM fence.leases WHERE name = 'x'"), "{\"run\": 7}");
        }
    }

    @Test
    void byWhomItIsTakenAndWhatItWaitsFor() throws Exception {
        try (Lease lease = fence.lease("job", LONG.holder("me"));
                Connection on = connected(false)) {
            LeaseTaken taken = assertThrows(LeaseTaken.class, () -> fence.lease("job"));
            equal(all(taken.holder(), taken.waitsFor()), all("me", "ttl"));
            equal(
                    taken.getMessage()
                            .matches(".* job is taken by me, for [23].. s at the most .*"),
                    true);
            value(on, "SELECT lease_acquire('open', ttl => '5 s')");
            taken = assertThrows(LeaseTaken.class, () -> fence.lease("open"));
            equal(taken.getMessage().contains("not committed"), true);
            on.commit();
            value(on, "SELECT lease_guard('open', i.first_token) FROM lease_info('open') AS i");
            Thread.sleep(5500);
            taken = assertThrows(LeaseTaken.class, () -> fence.lease("open"));
            equal(taken.getMessage().contains("until a transaction ends"), true);
            equal(taken.remaining(), null);
        }
    }

    @Test
    void aRoleThatMayNotIsToldTheWayOut() throws Exception {
        assertThrows(NotInstalled.class, () -> new Fence(URL).schema("else\"where").lease("job"));
        run(
                admin,
                "DROP ROLE IF EXISTS login_1, login_2; CREATE ROLE login_1 LOGIN;"
                        + "CREATE ROLE login_2 LOGIN; SELECT fence_grant('login_1')");
        Iterator<String> logins = List.of("login_1", "login_2", "login_2").iterator();
        Fence other = new Fence(() -> as(logins.next()));
        Lease rotated = other.lease("job", new Options().ttl(Duration.ofSeconds(3)));
        try (Connection on = as("login_2")) {
            String told =
                    assertThrows(NotGranted.class, () -> rotated.guard(on, () -> {})).getMessage();
            equal(told.contains("fence_grant('login_2')"), true);
            run(admin, "SELECT fence_grant('login_2')");
            told = assertThrows(NotGranted.class, () -> rotated.guard(on, () -> {})).getMessage();
            equal(told.contains("act as one role"), true);
            told =
                    assertThrows(NotGranted.class, () -> other.adopted("x", 7).guard(on, () -> {}))
                            .getMessage();
            equal(told.contains("fence_grant('login_2', 'adopter')"), true);
        }
        value("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'login_1'");
        LeaseLost lost = rotated.lost().get(10, TimeUnit.SECONDS);
        equal(
                all(lost.reason(), lost.getMessage().contains("act as one role")),
                all(Reason.REFUSED, true));
        other.close();
        run(
                admin,
                "SELECT lease_revoke('job'), fence_revoke('login_1'), fence_revoke('login_2');"
                        + "DROP ROLE login_1, login_2");
    }

    private static Connection as(String role) throws SQLException {
        return DriverManager.getConnection(URL.replace("user=postgres", "user=" + role));
    }

    @Test
    void aRowIsKeptAndFinished() throws Exception {
        String left = "SELECT held_until - now() > '%s' AND state = 'new' FROM runs";
        long token = Long.parseLong(value(CLAIM.formatted("1 s")));
        try (Lease lease = fence.keepRow("runs", 7, token, Duration.ofSeconds(3));
                Connection on = connected(true)) {
            equal(
                    all(lease.names().get(0), lease.token(), value(left.formatted("2 s"))),
                    all("public.runs", token, "t"));
            Thread.sleep(4000);
            equal(all(lease.isHeld(), value(left.formatted("0 s"))), all(true, "t"));
            // Its own transaction has the row locked when it is due.
            lease.guard(on, () -> Thread.sleep(2000));
            lease.check();
            lease.guardAndRelease(
                    on, () -> run(on, "UPDATE runs SET state = 'done', held_until = NULL"));
            equal(
                    all(value("SELECT state FROM runs WHERE held_until IS NULL"), lease.isHeld()),
                    all("done", false));
        }
        assertThrows(
                LeaseLost.class, () -> fence.keepRow("runs", "7", token, Duration.ofSeconds(3)));
        long again = Long.parseLong(value(CLAIM.formatted("1 min")));
        fence.keepRow("runs", 7L, again, Duration.ofMinutes(1)).close();
        equal(value("SELECT held_until IS NULL FROM runs"), "t");
    }

    @Test
    void eventsAndAtMost() throws Exception {
        List<Event> events = new CopyOnWriteArrayList<>();
        try (Fence tells =
                new Fence(URL)
                        .onEvent(
                                event -> {
                                    events.add(event);
                                    throw new IllegalStateException("it goes on");
                                })) {
            tells.lease("job", SHORT).close();
            Lease lease = tells.lease("job", SHORT.atMost(Duration.ofSeconds(2)));
            equal(lease.lost().get(10, TimeUnit.SECONDS).reason(), Reason.AT_MOST);
            equal(
                    assertThrows(LeaseLost.class, lease::close).getMessage(),
                    "the lease job is lost (at_most)");
        }
        equal(
                events.stream().map(Event::kind).distinct().toList(),
                List.of(
                        Event.Kind.ACQUIRED,
                        Event.Kind.RELEASED,
                        Event.Kind.RENEWED,
                        Event.Kind.LOST));
    }

    @Test
    void whatCanNeverBeOpenedIsToldAtOnceAndAnOutageIsOneLineOfTheLog() throws Exception {
        Options waits = new Options().ttl(Duration.ofSeconds(1)).waitUpTo(Duration.ofMinutes(1));
        Map<String, Fence> wrong =
                Map.of(
                        "SSL", new Fence(URL + "&sslmode=require"),
                        "does not exist", new Fence(URL.replace("?", "_nowhere?")),
                        "no secret",
                                new Fence(
                                        (Callable<Connection>)
                                                () -> {
                                                    throw new IllegalStateException("no secret");
                                                }));
        for (var one : wrong.entrySet()) {
            Body lease = () -> one.getValue().lease("job", waits);
            CountDownLatch stop = new CountDownLatch(1);
            Body lead = () -> one.getValue().lead("job", Duration.ofSeconds(1), stop, leads -> {});
            for (Body body : List.of(lease, lead)) {
                String told =
                        assertTimeoutPreemptively(
                                Duration.ofSeconds(5),
                                () -> assertThrows(NoConnection.class, body::run).getMessage());
                equal(told.contains(one.getKey()), true);
            }
        }
        List<String> lines = new CopyOnWriteArrayList<>();
        Handler handler =
                new Handler() {
                    @Override
                    public void publish(LogRecord line) {
                        lines.add(new SimpleFormatter().formatMessage(line));
                    }

                    @Override
                    public void flush() {}

                    @Override
                    public void close() {}
                };
        Logger.getLogger("pgfence").addHandler(handler);
        try (Fence away = new Fence("postgresql://127.0.0.1:1/x")) {
            Options wait = new Options().ttl(Duration.ofSeconds(1)).waitUpTo(Duration.ofSeconds(1));
            assertThrows(NoConnection.class, () -> away.lease("job", wait));
        } finally {
            Logger.getLogger("pgfence").removeHandler(handler);
        }
        equal(lines.size(), 1);
        equal(
                lines.get(0)
                        .startsWith("no lease could be acquired, and it is tried again: 08001: "),
                true);
    }

    @Test
    void leading() throws Exception {
        CountDownLatch stop = new CountDownLatch(1);
        Duration ttl = Duration.ofSeconds(3);
        assertThrows(
                ClassNotFoundException.class,
                () ->
                        fence.lead(
                                "job",
                                ttl,
                                stop,
                                lease -> {
                                    throw new ClassNotFoundException();
                                }));
        List<Long> tokens = new ArrayList<>();
        List<Event.Kind> kinds = new CopyOnWriteArrayList<>();
        Iterator<String> codes = List.of("53300", "25006").iterator();
        Callable<Connection> full =
                () -> {
                    if (codes.hasNext()) {
                        throw new SQLException("planted", codes.next());
                    }
                    return connected(true);
                };
        try (Fence tells = new Fence(full).onEvent(event -> kinds.add(event.kind()))) {
            equal(
                    tells.lead(
                            "job",
                            ttl,
                            stop,
                            lease -> {
                                tokens.add(lease.token());
                                if (tokens.size() == 1) {
                                    value("SELECT lease_revoke('job')");
                                    lease.lost().get();
                                }
                                lease.check();
                            }),
                    true);
        }
        equal(all(tokens.size(), Collections.frequency(kinds, Event.Kind.INTERRUPTED)), all(2, 1));
        try (Lease lease = fence.lease("job")) {
            started(
                    () -> {
                        Thread.sleep(500);
                        stop.countDown();
                    });
            equal(fence.lead("job", ttl, stop, leads -> {}), false);
        }
    }

    @Test
    void anInterruptGivesUpAndLeavesNothing() throws Exception {
        value("SELECT lease_acquire('job')");
        for (Options options : List.of(LONG, LONG.session())) {
            AtomicBoolean isInterrupted = new AtomicBoolean();
            Thread waits =
                    started(
                            () -> {
                                assertThrows(
                                        InterruptedException.class,
                                        () ->
                                                fence.lease(
                                                        "job",
                                                        options.waitUpTo(Duration.ofMinutes(5))));
                                isInterrupted.set(true);
                            });
            String waiting =
                    "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query "
                            + "LIKE 'SELECT granted%'";
            comesTrue(() -> value(waiting).equals("1"), () -> "it does not wait");
            waits.interrupt();
            waits.join(1000);
            equal(isInterrupted.get(), true);
            // Granted all the same, and given back.
            value("SELECT lease_revoke('job')");
            comesTrue(
                    () -> value("SELECT (%s) + (%s)".formatted(HELD, waiting)).equals("0"),
                    () -> "it is left");
            value("SELECT lease_acquire('job')");
        }
        value("SELECT lease_revoke('job')");
        try (Lease lease = fence.lease("job")) {
            Thread.currentThread().interrupt();
        }
        equal(all(Thread.interrupted(), value(HELD)), all(true, "0"));
    }

    @Test
    void aDriverThatNeverSettlesHoldsNobodyUp() throws Exception {
        CountDownLatch never = new CountDownLatch(1);
        AtomicBoolean hangs = new AtomicBoolean(true);
        Callable<Connection> source =
                () ->
                        instead(
                                Connection.class,
                                connected(true),
                                "prepareStatement",
                                arguments -> {
                                    if (hangs.get()) {
                                        never.await();
                                    }
                                    return NOTHING;
                                });
        try (Fence hanging = new Fence(source)) {
            equal(assertThrows(NoAnswer.class, () -> hanging.lease("job", SHORT)).inDoubt(), true);
            hangs.set(false);
            Lease lease = hanging.lease("job", SHORT.waitUpTo(Duration.ofSeconds(10)));
            hangs.set(true);
            equal(lease.lost().get(10, TimeUnit.SECONDS).reason(), Reason.DEADLINE);
            hangs.set(false);
            hanging.lease("job", SHORT.waitUpTo(Duration.ofSeconds(10)));
            hangs.set(true);
        }
        hangs.set(false);
        never.countDown();
        value("SELECT lease_revoke('job')");
    }

    /** What is due meanwhile is tried again, and a loss is told by whoever looks. */
    @Test
    void aThreadThatCannotBeStartedIsTold() throws Exception {
        ThreadFactory starts = Connections.THREADS.getThreadFactory(),
                none =
                        work -> {
                            throw new OutOfMemoryError("unable to create native thread (planted)");
                        };
        comesTrue(() -> Connections.THREADS.getPoolSize() == 0, () -> "there are threads yet");
        try {
            Connections.THREADS.setThreadFactory(none);
            equal(
                    assertThrows(FenceException.class, () -> fence.lease("job"))
                            .getMessage()
                            .contains("thread"),
                    true);
            Connections.THREADS.setThreadFactory(starts);
            Lease lease = fence.lease("job", new Options().ttl(Duration.ofSeconds(6)));
            Connections.THREADS.setThreadFactory(none);
            Thread.sleep(3500);
            Connections.THREADS.setThreadFactory(starts);
            Thread.sleep(3000);
            lease.check();
            Connections.THREADS.setThreadFactory(none);
            equal(lease.lost().get(20, TimeUnit.SECONDS).reason(), Reason.DEADLINE);
        } finally {
            Connections.THREADS.setThreadFactory(starts);
        }
        value("SELECT lease_revoke('job')");
    }

    @Test
    void completionShowsTheVerbsAndNothingInternal() {
        equal(
                shown(Fence.class),
                Set.of(
                        "lease",
                        "keepRow",
                        "lead",
                        "guard",
                        "guardAndRelease",
                        "adopted",
                        "schema",
                        "onEvent",
                        "close"));
        Set<String> adopted = Set.of("names", "token", "guard", "guardAndRelease", "options");
        equal(shown(Holding.class), adopted);
        Set<String> own = new TreeSet<>(Set.of("isHeld", "remaining", "check", "lost", "close"));
        own.addAll(adopted);
        equal(shown(Lease.class), own);
    }

    private static Set<String> shown(Class<?> type) {
        return Stream.of(type.getMethods())
                .filter(method -> method.getDeclaringClass() != Object.class)
                .map(Method::getName)
                .collect(Collectors.toCollection(TreeSet::new));
    }

    // Shared by the tests

    private interface Body {
        void run() throws Exception;
    }

    private interface Instead {
        Object call(Object[] arguments) throws Throwable;
    }

    private static final Object NOTHING = new Object();

    /** The same, but for one method; that returns NOTHING to go on. */
    private static <T> T instead(Class<T> type, T real, String name, Instead instead) {
        return type.cast(
                Proxy.newProxyInstance(
                        Tests.class.getClassLoader(),
                        new Class<?>[] {type},
                        (self, method, arguments) -> {
                            Object changed =
                                    method.getName().equals(name)
                                            ? instead.call(arguments)
                                            : NOTHING;
                            try {
                                return changed == NOTHING
                                        ? method.invoke(real, arguments)
                                        : changed;
                            } catch (InvocationTargetException error) {
                                throw error.getCause();
                            }
                        }));
    }

    private static Connection connected(boolean isAutoCommit) throws SQLException {
        Connection connection = DriverManager.getConnection(URL);
        connection.setAutoCommit(isAutoCommit);
        return connection;
    }

    private static void run(Connection on, String sql) throws SQLException {
        try (Statement statement = on.createStatement()) {
            statement.execute(sql);
        }
    }

    private static String value(Connection on, String sql) throws SQLException {
        try (Statement statement = on.createStatement();
                ResultSet rows = statement.executeQuery(sql)) {
            rows.next();
            return rows.getString(1);
        }
    }

    private synchronized String value(String sql) throws SQLException {
        return value(admin, sql);
    }

    private String status() throws SQLException {
        return value("SELECT status FROM orders");
    }

    /** Without a type of its own, which the compiler would look for among all that they share. */
    private static List<Object> all(Object... values) {
        return Arrays.asList(values);
    }

    private static void equal(Object is, Object should) {
        assertEquals(should, is);
    }

    private static Thread started(Body body) {
        Thread thread =
                new Thread(
                        () -> {
                            try {
                                body.run();
                            } catch (Exception error) {
                                throw new IllegalStateException(error);
                            }
                        });
        thread.start();
        return thread;
    }

    private static void comesTrue(Callable<Boolean> check, Callable<String> otherwise)
            throws Exception {
        for (int round = 0; !check.call(); round++) {
            if (round == 600) {
                throw new AssertionError(otherwise.call());
            }
            Thread.sleep(50);
        }
    }
}
