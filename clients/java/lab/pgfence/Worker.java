package pgfence;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.SQLException;
import java.sql.Statement;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.concurrent.TimeUnit;
import java.util.function.Function;
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

    private static final Set<String> PLANTS = Set.of("deadline-from-answer", "error-is-loss", "renew-in-work",
            "hang-hides-loss", "adopts-late", "adopts-once", "one-null-loses-all", "one-lock-stops-all");

    private static final BufferedReader LINES = new BufferedReader(new InputStreamReader(System.in));
    private static String plant = "";
    /** The connection of the transaction that is open. */
    private static volatile Connection connection;

    private final String url;
    private final Fence fence;
    private volatile Holding lease;
    private volatile boolean isStarved;
    private final List<Lease> holding = new ArrayList<>();
    private final List<Observation> observations = new ArrayList<>();
    private Leadership leading;
    private Thread leads;

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
            Keeper newKeeper() {
                return new Observed(this);
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
            line.append(written(value));
        }
        System.out.println(line.append('}'));
        System.out.flush();
    }

    private static Object written(Object value) {
        if (value instanceof List<?> values) {
            return values.stream().map(one -> written(one).toString()).collect(Collectors.joining(", ", "[", "]"));
        }
        return value instanceof String text ? quoted(text) : value;
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
        say("refused", "error", kind, "sqlstate", state, "message", error.getMessage());
    }

    // What it is told

    private record Order(Map<String, Object> parts) {
        String text(String key) {
            return (String) parts.get(key);
        }

        long number(String key) {
            return (Long) parts.getOrDefault(key, 0L);
        }

        Duration span(String key) {
            return Duration.ofMillis(number(key));
        }

        @SuppressWarnings("unchecked")
        List<String> names() {
            return (List<String>) parts.get("names");
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
            case "guard" -> transaction(held()::guard, "guarded");
            case "present" -> transaction(held()::present, "presented");
            case "unfenced" -> unfenced(order.text("value"));
            case "truncate" -> truncate();
            case "starve" -> {
                isStarved = true;
                say("done");
            }
            case "hold" -> hold(order);
            case "holding" -> say("holding", "count", holding.stream().filter(Lease::isHeld).count());
            case "release-all" -> {
                releaseAll();
                say("released");
            }
            case "resume" -> resume(order);
            case "detach" -> detach();
            case "claim" -> claim(order);
            case "guard-all" -> transaction(on -> fence.guard(on, holding), "guarded");
            case "observe" -> observe(order.text("name"));
            case "lead" -> lead(order);
            case "census" -> say("census", "tasks", Thread.activeCount());
            case "close" -> close();
            case "update", "sleep", "commit", "rollback" ->
                throw new LeaseLost(Reason.RELEASED, List.of("its transaction has ended"), null);
            default -> throw new IllegalArgumentException("unknown order");
        }
    }

    private Holding held() {
        if (lease == null) {
            throw new LeaseLost(Reason.GONE, List.of("job"), null);
        }
        return lease;
    }

    private Lease heldLease() {
        return (Lease) held();
    }

    /** Until when it believes to be held, in milliseconds since 1970. */
    private static long until(Lease lease) {
        long wall = System.currentTimeMillis();
        return wall + TimeUnit.NANOSECONDS.toMillis(lease.remaining().toNanos());
    }

    private void acquire(Order order) throws Exception {
        if (lease != null) {
            lease.release();
            lease = null;
        }
        LeaseRequest request = fence.lease(order.names())
                .ttl(order.span("ttl_ms"))
                .waiting(order.span("wait_ms"))
                .onLost(Worker::lost);
        if (order.number("hold_at_most_ms") > 0) {
            request.holdAtMost(order.span("hold_at_most_ms"));
        }
        if (order.number("hold_at_least_ms") > 0) {
            request.holdAtLeast(order.span("hold_at_least_ms"));
        }
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
        takes(taken.get(), "acquired");
    }

    private void takes(Lease taken, String event) {
        lease = taken;
        say(event, "token", taken.token(), "deadline", until(taken));
    }

    private void resume(Order order) throws Exception {
        takes(fence.lease(order.text("name")).ttl(order.span("ttl_ms")).onLost(Worker::lost).resume(order.number("token")),
                "acquired");
    }

    private void detach() {
        long token = heldLease().detach();
        lease = null;
        say("detached", "token", token);
    }

    private void hold(Order order) throws Exception {
        for (String name : order.names()) {
            Optional<Lease> taken = fence.lease(name).ttl(order.span("ttl_ms")).onLost(Worker::lost).tryAcquire();
            if (taken.isEmpty()) {
                say("taken");
                return;
            }
            holding.add(taken.get());
        }
        say("holding", "count", (long) holding.size());
    }

    private void claim(Order order) throws Exception {
        List<Lease> claimed = fence.claim("SELECT name FROM unnest(?) WITH ORDINALITY AS x(name, number) ORDER BY number",
                (Object) order.names().toArray(String[]::new))
                .ttl(order.span("ttl_ms"))
                .onLost(Worker::lost)
                .acquire((int) order.number("n"));
        holding.addAll(claimed);
        say("claimed", "names", claimed.stream().flatMap(one -> one.names().stream()).toList());
    }

    private void releaseAll() {
        holding.forEach(Lease::release);
        holding.clear();
    }

    private void observe(String name) {
        observations.add(fence.observe(name, leader -> say("leader", "name", name,
                "holder", leader.map(Leader::holder).orElse(null), "token", leader.map(Leader::token).orElse(null))));
        say("done");
    }

    private static void lost(LeaseLost loss) {
        say("lost", "reason", loss.reason().toString(), "name", loss.names().get(0));
    }

    private void adopt(Order order) throws Exception {
        Optional<Adopted> adopted = fence.adopt(order.text("name"), order.number("token"))
                .waiting(order.span("wait_ms"))
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
    private void transaction(Function<Connection, Guarded> under, String begun) throws Exception {
        try (Connection on = DriverManager.getConnection(url)) {
            under.apply(on).run(c -> {
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
        leading = fence.leadership(order.text("name")).ttl(order.span("ttl_ms"));
        leads = new Thread(() -> {
            try {
                leading.run(taken -> {
                    // A loss ends its sleep, and is told there.
                    takes(taken, "leading");
                    try {
                        while (true) {
                            taken.sleep(Duration.ofSeconds(60));
                        }
                    } catch (LeaseLost loss) {
                        if (taken.loss() != null) {
                            lost(loss);
                        }
                        throw loss;
                    }
                });
            } catch (Exception error) {
                say("stopped", "message", error.toString());
            }
        });
        leads.start();
        say("done");
    }

    private void close() throws InterruptedException {
        if (leading != null) {
            leading.stop();
            leads.join();
            leading = null;
        }
        if (lease != null) {
            lease.release();
            lease = null;
        }
        releaseAll();
        observations.forEach(Observation::close);
        observations.clear();
        say("closed");
    }

    /** A batch that is not divided, and waits for its next turn. */
    @SuppressWarnings("serial")
    private static final class Refused extends RuntimeException {}

    /** A keeper that says what it renews, and can be starved. It has the fault that is planted. */
    private final class Observed extends Keeper {
        Observed(Fence fence) {
            super(fence);
        }

        @Override
        void countsFrom(Kept kept, long before, long token) {
            super.countsFrom(kept, plant.equals("deadline-from-answer") ? Clock.now() : before, token);
            Lease known = kept.handle.get();
            if (known == lease) {
                say("renewed", "token", token, "deadline", until(known));
            }
        }

        @Override
        boolean beat(OwnConnection own, List<Kept> batch) {
            while (isStarved && batch.stream().anyMatch(kept -> kept.isRenewed(Clock.now()))) {
                try {
                    Thread.sleep(20);
                } catch (InterruptedException nobodyDoes) {
                    Thread.currentThread().interrupt();
                }
            }
            try {
                return super.beat(own, batch);
            } catch (Refused whole) {
                batch.forEach(kept -> kept.nextBeat = Clock.now() + kept.third);
                return true;
            }
        }

        @Override
        Long[] renew(OwnConnection own, List<Kept> batch, long limit, long lockLimit) throws SQLException {
            Connection work = connection;
            if (plant.equals("renew-in-work") && work != null) {
                Long[] tokens = new Long[batch.size()];
                for (int index = 0; index < tokens.length; index++) {
                    Kept kept = batch.get(index);
                    tokens[index] = Sql.value(work, "SELECT lease_renew(?, ?)", kept.names.get(0), kept.token);
                }
                return tokens;
            }
            try {
                Long[] tokens = super.renew(own, batch, limit, lockLimit);
                boolean isOneNull = Arrays.asList(tokens).contains(null);
                return plant.equals("one-null-loses-all") && isOneNull ? new Long[tokens.length] : tokens;
            } catch (SQLException error) {
                if (plant.equals("error-is-loss")) {
                    batch.forEach(kept -> lose(kept, Reason.DENIED, error));
                }
                if (plant.equals("one-lock-stops-all") && own.isOpen()) {
                    throw new Refused();
                }
                throw error;
            }
        }

        @Override
        void watch(Run run) {
            // Else the deadline is looked at by the heartbeat only.
            if (!plant.equals("hang-hides-loss")) {
                super.watch(run);
            }
        }
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
        void beginGuarding(Connection on) throws SQLException {
            Sql.value(on, "SELECT lease_guard(?, ?)", names().get(0), token());
        }

        @Override
        boolean mend() {
            return false;
        }
    }
}
