package pgfence;

import com.google.gson.*;

import pgfence.Fence.*;
import pgfence.FenceException.*;

import java.io.*;
import java.sql.*;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.*;

/**
 * The worker of the scenarios in Java. It reads orders, a JSON object in each line, and writes the
 * result of each.
 *
 * <p>The orders and results are the same for the clients of all languages. They are specified in
 * clients/new-language.md.
 */
final class Worker {
    private static final String CLAIM =
            """
            UPDATE run SET held_until = clock_timestamp() + ? * interval '1 ms' WHERE id = (
                SELECT id FROM run WHERE held_until IS NULL OR held_until < clock_timestamp()
                FOR UPDATE SKIP LOCKED) RETURNING fence""";

    private static final Gson JSON = new Gson();
    private static final BufferedReader LINES =
            new BufferedReader(new InputStreamReader(System.in));

    private final String url;
    private final Fence fence;
    private volatile Holding lease;

    /** The table that the worker writes: that of its row lease, or "work". */
    private String table = "work";

    private final List<Lease> leases = new ArrayList<>();

    /** The names of leases whose renewals are not written. */
    private final Set<String> quietNames = ConcurrentHashMap.newKeySet();

    private CountDownLatch stop;
    private Thread leader;

    /** What the work of the leader does next. */
    private volatile String nextWork = "";

    /** True if the fence's next connection cannot be opened. */
    private volatile boolean failsToOpen;

    public static void main(String[] arguments) throws IOException, SQLException {
        System.setProperty("java.util.logging.SimpleFormatter.format", "%5$s%n");
        Worker worker = new Worker(next());
        Runtime.getRuntime().addShutdownHook(new Thread(worker.fence::close));
        try (worker.fence) {
            for (Order order = next(); order != null; order = next()) {
                try {
                    worker.follow(order);
                } catch (Exception error) {
                    sayError(error);
                }
            }
        }
    }

    private Worker(Order server) throws SQLException {
        url =
                "jdbc:postgresql://%s:%s/%s?user=%s&ApplicationName=%s"
                        .formatted(
                                server.text("host"),
                                server.number("port"),
                                server.text("dbname"),
                                server.text("user"),
                                server.text("application"));
        fence = new Fence(this::openForFence).onEvent(this::sayEvent);
        // A cold Java needs longer to load the driver than a short ttl leaves for a connection.
        open("").close();
        say("connected");
    }

    /** Opens a connection for the fence. */
    private Connection openForFence() throws SQLException {
        if (failsToOpen) {
            failsToOpen = false;
            throw new AssertionError("broken");
        }
        return open("&connectTimeout=2&socketTimeout=30&assumeMinServerVersion=9.0");
    }

    private Connection open(String options) throws SQLException {
        return DriverManager.getConnection(url + "&prepareThreshold=0" + options);
    }

    // Results.

    private static synchronized void say(String event, Object... more) {
        Map<String, Object> line =
                new LinkedHashMap<>(Map.of("event", event, "at", System.currentTimeMillis()));
        for (int index = 0; index < more.length; index += 2) {
            line.put((String) more[index], more[index + 1]);
        }
        System.out.println(JSON.toJson(line));
        System.out.flush();
    }

    /** Returns until when the lease is held, in milliseconds since 1970. */
    private static long deadline(Duration remaining, long wall) {
        return wall + remaining.toMillis();
    }

    private static String errorKind(Exception error, String state) {
        if (error instanceof TransactionLost lost) {
            return lost.inDoubt() ? "in-doubt" : "transaction-lost";
        }
        if (error instanceof LeaseTaken) return "taken";
        if (error instanceof LeaseLost) return "lost";
        if (error instanceof NotInstalled) return "not-installed";
        if (error instanceof NotGranted) return "not-granted";
        if (state != null) return "refused";
        if (error instanceof FenceException) return "no-answer";
        if (error instanceof InterruptedException || error instanceof Expired) return "deadline";
        return "other";
    }

    private static void sayError(Exception error) {
        String state =
                error instanceof Refused refused
                        ? refused.sqlState()
                        : error instanceof SQLException sql ? sql.getSQLState() : null;
        String kind = errorKind(error, state);
        say(
                "refused",
                "error",
                kind,
                "sqlstate",
                state,
                "message",
                String.valueOf(error.getMessage()));
    }

    private void sayEvent(Event event) {
        String name = event.names().get(0);
        long wall = System.currentTimeMillis();
        if (event.kind() == Event.Kind.LOST) {
            say("lost", "name", name, "reason", event.reason().toString());
        } else if (event.kind() == Event.Kind.RENEWED && !quietNames.contains(name)) {
            say("renewed", "token", event.token(), "deadline", deadline(event.remaining(), wall));
        }
    }

    // Orders.

    /** An order or a step. A missing value is null, 0 or false. */
    private record Order(Map<String, JsonElement> parts) {
        String text(String key) {
            return parts.containsKey(key) ? parts.get(key).getAsString() : null;
        }

        long number(String key) {
            return parts.containsKey(key) ? parts.get(key).getAsLong() : 0;
        }

        Duration span(String key) {
            return Duration.ofMillis(number(key));
        }

        List<String> names() {
            return parts.get("names").getAsJsonArray().asList().stream()
                    .map(JsonElement::getAsString)
                    .toList();
        }

        boolean flag(String key) {
            return parts.containsKey(key) && parts.get(key).getAsBoolean();
        }
    }

    private static Order next() throws IOException {
        String line = LINES.readLine();
        return line == null
                ? null
                : new Order(JsonParser.parseString(line).getAsJsonObject().asMap());
    }

    private void follow(Order order) throws Exception {
        switch (order.text("do")) {
            case "acquire" -> acquire(order);
            case "claim" -> claim(order);
            case "hold" -> hold(order);
            case "holding" -> holding();
            case "release-all" -> releaseAll();
            case "adopted" -> {
                lease = fence.adopted(order.text("name"), order.number("token"));
                table = "work";
                say("adopted", "token", lease.token());
            }
            case "check" -> {
                check();
                say("held");
            }
            case "release" -> {
                check();
                ((Lease) held()).close();
                say("released");
            }
            case "write" -> write(order);
            case "unfenced" -> {
                try (Connection connection = open("")) {
                    update(connection, order.text("value"));
                }
                say("wrote");
            }
            case "truncate" -> {
                try (Connection connection = open("")) {
                    held().guard(connection, () -> execute(connection, "TRUNCATE work"));
                }
                say("wrote");
            }
            case "guard" -> {
                Holding held = held();
                try (Connection connection = open("")) {
                    transaction(connection, steps -> held.guard(connection, steps::call));
                }
            }
            case "guard-all" -> {
                try (Connection connection = open("")) {
                    transaction(connection, steps -> fence.guard(connection, leases, steps::call));
                }
            }
            case "present" -> present();
            case "break" -> {
                failsToOpen = true;
                say("done");
            }
            case "lead" -> lead(order.text("name"), order.span("ttl_ms"));
            case "stop" -> {
                stop.countDown();
                say("done");
            }
            case "work" -> {
                nextWork = order.text("how");
                say("done");
            }
            case "census" -> say("census", "tasks", Thread.activeCount());
            case "close" -> close();
            case "update", "sleep", "commit", "rollback", "commit-itself", "fail-and-go-on" ->
                    throw new LeaseLost(
                            Reason.RELEASED,
                            null,
                            List.of("its transaction has ended"),
                            false,
                            null);
            default -> throw new IllegalArgumentException("unknown order");
        }
    }

    private Holding held() {
        if (lease == null) {
            throw new LeaseLost(Reason.GONE, null, List.of("job"), false, null);
        }
        return lease;
    }

    private void check() {
        if (held() instanceof Lease own) {
            own.check();
        }
    }

    private void acquire(Order order) throws Exception {
        endBlock();
        Options options = new Options().ttl(order.span("ttl_ms")).waitUpTo(order.span("wait_ms"));
        options = order.flag("session") ? options.session() : options;
        options = order.flag("shared") ? options.shared() : options;
        options = order.number("slots") > 0 ? options.slots((int) order.number("slots")) : options;
        options = order.text("holder") != null ? options.holder(order.text("holder")) : options;
        options = order.flag("reclaim") ? options.reclaim() : options;
        Thread caller = Thread.currentThread();
        Thread alarm =
                new Thread(
                        () -> {
                            try {
                                Thread.sleep(order.number("within_ms"));
                                caller.interrupt();
                            } catch (InterruptedException inTime) {
                                // The acquire has ended before its deadline.
                            }
                        });
        if (order.number("within_ms") > 0) {
            alarm.start();
        }
        try {
            Lease taken = fence.lease(order.names(), options);
            lease = taken;
            long wall = System.currentTimeMillis();
            say("acquired", "token", taken.token(), "deadline", deadline(taken.remaining(), wall));
        } catch (LeaseTaken error) {
            say("taken");
        } finally {
            alarm.interrupt();
            alarm.join();
        }
    }

    private void claim(Order order) throws Exception {
        endBlock();
        try (Connection connection = open("");
                PreparedStatement statement = connection.prepareStatement(CLAIM)) {
            statement.setLong(1, order.number("ttl_ms"));
            ResultSet claimed = statement.executeQuery();
            if (!claimed.next()) {
                say("taken");
                return;
            }
            long token = claimed.getLong(1);
            Lease kept = fence.keepRow("run", Map.of("id", 1), token, order.span("ttl_ms"));
            lease = kept;
            table = "run";
            long wall = System.currentTimeMillis();
            say("acquired", "token", kept.token(), "deadline", deadline(kept.remaining(), wall));
        }
    }

    /** Ends the block of the lease that the worker has, unless that is an adopted one. */
    private void endBlock() {
        Holding ending = lease;
        lease = null;
        table = "work";
        try {
            if (ending instanceof Lease own) {
                own.close();
            }
        } catch (LeaseLost lost) {
            // An event has reported the loss.
        }
    }

    private void hold(Order order) throws Exception {
        quietNames.addAll(order.names());
        for (String name : order.names()) {
            try {
                leases.add(fence.lease(name, new Options().ttl(order.span("ttl_ms"))));
            } catch (LeaseTaken error) {
                say("taken");
                return;
            }
        }
        holding();
    }

    private void holding() {
        say("holding", "count", leases.stream().filter(Lease::isHeld).count());
    }

    private void releaseAll() {
        for (Lease lease : leases) {
            try {
                lease.close();
            } catch (LeaseLost lost) {
                // An event has reported the loss.
            }
        }
        leases.clear();
        say("released");
    }

    private void write(Order order) throws Exception {
        Holding held = held();
        try (Connection connection = open("")) {
            if (order.flag("read_first")) {
                execute(connection, "SELECT 1");
            }
            if (order.flag("release")) {
                held.guardAndRelease(connection, () -> update(connection, order.text("value")));
            } else {
                held.guard(connection, () -> update(connection, order.text("value")));
            }
        }
        say("wrote");
    }

    private void present() throws Exception {
        try (Connection connection = open("&options=" + held().options().replace(" ", "%20"))) {
            connection.setAutoCommit(false);
            say("presented");
            try {
                steps(connection);
                connection.commit();
                say("committed");
            } catch (RolledBack rolledBack) {
                say("rolled-back");
            }
        } catch (SQLException error) {
            throw lease instanceof Lease own && !own.isHeld()
                    ? new LeaseLost(Reason.GONE, null, own.names(), false, error)
                    : error;
        }
    }

    private interface Steps {
        void call() throws Exception;
    }

    private interface Guard {
        void run(Steps steps) throws Exception;
    }

    /** Runs the steps that it reads, up to {@code commit} or {@code rollback}, in one guard. */
    private void transaction(Connection connection, Guard guard) throws Exception {
        try {
            guard.run(
                    () -> {
                        say("guarded");
                        steps(connection);
                    });
            say("committed");
        } catch (RolledBack rolledBack) {
            say("rolled-back");
        }
    }

    @SuppressWarnings("serial")
    private static final class RolledBack extends Exception {}

    /** The caller's deadline has passed. */
    @SuppressWarnings("serial")
    private static final class Expired extends Exception {}

    /** The exception that the work of a leader throws on request. */
    @SuppressWarnings("serial")
    private static final class Failed extends Exception {}

    private void steps(Connection connection) throws Exception {
        for (Order step = next(); step != null; step = next()) {
            switch (step.text("do")) {
                case "commit" -> {
                    return;
                }
                case "rollback" -> throw new RolledBack();
                case "update" -> {
                    update(connection, step.text("value"));
                    say("updated");
                }
                case "sleep" -> sleep(connection, step);
                case "guard" ->
                        transaction(connection, steps -> held().guard(connection, steps::call));
                case "check" -> {
                    check();
                    say("held");
                }
                case "commit-itself" -> {
                    connection.commit();
                    say("done");
                }
                case "fail-and-go-on" -> {
                    try {
                        execute(connection, "SELECT 1 / 0");
                    } catch (SQLException swallowed) {
                        say("done");
                    }
                }
                default -> throw new IllegalArgumentException("unknown order");
            }
        }
    }

    private static void sleep(Connection connection, Order step) throws Exception {
        try (Statement statement = connection.createStatement()) {
            statement.setQueryTimeout((int) (step.number("within_ms") / 1000));
            statement.execute("SELECT pg_sleep(" + step.number("ms") / 1000.0 + ")");
            say("slept");
        } catch (SQLException error) {
            // JDBC cancels a statement at its deadline.
            throw step.number("within_ms") > 0 && "57014".equals(error.getSQLState())
                    ? new Expired()
                    : error;
        }
    }

    private void update(Connection connection, String value) throws SQLException {
        try (PreparedStatement statement =
                connection.prepareStatement("UPDATE " + table + " SET value = ? WHERE id = 1")) {
            statement.setString(1, value);
            statement.executeUpdate();
        }
    }

    private static void execute(Connection connection, String sql) throws SQLException {
        try (Statement statement = connection.createStatement()) {
            statement.execute(sql);
        }
    }

    private void lead(String name, Duration ttl) {
        CountDownLatch stopping = new CountDownLatch(1);
        stop = stopping;
        nextWork = "";
        leader =
                new Thread(
                        () -> {
                            try {
                                fence.lead(name, ttl, stopping, taken -> doWork(taken, stopping));
                                say("stopped");
                            } catch (Failed failed) {
                                say("stopped", "reason", "fails");
                            } catch (Exception error) {
                                say("stopped", "reason", error.toString());
                            }
                        });
        leader.start();
        say("done");
    }

    private void doWork(Lease taken, CountDownLatch stopping) throws Exception {
        lease = taken;
        long wall = System.currentTimeMillis();
        say("leading", "token", taken.token(), "deadline", deadline(taken.remaining(), wall));
        while (!stopping.await(50, TimeUnit.MILLISECONDS)) {
            String work = nextWork;
            nextWork = "";
            switch (work) {
                case "returns" -> {
                    return;
                }
                case "fails" -> throw new Failed();
                case "loses-connection" -> {
                    try (Connection connection = open("")) {
                        execute(connection, "SELECT pg_terminate_backend(pg_backend_pid())");
                    }
                }
                default -> taken.check();
            }
        }
    }

    private void close() throws InterruptedException {
        if (leader != null) {
            stop.countDown();
            leader.join();
            leader = null;
        }
        fence.close();
        lease = null;
        leases.clear();
        say("closed");
    }
}
