package pgfence;

import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.sql.Statement;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Properties;
import javax.sql.DataSource;
import org.postgresql.ds.PGSimpleDataSource;
import pgfence.FenceException.*;

/** The verbs beside acquire, guard and present. */
@SuppressWarnings("try")
final class VerbTests extends Case {
    private static final String PAY = "UPDATE orders SET status = 'paid' WHERE id = 7";

    VerbTests() throws SQLException {}

    public void allLeasesHaveOneConnectionAndTwoThreads() throws Exception {
        Properties named = new Properties();
        named.setProperty("ApplicationName", "crowd");
        Fence crowd = new Fence(URL, named);
        String sessions = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'crowd'";
        int threads = Thread.activeCount();
        List<Lease> leases = new ArrayList<>();
        for (int number = 0; number < 100; number++) {
            leases.add(crowd.lease("crowd:" + number).ttl(LONG).acquire());
        }
        equal(value(sessions), "1");
        equal(Thread.activeCount(), threads + 2);
        for (Lease lease : leases) {
            equal(lease.renew().getAsLong() > lease.token(), true);
        }
        leases.forEach(Lease::close);
        comesTrue(() -> value(sessions).equals("0"));
    }

    public void aLeaseIsHandedOver() throws Exception {
        Lease first = lease("order:7");
        // A renewal's token serves for 16 more renewals only: what is kept is the grant's first.
        long token = first.renew().getAsLong();
        long acquired = first.token();
        equal(first.detach(), acquired);
        equal(first.isHeld(), false);
        thrown(LeaseLost.class, first::check);
        first.close();
        equal(value(HELD), "1");
        try (Lease second = fence.resume("order:7", token, LONG); Connection on = DriverManager.getConnection(URL)) {
            equal(second.token(), acquired);
            second.guard(on).run(c -> run(c, PAY));
        }
        equal(status(), "paid");
        LeaseLost over = thrown(LeaseLost.class, () -> fence.resume("order:7", token, LONG));
        equal(over.reason(), Reason.GONE);
        try (Lease session = fence.lease("order:7").session().acquire()) {
            thrown(IllegalStateException.class, session::detach);
        }
    }

    public void severalNamesAreHandedOverAsOne() throws Exception {
        Lease both = lease("order:7", "order:8");
        long token = both.detach();
        try (Lease second = fence.lease("order:7", "order:8").ttl(LONG).resume(token)) {
            equal(second.renew().getAsLong() > token, true);
        }
    }

    public void theFirstFreeRowsAreClaimed() throws Exception {
        run(admin, "CREATE TEMP TABLE jobs AS SELECT id, 'do ' || id AS task FROM generate_series(1, 9) AS id");
        run(admin, "CREATE TABLE IF NOT EXISTS public.jobs (id int, task text)");
        run(admin, "INSERT INTO public.jobs SELECT id, 'do ' || id FROM generate_series(1, 9) AS id");
        String query = "SELECT 'job:' || id, id, task FROM public.jobs WHERE id > ? ORDER BY id DESC";
        try (Lease taken = lease("job:8")) {
            List<Lease> claimed = fence.claim(query, 3).ttl(LONG).metadata("{\"run\": 7}").acquire(4);
            equal(claimed.stream().map(one -> one.names().get(0)).toList(), List.of("job:9", "job:7", "job:6", "job:5"));
            equal(claimed.get(1).row(), Map.of("id", 7, "task", "do 7"));
            // None beyond them was taken.
            equal(value("SELECT count(*) FROM lease_info('job:4') WHERE state <> 'free'"), "0");
            equal(claimed.get(0).renew().isPresent(), true);
            List<Lease> rest = fence.claim(query, 3).ttl(LONG).acquire(4);
            equal(rest.stream().map(one -> one.names().get(0)).toList(), List.of("job:4"));
            equal(fence.claim(query, 3).acquire(4), List.of());
            claimed.forEach(Lease::close);
            rest.forEach(Lease::close);
        } finally {
            run(admin, "DROP TABLE public.jobs; DROP TABLE jobs");
        }
        equal(thrown(SQLException.class, () -> fence.claim("SELEC").acquire(1)).getSQLState(), "42601");
        thrown(IllegalArgumentException.class, () -> fence.claim("SELECT 'a'").acquire(0));
    }

    public void aClaimThatIsInterruptedLeavesNothing() throws Exception {
        String query = "SELECT 'late:' || id FROM generate_series(1, 3) AS id WHERE pg_advisory_xact_lock(7)::text = ''";
        String waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted";
        value("SELECT pg_advisory_lock(7)");
        Thread claims = started(() -> thrown(InterruptedException.class, () -> fence.claim(query).ttl(LONG).acquire(3)));
        comesTrue(() -> value(waiting).equals("1"));
        claims.interrupt();
        claims.join();
        value("SELECT pg_advisory_unlock(7)");
        comesTrue(() -> value("SELECT count(*) FROM lease_info('late:3') WHERE state = 'free'").equals("1"));
        comesTrue(() -> value(HELD).equals("0"));
    }

    public void whoLeadsIsToldAtEachChange() throws Exception {
        List<Optional<Long>> told = Collections.synchronizedList(new ArrayList<>());
        long first;
        try (Observation looks = fence.observe("chief", leader -> told.add(leader.map(Leader::token)))) {
            comesTrue(() -> told.size() == 1);
            try (Lease chief = fence.lease("chief").holder("me").acquire()) {
                first = chief.token();
                comesTrue(() -> told.size() == 2);
                chief.renew();
            }
            comesTrue(() -> told.size() == 3);
        }
        equal(told, List.of(Optional.empty(), Optional.of(first), Optional.empty()));
    }

    public void stopEndsTheWaitAndTheWork() throws Exception {
        List<Optional<Long>> told = Collections.synchronizedList(new ArrayList<>());
        Leadership waits = fence.leadership("chief").ttl(LONG).onLeader(leader -> told.add(leader.map(Leader::token)));
        Leadership leads = fence.leadership("chief").ttl(LONG);
        Lease[] chief = {null};
        Thread leading = started(() -> equal(leads.run(lease -> {
            chief[0] = lease;
            while (true) {
                lease.sleep(LONG);
            }
        }), null));
        comesTrue(() -> chief[0] != null);
        Thread waiting = started(() -> equal(waits.run(lease -> "never"), null));
        comesTrue(() -> value(WAITING).equals("1") && told.contains(Optional.of(chief[0].token())));
        waits.stop();
        waiting.join();
        comesTrue(() -> value(WAITING).equals("0"));
        equal(chief[0].isHeld(), true);
        leads.stop();
        leading.join();
        equal(value(HELD), "0");
        // It stays so.
        equal(leads.run(lease -> "never"), null);
    }

    public void aLeaseIsHeldAtMost() throws Exception {
        Lease lease = fence.lease("order:7").ttl(Duration.ofSeconds(2)).holdAtMost(Duration.ofSeconds(1)).acquire();
        equal(thrown(LeaseLost.class, () -> lease.sleep(LONG)).reason(), Reason.DEADLINE);
    }

    public void aLeaseIsHeldAtLeast() throws Exception {
        Duration least = Duration.ofSeconds(3);
        try (Connection on = DriverManager.getConnection(URL)) {
            List<Body> ends = new ArrayList<>();
            ends.add(() -> fence.lease("order:7").ttl(LONG).holdAtLeast(least).acquire().release());
            ends.add(() -> fence.lease("order:7").ttl(LONG).holdAtLeast(least).acquire().guard(on).releasing()
                    .run(c -> run(c, PAY)));
            for (Body end : ends) {
                end.run();
                equal(fence.lease("order:7").tryAcquire().isPresent(), false);
                equal(value("SELECT remaining < '4 s' FROM lease_info('order:7')"), "t");
                comesTrue(() -> value(HELD).equals("0"));
            }
        }
        thrown(IllegalArgumentException.class, () -> fence.lease("order:7").session().holdAtLeast(least).acquire());
    }

    public void oneTransactionIsUnderSeveralLeases() throws Exception {
        add(8);
        try (Lease one = lease("order:7"); Lease other = lease("order:8"); Lease more = lease("order:9", "a");
                Connection on = DriverManager.getConnection(URL)) {
            fence.guard(on, other, more, one).run(c -> {
                run(c, "UPDATE orders SET status = 'paid'");
                equal(value("SELECT count(*) FROM fence.leases WHERE blocking_pids <> '{}'"), "4");
            });
            equal(value("SELECT count(*) FROM orders WHERE status = 'paid'"), "2");
            thrown(ArithmeticException.class, () -> fence.guard(on, List.of(one, other)).run(c -> {
                run(c, "UPDATE orders SET status = 'undone'");
                throw new ArithmeticException();
            }));
            value("SELECT lease_revoke('order:8')");
            thrown(LeaseLost.class, () -> fence.guard(on, one, other).run(c -> {
                throw new AssertionError("it has begun");
            }));
            equal(value("SELECT count(*) FROM orders WHERE status = 'paid'"), "2");
            // That connection was broken off.
            fence.guard(admin, one, more).releasing().run(c -> run(c, PAY));
            equal(value(HELD), "0");
        } catch (LeaseLost lost) {
            equal(lost.names(), List.of("order:8"));
        }
        thrown(IllegalArgumentException.class, () -> fence.guard(admin));
    }

    /** Code that knows nothing of fences. */
    private static void pays(DataSource source) throws SQLException {
        try (Connection on = source.getConnection()) {
            try (PreparedStatement pay = on.prepareStatement("UPDATE orders SET status = ? WHERE id = 7")) {
                equal(pay.getConnection(), on);
                pay.setString(1, "paid alone");
                equal(pay.executeUpdate(), 1);
                on.setAutoCommit(false);
                on.setSavepoint();
                pay.setString(1, "undone");
                pay.executeUpdate();
                on.rollback();
                pay.setString(1, "paid");
                pay.addBatch();
                pay.executeBatch();
                on.commit();
                on.setAutoCommit(true);
            }
            try (Statement many = on.createStatement()) {
                many.setFetchSize(1);
                ResultSet rows = many.executeQuery("SELECT generate_series(1, 3)");
                equal(rows.next() && rows.next() && rows.next() && !rows.next(), true);
            }
        }
    }

    public void aDataSourceFencesCodeThatKnowsNothing() throws Exception {
        Lease lease = lease("order:7");
        pays(lease.presenting(source()));
        equal(value("SELECT status || (fence = " + lease.token() + ") FROM orders"), "paidtrue");
        // Each transaction by itself: nothing stays with the session.
        try (Connection on = DriverManager.getConnection(URL)) {
            Connection presents = lease.presenting(alwaysThis(on)).getConnection();
            run(presents, PAY);
            equal(value(on, "SELECT current_setting('pg_fence.token', true)"), "");
            equal(thrown(SQLException.class, () -> run(on, PAY)).getSQLState(), "PF002");
            value("SELECT lease_revoke('order:7')");
            equal(thrown(SQLException.class, () -> run(presents, PAY)).getSQLState(), "PF004");
        }
        thrown(LeaseLost.class, lease::renew);
    }

    private static DataSource alwaysThis(Connection connection) {
        return new PGSimpleDataSource() {
            @Override
            public Connection getConnection() {
                return connection;
            }
        };
    }

    public void aLostLeasesConnectionsAreBrokenOff() throws Exception {
        Lease lease = lease("order:7");
        DataSource presenting = lease.presenting(source());
        try (Connection on = presenting.getConnection()) {
            value("SELECT lease_revoke('order:7')");
            thrown(LeaseLost.class, lease::renew);
            thrown(LeaseLost.class, () -> run(on, PAY));
            comesTrue(on::isClosed);
            thrown(LeaseLost.class, presenting::getConnection);
        }
    }

    public void optionsPresentTheToken() throws Exception {
        try (Lease lease = lease("order:7")) {
            Properties properties = new Properties();
            properties.setProperty("options", lease.options());
            try (Connection on = DriverManager.getConnection(URL, properties)) {
                run(on, PAY);
            }
            equal(value("SELECT fence FROM orders"), Long.toString(lease.token()));
            equal(lease.options(), Fence.options(lease.token()));
        }
        equal(status(), "paid");
    }

    public void tracesAndCountersAreTold() throws Exception {
        List<String> told = Collections.synchronizedList(new ArrayList<>());
        Fence traced = fence.telemetry(new Telemetry() {
            @Override
            public Span begin(String verb, List<String> names) {
                return error -> told.add(verb + " " + names + (error == null ? "" : " " + error.getClass().getSimpleName()));
            }

            @Override
            public void lost(LeaseLost loss) {
                told.add("lost " + loss.reason());
            }

            @Override
            public void refused(FenceException refusal) {
                told.add("refused " + refusal.sqlState());
            }
        });
        try (Connection on = DriverManager.getConnection(URL)) {
            Lease lease = traced.lease("other").acquire();
            thrown(NotSpeaking.class, () -> lease.present(on).run(c -> run(c, PAY)));
            value("SELECT lease_revoke('other')");
            thrown(LeaseLost.class, lease::renew);
            thrown(LeaseLost.class, () -> lease.guard(on).run(c -> {}));
        }
        // By a thread of its own.
        comesTrue(() -> told.contains("lost gone"));
        told.remove("lost gone");
        equal(told, List.of("acquire [other]", "refused PF004", "present [other] NotSpeaking", "guard [other] LeaseLost"));
    }
}
