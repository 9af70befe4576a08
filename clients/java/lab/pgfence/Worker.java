package pgfence;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.SQLException;
import java.sql.Statement;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.concurrent.TimeUnit;
import java.util.stream.Collectors;
import pgfence.FenceException.*;

/**
 * The laboratory's worker in Java: does what it reads, a JSON object a line, and says what became of it.
 *
 * <p>What it is told and what it says is the same for the clients of all languages, and written down in
 * clients/README.md. {@code --plant} builds in a known fault, which the laboratory must catch.
 */
final class Worker {
    private static final Map<Class<?>, String> KINDS = Map.of(
            StaleToken.class, "stale",
            NoToken.class, "no-token",
            NeverIssued.class, "never-issued",
            NotSpeaking.class, "not-speaking",
            CannotBeFenced.class, "cannot-be-fenced",
            LeaseLost.class, "lost",
            TransactionLost.class, "transaction-lost");

    private static final Set<String> PLANTS =
            Set.of("deadline-from-answer", "error-is-loss", "renew-in-work", "hang-hides-loss", "adopts-late", "adopts-once");

    private static final BufferedReader LINES = new BufferedReader(new InputStreamReader(System.in));
    private static String plant = "";
    /** The connection of the transaction that is open. */
    private static volatile Connection connection;

    private final String url;
    private final Fence fence;
    private volatile Holding lease;
    private Thread leading;

    public static void main(String[] arguments) throws IOException {
        if (arguments.length == 2 && arguments[0].equals("--plant")) {
            plant = arguments[1];
            if (!PLANTS.contains(plant)) {
                throw new IllegalArgumentException("no such plant");
            }
        }
        Worker worker = new Worker(order().orElseThrow());
        for (Optional<Order> order = order(); order.isPresent(); order = order()) {
            try {
                worker.follow(order.get());
            } catch (Exception error) {
                refused(error);
            }
        }
    }

    private Worker(Order place) {
        url = "jdbc:postgresql://%s:%s/%s?user=%s&ApplicationName=%s&prepareThreshold=0".formatted(
                place.text("host"), place.number("port"), place.text("dbname"), place.text("user"),
                place.text("application"));
        fence = new Fence(url) {
            @Override
            Lease make(LeaseRequest request) {
                return switch (plant) {
                    case "deadline-from-answer" -> new DeadlineFromAnswer(request);
                    case "error-is-loss" -> new ErrorIsLoss(request);
                    case "renew-in-work" -> new RenewInWork(request);
                    case "hang-hides-loss" -> new HangHidesLoss(request);
                    default -> new Observed(request);
                };
            }

            @Override
            Adopted make(AdoptRequest request) {
                return switch (plant) {
                    case "adopts-late" -> new AdoptsLate(request);
                    case "adopts-once" -> new AdoptsOnce(request);
                    default -> new Adopted(request);
                };
            }
        };
        say("connected");
    }

    // What it says

    private static synchronized void say(String event, Object... more) {
        StringBuilder line = new StringBuilder("{\"event\": \"" + event + "\", \"at\": " + System.currentTimeMillis());
        for (int index = 0; index < more.length; index += 2) {
            Object value = more[index + 1];
            line.append(", \"").append(more[index]).append("\": ");
            line.append(value instanceof String text ? quoted(text) : value);
        }
        System.out.println(line.append('}'));
        System.out.flush();
    }

    private static String quoted(String text) {
        return text.chars()
                .mapToObj(one -> one == '"' || one == '\\' || one < ' ' ? "\\u%04x".formatted(one) : "" + (char) one)
                .collect(Collectors.joining("", "\"", "\""));
    }

    private static void refused(Throwable error) {
        Optional<FenceException> told = FenceException.classify(error);
        String kind = told.map(found -> KINDS.get(found.getClass())).orElse("other");
        String state = told.map(FenceException::sqlState).orElse(error instanceof SQLException sql ? sql.getSQLState() : null);
        say("refused", "error", kind, "sqlstate", state, "message", error.toString());
    }

    // What it is told

    private record Order(Map<String, Object> parts) {
        String text(String key) {
            return (String) parts.get(key);
        }

        long number(String key) {
            return (Long) parts.getOrDefault(key, 0L);
        }

        boolean is(String key) {
            return (Boolean) parts.getOrDefault(key, false);
        }
    }

    private static Optional<Order> order() throws IOException {
        return Optional.ofNullable(LINES.readLine()).map(line -> new Order(Json.object(line)));
    }

    private void follow(Order order) throws Exception {
        switch (order.text("do")) {
            case "acquire" -> acquire(order);
            case "adopt" -> adopt(order);
            case "check" -> {
                heldLease().check();
                say("held");
            }
            case "renew" -> {
                heldLease().renew();
                say("done");
            }
            case "release" -> release();
            case "write" -> write(order);
            case "guard" -> transaction("guarded", true);
            case "present" -> transaction("presented", false);
            case "unfenced" -> unfenced(order.text("value"));
            case "truncate" -> truncate();
            case "starve" -> {
                heldLease().starved = true;
                say("done");
            }
            case "lead" -> lead(order);
            case "census" -> say("census", "tasks", Thread.activeCount());
            case "close" -> close();
            case "update", "sleep", "commit", "rollback" ->
                throw new LeaseLost(Reason.RELEASED, List.of("its transaction has ended"), null);
            default -> throw new IllegalArgumentException("what?");
        }
    }

    private Holding held() {
        if (lease == null) {
            throw new LeaseLost(Reason.GONE, List.of("job"), null);
        }
        return lease;
    }

    private Observed heldLease() {
        return (Observed) held();
    }

    @SuppressWarnings("unchecked")
    private void acquire(Order order) throws Exception {
        if (lease != null) {
            lease.release();
            lease = null;
        }
        LeaseRequest request = fence.lease(((List<String>) order.parts().get("names")).toArray(String[]::new))
                .ttl(Duration.ofMillis(order.number("ttl_ms")))
                .waiting(Duration.ofMillis(order.number("wait_ms")));
        if (order.is("session")) {
            request.session();
        }
        if (order.is("shared")) {
            request.shared();
        }
        if (order.number("slots") > 0) {
            request.slots((int) order.number("slots"));
        }
        Optional<Lease> taken = request.tryAcquire();
        if (taken.isEmpty()) {
            say("taken");
            return;
        }
        lease = taken.get();
        say("acquired", "token", lease.token(), "deadline", heldLease().until());
    }

    private void adopt(Order order) throws Exception {
        Optional<Adopted> adopted = fence.adopt(order.text("name"), order.number("token"))
                .waiting(Duration.ofMillis(order.number("wait_ms")))
                .tryAcquire();
        if (adopted.isEmpty()) {
            say("taken");
            return;
        }
        lease = adopted.get();
        say("adopted", "token", lease.token());
    }

    private void release() {
        Holding releasing = held();
        releasing.release();
        if (releasing.loss() != null) {
            releasing.refuseIfOver();
        }
        say("released");
    }

    /** A whole transaction; with {@code release}, the last one. */
    private void write(Order order) throws Exception {
        Holding held = held();
        try (Connection on = DriverManager.getConnection(url)) {
            Guarded guarded = "present".equals(order.text("by")) ? held.present(on) : held.guard(on);
            (order.is("release") ? guarded.releasing() : guarded).run(c -> update(c, order.text("value")));
        }
        say("wrote");
    }

    private void truncate() throws Exception {
        Holding held = held();
        try (Connection on = DriverManager.getConnection(url)) {
            held.guard(on).run(c -> execute(c, "TRUNCATE work"));
        }
        say("wrote");
    }

    /** A write that knows nothing of leases. */
    private void unfenced(String value) throws Exception {
        try (Connection on = DriverManager.getConnection(url)) {
            update(on, value);
        }
        say("wrote");
    }

    private static void update(Connection on, String value) throws SQLException {
        execute(on, "UPDATE work SET value = '" + value + "' WHERE id = 1");
    }

    private static void execute(Connection on, String sql) throws SQLException {
        try (Statement statement = on.createStatement()) {
            statement.execute(sql);
        }
    }

    /** Until it reads {@code commit} or {@code rollback}, what it does is one transaction. */
    private void transaction(String begun, boolean guards) throws Exception {
        Holding held = held();
        try (Connection on = DriverManager.getConnection(url)) {
            Guarded guarded = guards ? held.guard(on) : held.present(on);
            guarded.run(c -> {
                connection = c;
                try {
                    say(begun);
                    steps(c);
                } finally {
                    connection = null;
                }
            });
            say("committed");
        } catch (RolledBack asked) {
            say("rolled-back");
        }
    }

    @SuppressWarnings("serial")
    private static final class RolledBack extends Exception {}

    private static void steps(Connection on) throws SQLException, IOException, RolledBack {
        while (true) {
            Order step = order().orElseThrow();
            switch (step.text("do")) {
                case "update" -> {
                    update(on, step.text("value"));
                    say("updated");
                }
                case "sleep" -> {
                    // In the server, so that the work hangs in its connection.
                    execute(on, "SELECT pg_sleep(" + step.number("ms") / 1000.0 + ")");
                    say("slept");
                }
                case "commit" -> {
                    return;
                }
                default -> throw new RolledBack();
            }
        }
    }

    private void lead(Order order) {
        Duration ttl = Duration.ofMillis(order.number("ttl_ms"));
        leading = new Thread(() -> {
            try {
                fence.lead(order.text("name"), ttl, leads -> {
                    lease = leads;
                    say("leading", "token", lease.token(), "deadline", heldLease().until());
                    while (true) {
                        leads.sleep(Duration.ofSeconds(60));
                    }
                });
            } catch (InterruptedException asked) {
                return;
            } catch (Exception error) {
                say("stopped", "message", error.toString());
            }
        });
        leading.start();
        say("done");
    }

    private void close() throws InterruptedException {
        if (leading != null) {
            leading.interrupt();
            leading.join();
            leading = null;
        }
        if (lease != null) {
            lease.release();
            lease = null;
        }
        say("closed");
    }

    /** A lease that says when it was renewed and lost, and whose heartbeat can be starved. */
    private static class Observed extends Lease {
        volatile boolean starved;
        private volatile boolean acquired;

        Observed(LeaseRequest request) {
            super(request);
            onLost.add(loss -> say("lost", "reason", loss.reason().toString()));
        }

        /** Until when it believes to be held, in milliseconds since 1970. */
        long until() {
            long wall = System.currentTimeMillis();
            return wall + TimeUnit.NANOSECONDS.toMillis(remaining().toNanos());
        }

        @Override
        void countsFrom(long before, long token) {
            super.countsFrom(before, token);
            if (acquired) {
                say("renewed", "token", token, "deadline", until());
            }
            acquired = true;
        }

        @Override
        void beat() {
            while (starved && !isEnding()) {
                try {
                    Thread.sleep(20);
                } catch (InterruptedException nobodyDoes) {
                    Thread.currentThread().interrupt();
                }
            }
            if (!starved) {
                super.beat();
            }
        }
    }

    private static final class DeadlineFromAnswer extends Observed {
        DeadlineFromAnswer(LeaseRequest request) {
            super(request);
        }

        @Override
        void countsFrom(long before, long token) {
            super.countsFrom(Clock.now(), token);
        }
    }

    private static final class ErrorIsLoss extends Observed {
        ErrorIsLoss(LeaseRequest request) {
            super(request);
        }

        @Override
        Long askToRenew() throws SQLException {
            try {
                return super.askToRenew();
            } catch (SQLException error) {
                lose(Reason.DENIED, error);
                throw error;
            }
        }
    }

    private static final class RenewInWork extends Observed {
        RenewInWork(LeaseRequest request) {
            super(request);
        }

        @Override
        Long askToRenew() throws SQLException {
            Connection work = connection;
            return work == null ? super.askToRenew() : Sql.value(work, "SELECT lease_renew(?, ?)", names().get(0), token());
        }
    }

    /** The deadline is looked at by the heartbeat only. */
    private static final class HangHidesLoss extends Observed {
        HangHidesLoss(LeaseRequest request) {
            super(request);
        }

        @Override
        void watch() {}
    }

    /** A number is made known by the first transaction that is guarded with it. */
    private static final class AdoptsLate extends Adopted {
        AdoptsLate(AdoptRequest request) {
            super(request);
        }

        @Override
        boolean adopt() {
            return true;
        }
    }

    /** A number is made known once, and never again. */
    private static final class AdoptsOnce extends Adopted {
        AdoptsOnce(AdoptRequest request) {
            super(request);
        }

        @Override
        void guardOne(Connection on, String name) throws SQLException {
            Sql.value(on, "SELECT lease_guard(?, ?)", name, token());
        }

        @Override
        boolean mend() {
            return false;
        }
    }
}
