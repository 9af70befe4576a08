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
 * The worker of the scenarios in Java: does what it reads, a JSON object a line, and says what
 * became of it.
 *
 * <p>What it is told and what it says is the same for the clients of all languages, and written
 * down in clients/new-language.md.
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

    /** What it writes: that of the row that it keeps, or work. */
    private String table = "work";

    private final List<Lease> many = new ArrayList<>();
    private final Set<String> crowd = ConcurrentHashMap.newKeySet();
    private CountDownLatch stop;
    private Thread leads;
    private volatile String how = "";

    /** The next connection of the fence's cannot be opened. */
    private volatile boolean isBroken;

    public static void main(String[] arguments) throws IOException, SQLException {
        System.setProperty("java.util.logging.SimpleFormatter.format", "%5$s%n");
        Worker worker = new Worker(next());
        Runtime.getRuntime().addShutdownHook(new Thread(worker.fence::close));
        try (worker.fence) {
            for (Order order = next(); order != null; order = next()) {
                try {
                    worker.follow(order);
                } catch (Exception error) {
                    refused(error);
                }
            }
        }
    }

    private Worker(Order place) throws SQLException {
        url =
                "jdbc:postgresql://%s:%s/%s?user=%s&ApplicationName=%s"
                        .formatted(
                                place.text("host"),
                                place.number("port"),
                                place.text("dbname"),
                                place.text("user"),
                                place.text("application"));
        fence = new Fence(this::opens).onEvent(this::tell);
        // A cold Java needs longer to load the driver than a short ttl leaves for a connection.
        opened("").close();
        say("connected");
    }

    /** A connection for the fence. */
    private Connection opens() throws SQLException {
        if (isBroken) {
            isBroken = false;
            throw new AssertionError("broken");
        }
        return opened("&connectTimeout=2&socketTimeout=30&assumeMinServerVersion=9.0");
    }

    private Connection opened(String options) throws SQLException {
        return DriverManager.getConnection(url + "&prepareThreshold=0" + options);
    }

    // Its answers

    private static synchronized void say(String event, Object... more) {
        Map<String, Object> line =
                new LinkedHashMap<>(Map.of("event", event, "at", System.currentTimeMillis()));
        for (int index = 0; index < more.length; index += 2) {
            line.put((String) more[index], more[index + 1]);
        }
        System.out.println(JSON.toJson(line));
        System.out.flush();
    }

    /** Until when it believes to be held, in milliseconds since 1970. */
    private static long deadline(Duration remaining, long wall) {
        return wall + remaining.toMillis();
    }

    private static String kind(Exception error, String state) {
        if (error instanceof TransactionLost lost) {
            return lost.inDoubt() ? "in-doubt" : "transaction-lost";
        }
        if (error instanceof LeaseTaken) return "taken";
        if (error instanceof LeaseLost) return "lost";
        if (error instanceof NotInstalled) return "not-installed";
        if (error instanceof NotGranted) return "not-granted";
        if (state != null) return "refused";
        if (error instanceof FenceException) return "no-answer";
        if (error instanceof InterruptedException || error instanceof Passed) return "deadline";
        return "other";
    }

    private static void refused(Exception error) {
        String state =
                error instanceof Refused told
                        ? told.sqlState()
                        : error instanceof SQLException sql ? sql.getSQLState() : null;
        String kind = kind(error, state);
        say(
                "refused",
                "error",
                kind,
                "sqlstate",
                state,
                "message",
                String.valueOf(error.getMessage()));
    }

    private void tell(Event event) {
        String name = event.names().get(0);
        long wall = System.currentTimeMillis();
        if (event.kind() == Event.Kind.LOST) {
            say("lost", "name", name, "reason", event.reason().toString());
        } else if (event.kind() == Event.Kind.RENEWED && !crowd.contains(name)) {
            say("renewed", "token", event.token(), "deadline", deadline(event.remaining(), wall));
        }
    }

    // Its orders

    /** A missing value is null, 0, false. */
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

        boolean is(String key) {
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
                try (Connection on = opened("")) {
                    update(on, order.text("value"));
                }
                say("wrote");
            }
            case "truncate" -> {
                try (Connection on = opened("")) {
                    held().guard(on, () -> execute(on, "TRUNCATE work"));
                }
                say("wrote");
            }
            case "guard" -> {
                Holding held = held();
                try (Connection on = opened("")) {
                    transaction(on, steps -> held.guard(on, steps::call));
                }
            }
            case "guard-all" -> {
                try (Connection on = opened("")) {
                    transaction(on, steps -> fence.guard(on, many, steps::call));
                }
            }
            case "present" -> present();
            case "break" -> {
                isBroken = true;
                say("done");
            }
            case "lead" -> lead(order.text("name"), order.span("ttl_ms"));
            case "stop" -> {
                stop.countDown();
                say("done");
            }
            case "work" -> {
                how = order.text("how");
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
        options = order.is("session") ? options.session() : options;
        options = order.is("shared") ? options.shared() : options;
        options = order.number("slots") > 0 ? options.slots((int) order.number("slots")) : options;
        options = order.text("holder") != null ? options.holder(order.text("holder")) : options;
        options = order.is("reclaim") ? options.reclaim() : options;
        Thread caller = Thread.currentThread();
        Thread alarm =
                new Thread(
                        () -> {
                            try {
                                Thread.sleep(order.number("within_ms"));
                                caller.interrupt();
                            } catch (InterruptedException inTime) {
                                // As it should be.
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
        try (Connection on = opened("");
                PreparedStatement statement = on.prepareStatement(CLAIM)) {
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

    /** Of the lease that it has, unless that is an adopted one. */
    private void endBlock() {
        Holding ending = lease;
        lease = null;
        table = "work";
        try {
            if (ending instanceof Lease own) {
                own.close();
            }
        } catch (LeaseLost told) {
            // By an event.
        }
    }

    private void hold(Order order) throws Exception {
        crowd.addAll(order.names());
        for (String name : order.names()) {
            try {
                many.add(fence.lease(name, new Options().ttl(order.span("ttl_ms"))));
            } catch (LeaseTaken error) {
                say("taken");
                return;
            }
        }
        holding();
    }

    private void holding() {
        say("holding", "count", many.stream().filter(Lease::isHeld).count());
    }

    private void releaseAll() {
        for (Lease one : many) {
            try {
                one.close();
            } catch (LeaseLost told) {
                // By an event.
            }
        }
        many.clear();
        say("released");
    }

    private void write(Order order) throws Exception {
        Holding held = held();
        try (Connection on = opened("")) {
            if (order.is("read_first")) {
                execute(on, "SELECT 1");
            }
            if (order.is("release")) {
                held.guardAndRelease(on, () -> update(on, order.text("value")));
            } else {
                held.guard(on, () -> update(on, order.text("value")));
            }
        }
        say("wrote");
    }

    private void present() throws Exception {
        try (Connection on = opened("&options=" + held().options().replace(" ", "%20"))) {
            on.setAutoCommit(false);
            say("presented");
            try {
                steps(on);
                on.commit();
                say("committed");
            } catch (RolledBack asked) {
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

    private interface Within {
        void run(Steps steps) throws Exception;
    }

    /** Until it reads {@code commit} or {@code rollback}, what it does is one transaction. */
    private void transaction(Connection on, Within within) throws Exception {
        try {
            within.run(
                    () -> {
                        say("guarded");
                        steps(on);
                    });
            say("committed");
        } catch (RolledBack asked) {
            say("rolled-back");
        }
    }

    @SuppressWarnings("serial")
    private static final class RolledBack extends Exception {}

    /** The caller's own deadline. */
    @SuppressWarnings("serial")
    private static final class Passed extends Exception {}

    /** An exception of the work's own. */
    @SuppressWarnings("serial")
    private static final class Failed extends Exception {}

    private void steps(Connection on) throws Exception {
        for (Order step = next(); step != null; step = next()) {
            switch (step.text("do")) {
                case "commit" -> {
                    return;
                }
                case "rollback" -> throw new RolledBack();
                case "update" -> {
                    update(on, step.text("value"));
                    say("updated");
                }
                case "sleep" -> sleep(on, step);
                case "guard" -> transaction(on, steps -> held().guard(on, steps::call));
                case "commit-itself" -> {
                    on.commit();
                    say("done");
                }
                case "fail-and-go-on" -> {
                    try {
                        execute(on, "SELECT 1 / 0");
                    } catch (SQLException swallowed) {
                        say("done");
                    }
                }
                default -> throw new IllegalArgumentException("unknown order");
            }
        }
    }

    private static void sleep(Connection on, Order step) throws Exception {
        try (Statement statement = on.createStatement()) {
            statement.setQueryTimeout((int) (step.number("within_ms") / 1000));
            statement.execute("SELECT pg_sleep(" + step.number("ms") / 1000.0 + ")");
            say("slept");
        } catch (SQLException error) {
            // JDBC's way of a deadline is to cancel.
            throw step.number("within_ms") > 0 && "57014".equals(error.getSQLState())
                    ? new Passed()
                    : error;
        }
    }

    private void update(Connection on, String value) throws SQLException {
        try (PreparedStatement statement =
                on.prepareStatement("UPDATE " + table + " SET value = ? WHERE id = 1")) {
            statement.setString(1, value);
            statement.executeUpdate();
        }
    }

    private static void execute(Connection on, String sql) throws SQLException {
        try (Statement statement = on.createStatement()) {
            statement.execute(sql);
        }
    }

    private void lead(String name, Duration ttl) {
        CountDownLatch stopping = new CountDownLatch(1);
        stop = stopping;
        how = "";
        leads =
                new Thread(
                        () -> {
                            try {
                                fence.lead(name, ttl, stopping, taken -> leading(taken, stopping));
                                say("stopped");
                            } catch (Failed asked) {
                                say("stopped", "reason", "fails");
                            } catch (Exception error) {
                                say("stopped", "reason", error.toString());
                            }
                        });
        leads.start();
        say("done");
    }

    private void leading(Lease taken, CountDownLatch stopping) throws Exception {
        lease = taken;
        long wall = System.currentTimeMillis();
        say("leading", "token", taken.token(), "deadline", deadline(taken.remaining(), wall));
        while (!stopping.await(50, TimeUnit.MILLISECONDS)) {
            String asked = how;
            how = "";
            switch (asked) {
                case "returns" -> {
                    return;
                }
                case "fails" -> throw new Failed();
                case "loses-connection" -> {
                    try (Connection on = opened("")) {
                        execute(on, "SELECT pg_terminate_backend(pg_backend_pid())");
                    }
                }
                default -> taken.check();
            }
        }
    }

    private void close() throws InterruptedException {
        if (leads != null) {
            stop.countDown();
            leads.join();
            leads = null;
        }
        fence.close();
        lease = null;
        many.clear();
        say("closed");
    }
}
