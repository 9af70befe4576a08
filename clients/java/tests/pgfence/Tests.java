package pgfence;

import java.lang.reflect.*;
import java.sql.*;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.*;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.stream.*;
import org.postgresql.core.BaseConnection;
import org.postgresql.ds.PGSimpleDataSource;
import pgfence.Fence.*;
import pgfence.FenceException.*;

/**
 * The part that the scenarios of all clients do not show: the shape of the API, and what is Java's own. {@code
 * DATABASE_URL} names a database with the extension that is otherwise of no use: a table is made and dropped in it.
 */
@SuppressWarnings("try")
public final class Tests {
    private static final String ADDRESS = System.getenv("DATABASE_URL");
    private static final String URL = "jdbc:" + ADDRESS;
    private static final Options LONG = new Options().ttl(Duration.ofMinutes(5));
    private static final Options SHORT = new Options().ttl(Duration.ofSeconds(1));
    private static final String HELD = "SELECT count(*) FROM fence.leases WHERE state = 'held'";
    private static final String PAY = "UPDATE orders SET status = 'paid' WHERE id = 7";
    /** The server notices that a client has gone in the middle of a statement. */
    private static final String NOTICES = "SET client_connection_check_interval = 100";

    private final Connection admin = DriverManager.getConnection(URL);
    private Fence fence;

    private Tests() throws SQLException {}

    /** All tests, or those whose names are given. */
    public static void main(String[] arguments) throws Exception {
        System.setProperty("java.util.logging.SimpleFormatter.format", "%5$s%n");
        Tests tests = new Tests();
        int threads = Thread.activeCount();
        for (Method method : Tests.class.getDeclaredMethods()) {
            boolean isTest = Modifier.isPublic(method.getModifiers()) && method.getParameterCount() == 0;
            if (isTest && (arguments.length == 0 || List.of(arguments).contains(method.getName()))) {
                tests.play(method, threads);
            }
        }
    }

    private void play(Method method, int threads) throws Exception {
        run(admin, "DROP TABLE IF EXISTS orders CASCADE");
        run(admin, "CREATE TABLE orders (id bigint PRIMARY KEY, status text)");
        run(admin, "INSERT INTO orders VALUES (7, 'new')");
        run(admin, "SELECT fence_protect('orders', lease => 'order:{id}')");
        try (Fence made = new Fence(URL)) {
            fence = made;
            method.invoke(this);
            equal(value(HELD), "0");
        } catch (InvocationTargetException error) {
            throw new AssertionError(method.getName(), error.getCause());
        }
        // A thread that has told its result ends a second later.
        comesTrue(() -> Thread.activeCount() <= threads, () -> method.getName() + " leaves " + Thread.getAllStackTraces());
    }

    // Transactions

    public void aWriteLandsAndAnErrorUndoesIt() throws Exception {
        for (boolean isAutoCommit : new boolean[] {true, false}) {
            run(admin, "SELECT fence_unprotect('orders'); UPDATE orders SET status = 'new';"
                    + "SELECT fence_protect('orders', lease => 'order:{id}')");
            try (Lease lease = fence.lease("order:7", LONG); Connection on = connected(isAutoCommit)) {
                run(on, "SELECT 1");
                thrown(ClassNotFoundException.class, () -> lease.guard(on, () -> {
                    run(on, PAY);
                    throw new ClassNotFoundException("a checked one");
                }));
                if (!isAutoCommit) {
                    equal(value(on, "SELECT status FROM orders"), "new");
                }
                int rows = lease.guard(on, () -> on.createStatement().executeUpdate(PAY));
                equal(rows, 1);
                equal(status(), isAutoCommit ? "paid" : "new");
                equal(on.getAutoCommit(), isAutoCommit);
                if (!isAutoCommit) {
                    on.commit();
                }
                equal(status(), "paid");
            }
        }
    }

    public void theTransactionOfOthersIsTheirs() throws Exception {
        try (Lease lease = fence.lease("order:7", LONG); Connection on = connected(false)) {
            lease.guard(on, () -> run(on, PAY));
            on.rollback();
            equal(status(), "new");
            on.setAutoCommit(true);
            run(on, "BEGIN");
            lease.guard(on, () -> run(on, PAY));
            equal(status(), "new");
            run(on, "ROLLBACK");
            lease.guard(on, () -> {
                lease.guard(on, () -> run(on, PAY));
                equal(status(), "new");
                thrown(ClassNotFoundException.class, () -> lease.guard(on, () -> {
                    run(on, "UPDATE orders SET status = 'undone' WHERE id = 7");
                    throw new ClassNotFoundException();
                }));
            });
            equal(status(), "paid");
        }
    }

    public void theLastWriteReleases() throws Exception {
        try (Lease lease = fence.lease("order:7", LONG); Connection on = connected(true)) {
            equal(lease.guardAndRelease(on, () -> on.createStatement().executeUpdate(PAY)), 1);
            equal(value(HELD), "0");
            equal(lease.isHeld(), false);
            equal(thrown(LeaseLost.class, lease::check).reason(), Reason.RELEASED);
        }
        try (Lease one = fence.lease("order:7", LONG); Lease other = fence.lease("b", LONG); Connection on = connected(true)) {
            fence.guardAndRelease(on, List.of(one, other), () -> run(on, PAY));
            equal(value(HELD), "0");
        }
        try (Lease lease = fence.lease(List.of("order:7", "b"), LONG); Connection on = connected(true)) {
            lease.guardAndRelease(on, () -> run(on, PAY));
            equal(value(HELD), "0");
        }
    }

    public void aRefusalIsATypeHoweverDeepItIsWrapped() throws Exception {
        try (Lease lease = fence.lease("other", LONG); Connection on = connected(true)) {
            Refused refused = thrown(Refused.class, () -> lease.guard(on, () -> run(on, PAY)));
            equal(refused.sqlState(), "PF004");
            equal(refused.detail().replace(" ", "").contains("\"lease\":\"order:7\""), true);
            equal(refused.hint() == null, false);
            equal(refused.getCause() instanceof SQLException, true);
            thrown(Refused.class, () -> lease.guard(on, () -> {
                try (Statement batch = on.createStatement()) {
                    batch.addBatch(PAY);
                    batch.executeBatch();
                } catch (SQLException error) {
                    throw new IllegalStateException("as an ORM has it", error);
                }
            }));
            equal(thrown(SQLException.class, () -> lease.guard(on, () -> run(on, "SELECT 1 / 0"))).getSQLState(), "22012");
        }
    }

    public void whatTheWorkHidesIsTold() throws Exception {
        try (Lease lease = fence.lease("order:7", LONG); Connection on = connected(true)) {
            TransactionLost swallowed = thrown(TransactionLost.class, () -> lease.guard(on, () -> {
                run(on, PAY);
                thrown(SQLException.class, () -> run(on, "SELECT 1 / 0"));
            }));
            equal(swallowed.inDoubt(), false);
            equal(status(), "new");
            TransactionLost ended = thrown(TransactionLost.class, () -> lease.guard(on, () -> {
                lease.guard(on, () -> {
                    run(on, PAY);
                    on.commit();
                    run(on, "SELECT 1");
                });
            }));
            equal(ended.inDoubt(), true);
            equal(status(), "paid");
        }
    }

    public void aSessionThatEndsIsNoLoss() throws Exception {
        try (Lease lease = fence.lease("order:7", LONG); Connection on = connected(true); Connection other = connected(true)) {
            SQLException anothers = thrown(SQLException.class, () ->
                    lease.guard(on, () -> run(other, "SELECT pg_terminate_backend(pg_backend_pid())")));
            equal(anothers.getSQLState(), "57P01");
            TransactionLost lost = thrown(TransactionLost.class, () ->
                    lease.guard(on, () -> run(on, "SELECT pg_terminate_backend(pg_backend_pid())")));
            equal(lost.inDoubt(), false);
            equal(lease.isHeld(), true);
        }
    }

    public void aLossEndsAStatementThatHangs() throws Exception { aLossEndsAStatement(connected(true)); }

    /** As drivers before 42.7 do on Java 24 and newer. The connection is closed, too. */
    public void aLossEndsAStatementOfADriverThatCannotAbort() throws Exception {
        BaseConnection real = connected(true).unwrap(BaseConnection.class);
        CompletableFuture<Boolean> closed = new CompletableFuture<>();
        BaseConnection fails = instead(BaseConnection.class, real, "abort", arguments -> {
            throw new SecurityException("checking permissions is not supported");
        });
        BaseConnection closes = instead(BaseConnection.class, fails, "close", arguments -> closed.complete(true) ? NOTHING : null);
        aLossEndsAStatement(instead(Connection.class, real, "unwrap", arguments -> closes));
        equal(closed.get(10, TimeUnit.SECONDS), true);
    }

    private void aLossEndsAStatement(Connection connected) throws Exception {
        Lease lease = fence.lease("order:7", SHORT);
        try (Connection on = connected) {
            run(on, NOTICES);
            Thread revokes = started(() -> {
                Thread.sleep(200);
                value("SELECT lease_revoke('order:7')");
            });
            LeaseLost lost = thrown(LeaseLost.class, () -> lease.guard(on, () -> run(on, "SELECT pg_sleep(60)")));
            equal(lost.reason(), Reason.GONE);
            equal(lease.lost().get(10, TimeUnit.SECONDS).names(), List.of("order:7"));
            revokes.join();
        }
        thrown(LeaseLost.class, lease::close);
    }

    public void whatTheWorkGoesOnToWriteAfterItsOwnCommitIsUndone() throws Exception {
        try (Lease lease = fence.lease("order:7", LONG); Connection on = connected(true)) {
            TransactionLost lost = thrown(TransactionLost.class, () -> lease.guard(on, () -> {
                run(on, PAY);
                on.commit();
                run(on, "CREATE TABLE undone ()");
            }));
            equal(List.of(lost.inDoubt(), status(), value("SELECT to_regclass('undone') IS NULL")), List.of(true, "paid", "t"));
        }
    }

    public void aRollbackThatFailsEndsTheConnection() throws Exception {
        try (Lease lease = fence.lease("order:7", LONG); Connection on = connected(true)) {
            Connection failing = instead(Connection.class, on, "rollback", arguments -> {
                throw new SQLException("planted");
            });
            thrown(ClassNotFoundException.class, () -> lease.guard(failing, () -> {
                throw new ClassNotFoundException();
            }));
            comesTrue(on::isClosed, () -> "it goes on");
        }
    }

    public void aConnectionThatStaysInAutocommitIsRefusedBeforeTheWork() throws Exception {
        try (Lease lease = fence.lease("order:7", LONG); Connection on = connected(true)) {
            Connection stubborn = instead(Connection.class, on, "setAutoCommit", arguments -> null);
            thrown(IllegalArgumentException.class, () -> lease.guard(stubborn, () -> {
                throw new AssertionError("it began");
            }));
            Connection foreign = instead(Connection.class, on, "isWrapperFor", arguments -> false);
            thrown(IllegalArgumentException.class, () -> lease.guard(foreign, () -> {}));
            thrown(IllegalArgumentException.class, () -> lease.guard(null, () -> {}));
            thrown(IllegalArgumentException.class, () -> fence.guard(on, List.of(), () -> {}));
        }
    }

    public void aGuardThatFindsItsLeaseGoneLeavesNoConnection() throws Exception {
        try (Fence leaves = new Fence(ADDRESS + "&application_name=leaves"); Connection on = connected(true)) {
            for (int round = 0; round < 20; round++) {
                Lease lease = leaves.lease("job", LONG);
                value("SELECT lease_revoke('job')");
                thrown(FenceException.class, () -> lease.guard(on, () -> {
                    throw new AssertionError("it began");
                }));
                thrown(LeaseLost.class, lease::close);
                String sessions = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'leaves'";
                comesTrue(() -> value(sessions).equals("0"), () -> "a session is left");
            }
        }
    }

    // Leases

    public void whatAFenceIsMadeFrom() throws Exception {
        PGSimpleDataSource source = new PGSimpleDataSource();
        source.setURL(URL);
        String named = ADDRESS.replace("//", "//postgres:s%40cret@");
        Callable<Connection> begins = () -> connected(false);
        for (Fence made : List.of(new Fence(URL), new Fence(ADDRESS), new Fence(named), new Fence(source), new Fence(begins),
                new Fence(source::getConnection), new Fence(URL).schema("public"))) {
            try (made; Lease lease = made.lease("job", LONG.session())) {
                equal(lease.isHeld(), true);
            }
        }
        for (String wrong : new String[] {"mysql://me:secret@host/x", "jdbc:h2:mem", "shop", null}) {
            IllegalArgumentException error = thrown(IllegalArgumentException.class, () -> new Fence(wrong));
            equal(error.getMessage().contains("secret"), false);
        }
        Connection foreign = instead(Connection.class, admin, "isWrapperFor", arguments -> false);
        thrown(IllegalArgumentException.class, () -> new Fence(() -> foreign).lease("job"));
    }

    public void whatIsWrongIsNamed() throws Exception {
        Map<String, Body> wrong = Map.of(
                "ttl", () -> new Options().ttl(Duration.ofMillis(99)),
                "wait", () -> new Options().waitUpTo(Duration.ofSeconds(-1)),
                "several", () -> fence.lease(List.of("a", "b"), new Options().shared()),
                "name of", () -> fence.lease(Arrays.asList("a", null), new Options()),
                "the name", () -> fence.lease((String) null));
        for (Map.Entry<String, Body> one : wrong.entrySet()) {
            RuntimeException error = thrown(RuntimeException.class, one.getValue());
            equal(error.getMessage().contains(one.getKey()) && !(error instanceof FenceException), true);
        }
        equal(thrown(Refused.class, () -> fence.lease("x".repeat(600))).sqlState(), "22023");
        equal(thrown(Refused.class, () -> fence.lease(List.of(), new Options())).sqlState(), "22023");
        Refused whose = thrown(Refused.class, () -> fence.lease("job", new Options().reclaim()));
        equal(whose.getMessage().contains("reclaim"), true);
        equal(thrown(Refused.class, () -> fence.lease("x", new Options().metadata("{no JSON"))).sqlState(), "22P02");
        Options one = new Options().metadata("{\"run\": 7}");
        equal(one.holder("me") == one, false);
        try (Lease lease = fence.lease("x", one)) {
            equal(value("SELECT metadata FROM fence.leases WHERE name = 'x'"), "{\"run\": 7}");
        }
    }

    public void aSessionLeaseIsGivenBackOnItsOwnConnection() throws Exception {
        for (int round = 0; round < 30; round++) {
            fence.lease("job", LONG.session()).close();
        }
    }

    public void byWhomItIsTakenAndForHowLong() throws Exception {
        try (Lease lease = fence.lease(List.of("a", "b"), new Options().holder("night shift"))) {
            LeaseTaken taken = thrown(LeaseTaken.class, () -> fence.lease("b"));
            equal(taken.holder(), "night shift");
            equal(taken.remaining().toSeconds() <= 30, true);
            // The way to here is shown, though it was thrown in another thread.
            boolean shows = Stream.of(taken.getStackTrace()).anyMatch(frame -> frame.getClassName().startsWith("pgfence.Tests"));
            equal(shows, true);
        }
    }

    public void notInstalledAndNotGranted() throws Exception {
        thrown(NotInstalled.class, () -> new Fence(URL).schema("else\"where").lease("job"));
        run(admin, "DROP ROLE IF EXISTS nobody_in_particular; CREATE ROLE nobody_in_particular LOGIN");
        String nobodys = ADDRESS.replace("user=postgres", "user=nobody_in_particular");
        try (Fence other = new Fence(nobodys); Connection on = DriverManager.getConnection("jdbc:" + nobodys)) {
            NotGranted error = thrown(NotGranted.class, () -> other.lease("job"));
            equal(error.getMessage().contains("fence_grant('nobody_in_particular')"), true);
            error = thrown(NotGranted.class, () -> other.adopted("job", 7).guard(on, () -> {}));
            equal(error.getMessage().contains("fence_grant('nobody_in_particular', 'adopter')"), true);
        }
        run(admin, "DROP ROLE nobody_in_particular");
    }

    public void aLeaseOfAnotherRoleNamesTheWayOut() throws Exception {
        for (String role : List.of("login_1", "login_2")) {
            run(admin, "DROP ROLE IF EXISTS %1$s; CREATE ROLE %1$s LOGIN; SELECT fence_grant('%1$s')".formatted(role));
        }
        try (Fence other = new Fence(ADDRESS.replace("user=postgres", "user=login_1")); Lease lease = other.lease("job", LONG);
                Connection on = DriverManager.getConnection(URL.replace("user=postgres", "user=login_2"))) {
            String told = thrown(NotGranted.class, () -> lease.guard(on, () -> {})).getMessage();
            equal(told.contains("role login_2") && told.contains("act as one role (options=-c role="), true);
            equal(told.contains("fence_grant"), false);
        }
        run(admin, "SELECT fence_revoke('login_1'), fence_revoke('login_2'); DROP ROLE login_1, login_2");
    }

    public void aNumberIsOfOneHolder() throws Exception {
        String recorded = "SELECT holder FROM lease_info('elsewhere')";
        try (Fence second = new Fence(URL); Connection on = connected(true)) {
            for (Fence same : List.of(fence, second)) {
                same.adopted("elsewhere", 7).guard(on, () -> {});
            }
            equal(value(recorded).contains("/" + ProcessHandle.current().pid() + "/"), true);
            fence.adopted("elsewhere", 8, "night \"shift\"").guard(on, () -> {});
            equal(value(recorded), "night \"shift\"");
            LeaseTaken taken = thrown(LeaseTaken.class, () -> fence.adopted("elsewhere", 8).guard(on, () -> {}));
            equal(taken.holder(), "night \"shift\"");
        } finally {
            value("SELECT lease_revoke('elsewhere') + lease_forget('elsewhere')");
        }
    }

    public void anAcquireThatFailsGivesAllOfItBack() throws Exception {
        try (Fence fails = new Fence(URL).onEvent(event -> {
            if (event.kind() == Event.Kind.ACQUIRED && event.names().contains("b")) {
                throw new AssertionError("planted");
            }
        })) {
            thrown(AssertionError.class, () -> fails.lease(List.of("a", "b"), LONG));
            equal(value(HELD), "0");
        }
    }

    public void events() throws Exception {
        List<Event> events = new CopyOnWriteArrayList<>();
        try (Fence tells = new Fence(URL).onEvent(event -> {
            events.add(event);
            throw new IllegalStateException("it goes on");
        })) {
            try (Lease lease = tells.lease("job", SHORT)) {
                comesTrue(() -> events.size() > 1, () -> "no renewal");
            }
        }
        equal(events.get(0).kind(), Event.Kind.ACQUIRED);
        equal(events.get(1).kind(), Event.Kind.RENEWED);
        equal(events.get(events.size() - 1).kind(), Event.Kind.RELEASED);
    }

    public void leading() throws Exception {
        CountDownLatch stop = new CountDownLatch(1);
        equal(fence.lead("job", Duration.ofSeconds(3), stop, lease -> equal(lease.isHeld(), true)), true);
        thrown(ClassNotFoundException.class, () -> fence.lead("job", Duration.ofSeconds(3), stop, lease -> {
            throw new ClassNotFoundException();
        }));
        List<Long> tokens = new ArrayList<>();
        fence.lead("job", Duration.ofSeconds(3), stop, lease -> {
            tokens.add(lease.token());
            if (tokens.size() == 1) {
                value("SELECT lease_revoke('job')");
                lease.lost().get();
            }
            lease.check();
        });
        equal(tokens.size(), 2);
        Iterator<String> codes = List.of("53300", "25006").iterator();
        Callable<Connection> full = () -> {
            if (codes.hasNext()) {
                throw new SQLException("planted", codes.next());
            }
            return connected(true);
        };
        try (Fence waits = new Fence(full)) {
            equal(waits.lead("job", Duration.ofSeconds(1), stop, lease -> {}), true);
        }
        stop.countDown();
        equal(fence.lead("job", Duration.ofSeconds(3), stop, lease -> {}), false);
    }

    public void aBlockThatLoses() throws Exception {
        thrown(LeaseLost.class, () -> {
            try (Lease lease = fence.lease("job")) {
                value("SELECT lease_revoke('job')");
            }
        });
        ClassNotFoundException own = thrown(ClassNotFoundException.class, () -> {
            try (Lease lease = fence.lease("job")) {
                value("SELECT lease_revoke('job')");
                throw new ClassNotFoundException();
            }
        });
        equal(own.getSuppressed()[0] instanceof LeaseLost, true);
    }

    public void anInterruptGivesUpAndLeavesNothing() throws Exception {
        value("SELECT lease_acquire('job')");
        for (Options options : List.of(LONG, LONG.session())) {
            AtomicBoolean isInterrupted = new AtomicBoolean();
            Thread waits = started(() -> {
                thrown(InterruptedException.class, () -> fence.lease("job", options.waitUpTo(Duration.ofMinutes(5))));
                isInterrupted.set(true);
            });
            String waiting = "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query LIKE 'SELECT granted%'";
            comesTrue(() -> value(waiting).equals("1"), () -> "it does not wait");
            waits.interrupt();
            waits.join(1000);
            equal(isInterrupted.get(), true);
            // Granted all the same, and given back.
            value("SELECT lease_revoke('job')");
            String left = "SELECT (%s) + (%s)".formatted(HELD, waiting);
            comesTrue(() -> value(left).equals("0"), () -> "it is left");
            value("SELECT lease_acquire('job')");
        }
        value("SELECT lease_revoke('job')");
        try (Lease lease = fence.lease("job")) {
            Thread.currentThread().interrupt();
        }
        equal(Thread.interrupted(), true);
        equal(value(HELD), "0");
    }

    public void aDriverThatNeverSettlesHoldsNobodyUp() throws Exception {
        CountDownLatch never = new CountDownLatch(1);
        AtomicBoolean hangs = new AtomicBoolean(true);
        Callable<Connection> source = () -> instead(Connection.class, connected(true), "prepareStatement", arguments -> {
            if (hangs.get()) {
                never.await();
            }
            return NOTHING;
        });
        try (Fence hanging = new Fence(source)) {
            equal(thrown(FenceException.class, () -> hanging.lease("job", SHORT)).getClass(), FenceException.class);
            hangs.set(false);
            Lease lease = hanging.lease("job", SHORT);
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

    public void whoAcquiresHoldsUpNoRelease() throws Exception {
        CountDownLatch never = new CountDownLatch(1);
        AtomicBoolean isDead = new AtomicBoolean();
        Fence dead = new Fence(() -> {
            if (isDead.get()) {
                never.await();
            }
            return connected(true);
        });
        dead.lease("job", new Options().ttl(Duration.ofSeconds(6)));
        isDead.set(true);
        run(admin, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query ~ '^SELECT.*lease_' AND pid <> pg_backend_pid()");
        List<String> told = new CopyOnWriteArrayList<>();
        Body acquires = () -> told.add(thrown(FenceException.class, () -> dead.lease("other", SHORT)).getMessage());
        List<Thread> all = Stream.generate(() -> started(acquires)).limit(20).toList();
        Thread.sleep(300);
        dead.close();
        for (Thread one : all) {
            one.join();
        }
        equal(told.stream().filter(one -> one.contains("answered")).count() < 10, true);
        never.countDown();
    }

    public void aThreadThatCannotBeStartedIsToldAndTriedAgain() throws Exception {
        ThreadFactory starts = Threads.POOL.getThreadFactory();
        comesTrue(() -> Threads.POOL.getPoolSize() == 0, () -> "there are threads yet");
        Threads.POOL.setThreadFactory(work -> {
            throw new OutOfMemoryError("unable to create native thread (planted)");
        });
        FenceException error = thrown(FenceException.class, () -> fence.lease("job"));
        equal(error.getMessage().contains("thread"), true);
        Threads.POOL.setThreadFactory(starts);
        try (Lease lease = fence.lease("job", new Options().ttl(Duration.ofSeconds(6)))) {
            Threads.POOL.setThreadFactory(work -> {
                throw new OutOfMemoryError("unable to create native thread (planted)");
            });
            Thread.sleep(3500);
            Threads.POOL.setThreadFactory(starts);
            Thread.sleep(3000);
            lease.check();
        } finally {
            Threads.POOL.setThreadFactory(starts);
        }
    }

    public void aLossIsToldWithoutAThread() throws Exception {
        ThreadFactory starts = Threads.POOL.getThreadFactory();
        Lease lease = fence.lease("job", SHORT);
        Threads.POOL.setThreadFactory(work -> {
            throw new OutOfMemoryError("unable to create native thread (planted)");
        });
        // None waits for work.
        Threads.POOL.setKeepAliveTime(1, TimeUnit.MILLISECONDS);
        try {
            equal(lease.lost().get(20, TimeUnit.SECONDS).reason(), Reason.DEADLINE);
        } finally {
            Threads.POOL.setKeepAliveTime(1, TimeUnit.SECONDS);
            Threads.POOL.setThreadFactory(starts);
        }
        value("SELECT lease_revoke('job')");
    }

    public void aClosedFenceGivesNothing() throws Exception {
        Fence closed = new Fence(URL);
        Lease lease = closed.lease("job");
        closed.close();
        equal(value(HELD), "0");
        thrown(LeaseLost.class, lease::check);
        lease.close();
        closed.close();
        thrown(FenceException.class, () -> closed.lease("job"));
    }

    public void completionShowsTheVerbsAndNothingInternal() {
        equal(shown(Fence.class), Set.of("lease", "lead", "guard", "guardAndRelease", "adopted", "schema", "onEvent", "close"));
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
        return type.cast(Proxy.newProxyInstance(Tests.class.getClassLoader(), new Class<?>[] {type}, (self, method, arguments) -> {
            Object changed = method.getName().equals(name) ? instead.call(arguments) : NOTHING;
            try {
                return changed == NOTHING ? method.invoke(real, arguments) : changed;
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
        try (Statement statement = on.createStatement(); ResultSet rows = statement.executeQuery(sql)) {
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

    private static void equal(Object is, Object should) {
        if (!Objects.equals(is, should)) {
            throw new AssertionError("it is " + is + " and should be " + should);
        }
    }

    private static <E extends Throwable> E thrown(Class<E> type, Body body) {
        try {
            body.run();
        } catch (Throwable error) {
            if (type.isInstance(error)) {
                return type.cast(error);
            }
            throw new AssertionError("not " + type, error);
        }
        throw new AssertionError("no " + type);
    }

    private static Thread started(Body body) {
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

    private static void comesTrue(Callable<Boolean> check, Callable<String> otherwise) throws Exception {
        for (int round = 0; !check.call(); round++) {
            if (round == 600) {
                throw new AssertionError(otherwise.call());
            }
            Thread.sleep(50);
        }
    }
}
