package pgfence;

import java.sql.BatchUpdateException;
import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.SQLException;
import java.sql.Statement;
import java.time.Duration;
import java.util.Optional;
import java.util.concurrent.TimeUnit;
import javax.sql.DataSource;
import pgfence.FenceException.*;

/** Leases, kinds of transactions, adopted leases. */
@SuppressWarnings("try")
final class LeaseTests extends Case {
    LeaseTests() throws SQLException {}

    public void aLostTryIsEmptyAndNoZero() throws Exception {
        try (Lease first = fence.lease("order:7").holder("it's me").metadata("{\"run\": 7}").acquire()) {
            equal(fence.lease("order:7").tryAcquire(), Optional.empty());
            thrown(LeaseTaken.class, () -> fence.lease("order:7").acquire());
            equal(value("SELECT holder || ' ' || metadata FROM lease_info('order:7')"), "it's me {\"run\": 7}");
            equal(first.isHeld(), true);
        }
    }

    public void aLongIsCastToWhatSetConfigTakes() throws Exception {
        String present = "SELECT set_config('pg_fence.token', ?%s, true)";
        try (PreparedStatement cast = admin.prepareStatement(String.format(present, "::bigint::text"));
                PreparedStatement plain = admin.prepareStatement(String.format(present, ""))) {
            cast.setLong(1, 34);
            cast.executeQuery().close();
            plain.setLong(1, 34);
            equal(thrown(SQLException.class, plain::executeQuery).getSQLState(), "42883");
        }
    }

    public void badInputIsRefused() throws Exception {
        thrown(IllegalArgumentException.class, () -> fence.lease("order:7").ttl(Duration.ZERO));
        SQLException error = thrown(SQLException.class, () -> fence.lease("").acquire());
        equal(error.getSQLState(), "22023");
        equal(FenceException.classify(error), Optional.empty());
    }

    public void severalAreAllThereOrNone() throws Exception {
        try (Lease one = lease("order:8")) {
            equal(fence.lease("order:7", "order:8").tryAcquire(), Optional.empty());
        }
        try (Lease both = lease("order:9", "order:7"); Connection on = DriverManager.getConnection(URL)) {
            both.guard(on).run(c -> run(c, "UPDATE orders SET status = 'paid'"));
            equal(both.renew().getAsLong() > both.token(), true);
        }
        equal(status(), "paid");
    }

    public void aDataSourceAndASchemaWill() throws Exception {
        DataSource source = source();
        String schema = value("SELECT extnamespace::regnamespace FROM pg_extension WHERE extname = 'pg_fence'");
        try (Lease lease = new Fence(source).inSchema(schema).lease("order:7").acquire(); Connection on = source.getConnection()) {
            lease.present(on).run(c -> run(c, "UPDATE orders SET status = 'paid'"));
        }
        equal(status(), "paid");
    }

    public void aTransactionEndsAsItsWorkDoes() throws Exception {
        try (Lease lease = lease("order:7"); Connection on = DriverManager.getConnection(URL)) {
            int count = lease.guard(on).call(c -> {
                run(c, "UPDATE orders SET status = 'paid'");
                return 42;
            });
            equal(count, 42);
            equal(status(), "paid");
            thrown(ArithmeticException.class, () -> lease.guard(on).run(c -> {
                run(c, "UPDATE orders SET status = 'undone'");
                throw new ArithmeticException();
            }));
            equal(status(), "paid");
            equal(on.getAutoCommit(), true);
        }
    }

    public void aFailureThatTheWorkSwallowsDoesNotLookLikeACommit() throws Exception {
        try (Lease lease = lease("order:7"); Connection on = DriverManager.getConnection(URL)) {
            thrown(SQLException.class, () -> lease.guard(on).run(c -> {
                run(c, "UPDATE orders SET status = 'undone'");
                thrown(SQLException.class, () -> run(c, "SELECT 1/0"));
            }));
            equal(status(), "new");
        }
    }

    public void anOpenTransactionIsLeftToTheCodeThatBeganIt() throws Exception {
        try (Lease lease = lease("order:7"); Connection on = DriverManager.getConnection(URL)) {
            on.setAutoCommit(false);
            lease.guard(on).run(c -> run(c, "UPDATE orders SET status = 'paid'"));
            equal(status(), "new");
            on.commit();
            equal(status(), "paid");
            equal(on.getAutoCommit(), false);
        }
    }

    public void errorsHaveTheirTypeTheirCauseAndTheirDetail() throws Exception {
        try (Lease lease = lease("other"); Connection on = DriverManager.getConnection(URL)) {
            NotSpeaking error = thrown(NotSpeaking.class,
                    () -> lease.guard(on).run(c -> run(c, "UPDATE orders SET status = 'late'")));
            equal(error.sqlState(), "PF004");
            equal(error.detail().get("lease"), "order:7");
            equal(error.detail().get("presented"), lease.token());
            equal(error.hint() != null, true);
            equal(((SQLException) error.getCause()).getSQLState(), "PF004");
            SQLException division = thrown(SQLException.class, () -> lease.guard(on).run(c -> run(c, "SELECT 1/0")));
            equal(division.getSQLState(), "22012");
        }
    }

    public void errorsAreFoundHoweverDeepTheyAreWrapped() throws Exception {
        try (Connection on = DriverManager.getConnection(URL); Statement statement = on.createStatement()) {
            statement.addBatch("UPDATE orders SET status = 'late'");
            BatchUpdateException batch = thrown(BatchUpdateException.class, statement::executeBatch);
            RuntimeException wrapped = new RuntimeException(new IllegalStateException(batch));
            equal(FenceException.classify(wrapped).orElseThrow().getClass(), NoToken.class);
        }
    }

    public void anotherConnectionThatBreaksIsTheWorksOwnBusiness() throws Exception {
        try (Lease lease = lease("order:7"); Connection on = DriverManager.getConnection(URL)) {
            SQLException elsewhere = new SQLException("elsewhere", "08006");
            equal(thrown(SQLException.class, () -> lease.guard(on).run(c -> {
                throw elsewhere;
            })), elsewhere);
            equal(FenceException.classify(elsewhere).orElseThrow().getClass(), TransactionLost.class);
        }
    }

    public void theLastWriteReleases() throws Exception {
        try (Lease lease = lease("order:7"); Connection on = DriverManager.getConnection(URL)) {
            lease.guard(on).releasing().run(c -> run(c, "UPDATE orders SET status = 'paid'"));
            equal(thrown(LeaseLost.class, lease::check).reason(), Reason.RELEASED);
            equal(fence.lease("order:7").tryAcquire().map(next -> {
                next.release();
                return "ours";
            }), Optional.of("ours"));
        }
        equal(status(), "paid");
    }

    public void aLossIsToldAtTheEndOfABlockAndReplacesNoError() throws Exception {
        LeaseLost[] told = new LeaseLost[1];
        LeaseLost loss = thrown(LeaseLost.class, () -> {
            try (Lease lease = fence.lease("order:7").ttl(LONG).onLost(one -> told[0] = one).acquire()) {
                value("SELECT lease_revoke('order:7')");
            }
        });
        equal(loss.reason(), Reason.GONE);
        equal(told[0].reason(), Reason.GONE);
        ArithmeticException error = thrown(ArithmeticException.class, () -> {
            try (Lease lease = lease("order:7")) {
                value("SELECT lease_revoke('order:7')");
                throw new ArithmeticException();
            }
        });
        equal(error.getSuppressed()[0].getClass(), LeaseLost.class);
    }

    public void sleepIsCutShortByALoss() throws Exception {
        LeaseLost loss = thrown(LeaseLost.class, () -> {
            try (Lease lease = fence.lease("order:7").ttl(Duration.ofSeconds(2)).acquire()) {
                value("SELECT lease_revoke('order:7')");
                lease.sleep(Duration.ofMinutes(5));
            }
        });
        equal(loss.names().get(0), "order:7");
    }

    public void anInterruptGivesUpWaitingAndLeavesNothingBehind() throws Exception {
        int threads = Thread.activeCount();
        try (Lease held = lease("order:7")) {
            Thread main = Thread.currentThread();
            Thread interrupts = started(() -> {
                Thread.sleep(300);
                main.interrupt();
            });
            thrown(InterruptedException.class, () -> fence.lease("order:7").waiting(LONG).acquire());
            interrupts.join();
            comesTrue(() -> value(WAITING).equals("0"));
            // The threads of that acquire end, too; those of the other lease are there.
            comesTrue(() -> Thread.activeCount() == threads + 2);
        }
    }

    private static final String PAY = "UPDATE orders SET status = 'paid' WHERE id = 10";
    private static final String SEND = "UPDATE orders SET status = 'sent' WHERE id = 10";

    /** An order whose lease somebody else grants. */
    private void withAdopted(Body body) throws Exception {
        add(10);
        body.run();
        forget();
    }

    /** As a failover to a standby that has missed the adoption does. */
    private void forget() throws SQLException {
        value("SELECT lease_revoke('order:10')");
        value("SELECT lease_forget('order:10')");
    }

    private AdoptRequest adopt(long token) {
        return fence.adopt("order:10", token);
    }

    private String order() throws SQLException {
        return value("SELECT status || ' ' || coalesce(fence, 0) FROM orders WHERE id = 10");
    }

    private static void nobodyComesHere(Connection on) {
        throw new AssertionError("it has begun");
    }

    public void anAdoptedLeasesNumberIsJudged() throws Exception {
        long number = 1L << 60;
        withAdopted(() -> {
            try (Connection on = DriverManager.getConnection(URL)) {
                Adopted first = adopt(number).holder("it's A").metadata("{\"run\": 7}").acquire();
                equal(value("SELECT holder || ' ' || metadata || ' ' || adopted FROM lease_info('order:10')"),
                        "it's A {\"run\": 7} true");
                first.guard(on).run(c -> run(c, PAY));
                first.present(on).run(c -> run(c, PAY));
                equal(order(), "paid " + number);
                try (Adopted second = adopt(number + 1).acquire()) {
                    thrown(NotSpeaking.class, () -> first.present(on).run(c -> run(c, SEND)));
                    // Refused once, it looks before it begins.
                    thrown(StaleToken.class, () -> first.present(on).run(LeaseTests::nobodyComesHere));
                    StaleToken stale = thrown(StaleToken.class, () -> first.guard(on).run(LeaseTests::nobodyComesHere));
                    equal(stale.detail().get("presented"), number);
                    thrown(StaleToken.class, () -> adopt(number).acquire());
                    second.guard(on).run(c -> run(c, SEND));
                }
                equal(thrown(LeaseLost.class, first::close).reason(), Reason.GONE);
                equal(order(), "sent " + (number + 1));
            }
        });
    }

    private static final String ADOPTING =
            "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query LIKE 'SELECT lease_adopt%'";

    public void anAdoptionIsEmptyWhileAnOlderNumberIsGuarded() throws Exception {
        int threads = Thread.activeCount();
        withAdopted(() -> {
            try (Connection on = DriverManager.getConnection(URL)) {
                Thread[] waits = new Thread[1];
                adopt(33).acquire().guard(on).run(c -> {
                    run(c, PAY);
                    equal(adopt(34).tryAcquire(), Optional.empty());
                    thrown(LeaseTaken.class, () -> adopt(34).acquire());
                    Thread main = Thread.currentThread();
                    Thread interrupts = started(() -> {
                        try {
                            comesTrue(() -> value(ADOPTING).equals("1"));
                        } finally {
                            main.interrupt();
                        }
                    });
                    thrown(InterruptedException.class, () -> adopt(35).waiting(LONG).acquire());
                    interrupts.join();
                    comesTrue(() -> value(ADOPTING).equals("0"));
                    waits[0] = started(() -> adopt(36).waiting(LONG).acquire().release());
                    comesTrue(() -> value(ADOPTING).equals("1"));
                });
                waits[0].join();
                equal(order(), "paid 33");
            }
        });
        comesTrue(() -> Thread.activeCount() == threads);
    }

    public void eachTransactionMakesAnAdoptedNumberKnown() throws Exception {
        withAdopted(() -> {
            for (int level : new int[] {Connection.TRANSACTION_READ_COMMITTED, Connection.TRANSACTION_REPEATABLE_READ}) {
                try (Connection on = DriverManager.getConnection(URL); Adopted adopted = adopt(33).acquire()) {
                    on.setTransactionIsolation(level);
                    for (Body silence : new Body[] {this::forget, () -> value("SELECT fence_new_epoch()")}) {
                        silence.run();
                        adopted.guard(on).run(c -> run(c, PAY));
                        silence.run();
                        thrown(NotSpeaking.class, () -> adopted.present(on).run(c -> run(c, PAY)));
                        adopted.present(on).run(c -> run(c, PAY));
                    }
                }
                forget();
            }
        });
    }

    public void anOlderNumberMayComeFirstAfterAFailover() throws Exception {
        withAdopted(() -> {
            try (Connection on = DriverManager.getConnection(URL); Connection other = DriverManager.getConnection(URL);
                    Adopted newer = adopt(34).acquire()) {
                forget();
                adopt(33).acquire().guard(on).run(c -> {
                    run(c, PAY);
                    thrown(LeaseTaken.class, () -> newer.guard(other).run(LeaseTests::nobodyComesHere));
                });
                newer.guard(other).run(c -> run(c, SEND));
                equal(order(), "sent 34");
            }
        });
    }

    public void anAdoptedLeaseThatWasReleasedIsOver() throws Exception {
        withAdopted(() -> {
            try (Connection on = DriverManager.getConnection(URL)) {
                Adopted adopted = adopt(33).acquire();
                adopted.guard(on).releasing().run(c -> run(c, PAY));
                LeaseLost over = thrown(LeaseLost.class, () -> adopted.guard(on).run(LeaseTests::nobodyComesHere));
                equal(over.reason(), Reason.RELEASED);
                adopted.release();
                thrown(StaleToken.class, () -> adopt(33).acquire());
                equal(order(), "paid 33");
            }
        });
    }

    public void aNameIsGrantedHereOrAdopted() throws Exception {
        try (Lease lease = lease("order:7")) {
            SQLException error = thrown(SQLException.class, () -> fence.adopt("order:7", 33).acquire());
            equal(error.getSQLState(), "55000");
        }
    }

    public void anInterruptThatCameBeforeLeavesNothingBehind() throws Exception {
        int threads = Thread.activeCount();
        Thread.currentThread().interrupt();
        thrown(InterruptedException.class, () -> lease("order:7"));
        comesTrue(() -> Thread.activeCount() == threads);
    }

    public void aGrantThatComesWhileItsWaitIsGivenUpIsGivenBack() throws Exception {
        int threads = Thread.activeCount();
        for (int round = 0; round < 40; round++) {
            Lease first = lease("order:7");
            Thread waits = started(() -> {
                try {
                    fence.lease("order:7").ttl(LONG).waiting(LONG).acquire().release();
                } catch (InterruptedException givenUp) {
                    // As it should be, or it was granted before.
                }
            });
            comesTrue(() -> value(WAITING).equals("1"));
            Thread releases = started(first::release);
            // Before, during and after the hand-over.
            TimeUnit.MICROSECONDS.sleep(100 * round);
            waits.interrupt();
            waits.join();
            releases.join();
            comesTrue(() -> Thread.activeCount() == threads);
            equal(value("SELECT count(*) FROM lease_info('order:7') WHERE state = 'held'"), "0");
        }
    }

    public void theLongestTtlCanBeRenewed() throws Exception {
        // A third of both is more milliseconds than an int holds; of the first it is less than nothing where it overflows.
        for (int days : new int[] {100, 366}) {
            try (Lease lease = fence.lease("order:7").ttl(Duration.ofDays(days)).acquire()) {
                equal(lease.renew().isPresent(), true);
            }
        }
    }

    public void leadingEndsWithItsWork() throws Exception {
        equal(fence.lead("chief", LONG, lease -> 7), 7);
        thrown(ArithmeticException.class, () -> fence.lead("chief", LONG, lease -> {
            throw new ArithmeticException();
        }));
        int[] terms = {0};
        equal(fence.lead("chief", Duration.ofSeconds(2), lease -> {
            if (terms[0]++ == 0) {
                value("SELECT lease_revoke('chief')");
                lease.sleep(LONG);
            }
            return "led again";
        }), "led again");
    }
}
